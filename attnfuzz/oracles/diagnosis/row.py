"""One wrong row, families of mistakes with the numbers each would give, and whether one of them was made.

A row is one query token and head of a failing case: what went in, what should have come out, what did.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.reference import row_weights
from attnfuzz.problems.told import token_name, tokens_name
from attnfuzz.values import LogicalAttention

__all__ = [
    "AttentionRow",
    "Diagnosis",
    "Suspect",
    "chain",
    "explains_lse",
    "first_match",
    "first_match_of_lse",
    "nowhere",
    "softmax_average",
]


@dataclass(frozen=True)
class AttentionRow:
    """Everything in float64 on the CPU. `row` is that of q: the number of the sequence in decode problems.

    `got_lse` is None for a kernel that returns none. `bound [v_head_size]` and `lse_bound` are error bounds; `poison`
    is the number that dead memory held in this run. `values`: for which an 8-bit cache's numbers stand; `kv_scales` are
    what these were multiplied with, None for a plain cache.
    """

    case: AttentionCase
    values: LogicalAttention
    row: int
    head: int
    got: Float64[Tensor, " v_head_size"]
    got_lse: float | None
    bound: Float64[Tensor, " v_head_size"]
    lse_bound: float
    poison: float
    kv_scales: Float64[Tensor, "2 num_kv_heads"] | None = None

    @property
    def seq(self) -> int:
        """The sequence that it belongs to."""
        return self.case.row_seqs[self.row]

    @property
    def kv_head(self) -> int:
        """The KV head that this query head must read."""
        return self.head // self.case.gqa_ratio

    @property
    def is_finite(self) -> bool:
        """Whether all that came out is a number."""
        return bool(self.got.isfinite().all()) and (self.got_lse is None or math.isfinite(self.got_lse))

    @property
    def is_right(self) -> bool:
        """Whether all that came out is within its bound."""
        lse_is_right = self.got_lse is None or abs(self.got_lse - self.lse) <= self.lse_bound
        return lse_is_right and bool(((self.got - self.expected).abs() <= self.bound).all())

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
        return self._right[0] @ self.v

    @cached_property
    def lse(self) -> float:
        """The right log-sum-exp."""
        return float(self._right[1])

    @cached_property
    def _right(self) -> tuple[Tensor, Tensor]:
        """Weights and LSE."""
        return row_weights(self.case, self.head, self.scores)

    @property
    def num_tokens(self) -> int:
        """How many keys it attends to: all of the sequence's, or those up to the query token."""
        return self.case.row_lens[self.row]

    def token(self, position: int) -> str:
        """`token 16 (page 1, offset 0)`."""
        return token_name(self.case, position)

    def tokens(self, start: int, end: int) -> str:
        """`tokens 16-31 (page 1)`: `start` up to, not including, `end`."""
        return tokens_name(self.case, range(start, end))


def softmax_average(
    scores: Float64[Tensor, "*batch seq_len"], v: Float64[Tensor, "*batch seq_len v_head_size"]
) -> tuple[Float64[Tensor, "*batch v_head_size"], Float64[Tensor, "*batch"]]:
    """Output and log-sum-exp of attention with these scores."""
    out = torch.einsum("...n,...nd->...d", scores.softmax(-1), v)
    return out, scores.logsumexp(-1)


_BOUNDS = 8.0
"""A prediction may miss the number by this many error bounds: the mistake changes the bound, too."""

_UNEXPLAINED = 0.25
"""And by at most this part of the error it is to explain."""

_SAME_BOUNDS = 2.0
"""Predictions that differ by less are those of mistakes that cannot be told apart, nor need be. Where others are nearer
than `_BOUNDS`, one of so many comes near to any number."""


@dataclass(frozen=True)
class Diagnosis:
    """What a wrong result points to, in `words`; `tokens`, as (sequence, position), are those that it is about.

    `cause` is the short, stable name of the mistake that gives this very result; empty if none was replayed. `maybe`:
    other causes that would give much the same. `numerics`: fields of `Numerics` that declare the mistake to be none.
    `replays`: all roundings, by name, that give this result. `is_fitted`: to a number that stands in no program yet.
    """

    words: str
    cause: str = ""
    tokens: tuple[tuple[int, int], ...] = ()
    maybe: tuple[str, ...] = ()
    numerics: Mapping[str, str] = field(default_factory=dict)
    replays: tuple[str, ...] = ()
    is_fitted: bool = False


def nowhere(i: int) -> tuple[tuple[int, int], ...]:
    """No tokens in particular."""
    del i
    return ()


@dataclass(frozen=True)
class Suspect:
    """`out[i]` and `lse[i]` are what the kernel returns if it makes mistake `i`, which `words(i)` names.

    `cause` names the family, and `tokens(i)` the tokens that the mistake is about.
    An `lse` of None says that the mistake leaves the log-sum-exp right. `is_fitted`: it has a number that fits best.
    """

    cause: str
    out: Float64[Tensor, "mistakes v_head_size"]
    lse: Float64[Tensor, " mistakes"] | None
    words: Callable[[int], str]
    tokens: Callable[[int], tuple[tuple[int, int], ...]] = nowhere
    is_fitted: bool = False

    def left_open(self, row: AttentionRow) -> Float64[Tensor, " mistakes"]:
        """The largest part of the row's error, in bounds, that each mistake leaves open."""
        rest = ((self.out - row.got).abs() / row.bound.clamp(min=torch.finfo(torch.float64).tiny)).amax(-1)
        if row.got_lse is not None:
            lse = torch.full_like(rest, row.lse) if self.lse is None else self.lse
            rest = torch.maximum(rest, (lse - row.got_lse).abs() / row.lse_bound)
        return rest.nan_to_num(torch.inf)

    def diagnosis(self, i: int, remark: str = "") -> Diagnosis:
        """Mistake `i`, with a remark."""
        return Diagnosis(self.words(i) + remark, self.cause, self.tokens(i), is_fitted=self.is_fitted)


def first_match(row: AttentionRow, suspects: Iterable[Suspect]) -> Diagnosis | None:
    """The mistake of the first family that predicts this row, LSE included.

    Where the LSE is right, it may have been computed apart from the output: then a mistake in the output alone will do.
    Without words if some do, of which none can be told from the others.
    """
    right = torch.tensor([row.lse], dtype=torch.float64, device="cpu")
    lse_is_right = row.got_lse is not None and bool(_agrees(row, right))
    in_out_alone: Diagnosis | None = None
    is_ambiguous = False
    for suspect in suspects:
        fits = _fit(row, suspect.out)
        if not bool((fits <= 1).any()):
            continue
        with_lse = torch.where(_lse_agrees(row, suspect), fits, torch.inf)
        if float(with_lse.min()) <= 1:
            if _stands_out(row, suspect, with_lse):
                return suspect.diagnosis(int(with_lse.argmin()))
            is_ambiguous = True
        if lse_is_right and in_out_alone is None and _stands_out(row, suspect, fits):
            in_out_alone = suspect.diagnosis(int(fits.argmin()), ", for out alone: lse is right")
    return in_out_alone or (Diagnosis("") if is_ambiguous else None)


def first_match_of_lse(row: AttentionRow, suspects: Iterable[Suspect]) -> Diagnosis | None:
    """The mistake of the first family that predicts the LSE and leaves the output as it is.

    An output that is right is near what such a mistake gives: with many ranges of tokens to choose from, some come near
    to any LSE.
    """
    for suspect in suspects:
        same_output = ((suspect.out - row.got).abs() <= _SAME_BOUNDS * row.bound).all(-1)
        if suspect.lse is None:
            continue
        found = (same_output & _lse_agrees(row, suspect) & explains_lse(row, suspect.lse)).nonzero()
        if len(found):
            return suspect.diagnosis(int(found[0]))
    return None


def explains_lse(row: AttentionRow, lse: Float64[Tensor, " mistakes"]) -> Bool[Tensor, " mistakes"]:
    """Whether these are much nearer to what the kernel returned than the right one is: else they explain nothing."""
    got = float("nan") if row.got_lse is None else row.got_lse
    missed = (lse - got).abs() <= _UNEXPLAINED * abs(got - row.lse)
    return (lse == got) | (lse.isfinite() & missed)


def _fit(row: AttentionRow, out: Float64[Tensor, "mistakes v_head_size"]) -> Float64[Tensor, " mistakes"]:
    """How badly each mistake explains the output; at most 1 for one that does."""
    roundoff = torch.finfo(getattr(torch, row.case.dtype)).eps
    tolerance = _BOUNDS * row.bound + roundoff * (out.abs() + row.expected.abs())
    missed = (row.got - out).abs()
    bound = row.bound.clamp(min=torch.finfo(torch.float64).tiny)  # large elements err by more than small ones are
    error = ((row.got - row.expected).abs() / bound).max()
    fits = torch.maximum((missed / tolerance).amax(-1), (missed / bound).amax(-1) / (_UNEXPLAINED * error))
    return fits.nan_to_num(torch.inf)


def _stands_out(row: AttentionRow, suspect: Suspect, fits: Float64[Tensor, " mistakes"]) -> bool:
    """Whether no other mistake of the family predicts much the same as the best, so that it fits not by chance."""
    apart = ((suspect.out - suspect.out[int(fits.argmin())]).abs() / row.bound).nan_to_num(torch.inf).amax(-1)
    return not bool((fits.isfinite() & (apart > _SAME_BOUNDS) & (apart < _BOUNDS)).any())


def _lse_agrees(row: AttentionRow, suspect: Suspect) -> Bool[Tensor, " mistakes"]:
    right = torch.full((len(suspect.out),), row.lse, dtype=torch.float64, device="cpu")
    return _agrees(row, right if suspect.lse is None else suspect.lse)


def _agrees(row: AttentionRow, lse: Float64[Tensor, " mistakes"]) -> Bool[Tensor, " mistakes"]:
    if row.got_lse is None:
        return torch.ones_like(lse, dtype=torch.bool)
    close = (lse - row.got_lse).abs() <= _BOUNDS * row.lse_bound + 1e-6 * (1 + lse.abs())
    return (lse == row.got_lse) | (lse.isfinite() & close)


def chain(families: Iterable[Callable[[AttentionRow], Iterator[Suspect]]], row: AttentionRow) -> Iterator[Suspect]:
    """The suspects of all families, made one after another."""
    for family in families:
        yield from family(row)
