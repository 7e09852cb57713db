"""Tests of batch decode, cascades and merging states as FlashInfer writes them.

After tests of FlashInfer 0.7: test_batch_decode_kernels, test_decode_prefill_lse, test_shared_prefix_kernels,
test_triton_cascade, test_merge_state_reference_correctness, test_batch_invariant_fa2, the NaN in unused slots of
test_deepseek_mla, and test_trtllm_gen_attention_decode, the most thorough: ragged lengths, shuffled pages, strided
queries, LSE. Otherwise batches of one length, pages in order, one kernel as the reference of another. Not tested there
and so not here: empty states in merges, pages that nobody owns, table entries that must not be followed, gaps between
strides.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels import eager
from attnfuzz.kernels.dense import launch
from attnfuzz.kernels.merge import launch as launch_merge
from attnfuzz.kernels.paged import launch as launch_paged
from tests.vendor.setting import DEVICE, grid, interleaved_cache, ragged

# NumPy warns of NaN where the interpreter computes it; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, F16 = torch.bfloat16, torch.float16
State = tuple[Tensor, Tensor]


def decode(kernel: str, q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, *, splits: int = 4) -> State:
    """Batch decode over an interleaved cache, whole or in splits."""
    k, v, page_size = cache[:, 0], cache[:, 1], cache.shape[2]
    arguments = (q, k, v, table, lens, q.shape[-1] ** -0.5, page_size, "interleaved")
    if kernel == "whole":
        return launch_paged.paged_decode(*arguments)
    return launch_paged.split_paged_decode(*arguments, splits)


def single_decode(q: Tensor, cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """One request by itself, on its pages copied into one tensor: the library's own kernel is the reference."""
    rows = cache[pages.long()].transpose(0, 1).flatten(1, 2)[:, :length]
    out, _ = launch.dense_decode(q[None], rows[None, 0], rows[None, 1], ragged([length]), q.shape[-1] ** -0.5)
    return out[0]


def pages_in_order(num_seqs: int, pages_each: int) -> Tensor:
    return torch.arange(num_seqs * pages_each, dtype=torch.int32, device=DEVICE).view(num_seqs, pages_each)


@pytest.mark.parametrize("kernel", ["whole", "splits"])
@pytest.mark.parametrize("batch_size", grid([12, 17, 128], [3]))
@pytest.mark.parametrize("kv_len", grid([54, 97, 512, 2048, 16384], [54, 97]))
@pytest.mark.parametrize("page_size", grid([1, 8, 16], [1, 16]))
@pytest.mark.parametrize("num_q_heads", grid([4, 32], [4]))
@pytest.mark.parametrize("num_kv_heads", grid([4], [2]))
@pytest.mark.parametrize("head_size", grid([128, 256], [128]))
def test_batch_decode_with_paged_kv_cache(
    kernel: str, batch_size: int, kv_len: int, page_size: int, num_q_heads: int, num_kv_heads: int, head_size: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(batch_size, num_q_heads, head_size, dtype=F16, device=DEVICE)
    table = pages_in_order(batch_size, -(-kv_len // page_size))
    cache = interleaved_cache(table.numel(), page_size, num_kv_heads, head_size, F16)
    o, _ = decode(kernel, q, cache, table, ragged([kv_len] * batch_size))
    for i in range(batch_size):
        torch.testing.assert_close(o[i], single_decode(q[i], cache, table[i], kv_len), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_heads", grid([32], [4]))
@pytest.mark.parametrize("head_size", grid([128], [64]))
def test_decode_lse_with_an_empty_request(num_heads: int, head_size: int) -> None:
    """The one batch with an empty sequence: two kernels are compared."""
    torch.manual_seed(0)
    q = torch.randn(2, num_heads, head_size, dtype=F16, device=DEVICE)
    cache = interleaved_cache(9, 16, num_heads, head_size, F16)
    table = torch.arange(9, dtype=torch.int32, device=DEVICE).expand(2, 9).contiguous()
    whole, splits = (decode(kernel, q, cache, table, ragged([0, 129])) for kernel in ("whole", "splits"))
    torch.testing.assert_close(whole[1], splits[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(whole[0], splits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch_size", grid([12, 17], [3]))
@pytest.mark.parametrize("unique_len", grid([37, 17], [17]))
@pytest.mark.parametrize("shared_len", grid([128, 512, 2048], [128]))
@pytest.mark.parametrize("num_heads", grid([8, 16], [2]))
@pytest.mark.parametrize("page_size", grid([1, 16], [16]))
def test_shared_prefix(batch_size: int, unique_len: int, shared_len: int, num_heads: int, page_size: int) -> None:
    """A cascade of the shared prefix and the unique rest is compared with the kernel over both at once."""
    torch.manual_seed(0)
    head_size = 128 if DEVICE == "cuda" else 64
    q = torch.randn(batch_size, num_heads, head_size, dtype=F16, device=DEVICE)
    shared_pages = shared_len // page_size
    unique = pages_in_order(batch_size, -(-unique_len // page_size)) + shared_pages
    shared = torch.arange(shared_pages, dtype=torch.int32, device=DEVICE).expand(batch_size, -1).contiguous()
    cache = interleaved_cache(shared_pages + unique.numel(), page_size, num_heads, head_size, F16)
    prefix = decode("whole", q, cache, shared, ragged([shared_len] * batch_size))
    suffix = decode("whole", q, cache, unique, ragged([unique_len] * batch_size))
    merged, _ = launch_merge.merge_states(*prefix, *suffix, lse_layout="TH")
    expected, _ = decode(
        "splits", q, cache, torch.cat((shared, unique), 1), ragged([shared_len + unique_len] * batch_size)
    )
    torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seq_len", grid([2048], [32]))
@pytest.mark.parametrize("num_heads", grid([32], [4]))
@pytest.mark.parametrize("head_size", grid([128], [128]))
def test_merge_state(seq_len: int, num_heads: int, head_size: int) -> None:
    """One shape, two kernels."""
    torch.manual_seed(0)
    va, vb = (torch.randn(seq_len, num_heads, head_size, dtype=F16, device=DEVICE) for _ in range(2))
    sa, sb = (torch.randn(seq_len, num_heads, device=DEVICE) for _ in range(2))
    v, s = launch_merge.merge_states(va, sa, vb, sb, lse_layout="TH")
    expected_v, expected_s = eager.merge_states(va, sa, vb, sb, lse_layout="TH")
    assert torch.allclose(v, expected_v, atol=1e-2)
    assert torch.allclose(s, expected_s, atol=1e-2)


@pytest.mark.parametrize("seq_len", grid([2048], [4]))
@pytest.mark.parametrize("num_heads", grid([32], [4]))
@pytest.mark.parametrize("num_states", [100])
def test_merge_states(seq_len: int, num_heads: int, num_states: int) -> None:
    torch.manual_seed(0)
    v = torch.randn(seq_len, num_states, num_heads, 128, device=DEVICE).transpose(1, 2)
    s = torch.randn(seq_len, num_states, num_heads, device=DEVICE).transpose(1, 2)
    merged, lse = launch_paged.reduce_splits(v, s)
    expected, expected_lse = eager.reduce_splits(v, s)
    assert torch.allclose(merged, expected, atol=1e-2)
    assert torch.allclose(lse, expected_lse, atol=1e-2)


@pytest.mark.parametrize("shape", grid([(8, 4, 64), (16, 8, 128)], [(8, 4, 64), (3, 2, 128)]))
def test_merge_state_against_torch(shape: tuple[int, int, int]) -> None:
    """Finite states only, which is asserted."""
    torch.manual_seed(0)
    va, vb = (torch.randn(shape, dtype=F16, device=DEVICE) for _ in range(2))
    sa, sb = (torch.randn(shape[:2], device=DEVICE) for _ in range(2))
    v, s = launch_merge.merge_states(va, sa, vb, sb, lse_layout="TH")
    weights = torch.stack((sa, sb)).softmax(0)[..., None]
    expected = weights[0] * va.float() + weights[1] * vb.float()
    assert v.isfinite().all()
    assert s.isfinite().all()
    torch.testing.assert_close(v.float(), expected.to(F16).float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(s, torch.logaddexp(sa, sb), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch_size", grid([5, 12], [5]))
@pytest.mark.parametrize("kv_len", grid([54, 2048, 4096], [54]))
@pytest.mark.parametrize("page_size", grid([1, 8, 16], [16]))
@pytest.mark.parametrize("splits", [1, 4])
def test_batch_invariance(batch_size: int, kv_len: int, page_size: int, splits: int) -> None:
    """The first four rows have the same bits alone and in a larger batch."""
    torch.manual_seed(0)
    heads, head_size = (32, 128) if DEVICE == "cuda" else (2, 64)
    q = torch.randn(batch_size, heads, head_size, dtype=F16, device=DEVICE)
    table = pages_in_order(batch_size, -(-kv_len // page_size))
    cache = interleaved_cache(table.numel(), page_size, heads, head_size, F16)
    lens = ragged([kv_len] * batch_size)
    kernel = "whole" if splits == 1 else "splits"
    o, lse = decode(kernel, q, cache, table, lens, splits=splits)
    o_4, lse_4 = decode(kernel, q[:4], cache, table[:4], lens[:4], splits=splits)
    assert torch.equal(o[:4], o_4)
    assert torch.equal(lse[:4], lse_4)


@pytest.mark.parametrize("kernel", ["whole", "splits"])
@pytest.mark.parametrize("batch_size", grid([4, 128, 256], [4]))
@pytest.mark.parametrize("page_size", grid([16, 32, 64], [16, 64]))
@pytest.mark.parametrize("heads", grid([(2, 2), (2, 10), (2, 16), (4, 32)], [(1, 1), (1, 5)]))
@pytest.mark.parametrize("longest", grid([110, 8192], [110]))
@pytest.mark.parametrize("strided_query", grid([False, True], [True]))
def test_ragged_shuffled_pages(
    kernel: str, batch_size: int, page_size: int, heads: tuple[int, int], longest: int, strided_query: bool
) -> None:
    torch.manual_seed(0)
    num_kv_heads, num_q_heads = heads
    head_size = 128 if DEVICE == "cuda" else 64
    lens = torch.randint(0, longest + 1, (batch_size,), dtype=torch.int32) + 1
    lens[-1] = longest + 1
    pages = (lens + page_size - 1) // page_size
    order = torch.randperm(int(pages.sum())).int()
    table = torch.zeros(batch_size, int(pages.max()), dtype=torch.int32)
    for row, ids in enumerate(torch.split(order, pages.tolist())):
        table[row, : len(ids)] = ids
    k, v = torch.randn(2, len(order), num_kv_heads, page_size, head_size, dtype=BF16, device=DEVICE)
    q = torch.randn(batch_size, num_q_heads * (2 if strided_query else 1), head_size, dtype=BF16, device=DEVICE)
    q = q[:, :num_q_heads]
    lse = torch.full((batch_size, num_q_heads), torch.nan, device=DEVICE)
    table, lens = table.to(DEVICE), lens.to(DEVICE)
    arguments = (q, k, v, table, lens, head_size**-0.5, page_size, "HND")
    if kernel == "whole":
        out, _ = launch_paged.paged_decode(*arguments, lse=lse)
    else:
        out, _ = launch_paged.split_paged_decode(*arguments, 4, lse=lse)
    for row, length in enumerate(lens.tolist()):
        ids = table[row, : -(-length // page_size)].long()
        keys, values = (c[ids].transpose(1, 2).flatten(0, 1)[:length].float() for c in (k, v))
        group = num_q_heads // num_kv_heads
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[row].float(), keys) * head_size**-0.5
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), values).to(BF16)
        torch.testing.assert_close(out[row], expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[row], scores.logsumexp(-1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", ["whole", "splits"])
@pytest.mark.parametrize("kv_len", grid([0, 17, 33, 79, 96, 113, 514, 1024], [0, 17, 33]))
@pytest.mark.parametrize("page_size", grid([1, 16, 64], [64]))
def test_nan_in_unused_slots(kernel: str, kv_len: int, page_size: int) -> None:
    """The tail of the last page is NaN; the LSE is looked at if there is a token."""
    torch.manual_seed(0)
    heads, head_size, batch_size = (32, 128, 8) if DEVICE == "cuda" else (2, 64, 2)
    table = pages_in_order(batch_size, max(1, -(-kv_len // page_size)))
    cache = interleaved_cache(table.numel(), page_size, heads, head_size, F16)
    tail = cache.transpose(1, 2).reshape(batch_size, -1, 2, heads, head_size)
    tail[:, kv_len:] = torch.nan
    cache = tail.view(-1, page_size, 2, heads, head_size).transpose(1, 2).contiguous()
    q = torch.randn(batch_size, heads, head_size, dtype=F16, device=DEVICE)
    out, lse = decode(kernel, q, cache, table, ragged([kv_len] * batch_size))
    rows = tail[:, :kv_len].float()
    scores = torch.einsum("bhd,bthd->bth", q.float(), rows[:, :, 0]) * head_size**-0.5
    expected = torch.einsum("bth,bthd->bhd", scores.softmax(1), rows[:, :, 1])
    torch.testing.assert_close(out, expected.to(F16), rtol=1e-3, atol=1e-3)
    if kv_len:
        torch.testing.assert_close(lse, scores.logsumexp(1), rtol=1e-3, atol=1e-3)
