"""`attnfuzz.assert_close`: a result that somebody has is judged by the derived bounds, and what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.inputs.layouts import token_views

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
    for base in ("base2", 2):
        attnfuzz.assert_close(out, lse / torch.log(torch.tensor(2.0)), lse_base=base, **tensors)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_caches_are_read_as_their_layout_says(layout: str) -> None:
    """A right kernel would be accused, or unused pages would count."""
    tensors = dense()
    out, lse = results(tensors)
    attnfuzz.assert_close(out, lse, **paged(tensors, layout))
    with pytest.raises(AssertionError, match=r"token 36 \(page 2, offset 4\) (is )?(dropped|left out)|dropped"):
        attnfuzz.assert_close(*results(tensors, dropped=1), **paged(tensors, layout))


def test_a_forgotten_layout_is_told() -> None:
    """Whoever leaves out layout="HND" would be told of block tables, or of wrong numbers, of a right kernel."""
    tensors = dense()
    out, lse = results(tensors)
    given = paged(tensors, "HND")
    del given["layout"]
    with pytest.raises(
        ValueError, match=r"with layout='HND' these results are right: as NHD this cache has pages of 2"
    ):
        attnfuzz.assert_close(out, lse, **given)


def test_a_forgotten_base_is_told_by_the_argument_that_says_it() -> None:
    """A right base-2 log-sum-exp would be told as a bug, with what a kernel declares, which nobody has here."""
    tensors = dense()
    out, lse = results(tensors)
    with pytest.raises(AssertionError, match="with lse_base=2 these results are right: lse holds base-2 logarithms"):
        attnfuzz.assert_close(out, lse / torch.log(torch.tensor(2.0)), **tensors)
    with pytest.raises(AssertionError) as caught:
        attnfuzz.assert_close(out.flip(0), lse, **tensors)
    assert "these results are right" not in str(caught.value)


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


def variants(tensors: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
    """Results of attention with a window of 20, a cap of 5, sinks 0 to 3 or slopes 1 to 4, as ``more`` says."""
    out, lse = torch.zeros_like(tensors["q"]), torch.full((3, 4), -torch.inf)
    factors = [torch.as_tensor(more.get(name, 1.0)).reshape(-1, 1) for name in ("k_scale", "v_scale")]
    for i, length in enumerate(LENGTHS):
        first = max(0, length - more.get("window", length))
        k, v = (
            (tensors[name][i, first:length].float() * factor).repeat_interleave(2, 1)
            for name, factor in zip("kv", factors, strict=True)
        )
        scores = SCALE * torch.einsum("hd,nhd->hn", tensors["q"][i].float(), k)
        if "soft_cap" in more:
            scores = more["soft_cap"] * (scores / more["soft_cap"]).tanh()
        if "alibi_slopes" in more:
            scores = scores + more["alibi_slopes"][:, None] * torch.arange(1 - len(k), 1)
        sinks = more.get("sinks", torch.full((4,), -torch.inf))[:, None]
        lse[i] = torch.cat((scores, sinks), 1).logsumexp(1)
        if length:
            out[i] = torch.einsum("hn,nhd->hd", (scores - lse[i][:, None]).exp(), v).to(out.dtype)
    return out, lse


@pytest.mark.by_day
@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ({"window": 20}, {"window": 21}),
        ({"window": 20, "soft_cap": 1.0}, {"soft_cap": None}),
        ({"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0).flip(0)}),
        ({"window": 3, "sinks": torch.full((4,), -torch.inf)}, {"window": 2}),
        ({"alibi_slopes": torch.arange(1.0, 5.0) / 8}, {"alibi_slopes": torch.arange(4.0, 0.0, -1.0) / 8}),
    ],
)
@pytest.mark.parametrize("layout", ["NHD", None])
def test_variants_are_those_of_the_call(more: dict[str, Any], changed: dict[str, Any], layout: str | None) -> None:
    """Models with sliding windows, caps and sinks could not have the line; pages behind a window may be freed."""
    tensors = dense()
    given = tensors if layout is None else paged(tensors, layout)
    if more.get("window") == 20 and layout:
        given["k_cache"][7] = torch.nan  # the first page of sequence 0 has been given to another
        given["block_table"][0, 0] = -1
    out, lse = variants(tensors, **more)
    attnfuzz.assert_close(out, lse, **{**given, **more})
    with pytest.raises(AssertionError):
        attnfuzz.assert_close(out, lse, **{**paged(tensors, "NHD"), **more, **changed})


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", [(0.5, torch.tensor([3.0])), (torch.tensor([0.5, 1.7]), torch.tensor([0.3, 2.0]))])
@pytest.mark.parametrize("layout", ["NHD", "packed", None])
@pytest.mark.by_day("NHD-scales1-narrow0", "packed-scales0-narrow1", "None-*")
def test_a_cache_of_8_bits_stands_for_its_numbers_times_the_scales(
    narrow: torch.dtype, scales: tuple[Any, Any], layout: str | None
) -> None:
    """Whoever serves from such a cache would have to make a second one."""
    tensors = dense()
    tensors |= {name: tensors[name].to(narrow) for name in "kv"}
    more = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    given = tensors if layout is None else paged(tensors, layout)
    out, lse = variants(tensors, **more)
    attnfuzz.assert_close(out, lse, **{**given, **more})
    without, lse_without = variants(tensors, k_scale=scales[0])
    with pytest.raises(AssertionError, match="the scale of V is left out"):
        attnfuzz.assert_close(without, lse_without, **{**given, **more})
    with pytest.raises(ValueError, match="k_scale must hold one number above 0, or one for each of 2 KV heads"):
        attnfuzz.assert_close(out, lse, **given, k_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"belong to a cache of float8_e4m3fn or float8_e5m2, not of float16"):
        attnfuzz.assert_close(out, lse, **dense(), k_scale=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": None}, "give k and v, or else k_cache, v_cache and block_table"),
        ({"lse_base": "e"}, "lse_base='e' must be \"natural\" or 2"),
        ({"k": torch.full((3, 40, 2, 32), torch.nan).half()}, "k holds NaN or infinity where it is read"),
        ({"seq_lens": [41, 0, 16]}, r"k has 40 tokens"),
        ({"window": 0}, "window=0 must be between 1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    """A mistake in the call would be told as one of the kernel."""
    tensors = dense()
    out, lse = results(tensors)
    with pytest.raises(ValueError, match=message):
        attnfuzz.assert_close(**{"out": out, "lse": lse, **tensors, **changes})
