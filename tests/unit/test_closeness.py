"""`attnfuzz.assert_close`: a result that somebody has is judged by the derived bounds, and what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.problems.layouts import token_views

LENGTHS = (37, 0, 16)
SCALE = 0.25
BLOCK = 16


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One query token on the keys that it sees, in float32, rounded at the end."""
    group = q.shape[0] // k.shape[1]
    keys, values = (part.float().repeat_interleave(group, 1) for part in (k, v))
    scores = SCALE * torch.einsum("hd,nhd->hn", q.float(), keys)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values).to(q.dtype), scores.logsumexp(-1)


def dense(dtype: torch.dtype = torch.float16, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, *shape, generator=generator).to(dtype) for shape in ((4, 32), (40, 2, 32), (40, 2, 32)))
    return {"q": q, "k": k, "v": v, "seq_lens": torch.tensor(lengths, dtype=torch.int32), "scale": SCALE}


def results(tensors: dict[str, Any], *, dropped: int = 0, head: int = 0) -> tuple[Tensor, Tensor]:
    """Of attention that drops tokens at the end, or reads KV heads moved by ``head``."""
    out, lse = torch.zeros_like(tensors["q"]), torch.full((3, 4), -torch.inf)
    for i, length in enumerate(LENGTHS):
        if length:
            k, v = (tensors[name][i, : length - dropped].roll(head, 1) for name in ("k", "v"))
            out[i], lse[i] = attend(tensors["q"][i], k, v)
    return out, lse


def paged(tensors: dict[str, Any], layout: Any) -> dict[str, Any]:
    """The same tokens in pages that lie in disorder, among others that hold NaN."""
    table = torch.tensor([[7, 2, 5], [0, 0, 0], [3, 99, 99]], dtype=torch.int32)
    heads, size = tensors["k"].shape[2:]
    shapes: dict[str, Any] = {
        "NHD": [(9, BLOCK, heads, size)] * 2,
        "HND": [(9, heads, BLOCK, size)] * 2,
        "packed": [(9, heads, size // 8, BLOCK, 8), (9, heads, size, BLOCK)],
    }
    caches = [torch.full(shape, torch.nan, dtype=tensors["k"].dtype) for shape in shapes[layout]]
    for slots, part in zip(token_views(caches[0], caches[1], layout), (tensors["k"], tensors["v"]), strict=True):
        for seq, length in enumerate(LENGTHS):
            for i in range(length):
                slot = slots[int(table[seq, i // BLOCK]), i % BLOCK]
                slot.copy_(part[seq, i].reshape(slot.shape))
    left = {name: tensors[name] for name in ("q", "seq_lens", "scale")}
    return {**left, "k_cache": caches[0], "v_cache": caches[1], "block_table": table, "layout": layout}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_right_results_pass(dtype: torch.dtype) -> None:
    """One line in a test would fail on rounding, as `torch.testing.assert_close` does."""
    tensors = dense(dtype)
    out, lse = results(tensors)
    attnfuzz.assert_close(out, lse, **tensors)
    attnfuzz.assert_close(out, **tensors)
    attnfuzz.assert_close(out, lse / torch.log(torch.tensor(2.0)), lse_base="base2", **tensors)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_caches_are_read_as_their_layout_says(layout: str) -> None:
    """A right kernel would be accused, or unused pages would count."""
    tensors = dense()
    out, lse = results(tensors)
    attnfuzz.assert_close(out, lse, **paged(tensors, layout))
    with pytest.raises(AssertionError, match=r"token 36 \(page 2, offset 4\) (is )?(dropped|left out)|dropped"):
        attnfuzz.assert_close(*results(tensors, dropped=1), **paged(tensors, layout))


def test_what_is_wrong_is_named() -> None:
    """Whoever sees 'greater than atol' would have to look for it."""
    tensors = dense()
    with pytest.raises(AssertionError, match=r"query head 0 reads KV head 1, expected 0"):
        attnfuzz.assert_close(*results(tensors, head=1), **tensors)
    out, lse = results(tensors)
    lse[1] = 0.0
    with pytest.raises(AssertionError, match="sequence 1 is empty: expected out = 0 and lse = -inf"):
        attnfuzz.assert_close(out, lse, **tensors)


def test_query_tokens_see_what_is_before_them() -> None:
    """A prefill would be judged as if every token saw the whole sequence."""
    tensors = dense()
    queries = (3, 0, 2)
    q = torch.cat([tensors["q"], tensors["q"][:2].flip(1)])
    out, lse = torch.zeros_like(q), torch.zeros(5, 4)
    rows = [(seq, LENGTHS[seq] - n + 1 + j) for seq, n in enumerate(queries) for j in range(n)]
    for row, (seq, seen) in enumerate(rows):
        out[row], lse[row] = attend(q[row], tensors["k"][seq, :seen], tensors["v"][seq, :seen])
    given = {**paged(tensors, "NHD"), "q": q, "cu_seqlens_q": torch.tensor([0, 3, 3, 5])}
    attnfuzz.assert_close(out, lse, **given)
    with pytest.raises(AssertionError):
        attnfuzz.assert_close(out.flip(0), lse.flip(0), **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": None}, "give k and v, or else k_cache, v_cache and block_table"),
        ({"lse_base": "e"}, "lse_base='e' must be one of 'natural', 'base2'"),
        ({"k": torch.full((3, 40, 2, 32), torch.nan).half()}, "k holds NaN or infinity where it is read"),
        ({"seq_lens": [41, 0, 16]}, r"k has 40 tokens"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    """A mistake in the call would be told as one of the kernel."""
    tensors = dense()
    out, lse = results(tensors)
    with pytest.raises(ValueError, match=message):
        attnfuzz.assert_close(**{"out": out, "lse": lse, **tensors, **changes})
