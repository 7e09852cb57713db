"""Cases beside a failing one: what tells a feature that the bug needs from one that the case happens to have.

Shrinking only ever goes to simpler cases. It cannot tell a mistake with the strides of K from one that takes the
strides of K for those of V: the smallest case of both has unusual strides in K alone. And of ten pairs of LSEs that a
kernel fails for, it tells the one that was met first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
)
from attnfuzz.problems.choices import CACHE_TENSORS, block_sizes_of, lying_alike, stride_kinds_of
from attnfuzz.problems.features import CACHE_STRIDES, KV_STRIDES_DIFFER
from attnfuzz.problems.recipes import LseKind, StrideKind
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supported import supports_case

__all__ = ["alternatives", "strides_swapped", "without"]

Changes = Mapping[str, Any]


def strides_swapped(declaration: Declaration, case: Case) -> Case | None:
    """``case`` with the strides of K and V exchanged; None if that changes nothing."""
    k, v = _kv_names(case)
    return _changed(declaration, case, {"strides": {**case.strides, k: _kind(case, v), v: _kind(case, k)}})


def without(aspect: str, declaration: Declaration, case: Case) -> list[Case]:
    """``case`` without ``aspect`` and otherwise the same; several if there are several ways, none if there is none."""
    changed = (_changed(declaration, case, changes) for changes in _ways_without(aspect, declaration, case))
    return [case for case in changed if case is not None]


def alternatives(declaration: Declaration, case: Case) -> Iterator[Case]:
    """``case`` with another value of a field that is not the simplest: what fails alike does not need that value.

    The simplest has been tried by shrinking. Of two states to merge an empty one stays empty and another does not.
    Tokens are put onto pages of other sizes, and rows that hold no token come about in the other way.
    """
    simplest = simplest_case(case.problem, declaration.supports, declaration.options)
    for changes in _other_values(declaration, case, simplest):
        if (changed := _changed(declaration, case, changes)) is not None:
            yield changed


def _other_values(declaration: Declaration, case: Case, simplest: Case) -> Iterator[Changes]:
    supports = declaration.supports
    if isinstance(case, MergeStatesCase):
        yield from _other_states(case)
    if isinstance(case, PagedDecodeCase):
        yield from _other_pages(case, block_sizes_of(supports))
    if isinstance(case, DenseDecodeCase):
        yield from _other_rows(case)
    if case.dtype != simplest.dtype:
        yield from ({"dtype": dtype} for dtype in supports.dtypes if dtype not in (case.dtype, simplest.dtype))
    if isinstance(case, PagedDecodeCase) and isinstance(simplest, PagedDecodeCase) and case.layout != simplest.layout:
        known = (case.layout, simplest.layout)
        yield from ({"layout": layout} for layout in supports.layouts if layout not in known)
    for name, value in case.options.items():
        first, *others = declaration.options[name]
        if value != first:
            yield from ({"options": {**case.options, name: other}} for other in others if other != value)
    for name, kind in case.strides.items():
        kinds = (other for other in stride_kinds_of(supports.strides, name) if other not in ("contiguous", kind))
        yield from ({"strides": {**case.strides, name: other}} for other in kinds)


def _other_pages(case: PagedDecodeCase, sizes: tuple[int, ...]) -> Iterator[Changes]:
    """As many pages as can be, one that is full, and one that is not."""
    longest = max(case.seq_lens)
    full = longest if longest in sizes else None
    partial = next((size for size in sorted(sizes) if size > longest), None)
    for size in (min(sizes), full, partial):
        if size not in (None, case.block_size):
            yield {"block_size": size}


def _other_rows(case: DenseDecodeCase) -> Iterator[Changes]:
    """Rows behind a sequence that belong to a longer one, or to none."""
    longest = max(case.seq_lens)
    if case.extra_rows:
        yield {"seq_lens": (*case.seq_lens, longest + case.extra_rows), "extra_rows": 0}
    elif (shortest := min(case.seq_lens)) < longest:
        yield {"seq_lens": (shortest,), "extra_rows": longest - shortest}


def _other_states(case: MergeStatesCase) -> Iterator[Changes]:
    """Each side of each pair of another kind, and the sides exchanged."""
    pairs = case.lse_pairs
    for i, (prefix, suffix) in enumerate(pairs):
        swapped = (suffix, prefix)
        others = [(kind, suffix) for kind in _alike_kinds(prefix)] + [(prefix, kind) for kind in _alike_kinds(suffix)]
        both = (_alike_kinds(prefix)[0], _alike_kinds(suffix)[0])
        for pair in (swapped, *others, both):
            if pair != (prefix, suffix):
                yield {"lse_pairs": (*pairs[:i], pair, *pairs[i + 1 :])}


def _alike_kinds(kind: LseKind) -> tuple[LseKind, ...]:
    """Other kinds of a state that is as empty or not."""
    groups: tuple[tuple[LseKind, ...], ...] = (("-inf", "+inf"), ("finite", "equal", "high", "low"))
    return next(tuple(other for other in group if other != kind) for group in groups if kind in group)


def _ways_without(aspect: str, declaration: Declaration, case: Case) -> Iterator[Changes]:
    if aspect == KV_STRIDES_DIFFER:
        yield from _alike(declaration, case)
    elif aspect == CACHE_STRIDES:
        yield {**_simplest_layout(declaration, case), "strides": _without_caches(case)}
    elif aspect.startswith("strides:"):
        names = lying_alike(declaration.supports.strides, aspect.removeprefix("strides:"))
        yield {"strides": {**case.strides, **dict.fromkeys(names, "contiguous")}}
    elif aspect in _CHANGES and isinstance(case, AttentionCase):
        yield _CHANGES[aspect](case)


def _alike(declaration: Declaration, case: Case) -> Iterator[Changes]:
    """The strides of K for V too, and those of V for K: of heads of one size. The packed layout knows no such thing."""
    k, v = _kv_names(case)
    packed = isinstance(case, PagedDecodeCase) and case.layout == "packed"
    layout = _simplest_layout(declaration, case) if packed else {}
    sizes = _equal_head_sizes(case) if isinstance(case, AttentionCase) and case.v_head_size is not None else {}
    for kind in dict.fromkeys((_kind(case, k), _kind(case, v))):
        if layout or sizes or kind != "contiguous":
            yield {**layout, **sizes, "strides": {**case.strides, k: kind, v: kind}}


def _no_empty_sequence(case: AttentionCase) -> Changes:
    return {"seq_lens": tuple(max(1, seq_len) for seq_len in case.seq_lens)}


def _a_query_each(case: AttentionCase) -> Changes:
    if not isinstance(case, PagedAttentionCase):
        return {}
    lens = zip(case.query_lens, case.seq_lens, strict=True)
    return {"query_lens": tuple(max(query_len, min(1, seq_len)) for query_len, seq_len in lens)}


def _no_context(case: AttentionCase) -> Changes:
    """Prefill in place of what goes on behind a context; needles stay on the tokens that are left."""
    if not isinstance(case, PagedAttentionCase):
        return {}
    kept = tuple(needle for needle in case.values.needles if needle.position < case.query_lens[needle.seq])
    values = msgspec.structs.replace(case.values, needles=kept)
    return {"seq_lens": case.query_lens, "values": values}


def _pow2_gqa_ratio(case: AttentionCase) -> Changes:
    return {"num_q_heads": case.num_kv_heads << (case.gqa_ratio.bit_length() - 1)}


def _equal_head_sizes(case: AttentionCase) -> Changes:
    return {"v_head_size": None}


_CHANGES: dict[str, Callable[[AttentionCase], Changes]] = {
    "context": _no_context,
    "empty sequence": _no_empty_sequence,
    "gqa_ratio not pow2": _pow2_gqa_ratio,
    "no query": _a_query_each,
    "v_head_size": _equal_head_sizes,
}


def _kv_names(case: Case) -> tuple[str, str]:
    return next((names for names in CACHE_TENSORS if set(names) <= set(case.tensor_names)), ("", ""))


def _kind(case: Case, name: str) -> StrideKind:
    return case.strides.get(name, "contiguous")


def _without_caches(case: Case) -> Mapping[str, StrideKind]:
    return {name: kind for name, kind in case.strides.items() if name not in _kv_names(case)}


def _simplest_layout(declaration: Declaration, case: Case) -> dict[str, Any]:
    simplest = simplest_case(case.problem, declaration.supports, declaration.options)
    return {"layout": simplest.layout} if isinstance(simplest, PagedDecodeCase) else {}


def _changed(declaration: Declaration, case: Case, changes: Changes) -> Case | None:
    try:
        changed = msgspec.structs.replace(case, **_plain(changes))
    except ValueError:  # strides for V in the interleaved layout, for one
        return None
    supported = supports_case(declaration.supports, declaration.options, changed)
    return changed if supported and changed != case else None


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` without strides that say nothing: a case is written in one way only."""
    plain = dict(changes)
    if "strides" in plain:
        plain["strides"] = {name: kind for name, kind in plain["strides"].items() if kind != "contiguous"}
    return plain
