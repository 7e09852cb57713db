"""The same tokens at offsets that do not fit into 32 bits: high page ids, wide strides. The same results.

No result can tell where pages lie if the addresses are right. That caches are large is what production has and tests
do not; here they are sparse (`attnfuzz.memory.far`). With other page ids the bits are the same. Other strides may mean
another program: a compiler takes a stride of 1 for a constant, and may fuse other products into sums where it does not.
So with wide strides results are held to their error bounds.

A kernel that takes a tensor for contiguous is wrong with wide strides too, though none of its indices be narrow. So
what is wrong is tried with gaps as small as they can be: if it is wrong with those, the stride is ignored. That is no
bug where the kernel declares to get no such gaps; where a case may have them itself, between entries of the outermost
dimension, other oracles tell; else it is a failure of its own kind. On a GPU, where an access astray costs the process,
the small gaps go first.

Up to four runs. In the first, offsets start past 2^32 elements and page ids past 2^16: one that is cut short points to
decoys. In the second they lie just past 2^31 elements, for what goes wrong only there, a switch to wide offsets at the
wrong size among them. In the others, the tokens of a page or the heads of a cache are as far apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.memory.far import CACHES, MOST_ROWS, MOST_ROWS_ON_GPU, gapped_strides
from attnfuzz.oracles.comparison import Comparison
from attnfuzz.oracles.elements import blame_of, extent, first_index
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.observation import KernelRaised, Observation
from attnfuzz.oracles.relations.far_run import Far, run_far
from attnfuzz.oracles.relations.page_limits import (
    far_pages,
    limits_of,
    page_strides,
    pages_to_same_alignment,
)
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.stretching import stretched_axes, stretched_cache_axes
from attnfuzz.oracles.relations.transformed import Results, as_it_is, unequal_bits, where_bits_differ
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import NARROW_OFFSETS, Failure, OracleName
from attnfuzz.oracles.words import element, number, ratio
from attnfuzz.problems.block_table import num_blocks, used_blocks
from attnfuzz.problems.cases import AttentionCase, Case, PagedDecodeCase
from attnfuzz.problems.choices import lying_alike, permits_gap
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.shapes import ITEMSIZE, tensor_specs

__all__ = ["PAGE_RELOCATION"]

_NAME: OracleName = "page_relocation"

_MOST_NBYTES = 4 << 20
"""Of a case: decoys take several times as much again."""

_RUNS = 2
_KIND = "page ids"
"""Whatever the limit: where two of them are reached with the same page, which it is cannot be told."""

_USE_STRIDE = "compute offsets with the strides of the tensor: its shape does not tell them"
_WIDER_OFFSETS = "convert an index to 64 bits before it is multiplied with a stride (`.to(tl.int64)`, `int64_t`)"
_WIDER_IDS = "read page ids as 32 bits, and compute offsets from them in 64"


def _applies(declaration: Declaration, case: Case) -> bool:
    return tensor_nbytes(case) <= _MOST_NBYTES and any(True for _ in _placements(declaration, case))


def _weight(declaration: Declaration, case: Case) -> int:
    """A narrow index shows nowhere else, and only where its dimension has three indices.

    For that of a sequence that is one case in three, in which batch_invariance is drawn as well.
    """
    del declaration
    return 6 if isinstance(case, AttentionCase) and case.num_seqs > 2 else 3


def _check(trial: Trial) -> Failure | None:
    most_rows = MOST_ROWS if trial.device == "cpu" else MOST_ROWS_ON_GPU
    for far in _placements(trial.kernel.declaration, trial.case, most_rows):
        if trial.device == "cpu" and _is_right(trial, far):
            continue
        if far.first_page and not _heeds_page_strides(trial):
            far = Far(stretched=far.stretched)
        ignored = _ignored(trial, far)
        if failure := _told_of_ignored(trial, ignored):
            return None if _comes_and_goes(trial) else failure
        heeded = {name: axis for name, axis in far.stretched.items() if name not in ignored}
        far = Far(far.first_page, heeded)
        seen = _wrong(trial, far) if far.first_page or heeded else None
        if seen is not None:
            return None if _comes_and_goes(trial) else _explained(trial, far, seen)
    return None


def _heeds_page_strides(trial: Trial) -> bool:
    """Whether pages with a gap between them can move a little; if not, shuffled ones show it."""
    case = trial.case
    if not isinstance(case, PagedDecodeCase) or not any(name in case.strides for name in CACHES):
        return True
    return _is_right(trial, Far(pages_to_same_alignment(case)))


def _ignored(trial: Trial, far: Far) -> dict[str, int]:
    """Stretched tensors with the outermost dimension whose stride the kernel ignores, or refuses to be any other.

    If none is wrong alone, but all of them are together, they are all of these.
    """
    if not far.stretched or _is_right(trial, Far(stretched=far.stretched, near=True)):
        return {}
    found = {}
    for name, innermost in far.stretched.items():
        shape = tensor_specs(trial.case)[name].shape
        axes = (axis for axis in range(innermost + 1) if shape[axis] > 1)
        wrong = (axis for axis in axes if not _heeds(trial, far, name, axis, near=True))
        if (axis := next(wrong, None)) is not None:
            found[name] = axis
    return found or dict(far.stretched)


def _told_of_ignored(trial: Trial, ignored: Mapping[str, int]) -> Failure | None:
    """Of the first that the kernel declares to heed and no case shows; raises what the kernel raised."""
    allowed = trial.kernel.declaration.supports.strides
    for name, axis in ignored.items():
        shape, dtype = tensor_specs(trial.case)[name][:2]
        if axis == 0 or not permits_gap(allowed, name, axis, len(shape)):
            continue
        near = Far(stretched={name: axis}, near=True)
        if (seen := _wrong(trial, near)) is not None:
            gapped = gapped_strides(shape, axis, ITEMSIZE[dtype])[axis]
            words = f"with {name}.stride({axis}) = {gapped} instead of {math.prod(shape[axis + 1 :])}"
            return _failure(
                trial, near, seen, f"ignored stride of {name}", words, _USE_STRIDE, cause="ignored_stride", tensor=name
            )
    return None


def _heeds(trial: Trial, far: Far, name: str, axis: int, *, near: bool = False) -> bool:
    """Whether the kernel is right with that one stride, or where what must lie alike does."""
    alone, alike = {name: axis}, _alike(trial, far, name, axis)
    return _is_right(trial, Far(stretched=alone, near=near)) or (
        alike != alone and _is_right(trial, Far(stretched=alike, near=near))
    )


def _alike(trial: Trial, far: Far, name: str, axis: int) -> dict[str, int]:
    names = lying_alike(trial.kernel.declaration.supports.strides, name)
    return {other: axis for other in names if other in far.stretched}


def _is_right(trial: Trial, far: Far) -> bool:
    """Whether the kernel takes such inputs, and gives the same results."""
    try:
        seen = run_far(trial, far)
    except KernelRaised as raised:
        if raised.fatal or not raised.is_a(Exception) or context_lost(raised.error) is not None:
            raise
        return False
    return seen is not None and not _differs(trial, far, seen)


def _placements(declaration: Declaration, case: Case, most_rows: int = MOST_ROWS) -> Iterator[Far]:
    pages = far_pages(case) if isinstance(case, PagedDecodeCase) and used_blocks(case) else []
    for turn in range(_RUNS):
        far = Far(pages[turn] if turn < len(pages) else 0, stretched_axes(declaration, case, turn, most_rows=most_rows))
        if far.first_page or far.stretched:
            yield far
    for turn in range(_RUNS):
        if axes := stretched_cache_axes(declaration, case, turn, most_rows=most_rows):
            yield Far(stretched=axes)


def _wrong(trial: Trial, far: Far) -> Observation | None:
    """The run if it gives other bits; with other strides, or of a kernel that promises no bits, other numbers."""
    seen = run_far(trial, far)
    return seen if seen is not None and _differs(trial, far, seen) else None


def _differs(trial: Trial, far: Far, seen: Observation) -> bool:
    masks = where_bits_differ(as_it_is(trial), _on_host(seen.results))
    differs = any(bool(mask.any()) for mask in masks.values())
    if differs and not _same_bits(trial, far):
        differs = _first_beyond_bound(trial, seen) is not None
    return differs


def _same_bits(trial: Trial, far: Far) -> bool:
    return trial.kernel.declaration.supports.deterministic and not far.stretched


def _first_beyond_bound(trial: Trial, seen: Observation) -> tuple[Comparison, Comparison] | None:
    """A result of the first run, and of `seen`, where that is beyond its bound."""
    pairs = zip(trial.comparison, trial.compare(seen), strict=True)
    return next((pair for pair in pairs if bool((pair[1].ratio > 1).any())), None)


def _comes_and_goes(trial: Trial) -> bool:
    """Whether bits differ without any relocation too, which is for others to tell."""
    promised = trial.kernel.declaration.supports.deterministic
    return promised and bool(trial.disagree(trial.first, trial.repeated))


def _explained(trial: Trial, far: Far, seen: Observation) -> Failure | None:
    if far.first_page and (not far.stretched or _wrong(trial, Far(far.first_page)) is not None):
        return _explained_by_pages(trial, far, seen)
    for name, innermost in far.stretched.items():
        shape = tensor_specs(trial.case)[name].shape
        for axis in range(innermost + 1):  # strides around a wide one are wider still
            if shape[axis] == 1 or _heeds(trial, far, name, axis):
                continue
            alone = Far(stretched={name: axis})
            try:
                wrong = _wrong(trial, alone)
            except KernelRaised:
                alone = Far(stretched=_alike(trial, far, name, axis))
                wrong = _wrong(trial, alone)
            if wrong is not None:
                words = f"with {name}.stride({axis}) enlarged until offsets exceed 2^31 elements"
                is_last = axis == len(shape) - 1
                found = _failure(
                    trial,
                    alone,
                    wrong,
                    f"strides of {name}",
                    words,
                    _WIDER_OFFSETS,
                    cause=NARROW_OFFSETS,
                    tensor=name,
                )
                remedy = {"strides": "last_contiguous"} if is_last else {}
                return found and msgspec.structs.replace(found, remedy=remedy)
    words = f"with strides of {', '.join(far.stretched)} enlarged until offsets exceed 2^31 elements"
    return _failure(trial, far, seen, "strides", words, _WIDER_OFFSETS, cause=NARROW_OFFSETS)


def _explained_by_pages(trial: Trial, far: Far, seen: Observation) -> Failure | None:
    case = trial.case
    if not isinstance(case, PagedDecodeCase):
        raise TypeError(f"a case of {case.problem} has no pages")
    step, count = pages_to_same_alignment(case), num_blocks(case)
    right_up_to = count - 1
    for limit in (limit for limit in limits_of(case) if limit.page <= far.first_page):
        first = -(-limit.page // step) * step
        above = _wrong(trial, Far(first))
        if above is None:
            right_up_to = first + count - 1
            continue
        below = (limit.page - 1 - count) // step * step  # of which no page reaches the limit with its last token
        if below <= 0 or _wrong(trial, Far(below)) is None:
            words = f"with page ids from {first} on, past {limit.words}"
            is_of_ids = "ids" in limit.units
            cause = "" if is_of_ids and len(limit.units) > 1 else "narrow_page_ids" if is_of_ids else NARROW_OFFSETS
            remedy = _WIDER_IDS if is_of_ids else _WIDER_OFFSETS
            found = _failure(trial, Far(first), above, _KIND, words, *_begins(case, first), remedy, cause=cause)
            return found and msgspec.structs.replace(found, maybe=() if cause else (NARROW_OFFSETS,))
        seen, far = above, Far(first)
        break
    words = f"with page ids from {far.first_page} on; with page ids up to {right_up_to} the result is right"
    found = _failure(trial, far, seen, _KIND, words, *_begins(case, far.first_page), _WIDER_IDS)
    return found and msgspec.structs.replace(found, maybe=(NARROW_OFFSETS,))


def _begins(case: PagedDecodeCase, page: int) -> Iterator[str]:
    for name, stride in page_strides(case).items():
        offset = page * stride
        yield f"page {page} begins {offset} elements into {name}, {offset * ITEMSIZE[case.kv_dtype]} bytes"


def _on_host(results: Results) -> Results:
    return {name: result.cpu() for name, result in results.items()}


def _failure(
    trial: Trial, far: Far, seen: Observation, kind: str, words: str, *details: str, cause: str = "", tensor: str = ""
) -> Failure | None:
    if _same_bits(trial, far):
        found = unequal_bits(_NAME, trial.case, as_it_is(trial), _on_host(seen.results), words, details=details)
        return found and msgspec.structs.replace(found, kind=kind, cause=cause, tensor=tensor)
    pair = _first_beyond_bound(trial, seen)
    if pair is None:
        return None
    after = pair[1]
    mask = after.ratio > 1
    index, worst = first_index(mask), float(after.ratio[first_index(mask)])
    one, other = (number(float(part.got[index])) for part in pair)
    return Failure(
        oracle=_NAME,
        kind=kind,
        message=(
            f"{element(after.name, after.axes, index)} is {one} originally, but {other} {words}: "
            f"{ratio(worst)} times the error bound"
        ),
        details=(f"it changes {extent(after.name, after.axes, mask)}", *details),
        error_ratio=worst,
        tensor=tensor or after.name,
        cause=cause,
        blame=blame_of(trial.case, after.axes, index),
    )


PAGE_RELOCATION = Relation(
    _NAME,
    _applies,
    _check,
    weight=_weight,
    costly_on=("cuda",),
)
