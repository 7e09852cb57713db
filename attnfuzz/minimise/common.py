"""Proposals for fields that cases of every problem have. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.edits import changed, with_head_size
from attnfuzz.cases.search import Proposal, first_of
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.choices import dtypes_of, head_size_rank, head_sizes_of, lying_alike, stride_kinds_of
from attnfuzz.problems.quantised_kv import KvDtype
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.supports import Dtype, OptionValue

__all__ = ["lower_dtype", "lower_head_size", "lower_options", "lower_strides"]

C = TypeVar("C", AttentionCase, MergeStatesCase)


def lower_head_size(case: C, domain: Domain) -> Proposal[C]:
    layout = case.layout if isinstance(case, PagedDecodeCase) else None
    sizes = head_sizes_of(domain.supports, _cache_dtype(case), layout)
    simpler = [size for size in sizes if head_size_rank(size) < head_size_rank(case.head_size)]
    return (yield from first_of(case, [with_head_size(case, size) for size in simpler]))


def lower_dtype(case: C, domain: Domain) -> Proposal[C]:
    return (yield from first_of(case, [changed(case, dtype=dtype) for dtype in dtypes_of(domain.supports)]))


def lower_strides(case: C, domain: Domain) -> Proposal[C]:
    """Each tensor as near to contiguous as it can be, together with those that lie alike."""
    allowed = domain.supports.strides
    for names in dict.fromkeys(lying_alike(allowed, name) for name in sorted(case.strides)):
        strided = [name for name in names if name in case.strides]
        kinds = stride_kinds_of(allowed, names[0])
        case = yield from first_of(case, [_with_strides(case, strided, kind) for kind in kinds])
    return case


def lower_options(case: C, domain: Domain, follow: Callable[[C, int, int], C | None] | None = None) -> Proposal[C]:
    """Each option to an earlier choice; then again with ``follow(case, old, new)`` applied, if it is an integer."""
    for name, choices in sorted(domain.options.items()):
        case = yield from first_of(case, [_with_option(case, name, choice) for choice in choices])
        old = case.options.get(name)
        if follow is not None and isinstance(old, int):
            followed = [(choice, follow(case, old, choice)) for choice in choices if isinstance(choice, int)]
            case = yield from first_of(case, [other and _with_option(other, name, new) for new, other in followed])
    return case


def _cache_dtype(case: AttentionCase | MergeStatesCase) -> Dtype | KvDtype:
    return case.dtype if isinstance(case, MergeStatesCase) else case.kv_dtype


def _with_strides(case: C, names: Sequence[str], kind: StrideKind) -> C | None:
    others = {other: stride for other, stride in case.strides.items() if other not in names}
    return changed(case, strides=others if kind == "contiguous" else {**others, **dict.fromkeys(names, kind)})


def _with_option(case: C, name: str, value: OptionValue) -> C | None:
    return changed(case, options={**case.options, name: value})
