"""Numbers of 8-bit caches: exact in their format, of every bit pattern, and still telling tokens apart."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.quantised_kv import KV_DTYPES, KvDtype, QuantisedKv
from attnfuzz.problems.recipes import KeyRecipe, Needle, ValueRecipe, Values
from attnfuzz.values import attention_values
from attnfuzz.values.attention import attention_values_of_many
from attnfuzz.values.tokens import token_table


def paged(dtype: KvDtype, *, seq_lens: tuple[int, ...] = (40, 0, 9), **values: Any) -> PagedDecodeCase:
    return PagedDecodeCase(
        num_q_heads=4,
        num_kv_heads=2,
        head_size=32,
        seq_lens=seq_lens,
        scale=0.25,
        block_size=4,
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
