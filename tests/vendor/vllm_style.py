"""Tests of decode attention and of merging states as vLLM writes them.

After tests/kernels/attention of vLLM 0.33: test_triton_unified_attention, test_flash_attn (its decode batch),
test_attention, test_triton_decode_attention and test_merge_attn_states. Fixed lists of lengths; pages drawn with
replacement from a cache of finite normal numbers; references in the kernel's own low precision; absolute tolerances
that fit the longest sequence. Not tested there and so not here: the LSE of attention, sequences of length 0, cache
contents that must not be read, strides, results that are never written.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels import eager
from attnfuzz.kernels.merge import launch as launch_merge
from attnfuzz.kernels.paged import launch as launch_paged
from tests.vendor.setting import DEVICE, grid, ragged, table_with_replacement

# NumPy warns of NaN where the interpreter computes it; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SEGMENTS = 16


def low_precision_reference(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: list[int], scale: float) -> Tensor:
    """Scaled, multiplied and averaged in q's dtype, with float32 only for the softmax. The query is scaled in place."""
    q *= scale
    outs = []
    for row, length in enumerate(lens):
        pages = table[row, : -(-length // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
        group = q.shape[1] // k.shape[2]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[row], keys).float()
        outs.append(torch.einsum("ht,thd->hd", scores.softmax(-1).to(v.dtype), values))
    return torch.stack(outs)


@pytest.mark.parametrize("lens", grid([[1328, 18, 463], [523, 37, 2011]], [[332, 5, 116]]))
@pytest.mark.parametrize("heads", grid([(4, 4), (8, 2)], [(2, 2), (4, 1)]))
@pytest.mark.parametrize("head_size", grid([128, 256], [128]))
@pytest.mark.parametrize("num_blocks", grid([32768, 2048], [256]))
@pytest.mark.parametrize("segments", [1, SEGMENTS])
def test_unified_attention(
    lens: list[int], heads: tuple[int, int], head_size: int, num_blocks: int, segments: int
) -> None:
    torch.manual_seed(0)
    num_q_heads, num_kv_heads = heads
    q = torch.randn(len(lens), num_q_heads, head_size, dtype=BF16, device=DEVICE)
    k = torch.randn(num_blocks, 16, num_kv_heads, head_size, dtype=BF16, device=DEVICE)
    v = torch.randn_like(k)
    table = table_with_replacement(len(lens), -(-max(lens) // 16), num_blocks)
    out = torch.empty_like(q)
    arguments = (q, k, v, table, ragged(lens), head_size**-0.5, 16, "NHD")
    if segments == 1:
        launch_paged.paged_decode(*arguments, out=out)
    else:
        launch_paged.split_paged_decode(*arguments, segments, out=out)
    expected = low_precision_reference(q, k, v, table, lens, head_size**-0.5)
    torch.testing.assert_close(out, expected, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("use_out", grid([True, False], [False]))
@pytest.mark.parametrize("lens", grid([[523, 37, 2011]], [[65, 5, 251]]))
@pytest.mark.parametrize("heads", grid([(4, 4), (8, 2)], [(4, 2)]))
@pytest.mark.parametrize("head_size", grid([40, 72, 80, 128, 256], [40, 72, 80]))
@pytest.mark.parametrize("num_blocks", grid([32768, 2048], [256]))
def test_flash_attn_with_paged_kv(
    use_out: bool, lens: list[int], heads: tuple[int, int], head_size: int, num_blocks: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(len(lens), heads[0], head_size, dtype=BF16, device=DEVICE)
    k = torch.randn(num_blocks, 16, heads[1], head_size, dtype=BF16, device=DEVICE)
    v = torch.randn_like(k)
    table = table_with_replacement(len(lens), -(-max(lens) // 16), num_blocks)
    out = torch.empty_like(q) if use_out else None
    result, _ = launch_paged.paged_decode(q, k, v, table, ragged(lens), head_size**-0.5, 16, "NHD", out=out)
    expected = low_precision_reference(q, k, v, table, lens, head_size**-0.5)
    torch.testing.assert_close(result, expected, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("heads", grid([(32, 8), (40, 40), (64, 8)], [(4, 1)]))
@pytest.mark.parametrize("head_size", grid([64, 128], [64]))
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", grid([BF16, F16], [F16]))
@pytest.mark.parametrize("longest", grid([57600], [128]))  # scores of one row filled the shared memory of an H100
def test_paged_attention(
    version: str, heads: tuple[int, int], head_size: int, block_size: int, dtype: torch.dtype, longest: int
) -> None:
    random.seed(0)
    torch.manual_seed(0)
    scale = head_size**-0.5
    num_blocks, x, partition = (4321, 8, 512) if DEVICE == "cuda" else (64, 8, 64)
    q = torch.empty(7, heads[0], head_size, dtype=dtype, device=DEVICE).uniform_(-scale, scale)
    k = torch.empty(num_blocks, heads[1], head_size // x, block_size, x, dtype=dtype, device=DEVICE)
    v = torch.empty(num_blocks, heads[1], head_size, block_size, dtype=dtype, device=DEVICE)
    k.uniform_(-scale, scale)
    v.uniform_(-scale, scale)
    lens = [random.randint(1, longest) for _ in range(7)]
    lens[-1] = longest
    width = -(-max(lens) // block_size)
    table = torch.tensor([[random.randint(0, num_blocks - 1) for _ in range(width)] for _ in lens], dtype=torch.int32)
    table = table.to(DEVICE)
    out = torch.empty_like(q)
    arguments = (q, k, v, table, ragged(lens), scale, block_size, "packed")
    if version == "v1":
        launch_paged.paged_decode(*arguments, out=out)
    else:
        partitions = -(-max(lens) // partition)
        launch_paged.split_paged_decode(*arguments, partitions, out=out, partial_dtype="input")
    by_token = k.permute(0, 3, 1, 2, 4).flatten(3), v.permute(0, 3, 1, 2)
    expected = low_precision_reference(q, by_token[0], by_token[1], table, lens, scale)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("num_seqs", grid([3, 5], [2]))
@pytest.mark.parametrize("length", grid([1027, 1025], [129]))
@pytest.mark.parametrize("heads", grid([(32, 32), (32, 8)], [(4, 2)]))
@pytest.mark.parametrize("head_size", grid([128, 192], [128]))
@pytest.mark.parametrize("page_size", grid([1, 16], [16]))
def test_decode_attention(num_seqs: int, length: int, heads: tuple[int, int], head_size: int, page_size: int) -> None:
    """The kernel is compared with itself on pages of one token."""
    torch.manual_seed(0)
    slots, width = (16384 if DEVICE == "cuda" else 2048), -(-length // page_size)
    pages = torch.randint(0, slots // page_size, (num_seqs, width), dtype=torch.int32, device=DEVICE)
    tokens = (pages[:, :, None] * page_size + torch.arange(page_size, device=DEVICE)).flatten(1)[:, :length]
    q = torch.randn(num_seqs, heads[0], head_size, dtype=BF16, device=DEVICE)
    k = torch.randn(slots, heads[1], head_size, dtype=BF16, device=DEVICE)
    v = torch.randn_like(k)
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device=DEVICE)
    outs = []
    for size, table in ((1, tokens.int()), (page_size, pages)):
        k_pages, v_pages = (cache.view(-1, size, *cache.shape[1:]) for cache in (k, v))
        out = torch.zeros_like(q)
        launch_paged.split_paged_decode(q, k_pages, v_pages, table, lens, head_size**-0.5, size, "NHD", 8, out=out)
        outs.append(out)
    assert torch.allclose(outs[0], outs[1])


@pytest.mark.parametrize("num_tokens", grid([256, 512, 613, 1024, 1536, 4096], [32]))
@pytest.mark.parametrize("num_heads", grid([4, 8, 16, 32, 48, 64], [4]))
@pytest.mark.parametrize("head_size", grid([32, 48, 64, 96, 128, 256], [48, 128]))
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_merge_attn_states(num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype) -> None:
    """One kernel is compared with the other; no position is empty on both sides."""
    torch.manual_seed(0)
    prefix_lse, suffix_lse = (torch.randn(num_heads, num_tokens, device=DEVICE) for _ in range(2))
    prefix_empty, suffix_empty = (torch.rand(num_heads, num_tokens, device=DEVICE) < 0.1 for _ in range(2))
    both = prefix_empty & suffix_empty
    prefix_lse[prefix_empty & ~both] = torch.inf
    suffix_lse[suffix_empty & ~both] = torch.inf
    prefix, suffix = (torch.randn(num_tokens, num_heads, head_size, dtype=dtype, device=DEVICE) for _ in range(2))
    states = (prefix, prefix_lse, suffix, suffix_lse)
    results = []
    for merge in (launch_merge.merge_states, eager.merge_states):
        output, output_lse = torch.zeros_like(prefix), torch.zeros_like(prefix_lse)
        merge(*states, output=output, output_lse=output_lse)
        results.append((output, output_lse))
    rtol = 1e-2 if dtype == BF16 else 1e-3
    torch.testing.assert_close(results[0][0].float(), results[1][0].float(), atol=1e-3, rtol=rtol)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-3, rtol=rtol)
