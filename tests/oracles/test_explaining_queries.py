"""What is said of kernels that mistake which keys a query token may see."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.explaining.explain import explain_case
from attnfuzz.kernels import eager_attention
from attnfuzz.problems.cases import PagedAttentionCase
from attnfuzz.problems.recipes import Pages, Values

CASE = PagedAttentionCase(
    num_q_heads=2,
    num_kv_heads=1,
    head_size=8,
    scale=0.5,
    dtype="float32",
    block_size=4,
    seq_lens=(7, 2, 6),
    query_lens=(3, 0, 6),
    values=Values(keys="normal", values="normal"),
    pages=Pages(order="shuffled", spare_blocks=1),
)

State = tuple[Tensor, Tensor]


def right(inputs: Any) -> State:
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "scale", "block_size", "layout")
    bounds = {"max_query_len": inputs.max_query_len, "max_seq_len": inputs.max_seq_len}
    return eager_attention.paged_attention(**{name: getattr(inputs, name) for name in names}, **bounds)


def one_too_far(inputs: Any) -> State:
    """Every row but each sequence's last one as with a sequence that is a token longer."""
    out, lse = right(inputs)
    longer = right(dataclasses.replace(inputs, seq_lens=inputs.seq_lens + 1))
    last = set((inputs.cu_seqlens_q[1:] - 1).tolist())
    for row in (row for row in range(len(out)) if row not in last):
        out[row], lse[row] = longer[0][row], longer[1][row]
    return out, lse


def context_forgotten(inputs: Any) -> State:
    starts = inputs.cu_seqlens_q
    return right(dataclasses.replace(inputs, seq_lens=starts[1:] - starts[:-1]))


def rows_exchanged(inputs: Any) -> State:
    out, lse = right(inputs)
    order = [1, 0, *range(2, len(out))]
    return out[order], lse[order]


def query_of_the_token_before(inputs: Any) -> State:
    return right(dataclasses.replace(inputs, q=inputs.q.roll(1, 0)))


def first_row_only(inputs: Any) -> State:
    out, lse = right(inputs)
    inputs.out[0], inputs.lse[0] = out[0], lse[0]
    return inputs.out, inputs.lse


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        (one_too_far, r"sequence 0, query head 0: token 5 \(page 1, offset 1\) has weight 0\.\d+, expected 0$"),
        (one_too_far, r"^token \d .* of sequence 0, behind the query, takes weight$"),
        (context_forgotten, r"sequence 0, query head 0: tokens 1-4 \(pages 0-1\) have weight 0, expected 0\.\d+$"),
        (rows_exchanged, r"^this is the result of query 1 of sequence 0, head 0$"),
        (query_of_the_token_before, r"^the query of query . of sequence 0, head 0 is read$"),
        (first_row_only, r"^out\[token 1-8\] is not written$"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(mistake: Callable[[Any], State], line: str) -> None:
    """The explanation would name a sequence in place of a query token, another token, or none."""
    kernel = Kernel(mistake, Declaration(name=mistake.__name__, problem="paged_attention"))
    lines = explain_case(kernel, CASE, device="cpu", seconds=60.0).lines
    assert any(re.search(line, one) for one in lines), lines


def test_nothing_is_said_of_the_right_kernel() -> None:
    """A word about a correct kernel would be believed."""
    kernel = Kernel(right, Declaration(name="right", problem="paged_attention"))
    explanation = explain_case(kernel, CASE, device="cpu", seconds=60.0)
    assert len(explanation.lines) == 1
    assert explanation.lines[0].startswith("every weight is right, and so is the LSE")
