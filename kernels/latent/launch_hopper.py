"""When ``latent_decode`` and ``sparse_decode`` go to the kernel for Hopper, and how that is launched.

Lists of slots are a block table without a size of pages. If all of their places count, there are no ``seq_lens``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.device import GpuLimits, on_device_of
from attnfuzz.kernels.grouped.combine_partials import combine_partials_kernel
from attnfuzz.kernels.grouped.plan_splits import sequences_counted

__all__ = ["is_for_hopper", "launch_on_hopper"]

_HOPPER = (9, 0)
_SIZES = {"head_size": 576, "v_head_size": 512}
_TILE = 64
_BYTES_OF_A_COPY = 16
_FEW_HEADS, _FEW_TILES, _SMALL_PAGE = 32, 64, 16
_MOST_SEQUENCES = 4096
_COMBINED_ELEMENTS = 8192
"""Of partial outputs, in one step of a program."""
_COLUMNS = 512
_MANY_HEADS = 64
_COMBINING_PROGRAMS = 8
"""A multiprocessor; a program has several rows before there are more. Of a large batch's sequences most are whole."""


@cache
def _kernels() -> tuple[Any, Any] | None:
    """For few heads and for many.

    Gluon is no part of Triton before 3.4, and may change: without it ``latent_decode`` is as on other GPUs.
    """
    try:
        from attnfuzz.kernels.latent.latent_hopper import latent_hopper_kernel
        from attnfuzz.kernels.latent.latent_warps import latent_warps_kernel
    except (ImportError, AttributeError):
        return None
    return latent_hopper_kernel, latent_warps_kernel


def is_for_hopper(gpu: GpuLimits | None, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> bool:
    """Whether these are of the sizes and strides that the kernel knows, and the GPU is Hopper itself.

    Later ones have no warp groups. Rows are copied in pieces of 16 bytes. Few heads are as fast without,
    with few tokens or with a page for each token.
    """
    if gpu is None or gpu.capability != _HOPPER or any(sizes[name] != size for name, size in _SIZES.items()):
        return False
    rows = [tensors[name] for name in ("q", "kv_cache")]
    are_whole = all(
        one.stride(-1) == 1
        and one.data_ptr() % _BYTES_OF_A_COPY == 0
        and all(stride * one.element_size() % _BYTES_OF_A_COPY == 0 for stride in one.stride()[:-1])
        for one in rows
    )
    are_slow = sizes.get("block_size", _SMALL_PAGE) < _SMALL_PAGE or _room(tensors) <= _FEW_TILES
    are_few = tensors["q"].shape[1] <= _FEW_HEADS and are_slow
    are_plain = all(tensors[name].stride(-1) == 1 for name in ("block_table", "seq_lens", "out") if name in tensors)
    return (
        are_whole and are_plain and not are_few and 0 < sizes["num_seqs"] <= _MOST_SEQUENCES and _kernels() is not None
    )


def _room(tensors: Mapping[str, Tensor]) -> int:
    """Tiles that the block table has room for."""
    num_seqs, pages = tensors["block_table"].shape
    return num_seqs * -(-pages * tensors["kv_cache"].shape[1] // _TILE)


def launch_on_hopper(tensors: Mapping[str, Tensor], sizes: Mapping[str, int], scale: float, processors: int) -> None:
    """Write ``out`` and ``lse``. A program for each multiprocessor, whose shared memory it fills."""
    q, cache, table, out, lse = (tensors[name] for name in ("q", "kv_cache", "block_table", "out", "lse"))
    num_seqs, num_q_heads, block_size = sizes["num_seqs"], sizes["num_q_heads"], sizes.get("block_size")
    # A program of 64 heads reads the cache for all of them; where there are fewer tiles than programs, more have some.
    most = _MANY_HEADS if _room(tensors) > processors else 32
    heads = next(few for few in (16, 32, _MANY_HEADS) if few >= min(num_q_heads, most))
    head_blocks = triton.cdiv(num_q_heads, heads)
    num_splits = max(1, processors // head_blocks)
    states = (num_q_heads, num_seqs + num_splits)
    partials = (
        *(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((*states, _COLUMNS), states, states)),
        torch.empty((num_seqs, 2), dtype=torch.int32, device=q.device),
    )
    results = (*out.stride(), lse, *lse.stride())
    kernels: Any = _kernels()  # there, as is_for_hopper has it
    kernel, of_many = kernels
    own: tuple[int | None, ...] = (None, None)
    if block_size is None:
        own = (len(cache), table.shape[1])
    chosen = {"HEADS": heads, "num_warps": 4 if heads < 32 else 8}
    rows, together, most_states = num_seqs * num_q_heads, 1, 2 + 2 * triton.cdiv(num_splits, num_seqs)
    if heads == _MANY_HEADS:
        kernel, chosen = of_many, {"num_warps": 8}
        most_states = max(1, num_splits // num_seqs)  # of a sequence, if all are about as long
        most_rows = max(1, rows // (_COMBINING_PROGRAMS * processors))
        together = next(few for few in (8, 4, 2, 1) if few <= most_rows and num_q_heads % few == 0)
    # Programs of the second kernel that hold few states of a sequence have all columns of a row.
    chunk = max(2, min(128, triton.next_power_of_2(most_states)))
    columns = min(_COLUMNS, _COMBINED_ELEMENTS // chunk)
    with on_device_of(q):
        kernel[(head_blocks, num_splits)](
            q, *q.stride()[:2], cache, *cache.stride()[:2], table, table.stride(0), tensors.get("seq_lens"),
            out, *out.stride()[:2], lse, *lse.stride(), *partials,
            float(scale) * math.log2(math.e), num_seqs, num_splits, num_q_heads, block_size, *own,
            WHOLE_TILES=block_size is not None and block_size % _TILE == 0, BLOCK_S=sequences_counted(num_seqs),
            **chosen, enable_fp_fusion=False, launch_pdl=True,
        )  # fmt: skip
        combine_partials_kernel[(rows // together, _COLUMNS // columns)](
            None, 0, *partials, out, *results, None, 0, None, 0, states[1], num_q_heads, _COLUMNS, None,
            TILE=_TILE, BLOCK_DV=columns, CHUNK=chunk, SHARED_OUT=True, PDL=True, HEADS=together,
            num_warps=2 if columns <= 128 else 4, launch_pdl=True,
        )  # fmt: skip
