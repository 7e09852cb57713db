"""Relations that compare by bounds: those of oracles, laws of merges, and values that are shifted and scaled."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Kernel
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.oracles.relations.catalogue import applicable
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.declared_numerics import FixedTolerance
from attnfuzz.problems.recipes import Values
from attnfuzz.verdict import Failure
from tests.oracles.relations.objections import objection

BY_BOUNDS: tuple[OracleName, ...] = ("layout", "repaging", "gqa_expansion", "split_count", "compose")


def objection_by_name(name: OracleName, kernel: Kernel, case: Case) -> Failure:
    """What the relation says, if it is asked for."""
    failure = judge(kernel, case, device="cpu", oracles=(name,), relations=(name,)).failure
    assert failure is not None
    assert failure.error_ratio is not None
    assert failure.error_ratio > 1
    assert any(line.startswith("both should be ") for line in failure.details)
    return failure


def wrong_if(plant: Any, problem: str, is_wrong: Any, **declared: Any) -> Any:
    """A kernel that doubles its output for some inputs."""
    return plant(problem, after=lambda inputs, out, lse: (out * (2 if is_wrong(inputs) else 1), lse), **declared)


def test_they_judge_only_if_named(plant: Any, dense: DenseDecodeCase) -> None:
    """Two runs within their bounds are within the sum of both: what accuracy finds would be told once more."""
    assert not set(BY_BOUNDS) & set(DEFAULT_ORACLES)
    kernel = wrong_if(plant, "dense_decode", lambda inputs: not inputs.k.is_contiguous())
    assert judge(kernel, dense, device="cpu", relations="all").failure is None


def test_a_saved_finding_names_its_relation(plant: Any, dense: DenseDecodeCase) -> None:
    """A replay asks the usual oracles and the finding's relation: it would pass without having been judged by that."""
    kernel = wrong_if(plant, "dense_decode", lambda inputs: not inputs.k.is_contiguous())
    failure = judge(kernel, dense, device="cpu", relations=("layout",)).failure
    assert failure is not None
    assert failure.oracle == "layout"


@pytest.mark.by_day
@pytest.mark.parametrize("fixture", ["dense", "paged", "split"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_correct_kernels_are_within_bounds(
    fixture: str, dtype: Any, plant: Any, request: pytest.FixtureRequest
) -> None:
    """A false alarm: the changed case has another result, or its bound was not that of its own numbers."""
    case: Case = msgspec.structs.replace(request.getfixturevalue(fixture), dtype=dtype)
    kernel = plant(case.problem, supports=attnfuzz.Supports(unused_table_entries="garbage"))
    assert judge(kernel, case, device="cpu", relations=BY_BOUNDS).failure is None


def test_shared_pages_are_told_apart(plant: Any, paged: PagedDecodeCase) -> None:
    """Pages of another size share other tokens: a false alarm wherever sequences share a prefix."""
    pages = msgspec.structs.replace(paged.pages, shared_blocks=1)
    case = msgspec.structs.replace(paged, seq_lens=(20, 9, 21), pages=pages)
    assert judge(plant("paged_decode"), case, device="cpu", relations=BY_BOUNDS).failure is None


def test_layout(plant: Any, dense: DenseDecodeCase, paged: PagedDecodeCase) -> None:
    """A kernel that only takes contiguous tensors would pass on those."""
    failure = objection_by_name(
        "layout", wrong_if(plant, "dense_decode", lambda inputs: not inputs.k.is_contiguous()), dense
    )
    assert "with rows that have gaps between them: " in failure.message
    strided = msgspec.structs.replace(dense, strides={"q": "every_other"})
    failure = objection_by_name(
        "layout", wrong_if(plant, "dense_decode", lambda inputs: inputs.q.is_contiguous()), strided
    )
    assert "with contiguous tensors: " in failure.message
    failure = objection_by_name("layout", wrong_if(plant, "paged_decode", lambda inputs: inputs.layout == "HND"), paged)
    assert "in the layout HND: " in failure.message


def test_repaging(plant: Any, paged: PagedDecodeCase) -> None:
    """A kernel that knows only one size of pages would pass on it."""
    kernel = wrong_if(plant, "paged_decode", lambda inputs: inputs.block_size != 8)
    assert "on pages of 12 tokens instead of 8: " in objection_by_name("repaging", kernel, paged).message


def test_gqa_expansion(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel whose heads share the wrong keys would pass."""
    kernel = plant(kv_head=lambda head, group: head // group if group == 1 else 0)
    failure = objection_by_name("gqa_expansion", kernel, dense)
    assert "with K and V repeated for 4 KV heads instead of 2: " in failure.message


def test_split_count(plant: Any, split: SplitDecodeCase) -> None:
    """A kernel that loses tokens between splits would pass as long as there is one."""
    kernel = wrong_if(plant, "split_decode", lambda inputs: inputs.num_splits > 4)
    assert "in 32 splits: " in objection_by_name("split_count", kernel, split).message


def test_split_count_as_an_option(dense: DenseDecodeCase) -> None:
    """Most kernels take the number of splits as an option, and would not be looked at."""
    case = msgspec.structs.replace(dense, seq_lens=(0, 0), options={"num_splits": 2})
    failure = objection_by_name("split_count", stores_its_splits, case)
    assert "in 8 splits: " in failure.message


@attnfuzz.kernel("dense_decode", options={"num_splits": (1, 2, 8)})
def stores_its_splits(inputs: Any, *, num_splits: int) -> tuple[Tensor, Tensor]:
    return inputs.out.fill_(num_splits > 2), inputs.lse.fill_(-math.inf)


def test_compose(plant: Any, dense: DenseDecodeCase) -> None:
    """An LSE to base 2 that is declared natural would give other weights wherever results are merged."""
    kernel = plant(lse=lambda scores: scores.logsumexp(0) / math.log(2))
    failure = objection_by_name("compose", kernel, dense)
    assert "merged from runs on the first and the last half of its tokens: " in failure.message


def test_compose_has_ranks_without_tokens(plant: Any, dense: DenseDecodeCase) -> None:
    """The state of a rank without tokens would outweigh those of others, where no sequence of the case is empty."""
    kernel = plant(after=lambda inputs, out, lse: (out, lse.masked_fill(inputs.seq_lens[:, None] == 0, 9.0)))
    case = msgspec.structs.replace(dense, seq_lens=(5, 2, 21))
    failure = objection_by_name("compose", kernel, case)
    assert "merged from runs of 4 ranks that have one block of its tokens each: " in failure.message


def test_compose_has_tokens_by_turns(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel that is wrong for the lengths which ranks have of interleaved tokens would pass by itself."""
    kernel = wrong_if(plant, "dense_decode", lambda inputs: 7 in inputs.seq_lens)
    failure = objection_by_name("compose", kernel, dense)
    assert "merged from runs of 3 ranks that have every third of its tokens: " in failure.message


def test_compose_leaves_no_rank_empty_that_may_not_be(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel that takes no empty sequences would be blamed for what it gives for one."""
    supports = attnfuzz.Supports(empty_sequences=False)
    kernel = wrong_if(plant, "dense_decode", lambda inputs: 0 in inputs.seq_lens, supports=supports)
    case = msgspec.structs.replace(dense, seq_lens=(5, 2, 21))
    assert judge(kernel, case, device="cpu", oracles=("compose",), relations=("compose",)).failure is None


def test_compose_needs_an_lse(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel that returns none would be merged with what it did not return."""
    kernel = plant(supports=attnfuzz.Supports(lse="none"), after=lambda inputs, out, lse: out)
    assert judge(kernel, dense, device="cpu", oracles=("compose",)).failure is None


LAWS: tuple[OracleName, ...] = ("merge_laws",)


def test_an_empty_state_that_counts_a_little(plant: Any, states: MergeStatesCase) -> None:
    """A sequence without a suffix would not get the prefix's result, and no bound is that tight."""

    def average(weights: Tensor, sides: Tensor) -> Tensor:
        return weights @ sides / (weights.sum() + 2e-7)

    failure = objection("merge_laws", plant("merge_states", average=average), states)
    assert failure is not None
    assert failure.kind == "bits"
    assert failure.message.startswith("output[")
    assert "in the state that holds tokens, but " in failure.message
    assert "merged with an empty state: the bits must be equal" in failure.message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["HT", "TH"])
def test_correct_merges_do_not_notice(layout: Any, dtype: Any, plant: Any, states: MergeStatesCase) -> None:
    """A false alarm: the other state was compared, or a row without any."""
    case = msgspec.structs.replace(states, lse_layout=layout, dtype=dtype)
    kernel = plant("merge_states", supports=attnfuzz.Supports(lse_layout=layout))
    assert applicable(kernel.declaration, case, LAWS)
    assert judge(kernel, case, device="cpu", relations=LAWS).failure is None


def test_kernels_without_empty_states_are_not_given_any(plant: Any, states: MergeStatesCase) -> None:
    """A kernel would get input that it never promised to take."""
    for supports in (attnfuzz.Supports(empty_sequences=False), attnfuzz.Supports(empty_state_lse=("+inf",))):
        assert not applicable(plant("merge_states", supports=supports).declaration, states, LAWS)


AFFINITY: tuple[OracleName, ...] = ("value_affinity",)
SHORT = ("float16", "bfloat16", "float32")
FLOAT_PARTIALS = attnfuzz.Numerics(partials="float32")


def test_an_epsilon_that_the_bound_lets_through(plant: Any, dense: DenseDecodeCase) -> None:
    """A constant added to every result would stay below every tolerance, and count where values are small."""
    failure = objection("value_affinity", plant(average=lambda weights, v: weights @ v + 1e-6), dense)
    assert failure is not None
    assert failure.kind == "bits"
    assert failure.message.startswith("out[")
    assert "with V times -1: the bits must be equal" in failure.message


def test_a_clamp_that_only_larger_values_reach(plant: Any, dense: DenseDecodeCase) -> None:
    """Values past a kernel's constant would be cut off, and no recipe draws them."""
    kernel = plant(average=lambda weights, v: (weights @ v).clamp(-4096, 4096))
    failure = objection("value_affinity", kernel, dense)
    assert failure is not None
    assert "but -4096.0 with V times -2**35" in failure.message


def test_a_sum_that_overflows_in_16_bits(plant: Any, dense: DenseDecodeCase) -> None:
    """An accumulator in float16 would be told as a bug of its own beside the wrong numbers that it gives."""
    numerics = attnfuzz.Numerics(partials="float32")
    kernel = plant(average=lambda weights, v: (8 * weights @ v).half().to(v.dtype) / 8, numerics=numerics)
    failure = objection("value_affinity", kernel, msgspec.structs.replace(dense, dtype="float16"))
    assert failure is not None
    assert failure.maybe == ("sums_rounded",)
    assert "overflows at 65504" in failure.message


def test_an_lse_that_depends_on_v(plant: Any, dense: DenseDecodeCase) -> None:
    """An LSE that takes a little of a value would be right within its bound."""

    def mix(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out, lse + (out[..., 0] > 0) * 2**-21

    failure = objection("value_affinity", plant(after=mix), dense)
    assert failure is not None
    assert failure.kind == "bits"
    assert failure.message.startswith("lse[")


def test_a_loose_tolerance_hides_nothing(plant: Any, dense: DenseDecodeCase) -> None:
    """Users who must allow for 1e-1 would learn nothing of an error that large."""
    kernel = plant(average=lambda weights, v: weights @ v + 0.01)
    loose = FixedTolerance(atol=0.1, rtol=0.0)
    failure = judge(kernel, dense, device="cpu", tolerance=loose, relations=AFFINITY).failure
    assert failure is not None
    assert failure.oracle == "value_affinity"


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("values", ["positions", "integers", "normal", "large", "small"])
@pytest.mark.parametrize("fixture", ["dense", "split", "states"])
@pytest.mark.by_day("dense-integers-float16", "split-normal-bfloat16", "states-large-float32")
def test_correct_kernels_do_not_notice_affinity(
    fixture: str, values: Any, dtype: Any, plant: Any, request: pytest.FixtureRequest
) -> None:
    """A false alarm: something left the range of a dtype on the way, or a zero changed its sign."""
    case: Case = msgspec.structs.replace(request.getfixturevalue(fixture), dtype=dtype)
    if fixture != "states":
        recipe = Values(keys="normal", values=values, logit_exponent=2, seed=5)
        case = msgspec.structs.replace(case, values=recipe)
    for numerics in (attnfuzz.Numerics(), FLOAT_PARTIALS):
        kernel = plant(case.problem, numerics=numerics)
        assert judge(kernel, case, device="cpu", relations=AFFINITY).failure is None


def test_a_product_too_small_for_float32_may_decide_how_a_sum_is_rounded(plant: Any, dense: DenseDecodeCase) -> None:
    """A right kernel would be accused of one bit, where a weight of 1e-45 lies beside two that meet half-way."""

    def average(weights: Tensor, v: Tensor) -> Tensor:
        products = (weights[..., None] * v).abs()
        is_lost = ((products > 0) & (products < 2.0**-126)).any()
        return weights @ v * (1 + 2**-23 * is_lost)

    far_apart = Values(keys="negative", values="normal", logit_exponent=2)
    case = msgspec.structs.replace(dense, dtype="float32", values=far_apart)
    kernel = plant(average=average)
    assert objection("value_affinity", kernel, case) is None
    assert objection("value_affinity", plant(average=lambda weights, v: (weights @ v).clamp(-4096)), dense) is not None


def test_partial_results_in_float16_are_asked_about_the_sign_alone(plant: Any, dense: DenseDecodeCase) -> None:
    """A split's result below 2**-14 has fewer digits before V is scaled than after: a false alarm."""
    case = msgspec.structs.replace(dense, dtype="float16", values=Values(keys="normal", values="normal", seed=3))
    scales: list[float] = []
    for numerics in (attnfuzz.Numerics(), FLOAT_PARTIALS):
        kernel = plant(numerics=numerics, before=lambda inputs: scales.append(float(inputs.v[0, 0].abs().max())))
        judge(kernel, case, device="cpu", relations=AFFINITY)
    assert scales[2] == scales[0]
    assert scales[5] > 1000 * scales[3]


def test_results_that_were_rounded_up_to_the_smallest_normal_number(plant: Any, dense: DenseDecodeCase) -> None:
    """Just below 2**-14 float16 has a digit less than its scaled copy: a right kernel was accused of its last bit."""
    case = msgspec.structs.replace(dense, dtype="float16", values=Values(keys="normal", values="integers", seed=3))
    factors: list[Tensor] = []

    def just_below(weights: Tensor, v: Tensor) -> Tensor:
        average = weights @ v
        if len(factors) < num_rows:  # those of the first run; linear in V from then on
            factors.append(2**-14 * (1 - 0.75 * 2**-11) / average)
        calls.append(1)
        return average * factors[(len(calls) - 1) % num_rows]

    calls: list[int] = []
    num_rows = sum(length > 0 for length in case.seq_lens) * case.num_q_heads
    kernel = plant(numerics=FLOAT_PARTIALS, average=just_below)
    assert judge(kernel, case, device="cpu", oracles=AFFINITY, relations=AFFINITY).failure is None
    assert len(calls) >= 2 * num_rows


def test_values_that_are_all_zero(plant: Any, dense: DenseDecodeCase) -> None:
    """The power of two that zeros could be scaled by has no logarithm."""
    empty = msgspec.structs.replace(dense, seq_lens=(0, 1), values=Values(values="integers"))
    kernel = plant(average=lambda weights, v: torch.zeros_like(v[0]))
    assert judge(kernel, empty, device="cpu", oracles=AFFINITY).failure is None


def test_results_in_buffers_that_the_kernel_keeps(plant: Any, dense: DenseDecodeCase) -> None:
    """The first result would be compared when a later call has overwritten it, and a right kernel accused."""
    kept: dict[Any, Tensor] = {}

    def store(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return tuple(
            kept.setdefault((name, part.shape), torch.empty_like(part)).copy_(part)
            for name, part in (("o", out), ("l", lse))
        )

    assert objection("value_affinity", plant(after=store), dense) is None
