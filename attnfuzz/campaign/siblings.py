"""Cases beside a failing one: what tells a feature that the bug needs from one that the case happens to have.

Shrinking only ever goes to simpler cases. It cannot tell a mistake with the strides of K from one that takes the
strides of K for those of V: the smallest case of both has unusual strides in K alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import AttentionCase, Case, PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.features import CACHE_STRIDES, CACHE_TENSORS, KV_STRIDES_DIFFER
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supported import supports_case

__all__ = ["strides_swapped", "without"]

Changes = Mapping[str, Any]


def strides_swapped(declaration: Declaration, case: Case) -> Case | None:
    """``case`` with the strides of K and V exchanged; None if that changes nothing."""
    k, v = _kv_names(case)
    return _changed(declaration, case, {"strides": {**case.strides, k: _kind(case, v), v: _kind(case, k)}})


def without(aspect: str, declaration: Declaration, case: Case) -> list[Case]:
    """``case`` without ``aspect`` and otherwise the same; several if there are several ways, none if there is none."""
    changed = (_changed(declaration, case, changes) for changes in _ways_without(aspect, declaration, case))
    return [case for case in changed if case is not None]


def _ways_without(aspect: str, declaration: Declaration, case: Case) -> Iterator[Changes]:
    if aspect == KV_STRIDES_DIFFER:
        yield from _alike(declaration, case)
    elif aspect == CACHE_STRIDES:
        yield {**_simplest_layout(declaration, case), "strides": _without_caches(case)}
    elif aspect.startswith("strides:"):
        yield {"strides": {**case.strides, aspect.removeprefix("strides:"): "contiguous"}}
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
