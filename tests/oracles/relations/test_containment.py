"""Numbers that are not finite, and rows that are told of those of others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Kernel
from attnfuzz.oracles.judge import judge
from attnfuzz.oracles.relations.containment import CONTAINMENT
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, DenseDecodeCase, PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.variants import Variant
from attnfuzz.strategies import cases
from attnfuzz.targets import load_here

FIELDS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 0.25, "dtype": "float16"}
VALUES: Any = Values(keys="fine", values="normal", seed=4)
DENSE = DenseDecodeCase(**FIELDS, seq_lens=(5, 70, 2), values=VALUES)
PAGED = PagedDecodeCase(**FIELDS, seq_lens=(5, 0, 21), values=VALUES, block_size=8)
CAUSAL = PagedAttentionCase(**FIELDS, seq_lens=(5, 21), query_lens=(2, 3), values=VALUES, block_size=8)


PROMISES = attnfuzz.Supports(infinite_scores=True)


def contained(kernel: Kernel, case: Case) -> Failure | None:
    return judge(kernel, case, device="cpu", relations=("containment",)).failure


def without_a_guard(scores: Tensor) -> Tensor:
    """Online softmax over tiles of 16, whose maximum is subtracted from itself while it is -inf."""
    top, weights = torch.tensor(-torch.inf), torch.zeros(0)
    for part in scores.split(16):  # type: ignore[no-untyped-call]
        higher = torch.maximum(top, part.max())
        weights = (
            torch.cat([weights * (top - higher).exp(), (part - higher).exp()])
            if len(weights)
            else (part - higher).exp()
        )
        top = higher
    return weights / weights.sum()


def of_empty_splits(scores: Tensor) -> Tensor:
    """Four splits, each divided by its own sum: one of 0, where all of its scores are -inf."""
    parts = scores.split(-(-len(scores) // 4))  # type: ignore[no-untyped-call]
    states = torch.stack([part.logsumexp(0) for part in parts])
    shares = (states - states.max()).exp() / (states - states.max()).exp().sum()
    return torch.cat([share * (part - part.max()).exp() / (part - part.max()).exp().sum() for share, part in zip(
        shares, parts, strict=True)])  # fmt: skip


def as_zeros(scores: Tensor) -> Tensor:
    return scores.nan_to_num(neginf=0.0).softmax(0)


def lse_of_tiles(scores: Tensor) -> Tensor:
    """Added tile by tile: -inf - -inf."""
    found = scores[0]
    for score in scores[1:]:
        found = (
            score + torch.log1p((found - score).exp()) if score > found else found + torch.log1p((score - found).exp())
        )
    return found


def told_of_the_other_head(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    """Of a sequence's values for all KV heads, multiplied at once with weights of which some are 0."""
    live = [v[:n].sum(0) for v, n in zip(inputs.v, inputs.seq_lens.tolist(), strict=True)]
    return out + 0 * torch.stack(live).sum(1, keepdim=True).to(out.dtype), lse


def one_maximum_for_all(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    """A maximum that rows of one tile share: that of the row with NaN is everybody's."""
    return out, lse - (lse.max() - lse.max())


def gives_up(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    """A check of what went in, and zeros for the whole batch."""
    last = torch.stack([v[n - 1] for v, n in zip(inputs.v, inputs.seq_lens.tolist(), strict=True)])
    return (out, lse) if bool(last.isfinite().all()) else (torch.zeros_like(out), lse)


PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a maximum of -inf is subtracted from itself": ("score of -inf", {"weights": without_a_guard}),
    "a split of -inf is divided by its sum": ("score of -inf", {"weights": of_empty_splits}),
    "-inf is replaced by 0": ("score of -inf", {"weights": as_zeros}),
    "the LSE of two scores of -inf": ("score of -inf", {"lse": lse_of_tiles}),
    "a sum over all heads": ("inf in V", {"after": told_of_the_other_head}),
    "one maximum for a tile of rows": ("nan in K", {"after": one_maximum_for_all}),
    "a batch that is given up": ("inf in V", {"after": gives_up}),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_what_is_not_finite_and_leaks_or_counts(bug: str, plant: Any) -> None:
    """One request whose cache holds an infinity would spoil others, or its own masked tokens would count."""
    kind, steps = PLANTED[bug]
    failure = contained(plant(**steps, supports=PROMISES), DENSE)
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("containment", kind), failure.message
    assert "the bits must be equal" in failure.message


def test_a_key_that_leaks_across_the_batch(plant: Any) -> None:
    """Sequences that are shorter would read it, times 0."""
    case = msgspec.structs.replace(DENSE, seq_lens=(5, 2, 1))
    failure = contained(plant(after=lambda i, out, lse: (out + 0 * i.k[0, 4].sum().to(out.dtype), lse)), case)
    assert failure is not None
    assert failure.kind == "nan in K"
    assert "out[seq 1" in failure.message or "out[seq 0, head 0" in failure.message
    assert failure.details[-1] == "only rows that read KV head 1 of sequence 0 may show it"


def test_a_mask_that_is_added(plant: Any) -> None:
    """Keys behind a query would count as soon as they are NaN: nothing is selected by adding -inf."""

    def added(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        k_cache = inputs.k_cache
        last = [int(inputs.block_table[seq, (n - 1) // 8]) for seq, n in enumerate(inputs.seq_lens.tolist())]
        seq = torch.repeat_interleave(
            torch.arange(2), (inputs.cu_seqlens_q[1:] - inputs.cu_seqlens_q[:-1]).long(), output_size=len(out)
        )
        tails = torch.stack(
            [k_cache[last[s], (n - 1) % 8].repeat_interleave(2, 0) for s, n in enumerate(inputs.seq_lens.tolist())]
        )
        return out + 0 * tails[seq].to(out.dtype), lse

    failure = contained(plant("paged_attention", after=added), msgspec.structs.replace(CAUSAL, layout="NHD"))
    assert failure is not None
    assert failure.kind == "nan in K"


@pytest.mark.parametrize("case", [DENSE, PAGED, CAUSAL])
def test_a_right_kernel_is_not_accused(case: Any, plant: Any) -> None:
    """NaN in the row that reads NaN would be a finding."""
    assert contained(plant(case.problem, supports=PROMISES), case) is None


@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode", "split_decode", "paged_attention"])
def test_right_kernels_are_not_accused_on_drawn_cases(problem: Any, plant: Any) -> None:
    """Recipes, exponents, windows and sinks would each have a case in which the law does not hold."""
    name = {
        "dense_decode": "dense_eager",
        "paged_decode": "paged_eager",
        "split_decode": "split_k_partials_eager",
        "paged_attention": "paged_attention_eager",
    }[problem]
    kernel = load_here(name)
    kernel = kernel.declared(
        supports=msgspec.structs.replace(kernel.declaration.supports, max_seq_len=64, infinite_scores=True)
    )
    judged = 0

    @settings(
        max_examples=60, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @seed(11)
    @given(cases(problem, supports=kernel.declaration.supports, options=kernel.declaration.options))
    def run(case: Case) -> None:
        nonlocal judged
        if CONTAINMENT.applies(kernel.declaration, case):
            judged += 1
            assert contained(kernel, case) is None, case

    run()
    assert judged >= 15


def test_what_a_kernel_does_not_promise_is_not_asked(plant: Any) -> None:
    """A kernel that never meets -inf would need a guard; what leaks to other rows is a bug of any kernel."""
    assert contained(plant(weights=without_a_guard), DENSE) is None
    assert contained(plant(after=gives_up), DENSE) is not None


def test_a_soft_cap_makes_a_number_of_minus_infinity() -> None:
    """-cap is a score like any other, and both runs would differ from the case."""
    kernel = load_here("paged_eager")
    case = msgspec.structs.replace(PAGED, variant=Variant(soft_cap=2.0))
    assert contained(kernel, case) is None
