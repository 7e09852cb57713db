"""Whole cases, limited by what a kernel supports by construction: nothing drawn is thrown away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import strategies as st

from attnfuzz.cases.facets import facets_of
from attnfuzz.cases.facets.facet import changed
from attnfuzz.problems.attention import VarlenCase
from attnfuzz.problems.boundaries import MASKED_TILES, QUERY_TILE, query_steps, split_count, tile_sizes
from attnfuzz.problems.cases import PROBLEMS, Case
from attnfuzz.problems.choices import masks_of, min_seq_len, paddings_of
from attnfuzz.problems.combinations import fits, put_into, regular_queries
from attnfuzz.problems.formats import Format
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.module import Problem, case_type_of, has_query_lens, module_of
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import OptionValue, Supports, check_options
from attnfuzz.strategies.decisions import Decisions, decided, decided_together
from attnfuzz.strategies.formats import FormatPlan, decide_format, format_bytes
from attnfuzz.strategies.lengths import LengthLimits, QueryLimits, decide_query_lens, decide_seq_lens, decide_slack
from attnfuzz.strategies.masked_tiles import MASKED_TILES_BYTES, Placed, RowLimits, decide_placed
from attnfuzz.strategies.masks import decide_mask, mask_bytes
from attnfuzz.strategies.sizes import CPU_SIZES, Sizes
from attnfuzz.strategies.storage import PAGES_BYTES, decide_pages
from attnfuzz.strategies.values import VALUES_BYTES, Causal, decide_scale, decide_values

_FREES_PAGES = (False, True, True)
_MOST_FORMATS = 256
_WORK_OF_QUERIES = 6
"""Times the work of one query token per sequence: for a whole tile of queries in a case with few heads."""
_MOST_WORK_OF_QUERIES = 2
"""Times the most that other cases may be: on the interpreter, a case that takes longer would look like a hang."""
_MOST_WORK_OF_PLACED = 4
"""Likewise: it has the first sequences of its batch only, and a kernel takes rows of a block together."""
_MOST_BESIDE_PLACED = 2
_PARTS_BYTES = 3 + PAGES_BYTES + VALUES_BYTES + MASKED_TILES_BYTES
"""Bytes of an attention case, lengths left out; merging takes less."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Facts that are known before the first draw; without ``formats`` one is drawn for each case.

    ``numbers``: of the kernel's source, which may be a size of its tiles or a limit of lengths.
    """

    free: FormatPlan
    formats: tuple[Format, ...]
    plain: Mapping[str, Sequence[Any]]
    numbers: tuple[int, ...]

    @property
    def supports(self) -> Supports:
        return self.free.supports

    @property
    def sizes(self) -> Sizes:
        return self.free.sizes


def cases(
    problem: Problem,
    *,
    supports: Supports | None = None,
    options: Mapping[str, tuple[OptionValue, ...]] | None = None,
    sizes: Sizes = CPU_SIZES,
    formats: Sequence[Format] = (),
) -> st.SearchStrategy[Case]:
    """Cases of ``problem`` within ``supports`` and ``sizes``, with one choice for each of the kernel's ``options``.

    ``formats``: up to 256 that fit all of these, to take the format of each case from. Shrinks to ``simplest_case``,
    or to the first of ``formats`` with one token. Raises ValueError for arguments that no case fits.
    """
    build, size = _builder(problem, supports, options, sizes, formats)
    return decided(build, size=size)


def case_lists(
    problem: Problem,
    *,
    length: int,
    supports: Supports | None = None,
    options: Mapping[str, tuple[OptionValue, ...]] | None = None,
    sizes: Sizes = CPU_SIZES,
    formats: Sequence[Format] = (),
    numbers: tuple[int, ...] = (),
) -> st.SearchStrategy[list[Case]]:
    """Lists of ``length`` independent ``cases``, each of which costs a fraction of one drawn by itself.

    ``numbers``: of tokens, at which the kernel may do something else than before.
    """
    build, size = _builder(problem, supports, options, sizes, formats, numbers)
    return decided_together(build, size=size, count=length)


def _builder(
    problem: Problem,
    supports: Supports | None,
    options: Mapping[str, tuple[OptionValue, ...]] | None,
    sizes: Sizes,
    formats: Sequence[Format],
    numbers: tuple[int, ...] = (),
) -> tuple[Callable[[Decisions], Case], int]:
    """A function that makes a case, and the number of bytes it reads."""
    if len(formats) > _MOST_FORMATS:
        raise ValueError(f"formats has {len(formats)} entries; only {_MOST_FORMATS} can be told apart, pass fewer")
    supports, options = supports or Supports(), dict(options or {})
    check_options(options)
    if isinstance(problem, OpenProblem):
        picks = len(options) + 1 + max(map(len, supports.combinations), default=0)
        return partial(_open_case, problem, options, supports), problem.decisions + picks
    if problem not in PROBLEMS:
        raise ValueError(f"problem={problem!r} must be one of {PROBLEMS}")
    kind = case_type_of(problem)
    facets = facets_of(kind)
    plain = {name: choices for facet in facets for name, choices in facet.draws(supports).items()}
    plan = Plan(FormatPlan.of(problem, supports, options, sizes), tuple(formats), plain, numbers)
    module = module_of(problem)
    size = format_bytes(plan.free) + 1 + _PARTS_BYTES + sizes.max_seqs + len(plain)
    if has_query_lens(problem):
        size += _queries_bytes(sizes.max_seqs)
    if "mask" in kind.__struct_fields__:
        size += mask_bytes()
    return lambda decisions: _going_together(module.draw(decisions, plan), plan), size


def _going_together(case: Any, plan: Plan) -> Any:
    """``case``, whose format ``where`` permits, with others of the fields that are drawn apart if these do not fit."""
    table = plan.supports.combinations
    if not table or any(fits(case, one) for one in table):
        return case
    others = itertools.chain(
        (changed(case, **{name: choice}) for name, choices in plan.plain.items() for choice in choices),
        (changed(case, **regular_queries(case, one)) for one in table if isinstance(case, VarlenCase)),
    )
    found = (other for other in others if other is not None and any(fits(other, one) for one in table))
    return next(found, None) or simplest_case(case.problem, plan.supports, plan.free.options)


def decide_format_and_work(decisions: Decisions, plan: Plan) -> tuple[Format, int]:
    """A format, and how much work the case may be."""
    part = decisions.part(format_bytes(plan.free))
    if plan.formats:
        return part.pick(plan.formats), part.pick(plan.sizes.work)
    return decide_format(part, plan.free)


def decide_plain(decisions: Decisions, plan: Plan) -> dict[str, Any]:
    """Fields that go with any others."""
    return {name: decisions.pick(choices) for name, choices in plan.plain.items()}


def _open_case(
    problem: OpenProblem, options: Mapping[str, tuple[OptionValue, ...]], supports: Supports, decisions: Decisions
) -> OpenCase:
    """Each field by decisions of its own, so that none shifts when another shrinks."""
    fields = {name: field.decide(decisions.part(field.decisions)) for name, field in problem.fields.items()}
    chosen = {name: decisions.pick(choices) for name, choices in options.items()}
    case, table = problem.case_type(**fields, options=chosen), supports.combinations
    if not table or any(fits(case, one) for one in table):
        return case
    return put_into(case, decisions.pick(table), decisions.pick)


def attention_fields(decisions: Decisions, plan: Plan) -> dict[str, Any]:
    """Fields of a case, by name; those that the problem has."""
    format_, work = decide_format_and_work(decisions, plan)
    num_splits = format_.num_splits or split_count(format_.options)
    scale = decide_scale(decisions, format_.head_size)
    limits = _length_limits(plan, format_, num_splits, work)
    seq_lens = decide_seq_lens(decisions.part(1 + limits.max_seqs), limits)
    fields = {name: value for name in Format.__struct_fields__ if (value := getattr(format_, name)) is not None}
    placed = decide_placed(decisions.part(MASKED_TILES_BYTES), _row_limits(plan, format_, limits))
    if placed is not None:
        seq_lens = _with_placed(seq_lens, placed, limits)
    query_lens: tuple[int, ...] = ()
    if has_query_lens(plan.free.problem):
        seq_lens = seq_lens if any(seq_lens) else (1, *seq_lens[1:])  # for one query token at least
        part = decisions.part(_queries_bytes(limits.max_seqs))
        query_lens = decide_query_lens(part, seq_lens, _query_limits(plan, format_, limits))
        query_lens = query_lens if placed is None else (placed.query_len, *query_lens[1:])
        fields["query_lens"] = query_lens
        fields["seq_slack"] = decide_slack(part, max(seq_lens), plan.supports.max_seq_len)
        fields["query_slack"] = decide_slack(part, max(query_lens), _most_queries(plan.supports))
    if "mask" in case_type_of(plan.free.problem).__struct_fields__:
        block_size = format_.block_size or 1
        fields["mask"] = decide_mask(
            decisions.part(mask_bytes()),
            masks_of(plan.supports),
            query_lens,
            [-(-seq_len // block_size) for seq_len in seq_lens],
            may_hide_all=plan.supports.empty_sequences,
            per_sequence=plan.supports.mask_per_sequence,
            edge=0 if placed is None else placed.edge,
            pages_of_context=(seq_lens[0] - query_lens[0]) // block_size,
        )
    fields |= decide_plain(decisions, plan)
    if format_.layout is not None:
        shared = 3 if len(seq_lens) > 1 else 0
        paddings = paddings_of(plan.supports)
        fields["pages"] = decide_pages(decisions.part(PAGES_BYTES), paddings, max_shared_blocks=shared)
    values = decide_values(
        decisions.part(VALUES_BYTES),
        seq_lens,
        num_kv_heads=format_.num_kv_heads or 1,
        steps=limits.steps,
        num_splits=num_splits,
        reach=format_.head_size * scale,
        causal=Causal(query_lens, _query_steps(plan, format_), _window(format_)),
        may_lie_low=not _has_floor(format_),
        begins_masked=placed is not None and _hides_first_keys(format_, fields.get("mask")),
        kv=format_.kv,
    )
    if _window(format_) is not None and plan.supports.freed_pages and decisions.pick(_FREES_PAGES):
        fields["variant"] = fields["variant"].with_freed_pages()
    return fields | {"scale": scale, "seq_lens": seq_lens, "values": values}


def _window(format_: Format) -> int | None:
    return format_.variant.window if format_.variant is not None else None


def _hides_first_keys(format_: Format, mask: Mask | None) -> bool:
    return _window(format_) is not None or (mask is not None and mask.kind in ("chunks", "pages"))


def _has_floor(format_: Format) -> bool:
    """Whether the largest number in a softmax cannot lie far below 0."""
    variant = format_.variant
    return variant is not None and (variant.has_weighty_sinks or variant.soft_cap is not None)


def _queries_bytes(max_seqs: int) -> int:
    return 3 + max_seqs


def _most_queries(supports: Supports) -> int | None:
    """Most query tokens of one sequence, which has at least as many tokens."""
    return min((most for most in (supports.max_query_len, supports.max_seq_len) if most is not None), default=None)


def _gqa_ratio(format_: Format) -> int:
    return format_.num_q_heads // (format_.num_kv_heads or 1)


def _known_tiles(plan: Plan, options: Mapping[str, OptionValue]) -> tuple[int, ...]:
    """Sizes that the kernel's tiles may have by its options, or else by the numbers in its source."""
    numbers = (number for number in plan.numbers if MASKED_TILES[0] <= number <= MASKED_TILES[-1])
    return tile_sizes(options) or tuple(numbers)


def _query_steps(plan: Plan, format_: Format) -> tuple[int, ...]:
    return query_steps(_known_tiles(plan, format_.options), _gqa_ratio(format_))


def _row_limits(plan: Plan, format_: Format, lengths: LengthLimits) -> RowLimits:
    varlen = has_query_lens(plan.free.problem)
    blocks, options = _row_blocks(plan, format_)
    return RowLimits(
        window=lengths.window,
        max_len=min(lengths.max_len, lengths.max_padded),
        max_query_len=(_most_queries(plan.supports) or lengths.max_len) if varlen else None,
        tiles=_known_tiles(plan, options),
        work=_MOST_WORK_OF_PLACED * max(plan.sizes.work) // blocks,
        tile=lengths.tile,
    )


def _with_placed(seq_lens: tuple[int, ...], placed: Placed, limits: LengthLimits) -> tuple[int, ...]:
    """It comes first, before a few others, as far as there is room for them."""
    beside = min(_MOST_BESIDE_PLACED, limits.max_padded // placed.seq_len - 1)
    return (placed.seq_len, *seq_lens[1 : 1 + beside])


def _query_limits(plan: Plan, format_: Format, lengths: LengthLimits) -> QueryLimits:
    most_work = _MOST_WORK_OF_QUERIES * max(plan.sizes.work)
    return QueryLimits(
        steps=_query_steps(plan, format_),
        least=min_seq_len(plan.supports),
        most=_most_queries(plan.supports) or lengths.max_len,
        work=max(lengths.work, min(_WORK_OF_QUERIES * lengths.work, most_work // format_.num_q_heads)),
        tile=lengths.tile,
    )


def _length_limits(plan: Plan, format_: Format, num_splits: int, work: int) -> LengthLimits:
    """A kernel may advance by its page or tile size, so short ones make the same length more work.

    One with a tile among its options advances by that.
    """
    blocks, options = _row_blocks(plan, format_)
    tiles = tile_sizes(options)
    steps = (*([format_.block_size] if format_.block_size else []), *tiles)
    sizes = plan.sizes
    tile = max(4, min(sizes.tile, *tiles)) if tiles else max(4, min(16, *steps)) if steps else 16
    head_size = max(format_.head_size, format_.v_head_size or 0)
    most_tokens = max(1, sizes.max_cache_elements // ((format_.num_kv_heads or 1) * head_size))
    window = _window(format_)
    return LengthLimits(
        steps=steps if window is None else (*steps, window),
        known=plan.numbers,
        window=window,
        num_splits=num_splits,
        min_seqs=1,
        max_seqs=sizes.max_seqs,
        min_len=min_seq_len(plan.supports),
        max_len=min(sizes.max_seq_len, plan.supports.max_seq_len or sizes.max_seq_len),
        max_padded=most_tokens,
        work=max(1, min(work // blocks, sizes.max_tokens // tile, most_tokens // tile)),
        tile=tile,
    )


def _row_blocks(plan: Plan, format_: Format) -> tuple[int, Mapping[str, OptionValue]]:
    """How many programs share the query heads of a sequence, and the options that may be numbers of its keys.

    Rows of a block are the query heads of a group, except where each sequence has several query tokens.
    """
    if "block_m" not in format_.options or has_query_lens(plan.free.problem):
        return format_.num_q_heads, format_.options
    others = {name: value for name, value in format_.options.items() if name != "block_m"}
    return (format_.num_kv_heads or 1) * -(-_gqa_ratio(format_) // QUERY_TILE), others
