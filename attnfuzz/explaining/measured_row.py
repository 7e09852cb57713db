"""One row of measured weights: what it read, what it should have read, with which keys, and how often."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.explaining.places import Places, key_slots
from attnfuzz.explaining.reruns import Reruns
from attnfuzz.explaining.row import AttentionRow, Query
from attnfuzz.explaining.weights import EXACT_RUNS, MAX_PLACES, MAX_WEIGHTS, Weights, measure, settle_keys
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.reference import row_weights
from attnfuzz.values import LogicalAttention
from attnfuzz.values.tokens import values_on

__all__ = [
    "Counts",
    "MeasuredRow",
    "Reading",
    "count_tokens",
    "counts_of",
    "is_measurable",
    "read_from",
    "weighed_rows",
]

_MOST = 16
_MOST_OF_NONE_ONCE = 3
"""Where no token is counted once: any two weights are as 10 to 3, or nearly so."""
_ROUNDOFF = 2.0**-7
_VISIBLE = 8.0
"""A weight of less than so many error bounds says nothing."""


@dataclass(frozen=True)
class Counts:
    """`times[i]`: how often token `i` was counted. All weights are `factor` times what that gives without division.

    `sum`: whether the sum of weights, that is the divisor, counted the same tokens, all tokens once, or neither.
    """

    times: Int64[Tensor, " seq_len"]
    factor: float
    sum: Literal["same", "all", "other"]

    def positions(self, times: int) -> list[int]:
        """Tokens that were counted so often."""
        found: list[int] = (self.times == times).nonzero()[:, 0].tolist()
        return found

    @property
    def repeated(self) -> list[int]:
        """Tokens that were counted more than once."""
        found: list[int] = (self.times > 1).nonzero()[:, 0].tolist()
        return found


def count_tokens(
    got: Float64[Tensor, " seq_len"],
    expected: Float64[Tensor, " seq_len"],
    bound: Float64[Tensor, " seq_len"],
    lse_error: float | None = None,
    beside: float = 0.0,
) -> Counts | None:
    """The simplest counts that explain the weights; None if none do. A token whose weight is too small counts once.

    `lse_error`: how much too large the log-sum-exp is, None if that is not known. It tells a token that is dropped from
    one in whose place another is read. `beside`: the weight of what is no token, a sink.
    """
    visible = expected > _VISIBLE * bound
    if not bool(visible.any()) or not bool(got.isfinite().all()):
        return None
    ratio = torch.where(visible, got / expected, 0.0)
    slack = _VISIBLE * bound + _ROUNDOFF * got.abs()
    found = []
    for base in _bases(ratio[visible]):
        times = torch.where(visible, (ratio / base).round(), 1.0)
        most = _MOST if bool((times[visible] == 1).any()) else _MOST_OF_NONE_ONCE
        if 1 < int(times[visible].min()) == int(times[visible].max()):
            continue  # that all have more, or what stands beside them less, is not how often they were counted
        if int(times.max()) <= most and bool(((times * base * expected - got).abs() <= slack)[visible].all()):
            found.append(_explained(times.long(), base, expected, beside))
    if not found:
        return None

    def preference(counts: Counts) -> tuple[bool, bool, int]:
        total = math.log(max(float((counts.times * expected).sum()) + beside, _ROUNDOFF))
        other_lse = lse_error is not None and abs(total - lse_error) > _ROUNDOFF
        return counts.sum == "other", other_lse, int(counts.times.max())

    return min(found, key=preference)


def counts_of(query: Query, places: Places, weights: Weights) -> Counts | None:
    """How often a query counted each of its own tokens, by its measured weights; None if they do not tell."""
    own, number = places.of_query(query), query.number
    got, expected, bound = (part[number][own] for part in (weights.got, weights.expected, weights.bound))
    return count_tokens(got, expected, bound, weights.lse_error(number), _beside_tokens(query, weights))


def _beside_tokens(query: Query, weights: Weights) -> float:
    has_sink = query.case.variant.sinks is not None
    return max(0.0, 1 - float(weights.expected[query.number].sum())) if has_sink else 0.0


def _bases(ratio: Float64[Tensor, " visible"]) -> list[float]:
    """Candidates for the ratio of a token that is counted once."""
    positive = ratio[ratio > _ROUNDOFF]
    found: list[float] = sorted(set(positive.tolist()))[:_MOST]
    return found + [found[0] / times for times in (2, 3) if found]


def _explained(
    times: Int64[Tensor, " seq_len"], base: float, expected: Float64[Tensor, " seq_len"], beside: float
) -> Counts:
    total = float((times * expected).sum()) + beside
    if abs(base * total - 1) <= 4 * _ROUNDOFF:
        return Counts(times, base, "same")
    return Counts(times, base, "all" if abs(base - 1) <= 4 * _ROUNDOFF else "other")


_MAX_DIMENSIONS = 1024
_BOUNDS = 4.0
_LSE_ROUNDOFF = 1e-5
_UNEXPLAINED = 0.25
_TINY = 1e-12
"""Added to bounds, some of which are 0, where they divide."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is wrong with one row. `exact` says it with numbers; each of `general` may hold for other rows, too.

    The most telling of `general` come first. A `vague` reading names no mistake.
    """

    exact: str
    general: tuple[str, ...] = ()
    vague: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasuredRow(Query):
    """A row of attention whose weights were measured. `keys` are those of every place, as the kernel finds them.

    Those of an 8-bit cache are multiplied with their scale.
    """

    places: Places
    weights: Weights
    values: LogicalAttention
    keys: Float64[Tensor, "places head_size"]

    @functools.cached_property
    def own(self) -> Int64[Tensor, " seq_len"]:
        """The places that it must read."""
        return self.places.of_query(self)

    @property
    def got(self) -> Float64[Tensor, " places"]:
        return self.weights.got[self.number]

    @property
    def expected(self) -> Float64[Tensor, " places"]:
        return self.weights.expected[self.number]

    @property
    def bound(self) -> Float64[Tensor, " places"]:
        return self.weights.bound[self.number]

    @functools.cached_property
    def q(self) -> Float64[Tensor, " head_size"]:
        return self.values.q[self.row, self.head].double()

    @property
    def reads_outside(self) -> bool:
        """Whether part of the output comes from no place of the cache."""
        return bool(self.weights.has_constant[self.number])

    def scores(
        self, read: Int64[Tensor, " n"], q: Float64[Tensor, " head_size"] | None = None
    ) -> Float64[Tensor, " n"]:
        """Of the keys in these places, before what a variant makes of them."""
        return self.case.scale * (self.keys[read] @ (self.q if q is None else q))

    @property
    def final_scores(self) -> Float64[Tensor, " seq_len"]:
        """Of its own keys, as the softmax takes them: with what a variant and a mask make of them."""
        scores = self.scores(self.own)
        if self.is_plain:
            return scores
        weights, lse = row_weights(self.case, self.row, self.head, scores)
        return weights.log() + lse

    @functools.cached_property
    def counts(self) -> Counts | None:
        """How often each of its own tokens was counted; None if its weights are no such counts."""
        return counts_of(self, self.places, self.weights)

    @property
    def beside_tokens(self) -> float:
        """The right weight of what is no token: the sink's."""
        return _beside_tokens(self, self.weights)

    def predicted(
        self,
        keys_from: Int64[Tensor, " n"],
        values_from: Int64[Tensor, " n"],
        q: Float64[Tensor, " head_size"] | None = None,
    ) -> Float64[Tensor, " places"]:
        """The weights of a kernel that reads tokens there, in order of position; a place read twice has both weights.

        What the case's variant makes of them is made of them. `q`: of another query.
        """
        found = torch.zeros_like(self.got)
        return found.index_add_(
            0, values_from, row_weights(self.case, self.row, self.head, self.scores(keys_from, q))[0]
        )

    def fits(self, predicted: Float64[Tensor, " places"]) -> bool:
        """Whether these weights are those that were measured, and explain what is wrong with them."""
        groups = self.weights.groups
        if groups is None:
            return self._explains(predicted, self.got, self.expected, self.bound)
        parts = (predicted, self.got, self.expected, self.bound)
        if not self._explains(*(part[groups.measured] for part in parts)):
            return False
        sums = (torch.zeros_like(part).index_add(0, groups.number, part)[groups.number] for part in parts[:3:2])
        predicted_sums, expected_sums = sums
        return self._explains(predicted_sums, groups.got[self.number], expected_sums, groups.bound[self.number])

    def fits_lse(self, keys_from: Int64[Tensor, " n"]) -> bool:
        """Whether the LSE is that of the keys in these places; nothing speaks against it where there is none."""
        if self.weights.lse is None:
            return True
        got, predicted = (
            float(self.weights.lse[self.number]),
            float(row_weights(self.case, self.row, self.head, self.scores(keys_from))[1]),
        )
        slack = 2 * _BOUNDS * float(self.weights.lse_bound[self.number]) + _LSE_ROUNDOFF * (1 + abs(predicted))
        return not abs(got - predicted) > slack

    @staticmethod
    def _explains(
        predicted: Float64[Tensor, " n"],
        got: Float64[Tensor, " n"],
        expected: Float64[Tensor, " n"],
        bound: Float64[Tensor, " n"],
    ) -> bool:
        missed = (predicted - got).abs()
        slack = _BOUNDS * (bound + bound.amax()) + _ROUNDOFF * torch.maximum(predicted.abs(), got.abs())
        return bool((missed <= slack).all()) and bool(missed.max() <= _UNEXPLAINED * (expected - got).abs().max())

    @functools.cached_property
    def diagnosable(self) -> AttentionRow | None:
        """The row as mistakes are replayed on it, with a dimension for each token; None if that is too large.

        Each token's value is a basis vector then, so that an explanation must fit every weight. What dead memory holds
        is not known: no mistake is replayed that needs it.
        """
        case, heads = self.case, self.case.num_kv_heads
        by_token = [self.places.own(seq, head) for seq in range(case.num_seqs) for head in range(heads)]
        live, dims = torch.unique(torch.cat(by_token), return_inverse=True)
        if not 0 < len(live) <= _MAX_DIMENSIONS:
            return None
        parts = torch.split(dims, [len(part) for part in by_token])
        rows = [torch.stack(parts[seq * heads : (seq + 1) * heads], -1) for seq in range(case.num_seqs)]
        size = max(len(live), case.value_size)
        v = torch.nn.functional.one_hot(torch.cat(rows), size).double()
        exact = self.values.dequantised()
        q, k = exact.q.double(), exact.k.double()
        got, bound = (torch.nn.functional.pad(part[live], (0, size - len(live))) for part in (self.got, self.bound))
        lse = self.weights.lse
        return AttentionRow(
            case=case,
            values=LogicalAttention(q, k, v, self.values.starts),
            row=self.row,
            head=self.head,
            got=got,
            got_lse=None if lse is None else float(lse[self.number]),
            bound=bound + _TINY,
            lse_bound=float(self.weights.lse_bound[self.number]),
            poison=math.nan,
            kv_scales=self.values.kv_scales,
        )


_MOST_WRONG, _MOST_RIGHT = 16, 16


def weighed_rows(reruns: Reruns) -> list[AttentionRow]:
    """Rows with what the kernel gave to each token in place of an output, as far as that can be measured.

    Raises what `Reruns.run` raises.
    """
    case, places = reruns.case, Places.of(reruns)
    if not isinstance(case, AttentionCase) or case.scores_read_values or not is_measurable(reruns, places):
        return []
    if places.count > EXACT_RUNS * case.value_size:  # sums of groups tell no mistake from another
        return []
    settle_keys(reruns)
    weights = measure(reruns, places)
    wrong = set(weights.wrong_rows)
    numbers = [n for n in range(case.num_rows * case.num_q_heads) if case.row_lens[n // case.num_q_heads]]
    chosen = [n for n in numbers if n in wrong][:_MOST_WRONG] + [n for n in numbers if n not in wrong][:_MOST_RIGHT]
    values = values_on(reruns.values, "cpu")
    keys = read_from(reruns, places, values)
    rows = (
        MeasuredRow(**vars(Query.numbered(case, n)), places=places, weights=weights, values=values, keys=keys)
        for n in chosen
    )
    return [row for measured in rows if (row := measured.diagnosable) is not None]


def is_measurable(reruns: Reruns, places: Places) -> bool:
    """Whether the weights of all rows are few enough for that."""
    rows = reruns.case.num_rows * reruns.case.num_q_heads
    return places.count <= MAX_PLACES and places.count * rows <= MAX_WEIGHTS


def read_from(reruns: Reruns, places: Places, values: LogicalAttention) -> Float64[Tensor, "places head_size"]:
    """The key of every place, times its scale in an 8-bit cache."""
    keys = key_slots(reruns.reset()).reshape(places.count, reruns.case.head_size).double().cpu()
    if values.kv_scales is not None:
        keys *= values.kv_scales[0].repeat(places.count // places.shape[2])[:, None]
    return keys
