"""Checked wrapper of the cache writer: new tokens of K, or of V, into a paged cache."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.cache.cache_write import cache_write_kernel
from attnfuzz.kernels.common.device import on_device_of

__all__ = ["LARGEST", "cache_write"]

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Value that the largest number of a row becomes, by the format of a cache."""


def cache_write(new: Tensor, cache: Tensor, slot_mapping: Tensor, scale: Tensor | None = None) -> None:
    """``new [num_tokens, num_kv_heads, head_size]`` into ``cache [num_blocks, block_size, num_kv_heads, head_size]``.

    Token i goes into slot ``slot_mapping[i]`` (int64), or nowhere if that is negative. ``scale``: None for a cache of
    the same dtype; float32 ``[1]``, by which numbers are divided; or ``[num_blocks, block_size, num_kv_heads]``, which
    is written: one for each token and head. The last dimension of ``new`` and of ``cache`` is contiguous; all other
    strides are honoured.
    """
    if new.stride(-1) != 1 or cache.stride(-1) != 1:
        raise ValueError(f"strides {new.stride()} and {cache.stride()}: the last must be 1; call .contiguous() first")
    num_tokens, num_kv_heads, head_size = new.shape
    per_token = scale is not None and scale.dim() > 1
    with on_device_of(new):
        cache_write_kernel[(num_tokens, num_kv_heads)](
            new, new.stride(0), new.stride(1),
            cache, cache.stride(0), cache.stride(1), cache.stride(2),
            slot_mapping,
            scale, *(scale.stride() if scale is not None and per_token else (0, 0, 0)),
            cache.shape[1], head_size,
            BLOCK_D=triton.next_power_of_2(head_size), PER_TOKEN=per_token,
            LARGEST=LARGEST.get(cache.dtype, 0.0), IS_INT=cache.dtype == torch.int8,
        )  # fmt: skip
