"""From a failed comparison to the mistake that explains it, in one clause.

Mistakes are replayed in float64, and the first that gives this number is named.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnfuzz.explaining import formulas, tokens
from attnfuzz.explaining.formulas import column_mistakes, mask_mistakes, scale_mistakes, variant_mistakes
from attnfuzz.explaining.low_precision import LOWEST_EXPONENT, OF_EMPTY_ROWS
from attnfuzz.explaining.merges import diagnose_merge
from attnfuzz.explaining.mistakes import (
    MOST_TOLD,
    REFUTED,
    Diagnosis,
    Family,
    chain,
    every_match,
    first_match,
    first_match_of_lse,
)
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.explaining.wrong_rows import MOST_ROWS, WrongRows
from attnfuzz.memory.patterns import Fill, poison_value
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.wording import row_words
from attnfuzz.trials.comparison import Comparison, Reference

__all__ = [
    "Compared",
    "diagnose",
    "diagnose_lse",
    "diagnose_row",
    "past_the_end_within_bounds",
]


_FAMILIES = (
    tokens.another_head,
    tokens.dropped,
    tokens.behind_the_query,
    tokens.past_the_end,
    tokens.counted_twice,
    formulas.not_rescaled,
    formulas.rescaled_output,
    formulas.rescaled_scores,
    tokens.another_page,
    tokens.another_sequence,
    tokens.another_tensor,
    tokens.another_row,
    tokens.periodic,
    tokens.dropped_from_v,
    formulas.partial_bases,
    formulas.fitted_scale,
    tokens.single_token,
)

Place = tuple[int, int]
"""A row of q, and a head."""
Compared = tuple[Reference, list[Comparison]]
"""What a run should give, and what it gave beside it."""
_Made = Callable[[AttentionRow], Iterator[Family]]

_LSE_FAMILIES = (
    formulas.lse_formulas,
    tokens.dropped,
    tokens.behind_the_query,
    tokens.counted_twice,
    formulas.fitted_scale,
)
"""Tried on a wrong LSE beside an output that is right, as it is where all values are equal."""

_BARELY = 2.0
"""Error bounds."""
_SAME_BOUNDS = 2.0
"""What a token left out may leave open of each error, to be told beside a rounding."""
_MOST_RIGHT = 2
_MOST_REFITTED = 2


def diagnose(
    reference: Reference,
    poison: Fill,
    comparisons: list[Comparison],
    failed: Comparison,
    index: tuple[int, ...],
    *,
    nearby: Callable[[], Iterable[Compared]] = tuple,
) -> Diagnosis | None:
    """What the wrong element `index` of `failed` points to; None if no single mistake explains it.

    `poison`: what dead memory held. `nearby`: makes runs on similar cases, which tell apart what may have given
    infinities and NaN. A finding is not lost to a fault in here: the fault is what is told then.
    """
    try:
        return _diagnose(reference, poison, comparisons, failed, index, nearby)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return Diagnosis(f"(attnfuzz could not diagnose this: {type(error).__name__}: {error})")


def _diagnose(
    reference: Reference,
    poison: Fill,
    comparisons: list[Comparison],
    failed: Comparison,
    index: tuple[int, ...],
    nearby: Callable[[], Iterable[Compared]],
) -> Diagnosis | None:
    case = reference.case
    if isinstance(case, OpenCase):  # mistakes are replayed that attention is known for
        return None
    if isinstance(case, MergeStatesCase):
        return diagnose_merge(reference, comparisons, failed, index)
    number, head = index[:2]
    held = poison_value(getattr(torch, case.kv_dtype), poison)
    if case.row_lens[number] == 0:
        row = row_of(reference, case, comparisons, number, head, held)
        return (_read_by_empty(row) if failed.name == "out" else None) or _diagnose_empty(case, failed, number, head)
    if failed.name not in ("out", "lse"):
        return Diagnosis("a split without tokens has lse = -inf and an output that is written and finite")
    places, right = _rows(case, comparisons)
    wrong, others = ([row_of(reference, case, comparisons, *place, held) for place in part] for part in (places, right))
    rounded = WrongRows(
        wrong,
        others,
        one_copy=reference.device == "cpu",
        beside_empty=_is_wrong_if_empty(case, comparisons),
        nearby=functools.cache(lambda: _rows_there(nearby(), places, held)),
    )
    exact = rounded.exactly()
    row = row_of(reference, case, comparisons, number, head, held)
    if failed.name == "out" and not _is_wrong_beside_zeros(row):
        telling = [other for other in wrong if _is_wrong_beside_zeros(other)]
        if not telling:
            return _of_lost_weights(row, exact, rounded)
        row = telling[0]
    if exact is not None and rounded.is_telling:
        if failed.name == "out" and all(map(_is_of_one_token, wrong)):
            return _of_lost_weights(row, exact, rounded)
        return _or_at_an_edge(exact, rounded)
    found, near = _diagnose_here(row, failed), exact or rounded.nearly()
    if found is None and near is None and not row.is_finite:
        found = _none_left(row, rounded.nearby())
    also_wrong = [other for other in wrong if (other.row, other.head) != (row.row, row.head)][:_MOST_REFITTED]
    if found is not None and any(_contradicts(found, row, other, failed) for other in also_wrong):
        found = None
    if near is not None and (found is None or (found.words and not found.cause)):
        return near
    if found is not None and found.is_fitted and not also_wrong:
        found = None  # some number always fits one row
    if near is not None and found is not None and failed.name == "lse" and not also_wrong:
        # Of one number that rounding may give too, one of so many formulas gives it by chance.
        causes = (found.cause, near.cause, *found.maybe, *near.maybe)
        return Diagnosis(f"{found.words}, or {near.words}", maybe=tuple(dict.fromkeys(filter(None, causes))))
    possible = _possible(rounded, near)
    return replace(found or Diagnosis(""), maybe=possible) if possible else found


def _none_left(row: AttentionRow, nearby: Iterable[AttentionRow]) -> Diagnosis | None:
    """A mistake that leaves tokens out, seen where the sequence is longer: where it leaves none, 0 is divided by 0."""
    for longer in nearby:
        is_there = (longer.row, longer.head) == (row.row, row.head) and longer.num_tokens > row.num_tokens
        if is_there and longer.is_finite and not longer.is_right:
            found = diagnose_row(longer)
            if found is not None and found.cause == "tokens_dropped":
                length = longer.num_tokens
                return Diagnosis(f"with {length} tokens {found.words}; here none is left", found.cause)
    return None


def _is_wrong_beside_zeros(row: AttentionRow) -> bool:
    """Whether a wrong number is not 0: most mistakes make 0 of small numbers, and of all where scores are low."""
    wrong = ~((row.got - row.expected).abs() <= row.bound)
    return not bool((row.got.abs() <= row.bound)[wrong].all())


def _is_of_one_token(row: AttentionRow) -> bool:
    """Whether all other weights are lost, however that came about."""
    heaviest = row.v[int(row.scores.argmax())]
    return row.num_tokens > 1 and bool(((row.got - heaviest).abs() <= row.bound).all())


def _of_lost_weights(row: AttentionRow, exact: Diagnosis | None, rounded: WrongRows) -> Diagnosis | None:
    """The one mistake that loses small numbers; of several none is the cause, as far as this case can tell."""
    if exact is not None and exact.cause == "flushed":  # the one that says which numbers become 0
        return exact
    found = [*([] if exact is None else [exact]), *every_match(row, chain(_families(row), row))]
    if len({one.cause for one in found}) > 1:
        nearby = [other for other in rounded.nearby() if other.is_finite]
        refuted = set().union(*(_refuted(other) for other in nearby if other.is_right))
        found = [one for one in found if one.cause not in refuted]
        for other in nearby:
            if not other.is_right and _is_wrong_beside_zeros(other):  # where the mistake shows by itself
                causes = {one.cause for one in every_match(other, chain(_families(other), other))}
                alone = replace(rounded, rows=[other], others=[]).exactly()
                causes |= set() if alone is None else {alone.cause, *alone.maybe}
                found = [one for one in found if one.cause in causes] or found
    of_cause = {one.cause: one for one in reversed(found) if one.cause}
    named = dict.fromkeys(cause for one in found for cause in (one.cause, *one.maybe) if cause)
    possible = _possible(rounded, rounded.nearly())
    if len(named) == 1:
        return replace(found[0], maybe=tuple(cause for cause in possible if cause not in named))
    told = [of_cause[cause].words for cause in named if cause in of_cause]
    return Diagnosis(", or ".join(told[:MOST_TOLD]), maybe=tuple(dict.fromkeys((*named, *possible))))


def _possible(rounded: WrongRows, near: Diagnosis | None) -> tuple[str, ...]:
    """Roundings that may give such errors, if less exactly."""
    return rounded.perhaps() if near is None else tuple(filter(None, (near.cause, *near.maybe)))


def _refuted(right: AttentionRow) -> set[str]:
    """Causes that would make this row wrong in each of their ways."""
    least: dict[str, float] = {}
    for family in chain(_families(right), right):
        least[family.cause] = min([least.get(family.cause, math.inf), *family.left_open(right).tolist()])
    return {cause for cause, left in least.items() if left > REFUTED}


def _or_at_an_edge(exact: Diagnosis, rounded: WrongRows) -> Diagnosis:
    """The rounding that fits or, if that fits as well, a token left out at an edge: it makes such errors, too.

    What leaves less of the errors open goes first; the other is told beside it.
    """
    families = [tokens.at_an_edge(row) for row in rounded.rows]
    rests = [family.left_open(row) for family, row in zip(families, rounded.rows, strict=True)]
    rest, place = torch.stack(rests).amax(0).min(0)
    if rest > _SAME_BOUNDS:
        return exact
    dropped = families[0].diagnosis(int(place))
    first, other = (dropped, exact) if rest <= rounded.left_open() else (exact, dropped)
    return replace(first, words=f"{first.words}, or {other.words}", maybe=(*exact.maybe, other.cause))


def _read_by_empty(row: AttentionRow) -> Diagnosis | None:
    """Tokens of others that a row without keys has read."""
    for family in tokens.slots_past_the_end(row):
        roundoff = 2 * torch.finfo(row.dtype).eps * family.out.abs()
        found = ((family.out - row.got).abs() <= roundoff).all(-1).nonzero().flatten().tolist()
        if found:
            return family.diagnosis(found[0])
    return None


def _diagnose_empty(case: AttentionCase, failed: Comparison, number: int, head: int) -> Diagnosis:
    lse = "the sink" if case.variant.has_weighty_sinks else "-inf"
    what = f"sequence {number} is empty" if case.seen(number) is None else f"{row_words(case, number)} sees no key"
    words = f"{what}: expected out = 0 and lse = {lse}"
    if failed.name == "lse" and lse == "-inf" and -math.inf < float(failed.got[number, head]) < LOWEST_EXPONENT:
        return Diagnosis(f"{words}; the running maximum begins at a finite number", OF_EMPTY_ROWS)
    return Diagnosis(words)


def _rows_there(nearby: Iterable[Compared], places: list[Place], poison: float) -> list[AttentionRow]:
    """The rows of similar cases at ``places``."""
    found = []
    for reference, comparisons in nearby:
        case = reference.case
        if isinstance(case, MergeStatesCase | OpenCase):
            continue
        there = [(row, head) for row, head in places if row < case.num_rows and case.row_lens[row]]
        found += [row_of(reference, case, comparisons, *place, poison) for place in there]
    return found


def _is_wrong_if_empty(case: AttentionCase, comparisons: list[Comparison]) -> bool:
    """Whether a row without keys is wrong."""
    return any(case.row_lens[row] == 0 for row, _ in _is_wrong(comparisons).nonzero().tolist())


def _is_wrong(comparisons: list[Comparison]) -> Tensor:
    """Whether anything of a row of q and a head is beyond its bound."""
    wrong = torch.zeros((), dtype=torch.bool, device="cpu")
    for one in comparisons:
        if one.name in ("out", "lse"):
            beyond = one.ratio.cpu() > 1
            wrong = wrong | (beyond if one.name == "lse" else beyond.any(-1))
    return wrong


def _diagnose_here(row: AttentionRow, failed: Comparison) -> Diagnosis | None:
    """What one wrong row points to by itself."""
    if not row.got.isfinite().all():
        return _diagnose_not_finite(row)
    if failed.name == "lse":
        return diagnose_lse(row)
    return diagnose_row(row)


def _contradicts(found: Diagnosis, row: AttentionRow, other: AttentionRow, failed: Comparison) -> bool:
    """Whether what explains ``row`` fits it by chance: a number that is fitted, a log-sum-exp or an output that is
    barely wrong, which some of many ranges of tokens always come near to, must explain the other wrong row likewise."""
    is_barely_wrong = float(((row.got - row.expected).abs() / row.bound).nan_to_num(torch.inf).max()) < _BARELY
    if not found.is_fitted and failed.name != "lse" and not is_barely_wrong:
        return False
    there = _diagnose_here(other, failed)
    if found.is_fitted or row.seq == other.seq:
        return there != found
    return there is None or there.cause != found.cause


def _rows(case: AttentionCase, comparisons: list[Comparison]) -> tuple[list[Place], list[Place]]:
    """Rows of q and heads with anything beyond its bound, and some without that are no shorter than one of those.

    Of those that have keys.
    """
    wrong = _is_wrong(comparisons)
    found = [(row, head) for row, head in wrong.nonzero().tolist() if case.row_lens[row]]
    if not found:
        return [], []
    shortest = min(case.row_lens[row] for row, _ in found)
    right = [(row, head) for row, head in (~wrong).nonzero().tolist() if case.row_lens[row] >= shortest]
    return found[:MOST_ROWS], right[:_MOST_RIGHT]


def past_the_end_within_bounds(
    reference: Reference, poison: Fill, comparisons: list[Comparison], index: tuple[int, ...]
) -> Diagnosis | None:
    """Tokens past the end that take weight in row ``index``, which is within its bounds, but nearer to that."""
    case = reference.case
    if isinstance(case, MergeStatesCase | OpenCase):
        return None
    number, head = index[:2]
    if case.row_lens[number] == 0:
        return None
    held = poison_value(getattr(torch, case.kv_dtype), poison)
    row = row_of(reference, case, comparisons, number, head, held)
    if not bool(row.got.isfinite().all()):
        return None
    missed = float((row.got - row.expected).abs().max())
    for family in tokens.past_the_end(row):
        others = (row.got - family.out).abs().amax(-1).nan_to_num(torch.inf)
        if float(others.min()) < missed / 2:
            return family.diagnosis(int(others.argmin()))
    return None


def diagnose_row(row: AttentionRow) -> Diagnosis | None:
    """The mistake that gives this output, and this LSE if there is one."""
    return first_match(row, chain(_families(row), row))


def _families(row: AttentionRow) -> tuple[_Made, ...]:
    """Those of plain attention know its scores only, and no key among a row's that is hidden from it."""
    families: tuple[_Made, ...] = _FAMILIES if row.is_plain else (variant_mistakes,)
    families = (column_mistakes, *families) if row.case.values_in_keys else families
    families = families if row.case.seen(row.row) is None else (mask_mistakes, *families)
    return families if row.kv_scales is None else (scale_mistakes, *families)


def row_of(
    reference: Reference, case: AttentionCase, comparisons: list[Comparison], number: int, head: int, poison: float
) -> AttentionRow:
    """Query token `number` and `head` of a case, and what came out there."""
    out, *rest = comparisons
    values = reference.values_on_cpu
    has_lse = bool(rest) and rest[0].name == "lse"
    return AttentionRow(
        case=case,
        values=values.dequantised(),
        kv_scales=values.kv_scales,
        row=number,
        head=head,
        got=_here(out.got[number, head]),
        got_lse=float(rest[0].got[number, head]) if has_lse else None,
        bound=_here(out.bound[number, head]),
        lse_bound=float(rest[0].bound[number, head]) if has_lse else 0.0,
        poison=poison,
    )


def _here(tensor: Tensor) -> Tensor:
    return tensor.double().cpu()


def _diagnose_not_finite(row: AttentionRow) -> Diagnosis | None:
    largest = float((row.weights[:, None] * row.v).abs().sum(0).max())
    if row.case.dtype == "float16" and largest > torch.finfo(torch.float16).max:
        words = f"the sum of exp(score - maximum) x V reaches {largest:.4g}, and float16 ends at 65504"
        return Diagnosis(words, "sums_rounded")
    return None


def diagnose_lse(row: AttentionRow) -> Diagnosis | None:
    """The mistake that gives this LSE beside a right output."""
    if row.kv_scales is not None and (found := first_match_of_lse(row, scale_mistakes(row))):
        return found
    families = _LSE_FAMILIES if row.is_plain else (variant_mistakes,)
    of_columns, of_formula = (first_match_of_lse(row, chain(one, row)) for one in ((column_mistakes,), families))
    if of_columns is None or of_formula is None:
        return of_columns or of_formula
    causes = (of_columns.cause, of_formula.cause)
    return Diagnosis(f"{of_columns.words}, or {of_formula.words}", maybe=causes)
