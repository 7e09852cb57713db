"""One row: a query token and head of a case, the scores and values that it averages, and what came out of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.inputs.reference import row_log_weights, row_weights
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.variants import PLAIN_VARIANT
from attnfuzz.problems.wording import tokens_name
from attnfuzz.values import LogicalAttention

_SOME_BOUNDS = 8.0


def _others(rules: Mapping[str, int], own: int, count: int) -> Iterator[tuple[str, int]]:
    """The rules that lead to another number than their ``own``, of so many."""
    yield from ((rule, number) for rule, number in rules.items() if number != own and 0 <= number < count)


@dataclass(frozen=True, kw_only=True)
class Query:
    """A query token, as a row of q, and a query head of a case, and which keys they see.

    In decode problems the row is the number of the sequence.
    """

    case: AttentionCase
    row: int
    head: int

    @staticmethod
    def numbered(case: AttentionCase, number: int) -> Query:
        """Number a row of the result, whose heads come one after another."""
        row, head = divmod(number, case.num_q_heads)
        return Query(case=case, row=row, head=head)

    @property
    def number(self) -> int:
        """Undo `numbered`."""
        return self.row * self.case.num_q_heads + self.head

    @property
    def seq(self) -> int:
        """The sequence that it belongs to."""
        return self.case.row_seqs[self.row]

    @property
    def kv_head(self) -> int:
        """The KV head that this query head must read."""
        return self.head // self.case.gqa_ratio

    @property
    def num_tokens(self) -> int:
        """How many keys it attends to: all of the sequence's, or those up to the query token."""
        return self.case.row_lens[self.row]

    @property
    def is_plain(self) -> bool:
        """Whether neither a variant nor a mask changes the scores of the keys up to the last that it sees."""
        seen = self.case.seen(self.row)
        return self.case.variant == PLAIN_VARIANT and (seen is None or 0 not in seen[: self.num_tokens])

    @property
    def first_seen(self) -> int:
        """The first position that it attends to: not 0 for a row with a window."""
        window = self.case.variant.window
        return 0 if window is None else max(0, self.num_tokens - window)

    def other_heads(self) -> Iterator[tuple[str, int]]:
        """Query heads that may be taken for this one, by a rule."""
        case, group = self.case, self.case.gqa_ratio
        first = self.kv_head * group
        rules = {
            "the KV head's number": self.kv_head,
            "head 0": 0,
            "the last head": case.num_q_heads - 1,
            "the number within the group": self.head % group,
            "the same of the last KV head": case.num_q_heads - group + self.head % group,
            "the next head": self.head + 1,
            "the head before": self.head - 1,
            "numbered by group": self.head % group * case.num_kv_heads + self.kv_head,
            "numbered by KV head": self.head % case.num_kv_heads * group + self.head // case.num_kv_heads,
            "the group's first head": first,
            "the group's last head": first + group - 1,
            "in reverse order": case.num_q_heads - 1 - self.head,
        }
        yield from _others(rules, self.head, case.num_q_heads)

    def other_kv_heads(self) -> Iterator[tuple[str, int]]:
        """KV heads that may be read in place of its own, by the formula that leads there."""
        case, h, own = self.case, self.head, self.kv_head
        formulas = {
            "h % group size": h % case.gqa_ratio,
            "h % KV heads": h % case.num_kv_heads,
            "h // group size % group size": own % case.gqa_ratio,
            "h": h,
            "0": 0,
            "the last": case.num_kv_heads - 1,
            "the next": own + 1,
            "the one before": own - 1,
            "in reverse order": case.num_kv_heads - 1 - own,
            "the next, in a ring": (own + 1) % case.num_kv_heads,
        }
        formulas |= {f"h // {d}": h // d for d in range(2, min(2 * case.gqa_ratio + 2, 17)) if d != case.gqa_ratio}
        yield from _others(formulas, own, case.num_kv_heads)

    def other_seqs(self) -> Iterator[tuple[str, int]]:
        """Sequences that may be taken for its own, by a rule."""
        own, count = self.seq, self.case.num_seqs
        rules = {"the next": own + 1, "the one before": own - 1, "the first": 0, "the last": count - 1}
        yield from _others(rules | {"the next, in a ring": (own + 1) % count}, own, count)

    def tokens(self, positions: Sequence[int]) -> str:
        """`token 16 (page 1, offset 0)`, or `tokens 16-31 (page 1)`."""
        return tokens_name(self.case, positions)


@dataclass(frozen=True, kw_only=True)
class AveragedRow:
    """A row with what it averages, what came out, and what should have. Everything in float64 on the CPU.

    `got_lse` is None for a kernel that returns none. `bound [v_head_size]` and `lse_bound` are error bounds.
    """

    got: Float64[Tensor, " v_head_size"]
    got_lse: float | None
    bound: Float64[Tensor, " v_head_size"]
    lse_bound: float

    @cached_property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output and, behind it, the LSE if there is one: what came out, what should have, and its bound."""
        of_out = self.got, self.expected, self.bound
        if self.got_lse is None:
            return of_out
        of_lse = torch.tensor([[self.got_lse], [self.lse], [self.lse_bound]], dtype=torch.float64, device="cpu")
        got, expected, bound = (torch.cat(pair) for pair in zip(of_out, of_lse, strict=True))
        return got, expected, bound

    def nearly_got(self, out: Float64[Tensor, " v_head_size"]) -> bool:
        """Whether that came out, but for some error bounds."""
        return bool(((out - self.got).abs() <= _SOME_BOUNDS * self.bound).all())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the kernel's output."""
        raise NotImplementedError

    @property
    def scores(self) -> Float64[Tensor, " seq_len"]:
        """Natural logarithms of what the values are weighted with, as far as the case's variant leaves them."""
        raise NotImplementedError

    @property
    def v(self) -> Float64[Tensor, "seq_len v_head_size"]:
        """The values that are averaged."""
        raise NotImplementedError

    @cached_property
    def top(self) -> float:
        """The largest score."""
        return float(self.scores.max())

    @cached_property
    def weights(self) -> Float64[Tensor, " seq_len"]:
        """exp(score - top), not normalised."""
        return (self.scores - self.top).exp()

    @cached_property
    def expected(self) -> Float64[Tensor, " v_head_size"]:
        """The right output."""
        return self.shares @ self.v

    @property
    def shares(self) -> Float64[Tensor, " seq_len"]:
        """Right weights, divided by their sum."""
        return self._right[0]

    @cached_property
    def lse(self) -> float:
        """The right log-sum-exp."""
        return float(self._right[1])

    @cached_property
    def _right(self) -> tuple[Tensor, Tensor]:
        """Weights and LSE."""
        return self.scores.softmax(-1), self.scores.logsumexp(-1)

    @property
    def is_finite(self) -> bool:
        """Whether all that came out is a number."""
        return bool(self.got.isfinite().all()) and (self.got_lse is None or math.isfinite(self.got_lse))

    @property
    def is_right(self) -> bool:
        """Whether all that came out is within its bound."""
        lse_is_right = self.got_lse is None or abs(self.got_lse - self.lse) <= self.lse_bound
        return lse_is_right and bool(((self.got - self.expected).abs() <= self.bound).all())


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Query, AveragedRow):
    """A row of attention.

    `poison` is the number that dead memory held in this run. `values`: for which an 8-bit cache's numbers stand;
    `kv_scales` are what these were multiplied with, None for a plain cache.
    """

    values: LogicalAttention
    poison: float
    kv_scales: Float64[Tensor, "2 num_kv_heads"] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the case."""
        found: torch.dtype = getattr(torch, self.case.dtype)
        return found

    @cached_property
    def q(self) -> Float64[Tensor, " head_size"]:
        """The query."""
        return self.values.q[self.row, self.head].double()

    def keys_of(self, seq: int, kv_head: int) -> Float64[Tensor, "seq_len head_size"]:
        """All keys of a sequence."""
        return self.values.sequence(seq)[0][:, kv_head].double()

    def values_of(self, seq: int, kv_head: int) -> Float64[Tensor, "seq_len v_head_size"]:
        """All values of a sequence."""
        return self.values.sequence(seq)[1][:, kv_head].double()

    @cached_property
    def k(self) -> Float64[Tensor, "seq_len head_size"]:
        """The keys that this row must read."""
        return self.keys_of(self.seq, self.kv_head)[: self.num_tokens]

    @cached_property
    def v(self) -> Float64[Tensor, "seq_len v_head_size"]:
        """The values that this row must read."""
        return self.values_of(self.seq, self.kv_head)[: self.num_tokens]

    @cached_property
    def scores(self) -> Float64[Tensor, " seq_len"]:
        """Scaled scores, before what a variant makes of them."""
        return self.case.scale * (self.k @ self.q)

    @cached_property
    def summed_products(self) -> dict[str, Tensor]:
        """Scores of rounded sums by format, once `low_precision` has made them; each design of a kernel takes them."""
        return {}

    def scores_of(self, other: Query) -> Float64[Tensor, " n"]:
        """Likewise of another row or head."""
        keys = self.keys_of(other.seq, other.kv_head)[: other.num_tokens]
        return self.case.scale * (keys @ self.values.q[other.row, other.head].double())

    def capped(self, dots: Float64[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
        """Apply the case's soft cap to scaled scores."""
        cap = self.case.variant.soft_cap
        return dots if cap is None else cap * torch.tanh(dots / cap)

    @cached_property
    def log_weights(self) -> Float64[Tensor, " seq_len"]:
        """Logarithms of the weights before they are divided by their sum: what a variant makes of the scores."""
        return self.final(self.scores)

    @cached_property
    def sink(self) -> Float64[Tensor, ""]:
        """The logit of the row's sink, -inf if it has none."""
        return row_log_weights(self.case, self.row, self.head, self.scores[:0])[1]

    @cached_property
    def top(self) -> float:
        """The largest of the scores, as a variant makes them, and the sink."""
        return float(torch.maximum(self.log_weights.amax(), self.sink))

    @cached_property
    def weights(self) -> Float64[Tensor, " seq_len"]:
        """exp(score - top), not normalised."""
        return (self.log_weights - self.top).exp()

    @cached_property
    def total(self) -> float:
        """The sum that the weights, and that of the sink, are divided by."""
        return float(self.weights.sum() + (self.sink - self.top).exp())

    @property
    def seen(self) -> list[int]:
        """The positions that take part."""
        found: list[int] = self.log_weights.isfinite().nonzero()[:, 0].tolist()
        return found

    def final(self, dots: Float64[Tensor, " n"], case: AttentionCase | None = None) -> Float64[Tensor, " n"]:
        """Apply the row's variant and mask, or those of ``case``, to the scaled scores of its first ``n`` keys."""
        return row_log_weights(case or self.case, self.row, self.head, dots)[0]

    def given(
        self,
        dots: Float64[Tensor, " n"],
        v: Float64[Tensor, "n v_head_size"] | None = None,
        case: AttentionCase | None = None,
    ) -> tuple[Float64[Tensor, " v_head_size"], float]:
        """Output and log-sum-exp with these scaled scores, other values, or what another case makes of both."""
        weights, lse = row_weights(case or self.case, self.row, self.head, dots)
        return weights @ (self.v if v is None else v), float(lse)

    def averaged(
        self,
        log_weights: Float64[Tensor, " n"],
        v: Float64[Tensor, "n v_head_size"] | None = None,
        sink: float | None = None,
    ) -> tuple[Float64[Tensor, " v_head_size"], float]:
        """Likewise with these weights, beside the row's sink or another."""
        beside = None if sink is None else torch.tensor(sink, dtype=torch.float64, device="cpu")
        out, lse = self.average(log_weights, self.v if v is None else v, beside)
        return out, float(lse)

    def average(
        self,
        log_weights: Float64[Tensor, "*batch n"],
        v: Float64[Tensor, "*batch_v n v_head_size"],
        sink: Float64[Tensor, ""] | None = None,
    ) -> tuple[Float64[Tensor, "*batch v_head_size"], Float64[Tensor, "*batch"]]:
        """Output and log-sum-exp of ``v`` with these weights, beside the row's sink or another; NaN of nothing."""
        beside = (self.sink if sink is None else sink).expand(*log_weights.shape[:-1], 1)
        terms = torch.cat((log_weights, beside), -1)
        weights = terms.softmax(-1)[..., :-1]
        out = weights @ v if v.dim() == 2 else torch.einsum("...n,...nd->...d", weights, v)
        return out, terms.logsumexp(-1)

    @cached_property
    def _right(self) -> tuple[Tensor, Tensor]:
        return row_weights(self.case, self.row, self.head, self.scores)
