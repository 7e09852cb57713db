"""What the attention bound promises to its callers, apart from its size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz.numerics.bounds as attention_module
from attnfuzz.numerics import Bound, attention_bound
from attnfuzz.problems.declared_numerics import Numerics


@dataclass(frozen=True)
class Problem:
    """One sequence of float16 values in float64: 4 query heads on 2 KV heads."""

    q: Tensor
    k: Tensor
    v: Tensor

    def bound(self, numerics: Numerics, **more: Any) -> Bound:
        keywords: dict[str, Any] = {"in_dtype": torch.float16, "out_dtype": torch.float16, "numerics": numerics} | more
        return attention_bound(self.q, self.k, self.v, self.q.shape[-1] ** -0.5, **keywords)


def problem(seq_len: int, head_size: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, head_size), (seq_len, 2, head_size), (seq_len, 2, head_size)
    return Problem(*(torch.randn(shape, generator=generator).half().double() for shape in shapes))


def test_looser_declarations_never_tighten_the_bound() -> None:
    """Each rounding a kernel declares must be allowed for; otherwise declaring it would cause false alarms."""
    given = problem(100, 64)
    order = [
        Numerics(probabilities="float32", partials="float32", matmul="ieee"),
        Numerics(probabilities="float32", partials="float32"),
        Numerics(probabilities="input", partials="float32"),
        Numerics(),
        Numerics(matmul="tf32"),
    ]
    bounds = [given.bound(numerics, num_partials=4).out for numerics in order]
    assert all(bool((loose > tight).all()) for tight, loose in pairwise(bounds))


def test_an_empty_sequence_must_be_exact() -> None:
    """Length 0 gives out = 0 and lse = -inf without arithmetic: any bound above 0 would hide an unwritten row."""
    given = problem(1, 16)
    bound = replace(given, k=given.k[:0], v=given.v[:0]).bound(Numerics())
    assert bound.out.shape == (4, 16)
    assert not bound.out.any()
    assert not bound.lse.any()


def test_heads_in_chunks_give_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are bounded a few heads at a time; a head paired with the wrong KV head would show here."""
    given = problem(33, 16)
    whole = given.bound(Numerics())
    monkeypatch.setattr(attention_module, "_LARGEST_CHUNK", 33 * 16 * 3)
    chunked = given.bound(Numerics())
    torch.testing.assert_close(chunked.out, whole.out, rtol=1e-12, atol=0)
    torch.testing.assert_close(chunked.lse, whole.lse, rtol=1e-12, atol=0)


def test_each_query_head_reads_its_own_kv_head() -> None:
    """Query heads 2 and 3 of 4 belong to KV head 1 of 2: their bounds must not depend on KV head 0."""
    given = problem(33, 16)
    alone = replace(given, q=given.q[2:], k=given.k[:, 1:], v=given.v[:, 1:]).bound(Numerics())
    torch.testing.assert_close(given.bound(Numerics()).out[2:], alone.out, rtol=1e-12, atol=0)


def test_wrong_arguments_name_the_remedy() -> None:
    """A caller's mistake must not become a bound of the wrong shape."""
    given = problem(3, 16)
    with pytest.raises(ValueError, match="num_partials=0 must be at least 1"):
        given.bound(Numerics(), num_partials=0)
    with pytest.raises(ValueError, match="num_q_heads=3 must be a multiple of num_kv_heads=2"):
        replace(given, q=given.q[:3]).bound(Numerics())
    with pytest.raises(ValueError, match=r"dtype=torch.float64 must be one of"):
        given.bound(Numerics(), out_dtype=torch.float64)
