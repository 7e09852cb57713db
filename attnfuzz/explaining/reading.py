"""What the measured weights of one row say in numbers: tokens without weight, places that must have none, a factor.

Of partial states: splits that overlap, or have a wrong log-sum-exp. Which mistake that comes of is for `diagnose` to
say, which replays all mistakes on the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.explaining.measured_row import MeasuredRow, Reading, clearly_wrong
from attnfuzz.explaining.weights import Weights
from attnfuzz.explaining.words import weight
from attnfuzz.problems.wording import number

_SHOWN = 3
_LEAST = 2.0**-12
_BOUNDS = 8.0
_ROUNDOFF = 1e-5
_FACTOR_ROUNDOFF = 2.0**-7


def read_row(row: MeasuredRow) -> Reading | None:
    """What is wrong with a row; None if its weights and its LSE are right."""
    if row.num_tokens == 0:
        return _empty(row)
    if not bool(row.got.isfinite().all()):
        return Reading("weights are NaN or infinite", "nan")
    if not bool(row.weights.wrong[row.number].any()):
        return lse_alone(row.weights, row.number)
    if not bool((row.got.abs() > row.bound).any()):
        return _nothing_read(row)
    texts = [*_gained(row), *_lost(row)]
    return Reading("; ".join(texts), "tokens") if texts else _factor(row) or _largest_errors(row)


def _gained(row: MeasuredRow) -> Iterator[str]:
    """Weight that is where none must be: before a window, behind the query, past the end, or in places of others."""
    chosen = clearly_wrong(row, row.places, row.weights).gained
    whole = row.places.own(row.seq, row.kv_head).tolist()
    own = [position for position, place in enumerate(whole) if place in chosen]
    if own:
        has = "has" if len(own) == 1 else "have"
        yield f"{row.tokens(own)} {has} weight {weight(row.got[[whole[t] for t in own]].sum())}, expected 0"
    others = [place for place in chosen if place not in whole]
    if others:
        shown = (f"{row.places.name(place, reader=row.seq)} has weight {weight(row.got[place])}" for place in others)
        more = ", ..." if len(others) > _SHOWN else ""
        yield f"{', '.join(list(shown)[:_SHOWN])}{more}, expected 0"


def _lost(row: MeasuredRow) -> Iterator[str]:
    """Tokens that have no weight."""
    if lost := clearly_wrong(row, row.places, row.weights).lost:
        has = "has" if len(lost) == 1 else "have"
        yield f"{row.tokens(lost)} {has} weight 0, expected {weight(row.expected[row.own[lost]].sum())}"


def _factor(row: MeasuredRow) -> Reading | None:
    """All weights too large or too small by the same factor."""
    visible = row.expected > _BOUNDS * row.bound
    ratio = row.got[visible] / row.expected[visible]
    if not len(ratio) or float(ratio.max() - ratio.min()) > _FACTOR_ROUNDOFF * float(ratio.abs().max()):
        return None
    factor = float(ratio[row.expected[visible].argmax()])
    if bool(((row.got - factor * row.expected).abs() > _BOUNDS * row.bound)[~visible].any()):
        return None
    told = weight(factor)
    return Reading(f"all weights are {told if told != weight(1.0) else f'{factor:.7g}'} x the right ones", "factor")


def _largest_errors(row: MeasuredRow) -> Reading:
    errors = (row.got - row.expected).abs()[row.own]
    worst = errors.argsort(descending=True)[:_SHOWN].sort().values.tolist()
    texts = [
        f"{row.tokens([t])} has weight {weight(row.got[row.own[t]])}, expected {weight(row.expected[row.own[t]])}"
        for t in worst
        if float(errors[t]) > float(row.bound[row.own[t]])
    ]
    return Reading("; ".join(texts), "scores")


def _empty(row: MeasuredRow) -> Reading | None:
    lse = row.weights.lse
    expected_lse = float(row.weights.expected_lse[row.number])
    right_lse = lse is None or not bool(row.weights.wrong_lse[row.number])
    constant = row.weights.constant[row.number]
    if right_lse and bool((constant == 0).all()) and not bool((row.got != 0).any()):
        return None
    seen = "" if lse is None else f" and lse = {number(float(lse[row.number]))}"
    out = number(float(constant[0])) if not bool((row.got > 0).any()) else "an average of slots that are not its own"
    what = "the sequence is empty" if row.case.seen(row.row) is None else "the query sees no key"
    return Reading(f"{what}: got out = {out}{seen}, expected 0 and {number(expected_lse)}", "empty")


def _nothing_read(row: MeasuredRow) -> Reading:
    seen = range(row.first_seen, row.num_tokens)
    tokens = row.tokens(list(seen))
    has = "has" if len(seen) == 1 else "have"
    lse = row.weights.lse
    as_empty = lse is not None and _is_of_no_token(row, float(lse[row.number]))
    why = ", and lse is that of a row without keys" if as_empty else ""
    top = float(row.scores.max())
    scores = f" (its largest score is {number(top)})" if abs(top) > 80 else ""
    return Reading(f"{tokens} {has} weight 0, expected {weight(row.expected.sum())}{why}{scores}", "tokens")


def _is_of_no_token(row: MeasuredRow, lse: float) -> bool:
    """-inf, or the sink."""
    beside = 0.0 if row.case.variant.sinks is None else 1 - float(row.expected.sum())
    if beside <= 0:
        return lse == -math.inf
    sink = float(row.weights.expected_lse[row.number]) + math.log(beside)
    return math.isclose(lse, sink, rel_tol=1e-4, abs_tol=1e-4)


def lse_alone(weights: Weights, row: int) -> Reading | None:
    """What is wrong with the log-sum-exp of a row whose weights are right; None if nothing is."""
    if weights.lse is None or not bool(weights.wrong_lse[row]):
        return None
    got, expected = (number(float(part[row])) for part in (weights.lse, weights.expected_lse))
    return Reading(f"the weights are right, but lse = {got}, expected {expected}", "lse")


def split_mistakes(row: MeasuredRow) -> Iterator[str]:
    """One clause on each mistake that can be seen in a split by itself. Which split a token is in is free."""
    by_split, lse = row.weights.by_split, row.weights.split_lse
    if by_split is None:
        return
    mine = by_split[row.number][:, row.own] if row.num_tokens else by_split.new_zeros((by_split.shape[1], 0))
    read = mine > _LEAST
    yield from _overlaps(row, read)
    if lse is not None:
        yield from _wrong_lses(row, read, lse[row.number])


def _overlaps(row: MeasuredRow, read: Bool[Tensor, "num_splits seq_len"]) -> Iterator[str]:
    several = (read.sum(0) > 1).nonzero()[:, 0].tolist()
    if several:
        splits = read[:, several[0]].nonzero()[:, 0].tolist()
        is_are = "is" if len(several) == 1 else "are"
        yield f"{row.tokens(several)} {is_are} in splits {' and '.join(map(str, splits))}"


def _wrong_lses(
    row: MeasuredRow, read: Bool[Tensor, "num_splits seq_len"], lse: Float64[Tensor, " num_splits"]
) -> Iterator[str]:
    """Of each split, compared with the tokens that it gave weight to."""
    scores = row.final_scores
    for split, got in enumerate(lse.tolist()):
        tokens = read[split].nonzero()[:, 0]
        if not len(tokens):
            if got != -math.inf:
                yield f"split {split} has no token, but lse = {number(got)}, expected -inf"
            continue
        expected = float(torch.logsumexp(scores[tokens], 0))
        slack = _BOUNDS * float(row.weights.lse_bound[row.number]) + _ROUNDOFF * (1 + abs(expected))
        if not abs(got - expected) <= slack:
            which = row.tokens(tokens.tolist())
            yield f"split {split} has {which}, but lse = {number(got)}, expected {number(expected)}"
