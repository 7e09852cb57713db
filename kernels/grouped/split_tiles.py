"""Which tiles of a sequence the splits of ``grouped_decode`` share: device functions of both of its halves.

Split ``s`` takes tiles ``s, s + num_splits, ...`` from the first one that the query sees, so splits that have a tile
are the first ``min(number of tiles, num_splits)``. The others leave nothing, and nothing of them is read.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

from attnfuzz.kernels.common.score_variants import window_begin

__all__ = ["count_splits", "first_tile_begin"]


@triton.jit
def count_splits(seq_len, begin, num_splits, TILE: tl.constexpr):
    """How many splits of the tokens ``[begin, seq_len)`` have a tile."""
    return tl.minimum(tl.cdiv(seq_len - begin, TILE), num_splits)


@triton.jit
def first_tile_begin(seq_len, window, TILE: tl.constexpr):
    """Where the tile begins that holds the first token in the window of a sequence's last one."""
    return tl.maximum(window_begin(seq_len - 1, window), 0) // TILE * TILE
