"""Blocks for matrix units: how wide, and that narrow heads come out right where they are padded."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.kernels.common.matrix_units import block_columns
from attnfuzz.kernels.grouped.launch import grouped_decode
from attnfuzz.kernels.q_block.launch import q_block_attention

QUERIES, LENGTH, PAGE = 3, 70, 2


@pytest.mark.parametrize(
    ("head_size", "num_rows", "columns"),
    [(1, 16, 16), (16, 32, 16), (40, 32, 64), (16, 64, 64), (64, 64, 64), (65, 64, 128), (192, 128, 256)],
)
def test_blocks_of_whole_warp_groups_are_not_narrow(head_size: int, num_rows: int, columns: int) -> None:
    """An assembler would compute addresses in shared memory from a register that nothing was written to."""
    assert block_columns(head_size, num_rows) == columns


@pytest.mark.by_day
@pytest.mark.parametrize("sizes", [(16, 16), (40, 16), (16, 40), (32, 32)])
@pytest.mark.parametrize("kernel", ["q_block", "grouped"])
def test_narrow_heads_of_an_8_bit_cache(kernel: str, sizes: tuple[int, int]) -> None:
    """Padded columns would count, or, compiled for Hopper, products would read anywhere in shared memory."""
    head_size, v_head_size = sizes
    num_heads = 64 if kernel == "grouped" else 1
    rows = {"grouped": (1, num_heads), "q_block": (QUERIES, 1)}[kernel]
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    num_blocks = -(-LENGTH // PAGE)
    q = torch.randn(*rows, head_size, generator=generator).half()
    k, v = (torch.randn(num_blocks, PAGE, 1, size, generator=generator).to(torch.float8_e4m3fn) for size in sizes)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    lengths, scale = torch.tensor([LENGTH], dtype=torch.int32), torch.ones(1)
    scores = torch.einsum("thd,kd->thk", q.double(), k.double().view(-1, head_size)[:LENGTH])
    if kernel == "q_block":
        ends = torch.tensor([0, QUERIES], dtype=torch.int32)
        out, _ = q_block_attention(
            q, k, v, table, lengths, ends, 0.25, PAGE, "NHD", max_query_len=QUERIES, max_seq_len=LENGTH,
            block_m=64, tile=64, num_warps=4, num_stages=2, k_scale=scale, v_scale=scale,
        )  # fmt: skip
        last = LENGTH - QUERIES + torch.arange(QUERIES)
        scores = scores.masked_fill(torch.arange(LENGTH) > last[:, None, None], float("-inf"))
    else:
        out, _ = grouped_decode(q, k, v, table, lengths, 0.25, PAGE, "NHD", k_scale=scale, v_scale=scale)
    expected = torch.softmax(scores * 0.25, -1) @ v.double().view(-1, v_head_size)[:LENGTH]
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3)
