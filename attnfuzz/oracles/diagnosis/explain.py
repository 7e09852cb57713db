"""From a failed comparison to the mistake that explains it, in one clause; wrong merges of two states, too."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnfuzz.memory.patterns import Fill, poison_value
from attnfuzz.oracles.diagnosis import formulas, tokens
from attnfuzz.oracles.diagnosis.formulas import column_mistakes, scale_mistakes, variant_mistakes
from attnfuzz.oracles.diagnosis.rounding import MOST_ROWS, Rounding
from attnfuzz.oracles.diagnosis.roundings import LOWEST_EXPONENT, OF_EMPTY_ROWS
from attnfuzz.oracles.diagnosis.row import (
    AttentionRow,
    Diagnosis,
    Suspect,
    chain,
    explains_lse,
    first_match,
    first_match_of_lse,
)
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.variants import PLAIN_VARIANT
from attnfuzz.trials.comparison import Comparison, Reference
from attnfuzz.values import LogicalStates

__all__ = [
    "Compared",
    "explain",
    "explain_lse",
    "explain_row",
    "lse_mistakes",
    "output_mistakes",
    "past_the_end_within_bounds",
]


def explain_merge(reference: Reference, failed: Comparison, index: tuple[int, ...]) -> Diagnosis | None:
    """What the row of the wrong element points to."""
    token, head = index[:2]
    states = reference.values
    sides = {"prefix": float(states.prefix_lse[token, head]), "suffix": float(states.suffix_lse[token, head])}
    empty = [f"{name} (lse = {lse:+})" for name, lse in sides.items() if math.isinf(lse)]
    if len(empty) == 2:
        return Diagnosis(f"both sides are empty, {' and '.join(empty)}: expected 0 and -inf")
    mistake = _mistake(states, failed, token, head)
    if empty:
        found = Diagnosis(f"the {empty[0]} is empty, so the result is the other side")
        return found if mistake is None else replace(mistake, words=f"{found.words}; {mistake.words}")
    return mistake


def _mistake(states: LogicalStates, failed: Comparison, token: int, head: int) -> Diagnosis | None:
    got, bound = failed.got[token, head].double(), failed.bound[token, head]
    expected = failed.expected[token, head].double()
    if not bool(got.isfinite().all()):
        return None
    mistakes = lse_mistakes(states, token, head) if failed.name == "lse" else output_mistakes(states, token, head)
    for predicted, words in mistakes:
        missed = (got - predicted).abs()
        close = missed <= 8 * bound + 1e-6 * predicted.abs()
        explains = float(missed.max()) <= 0.25 * float((got - expected).abs().max())
        if explains and bool((predicted.isfinite() & close).all()):
            return Diagnosis(words, "merge")
    return None


def _parts(states: LogicalStates, token: int, head: int) -> tuple[Tensor, Tensor, float, float]:
    """Outputs and natural log-sum-exps of both sides; -inf for an empty one."""
    unit = math.log(2) if states.lse_base2 else 1.0
    lse_a, lse_b = (float(lse[token, head]) * unit for lse in (states.prefix_lse, states.suffix_lse))
    a, b = (output[token, head].double() for output in (states.prefix_output, states.suffix_output))
    return a, b, -math.inf if lse_a == math.inf else lse_a, -math.inf if lse_b == math.inf else lse_b


def output_mistakes(states: LogicalStates, token: int, head: int) -> Iterator[tuple[Tensor, str]]:
    """Wrong outputs of one row, each with its mistake."""
    a, b, lse_a, lse_b = _parts(states, token, head)
    yield a, "the output is the prefix alone"
    yield b, "the output is the suffix alone"
    yield torch.zeros_like(a), "the output is 0"
    difference = lse_a - lse_b
    if not math.isfinite(difference):
        return
    for factor, words in (
        (-1.0, "the weights of prefix and suffix are exchanged"),
        (0.0, "prefix and suffix have equal weights"),
        (math.log(2), "the weights are powers of 2 of natural log-sum-exps"),
        (1 / math.log(2), "the weights are exponentials of base-2 log-sum-exps"),
    ):
        weight = 1 / (1 + math.exp(min(-factor * difference, 700.0)))
        yield weight * a + (1 - weight) * b, words
    weight = 1 / (1 + math.exp(min(-difference, 700.0)))
    top = max(lse_a, lse_b)
    total = math.exp(lse_a - top) + math.exp(lse_b - top)
    yield total * (weight * a + (1 - weight) * b), f"the output is not divided by the sum of the weights ({total:.4g})"


def lse_mistakes(states: LogicalStates, token: int, head: int) -> Iterator[tuple[Tensor, str]]:
    """Wrong log-sum-exps of one row, each with its mistake."""
    _, _, lse_a, lse_b = _parts(states, token, head)
    a, b = torch.tensor([lse_a, lse_b], dtype=torch.float64, device="cpu")
    top = torch.maximum(a, b)
    if bool(top.isfinite()):
        right = torch.logaddexp(a, b)
        yield right / math.log(2), "lse is in base 2, but the kernel declares natural logarithms"
        yield right * math.log(2), "lse is natural, but the kernel declares base 2"
        yield right - top, "lse is the logarithm of the sum, without the maximum"
    yield top, "lse is the larger of the two, not their sum"
    yield a, "lse is that of the prefix alone"
    yield b, "lse is that of the suffix alone"
    yield a + b, "the log-sum-exps are added"


_FAMILIES = (
    tokens.another_head,
    tokens.dropped,
    tokens.behind_the_query,
    tokens.counted_twice,
    formulas.rescaled_output,
    formulas.rescaled_scores,
    tokens.past_the_end,
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
Family = Callable[[AttentionRow], Iterator[Suspect]]

_LSE_FAMILIES = (tokens.dropped, tokens.behind_the_query, tokens.counted_twice, formulas.fitted_scale)
"""Tried on a wrong LSE beside an output that is right, as it is where all values are equal."""

_BARELY = 2.0
"""Error bounds."""
_SAME_BOUNDS = 2.0
"""What a token left out may leave open of each error, to be told beside a rounding."""
_MOST_RIGHT = 2
_MOST_REFITTED = 2


def explain(
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
        return _explain(reference, poison, comparisons, failed, index, nearby)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return Diagnosis(f"(attnfuzz could not diagnose this: {type(error).__name__}: {error})")


def _explain(
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
        return explain_merge(reference, failed, index)
    number, head = index[:2]
    if case.row_lens[number] == 0:
        return _explain_empty(case, failed, number, head)
    if failed.name not in ("out", "lse"):
        return Diagnosis("a split without tokens has lse = -inf and an output that is written and finite")
    held = poison_value(getattr(torch, case.kv_dtype), poison)
    places, right = _rows(case, comparisons)
    wrong, others = ([row_of(reference, case, comparisons, *place, held) for place in part] for part in (places, right))
    rounding = Rounding(
        wrong,
        others,
        one_copy=reference.device == "cpu",
        beside_empty=_is_wrong_if_empty(case, comparisons),
        nearby=lambda: _finite_there(nearby(), places, held),
    )
    exact = rounding.exactly()
    if exact is not None and rounding.is_telling:
        return _or_at_an_edge(exact, rounding)
    row = row_of(reference, case, comparisons, number, head, held)
    found, near = _explain_here(row, failed), exact or rounding.nearly()
    also_wrong = [other for other in wrong if (other.row, other.head) != (row.row, row.head)][:_MOST_REFITTED]
    if found is not None and any(_contradicts(found, row, other, failed) for other in also_wrong):
        found = None
    if near is not None and (found is None or (found.words and not found.cause)):
        return near
    if found is not None and found.is_fitted and not also_wrong:
        found = None  # some number always fits one row
    possible = rounding.perhaps() if near is None else tuple(filter(None, (near.cause, *near.maybe)))
    return replace(found or Diagnosis(""), maybe=possible) if possible else found


def _or_at_an_edge(exact: Diagnosis, rounding: Rounding) -> Diagnosis:
    """The rounding that fits or, if that fits as well, a token left out at an edge: it makes such errors, too.

    What leaves less of the errors open goes first; the other is told beside it.
    """
    suspects = [tokens.at_an_edge(row) for row in rounding.rows]
    rests = [suspect.left_open(row) for suspect, row in zip(suspects, rounding.rows, strict=True)]
    rest, place = torch.stack(rests).amax(0).min(0)
    if rest > _SAME_BOUNDS:
        return exact
    dropped = suspects[0].diagnosis(int(place))
    first, other = (dropped, exact) if rest <= rounding.left_open() else (exact, dropped)
    return replace(first, words=f"{first.words}, or {other.words}", maybe=(*exact.maybe, other.cause))


def _explain_empty(case: AttentionCase, failed: Comparison, number: int, head: int) -> Diagnosis:
    lse = "the sink" if case.variant.has_weighty_sinks else "-inf"
    words = f"sequence {number} is empty: expected out = 0 and lse = {lse}"
    if failed.name == "lse" and lse == "-inf" and -math.inf < float(failed.got[number, head]) < LOWEST_EXPONENT:
        return Diagnosis(f"{words}; the running maximum begins at a finite number", OF_EMPTY_ROWS)
    return Diagnosis(words)


def _finite_there(nearby: Iterable[Compared], places: list[Place], poison: float) -> list[AttentionRow]:
    """Of similar cases those of the rows at ``places`` that are finite."""
    found = []
    for reference, comparisons in nearby:
        case = reference.case
        if isinstance(case, MergeStatesCase | OpenCase):
            continue
        there = [(row, head) for row, head in places if row < case.num_rows and case.row_lens[row]]
        found += [row_of(reference, case, comparisons, *place, poison) for place in there]
    return [row for row in found if row.is_finite]


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


def _explain_here(row: AttentionRow, failed: Comparison) -> Diagnosis | None:
    """What one wrong row points to by itself."""
    if not row.got.isfinite().all():
        return _explain_not_finite(row)
    if failed.name == "lse":
        return explain_lse(row)
    return explain_row(row)


def _contradicts(found: Diagnosis, row: AttentionRow, other: AttentionRow, failed: Comparison) -> bool:
    """Whether what explains ``row`` fits it by chance: a number that is fitted, a log-sum-exp or an output that is
    barely wrong, which some of many ranges of tokens always come near to, must explain the other wrong row likewise."""
    is_barely_wrong = float(((row.got - row.expected).abs() / row.bound).nan_to_num(torch.inf).max()) < _BARELY
    if not found.is_fitted and failed.name != "lse" and not is_barely_wrong:
        return False
    there = _explain_here(other, failed)
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
    for suspect in tokens.past_the_end(row):
        others = (row.got - suspect.out).abs().amax(-1).nan_to_num(torch.inf)
        if float(others.min()) < missed / 2:
            return suspect.diagnosis(int(others.argmin()))
    return None


def explain_row(row: AttentionRow) -> Diagnosis | None:
    """The mistake that gives this output, and this LSE if there is one."""
    return first_match(row, chain(_families(row), row))


def _families(row: AttentionRow) -> tuple[Family, ...]:
    """Those of plain attention know its scores only."""
    families: tuple[Family, ...] = _FAMILIES if row.case.variant == PLAIN_VARIANT else (variant_mistakes,)
    families = (column_mistakes, *families) if row.case.values_in_keys else families
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


def _explain_not_finite(row: AttentionRow) -> Diagnosis | None:
    largest = float((row.weights[:, None] * row.v).abs().sum(0).max())
    if row.case.dtype == "float16" and largest > torch.finfo(torch.float16).max:
        words = f"the sum of exp(score - maximum) x V reaches {largest:.4g}, and float16 ends at 65504"
        return Diagnosis(words, "sums_rounded")
    return None


def explain_lse(row: AttentionRow) -> Diagnosis | None:
    """The mistake that gives this LSE beside a right output."""
    got = float("nan") if row.got_lse is None else row.got_lse
    if row.kv_scales is not None and (found := first_match_of_lse(row, scale_mistakes(row))):
        return found
    of_columns = first_match_of_lse(row, column_mistakes(row))
    of_formula = _explain_lse(row, got)
    if of_columns is None or of_formula is None:
        return of_columns or of_formula
    causes = (of_columns.cause, of_formula.cause)
    return Diagnosis(f"{of_columns.words}, or {of_formula.words}", maybe=causes)


def _explain_lse(row: AttentionRow, got: float) -> Diagnosis | None:
    """As that of a problem whose K and V are tensors of their own."""
    if row.case.variant != PLAIN_VARIANT:
        return first_match_of_lse(row, variant_mistakes(row))
    for predicted, cause, words in formulas.lse_formulas(row):
        close = abs(predicted - got) <= 8 * row.lse_bound + 1e-6 * abs(predicted)
        explains = bool(explains_lse(row, torch.tensor([predicted], dtype=torch.float64, device="cpu")))
        if predicted == got or (math.isfinite(predicted) and close and explains):
            return Diagnosis(words, cause)
    return first_match_of_lse(row, chain(_LSE_FAMILIES, row))
