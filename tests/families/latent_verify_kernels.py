"""Kernels of `attnfuzz.families.LatentVerify` with a bug each, of the kinds that such kernels had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import LatentVerify
from attnfuzz.families.formats import latent_rows, parts_of_latents

PLANTED = {
    "sees_later": "a new token sees those after it, though it must not",
    "from_the_start": "the mask is that of new tokens at the start of a sequence",
    "all_causal": "a token does not see those after it, though it must",
    "uniform": "new tokens are counted as if all sequences had as many",
    "by_row": "a new token has the pages of the sequence of its number",
    "page_size": "pages are taken to have 16 tokens",
    "one_scale": "the first scale of a vector is that of all of it",
    "scales_of_slot_0": "the scales of slot 0 are those of all rows of bytes",
    "power_scales": "scales are read without their fractions, as powers of two",
    "scaled_rope": "the rotary part is multiplied with a scale, too",
    "no_rope": "scores leave out the rotary part",
    "values_last": "values are the last numbers of a row",
    "rank_scale": "scores are divided by the root of the rank",
    "whole_tiles": "the last, partial tile of keys is left out",
    "dead_tail": "the last page is read to its end, with weights of 0",
}


def _verify(i: Any, bug: str = "") -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(i.out), torch.zeros_like(i.lse)
    starts = i.cu_seqlens_q.tolist()
    for n, length in enumerate(i.seq_lens.tolist()):
        size = 16 if bug == "page_size" else i.block_size
        most = length if bug != "dead_tail" else -(-length // size) * size
        positions = torch.arange(most, device=i.out.device)
        table = i.block_table[min(starts[n], len(i.seq_lens) - 1) if bug == "by_row" else n].long()
        slots = table[(positions // size).clamp(max=len(table) - 1)] * i.block_size + positions % size
        if i.latents == "same":
            rows = i.kv_cache[slots % len(i.kv_cache), 0].float()
        else:
            if i.latents == "fp8_rows":
                latents, scales, ropes = parts_of_latents(i.kv_cache[slots % len(i.kv_cache), 0], i.rank, i.q.dtype)
            else:
                slots = slots % len(i.latent_cache)
                latents = i.latent_cache.view(torch.uint8)[slots, 0].view(torch.float8_e4m3fn)
                scales, ropes = i.latent_scales[slots], i.rope_cache[slots, 0]
            scales = scales[:, :1].expand_as(scales) if bug == "one_scale" else scales
            ropes = ropes.float() * (scales[:, :1] if bug == "scaled_rope" else 1)
            if bug == "scales_of_slot_0" and i.latents == "fp8_rows":
                scales = i.kv_cache[:1, 0, i.rank : i.rank + 4 * scales.shape[1]].view(torch.float32).expand_as(scales)
            scales = scales.log2().floor().exp2() if bug == "power_scales" else scales
            rows = latent_rows(latents, scales, ropes).float()
        new = i.query_len if bug == "uniform" else starts[n + 1] - starts[n]
        q = i.q[starts[n] : starts[n + 1]].float()
        width = i.rank if bug == "no_rope" else q.shape[-1]
        scale = (i.rank if bug == "rank_scale" else q.shape[-1]) ** -0.5
        scores = torch.einsum("qhd,td->hqt", q[..., :width], rows[:, :width]) * scale
        limits = length - new + torch.arange(1, len(q) + 1, device=i.out.device)
        if bug == "from_the_start":
            limits = torch.arange(1, len(q) + 1, device=i.out.device) + (length - new if new == 1 else 0)
        if (not i.causal and bug != "all_causal") or bug == "sees_later":
            limits = torch.full_like(limits, length)
        if bug == "whole_tiles":
            limits = torch.where(limits > 32, limits // 32 * 32, limits)
        scores = scores.masked_fill(positions >= limits[:, None], -torch.inf)
        values = rows[:, -i.rank :] if bug == "values_last" else rows[:, : i.rank]
        out[starts[n] : starts[n + 1]] = torch.einsum("hqt,td->qhd", scores.softmax(-1), values)
        lse[starts[n] : starts[n + 1]] = scores.logsumexp(-1).T
    return out, lse


@attnfuzz.kernel(LatentVerify())
def right(inputs: Any) -> tuple[Tensor, Tensor]:
    return _verify(inputs)


def _planted(bug: str) -> Any:
    def verify(inputs: Any) -> tuple[Tensor, Tensor]:
        return _verify(inputs, bug)

    verify.__name__ = verify.__qualname__ = bug
    return attnfuzz.kernel(LatentVerify())(verify)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
