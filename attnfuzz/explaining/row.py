"""One row of measured weights: what it read, what it should have read, and with which keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.explaining.places import Places, tokens_name
from attnfuzz.explaining.weights import Weights
from attnfuzz.oracles.diagnosis.row import AttentionRow
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.reference import row_weights
from attnfuzz.problems.variants import PLAIN_VARIANT
from attnfuzz.values import LogicalAttention

__all__ = ["MeasuredRow", "Reading"]

_MAX_DIMENSIONS = 1024
_BOUNDS = 4.0
_ROUNDOFF = 2.0**-7
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


@dataclass(frozen=True)
class MeasuredRow:
    """A row of an attention case. `keys` are those of every place, as the kernel finds them in memory.

    Those of an 8-bit cache are multiplied with their scale.
    """

    case: AttentionCase
    places: Places
    weights: Weights
    values: LogicalAttention
    keys: Float64[Tensor, "places head_size"]
    number: int

    @property
    def row(self) -> int:
        """Of q and of the result."""
        return self.number // self.case.num_q_heads

    @property
    def seq(self) -> int:
        return self.case.row_seqs[self.row]

    @property
    def head(self) -> int:
        return self.number % self.case.num_q_heads

    @property
    def kv_head(self) -> int:
        return self.head // self.case.gqa_ratio

    @property
    def length(self) -> int:
        """How many keys it attends to."""
        return self.case.row_lens[self.row]

    @functools.cached_property
    def own(self) -> Int64[Tensor, " seq_len"]:
        """The places that it must read."""
        return self.places.own(self.seq, self.kv_head)[: self.length]

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

    def tokens(self, positions: list[int]) -> str:
        """`token 16 (page 1, offset 0)`."""
        return tokens_name(self.case, positions)

    def scores(
        self, read: Int64[Tensor, " n"], q: Float64[Tensor, " head_size"] | None = None
    ) -> Float64[Tensor, " n"]:
        """Of the keys in these places, before what a variant makes of them."""
        return self.case.scale * (self.keys[read] @ (self.q if q is None else q))

    @property
    def final_scores(self) -> Float64[Tensor, " seq_len"]:
        """Of its own keys, as the softmax takes them: with what a variant makes of them."""
        scores = self.scores(self.own)
        if self.case.variant == PLAIN_VARIANT:
            return scores
        weights, lse = row_weights(self.case, self.head, scores)
        return weights.log() + lse

    @property
    def first_seen(self) -> int:
        """The first position that it attends to: not 0 for a row with a window."""
        window = self.case.variant.window
        return 0 if window is None else max(0, self.length - window)

    @property
    def beside_tokens(self) -> float:
        """The right weight of what is no token: the sink's."""
        return max(0.0, 1 - float(self.expected.sum())) if self.case.variant.sinks is not None else 0.0

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
        return found.index_add_(0, values_from, row_weights(self.case, self.head, self.scores(keys_from, q))[0])

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
            float(row_weights(self.case, self.head, self.scores(keys_from))[1]),
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

    def diagnosable(self) -> AttentionRow | None:
        """The row as `attnfuzz.oracles.diagnosis` takes it, with a dimension for each token; None if that is too large.

        Each token's value is a basis vector then, so that an explanation must fit every weight.
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
            poison=0.0,
            kv_scales=self.values.kv_scales,
        )
