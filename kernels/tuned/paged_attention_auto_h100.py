"""Options of paged_attention_auto, as `attnfuzz bench tune` chose them.

Measured on NVIDIA H100 80GB HBM3 on 2026-11-25 (torch 2.11.0, triton 3.6.0, CUDA 13.0): 36 configurations.
Slower than the best configuration of each batch, in the median and at worst:

25 batches that it was grown on:
    the tree       0.2%    15.5%
    one choice     5.2%    32.5%
    the default    8.8%    37.4%
11 batches that it has not seen:
    the tree       5.1%    24.2%
    one choice     5.4%    24.1%
    the default    4.1%    34.8%
"""

KERNEL = "paged_attention_auto"
DEVICE = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
PROCESSORS = 132
RANGES = {
    "batch": (1, 128),
    "max_seq_len": (64, 100652),
    "heads_per_group": (4, 8),
    "head_size": (64, 128),
    "max_query_len": (1, 10523),
    "rows": (4, 73661),
    "pairs": (4, 1024),
}


def choose_options(
    batch: int,
    max_seq_len: int,
    heads_per_group: int,
    head_size: int,
    max_query_len: int,
    rows: int,
    pairs: int,
) -> dict[str, int]:
    """Lengths in tokens; of all sequences of a batch."""
    if max_query_len <= 64:
        if pairs <= 8:
            return {"block_m": 16, "num_warps": 4, "tile": 32, "num_stages": 3, "fill": 2}
        return {"block_m": 16, "num_warps": 4, "tile": 64, "num_stages": 3, "fill": 4}
    if max_seq_len <= 8192:
        return {"block_m": 64, "num_warps": 4, "tile": 32, "num_stages": 3, "fill": 2}
    return {"block_m": 64, "num_warps": 4, "tile": 64, "num_stages": 3, "fill": 2}
