"""Options of paged_attention_auto, as `attnfuzz bench tune` chose them.

Measured on NVIDIA H200 on 2026-11-29 (torch 2.11.0, triton 3.6.0, CUDA 13.0): 24 configurations.
Slower than the best configuration of each batch, in the median and at worst:

19 batches that it was grown on:
    the tree       0.0%     8.9%
    one choice     2.8%    22.5%
    the default   13.0%    48.0%
9 batches that it has not seen:
    the tree       5.2%    16.9%
    one choice     8.4%    23.2%
    the default   16.9%    35.4%
"""

KERNEL = "paged_attention_auto"
DEVICE = "NVIDIA H200"
CAPABILITY = (9, 0)
PROCESSORS = 132
RANGES = {
    "batch": (1, 64),
    "max_seq_len": (94, 100652),
    "heads_per_group": (4, 8),
    "head_size": (64, 128),
    "max_query_len": (1, 3715),
    "rows": (4, 29720),
    "pairs": (4, 512),
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
    if max_query_len <= 32:
        return {"block_m": 16, "num_warps": 4, "tile": 64, "num_stages": 3, "fill": 4}
    if max_seq_len <= 196:
        return {"block_m": 64, "num_warps": 4, "tile": 32, "num_stages": 3, "fill": 4}
    return {"block_m": 64, "num_warps": 4, "tile": 64, "num_stages": 3, "fill": 2}
