"""How wide the blocks are that go to a GPU's matrix units, and of what dtype."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

from __future__ import annotations

import triton
import triton.language as tl

from attnfuzz.kernels.common.device import GpuLimits

LEAST_FOR_DOT = 16
"""Rows, columns and keys of a block, at least, as ``tl.dot`` wants it."""

_ROWS_OF_WARP_GROUPS = 64
_LEAST_OF_WARP_GROUPS = 64
_SCRATCH_BYTES = 1024
"""For sums and maxima over warps, barriers, and what the compiler rounds up."""


def block_columns(head_size: int, num_rows: int) -> int:
    """Columns of a block for heads of ``head_size`` where ``num_rows`` query rows are multiplied: a power of two.

    From 64 rows on Hopper multiplies in whole warp groups, which read K and V from shared memory by descriptors of 64
    bits. Those of blocks less than 64 wide (128 bytes) have their uppermost bit set, and ptxas 12.8.93, which comes
    with Triton 3.6 and 3.7, may add their offsets to a register that nothing was written to: the products read anywhere
    in shared memory, or outside of it. 12.9.86 does not do that. Seen where K or V get there through registers, as
    those of an 8-bit cache do; ``regressions/`` has such a case. Narrow blocks are padded.
    """
    least = _LEAST_OF_WARP_GROUPS if num_rows >= _ROWS_OF_WARP_GROUPS else LEAST_FOR_DOT
    return max(least, 1 << (head_size - 1).bit_length())


def tiles_in_shared_memory(gpu: GpuLimits, *, rows: int, columns: int, tile: int, row_bytes: int, itemsize: int) -> int:
    """How many tiles of K with their tiles of V fit beside the queries; below 1 if none does.

    ``rows``: of queries, with ``columns`` of ``itemsize`` bytes. ``row_bytes``: of a token's K and V in a tile. What
    lies beside the tiles is what Triton 3.7 was seen to compile to: AMD's kernels keep queries in registers; weights
    go through shared memory on their way to the second product, unless the rows are few (AMD, 16 bits) or so many that
    each warp has its own (NVIDIA).
    """
    weights = rows * tile * itemsize
    if gpu.is_amd:
        beside = weights if rows >= _ROWS_OF_WARP_GROUPS or itemsize == 4 else 0
    else:
        beside = rows * columns * itemsize + (weights if rows <= _ROWS_OF_WARP_GROUPS else 0) + _SCRATCH_BYTES
    return (gpu.shared_bytes - beside) // (tile * row_bytes)


def num_tiles(gpu: GpuLimits, *, rows: int, num_stages: int) -> int:
    """Tiles of K, and of V, that a launch of so many stages keeps in shared memory: all that warp groups multiply."""
    has_warp_groups = gpu.is_hopper and rows >= _ROWS_OF_WARP_GROUPS
    return num_stages if has_warp_groups else max(1, num_stages - 1)


@triton.jit
def as_operand(b_x, dtype: tl.constexpr):
    """Numbers of a cache in the dtype of the other operand.

    float8e5 goes to bfloat16 by way of float16, which is exact: at once, Triton 3.6 multiplies the bits by 2^112, which
    makes 65,536 of infinity and 98,304 of NaN (seen on an H100; a key of -inf then had a weight).
    """
    if b_x.dtype == tl.float8e5:
        b_x = b_x.to(tl.float16)
    return b_x.to(dtype)
