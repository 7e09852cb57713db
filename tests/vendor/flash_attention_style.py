"""Tests of decode attention with a KV cache and of combining splits as flash-attention writes them.

After test_flash_attn_kvcache of tests/ and hopper/, test_flash_attn_combine and test_flash_attn_race_condition of
flash-attention 2 and 3. The error may be a small multiple of that of the same computation in low precision; pages come
from a pool three times as large as needed, in random order. Not tested there and so not here: LSE of attention,
sequences of length 0 without new keys, memory that must not be read (spare pages hold finite numbers), rows in which
all splits are empty.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels.dense import launch
from attnfuzz.kernels.paged import launch as launch_paged
from tests.vendor.setting import DEVICE, grid

# NumPy warns of NaN where the interpreter computes it; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KV_HEADS = {"mha": 6, "mqa": 1, "gqa": 3}


def attention(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, *, upcast: bool) -> Tensor:
    """In float32, or in the dtype of the inputs with the scale on the keys instead of the queries."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[2], dim=2) for x in (k, v))
    if upcast:
        scores = torch.einsum("bhd,bthd->bht", q.float() * scale, k.float())
    else:
        scores = torch.einsum("bhd,bthd->bht", q, k * scale)
    dead = torch.arange(k.shape[1], device=q.device) >= lens[:, None]
    scores = scores.masked_fill(dead[:, None], -torch.inf)
    values = v.float() if upcast else v
    return torch.einsum("bht,bthd->bhd", scores.softmax(-1).to(values.dtype), values).to(dtype)


def assert_as_good(
    out: Tensor, expected: Tensor, low: Tensor, *, times: float, mean_times: float | None = None
) -> None:
    error, allowed = (out - expected).abs(), (low - expected).abs()
    assert error.max().item() <= times * allowed.max().item() + 1e-5
    if mean_times is not None:
        assert error.mean().item() <= mean_times * allowed.mean().item() + 1e-6


def paged(cache: Tensor, table: Tensor, page_size: int, num_pages: int) -> Tensor:
    """The rows of a dense cache in the pages that ``table`` names; the other pages hold random numbers."""
    num_seqs, padded = table.shape[0], table.shape[1] * page_size
    pages = torch.randn(num_pages, page_size, *cache.shape[2:], dtype=cache.dtype, device=DEVICE)
    rows = torch.randn(num_seqs, padded, *cache.shape[2:], dtype=cache.dtype, device=DEVICE)
    rows[:, : cache.shape[1]] = cache
    pages[table.long()] = rows.view(num_seqs, -1, page_size, *cache.shape[2:])
    return pages


def decode(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, page_size: int | None, num_splits: int) -> Tensor:
    """With the KV cache; ``num_splits`` 0: as many as a heuristic finds good."""
    if page_size is None:
        return launch.dense_decode(q, k, v, lens, q.shape[-1] ** -0.5)[0]
    each = -(-k.shape[1] // page_size)
    num_pages = 3 * each * len(q)
    table = torch.randperm(num_pages, device=DEVICE).int()[: each * len(q)].view(len(q), each)
    caches = tuple(paged(cache, table, page_size, num_pages) for cache in (k, v))
    arguments = (q, caches[0], caches[1], table, lens, q.shape[-1] ** -0.5, page_size, "NHD")
    num_splits = num_splits or min(8, -(-k.shape[1] // 128))
    if num_splits == 1:
        return launch_paged.paged_decode(*arguments)[0]
    return launch_paged.split_paged_decode(*arguments, num_splits)[0]


def inputs(
    num_seqs: int, kv_len: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.randn(num_seqs, heads[0], head_size, dtype=dtype, device=DEVICE)
    k, v = (torch.randn(num_seqs, kv_len, heads[1], head_size, dtype=dtype, device=DEVICE) for _ in range(2))
    lens = torch.randint(1, kv_len + 1, (num_seqs,), dtype=torch.int32, device=DEVICE)
    return q, k, v, lens


@pytest.mark.parametrize("num_splits", [1, 0])
@pytest.mark.parametrize("mha_type", grid(["mha", "mqa", "gqa"], ["mqa", "gqa"]))
@pytest.mark.parametrize("page_size", [None, 256])
@pytest.mark.parametrize("head_size", grid([32, 59, 64, 80, 128, 256], [59]))
@pytest.mark.parametrize("kv_len", grid([128, 339, 1024, 799, 2048, 20000, 131072], [339]))
def test_flash_attn_kvcache(num_splits: int, mha_type: str, page_size: int | None, head_size: int, kv_len: int) -> None:
    torch.manual_seed(0)
    q, k, v, lens = inputs(2, kv_len, (6, KV_HEADS[mha_type]), head_size, F16)
    out = decode(q, k, v, lens, page_size, num_splits)
    expected, low = (attention(q, k, v, lens, upcast=upcast) for upcast in (True, False))
    assert_as_good(out, expected, low, times=3)


@pytest.mark.parametrize("dtype", grid([BF16, F16], [F16]))
@pytest.mark.parametrize("mha_type", grid(["mha", "mqa", "gqa"], ["gqa"]))
@pytest.mark.parametrize("page_size", [None, 1, 4, 128])
@pytest.mark.parametrize("head_size", grid([64, 96, 128, 192, 256], [96]))
@pytest.mark.parametrize("kv_len", grid([128, 339, 1024, 2048, 20000, 131072], [128]))
def test_flash_attn3_kvcache(
    dtype: torch.dtype, mha_type: str, page_size: int | None, head_size: int, kv_len: int
) -> None:
    """Each of three numbers of splits, on one set of inputs."""
    torch.manual_seed(0)
    num_seqs = 5 if DEVICE == "cuda" else 2
    q, k, v, lens = inputs(num_seqs, kv_len, (6, KV_HEADS[mha_type]), head_size, dtype)
    expected, low = (attention(q, k, v, lens, upcast=upcast) for upcast in (True, False))
    for num_splits in (1, 3, 0):
        out = decode(q, k, v, lens, page_size, num_splits)
        assert_as_good(out, expected, low, times=2, mean_times=1.5)


@pytest.mark.parametrize("num_splits", grid([1, 2, 3, 5, 17, 32, 55, 97, 133], [1, 2, 5, 17]))
@pytest.mark.parametrize("seq_len", grid([1, 2, 3, 32, 64, 113, 256, 1024], [1, 3]))
@pytest.mark.parametrize("head_size", grid([64, 96, 128, 192, 256, 512], [64]))
@pytest.mark.parametrize("dtype", grid([F32, F16, BF16], [F32, F16]))
def test_flash_attn_combine(num_splits: int, seq_len: int, head_size: int, dtype: torch.dtype) -> None:
    """Late splits of some sequences are empty; all splits of a sequence only if there is but one."""
    torch.manual_seed(1)
    num_seqs, heads = (5, 16) if DEVICE == "cuda" else (3, 2)
    partial = torch.randn(2 * num_splits, num_seqs, heads, seq_len, head_size, device=DEVICE)
    partial = partial.transpose(2, 3)[:num_splits]  # not contiguous
    lse = torch.randn(num_splits, num_seqs, 2 * heads, seq_len, device=DEVICE).transpose(-1, -2)[..., :heads]
    lse[num_splits // 2 :, : num_seqs // 3] = -torch.inf
    by_row = partial.permute(1, 2, 3, 0, 4).flatten(0, 1), lse.permute(1, 2, 3, 0).flatten(0, 1)
    out = torch.empty(num_seqs * seq_len, heads, head_size, dtype=dtype, device=DEVICE)
    out, out_lse = launch_paged.reduce_splits(*by_row, out=out)
    expected_lse = by_row[1].logsumexp(-1)
    scale = torch.exp(by_row[1] - expected_lse[..., None])
    scale = torch.where(scale.isfinite(), scale, torch.zeros_like(scale))  # which hides NaN of the reference
    expected = (scale[..., None] * by_row[0]).sum(-2)
    low = expected.to(dtype).float()
    assert torch.allclose(out_lse, expected_lse, atol=1e-5, rtol=1e-5)
    error = (out.float() - expected).abs().max().item()
    assert error <= 2 * (low - expected).abs().max().item() or torch.allclose(
        out.float(), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("head_size", grid([32, 64, 96, 128, 192, 256], [64]))
@pytest.mark.parametrize("kv_len", grid([239, 1024], [239]))
@pytest.mark.parametrize("repeats", grid([250], [2]))
def test_flash_attn_race_condition(head_size: int, kv_len: int, repeats: int) -> None:
    """The same bits every time."""
    torch.manual_seed(0)
    q, k, v, lens = inputs(2, kv_len, (4, 4), head_size, F16)
    first = decode(q, k, v, lens, None, 1)
    for _ in range(repeats):
        assert torch.equal(decode(q, k, v, lens, None, 1), first)
