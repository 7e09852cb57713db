"""Numbers beyond their bound: which element is shown, and under which kind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, SplitDecodeCase
from attnfuzz.problems.recipes import Values
from tests.sample_cases import dense_case


def change(name: str, index: tuple[int, ...], value: float) -> Any:
    """Step ``after`` that overwrites one element of a result."""

    def overwrite(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        (out if name == "out" else lse)[index] = value
        return out, lse

    return overwrite


@pytest.mark.parametrize(
    ("name", "index", "value", "kind"),
    [
        ("out", (2, 1, 3), 100.0, "out:value"),
        ("out", (2, 1, 3), torch.nan, "out:nan"),
        ("out", (2, 1, 3), torch.inf, "out:inf"),
        ("lse", (2, 1), 100.0, "lse:value"),
        ("lse", (2, 1), torch.nan, "lse:nan"),
        ("lse", (2, 1), -torch.inf, "lse:inf"),
    ],
)
@pytest.mark.by_day("out-*value", "out-*nan", "lse-*-inf-*")
def test_kind_of_a_wrong_number(
    name: str, index: tuple[int, ...], value: float, kind: str, plant: Any, dense: Case
) -> None:
    """Different bugs would share a signature, or one bug would have several."""
    failure = judge(plant(after=change(name, index, value)), dense, device="cpu", inquire=False).failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("accuracy", kind)
    where = ", ".join(f"{axis} {i}" for axis, i in zip(("seq", "head", "dim"), index, strict=False))
    assert failure.message.startswith(f"{name}[{where}] = ")
    assert failure.details[0].startswith("beyond the bound: 1 of ")


def test_message_gives_error_and_bound(plant: Any, dense: Case, failure_of: Any) -> None:
    """An engineer could not tell a rounding error from a gross one."""
    failure = failure_of(plant(after=change("out", (0, 0, 0), 12.0)), dense)
    assert "out[seq 0, head 0, dim 0] = 12.0, expected " in failure.message
    assert " x the bound " in failure.message
    assert failure.error_ratio > 1000


def test_one_dropped_token_of_many_is_found(plant: Any, failure_of: Any) -> None:
    """A boundary bug would drown among a thousand tokens, as it does at a tolerance of 1e-2."""
    values = Values(keys="normal", values="normal", seed=5)
    case = dense_case(head_size=64, scale=0.125, dtype="float16", seq_lens=(1328,), values=values)
    numerics = attnfuzz.Numerics(probabilities="float32", partials="float32", matmul="ieee")
    assert judge(plant(numerics=numerics), case, device="cpu").failure is None
    failure = failure_of(plant(numerics=numerics, length=lambda n: n - 1), case)
    assert failure.oracle == "accuracy"
    assert "token 1327 of sequence 0 is dropped" in failure.message


def test_an_output_that_drops_bits_is_found_on_a_cpu(plant: Any, failure_of: Any) -> None:
    """Eager torch rounds to bfloat16; slack for an interpreter that drops bits would hide a kernel that does."""
    values = Values(keys="normal", values="normal", seed=2)
    case = dense_case(
        num_q_heads=4, num_kv_heads=2, head_size=64, scale=0.125, dtype="bfloat16", seq_lens=(5, 40), values=values
    )
    numerics = attnfuzz.Numerics(probabilities="float32", partials="float32")

    def cut(weights: Tensor, v: Tensor) -> Tensor:
        return ((weights @ v).view(torch.int32) >> 16 << 16).view(torch.float32)

    assert judge(plant(numerics=numerics), case, device="cpu").failure is None
    assert failure_of(plant(numerics=numerics, average=cut), case).kind == "out:value"


def test_out_is_reported_before_lse(plant: Any, dense: Case, failure_of: Any) -> None:
    """The kind of a bug that shows in both would depend on which is further off."""

    def both(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        lse[0, 0] = 1e9
        out[0, 0, 0] += 1e-3
        return out, lse

    assert failure_of(plant(after=both), dense).kind == "out:value"


def test_partials_that_merge_wrongly(plant: Any, split: SplitDecodeCase, failure_of: Any) -> None:
    """Splits that leave out a token, or overlap, would pass because no single partial has a right value."""

    def disturb(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        lse[2, 0, 1] += 0.25
        return out, lse

    failure = failure_of(plant("split_decode", after=disturb), split)
    assert (failure.oracle, failure.kind) == ("accuracy", "out:value")
    assert failure.message.startswith("out[seq 2, head 0, dim ")


@pytest.mark.parametrize(
    ("element", "value", "kind"),
    [("lse", 0.0, "lse:value"), ("out", torch.nan, "partial_out:nan"), ("out", 1.0, "partial_out:value")],
)
def test_partials_of_an_empty_sequence(
    element: str, value: float, kind: str, plant: Any, split: SplitDecodeCase, failure_of: Any
) -> None:
    """An empty sequence could leave partials that a reduction kernel takes for tokens, or turns into NaN."""

    def store(out: Tensor, lse: Tensor) -> None:
        out.fill_(value if element == "out" else 0.0)
        lse.fill_(value if element == "lse" else -torch.inf)

    case = msgspec.structs.replace(split, seq_lens=(0, 0, 0))
    failure = failure_of(plant("split_decode", store_empty=store), case)
    assert failure.oracle == "accuracy"
    assert failure.kind == kind


def test_a_case_without_any_token_is_told(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """How far off an LSE is would be asked of the largest right one, of which there is none, and end the search."""

    def store(out: Tensor, lse: Tensor) -> None:
        out.fill_(0.0)
        lse.fill_(-1e4)

    failure = failure_of(plant(store_empty=store), msgspec.structs.replace(dense, seq_lens=(0, 0, 0)))
    assert "the running maximum begins at a finite number" in failure.message


def test_partial_beside_an_lse_of_minus_infinity_must_be_finite(
    plant: Any, split: SplitDecodeCase, failure_of: Any
) -> None:
    """NaN in an empty split would pass here and turn a reduction kernel's result into NaN."""

    def store(out: Tensor, lse: Tensor) -> None:
        out.fill_(torch.nan)
        lse.fill_(-torch.inf)

    failure = failure_of(plant("split_decode", store_empty=store), msgspec.structs.replace(split, seq_lens=(5,)))
    assert (failure.oracle, failure.kind) == ("accuracy", "partial_out:nan")
    assert "a split without tokens has lse = -inf and an output that is written and finite" in failure.message


@pytest.mark.parametrize("layout", ["HT", "TH"])
def test_merge_names_token_and_head(layout: Any, plant: Any, states: MergeStatesCase, failure_of: Any) -> None:
    """Rows and columns of the LSE would be confused in one of the two layouts."""

    def disturb(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        lse[(1, 2) if layout == "TH" else (2, 1)] += 1.0
        return out, lse

    failure = failure_of(plant("merge_states", after=disturb), msgspec.structs.replace(states, lse_layout=layout))
    assert failure.kind == "lse:value"
    assert failure.message.startswith("lse[token 1, head 2] = ")


def _as_gpus_flush(smallest: float) -> Any:
    """Every number below ``smallest`` is 0: weights, V, products, their sums and the output."""

    def cut(numbers: torch.Tensor) -> torch.Tensor:
        return torch.where(numbers.abs() < smallest, 0.0, numbers.float())

    return lambda weights, v: cut(cut(cut(weights)[:, None] * cut(v)).sum(0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.by_day("float16", "float32")
def test_numbers_that_gpus_take_for_0(dtype: Any, dense: DenseDecodeCase, plant: Any) -> None:
    """Kernels would be accused of what hardware does to subnormal numbers of float32, or could lose larger ones."""
    values = Values(keys="normal", values="small", seed=5)
    case = msgspec.structs.replace(dense, dtype=dtype, seq_lens=(1, 5, 40, 300), values=values)
    right = plant(average=_as_gpus_flush(2.0**-126))
    assert judge(right, case, device="cpu", oracles=("accuracy",), relations=()).failure is None
    smallest = 2.0**-14 if dtype == "float16" else 2.0**-114
    wrong = plant(average=_as_gpus_flush(smallest))
    assert judge(wrong, case, device="cpu", oracles=("accuracy",), relations=()).failure is not None
