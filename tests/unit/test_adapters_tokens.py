"""Tokens of a paged cache as engines without a block table take them: attnfuzz.adapters.tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.adapters.tokens import whole_prompts
from attnfuzz.report.sources import kernel_sources
from tests.cases import attention_case

PLAIN = attnfuzz.Supports(lse="none", padding_tokens=False, freed_pages=False, layouts=("NHD",))


@attnfuzz.kernel("paged_attention", supports=PLAIN)
def prompts(i: Any) -> Tensor:
    """Causal attention of each sequence to itself, whole, as kernels without a cache do it."""
    q, k, v, starts, own = whole_prompts(i)
    out = torch.empty_like(q)
    for first, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        keys, values = (x[first:end].float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * i.scale
        hidden = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    result: Tensor = out[own]
    return result


@pytest.mark.parametrize("query_lens", [(5, 0, 9), (2, 0, 1), (5, 3, 9)], ids=["mixed", "chunks", "whole"])
def test_query_tokens_are_found_in_whole_prompts(query_lens: tuple[int, ...]) -> None:
    """A kernel without a cache would be given another token's query, and called wrong."""
    case = attention_case(num_q_heads=4, num_kv_heads=2, seq_lens=(5, 3, 9), query_lens=query_lens)
    attnfuzz.check(prompts, case, device="cpu", isolated=False)


def test_a_script_of_an_adapter_has_the_functions_that_adapters_share() -> None:
    """A script of a kernel whose calls cannot be followed would not import."""
    files = kernel_sources("sglang:prefill_attention").files
    assert "def whole_prompts" in files["attnfuzz/adapters/tokens.py"]
    assert "attnfuzz/adapters/engine.py" not in files
