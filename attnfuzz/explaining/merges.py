"""A merge of two states as a row of two tokens: what a wrong result or measured weights of one say.

A wrong side, weights of another base, another row's state, or another row's log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.explaining.formulas import lse_bases
from attnfuzz.explaining.measured_row import Reading
from attnfuzz.explaining.mistakes import (
    Diagnosis,
    Family,
    Predicted,
    families_of_one,
    family,
    first_match,
    first_match_of_lse,
)
from attnfuzz.explaining.places import SIDES, Places
from attnfuzz.explaining.row import AveragedRow
from attnfuzz.explaining.weights import Weights
from attnfuzz.explaining.words import weight
from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.problems.wording import number
from attnfuzz.trials.comparison import Comparison, Reference
from attnfuzz.values import LogicalStates

__all__ = ["MeasuredMerge", "MergedRow", "diagnose_merge", "read_merged_row"]


@dataclass(frozen=True, kw_only=True)
class MergedRow(AveragedRow):
    """A token and head of a merge. `lses` are natural, -inf for an empty state, prefix first as in `outputs`."""

    stored: torch.dtype
    lses: Float64[Tensor, "2"]
    outputs: Float64[Tensor, "2 head_size"]

    @property
    def dtype(self) -> torch.dtype:
        """As the output is stored."""
        return self.stored

    @property
    def scores(self) -> Float64[Tensor, "2"]:
        """A state weighs what all of its tokens do."""
        return self.lses

    @property
    def v(self) -> Float64[Tensor, "2 head_size"]:
        """The states' outputs."""
        return self.outputs


def natural_lse_of(states: LogicalStates, side: int, token: int, head: int) -> float:
    """A side's natural log-sum-exp, -inf if it is empty."""
    lse = float(getattr(states, f"{SIDES[side]}_lse")[token, head])
    return -math.inf if math.isinf(lse) else lse * (math.log(2) if states.lse_base2 else 1.0)


def empty_sides(states: LogicalStates, token: int, head: int) -> dict[str, float]:
    """The sides that are empty, each with the LSE, of either sign, that says so."""
    lses = {side: float(getattr(states, f"{side}_lse")[token, head]) for side in SIDES}
    return {side: lse for side, lse in lses.items() if math.isinf(lse)}


def diagnose_merge(
    reference: Reference, comparisons: list[Comparison], failed: Comparison, index: tuple[int, ...]
) -> Diagnosis | None:
    """What the row of the wrong element points to."""
    token, head = index[:2]
    states = reference.values
    empty = [f"{side} (lse = {lse:+})" for side, lse in empty_sides(states, token, head).items()]
    if len(empty) == 2:
        return Diagnosis(f"both sides are empty, {' and '.join(empty)}: expected 0 and -inf")
    got, bound = (part[token, head].double().cpu() for part in (comparisons[0].got, comparisons[0].bound))
    is_of_lse = failed.name == "lse"
    row = MergedRow(
        stored=getattr(torch, reference.case.dtype),
        got=got,
        bound=bound,
        got_lse=float(failed.got[token, head]) if is_of_lse else None,  # each result may be wrong by itself
        lse_bound=float(failed.bound[token, head]) if is_of_lse else 0.0,
        lses=_lses(natural_lse_of(states, side, token, head) for side in range(2)),
        outputs=torch.stack([getattr(states, f"{name}_output")[token, head].double().cpu() for name in SIDES]),
    )
    found = None
    if row.is_finite:
        found = first_match_of_lse(row, _lse_mistakes(row)) if is_of_lse else first_match(row, _output_mistakes(row))
    if empty:
        other = Diagnosis(f"the {empty[0]} is empty, so the result is the other side")
        return other if found is None else replace(found, words=f"{other.words}; {found.words}")
    return found


def _lses(values: Iterator[float]) -> Float64[Tensor, "2"]:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")


def _output_mistakes(row: MergedRow) -> Iterator[Family]:
    """Wrong outputs, whatever becomes of the log-sum-exp."""
    return families_of_one("merge", _wrong_outputs(row))


def _wrong_outputs(row: MergedRow) -> Iterator[Predicted]:
    a, b = row.outputs
    yield a, None, "the output is the prefix alone"
    yield b, None, "the output is the suffix alone"
    yield torch.zeros_like(a), None, "the output is 0"
    difference = float(row.lses[0] - row.lses[1])
    if not math.isfinite(difference):
        return
    for factor, words in (
        (-1.0, "the weights of prefix and suffix are exchanged"),
        (0.0, "prefix and suffix have equal weights"),
        (math.log(2), "the weights are powers of 2 of natural log-sum-exps"),
        (1 / math.log(2), "the weights are exponentials of base-2 log-sum-exps"),
    ):
        yield (factor * row.lses).softmax(0) @ row.outputs, None, words
    total = float(row.weights.sum())
    yield total * row.expected, None, f"the output is not divided by the sum of the weights ({total:.4g})"


def _lse_mistakes(row: MergedRow) -> Iterator[Family]:
    """Wrong log-sum-exps beside an output that is right."""
    if math.isfinite(row.top):
        yield from (replace(found, cause="merge") for found in lse_bases(row))
    yield from family("merge", ((row.expected, lse, words) for lse, words in _wrong_lses(row)))


def _wrong_lses(row: MergedRow) -> Iterator[tuple[float, str]]:
    a, b = row.lses.tolist()
    if math.isfinite(row.top):
        yield row.lse - row.top, "lse is the logarithm of the sum, without the maximum"
    yield row.top, "lse is the larger of the two, not their sum"
    yield a, "lse is that of the prefix alone"
    yield b, "lse is that of the suffix alone"
    yield a + b, "the log-sum-exps are added"


@dataclass(frozen=True)
class MeasuredMerge:
    """A row of a merge whose weights were measured. `states`: of the case, on the host."""

    case: MergeStatesCase
    places: Places
    weights: Weights
    states: LogicalStates
    number: int

    @property
    def at(self) -> tuple[int, int]:
        """Token and head."""
        return divmod(self.number, self.case.num_q_heads)

    @property
    def own(self) -> list[int]:
        """The places of its prefix and its suffix."""
        return [self.places.number(side, *self.at) for side in range(2)]

    @property
    def sides(self) -> Float64[Tensor, "2"]:
        """Weights of prefix and suffix."""
        return self.weights.got[self.number][self.own]

    def diagnosable(self, *, with_lse: bool) -> MergedRow:
        """The row with a unit vector for each state, so that an output is the weights of both."""
        lse = self.weights.lse
        bound = self.weights.bound[self.number][self.own].amax() + _TINY
        return MergedRow(
            stored=getattr(torch, self.case.dtype),
            got=self.sides,
            bound=bound.expand(2),
            got_lse=None if lse is None or not with_lse else float(lse[self.number]),
            lse_bound=float(self.weights.lse_bound[self.number]),
            lses=_lses(natural_lse_of(self.states, side, *self.at) for side in range(2)),
            outputs=torch.eye(2, dtype=torch.float64, device="cpu"),
        )


def read_merged_row(row: MeasuredMerge) -> Reading | None:
    """What is wrong with a row; None if its weights and its LSE are right."""
    weights, number_of = row.weights, row.number
    got, bound = weights.got[number_of], weights.bound[number_of]
    both_empty = len(empty_sides(row.states, *row.at)) == 2
    lse_is_right = not bool(weights.wrong_lse[number_of])
    is_right = not bool(weights.wrong[number_of].any())
    if both_empty and not (is_right and lse_is_right and bool((weights.constant[number_of] == 0).all())):
        return Reading("both sides are empty: expected 0 and -inf", ("the merge of two empty states is wrong",))
    if not bool(got.isfinite().all()):
        return _not_finite(row)
    if is_right:
        return None if lse_is_right else _lse_alone(row)
    others = ((got > bound) & (weights.expected[number_of] == 0)).nonzero()[:, 0].tolist()
    foreign = [place for place in others if place not in row.own]
    if foreign:
        return _another_state(row, foreign)
    return _other_weights(row)


def _not_finite(row: MeasuredMerge) -> Reading:
    empty = empty_sides(row.states, *row.at)
    text = "weights are NaN or infinite, although all memory holds finite numbers"
    if not empty:
        return Reading(text, ("weights are NaN or infinite",))
    side, lse = next(iter(empty.items()))
    return Reading(f"the {side} is empty (lse = {lse:+}), and {text}", (f"an empty {side} gives NaN",))


def _another_state(row: MeasuredMerge, foreign: list[int]) -> Reading:
    got = row.weights.got[row.number]
    texts, general = [], set()
    for place in foreign[:2]:
        side = row.places.coordinates(place)[0]
        lost = not bool(got[row.own[side]].abs() > row.weights.bound[row.number][row.own[side]])
        own = f"token {row.at[0]}, head {row.at[1]}"
        instead = f", in place of {own}" if lost else f", besides {own}"
        texts.append(f"{row.places.name(place)} is read with weight {weight(got[place])}{instead}")
        general.add(f"the {SIDES[side]}_output of another row is read")
    return Reading("; ".join(texts), tuple(sorted(general)))


def _other_weights(row: MeasuredMerge) -> Reading:
    got, expected = row.sides, row.weights.expected[row.number][row.own]
    shown = " and ".join(
        f"{side} {weight(a)} (expected {weight(b)})" for side, a, b in zip(SIDES, got, expected, strict=True)
    )
    text = f"weights are {shown}"
    words = _mistake(row)
    if words is None:
        return Reading(text, ("the weights of prefix and suffix are wrong",), vague=True)
    empty = next(iter(empty_sides(row.states, *row.at)), None)
    general = f"an empty {empty} is given weight" if empty else words
    return Reading(f"{text}: {words}", (_without_rows(words), general))


def _without_rows(words: str) -> str:
    return words.partition(" of token")[0] if " of token" in words else words


def _mistake(row: MeasuredMerge) -> str | None:
    """What gives these weights."""
    for side, lse in empty_sides(row.states, *row.at).items():
        if float(row.sides[SIDES.index(side)]) != 0:
            return f"the {side} is empty (lse = {lse:+}), but has weight"
    merged = row.diagnosable(with_lse=False)
    found = first_match(merged, families_of_one("merge", (*_lse_of_another_row(row), *_wrong_outputs(merged))))
    return None if found is None else found.words


def _lse_of_another_row(row: MeasuredMerge) -> Iterator[Predicted]:
    token, head = row.at
    for i in range(row.case.num_tokens * row.case.num_q_heads):
        other = divmod(i, row.case.num_q_heads)
        if i == row.number:
            continue
        for changed in ((0,), (1,), (0, 1)):
            lses = _lses(natural_lse_of(row.states, side, *(other if side in changed else row.at)) for side in range(2))
            if bool(lses.isfinite().any()):
                what = " and ".join(SIDES[side] for side in changed)
                exchanged = ", as if its axes were exchanged" if other == (head, token) else ""
                words = f"the {what} LSE of token {other[0]}, head {other[1]} is read{exchanged}"
                yield lses.softmax(0), None, words


def _lse_alone(row: MeasuredMerge) -> Reading:
    lse = row.weights.lse
    got = math.nan if lse is None else float(lse[row.number])
    expected = float(row.weights.expected_lse[row.number])
    text = f"the weights are right, but lse = {number(got)}, expected {number(expected)}"
    merged = row.diagnosable(with_lse=True)
    found = first_match_of_lse(merged, _lse_mistakes(merged))
    if found is None:
        return Reading(text, ("the weights are right, the LSE is wrong",))
    return Reading(f"{text}: {found.words}", (found.words,))


_TINY = 1e-12
"""Added to bounds, some of which are 0, where they divide."""
