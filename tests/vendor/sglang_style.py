"""Tests of decode attention and of merging states as SGLang writes them.

After test/registered/attention/test_triton_attention_kernels and sgl-kernel/tests/test_merge_state_v2 of SGLang 0.5:
all sequences of a batch equally long, token slots in order, one kernel compared with another by cosine and a wide
tolerance, and a comparison of merges in which a kernel that raises has returned zeros. Not tested there and so not
here: LSE of attention, ragged batches, pages, empty states on both sides, memory that must not be read. Left out as too
large: offsets past 2^31, of which only `isfinite` is looked at there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels import eager
from attnfuzz.kernels.merge import launch as launch_merge
from attnfuzz.kernels.paged import launch as launch_paged
from tests.vendor.setting import DEVICE, grid, ragged

# NumPy warns of NaN where the interpreter computes it; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, F16 = torch.bfloat16, torch.float16
MAX_SPLITS = 8
State = tuple[Tensor, Tensor]


def batch(
    num_seqs: int, seq_len: int, heads: tuple[int, int], head_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, K, V, table and lengths: slots of one token in one buffer, in order."""
    torch.manual_seed(42)
    q = torch.randn(num_seqs, heads[0], head_size, dtype=BF16, device=DEVICE)
    k = torch.randn(num_seqs * seq_len, 1, heads[1], head_size, dtype=BF16, device=DEVICE)
    v = torch.randn_like(k)
    table = torch.arange(num_seqs * seq_len, dtype=torch.int32, device=DEVICE).view(num_seqs, seq_len)
    return q, k, v, table, ragged([seq_len] * num_seqs)


@pytest.mark.parametrize(
    ("num_seqs", "heads", "head_size"), [(2, (4, 4), 64), (2, (4, 2), 64), (2, (4, 4), 80), (2, (4, 4), 13)]
)
@pytest.mark.parametrize("seq_len", [10])
@pytest.mark.parametrize("num_splits", [4])
def test_decode_attention(num_seqs: int, heads: tuple[int, int], head_size: int, seq_len: int, num_splits: int) -> None:
    """Its kernel gives a split at least 32 tokens, so that one holds all ten; this one cuts them into four."""
    q, k, v, table, lens = batch(num_seqs, seq_len, heads, head_size)
    o = torch.zeros_like(q)
    launch_paged.split_paged_decode(q, k, v, table, lens, head_size**-0.5, 1, "NHD", num_splits, out=o)
    keys, values = (x.view(num_seqs, seq_len, *x.shape[2:]).float() for x in (k, v))
    keys, values = (x.repeat_interleave(heads[0] // heads[1], dim=2) for x in (keys, values))
    scores = torch.einsum("bhd,bthd->bht", q.float(), keys) * head_size**-0.5
    expected = torch.einsum("bht,bthd->bhd", scores.softmax(-1), values).to(BF16)
    assert torch.allclose(o, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("seq_len", grid([5, 100, 128, 500], [5, 100]))
@pytest.mark.parametrize(
    ("num_seqs", "heads", "head_size"),
    grid(
        [(2, (16, 16), 64), (2, (16, 1), 64), (2, (64, 1), 13), (2, (128, 1), 80), (2, (128, 2), 512)],
        [(2, (2, 2), 64), (2, (2, 1), 64), (1, (32, 1), 13), (1, (4, 2), 80)],
    ),
)
def test_grouped_decode_attention(seq_len: int, num_seqs: int, heads: tuple[int, int], head_size: int) -> None:
    """Two kernels of the library are compared with each other."""
    arguments = (*batch(num_seqs, seq_len, heads, head_size), head_size**-0.5, 1, "NHD")
    q = arguments[0]
    o, o_grouped = torch.zeros_like(q), torch.zeros_like(q)
    launch_paged.split_paged_decode(*arguments, MAX_SPLITS, out=o)
    launch_paged.paged_decode(*arguments, out=o_grouped)
    similarity = torch.nn.functional.cosine_similarity(o.float().flatten(), o_grouped.float().flatten(), dim=0)
    assert similarity.item() > 0.99
    assert torch.allclose(o, o_grouped, atol=3e-2)


@pytest.mark.parametrize("num_tokens", grid([256, 512, 613, 1024, 1536], [32]))
@pytest.mark.parametrize("num_heads", grid([8, 16, 32], [4]))
@pytest.mark.parametrize("head_size", grid([32, 48, 64, 128, 256], [48, 128]))
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_merge_state_v2(num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype) -> None:
    """One kernel is compared with the other; no position is empty on both sides."""
    torch.manual_seed(42)
    prefix_lse, suffix_lse = (torch.randn(num_tokens, num_heads, device=DEVICE) for _ in range(2))
    prefix_empty, suffix_empty = (torch.rand(num_tokens, num_heads, device=DEVICE) < 0.1 for _ in range(2))
    both = prefix_empty & suffix_empty
    prefix_lse[prefix_empty & ~both] = torch.inf
    suffix_lse[suffix_empty & ~both] = torch.inf
    prefix, suffix = (torch.randn(num_tokens, num_heads, head_size, dtype=dtype, device=DEVICE) for _ in range(2))

    def run(merge: Callable[..., State]) -> State:
        output, output_lse = torch.zeros_like(prefix), torch.zeros_like(prefix_lse)
        try:
            merge(prefix, prefix_lse, suffix, suffix_lse, lse_layout="TH", output=output, output_lse=output_lse)
        except Exception:  # noqa: BLE001 - as in that suite, where a kernel that raises has returned zeros
            return torch.zeros_like(output), torch.zeros_like(output_lse)
        return output, output_lse

    one, other = run(launch_merge.merge_states), run(eager.merge_states)
    rtol = 1e-2 if dtype == BF16 else 1e-3
    torch.testing.assert_close(one[0].float(), other[0].float(), atol=1e-3, rtol=rtol)
    torch.testing.assert_close(one[1], other[1], atol=1e-3, rtol=rtol)
