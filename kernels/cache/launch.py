"""Checked wrappers of the cache writer, for new tokens of K or of V, and of decode over a cache of 4 or 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.cache.cache_write import (
    cache_write_int4_kernel,
    cache_write_kernel,
    cache_write_nvfp4_kernel,
)
from attnfuzz.kernels.cache.packed_decode import packed_decode_kernel
from attnfuzz.kernels.common.device import on_device_of

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Value that the largest number of a row becomes, by the format of a cache."""


class Rotary(NamedTuple):
    """``cos_sin [positions, size]``, contiguous float32, cosines before sines; ``positions [num_tokens]``, int64.

    ``by_halves``: pairs are the halves of the first ``size`` numbers of a head, not neighbours.
    """

    cos_sin: Tensor
    positions: Tensor
    by_halves: bool


def cache_write(
    new: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None = None,
    zeros: Tensor | None = None,
    of_all: Tensor | None = None,
    rotary: Rotary | None = None,
) -> None:
    """``new [num_tokens, num_kv_heads, head_size]`` into ``cache [num_blocks, block_size, num_kv_heads, head_size]``.

    Token i goes into slot ``slot_mapping[i]`` (int64), or nowhere if that is negative; which of several is kept that
    name one slot, nothing says. ``scale``: None for a cache of the same dtype; float32 ``[1]``, by which numbers are
    divided; or ``[num_blocks, block_size, num_kv_heads]``, which is written: one for each token and head. ``zeros``,
    of that shape and uint8: of a cache of 4 bits, whose last dimension is half of ``head_size``, which is even; zero
    points are written there. ``of_all [1]``: of NVFP4, whose scales have one more dimension. ``rotary``: of K. The
    last dimension of ``new``, of ``cache`` and of such scales is contiguous; all other strides are honoured.
    """
    if new.stride(-1) != 1 or cache.stride(-1) != 1:
        raise ValueError(f"strides {new.stride()} and {cache.stride()}: the last must be 1; call .contiguous() first")
    num_tokens, num_kv_heads, head_size = new.shape
    per_token = scale is not None and scale.dim() > 1
    grid = num_tokens, num_kv_heads
    tensors = (new, new.stride(0), new.stride(1), cache, *cache.stride()[:3], slot_mapping)
    rope = (None, None, 0) if rotary is None else (rotary.cos_sin, rotary.positions, rotary.cos_sin.shape[1])
    is_neox = rotary is not None and rotary.by_halves
    with on_device_of(new):
        if of_all is not None and scale is not None:
            cache_write_nvfp4_kernel[grid](
                *tensors, scale, *scale.stride()[:3], of_all, *rope, cache.shape[1], head_size // 16,
                BLOCK_S=triton.next_power_of_2(head_size // 16), IS_NEOX=is_neox,
            )  # fmt: skip
        elif zeros is not None and scale is not None:
            cache_write_int4_kernel[grid](
                *tensors, scale, *scale.stride(), zeros, *zeros.stride(), *rope, cache.shape[1], head_size // 2,
                BLOCK_B=triton.next_power_of_2(head_size // 2), IS_NEOX=is_neox,
            )  # fmt: skip
        else:
            cache_write_kernel[grid](
                *tensors, scale, *(scale.stride() if scale is not None and per_token else (0, 0, 0)),
                *rope, cache.shape[1], head_size,
                BLOCK_D=triton.next_power_of_2(head_size), PER_TOKEN=per_token,
                LARGEST=LARGEST.get(cache.dtype, 0.0), IS_INT=cache.dtype == torch.int8, IS_NEOX=is_neox,
            )  # fmt: skip


class Packed(NamedTuple):
    """K or V: bytes ``[pages, page_size, num_kv_heads, head_size/2]`` or numbers of 8 bits, scales ``[..., blocks]``.

    ``zeros [pages, page_size, num_kv_heads]``: of int4, uint8; without them they are the lowest 4 bits of float32
    scales. ``of_all [1]``: of NVFP4, float32.
    """

    cache: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    of_all: Tensor | None = None


def packed_decode(
    q: Tensor, k: Packed, v: Packed, block_table: Tensor, seq_lens: Tensor, scale: float, out: Tensor, *, tile: int = 32
) -> None:
    """Attention of each sequence's last token into ``out [num_seqs, num_q_heads, head_size]``, which is as ``q``.

    ``block_table [num_seqs, columns]`` and ``seq_lens``: int32. ``tile``: tokens per step, a power of two. V lies in
    memory as K does, and last dimensions are contiguous: else it raises ValueError. 0 for an empty sequence.
    """
    for one, other in zip(k, v, strict=True):
        if one is not None and (other is None or one.stride() != other.stride() or one.stride(-1) != 1):
            raise ValueError("K and V must lie alike, with contiguous last dimensions; copy one of them")
    num_seqs, num_q_heads, head_size = q.shape
    form = "8 bits" if k.cache.dtype in LARGEST else ""
    if not form and k.zeros is None and k.scales.dtype == torch.float32:
        form = "zeros in scales"
    zeros = (0, 0, 1) if k.zeros is None else k.zeros.stride()
    with on_device_of(q):
        packed_decode_kernel[(num_seqs, num_q_heads)](
            q, q.stride(0), q.stride(1), *k, *v, *k.cache.stride()[:3], *k.scales.stride()[:3], *zeros[:2],
            block_table, block_table.stride(0), seq_lens, out, out.stride(0), out.stride(1), float(scale),
            num_q_heads // k.cache.shape[2], k.cache.shape[1], head_size,
            TILE=tile, BLOCK_D=triton.next_power_of_2(head_size), BLOCK_SCALE=head_size // k.scales.shape[3],
            FORMAT=form,
        )  # fmt: skip
