"""Options of paged_grouped_auto, as `attnfuzz bench tune` chose them.

Measured on NVIDIA H100 80GB HBM3 on 2026-11-25 (torch 2.11.0, triton 3.6.0, CUDA 13.0): 36 configurations.
`attnfuzz bench tree` makes this file again of the record of that run.
Slower than the best configuration of each batch, in the median and at worst:

17 batches that it was grown on:
    the tree       2.6%    11.5%
    one choice     2.6%    11.5%
    the default    8.7%    71.6%
7 batches that it has not seen:
    the tree       0.9%    11.4%
    one choice     0.9%    11.4%
    the default    6.3%    62.5%
"""

__all__ = ["CAPABILITY", "DEVICE", "KERNEL", "PROCESSORS", "RANGES", "choose_options"]

KERNEL = "paged_grouped_auto"
DEVICE = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
PROCESSORS = 132
RANGES = {
    "batch": (1, 64),
    "max_seq_len": (67, 35576),
    "heads_per_group": (4, 8),
    "head_size": (64, 128),
    "max_query_len": (1, 1),
    "rows": (4, 8),
    "pairs": (4, 256),
}


def choose_options(
    batch: int, max_seq_len: int, heads_per_group: int, head_size: int, max_query_len: int, rows: int, pairs: int
) -> dict[str, int | bool]:
    """Lengths in tokens; of all sequences of a batch."""
    return {"tile": 64, "num_stages": 2, "num_warps": 4, "pdl": True, "fill": 4}
