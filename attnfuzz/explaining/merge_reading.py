"""What the weights of one merged row say: a wrong side, another row's state, or another row's log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.explaining.places import SIDES, Places
from attnfuzz.explaining.row import Reading, weight
from attnfuzz.explaining.weights import Weights
from attnfuzz.oracles.diagnosis import lse_mistakes, output_mistakes
from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.problems.told import number
from attnfuzz.values import LogicalStates

__all__ = ["MergedRow", "read_merged_row"]

_BOUNDS = 8.0
_ROUNDOFF = 1e-6


@dataclass(frozen=True)
class MergedRow:
    """A row of a merge. `states`: of the case, on the host."""

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

    def natural(self, side: int, token: int, head: int) -> float:
        """A side's natural log-sum-exp, -inf if it is empty."""
        lse = float(getattr(self.states, f"{SIDES[side]}_lse")[token, head])
        return -math.inf if math.isinf(lse) else lse * (math.log(2) if self.states.lse_base2 else 1.0)


def read_merged_row(row: MergedRow) -> Reading | None:
    """What is wrong with a row; None if its weights and its LSE are right."""
    weights, number_of = row.weights, row.number
    got, bound = weights.got[number_of], weights.bound[number_of]
    both_empty = all(math.isinf(row.natural(side, *row.at)) for side in range(2))
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


def _not_finite(row: MergedRow) -> Reading:
    empty = [side for i, side in enumerate(SIDES) if math.isinf(row.natural(i, *row.at))]
    text = "weights are NaN or infinite, although all memory holds finite numbers"
    if not empty:
        return Reading(text, ("weights are NaN or infinite",))
    lse = float(getattr(row.states, f"{empty[0]}_lse")[row.at])
    return Reading(f"the {empty[0]} is empty (lse = {lse:+}), and {text}", (f"an empty {empty[0]} gives NaN",))


def _another_state(row: MergedRow, foreign: list[int]) -> Reading:
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


def _other_weights(row: MergedRow) -> Reading:
    got, expected = row.sides, row.weights.expected[row.number][row.own]
    shown = " and ".join(
        f"{side} {weight(a)} (expected {weight(b)})" for side, a, b in zip(SIDES, got, expected, strict=True)
    )
    text = f"weights are {shown}"
    words = next(_mistakes(row), None)
    if words is None:
        return Reading(text, ("the weights of prefix and suffix are wrong",), vague=True)
    empty = [side for i, side in enumerate(SIDES) if math.isinf(row.natural(i, *row.at))]
    general = f"an empty {empty[0]} is given weight" if empty else words
    return Reading(f"{text}: {words}", (_without_rows(words), general))


def _without_rows(words: str) -> str:
    return words.partition(" of token")[0] if " of token" in words else words


def _mistakes(row: MergedRow) -> Iterator[str]:
    sides = [i for i in range(2) if math.isinf(row.natural(i, *row.at)) and float(row.sides[i]) != 0]
    for i in sides:
        lse = float(getattr(row.states, f"{SIDES[i]}_lse")[row.at])
        yield f"the {SIDES[i]} is empty (lse = {lse:+}), but has weight"
    yield from _lse_of_another_row(row)
    ones = torch.eye(2, dtype=torch.float64, device="cpu").expand(row.case.num_tokens, row.case.num_q_heads, 2, 2)
    states = LogicalStates(
        ones[..., 0, :], ones[..., 1, :], row.states.prefix_lse, row.states.suffix_lse, row.states.lse_base2
    )
    for predicted, words in output_mistakes(states, *row.at):
        if _close(row, predicted):
            yield words


def _lse_of_another_row(row: MergedRow) -> Iterator[str]:
    token, head = row.at
    for i in range(row.case.num_tokens * row.case.num_q_heads):
        other = divmod(i, row.case.num_q_heads)
        if i == row.number:
            continue
        for changed in ((0,), (1,), (0, 1)):
            lses = [row.natural(side, *(other if side in changed else row.at)) for side in range(2)]
            if all(map(math.isinf, lses)):
                continue
            top = max(lses)
            parts = torch.tensor([math.exp(lse - top) for lse in lses], dtype=torch.float64, device="cpu")
            if _close(row, parts / parts.sum()):
                what = " and ".join(SIDES[side] for side in changed)
                exchanged = ", as if its axes were exchanged" if other == (head, token) else ""
                yield f"the {what} LSE of token {other[0]}, head {other[1]} is read{exchanged}"


def _close(row: MergedRow, predicted: Float64[Tensor, "2"]) -> bool:
    slack = _BOUNDS * row.weights.bound[row.number][row.own].amax() + _ROUNDOFF
    return bool(predicted.isfinite().all()) and bool(((row.sides - predicted).abs() <= slack).all())


def _lse_alone(row: MergedRow) -> Reading:
    lse = row.weights.lse
    got = math.nan if lse is None else float(lse[row.number])
    expected = float(row.weights.expected_lse[row.number])
    text = f"the weights are right, but lse = {number(got)}, expected {number(expected)}"
    slack = _BOUNDS * float(row.weights.lse_bound[row.number]) + _ROUNDOFF * abs(got)
    for predicted, words in lse_mistakes(row.states, *row.at):
        if float(predicted) == got or abs(float(predicted) - got) <= slack:
            return Reading(f"{text}: {words}", (words,))
    return Reading(text, ("the weights are right, the LSE is wrong",))
