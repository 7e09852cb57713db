"""Kernels of `attnfuzz.families.SparseDecode` with a bug each, of the kinds that sparse kernels had."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import SparseDecode

PLANTED = {
    "minus_one": "-1 names the last slot, as it does in Python",
    "too_large": "an index past the last slot names the last one",
    "up_to_the_first": "a list ends at its first sentinel",
    "once": "a slot that is named twice counts once",
    "nan_times_zero": "what no list names has weight 0, and is multiplied with it",
    "whole_tiles": "the last, partial tile of a list is left out",
    "values_last": "values are the last numbers of a row",
    "empty_is_nan": "a token whose list names none is divided by 0",
    "neighbour": "a token past the first one has the list of the one before it",
}


def _attend(inputs: Any, bug: str = "") -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -math.inf)
    slots, value_size = len(inputs.kv_cache), out.shape[-1]
    for token, query in enumerate(inputs.q.float()):
        row = inputs.indices[max(0, token - (bug == "neighbour"))].long()
        seen = (row >= 0) & (row < slots)
        if bug == "minus_one":
            seen, row = seen | (row == -1), torch.where(row == -1, slots - 1, row)
        if bug == "too_large":
            seen, row = row >= 0, row.clamp(max=slots - 1)
        if bug == "up_to_the_first":
            seen &= seen.long().cumprod(0).bool()
        if bug == "whole_tiles":
            seen[int(seen.nonzero().max()) // 16 * 16 if bool(seen.any()) else 0 :] = False
        named = row.clamp(0, slots - 1) if bug == "nan_times_zero" else row[seen]
        named = named.unique() if bug == "once" else named
        if not len(named) and bug != "empty_is_nan":
            continue
        keys = inputs.kv_cache[named, 0].float()
        scores = query @ keys.mT * inputs.head_size**-0.5
        if bug == "nan_times_zero":
            scores = scores.masked_fill(~seen, -math.inf)
            if not bool(seen.any()):
                continue
        values = keys[:, -value_size:] if bug == "values_last" else keys[:, :value_size]
        weights = scores.softmax(-1) if len(named) else scores.new_full((len(query), 1), math.nan)
        out[token] = weights @ values if len(named) else weights
        lse[token] = scores.logsumexp(-1)
    return out, lse


@attnfuzz.kernel(SparseDecode())
def right(inputs: Any) -> tuple[Tensor, Tensor]:
    return _attend(inputs)


def _planted(bug: str) -> Any:
    def attend(inputs: Any) -> tuple[Tensor, Tensor]:
        return _attend(inputs, bug)

    attend.__name__ = attend.__qualname__ = bug
    return attnfuzz.kernel(SparseDecode())(attend)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
