"""Numbers of whole batches and of 8-bit caches."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.problems.cases import PROBLEMS, DenseDecodeCase, MergeStatesCase, PagedDecodeCase, Problem
from attnfuzz.problems.quantised_kv import KV_DTYPES, KvDtype, QuantisedKv
from attnfuzz.problems.recipes import KeyRecipe, Needle, Pages, ValueRecipe, Values
from attnfuzz.strategies.cases import cases
from attnfuzz.values.attention import attention_values, attention_values_of_many
from attnfuzz.values.draws import HashedRecipe, draw, draw_on_host, element_words, exact, exact_on_host
from attnfuzz.values.states import merge_values, merge_values_of_many
from attnfuzz.values.tokens import token_table
from tests.sample_cases import paged_case

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


def test_shared_pages_hold_the_numbers_of_their_owner() -> None:
    """Sequences on one page would expect different numbers there."""
    case = paged_case(
        num_q_heads=2,
        head_size=8,
        seq_lens=(6, 9, 3),
        scale=1.0,
        pages=Pages(shared_blocks=2),
        values=Values(keys="rising", values="normal", seed=5, needles=(Needle(0, 5, 0),)),
    )
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


STATES = torch.tensor([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF])


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 64), (2, 1024)])
@pytest.mark.parametrize("recipe", ["integers", "normal", "large", "small", "fine8", "fine11", "fine24"])
def test_same_integers_as_in_64_bits(recipe: HashedRecipe, shape: tuple[int, int]) -> None:
    """A batch would be judged on other numbers than its cases alone, on a GPU or in a replay."""
    found = draw_on_host(STATES, recipe, *shape)
    assert torch.equal(found.long(), draw(element_words(STATES, *shape), recipe))  # type: ignore[arg-type]  # not "signed"


def test_signs_are_those_of_the_row() -> None:
    """Queries would point away from the keys that they are to find."""
    signs = 1 - 2 * (torch.arange(7 * 4).view(7, 4) % 3 == 0).int()
    found = draw_on_host(STATES, "signed", 2, 4, signs)
    expected = ((element_words(STATES, 2, 4) & 3) + 1) * signs[:, None]
    assert torch.equal(found.long(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [-14, -5, 0, 3])
def test_same_bits_as_the_conversion_elsewhere(dtype: torch.dtype, exponent: int) -> None:
    """A batch would be judged on other numbers than its cases alone."""
    integers = torch.arange(-256, 257, dtype=torch.int32)
    found, expected = exact_on_host(integers, dtype, exponent), exact(integers, dtype, exponent)
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def paged(dtype: KvDtype, *, seq_lens: tuple[int, ...] = (40, 0, 9), **values: Any) -> PagedDecodeCase:
    return paged_case(
        num_q_heads=4,
        num_kv_heads=2,
        head_size=32,
        seq_lens=seq_lens,
        kv=QuantisedKv(dtype=dtype, per="head", scales="scattered"),
        values=Values(**values),
    )


def codes(numbers: Tensor, dtype: KvDtype) -> set[int]:
    return set(numbers.to(getattr(torch, dtype)).view(torch.uint8).flatten().tolist())


@pytest.mark.by_day
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("exponent", [-6, 0, 8])
@pytest.mark.parametrize("keys", get_args(KeyRecipe))
def test_every_key_is_a_number_of_the_format(dtype: KvDtype, exponent: int, keys: KeyRecipe) -> None:
    """The cache would hold other keys than the reference reads."""
    for needles in ((), (Needle(0, 3, 1),)):
        k = attention_values(paged(dtype, keys=keys, logit_exponent=exponent, needles=needles)).k
        assert torch.equal(k.to(getattr(torch, dtype)).to(k.dtype), k)
        assert k.isfinite().all()


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("recipe", get_args(ValueRecipe))
def test_every_value_is_a_number_of_the_format(dtype: KvDtype, recipe: ValueRecipe) -> None:
    """The cache would hold other values than the reference reads."""
    v = attention_values(paged(dtype, values=recipe)).v
    assert torch.equal(v.to(getattr(torch, dtype)).to(v.dtype), v)
    assert v.isfinite().all()


def test_fine_numbers_have_every_bit_pattern() -> None:
    """A conversion that is wrong for one exponent, or for subnormal numbers, would pass."""
    values = attention_values(paged("float8_e4m3fn", seq_lens=(300,), keys="fine", values="fine"))
    assert codes(values.v, "float8_e4m3fn") == set(range(256)) - {0x7F, 0xFF}
    below_two = {code for code in range(256) if not code & 0x40}
    assert codes(values.k, "float8_e4m3fn") == below_two
    values = attention_values(paged("float8_e5m2", seq_lens=(300,), keys="fine", values="fine"))
    assert codes(values.k, "float8_e5m2") == codes(values.v, "float8_e5m2") == below_two


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_neighbouring_tokens_still_differ(dtype: KvDtype) -> None:
    """A token read in place of the next one would have the same value."""
    v = attention_values(paged(dtype, seq_lens=(300,))).v
    assert bool((v[1:] != v[:-1]).any(-1).all())


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_many_at_once_are_those_of_each(dtype: KvDtype) -> None:
    """A batch would be judged with other numbers than a replay."""
    cases = [
        paged(dtype, keys=keys, values=values, seed=i, logit_exponent=2, needles=(Needle(0, 3, 1),) * (i % 2))
        for i, (keys, values) in enumerate(
            [("fine", "fine"), ("fine", "positions"), ("rising", "large"), ("normal", "normal"), ("equal", "integers")]
        )
    ]
    for case, many in zip(cases, attention_values_of_many(cases, token_table(cases, "cpu")), strict=True):
        one = attention_values(case)
        assert all(torch.equal(getattr(one, name), getattr(many, name)) for name in ("q", "k", "v", "kv_scales"))


def test_large_values_do_not_all_saturate() -> None:
    """They would all be the same number, and a token read for another pass."""
    v = attention_values(paged("float8_e4m3fn", values="large")).v
    assert v.abs().amax() <= 256
    assert len(set(v.flatten().tolist())) > 8


def test_saved_numbers_stay_what_they_are() -> None:
    """A saved case would be replayed with other numbers."""
    values = attention_values(paged("float8_e4m3fn", keys="fine", values="fine", seed=3, logit_exponent=1))
    assert values.k[1, 0, :6].tolist() == [1.75, -0.01171875, -0.40625, 0.9375, 1.875, 0.078125]
    assert values.v[1, 0, :6].tolist() == [-448.0, -0.0859375, 18.0, -0.5, 192.0, -7.5]
