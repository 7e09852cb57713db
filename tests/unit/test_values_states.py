"""The states to merge: fixed forever, and their LSE pairs lie as the case says."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.problems.recipes import LSE_KINDS
from attnfuzz.problems.supports import DTYPES
from attnfuzz.values.states import merge_values, merge_values_of_many


def merge(**more: Any) -> MergeStatesCase:
    return MergeStatesCase(**{"num_q_heads": 2, "head_size": 3, "num_tokens": 2, "seed": 42} | more)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_golden_numbers(device: str) -> None:
    """Saved cases would be rebuilt with other numbers."""
    pairs = (("finite", "equal"), ("high", "low"), ("equal", "equal"), ("-inf", "+inf"))
    values = merge_values(merge(lse_pairs=pairs), device)
    assert values.prefix_lse.tolist() == [[1.1875, 192.0], [1.6875, -math.inf]]
    assert values.suffix_lse.tolist() == [[-1.4375, -194.3125], [1.6875, math.inf]]
    assert values.prefix_output[0].tolist() == [[0.78125, -1.03125, -1.40625], [0.65625, 0.03125, -1.1875]]
    assert values.suffix_output[1].tolist() == [[0.34375, -0.75, -0.375], [1.875, 0.28125, -1.90625]]
    assert values.prefix_live.tolist() == [[True, True], [True, False]]
    assert values.suffix_live.tolist() == [[True, True], [True, False]]


def test_numbers_are_exact_in_every_dtype() -> None:
    """A number would be rounded on its way into the case's dtype."""
    half, short, full = (merge_values(merge(dtype=dtype, num_tokens=50)) for dtype in DTYPES)
    for name in ("prefix_output", "suffix_output"):
        assert torch.equal(getattr(half, name).double(), getattr(full, name).double())
        assert torch.equal(getattr(short, name).double(), getattr(full, name).double())


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_fine_numbers_use_every_bit(dtype: Any, bits: int) -> None:
    """A kernel that rounds the states that it merges would be right on all numbers that it is ever given."""
    case = merge(dtype=dtype, num_tokens=400, outputs="fine")
    for made in (merge_values(case), *merge_values_of_many([case, merge(dtype=dtype)], "cpu")[:1]):
        units = torch.stack((made.prefix_output, made.suffix_output)).double() * 2.0 ** (bits - 2)
        assert torch.equal(units, units.round())
        assert int(units.abs().max()) > 2 ** (bits - 1) * 0.9
        assert (units % 2 == 1).double().mean() > 0.4
        assert torch.equal(made.prefix_output, merge_values(case).prefix_output)


RANGES = {"finite": (-4, 4), "equal": (-4, 4), "high": (192, 196), "low": (-196, -192)}


@pytest.mark.parametrize("pair", [*itertools.product(LSE_KINDS, LSE_KINDS)], ids=",".join)
def test_lse_kinds(pair: tuple[Any, Any]) -> None:
    """A pair would not be what its name says: far apart, equal, or empty on one side or both."""
    values = merge_values(merge(num_tokens=40, lse_pairs=(pair,)))
    for kind, lse in zip(pair, (values.prefix_lse, values.suffix_lse), strict=True):
        if kind in RANGES:
            low, high = RANGES[kind]
            assert ((lse >= low) & (lse < high) & (lse * 16 == (lse * 16).round())).all()
            assert len(set(lse.flatten().tolist())) > 10
        else:
            assert (lse == float(kind)).all()
    same = torch.equal(values.prefix_lse, values.suffix_lse)
    assert same == (pair[0] == pair[1] and pair[0] in ("equal", "-inf", "+inf"))


def test_pairs_cycle_over_tokens_and_heads() -> None:
    """The pair of a row would not be the one that the case's documentation names."""
    pairs = (("high", "low"), ("low", "high"), ("-inf", "finite"))
    values = merge_values(merge(num_q_heads=2, num_tokens=3, lse_pairs=pairs))
    empty = [[(token * 2 + head) % 3 == 2 for head in range(2)] for token in range(3)]
    assert (~values.prefix_live).tolist() == empty
    assert values.prefix_lse[0, 0] > 100 > -100 > values.prefix_lse[0, 1]


def test_base_is_noted_but_changes_no_number() -> None:
    """LSE numbers would no longer be dyadic in the kernel's own base."""
    natural, base2 = merge_values(merge()), merge_values(merge(), lse_base2=True)
    assert (natural.lse_base2, base2.lse_base2) == (False, True)
    assert torch.equal(natural.prefix_lse, base2.prefix_lse)
