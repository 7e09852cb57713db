"""Kernels of `attnfuzz.families.PackedDecode` with a bug each, of the kinds that readers of 4 and 8 bits had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import PackedDecode
from attnfuzz.families.formats import rotation


def _numbers(inputs: Any, name: str, pages: Tensor, offsets: Tensor, bug: str) -> Any:
    cache, scales = getattr(inputs, f"{name}_cache"), getattr(inputs, f"{name}_scales")
    packed = cache.view(torch.uint8)[pages, offsets]  # torch has no indexed load of float8
    if inputs.cache_format in ("fp8", "int8"):
        codes = (
            packed.float() if bug == "unsigned" and inputs.cache_format == "int8" else packed.view(cache.dtype).float()
        )
        if bug == "scale_of_head_0":
            scales = scales[:, :, :1].expand_as(scales)
        if bug == "scale_of_page":
            offsets = torch.zeros_like(offsets)
        return codes * scales[pages, offsets]
    halves = (packed >> 4, packed & 15) if bug == "high_first" else (packed & 15, packed >> 4)
    codes = torch.stack(halves, dim=-1).flatten(-2).int()
    if bug == "planes":  # the lower halves of all bytes are the first half of the head
        codes = torch.cat(halves, dim=-1).int()
    if inputs.cache_format == "int4":
        zeros = getattr(inputs, "k_zeros" if bug == "zeros_of_k" else f"{name}_zeros")[pages, offsets].int()
        zeros = torch.full_like(zeros, 8) if bug == "symmetric" else zeros
        return (codes - zeros[..., None]).float() * scales[pages, offsets]
    if inputs.cache_format == "int4_rotated":
        bits = scales.view(torch.int32)[pages, offsets]
        turn = rotation(inputs.head_size).to(codes.device, torch.float32)
        zeros = bits & (7 if bug == "three_bits" else 15)
        rotated = (codes - zeros).float() * (bits & -16).view(torch.float32)
        if bug == "unsigned_rotation":
            turn = turn.abs() * turn[0]
        if bug == "v_stays_rotated" and name == "v":
            return rotated / inputs.head_size
        return rotated @ turn.mT / inputs.head_size
    table = (0, 0, 1, 1.5, 2, 3, 4, 6) if bug == "subnormal" else (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    sizes = torch.tensor(table, device=codes.device)[codes & 7]
    numbers = torch.where(codes >= 8, -sizes, sizes)
    if inputs.cache_format == "mxfp4":
        factors = torch.exp2(scales[pages, offsets].float() - (128 if bug == "bias" else 127))
    else:
        of_all = getattr(inputs, "k_global" if bug == "global_of_k" else f"{name}_global")
        stored = scales.view(torch.uint8)[pages, offsets]
        if bug == "swizzled" and name == "v" and scales.shape[1] % 4 == scales.shape[3] % 4 == 0:
            place, block = offsets[:, None], torch.arange(scales.shape[3])[None]
            to = pages[:, None], place // 4 * 4 + block % 4, slice(None), block // 4 * 4 + place % 4
            stored = scales.view(torch.uint8)[to].transpose(1, 2).contiguous()
        factors = stored.view(scales.dtype).float() * of_all
    if bug == "first_block":
        factors = factors[..., :1]
    return numbers * factors.repeat_interleave(codes.shape[-1] // factors.shape[-1], dim=-1)


def _decode(inputs: Any, bug: str = "") -> None:
    inputs.out.zero_()
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        tokens = torch.arange(length, device=inputs.q.device)
        pages, offsets = inputs.block_table[seq, tokens // inputs.block_size].long(), tokens % inputs.block_size
        k, v = (_numbers(inputs, name, pages, offsets, bug) for name in ("k", "v"))
        k, v = (rows.repeat_interleave(inputs.gqa_ratio, 1) for rows in (k, v))
        scores = torch.einsum("hd,thd->ht", inputs.q[seq].float(), k) * inputs.head_size**-0.5
        inputs.out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(inputs.out.dtype)


PLANTED = {
    "high_first": "the upper half of a byte is read before the lower one",
    "planes": "lower halves are taken for the first half of a head",
    "symmetric": "int4 is read as if its zero point were 8",
    "zeros_of_k": "V is read with the zero points of K",
    "subnormal": "the smallest number of e2m1, which is subnormal, is read as 0",
    "global_of_k": "V is read with the scale of all of K",
    "first_block": "the scale of the first block is used for all",
    "bias": "exponents of MXFP4 have a bias of 128",
    "swizzled": "scales of V are read in squares of four tokens and four blocks, as another writer leaves them",
    "unsigned": "int8 is read as uint8",
    "scale_of_head_0": "scales of the first KV head are those of all",
    "scale_of_page": "the scale of the first token of a page is that of all its tokens",
    "three_bits": "of a zero point in a scale one bit is left out",
    "unsigned_rotation": "the rotation is taken back by one row of signs",
    "v_stays_rotated": "V is not rotated back",
}


def _planted(bug: str) -> Any:
    def decode(inputs: Any) -> None:
        _decode(inputs, bug)

    decode.__name__ = decode.__qualname__ = bug
    return attnfuzz.kernel(PackedDecode())(decode)


@attnfuzz.kernel(PackedDecode())
def right(inputs: Any) -> None:
    _decode(inputs)


@attnfuzz.kernel(PackedDecode(cache_format=attnfuzz.Choice(("int4",))))
def folded(inputs: Any) -> None:
    """Right: sums codes, and subtracts what their zero points come to, as vLLM's `unified_attention_int4` does."""
    inputs.out.zero_()
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        tokens = torch.arange(length, device=inputs.q.device)
        at = inputs.block_table[seq, tokens // inputs.block_size].long(), tokens % inputs.block_size
        (k, k_scale, k_zero), (v, v_scale, v_zero) = (
            tuple(part.repeat_interleave(inputs.gqa_ratio, 1) for part in _codes(inputs, name, at))
            for name in ("k", "v")
        )
        q = inputs.q[seq].float()
        scores = torch.einsum("hd,thd->ht", q, k) - q.sum(-1)[:, None] * k_zero.mT
        weights = (scores * k_scale.mT * inputs.head_size**-0.5).softmax(-1) * v_scale.mT
        summed = torch.einsum("ht,thd->hd", weights, v) - (weights * v_zero.mT).sum(-1)[:, None]
        inputs.out[seq] = summed.to(inputs.out.dtype)


def _codes(inputs: Any, name: str, at: Any) -> tuple[Tensor, Tensor, Tensor]:
    packed = getattr(inputs, f"{name}_cache")[at]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float()
    return codes, getattr(inputs, f"{name}_scales")[at][..., 0], getattr(inputs, f"{name}_zeros")[at].float()


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
