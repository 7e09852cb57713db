"""How many heads there are, and how large they are. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnfuzz.cases.facets.facet import (
    Axis,
    Change,
    Changes,
    Domain,
    Facet,
    Options,
    SizeRank,
    changed,
    classes,
    not_among,
    other_than,
    size_class,
)
from attnfuzz.problems.attention import AttentionCase, CaseBase
from attnfuzz.problems.choices import (
    gqa_ratios_of,
    head_counts_of,
    head_size_rank,
    head_sizes_of,
    is_power_of_two,
    v_head_sizes_of,
)
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Proposal, first_of, lower_integer, number_traits

SEVERAL_HEADS = Feature("several query heads")
"""On one KV head or on several."""
SEVERAL_KV_HEADS = Feature("num_kv_heads", ">1", "size")
GROUPED = Feature("gqa_ratio", ">1")
HEAD_SIZE_NOT_POW2 = Feature("head_size", " not pow2")
RATIO_NOT_POW2 = Feature("gqa_ratio", " not pow2")
_V_HEAD_SIZE = Feature("v_head_size")
_HEAD_SIZES = (16, 64, 128)
_WRITTEN_FOR = (64, 128)
"""The sizes of most models: where a kernel has one of them in place of the case's, it is right at no other."""
_GQA_RATIOS = (8,)
_HEADS = ("1", "pow2", "other")
_V_HEAD_SIZES = ("as K's", "smaller", "larger")


def heads_class(heads: int) -> str:
    return "1" if heads == 1 else "pow2" if is_power_of_two(heads) else "other"


def nearest(sizes: Sequence[int], size: int) -> list[int]:
    """The nearest smaller and larger one; of those, and before them, the nearest power of two if this is none."""
    smaller, larger = [other for other in sizes if other < size], [other for other in sizes if other > size]
    found = [max(smaller)] if smaller else []
    found += [min(larger)] if larger else []
    powers = [other for other in sizes if is_power_of_two(other) and other != size]
    if powers and not is_power_of_two(size):
        found.insert(0, min(powers, key=lambda other: abs(other - size)))
    return list(dict.fromkeys(found))


class Heads(Facet[AttentionCase]):
    """KV heads, and query heads on each."""

    fields = ("num_q_heads", "num_kv_heads")
    jumps_with = "heads"

    def features(self, case: AttentionCase) -> Iterator[Feature]:
        if case.num_kv_heads > 1:
            yield SEVERAL_KV_HEADS
        if case.gqa_ratio > 1:
            yield GROUPED
        if not is_power_of_two(case.gqa_ratio):
            yield RATIO_NOT_POW2

    def general(self, case: AttentionCase, domain: Domain) -> Iterator[Feature]:
        """Query heads share a KV head or have one each: it may take nothing but two of them."""
        if case.num_q_heads > domain.simplest.num_q_heads:
            yield SEVERAL_HEADS

    def alternatives(self, case: AttentionCase, domain: Domain) -> Iterator[Changes]:
        """As many query heads on a KV head each, or all on one."""
        if case.num_kv_heads == 1 and is_power_of_two(case.gqa_ratio):
            yield {"num_kv_heads": case.num_q_heads}
        elif case.gqa_ratio == 1:
            yield {"num_kv_heads": 1}

    def traits(self, case: AttentionCase) -> Iterator[Feature]:
        for name in ("num_q_heads", "num_kv_heads", "gqa_ratio"):
            yield from number_traits(name, getattr(case, name))

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("GQA ratio", classes(_GQA_RATIOS), lambda case: (size_class(case.gqa_ratio, _GQA_RATIOS),))
        yield Axis("KV heads", _HEADS, lambda case: (heads_class(case.num_kv_heads),))

    def objections(self, case: AttentionCase, domain: Domain) -> Iterator[str]:
        yield from not_among("gqa_ratio", case.gqa_ratio, domain.supports.gqa_ratios)

    def size(self, case: AttentionCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        yield SizeRank.HEADS, (case.num_q_heads, case.num_kv_heads)

    def shrink(self, case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
        ratio = case.gqa_ratio
        if (counts := head_counts_of(domain.supports)) is not None:
            return (yield from first_of(case, [_with_heads(case, kv, q // kv) for q, kv in counts]))
        case = yield from lower_integer(case, case.num_kv_heads, 1, lambda case, count: _with_heads(case, count, ratio))
        ratios = gqa_ratios_of(domain.supports)
        return (yield from first_of(case, [_with_heads(case, case.num_kv_heads, one) for one in ratios if one < ratio]))

    def changes(self, case: AttentionCase, domain: Domain) -> Iterator[Change]:
        if case.gqa_ratio > 1:
            yield f"1 query head on each KV head instead of {case.gqa_ratio}", {"num_q_heads": case.num_kv_heads}
        if case.num_kv_heads > 1:
            words = f"1 KV head instead of {case.num_kv_heads}"
            yield words, {"num_kv_heads": 1, "num_q_heads": case.gqa_ratio}

    def without(self, feature: Feature, case: AttentionCase, domain: Domain) -> Iterator[Changes]:
        if feature == SEVERAL_HEADS:
            yield {"num_q_heads": 1, "num_kv_heads": 1}
        if feature == RATIO_NOT_POW2:
            yield {"num_q_heads": case.num_kv_heads << (case.gqa_ratio.bit_length() - 1)}


def _with_heads(case: AttentionCase, num_kv_heads: int, gqa_ratio: int) -> AttentionCase | None:
    return changed(case, num_kv_heads=num_kv_heads, num_q_heads=num_kv_heads * gqa_ratio)


class VHeadSize(Facet[AttentionCase]):
    """The size of V's heads, where it is not that of K's: None for that of q and K."""

    fields = ("v_head_size",)
    jumps_with = "head_size"

    def features(self, case: AttentionCase) -> Iterator[Feature]:
        if case.v_head_size is not None and not case.values_in_keys:  # where it is always another one
            yield _V_HEAD_SIZE
            if case.v_head_size > case.head_size:
                yield Feature("v_head_size", ">head_size", "size")

    def traits(self, case: AttentionCase) -> Iterator[Feature]:
        yield from number_traits("v_head_size", case.value_size)

    def axes(self, domain: Domain) -> Iterator[Axis]:
        if domain.supports.v_head_sizes != "equal":
            yield Axis("V head size", _V_HEAD_SIZES, lambda case: (_beside(case.head_size, case.value_size),))

    def objections(self, case: AttentionCase, domain: Domain) -> Iterator[str]:
        declared = domain.supports.v_head_sizes
        if isinstance(declared, tuple):
            yield from not_among("v_head_size", case.value_size, declared)
        elif declared == "equal" and case.v_head_size is not None:
            yield (
                f"v_head_size={case.v_head_size} beside head_size={case.head_size}, but the kernel declares equal ones"
            )

    def size(self, case: AttentionCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        """One size for both comes first, then the smaller ones, those of K before those of V."""
        yield SizeRank.HEAD_SIZE, case.v_head_size is not None
        yield SizeRank.HEAD_SIZE, (head_size_rank(case.head_size), head_size_rank(case.value_size))

    def shrink(self, case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
        """One size for K and V; else the other way round, both as small as can be, and then that of V."""
        if case.v_head_size is None:
            return case
        layout = getattr(case, "layout", None)
        small = [
            changed(case, head_size=head_size, v_head_size=v_head_size)
            for head_size in head_sizes_of(domain.supports, case.kv_dtype, layout)[:2]
            for v_head_size in v_head_sizes_of(domain.supports, head_size, layout)[:4]
        ]
        return (
            yield from first_of(
                case,
                [
                    changed(case, v_head_size=None),
                    changed(case, head_size=case.v_head_size, v_head_size=None),
                    changed(case, head_size=case.v_head_size, v_head_size=case.head_size),
                    *small,
                    *(
                        changed(case, v_head_size=size)
                        for size in v_head_sizes_of(domain.supports, case.head_size, layout)
                    ),
                ],
            )
        )

    def changes(self, case: AttentionCase, domain: Domain) -> Iterator[Change]:
        if case.v_head_size is not None:
            yield f"v_head_size {case.head_size} instead of {case.v_head_size}", {"v_head_size": None}

    def without(self, feature: Feature, case: AttentionCase, domain: Domain) -> Iterator[Changes]:
        if feature == _V_HEAD_SIZE:
            yield {"v_head_size": None}


def _beside(head_size: int, v_head_size: int) -> str:
    return _V_HEAD_SIZES[(v_head_size != head_size) + (v_head_size > head_size)]


class HeadSize(Facet[CaseBase]):
    """The size of the heads of q and K, or of the states to be merged."""

    fields = ("head_size",)
    jumps_with = "head_size"
    asked = 2

    def features(self, case: CaseBase) -> Iterator[Feature]:
        if not is_power_of_two(case.head_size):
            yield HEAD_SIZE_NOT_POW2
        for limit in _HEAD_SIZES:
            if case.head_size > limit:
                yield Feature("head_size", f">{limit}")

    def traits(self, case: CaseBase) -> Iterator[Feature]:
        yield from number_traits("head_size", case.head_size)

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("head size", classes(_HEAD_SIZES), lambda case: (size_class(case.head_size, _HEAD_SIZES),))

    def objections(self, case: CaseBase, domain: Domain) -> Iterator[str]:
        yield from not_among("head_size", case.head_size, domain.supports.head_sizes)

    def size(self, case: CaseBase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        yield SizeRank.HEAD_SIZE, head_size_rank(case.head_size)

    def shrink(self, case: CaseBase, domain: Domain) -> Proposal[CaseBase]:
        smaller = [size for size in _sizes(case, domain) if head_size_rank(size) < head_size_rank(case.head_size)]
        return (yield from first_of(case, [changed(case, head_size=size) for size in smaller]))

    def unusual_values(self, case: CaseBase, domain: Domain) -> Iterator[Feature]:
        yield from (other_than("head_size", size) for size in _written_for(case, domain))

    def changes(self, case: CaseBase, domain: Domain) -> Iterator[Change]:
        for size in nearest(_sizes(case, domain), case.head_size):
            yield f"head_size {size} instead of {case.head_size}", {"head_size": size}

    def without(self, feature: Feature, case: CaseBase, domain: Domain) -> Iterator[Changes]:
        yield from (
            {"head_size": size} for size in _written_for(case, domain) if feature == other_than("head_size", size)
        )


def _written_for(case: CaseBase, domain: Domain) -> list[int]:
    """The sizes that a kernel may be written for, other than the case's."""
    return [size for size in _sizes(case, domain) if size in _WRITTEN_FOR and size != case.head_size]


def _sizes(case: CaseBase, domain: Domain) -> tuple[int, ...]:
    return head_sizes_of(domain.supports, getattr(case, "kv_dtype", case.dtype), getattr(case, "layout", None))
