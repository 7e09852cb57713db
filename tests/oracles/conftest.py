"""A correct kernel for each problem, written with plain loops, in which any single step can be replaced by a bug."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Kernel
from attnfuzz.inputs.layouts import token_views
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.verdict import Failure

Plant = Callable[..., Kernel]
FailureOf = Callable[..., Failure]


@dataclass
class Steps:
    """One decode step of attention in pieces; a test replaces one of them."""

    length: Callable[[int], int] = lambda n: n
    kv_head: Callable[[int, int], int] = lambda head, group: head // group
    tokens: Callable[[Any, int, int, int], tuple[Tensor, Tensor]] | None = None
    dots: Callable[[Tensor, Tensor, float], Tensor] = lambda k, q, scale: k.float() @ q.float() * scale
    score: Callable[[Tensor], Tensor] = lambda scores: scores
    weights: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(0)
    average: Callable[[Tensor, Tensor], Tensor] = lambda weights, v: weights @ v
    lse: Callable[[Tensor], Any] = lambda scores: scores.logsumexp(0)
    store_empty: Callable[[Tensor, Tensor], None] | None = None
    before: Callable[[Any], None] = lambda inputs: None
    after: Callable[[Any, Tensor, Tensor], Any] = lambda inputs, out, lse: (out, lse)
    allocate: Callable[[Tensor], Tensor] = torch.empty_like


def dense_tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
    return inputs.k[seq, :n, kv_head], inputs.v[seq, :n, kv_head]


def paged_tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
    k_slots, v_slots = token_views(inputs.k_cache, inputs.v_cache, inputs.layout)
    positions = torch.arange(n, device="cpu")
    pages, offsets = inputs.block_table[seq, positions // inputs.block_size].long(), positions % inputs.block_size
    return k_slots[pages, offsets, kv_head].flatten(1), v_slots[pages, offsets, kv_head]


def attend(inputs: Any, steps: Steps, tokens: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    steps.before(inputs)
    out, lse = steps.allocate(inputs.out), steps.allocate(inputs.lse)
    group = inputs.q.shape[1] // _num_kv_heads(inputs)
    for row, (seq, live) in enumerate(_rows(inputs)):
        for head in range(inputs.q.shape[1]):
            n = steps.length(live)
            if n == 0:
                (steps.store_empty or _store_empty)(out[row, head], lse[row, head])
                continue
            k, v = tokens(inputs, seq, n, steps.kv_head(head, group))
            scores = steps.score(steps.dots(k, inputs.q[row, head], inputs.scale))
            out[row, head] = steps.average(steps.weights(scores), v.float())
            lse[row, head] = steps.lse(scores)
    return steps.after(inputs, out, lse)


def _rows(inputs: Any) -> list[tuple[int, int]]:
    """For each row of q its sequence, and how many keys it attends to."""
    lens = inputs.seq_lens.tolist()
    if not hasattr(inputs, "cu_seqlens_q"):
        return list(enumerate(lens))
    starts = inputs.cu_seqlens_q.tolist()
    return [(seq, n - (starts[seq + 1] - i) + 1) for seq, n in enumerate(lens) for i in range(*starts[seq : seq + 2])]


def attend_in_splits(inputs: Any, steps: Steps) -> Any:
    steps.before(inputs)
    out, lse = steps.allocate(inputs.partial_out), steps.allocate(inputs.partial_lse)
    group = inputs.q.shape[1] // _num_kv_heads(inputs)
    for seq, n in enumerate(inputs.seq_lens.tolist()):
        size = max(1, -(-n // inputs.num_splits))
        for head in range(inputs.q.shape[1]):
            for split in range(inputs.num_splits):
                start, end = min(n, split * size), min(n, (split + 1) * size)
                if start == end:
                    (steps.store_empty or _store_empty)(out[seq, head, split], lse[seq, head, split])
                    continue
                k, v = paged_tokens(inputs, seq, n, steps.kv_head(head, group))
                scores = steps.score(steps.dots(k[start:end], inputs.q[seq, head], inputs.scale))
                out[seq, head, split] = steps.average(steps.weights(scores), v[start:end].float())
                lse[seq, head, split] = steps.lse(scores)
    return steps.after(inputs, out, lse)


def merge(inputs: Any, steps: Steps) -> Any:
    steps.before(inputs)
    out, lse = steps.allocate(inputs.output), steps.allocate(inputs.output_lse)
    tokens_first = inputs.lse_layout == "TH"
    rows = lse if tokens_first else lse.T
    a, b = ((side if tokens_first else side.T).clone() for side in (inputs.prefix_lse, inputs.suffix_lse))
    a[a == math.inf] = -math.inf
    b[b == math.inf] = -math.inf
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            pair = torch.stack((a[token, head], b[token, head]))
            sides = torch.stack((inputs.prefix_output[token, head], inputs.suffix_output[token, head])).float()
            live = pair > -math.inf
            if not live.any():
                (steps.store_empty or _store_empty)(out[token, head], rows[token, head])
                continue
            out[token, head] = steps.average(steps.weights(steps.score(pair[live])), sides[live])
            rows[token, head] = steps.lse(pair[live])
    return steps.after(inputs, out, lse)


def _store_empty(out: Tensor, lse: Tensor) -> None:
    out.fill_(0)
    lse.fill_(-math.inf)


def _num_kv_heads(inputs: Any) -> int:
    if hasattr(inputs, "k"):
        return int(inputs.k.shape[2])
    return int(token_views(inputs.k_cache, inputs.v_cache, inputs.layout).k.shape[2])


@pytest.fixture
def plant() -> Plant:
    """A correct kernel of ``problem`` whose steps named by keyword are replaced."""

    def make(problem: str = "dense_decode", *, supports: Any = None, numerics: Any = None, **bugs: Any) -> Kernel:
        assert set(bugs) <= {field.name for field in fields(Steps)}
        steps = Steps(**bugs)
        tokens = steps.tokens or (dense_tokens if problem == "dense_decode" else paged_tokens)

        @attnfuzz.kernel(problem, supports=supports, numerics=numerics)
        def planted(inputs: Any) -> Any:
            if problem == "merge_states":
                return merge(inputs, steps)
            return attend_in_splits(inputs, steps) if problem == "split_decode" else attend(inputs, steps, tokens)

        return planted

    return make


@pytest.fixture
def failure_of() -> FailureOf:
    """The failure that an oracle reports, which there must be."""

    def found(kernel: Kernel, case: Case, *oracles: OracleName) -> Failure:
        verdict = judge(kernel, case, device="cpu", **({"oracles": oracles} if oracles else {}))  # type: ignore[arg-type]  # any str
        assert verdict.failure is not None
        return verdict.failure

    return found


TWO_HEADS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 0.125, "dtype": "float32"}


@pytest.fixture
def dense() -> DenseDecodeCase:
    """Sequences of 5, 0 and 21 tokens with distinct weights, rows to spare behind them."""
    values = Values(keys="normal", values="positions", seed=3)
    return DenseDecodeCase(**TWO_HEADS, seq_lens=(5, 0, 21), extra_rows=3, values=values)


@pytest.fixture
def paged() -> PagedDecodeCase:
    """As ``dense``, on shuffled pages of 8 tokens."""
    pages = Pages(order="shuffled", spare_blocks=2, extra_columns=1, padding="wrong_page")
    values = Values(keys="normal", values="positions", seed=3)
    return PagedDecodeCase(**TWO_HEADS, seq_lens=(5, 0, 21), block_size=8, pages=pages, values=values)


@pytest.fixture
def queries(paged: PagedDecodeCase) -> PagedAttentionCase:
    """As ``paged``, with two query tokens behind a context, one sequence without tokens, and a prefill."""
    fields = {name: getattr(paged, name) for name in paged.__struct_fields__}
    return PagedAttentionCase(**fields | {"seq_lens": (5, 0, 11)}, query_lens=(2, 0, 11))


@pytest.fixture
def split(paged: PagedDecodeCase) -> SplitDecodeCase:
    """As ``paged``, in four splits, of which some are empty."""
    return SplitDecodeCase(**{name: getattr(paged, name) for name in paged.__struct_fields__}, num_splits=4)


@pytest.fixture
def states() -> MergeStatesCase:
    """Rows with both sides, one side or no side."""
    return MergeStatesCase(
        num_q_heads=3,
        head_size=8,
        num_tokens=3,
        dtype="float32",
        lse_pairs=(("finite", "finite"), ("finite", "-inf"), ("-inf", "-inf"), ("+inf", "finite")),
        seed=1,
    )
