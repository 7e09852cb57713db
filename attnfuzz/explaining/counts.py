"""How often each token was counted, from its weight and the one that it should have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

__all__ = ["Counts", "count_tokens"]

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
        if int(times.max()) <= most and bool(((times * base * expected - got).abs() <= slack)[visible].all()):
            found.append(_explained(times.long(), base, expected, beside))
    if not found:
        return None

    def preference(counts: Counts) -> tuple[bool, bool, int]:
        total = math.log(max(float((counts.times * expected).sum()) + beside, _ROUNDOFF))
        other_lse = lse_error is not None and abs(total - lse_error) > _ROUNDOFF
        return counts.sum == "other", other_lse, int(counts.times.max())

    return min(found, key=preference)


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
