"""Numbers drawn for many cases at once: the bits of each case alone, by a fixed number of operations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.problems.cases import PROBLEMS, DenseDecodeCase, MergeStatesCase, PagedDecodeCase, Problem
from attnfuzz.problems.recipes import KEY_RECIPES, VALUE_RECIPES, Needle, Pages, Values
from attnfuzz.problems.supports import DTYPES
from attnfuzz.strategies.cases import cases
from attnfuzz.values.attention import attention_values, attention_values_of_many
from attnfuzz.values.states import merge_values, merge_values_of_many
from attnfuzz.values.tokens import token_table

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def of_many(batch: list[Any], device: str) -> list[Any]:
    if isinstance(batch[0], MergeStatesCase):
        return list(merge_values_of_many(batch, device))
    return list(attention_values_of_many(batch, token_table(batch, device)))


def alone(case: Any) -> Any:
    return merge_values(case) if isinstance(case, MergeStatesCase) else attention_values(case)


def assert_same(found: Any, expected: Any) -> None:
    for field in dataclasses.fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one.cpu().contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        else:
            assert one == other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.by_day("paged_attention*", "merge_states*")
def test_same_bits_as_alone(problem: Problem, device: str, data: st.DataObject) -> None:
    """A case would be judged on other numbers than those that its regression file stands for."""
    batch = data.draw(st.lists(cases(problem), min_size=1, max_size=6))
    for found, case in zip(of_many(batch, device), batch, strict=True):
        assert_same(found, alone(case))


@pytest.mark.parametrize("device", DEVICES)
def test_every_recipe_side_by_side(device: str) -> None:
    """A recipe would be filled in with the numbers of its neighbour in the batch."""
    shapes = [(4, 2, 16), (2, 1, 5), (3, 3, 8)]
    batch = [
        DenseDecodeCase(
            num_q_heads=shapes[i % 3][0],
            num_kv_heads=shapes[i % 3][1],
            head_size=shapes[i % 3][2],
            v_head_size=(None, 3, 12, None)[i % 4],
            seq_lens=((130, 0, 9), (0, 0, 1))[i % 2],
            scale=1.0,
            dtype=DTYPES[i % 3],
            values=Values(keys=keys, values=values, seed=i, logit_exponent=i % 3 - 1, needles=needles),  # type: ignore[arg-type]  # mypy sees str
        )
        for i, (keys, values, needles) in enumerate(
            (keys, values, needles)
            for keys in KEY_RECIPES
            for values in VALUE_RECIPES
            for needles in ((), (Needle(2, 0, 0),))
        )
    ]
    for found, case in zip(of_many(batch, device), batch, strict=True):
        assert_same(found, attention_values(case))


def test_shared_pages_hold_the_numbers_of_their_owner() -> None:
    """Sequences on one page would expect different numbers there."""
    case = PagedDecodeCase(
        num_q_heads=2, num_kv_heads=1, head_size=8, block_size=4, seq_lens=(6, 9, 3), scale=1.0,
        pages=Pages(shared_blocks=2), values=Values(keys="rising", values="normal", seed=5, needles=(Needle(0, 5, 0),)),
    )  # fmt: skip
    for found in of_many([case, case], "cpu"):
        assert_same(found, attention_values(case))


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates neither
    """Counts what a GPU would have to be told."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_number_of_operations_does_not_grow_with_the_batch(problem: Problem) -> None:
    """Drawing the numbers of a batch would cost a GPU as many launches as drawing them case by case."""
    case: Any
    if problem == "merge_states":
        case = MergeStatesCase(num_q_heads=2, head_size=8, num_tokens=3, lse_pairs=(("finite", "-inf"),))
    else:
        case = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=8, seq_lens=(3, 5), scale=1.0)
    counts = []
    for size in (2, 32):
        with Counter() as counter:
            of_many([case] * size, "cpu")
        counts.append(counter.operations)
    assert counts[0] == counts[1]
