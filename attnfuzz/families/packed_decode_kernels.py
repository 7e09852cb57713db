"""Right kernels of `attnfuzz.families.PackedDecode`: the bundled one in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families.formats import rotation
from attnfuzz.families.packed_decode import PackedDecode
from attnfuzz.kernels.cache import launch


@attnfuzz.kernel(PackedDecode())
def packed_decode(inputs: Any) -> None:
    """``launch.packed_decode``."""
    k, v = (
        launch.Packed(
            getattr(inputs, f"{name}_cache"),
            getattr(inputs, f"{name}_scales"),
            getattr(inputs, f"{name}_zeros", None),
            getattr(inputs, f"{name}_global", None),
        )
        for name in ("k", "v")
    )
    q, scale = inputs.q, inputs.head_size**-0.5
    if inputs.cache_format != "int4_rotated":
        launch.packed_decode(q, k, v, inputs.block_table, inputs.seq_lens, scale, inputs.out)
        return
    turn = rotation(inputs.head_size).to(q.device, torch.float32)
    q, out = (q.float() @ turn).contiguous(), torch.empty_like(inputs.out, dtype=torch.float32)
    norm = int(turn[0].square().sum())
    launch.packed_decode(q, k, v, inputs.block_table, inputs.seq_lens, scale / norm, out)
    inputs.out.copy_(out @ turn.mT / norm)


@attnfuzz.kernel(PackedDecode())
def packed_decode_eager(inputs: Any) -> None:
    """Sequence by sequence."""
    inputs.out.zero_()
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        tokens = torch.arange(length, device=inputs.q.device)
        pages, offsets = inputs.block_table[seq, tokens // inputs.block_size].long(), tokens % inputs.block_size
        k, v = (_numbers(inputs, name, pages, offsets).repeat_interleave(inputs.gqa_ratio, 1) for name in ("k", "v"))
        scores = torch.einsum("hd,thd->ht", inputs.q[seq].float(), k) * inputs.head_size**-0.5
        inputs.out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(inputs.out.dtype)


def _numbers(inputs: Any, name: str, pages: Tensor, offsets: Tensor) -> Any:
    """Numbers ``[tokens, num_kv_heads, head_size]`` of K or V."""
    cache, scales = getattr(inputs, f"{name}_cache"), getattr(inputs, f"{name}_scales")
    packed = cache.view(torch.uint8)[pages, offsets]  # torch has no indexed load of float8
    if inputs.cache_format in ("fp8", "int8"):
        return packed.view(cache.dtype).float() * scales[pages, offsets]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()
    if inputs.cache_format == "int4":
        zeros = getattr(inputs, f"{name}_zeros")[pages, offsets].int()
        return (codes - zeros[..., None]).float() * scales[pages, offsets]
    if inputs.cache_format == "int4_rotated":
        bits = scales.view(torch.int32)[pages, offsets]
        rotated = (codes - (bits & 15)).float() * (bits & -16).view(torch.float32)
        turn = rotation(inputs.head_size).to(codes.device, torch.float32)
        return rotated @ turn.mT / turn[0].square().sum()
    sizes = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), dtype=torch.float32, device=codes.device)[codes & 7]
    numbers = torch.where(codes >= 8, -sizes, sizes)
    if inputs.cache_format == "mxfp4":
        factors = torch.exp2(scales[pages, offsets].float() - 127)
    else:
        bits = scales.view(torch.uint8)[pages, offsets]
        factors = bits.view(scales.dtype).float() * getattr(inputs, f"{name}_global")
    return numbers * factors.repeat_interleave(codes.shape[-1] // factors.shape[-1], dim=-1)
