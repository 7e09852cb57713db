"""Draws the format of a case first, for which kernels are compiled: the rest of the case is drawn to fit it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, islice

from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase
from attnfuzz.problems.boundaries import QUERY_TILE, split_count, tile_sizes
from attnfuzz.problems.choices import (
    KV_HEADS,
    LARGE_BLOCK_SIZES,
    LARGE_HEAD_SIZES,
    block_sizes_of,
    caches_of,
    dtypes_of,
    gqa_ratios_of,
    head_counts_of,
    head_sizes_of,
    kv_dtypes_of,
    layouts_of,
    merge_heads_of,
    needed_variants,
    options_of,
    split_counts_of,
    v_head_sizes_of,
    variants_of,
)
from attnfuzz.problems.combinations import settled
from attnfuzz.problems.formats import Format, format_key
from attnfuzz.problems.module import Problem, case_type_of, has_query_lens
from attnfuzz.problems.quantised_kv import KV_SCALE_TENSORS
from attnfuzz.problems.simplest import simplest_cases
from attnfuzz.problems.supports import MAX_COMBINATIONS, Dtype, Layout, OptionValue, Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANT_TENSORS, absent_tensors, with_variants
from attnfuzz.strategies.decisions import Decisions
from attnfuzz.strategies.sizes import CPU_SIZES, Sizes
from attnfuzz.strategies.storage import STRIDES_BYTES, decide_strides, decide_strides_of, strides_everywhere
from attnfuzz.strategies.variants import (
    QUANTISED_KV_BYTES,
    VARIANT_BYTES,
    decide_quantised_kv,
    decide_variant,
    fits_packed,
)

_MERGE_HEADS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 32)
_HEADS = ((6, 0),) * 8 + ((3, 0),) * 6 + ((1, 0), (1, 0), (1, 2), (1, 2), (1, 1))
"""Pairs to draw from: how much work a query head may take, which with many heads leaves room for short sequences only,
and the least number of groups of more than 16 query heads. One case in a hundred has several such groups, and takes six
times as long as others; one in thirty has one, and hardly a token beside it."""
_HEADS_OF_BLOCKS = (*_HEADS, (1, 1), (1, 1))
"""Where the rows of a block are an option: one in seven has one group that may need several of them."""
_ROOM_FOR_WIDE = 1.2
"""Times the heads that there is work for: 2 groups of 24 in a case that may have 40."""
_HEADS_OF_ONE_WIDE = 24
_MOST_PROGRAMS = 160
_MOST_PROGRAMS_OF_QUERIES = 40
"""Of one query token whose group has more than 24 heads, each of which may take one for each split, unless all cases
may be large. Padding tokens have as many."""
_RARITY_OF_LARGE = 64, 12
"""How many times as likely each of the other wide groups is; the second where the rows of a block are an option, and a
group takes few programs."""
_RARITY_OF_LARGE_HEADS = 12
_RARITY_OF_LARGE_PAGES = 6
_HEADS_OF_SCALES = 6
"""Where KV heads have scales of their own, room for at least two of them, with several query heads each."""
_TILE = 16
"""Tokens that a step counts as, of a kernel without a tile among its options."""
_SHAPE_BYTES = 8
_V_HEAD_SIZE_BYTES = 2
_POOL = 6
"""Formats that are drawn for each of the first that is chosen."""
_KINDS_OF_GROUPS = ("groups of blocks", "one head", "a block")
"""Of the first three formats. Released kernels are wrong in both of the first two; the second may take several times as
long to compile as a block."""

_RARITY_OF_NEEDED = 3
"""How many times as likely combinations are that do not ask for a variant: others take part of what is drawn plain."""
_Choice = tuple[str, str]


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """Facts that are known before the first draw.

    ``head_sizes``: of each dtype and layout that has any. ``alternatives``: a plan for each combination of ``where``,
    the one with the simplest case first; what is drawn is drawn from one of them.
    """

    problem: Problem
    supports: Supports
    options: Mapping[str, tuple[OptionValue, ...]]
    sizes: Sizes
    head_sizes: Mapping[Dtype, Mapping[Layout | None, tuple[int, ...]]]
    alternatives: tuple[FormatPlan, ...] = ()

    @classmethod
    def of(
        cls, problem: Problem, supports: Supports, options: Mapping[str, tuple[OptionValue, ...]], sizes: Sizes
    ) -> FormatPlan:
        """For a kernel that declares ``supports`` and ``options``. Raises ValueError where there is no case."""
        supports = settled(problem, supports, options)
        each = [one for one, _ in simplest_cases(problem, supports, options)]
        if not supports.combinations:
            return cls._of_one(problem, supports, options, sizes)
        plans = [cls._of_one(problem, one, options_of(one, options), sizes) for one in each]
        often = min(_RARITY_OF_NEEDED, MAX_COMBINATIONS // len(plans))  # so many are told apart
        weighted = [one for one in plans for _ in range(1 if needed_variants(one.supports) else often)]
        return cls(problem, supports, options, sizes, {}, tuple(weighted))

    @classmethod
    def _of_one(
        cls, problem: Problem, supports: Supports, options: Mapping[str, tuple[OptionValue, ...]], sizes: Sizes
    ) -> FormatPlan:
        """Formats of one combination of ``where``, or without any."""
        has_cache = issubclass(case_type_of(problem), PagedDecodeCase)
        layouts: tuple[Layout | None, ...] = layouts_of(supports) if has_cache else (None,)
        found: dict[Dtype, dict[Layout | None, tuple[int, ...]]] = {}
        for dtype in dtypes_of(supports):
            for cache in caches_of(problem, supports, dtype)[:1]:  # a plain one, unless there is none
                fitting = {layout: head_sizes_of(supports, cache or dtype, layout) for layout in layouts}
                found[dtype] = {layout: kept for layout, kept in fitting.items() if kept}
        return cls(problem, supports, options, sizes, {dtype: kinds for dtype, kinds in found.items() if kinds})


def draw_formats(
    problem: Problem,
    *,
    supports: Supports | None = None,
    options: Mapping[str, tuple[OptionValue, ...]] | None = None,
    sizes: Sizes = CPU_SIZES,
    seed: int,
) -> Iterator[Format]:
    """Formats without end, distributed as in ``cases``, some of them more than once; the same for the same ``seed``."""
    plan = FormatPlan.of(problem, supports or Supports(), dict(options or {}), sizes)
    source = random.Random(seed)
    while True:
        yield decide_format(Decisions(source.randbytes(format_bytes(plan))), plan)[0]


def first_formats(
    problem: Problem,
    *,
    supports: Supports | None = None,
    options: Mapping[str, tuple[OptionValue, ...]] | None = None,
    sizes: Sizes = CPU_SIZES,
    count: int,
) -> list[Format]:
    """The ``count`` formats to begin with, always the same: together they hold many pairs of choices.

    Every other one is contiguous, as nearly all inputs outside of tests are; of the rest every other one is strided
    all over: what ignores a stride shows in the first of them. The first few have groups of query heads of each kind
    for which kernels have code of their own. Fewer than ``count`` if there are no more.
    """
    supports = supports or Supports()
    endless = draw_formats(problem, supports=supports, options=options, sizes=sizes, seed=0)
    drawn = islice(endless, _POOL * count)
    alternating = (one if i % 2 else one.with_strides({}) for i, one in enumerate(drawn))
    pool = {format_key(one): one for one in alternating}
    left = [(one, _pairs(one)) for one in pool.values()]
    chosen: list[Format] = []
    covered: set[frozenset[_Choice]] = set()
    while left and len(chosen) < count:
        wanted = [entry for entry in left if bool(entry[0].strides) == bool(len(chosen) % 2)] or left
        if len(chosen) < len(_KINDS_OF_GROUPS):
            kind = _KINDS_OF_GROUPS[len(chosen)]
            wanted = [entry for entry in wanted if _kind_of_group(entry[0]) == kind] or wanted
        most = max(wanted, key=lambda entry: len(entry[1] - covered))
        best = most[0]
        if best.strides and len(chosen) % 4 == 1:
            everywhere = _strided_everywhere(best, problem, supports, turn=len(chosen) // 4)
            best = best if everywhere in chosen else everywhere
        left = [entry for entry in left if entry is not most and entry[0] != best]
        chosen.append(best)
        covered |= _pairs(best)
    return chosen


def _strided_everywhere(format_: Format, problem: Problem, supports: Supports, *, turn: int) -> Format:
    strides = strides_everywhere(problem, supports, format_.layout, turn=turn)
    absent = absent_tensors(format_.variant or PLAIN_VARIANT)
    if format_.kv is None:
        absent |= {*KV_SCALE_TENSORS}
    return format_.with_strides({name: kind for name, kind in strides.items() if name not in absent})


def _kind_of_group(format_: Format) -> str:
    """One query head of a KV head is often multiplied row by row, several as a block, more of them in several."""
    num_kv_heads = format_.num_kv_heads or format_.num_q_heads
    ratio = format_.num_q_heads // num_kv_heads
    if ratio > QUERY_TILE:
        return "groups of blocks" if num_kv_heads > 1 else "blocks"
    return "one head" if ratio == 1 else "a block"


def _pairs(format_: Format) -> set[frozenset[_Choice]]:
    """Pairs of choices that ``format_`` makes; a pair of one and the same counts too."""
    fields = {name: getattr(format_, name) for name in Format.__struct_fields__}
    flat = {**fields, **fields.pop("strides"), **fields.pop("options")}
    flat["gqa_ratio"] = format_.num_q_heads // (format_.num_kv_heads or 1)
    choices = [(name, str(value)) for name, value in flat.items()]
    return {frozenset(pair) for pair in combinations_with_replacement(choices, 2)}


def format_bytes(plan: FormatPlan) -> int:
    """How many bytes ``decide_format`` reads."""
    of_variant = VARIANT_BYTES if variants_of(plan.problem, plan.supports) else 0
    of_values = 0 if plan.supports.v_head_sizes == "equal" else _V_HEAD_SIZE_BYTES
    of_kv = QUANTISED_KV_BYTES if kv_dtypes_of(plan.problem, plan.supports) else 0
    of_alternatives = 1 if plan.alternatives else 0
    return 1 + _SHAPE_BYTES + len(plan.options) + STRIDES_BYTES + of_variant + of_values + of_kv + of_alternatives


def decide_format(decisions: Decisions, plan: FormatPlan) -> tuple[Format, int]:
    """A format, and the work for which its number of heads was drawn."""
    if plan.alternatives:
        return decide_format(decisions, decisions.pick(plan.alternatives))
    splits = decisions.part(1)
    # Before the work, which no case shows: what is read first shrinks first.
    options = decide_options(decisions.part(len(plan.options)), plan.options)
    shape = decisions.part(_SHAPE_BYTES)
    work = shape.pick(plan.sizes.work)
    dtype = shape.pick(tuple(plan.head_sizes))
    layout = shape.pick(tuple(plan.head_sizes[dtype]))
    strides = decide_strides(decisions.part(STRIDES_BYTES), plan.problem, plan.supports, layout)
    if not issubclass(case_type_of(plan.problem), AttentionCase):
        num_q_heads = _pick_merge_heads(shape, plan, min(work, plan.sizes.max_heads))
        head_size = _pick_head_size(shape, plan, dtype, layout, num_q_heads)
        format_ = Format(dtype=dtype, num_q_heads=num_q_heads, head_size=head_size, strides=strides, options=options)
        return format_, work
    num_splits = _pick_splits(splits, plan)
    num_sharing = num_splits or split_count(options)  # programs that share a row
    per_head, wide = shape.pick(_HEADS_OF_BLOCKS if "block_m" in options else _HEADS)
    most_heads = work // (per_head * (1 + num_sharing // 4))
    if wide:
        most_heads = max(int(_ROOM_FOR_WIDE * most_heads), _HEADS_OF_ONE_WIDE if wide == 1 else 0)
    kv = None
    if kv_dtypes := kv_dtypes_of(plan.problem, plan.supports):
        of_kv = decisions.part(QUANTISED_KV_BYTES)
        may_be_plain = None in caches_of(plan.problem, plan.supports, dtype)
        kv = decide_quantised_kv(of_kv, kv_dtypes, plan.supports.kv_scales, may_be_plain=may_be_plain)
    has_scales = kv is not None and kv.per == "head"
    if has_scales:
        most_heads = max(most_heads, _HEADS_OF_SCALES // (1 + num_sharing // 4))
    most_heads = min(plan.sizes.max_heads, max(1, most_heads))
    if (counts := head_counts_of(plan.supports)) is not None:
        num_q_heads, num_kv_heads = decide_head_counts(shape, counts, most_heads)
    else:
        in_blocks = "block_m" in options
        ratios = gqa_ratios_of(plan.supports)
        large = [one for one in ratios if one > _HEADS_OF_ONE_WIDE]
        programs = {one: (-(-one // QUERY_TILE) if in_blocks else one) * num_sharing for one in large}
        most_programs = _MOST_PROGRAMS_OF_QUERIES if has_query_lens(plan.problem) else _MOST_PROGRAMS
        most_programs = max(most_programs, max(plan.sizes.work) // 8)
        num_q_heads, num_kv_heads = decide_gqa_heads(
            shape,
            tuple(one for one in ratios if one not in large) if plan.supports.large_sizes else ratios,
            most_heads,
            wide=wide,
            least_kv_heads=2 if has_scales else 1,
            large=tuple(one for one in large if wide == 1 and programs[one] <= most_programs),
            weight=_RARITY_OF_LARGE[in_blocks],
        )
    head_size = _pick_head_size(shape, plan, dtype, layout, num_q_heads)
    v_head_size = _pick_v_head_size(decisions, plan, layout, num_q_heads, head_size)
    token_elements = num_kv_heads * max(head_size, v_head_size)
    block_size = None if layout is None else _pick_block_size(shape, plan, token_elements)
    variant = None
    if names := variants_of(plan.problem, plan.supports):
        tiles = tile_sizes(options)
        steps = (*((block_size,) if block_size else ()), *tiles)
        longest = max(1, work // num_q_heads) * min(plan.sizes.tile, *tiles or (_TILE,))
        part = decisions.part(VARIANT_BYTES)
        is_wide = num_q_heads // num_kv_heads > QUERY_TILE
        variant = decide_variant(part, names, steps, longest=longest, num_splits=num_sharing, wide_group=is_wide)
        variant = with_variants(variant, needed_variants(plan.supports))
        strides |= decide_strides_of(part, VARIANT_TENSORS, plan.supports.strides)
        strides = {name: kind for name, kind in strides.items() if name not in absent_tensors(variant)}
    if kv_dtypes:
        kv = kv if fits_packed(kv, layout, head_size) else None
        strides |= decide_strides_of(of_kv, KV_SCALE_TENSORS, plan.supports.strides)
        absent = () if kv is not None else KV_SCALE_TENSORS
        strides = {name: kind for name, kind in strides.items() if name not in absent}
    format_ = Format(
        dtype=dtype,
        layout=layout,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        num_splits=num_splits,
        variant=None if variant == PLAIN_VARIANT else variant,
        v_head_size=None if v_head_size == head_size else v_head_size,
        kv=kv,
        strides=strides,
        options=options,
    )
    return format_, work


def _pick_splits(decisions: Decisions, plan: FormatPlan) -> int | None:
    if "num_splits" not in case_type_of(plan.problem).__struct_fields__:
        return None
    most = min(plan.sizes.max_splits, plan.supports.max_num_splits or plan.sizes.max_splits)
    permitted = split_counts_of(plan.supports)
    counts = [count for count in permitted if count <= most] or list(permitted[:1])
    return decisions.pick(sorted([*counts, *(count for count in counts if count <= 4)]))  # many cost much


def _pick_merge_heads(shape: Decisions, plan: FormatPlan, most: int) -> int:
    counts = merge_heads_of(plan.supports) or _MERGE_HEADS
    return shape.pick([count for count in counts if count <= most] or counts[:1])


def _pick_head_size(shape: Decisions, plan: FormatPlan, dtype: Dtype, layout: Layout | None, num_q_heads: int) -> int:
    sizes = plan.head_sizes[dtype][layout]
    fitting = [size for size in sizes if size * num_q_heads <= plan.sizes.max_head_elements] or sizes[:1]
    return _pick_size(shape, plan, fitting, LARGE_HEAD_SIZES, _RARITY_OF_LARGE_HEADS)


def _pick_v_head_size(
    decisions: Decisions, plan: FormatPlan, layout: Layout | None, num_q_heads: int, head_size: int
) -> int:
    """Where K's size is supported too, that in three of five cases."""
    if plan.supports.v_head_sizes == "equal":
        return head_size
    part = decisions.part(_V_HEAD_SIZE_BYTES)
    sizes = v_head_sizes_of(plan.supports, head_size, layout)
    fitting = [size for size in sizes if size * num_q_heads <= plan.sizes.max_head_elements] or sizes[:1]
    others = [size for size in fitting if size != head_size]
    differs = part.pick((False, False, False, True, True))
    size = part.pick(others or fitting)
    return size if differs or sizes[0] != head_size else head_size


def _pick_block_size(shape: Decisions, plan: FormatPlan, token_elements: int) -> int:
    sizes = block_sizes_of(plan.supports)
    fitting = [size for size in sizes if size * token_elements <= plan.sizes.max_page_elements] or sizes[:1]
    return _pick_size(shape, plan, fitting, LARGE_BLOCK_SIZES, _RARITY_OF_LARGE_PAGES)


def _pick_size(shape: Decisions, plan: FormatPlan, fitting: Sequence[int], large: tuple[int, ...], rarity: int) -> int:
    """Any of them, and of those that only ``large_sizes`` offers each more rarely than the others."""
    rare = [size for size in fitting if plan.supports.large_sizes and size in large]
    usual = [size for size in fitting if size not in rare]
    return shape.pick_rarely(usual, rare, weight=rarity)


def decide_gqa_heads(
    decisions: Decisions,
    ratios: tuple[int, ...],
    max_heads: int,
    *,
    wide: int = 0,
    least_kv_heads: int = 1,
    large: tuple[int, ...] = (),
    weight: int = 1,
) -> tuple[int, int]:
    """``ratios`` ascending; where all of them exceed ``max_heads``, the first is drawn.

    ``wide``: a ratio above 16, or else of 16, and so many KV heads, where ``max_heads`` has room for them; 0: any.
    ``least_kv_heads``: likewise where there is room. ``large``: ratios that are drawn beside the wide ones, with one KV
    head, whatever ``max_heads`` is; each of the others is ``weight`` times as likely.
    """
    wide_ratios = [ratio for ratio in ratios if wide and ratio >= QUERY_TILE and wide * ratio <= max_heads]
    of_several = [ratio for ratio in ratios if least_kv_heads * ratio <= max_heads]
    narrow_ratios = of_several or [ratio for ratio in ratios if ratio <= max_heads] or ratios[:1]
    in_parts = [ratio for ratio in wide_ratios if ratio > QUERY_TILE]
    ratio = decisions.pick_rarely(in_parts or wide_ratios or narrow_ratios, large if wide else (), weight=weight)
    if ratio in large:
        return ratio, 1
    least = wide if wide_ratios else least_kv_heads if of_several else 1
    counts = [count for count in KV_HEADS if least <= count and count * ratio <= max_heads]
    num_kv_heads = decisions.pick(counts or KV_HEADS[:1])
    return ratio * num_kv_heads, num_kv_heads


def decide_head_counts(decisions: Decisions, counts: tuple[tuple[int, int], ...], max_heads: int) -> tuple[int, int]:
    """One of ``counts`` of query and KV heads, by the number of the latter first; the fewest where none fit."""
    fitting = [heads for heads in counts if heads[0] <= max_heads] or [min(counts)]
    num_kv_heads = decisions.pick(sorted({heads[1] for heads in fitting}))
    return decisions.pick([heads for heads in fitting if heads[1] == num_kv_heads])


def decide_options(decisions: Decisions, options: Mapping[str, tuple[OptionValue, ...]]) -> dict[str, OptionValue]:
    return {name: decisions.pick(choices) for name, choices in options.items()}
