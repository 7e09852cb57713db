"""What the partial states of one row say: splits that overlap, leave out tokens, or have a wrong log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.explaining.row import MeasuredRow
from attnfuzz.judging.words import number

__all__ = ["split_mistakes"]

_LEAST = 2.0**-12
_BOUNDS = 8.0
_ROUNDOFF = 1e-5


def split_mistakes(row: MeasuredRow) -> Iterator[str]:
    """One clause on each mistake that can be seen in a split by itself. Which split a token is in is free."""
    by_split, lse = row.weights.by_split, row.weights.split_lse
    if by_split is None:
        return
    mine = by_split[row.number][:, row.own] if row.length else by_split.new_zeros((by_split.shape[1], 0))
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
