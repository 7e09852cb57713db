"""Right kernels of `attnfuzz.families.TurboDecode` and `TurboWrite` in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families.turbo import TurboDecode, TurboWrite, codes_of, packed_codes, split_row


@attnfuzz.kernel(TurboDecode())
def turbo_decode_eager(inputs: Any) -> None:
    """Sequence by sequence."""
    inputs.out.zero_()
    q = inputs.q.float() if inputs.key_bits == 8 else inputs.q.float() @ inputs.turn
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        tokens = torch.arange(length, device=q.device)
        pages = inputs.block_table[seq, tokens // inputs.block_size].long()
        rows = inputs.cache_rows[pages, tokens % inputs.block_size]
        k, v = (part.repeat_interleave(inputs.gqa_ratio, 1) for part in _numbers(inputs, rows))
        scores = torch.einsum("hd,thd->ht", q[seq], k) * inputs.head_size**-0.5
        inputs.out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(inputs.out.dtype)


def _numbers(inputs: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """K, turned or not, and V of tokens and heads."""
    keys, length, values, others, _ = (part.contiguous() for part in split_row(rows, inputs))
    if inputs.key_bits == 8:
        k = keys.view(torch.float8_e4m3fn).float()
    else:
        k = inputs.centroids[codes_of(keys, inputs.key_bits, inputs.head_size)]
        if inputs.corrected:
            k = k * k.square().sum(-1, keepdim=True).rsqrt()
        k = k * length.view(torch.float16).float()
    of_values = others.view(torch.float16).float()
    codes = codes_of(values, inputs.value_bits, inputs.head_size)
    return k, codes * of_values[..., :1] + of_values[..., 1:]


@attnfuzz.kernel(TurboWrite())
def turbo_write_eager(inputs: Any) -> None:
    """All tokens at once."""
    key, value = inputs.key.float(), inputs.value.float()
    if inputs.key_bits == 8:
        parts = [key.to(torch.float8_e4m3fn).view(torch.uint8)]
    else:
        length = key.norm(dim=-1, keepdim=True)
        codes = torch.bucketize(key / (length + 1e-8) @ inputs.turn, inputs.midpoints, right=True)
        parts = [packed_codes(codes, inputs.key_bits), length.half().view(torch.uint8)]
    least, most = value.amin(-1, keepdim=True), (1 << inputs.value_bits) - 1
    step = ((value.amax(-1, keepdim=True) - least) / most).clamp(min=1e-8)
    codes = ((value - least) / step + 0.5).int().clamp(0, most)
    others = torch.cat((step, least), -1).half().view(torch.uint8)
    rows = torch.cat((*parts, packed_codes(codes, inputs.value_bits), others), -1)
    named = inputs.slot_mapping >= 0
    slots = inputs.slot_mapping[named]
    size = inputs.block_size
    inputs.cache_rows[slots // size, slots % size, :, : rows.shape[-1]] = rows[named]
