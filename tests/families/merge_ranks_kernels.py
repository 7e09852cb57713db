"""Kernels of `attnfuzz.families.MergeRanks` with a bug each, of the kinds that merges of context parallelism had."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import MergeRanks

PLANTED = {
    "base": "logarithms of base 2 are taken for natural ones",
    "no_maximum": "exponentials are taken without subtracting the largest",
    "both_empty": "minus infinity is subtracted from itself where no rank has a key",
    "nan_times_zero": "the output of a rank without keys is multiplied with 0",
    "plus_inf": "an empty state that says +inf has all the weight",
    "believes": "a log-sum-exp is believed of a rank that owns no key",
    "first_sequence": "whether a rank owns keys is asked of the first sequence",
    "average": "ranks weigh alike",
    "by_ranks": "weights are divided by the number of ranks, not by their sum",
    "strides": "log-sum-exps are taken for contiguous",
    "two_ranks": "ranks past the second are left out",
    "local_lse": "the log-sum-exp is that of the first rank",
    "heads": "heads are scattered in turn, not side by side",
}


def _merge(i: Any, bug: str = "") -> tuple[Tensor, Tensor]:
    natural = math.log(2.0) if i.base == "2" and bug != "base" else 1.0
    lses, outs = i.lses * natural, i.outs.float()
    if bug == "strides":
        lses = i.lses.as_strided(i.lses.shape, torch.empty(i.lses.shape).stride()) * natural
    if bug != "plus_inf":
        lses = lses.masked_fill(lses == math.inf, -math.inf)
    if i.empty == "unknown" and bug != "believes":
        lens = i.local_lens[:, :1].expand_as(i.local_lens) if bug == "first_sequence" else i.local_lens
        owns = (lens > 0).repeat_interleave(i.query_len, dim=1)
        lses[:, : owns.shape[1]][~owns] = -math.inf
    if bug == "two_ranks":
        lses, outs = lses[:2], outs[:2]
    largest = lses.amax(0)
    if bug == "no_maximum":
        largest = torch.zeros_like(largest)
    elif bug != "both_empty":
        largest = largest.nan_to_num(neginf=0.0, posinf=math.inf)
    weights = (lses - largest).exp()
    if bug == "average":
        weights = (lses > -math.inf).float()
    total = weights.sum(0)
    shares = weights / (len(weights) if bug == "by_ranks" else torch.where(total == 0, 1.0, total))
    parts = shares[..., None] * outs
    out = (parts if bug == "nan_times_zero" else torch.where(shares[..., None] == 0, 0.0, parts)).sum(0)
    if bug == "heads":
        order = torch.arange(out.shape[1], device=out.device).view(-1, i.num_heads).T.flatten()
        out = out[:, order]
    lse = lses[0] if bug == "local_lse" else (total.log() + largest)
    return out.to(i.out.dtype), lse / natural


@attnfuzz.kernel(MergeRanks())
def right(inputs: Any) -> tuple[Tensor, Tensor]:
    return _merge(inputs)


@attnfuzz.kernel(
    MergeRanks(num_ranks=attnfuzz.Choice((8,)), lses=attnfuzz.Choice(("high",)), empty=attnfuzz.Choice(("-inf",)))
)
def folded(inputs: Any) -> tuple[Tensor, Tensor]:
    """One state after another, as in a ring: the log-sum-exp is rounded with each."""
    natural = math.log(2.0) if inputs.base == "2" else 1.0
    out, lse = torch.zeros(inputs.out.shape), torch.full(inputs.lse.shape, -math.inf)
    for part, other in zip(inputs.outs.float(), inputs.lses * natural, strict=True):
        both = torch.logaddexp(lse, other)
        finite = both.nan_to_num(neginf=0.0)
        share = (other - finite).exp()[..., None]
        out = (lse - finite).exp()[..., None] * out + torch.where(share == 0, 0.0, share * part)
        lse = both
    return out.to(inputs.out.dtype), lse / natural


def _planted(bug: str) -> Any:
    def merge(inputs: Any) -> tuple[Tensor, Tensor]:
        return _merge(inputs, bug)

    merge.__name__ = merge.__qualname__ = bug
    return attnfuzz.kernel(MergeRanks())(merge)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
