"""The size of V's heads, where it is not that of K's. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.edits import changed, with_head_size
from attnfuzz.cases.facets.facet import Changes, Facet
from attnfuzz.cases.search import Proposal, first_of
from attnfuzz.problems.axes import V_HEAD_SIZES, Axis, v_head_size_class
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.choices import head_size_rank, head_sizes_of, v_head_sizes_of

__all__ = ["VHeadSize"]


class VHeadSize(Facet[AttentionCase]):
    """``v_head_size``: None for that of q and K."""

    fields = ("v_head_size",)

    def features(self, case: AttentionCase) -> Iterator[str]:
        if case.v_head_size is not None and not case.values_in_keys:  # where it is always another one
            yield "v_head_size"
            if case.v_head_size > case.head_size:
                yield "v_head_size>head_size"

    def size(self, case: AttentionCase) -> tuple[Any, ...]:
        """One size for both comes first, then the smaller ones, those of K before those of V."""
        return (case.v_head_size is not None, head_size_rank(case.head_size), head_size_rank(case.value_size))

    def axes(self, domain: Domain) -> Iterator[Axis]:
        if domain.supports.v_head_sizes != "equal":
            yield Axis("V head size", V_HEAD_SIZES, lambda case: (v_head_size_class(case.head_size, case.value_size),))

    def objections(self, case: AttentionCase, domain: Domain) -> Iterator[str]:
        declared = domain.supports.v_head_sizes
        if isinstance(declared, tuple):
            if case.value_size not in declared:
                yield f"v_head_size={case.value_size!r}, but the kernel declares {declared}"
        elif declared == "equal" and case.v_head_size is not None:
            yield (
                f"v_head_size={case.v_head_size} beside head_size={case.head_size}, but the kernel declares equal ones"
            )

    def lower(self, case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
        """One size for K and V; else the other way round, both as small as can be, and then that of V."""
        if case.v_head_size is None:
            return case
        layout = getattr(case, "layout", None)
        sizes = v_head_sizes_of(domain.supports, case.head_size, layout)
        small = [
            _with_head_sizes(case, head_size, v_head_size)
            for head_size in head_sizes_of(domain.supports, case.kv_dtype, layout)[:2]
            for v_head_size in v_head_sizes_of(domain.supports, head_size, layout)[:4]
        ]
        return (
            yield from first_of(
                case,
                [
                    changed(case, v_head_size=None),
                    _with_head_sizes(case, case.v_head_size, case.v_head_size),
                    _with_head_sizes(case, case.v_head_size, case.head_size),
                    *small,
                    *(changed(case, v_head_size=size) for size in sizes),
                ],
            )
        )

    def changes(self, case: AttentionCase, domain: Domain) -> Iterator[tuple[str, AttentionCase | None]]:
        if case.v_head_size is not None:
            yield f"v_head_size {case.head_size} instead of {case.v_head_size}", changed(case, v_head_size=None)

    def without(self, feature: str, case: AttentionCase) -> Iterator[Changes]:
        if feature == "v_head_size":
            yield {"v_head_size": None}


def _with_head_sizes(case: AttentionCase, head_size: int, v_head_size: int) -> AttentionCase | None:
    resized = with_head_size(case, head_size)
    return resized and changed(resized, v_head_size=v_head_size)
