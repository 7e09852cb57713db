"""Kernels of `attnfuzz.families.SparseDecode` with a bug each, of the kinds that sparse kernels had."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import SparseDecode
from attnfuzz.families.formats import latent_rows, parts_of_latents

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
    "no_length": "what stands behind topk_length is read, too",
    "one_more": "the place at topk_length is read, too",
    "first_length": "the first token's length is that of all",
    "counted": "topk_length counts the slots that a list names, not its places",
    "one_scale": "the first scale of a vector is that of all of it",
    "scaled_rope": "the rotary part is multiplied with a scale, too",
    "scales_last": "scales are looked for behind the rotary part",
}


def _keys(inputs: Any, slots: Tensor, bug: str) -> Tensor:
    rows: Tensor = inputs.kv_cache[slots, 0]
    rank = inputs.out.shape[-1]
    if inputs.cache == "same":
        return rows.float()
    latents, scales, ropes = parts_of_latents(rows, rank, inputs.q.dtype)
    if bug == "one_scale":
        scales = scales[:, :1].expand_as(scales)
    if bug == "scales_last":
        rope_bytes = 2 * ropes.shape[1]
        ropes = rows[:, rank : rank + rope_bytes].view(inputs.q.dtype)
        scales = rows[:, rank + rope_bytes :].view(torch.float32)
    if bug == "scaled_rope":
        ropes = ropes.float() * scales[:, -1:]
    return latent_rows(latents, scales, ropes).float()


def attend(inputs: Any, bug: str = "") -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -math.inf)
    slots, value_size = len(inputs.kv_cache), out.shape[-1]
    lengths = inputs.topk_length.tolist() if inputs.has_lengths else [inputs.topk] * len(out)
    for token, query in enumerate(inputs.q.float()):
        row = inputs.indices[max(0, token - (bug == "neighbour"))].long()
        length = lengths[0 if bug == "first_length" else token] + (bug == "one_more")
        in_list = torch.arange(len(row), device=row.device) < length
        seen = (row >= 0) & (row < slots)
        if bug == "counted":
            in_list = seen.long().cumsum(0) <= length
        if bug != "no_length":
            seen &= in_list
            row = torch.where(in_list, row, -2)
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
        keys = _keys(inputs, named, bug)
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
    return attend(inputs)


def _planted(bug: str) -> Any:
    def planted(inputs: Any) -> tuple[Tensor, Tensor]:
        return attend(inputs, bug)

    planted.__name__ = planted.__qualname__ = bug
    return attnfuzz.kernel(SparseDecode())(planted)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
