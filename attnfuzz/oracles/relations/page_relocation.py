"""Moves tokens to offsets that do not fit into 32 bits, by high page ids and wide strides, and compares results.

No result can tell where pages lie if the addresses are right. That caches are large is what production has and tests do
not; here they are sparse (`attnfuzz.memory.far`). With other page ids the bits are the same. Other strides may mean
another program: a compiler takes a stride of 1 for a constant, and may fuse other products into sums where it does not.
So with wide strides results are held to their error bounds.

Which tensors get a wide stride, and along which dimension: a dimension is stretched where a kernel takes any strides,
or where a real tensor has that many entries: pages of a cache, tokens of q and of results, sequences and tokens of a
dense K and V.

A kernel that takes a tensor for contiguous is wrong with wide strides too, though none of its indices be narrow. So
what is wrong is tried with gaps as small as they can be: if it is wrong with those, the stride is ignored. That is no
bug where the kernel declares to get no such gaps; where a case may have them itself, between entries of the outermost
dimension, other oracles tell; else it is a failure of its own kind. On a GPU, where an access astray costs the process,
the small gaps go first.

The tables of a mask lie one behind the other in one tensor, so that those of the last sequences of a large batch have
large offsets though there is no stride. `mask_indptr` holds 32 bits: the last table begins at the largest offset that
fits, and all else in it lies past 2^31 elements. A kernel that is wrong with tables a few entries further on too has no
narrow index, and is left alone: it knows without `mask_indptr` where they lie, or reads there where the last one ends,
which does not fit.

A user's problem says which of its tensors are parts of larger ones, whose entries a tensor of integers names
(`TensorSpec.named_by`). There as well all entries begin far away, and what names them is moved along. Such a kernel is
left alone if it is wrong with entries that begin a few further on: the problem may not have told all that names them.

Up to five runs. In the first, offsets start past 2^32 elements and page ids past 2^16: one that is cut short points to
decoys. In the second they lie just past 2^31 elements, for what goes wrong only there, a switch to wide offsets at the
wrong size among them. In two others, the tokens of a page or the heads of a cache are as far apart. In the last, the
mask is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.inputs.layouts import with_both_caches
from attnfuzz.inputs.registry import problem_of
from attnfuzz.isolation.memory_faults import installed
from attnfuzz.memory.address_space import MOST_BYTES, SparseUnavailable, at_most_more
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.far import CACHES, FAR, MOST_ROWS, MOST_ROWS_ON_GPU, FarAllocator, gapped_strides, stretched_nbytes
from attnfuzz.memory.sparse import sparse_memory
from attnfuzz.mistake import NARROW_OFFSETS
from attnfuzz.oracles import registry
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.relations.call_sequence import LEFT_OVER, REASONS
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.oracles.relations.relation import (
    NothingRunError,
    NotInThisProcessError,
    Relation,
    as_it_is,
    on_host,
    unequal_bits,
    where_bits_differ,
)
from attnfuzz.problems.block_table import num_blocks, used_blocks
from attnfuzz.problems.cases import Case, MaskedAttentionCase, PagedDecodeCase
from attnfuzz.problems.choices import lies_as_served, lying_alike, permits_gap, strided_tensors_of
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.masks import table_starts
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.shapes import ITEMSIZE, TensorSpec, named_in_strides, strided_layout, strides_of, tensor_specs
from attnfuzz.problems.supports import Layout
from attnfuzz.problems.wording import element, number, ratio
from attnfuzz.trials.comparison import Comparison, blame_of, extent, first_index
from attnfuzz.trials.observation import KernelRaised, Observation, build_through_host, call
from attnfuzz.trials.trial import Trial
from attnfuzz.untrusted_text import text_of
from attnfuzz.verdict import Cause, Failure

Unit = Literal["elements", "bytes", "ids"]

_HALF = FAR >> 1
_SHORT_IDS = 1 << 16
_MOST_IDS = 1 << 31
_ALIGNMENT = 64
"""Bytes: libraries for CPUs may add in another order where the alignment of an operand differs."""
_NEAR_ENTRY = 64
"""Entry at which a mask's first table begins in a run that merely has it elsewhere."""


class Overflow(NamedTuple):
    """From ``page`` on, ids or offsets pass ``words``; ``units`` says which of them."""

    page: int
    words: str
    units: frozenset[Unit]


def page_strides(case: PagedDecodeCase) -> dict[str, int]:
    """By cache, elements from one page to the next."""
    specs = tensor_specs(case)
    return {
        name: strided_layout(specs[name].shape, strides_of(case, name), ITEMSIZE[case.kv_dtype]).strides[0]
        for name in CACHES
        if name in specs
    }


def pages_to_same_alignment(case: PagedDecodeCase) -> int:
    """So many pages further, all caches are aligned as before."""
    steps = [stride * ITEMSIZE[case.kv_dtype] for stride in page_strides(case).values()]
    return math.lcm(*(_ALIGNMENT // math.gcd(_ALIGNMENT, step) for step in steps))


def far_pages(case: PagedDecodeCase) -> list[int]:
    """First page ids to be tried: past 2^32 elements and 2^16 ids, and just past 2^31 elements."""
    strides, step = page_strides(case).values(), pages_to_same_alignment(case)
    least = max(-(-FAR // min(strides)), _SHORT_IDS)
    # Right after a multiple of 2^32, so that what wraps comes out at the beginning of the cache and not below it.
    multiple = -(-least * max(strides) // FAR) * FAR
    wanted = (-(-multiple // max(strides)), -(-_HALF // min(strides)))
    found = (-(-first // step) * step for first in wanted)
    return [first for first in found if first + num_blocks(case) < _MOST_IDS]


class Table(NamedTuple):
    """The last table of a mask that has any entries: of which sequence, and where in the mask it begins and ends."""

    seq: int
    start: int
    end: int


def far_table(case: Case) -> Table | None:
    """The table of which entries can lie past 2^31, though it begins before; None if it has a single one."""
    if not isinstance(case, MaskedAttentionCase):
        return None
    starts = table_starts(case.query_counts, case.seq_lens)
    seq = max((seq for seq in range(case.num_seqs) if starts[seq] < starts[seq + 1]), default=0)
    found = Table(seq, starts[seq], starts[seq + 1])
    return found if found.end - found.start > 1 else None


def limits_of(case: PagedDecodeCase) -> list[Overflow]:
    """In ascending order; what is reached with the same page is one limit."""
    reached: dict[int, list[tuple[str, Unit]]] = {}
    for page, words, unit in _limits(case):
        reached.setdefault(page, []).append((words, unit))
    return [
        Overflow(page, " and ".join(dict.fromkeys(words for words, _ in both)), frozenset(unit for _, unit in both))
        for page, both in sorted(reached.items())
    ]


def _limits(case: PagedDecodeCase) -> Iterator[tuple[int, str, Unit]]:
    strides = page_strides(case)
    for power in (31, 32):
        for name, stride in strides.items():
            where = "" if len(set(strides.values())) == 1 else f" of {name}"
            yield -(-(1 << power) // stride), f"2^{power} elements{where}", "elements"
            yield -(-(1 << power) // (stride * ITEMSIZE[case.kv_dtype])), f"2^{power} bytes{where}", "bytes"
    for power in (15, 16):
        yield 1 << power, f"2^{power} page ids", "ids"


_ORDERS: dict[str, tuple[int, ...]] = {
    "q": (0, 1, 2),
    "out": (1, 2, 0),
    "k": (1, 2, 0),  # tokens: what a loop over tiles multiplies by a stride
    "v": (2, 1, 0),
    "partial_out": (2, 0, 1, 3),
    "partial_lse": (1, 2, 0),
    "prefix_output": (0, 1, 2),
    "suffix_output": (1, 2, 0),
    "output": (2, 0, 1),
}
"""Dimensions of a tensor in the order of the turns; together they cover each index of a kernel in two turns."""

_WITHIN_PAGES: dict[Layout, tuple[int, ...]] = {
    "NHD": (1, 2),
    "HND": (2, 1),
    "packed": (3, 1, 2),
    "interleaved": (2, 3),
}
"""Dimensions of a cache: tokens of a page, KV heads, and the head dimension where another one is inside of it."""


_LARGE_IN_SERVING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("q", "out"), (0,)),
    **dict.fromkeys(("k", "v"), (1, 0)),
    "partial_out": (0,),
    "prefix_output": (0,),
    "suffix_output": (0,),
    "output": (0,),
    **dict.fromkeys(CACHES, (0,)),
}
"""Dimensions, in the order of the turns, with so many entries in some engine that offsets pass 2^31. Of q and out this
is so where sequences have many query tokens, see `_MOST_ROWS_IN_SERVING`."""
_MOST_ELEMENTS_OF_A_TOKEN = 128 * 576
"""Heads times head size: of DeepSeek's latent attention, the most that a token has."""
_MOST_ROWS_IN_SERVING = {"sequences": 1 << 12, "tokens": 1 << 17}
"""Most rows of q and out. Sequences that are decoded together: SGLang runs 4,096 at most (`max_running_requests`, where
it is not set), vLLM 1,024 (`max_num_seqs`, likewise); with a token each that makes 2^28.2 elements. Tokens of a batch
of prompts: vLLM's `max_num_batched_tokens` is no less than `max_model_len` where prompts are not cut into chunks, and
there are models of 131,072 tokens; sgl-project/sglang#20389 is a fault of such a batch."""


def stretched_axes(declaration: Declaration, case: Case, turn: int, *, most_rows: int = MOST_ROWS) -> Mapping[str, int]:
    """Contiguous tensors that could as well have a wide stride, as far as the kernel declares to take any.

    Where a dimension has three indices or more, the stride itself fits into 32 bits: those come first, in an order that
    differs from case to case. Caches stay as they are. ``most_rows``: vectors that may lie apart then.
    """
    found = {}
    for name, spec in _free_to_stretch(declaration, case).items():
        order: Iterable[int] = _ORDERS.get(name, range(len(spec.shape)))
        if lies_as_served(declaration.supports.strides):
            order = _large_in_serving(case, name)
        order = () if name in CACHES else order
        axes = _possible(declaration, name, spec, order, most_rows)
        if axes:
            preferred = [axis for axis in axes if spec.shape[axis] > 2] or axes
            found[name] = preferred[(case.seed + turn) % len(preferred)]
    return found


def _large_in_serving(case: Case, name: str) -> tuple[int, ...]:
    """See `_LARGE_IN_SERVING`."""
    rows = _MOST_ROWS_IN_SERVING["tokens" if "cu_seqlens_q" in case.tensor_names else "sequences"]
    is_small = name in ("q", "out") and rows * _MOST_ELEMENTS_OF_A_TOKEN < _HALF
    return () if is_small else _LARGE_IN_SERVING.get(name, ())


def stretched_cache_axes(
    declaration: Declaration, case: Any, turn: int, *, most_rows: int = MOST_ROWS
) -> Mapping[str, int]:
    """Caches with a wide stride between the tokens of a page, or between heads; V the other way round than K.

    As in `stretched_axes`, three indices or more come first. Where engines' strides are all, it is between pages.

    In a turn of its own: pages cannot be moved far away at the same time, and strides around a wide one do not fit into
    32 bits any more.
    """
    if not case.page_size:
        return {}
    found = {}
    for name, spec in _free_to_stretch(declaration, case).items():
        tokens, heads, *others = _WITHIN_PAGES[case.layout]
        order = (tokens, heads, *others) if name != "v_cache" else (heads, tokens, *others)
        order = _LARGE_IN_SERVING[name] if lies_as_served(declaration.supports.strides) and name in CACHES else order
        axes = _possible(declaration, name, spec, order, most_rows) if name in CACHES else []
        many = [axis for axis in axes if spec.shape[axis] > 2]
        first = case.seed % max(1, len(many))
        axes = [*many[first:], *many[:first], *(axis for axis in axes if axis not in many)]
        if len(axes) > turn:
            found[name] = axes[turn]
    return found


def _free_to_stretch(declaration: Declaration, case: Case) -> dict[str, TensorSpec]:
    if declaration.supports.strides == "contiguous":
        return {}
    specs = tensor_specs(case)
    names = strided_tensors_of(case.problem, declaration.supports)
    found = {name: spec for name, spec in specs.items() if named_in_strides(case, name) in names}
    return {
        name: spec for name, spec in found.items() if strides_of(case, name) == "contiguous" and 0 not in spec.shape
    }


def _possible(declaration: Declaration, name: str, spec: TensorSpec, order: Iterable[int], most_rows: int) -> list[int]:
    """The dimensions in ``order`` that may have gaps and have an index to stretch by, and not too many.

    With two indices the stride itself would have to pass 2^31, as none does in an engine.
    """
    shape, allowed = spec.shape, declaration.supports.strides
    is_served = lies_as_served(allowed)
    return [
        axis
        for axis in order
        if (is_served or permits_gap(allowed, name, axis, len(shape)))
        and shape[axis] > (2 if is_served else 1)
        and math.prod(shape[: axis + 1]) <= most_rows
        and stretched_nbytes(shape, axis, ITEMSIZE[spec.dtype]) <= MOST_BYTES
    ]


_ROOM_BYTES = 960 << 20
"""Most memory that a kernel may allocate in such a run; one that copies its inputs as a whole is not accused.

Less than K's half of an interleaved cache of 2^31 elements of one byte: its copy would be taken for a leak.
"""

_REFUSALS = (ValueError, NotImplementedError, OverflowError, MemoryError, torch.OutOfMemoryError)
_OUT_OF_MEMORY = "can't allocate memory"


@dataclass(frozen=True, slots=True)
class Far:
    """Things that lie far away: pages from id ``first_page`` on, a mask's tables from ``first_entry`` on, entries of
    ``moved`` tensors, each from an entry on, and high indices along an axis of a tensor.

    ``near``: of the latter, not far, but merely further away than in a contiguous tensor. ``wrapped``: all of it lies
    also where offsets of 32 bits look for it.
    """

    first_page: int = 0
    first_entry: int = 0
    moved: Mapping[str, int] = field(default_factory=dict)
    stretched: Mapping[str, int] = field(default_factory=dict)
    near: bool = False
    wrapped: bool = False


def run_far(trial: Trial, far: Far) -> Observation | None:
    """The run; None if this machine has no such memory, or the kernel says that it does not take such inputs.

    An offset that comes out negative may end the process, or cost it its CUDA context: on a GPU there is no run in a
    process that is not made for that. Raises `KernelRaised` for what else the kernel raises.
    """
    fault_map = installed()
    if fault_map is None and trial.device != "cpu":
        return None
    with nullcontext() if fault_map is None else fault_map.recording():
        arena = Arena(trial.device, poison="nan", prefill="nan")
        try:
            memory = FarAllocator(
                arena,
                first_page=far.first_page,
                first_entry=far.first_entry,
                moved=far.moved,
                stretched=far.stretched,
                near=far.near,
                fault_map=fault_map,
                on_gpu=None if trial.device == "cpu" else sparse_memory(),
            )
            inputs = _built(trial, far, memory)
            if far.wrapped:
                memory.put_where_short_offsets_land()
        except SparseUnavailable:
            return None
        return _run(trial, far, inputs, memory)


def _built(trial: Trial, far: Far, memory: FarAllocator) -> Any:
    case: Any = trial.case
    supports = trial.kernel.declaration.supports

    def move_ids(table: Tensor) -> None:
        if far.first_page:
            _move_ids(table, case, far.first_page)

    def move_tables(starts: Tensor) -> None:
        if far.first_entry and (table := far_table(case)) is not None:
            starts.clamp_(max=table.start).add_(far.first_entry)  # where the last one ends may not fit into 32 bits

    edits = {"block_table": move_ids, "mask_indptr": move_tables} | _moves_of_names(case, far.moved)
    if trial.device == "cpu" or isinstance(case, OpenCase):  # whose values are those of the host
        inputs = problem_of(case).build(case, memory, supports, trial.reference.values_on("cpu"))
        for name, edit in edits.items():
            if hasattr(inputs, name):
                edit(getattr(inputs, name))
    else:
        inputs = build_through_host(case, memory, supports, edit=edits)
    if memory.whole and not far.moved:
        for name, whole in with_both_caches(case, memory.whole).items():
            setattr(inputs, name, whole.view(getattr(inputs, name).dtype))  # a mask's bytes are truth values
    return inputs


def _run(trial: Trial, far: Far, inputs: Any, memory: FarAllocator) -> Observation | None:
    """Run the case; what is returned holds on to none of the memory of the run."""
    allocations = TrackedAllocations(trial.device, poison="nan", prefill="nan")
    started = time.perf_counter()
    try:
        # A GPU's memory has a limit of its own, and its driver takes more addresses than that.
        with at_most_more(_ROOM_BYTES) if trial.device == "cpu" else nullcontext():
            kernel = _given(trial.kernel, memory, wrapped=far.wrapped) if far.moved else trial.kernel
            results = call(kernel, trial.case, inputs, allocations, wait=True)
    except KernelRaised as raised:
        has_no_memory = raised.is_a(RuntimeError) and _OUT_OF_MEMORY in text_of(raised.error)
        if context_lost(raised.error) is None and (has_no_memory or any(map(raised.is_a, _REFUSALS))):
            return None
        raised.changed = _words_of(trial.case, far)
        if not far.near and context_lost(raised.error) is not None:
            raised.maybe = (NARROW_OFFSETS,)
        raise
    if far.wrapped and not far.moved:
        memory.take_from_where_short_offsets_land()
    nothing = Arena(trial.device, poison="nan", prefill="nan")
    seen = Observation("nan", "nan", None, given=nothing, allocated=nothing)
    seen.results = {name: result.clone() for name, result in results.items()}
    seen.kernel_s = time.perf_counter() - started
    trial.times.append(seen.times)
    return seen


def _given(kernel: Kernel, memory: FarAllocator, *, wrapped: bool) -> Kernel:
    """``kernel``, called on the whole of far tensors; results are looked for in that part of them that it is given."""

    def function(inputs: Any, **options: Any) -> Any:
        returned = kernel.function(SimpleNamespace(**{**vars(inputs), **memory.whole}), **options)
        if wrapped:  # before a copy is made of what is changed in place
            memory.take_from_where_short_offsets_land()
        return returned

    return Kernel(function, kernel.declaration)


def _moves_of_names(case: Any, moved: Mapping[str, int]) -> dict[str, Callable[[Tensor], None]]:
    """By tensor, what has its numbers name the same entries of ``moved`` tensors.

    A number that names none, and is the first to do so, still is.
    """
    found: dict[str, Callable[[Tensor], None]] = {}
    for name, first in moved.items():
        spec = tensor_specs(case)[name]

        def move(names: Tensor, least: int = first * spec.places, end: int = spec.shape[0] * spec.places) -> None:
            names += ((names >= 0) & (names <= end)) * least

        found[spec.named_by] = move
    return found


def _move_ids(table: Tensor, case: PagedDecodeCase, first_page: int) -> None:
    """Every id of a page of the case, and the one after the last, which does not exist; unused zeros stay."""
    columns = torch.arange(table.shape[1], device=table.device)
    blocks = torch.tensor([case.blocks_of(seq) for seq in range(case.num_seqs)], dtype=torch.int64, device=table.device)
    moved = (table >= 0) & (table <= num_blocks(case))
    if case.pages.padding == "zero":
        moved &= columns < blocks[:, None]
    table += moved * first_page


def _words_of(case: Case, far: Far) -> str:
    moved = [f"page ids from {far.first_page} on"] if far.first_page else []
    if far.first_entry:
        moved.append(f"mask_indptr from {far.first_entry} on")
    if far.moved:
        moved.append(_words_of_moved(case, far.moved))
    if far.stretched:
        strides = "gaps" if far.near else "strides past 2^31 elements"
        moved.append(f"{strides} in {', '.join(sorted(far.stretched))}")
    return f"with {' and '.join(moved)}"


def _words_of_moved(case: Case, moved: Mapping[str, int]) -> str:
    """Words for the tensors that name entries which begin further on."""
    specs = tensor_specs(case)
    firsts = {specs[name].named_by: first * specs[name].places for name, first in moved.items()}
    return " and ".join(f"what {name} names from {first} on" for name, first in firsts.items())


_MOST_NBYTES = 4 << 20
"""Largest case: decoys take several times as much again."""

_RUNS = 2
_KIND = "page ids"
"""Whatever the limit: where two of them are reached with the same page, which it is cannot be told."""

_KIND_OF_NAMES = "named entries"

_USE_STRIDE = "compute offsets with the strides of the tensor: its shape does not tell them"
_WIDER_OFFSETS = "convert an index to 64 bits before it is multiplied with a stride (`.to(tl.int64)`, `int64_t`)"
_WIDER_ENTRIES = (
    "convert what mask_indptr holds, and an index before it is multiplied with a length, to 64 bits "
    "(`.to(tl.int64)`, `int64_t`)"
)
_NOT_WRAPPED = (
    "that offsets are cut to 32 bits does not explain it: what should be read was put where such offsets lead, too, "
    "and the result is wrong all the same"
)
_WRONG_BELOW = (
    "that offsets are cut to 32 bits does not explain it: the result is wrong with all of them below 2^31 bytes, too"
)
_AT_FIRST = "called for the first time, the kernel gives the right result for that"
_FOLLOW_IDS = "read each page where its row of the block table says that it lies"
_WIDER_IDS = "read page ids as 32 bits, and compute offsets from them in 64"


def _applies(declaration: Declaration, case: Case) -> bool:
    return tensor_nbytes(case) <= _MOST_NBYTES and any(True for _ in _placements(declaration, case))


def _weight(_: Declaration, case: Case) -> int:
    """A narrow index shows nowhere else, and only where its dimension has three indices.

    For that of a sequence that is one case in three, in which batch_invariance is drawn as well; and that into a mask's
    tables in cases that hold one, of which interpreted kernels have few, since each takes long.
    """
    if isinstance(case, OpenCase):  # to which little else applies
        return 6
    return 6 if (case.part_noun == "sequence" and case.num_parts > 2) or far_table(case) is not None else 3


def _check(trial: Trial) -> Failure | None:
    """Raises NothingRunError where pages far away, or all if there are none, are refused: the cache may be copied."""
    has_run = False
    most_rows = MOST_ROWS if trial.device == "cpu" else MOST_ROWS_ON_GPU
    placements = list(_placements(trial.kernel.declaration, trial.case, most_rows))
    of_pages = any(far.first_page for far in placements)
    for far in placements:
        counts = bool(far.first_page) or not of_pages
        if far.first_entry and not _is_right(trial, Far(first_entry=_NEAR_ENTRY)):
            continue  # before the far run, which ends the process of a kernel that is astray by more than it wraps
        if trial.device == "cpu" and _is_right(trial, far):
            has_run |= counts
            continue
        if far.moved:
            failure = _explained_by_names(trial, far)
            if failure is not None or trial.device == "cpu":
                return failure
            has_run = True
            continue
        if far.first_page and not _heeds_page_strides(trial):
            far = Far(stretched=far.stretched)
        ignored = _ignored(trial, far)
        if failure := _told_of_ignored(trial, ignored):
            return None if _comes_and_goes(trial) else failure
        heeded = {name: axis for name, axis in far.stretched.items() if name not in ignored}
        far = replace(far, stretched=heeded)
        seen = run_far(trial, far) if far != Far() else None
        has_run |= counts and seen is not None
        if seen is not None and _differs(trial, far, seen):
            return None if _comes_and_goes(trial) else _explained(trial, far, seen)
    if not has_run:
        raise NothingRunError if trial.device == "cpu" or installed() is not None else NotInThisProcessError
    return None


def _heeds_page_strides(trial: Trial) -> bool:
    """Whether pages with a gap between them can move a little; if not, shuffled ones show it."""
    case: Any = trial.case
    if not any(name in case.strides for name in CACHES):
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
    """The failure for the first ignored stride that other oracles cannot see; raises what the kernel raised."""
    allowed = trial.kernel.declaration.supports.strides
    for name, axis in ignored.items():
        shape = tensor_specs(trial.case)[name].shape
        if axis == 0 or not permits_gap(allowed, name, axis, len(shape)):
            continue
        near = Far(stretched={name: axis}, near=True)
        if (seen := _wrong(trial, near)) is not None:
            gapped = gapped_strides(shape, axis)[axis]
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


def _placements(declaration: Declaration, case: Any, most_rows: int = MOST_ROWS) -> Iterator[Far]:
    if isinstance(case, OpenCase):
        yield from (Far(moved=moved) for least in (FAR, _HALF) if (moved := _moved(case, least)))
        return
    if case.page_size and not used_blocks(case):  # which is right wherever pages lie
        return
    pages = far_pages(case) if case.page_size else []
    for turn in range(_RUNS):
        axes = stretched_axes(declaration, case, turn, most_rows=most_rows)
        far = Far(pages[turn] if turn < len(pages) else 0, stretched=axes)
        if far.first_page or far.stretched:
            yield far
    for turn in range(_RUNS):
        if axes := stretched_cache_axes(declaration, case, turn, most_rows=most_rows):
            yield Far(stretched=axes)
    if (table := far_table(case)) is not None:
        yield Far(first_entry=_HALF - 1 - table.start)


def _moved(case: OpenCase, least: int) -> dict[str, int]:
    """Where tensors begin that something names, so that the largest of them has offsets past ``least`` elements.

    Those that the same tensor names begin at the same entry, with all as aligned as before. Those are left out of which
    names would not fit into 31 bits, and those of one entry's places told in two ways.
    """
    found: dict[str, int] = {}
    for _, group, step in named_groups(case):
        entries = [strided_layout(*_lies(spec)).strides[0] for spec in group.values()]
        first = -(-least // max(entries) // step) * step if max(entries) else 0
        spec = next(iter(group.values()))
        if first and (first + spec.shape[0]) * spec.places < _MOST_IDS:
            found |= dict.fromkeys(group, first)
    return found


def _below_limits(case: Any) -> dict[str, int]:
    """The last entries at which these tensors can begin with all offsets below 2^31 bytes, as aligned as before."""
    found: dict[str, int] = {}
    for _, group, step in named_groups(case):
        entry = max(strided_layout(*_lies(spec)).strides[0] * ITEMSIZE[spec.dtype] for spec in group.values())
        last = _HALF // max(1, entry) - next(iter(group.values())).shape[0]
        found |= dict.fromkeys(group, max(0, last // step * step))
    return found


def named_groups(case: OpenCase) -> Iterator[tuple[str, dict[str, TensorSpec], int]]:
    """Each tensor of names with those whose entries it names, alike, and so many entries that all are aligned alike."""
    groups: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in tensor_specs(case).items():
        if spec.named_by and spec.shape[0]:
            groups.setdefault(spec.named_by, {})[name] = spec
    for names, group in groups.items():
        steps = (strided_layout(*_lies(spec)).strides[0] * ITEMSIZE[spec.dtype] for spec in group.values())
        if len({spec.places for spec in group.values()}) == 1:
            yield names, group, math.lcm(*(_ALIGNMENT // math.gcd(_ALIGNMENT, step) for step in steps))


def _wrong(trial: Trial, far: Far) -> Observation | None:
    """The run if it gives other bits; with other strides, or of a kernel that promises no bits, other numbers."""
    seen = run_far(trial, far)
    return seen if seen is not None and _differs(trial, far, seen) else None


def _differs(trial: Trial, far: Far, seen: Observation) -> bool:
    masks = where_bits_differ(as_it_is(trial), on_host(seen.results))
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
    if far.first_entry:
        return _explained_by_tables(trial, far, seen)
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
                cause, advice = _if_wrapped(trial, alone, _WIDER_OFFSETS)
                found = _failure(trial, alone, wrong, f"strides of {name}", words, advice, cause=cause, tensor=name)
                remedy = {"strides": "last_contiguous"} if is_last else {}
                return found and msgspec.structs.replace(found, remedy=remedy)
    words = f"with strides of {', '.join(far.stretched)} enlarged until offsets exceed 2^31 elements"
    cause, advice = _if_wrapped(trial, far, _WIDER_OFFSETS)
    return _failure(trial, far, seen, "strides", words, advice, cause=cause)


def _if_wrapped(trial: Trial, far: Far, advice: str) -> tuple[str, str]:
    """Words for offsets that are too narrow, with the ``advice`` for that, if that has been tried; else that it does
    not explain.

    Offsets of 32 bits lead to one place, the right one modulo 2^32: with the same numbers there as well such a kernel
    is right. On a GPU rows share granules of memory with what lies there, so that it cannot be tried: there the limit
    up to which it is right has to do. Of what names entries it is tried on each device.
    """
    if far.moved and not _is_right(trial, Far(moved=_below_limits(trial.case))):
        return "", _WRONG_BELOW
    if trial.device != "cpu":
        return NARROW_OFFSETS, advice
    try:
        seen = run_far(trial, replace(far, wrapped=True))
    except KernelRaised as raised:
        if raised.fatal or not raised.is_a(Exception):
            raise
        return "", _NOT_WRAPPED
    if seen is None:
        return "", advice
    return ("", _NOT_WRAPPED) if _differs(trial, far, seen) else (NARROW_OFFSETS, advice)


def _explained_by_pages(trial: Trial, far: Far, seen: Observation) -> Failure | None:
    case: Any = trial.case
    step, count = pages_to_same_alignment(case), num_blocks(case)
    if (moved := _wrong(trial, Far(step))) is not None:
        words = f"with page ids from {step} on"
        return _failure(trial, Far(step), moved, "ignored page ids", words, _FOLLOW_IDS, cause="ignored_page_ids")
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
            if limit.units == {"ids"}:
                cause, advice = "narrow_page_ids", _WIDER_IDS
            else:
                cause, advice = _if_wrapped(trial, Far(first), _WIDER_OFFSETS)
            either = cause == NARROW_OFFSETS and "ids" in limit.units  # short ids may lead to the same place
            cause, advice = ("", _WIDER_IDS) if either else (cause, advice)
            found = _failure(trial, Far(first), above, _KIND, words, *_begins(case, first), advice, cause=cause)
            return found and msgspec.structs.replace(found, maybe=(NARROW_OFFSETS,) if either else ())
        seen, far = above, Far(first)
        break
    words = f"with page ids from {far.first_page} on; with page ids up to {right_up_to} the result is right"
    cause, advice = _if_wrapped(trial, far, _WIDER_IDS)
    return _failure(trial, far, seen, _KIND, words, *_begins(case, far.first_page), advice, cause=cause)


def _explained_by_tables(trial: Trial, far: Far, seen: Observation) -> Failure | None:
    if (table := far_table(trial.case)) is None:
        return None
    words = f"with mask_indptr from {far.first_entry} on, so that offsets into mask exceed 2^31 elements"
    start, end = (far.first_entry + entry for entry in table[1:])
    where = f"the table of sequence {table.seq} begins {start} elements into mask, and ends {end} elements into it"
    cause, advice = _if_wrapped(trial, far, _WIDER_ENTRIES)
    return _failure(trial, far, seen, "offsets into mask", words, where, advice, cause=cause, tensor="mask")


def _explained_by_names(trial: Trial, far: Far) -> Failure | None:
    """None where entries need not begin far away for that, and where bits come and go."""
    case: Any = trial.case
    near = Far(moved=_moved(case, 1))
    if near.moved.keys() != far.moved.keys() or not _is_right(trial, near) or _comes_and_goes(trial):
        return None
    if (seen := _wrong(trial, far)) is None:
        return None
    cause, advice = _if_wrapped(trial, far, _WIDER_OFFSETS)
    specs = tensor_specs(case)
    offsets = (
        f"{name} begins {first * strided_layout(*_lies(specs[name])).strides[0]} elements into a larger tensor"
        for name, first in far.moved.items()
    )
    return _failure(trial, far, seen, _KIND_OF_NAMES, _words_of(case, far), *offsets, advice, cause=cause)


def _lies(spec: TensorSpec) -> tuple[tuple[int, ...], StrideKind, int]:
    return spec.shape, spec.strides, ITEMSIZE[spec.dtype]


def _begins(case: PagedDecodeCase, page: int) -> Iterator[str]:
    for name, stride in page_strides(case).items():
        offset = page * stride
        yield f"page {page} begins {offset} elements into {name}, {offset * ITEMSIZE[case.kv_dtype]} bytes"


def _failure(
    trial: Trial, far: Far, seen: Observation, kind: str, words: str, *details: str, cause: str = "", tensor: str = ""
) -> Failure | None:
    """The objection to the run that is ``seen``: of this ``kind`` and ``cause``, or that earlier calls are why."""
    if _is_right_at_first(trial, far):
        found = _objection(trial, far, seen, f"{words} after the call on the case as it is", (_AT_FIRST, REASONS), "")
        return found and msgspec.structs.replace(found, kind="bits", causes=(LEFT_OVER,))
    found = _objection(trial, far, seen, words, details, tensor or ("" if cause == NARROW_OFFSETS else None))
    return found and msgspec.structs.replace(found, kind=kind, causes=_causes(cause))


def _is_right_at_first(trial: Trial, far: Far) -> bool:
    """Whether the kernel is right if it has not been called before: then there is no place that it does not find."""
    fresh = fresh_copy(trial.kernel)
    if fresh is None:
        return False
    at_first = copy(trial)
    at_first.kernel = fresh.declared(supports=trial.kernel.declaration.supports)  # which may leave out an LSE
    return _is_right(at_first, far)


def _objection(
    trial: Trial, far: Far, seen: Observation, words: str, details: tuple[str, ...], tensor: str | None
) -> Failure | None:
    """``tensor``: the one that is concerned; None for the result."""
    if _same_bits(trial, far):
        found = unequal_bits(
            registry.PAGE_RELOCATION, trial.case, as_it_is(trial), on_host(seen.results), words, details=details
        )
        return found and msgspec.structs.replace(found, tensor=tensor or "")
    pair = _first_beyond_bound(trial, seen)
    if pair is None:
        return None
    after = pair[1]
    mask = after.ratio > 1
    index, worst = first_index(mask), float(after.ratio[first_index(mask)])
    one, other = (number(float(part.got[index])) for part in pair)
    return Failure(
        oracle=registry.PAGE_RELOCATION.name,
        kind="bits",
        message=(
            f"{element(after.name, after.axes, index)} is {one} originally, but {other} {words}: "
            f"{ratio(worst)} times the error bound"
        ),
        details=(f"it changes {extent(after.name, after.axes, mask)}", *details),
        error_ratio=worst,
        tensor=after.name if tensor is None else tensor,
        blame=blame_of(trial.case, after.axes, index),
    )


def _causes(mistake: str) -> tuple[Cause, ...]:
    return (Cause(mistake=mistake),) if mistake else ()


PAGE_RELOCATION = Relation(
    registry.PAGE_RELOCATION,
    _applies,
    _check,
    weight=_weight,
    of_any_problem=True,
)
