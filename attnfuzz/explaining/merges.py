"""A merge of two states as a row of two tokens: what a wrong result or measured weights of one say.

A wrong side, weights of another base, another row's state, or another row's log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.explaining.formulas import lse_bases
from attnfuzz.explaining.measured_row import Reading, lse_alone
from attnfuzz.explaining.mistakes import Family, Maker, Predicted, family
from attnfuzz.explaining.places import SIDES, Places
from attnfuzz.explaining.row import AveragedRow
from attnfuzz.explaining.weights import Weights
from attnfuzz.explaining.words import weight
from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.trials.comparison import Comparison, Reference
from attnfuzz.values import LogicalStates


@dataclass(frozen=True, kw_only=True)
class MergedRow(AveragedRow):
    """Token and head ``at`` of a merge of ``states``, natural log-sum-exps ``[2, num_tokens, num_q_heads]``.

    -inf is an empty state; the prefix comes first, as in `outputs`.
    """

    stored: torch.dtype
    at: tuple[int, int]
    states: Float64[Tensor, "2 num_tokens num_q_heads"]
    outputs: Float64[Tensor, "2 head_size"]

    @property
    def dtype(self) -> torch.dtype:
        """As the output is stored."""
        return self.stored

    @property
    def lses(self) -> Float64[Tensor, "2"]:
        """Its own."""
        return self.states[:, self.at[0], self.at[1]]

    @property
    def scores(self) -> Float64[Tensor, "2"]:
        """A state weighs what all of its tokens do."""
        return self.lses

    @property
    def v(self) -> Float64[Tensor, "2 head_size"]:
        """The states' outputs; what lies beside an LSE of -inf counts for nothing."""
        return torch.where(self.lses.isneginf()[:, None], 0.0, self.outputs)


def natural_lses(states: LogicalStates) -> Float64[Tensor, "2 num_tokens num_q_heads"]:
    """LSEs of prefix and suffix, -inf where they are empty, on the CPU."""
    lses = torch.stack([getattr(states, f"{side}_lse").double().cpu() for side in SIDES])
    return torch.where(lses.isinf(), -torch.inf, lses * (math.log(2) if states.lse_base2 else 1.0))


def both_sides_empty(states: LogicalStates) -> Bool[Tensor, "num_tokens num_q_heads"]:
    """The rows that are a merge of nothing."""
    return natural_lses(states).isneginf().all(0)


def merged_row(reference: Reference, comparisons: Sequence[Comparison], token: int, head: int) -> MergedRow:
    """Read one row that came out of a run. Each result may be wrong by itself: an LSE counts beside a right output."""
    states: LogicalStates = reference.values
    out, *rest = comparisons
    at = token, head
    has_lse = bool(rest) and not bool((out.ratio[at] > 1).any())
    return MergedRow(
        stored=getattr(torch, reference.case.dtype),
        at=at,
        got=out.got[at].double().cpu(),
        bound=out.bound[at].double().cpu(),
        got_lse=float(rest[0].got[at]) if has_lse else None,
        lse_bound=float(rest[0].bound[at]) if has_lse else 0.0,
        states=natural_lses(states),
        outputs=torch.stack([getattr(states, f"{name}_output")[at].double().cpu() for name in SIDES]),
    )


def empty_sides(states: LogicalStates, token: int, head: int) -> dict[str, float]:
    """The sides that are empty, each with the LSE, of either sign, that says so."""
    lses = {side: float(getattr(states, f"{side}_lse")[token, head]) for side in SIDES}
    return {side: lse for side, lse in lses.items() if math.isinf(lse)}


def _of_weights(row: MergedRow) -> Iterator[Predicted]:
    """Wrong weights of the two states; the log-sum-exp has mistakes of its own."""
    a, b = row.v
    lse_a, lse_b = row.lses.tolist()
    yield Predicted(a, None, "prefix alone", "the output is the prefix alone")
    yield Predicted(b, None, "suffix alone", "the output is the suffix alone")
    larger = a if lse_a > lse_b else b
    yield Predicted(larger, None, "larger alone", "the output is that of the larger log-sum-exp alone")
    yield Predicted(torch.zeros_like(a), None, "zero", "the output is 0")
    if not math.isfinite(lse_a - lse_b):
        return
    for way, words, factor in (
        ("exchanged", "the weights of prefix and suffix are exchanged", -1.0),
        ("equal", "prefix and suffix have equal weights", 0.0),
        ("base 2 of natural", "the weights are powers of 2 of natural log-sum-exps", math.log(2)),
        ("natural of base 2", "the weights are exponentials of base-2 log-sum-exps", 1 / math.log(2)),
    ):
        yield Predicted((factor * row.lses).softmax(0) @ row.v, None, way, words)
    total = float(row.weights.sum())
    words = f"the output is not divided by the sum of the weights ({total:.4g})"
    yield Predicted(total * row.expected, None, "not divided", words)


def _of_another_row(row: MergedRow) -> Iterator[Predicted]:
    """Log-sum-exps that are read where those of another row lie."""
    token, head = row.at
    tokens, heads = row.states.shape[1:]
    flat = token * heads + head  # as in [token, head], of what lies as [head, token]
    exchanged = flat % tokens, flat // tokens
    rules = {
        "its axes exchanged": exchanged,
        "the next token": ((token + 1) % tokens, head),
        "the token before": ((token - 1) % tokens, head),
        "the next head": (token, (head + 1) % heads),
        "the head before": (token, (head - 1) % heads),
        "token 0": (0, head),
        "head 0": (token, 0),
    }
    for rule, other in rules.items():
        if other == row.at:
            continue
        for sides in ((0,), (1,), (0, 1)):
            lses = row.lses.clone()
            lses[list(sides)] = row.states[list(sides), other[0], other[1]]
            if bool(lses.isfinite().any()):
                what = " and ".join(SIDES[side] for side in sides)
                as_if = ", as if its axes were exchanged" if other == exchanged else ""
                words = f"the {what} LSE of token {other[0]}, head {other[1]} is read{as_if}"
                way = f"{what} LSE, {rule}"
                yield Predicted(lses.softmax(0) @ row.outputs, float(lses.logsumexp(0)), way, words)


def _wrong_lses(row: MergedRow) -> Iterator[Family]:
    """Wrong log-sum-exps beside an output that is right."""
    if not math.isfinite(row.top):
        return
    yield from lse_bases(row)
    a, b = row.lses.tolist()
    wrong = {
        "lse is the logarithm of the sum, without the maximum": row.lse - row.top,
        "lse is the larger of the two plus a base-2 logarithm of the sum": row.top + (row.lse - row.top) / math.log(2),
        "lse is the larger of the two, not their sum": row.top,
        "lse is that of the prefix alone": a,
        "lse is that of the suffix alone": b,
        "the log-sum-exps are added": a + b,
        "lse adds the logarithm of the sum to that of the prefix, not to the larger of the two": row.lse - row.top + a,
        "lse adds the logarithm of the sum to that of the suffix, not to the larger of the two": row.lse - row.top + b,
        "lse is the larger of the two plus log(1 + exp(prefix - suffix))": row.top + _softplus(a - b),
        "lse is the larger of the two plus log(1 + exp(suffix - prefix))": row.top + _softplus(b - a),
    }
    yield from family("merged_lse", (Predicted(row.expected, lse, words, words) for words, lse in wrong.items()))


_LARGEST_EXPONENT = math.log(torch.finfo(torch.float32).max)


def _softplus(difference: float) -> float:
    """log(1 + exp(difference)), with an exponential in float32."""
    if difference > _LARGEST_EXPONENT:
        return math.inf
    return max(difference, 0.0) + math.log1p(math.exp(-abs(difference)))


OF_MERGES: tuple[Maker, ...] = (
    Maker.of("merge", lambda row: (*_of_weights(row), *_of_another_row(row))),
    Maker({"merged_lse", "lse_base2", "lse_natural", "lse_base10"}, _wrong_lses),
)
"""The list of mistakes in a merge, the likeliest first."""


def read_merged_row(
    case: MergeStatesCase, places: Places, weights: Weights, states: LogicalStates, row: int
) -> Reading | None:
    """Read what is wrong with a row; None if its weights and LSE are right. ``states``: of the case, on the host."""
    at = divmod(row, case.num_q_heads)
    got, expected, bound = (part[row] for part in (weights.got, weights.expected, weights.bound))
    own = [places.number(side, *at) for side in range(2)]
    empty = {side: f"the {side} is empty (lse = {lse:+})" for side, lse in empty_sides(states, *at).items()}
    wrong_lse, is_right = lse_alone(weights, row), not bool(weights.wrong[row].any())
    is_zero = bool((weights.constant[row] == 0).all())
    if len(empty) == 2 and not (is_right and wrong_lse is None and is_zero):
        return Reading("both sides are empty: expected 0 and -inf", "empty")
    if not bool(got.isfinite().all()):
        beside = "".join(f"{words}, and " for words in list(empty.values())[:1])
        return Reading(f"{beside}weights are NaN or infinite", "nan")
    if is_right:
        return wrong_lse
    if foreign := [place for place in ((got > bound) & (expected == 0)).nonzero()[:, 0].tolist() if place not in own]:
        texts = []
        for place in foreign[:2]:
            mine = own[places.coordinates(place)[0]]
            instead = "besides" if bool(got[mine].abs() > bound[mine]) else "in place of"
            read = f"{places.name(place)} is read with weight {weight(got[place])}"
            texts.append(f"{read}, {instead} token {at[0]}, head {at[1]}")
        return Reading("; ".join(texts), "tokens")
    pairs = ((side, weight(got[place]), weight(expected[place])) for side, place in zip(SIDES, own, strict=True))
    shown = f"weights are {' and '.join(f'{side} {a} (expected {b})' for side, a, b in pairs)}"
    for side, words in empty.items():
        if float(got[own[SIDES.index(side)]]) != 0:
            return Reading(f"{shown}: {words}, but has weight", "empty")
    return Reading(shown, "scores")
