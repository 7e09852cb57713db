"""Truncation per block of terms, emulated for each generation of tensor cores, against what the bound charges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics.arithmetic import accumulation_roundoff, gamma
from attnfuzz.problems.declared_numerics import Numerics
from tests.unit.tensor_cores import AMPERE, HOPPER, HOPPER_FP8, VOLTA, Unit

SIZES = (5, 16, 64, 128, 256)


def charged(terms: Tensor) -> Tensor:
    """What the bound allows for sums over the last axis."""
    largest = torch.maximum(terms.clamp(min=0).sum(-1), (-terms).clamp(min=0).sum(-1))
    return gamma(terms.shape[-1], accumulation_roundoff(Numerics())) * largest


def ratio(unit: Unit, terms: Tensor) -> float:
    return float(((unit.total(terms) - terms.sum(-1)).abs() / charged(terms)).max())


def products(*shape: int, seed: int) -> Tensor:
    """Of float16 numbers of either sign, over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-8, 8, (2, *shape), generator=generator)
    factors: Tensor = torch.ldexp(torch.randn(2, *shape, generator=generator), spread).half().double()
    return factors.prod(0)


def just_cut(unit: Unit, size: int) -> Tensor:
    """1 and then products of float16 numbers that lie just below the last bit beside it."""
    below = torch.tensor(2 - 2.0**-10, dtype=torch.float16).double() * 2.0 ** -(unit.bits + 1)
    return torch.cat([torch.ones(1, dtype=torch.float64), below.expand(size - 1)])


@pytest.mark.parametrize("unit", [VOLTA, AMPERE, HOPPER], ids=lambda unit: unit.name)
@pytest.mark.parametrize("size", SIZES)
def test_truncation_per_block_is_charged_for(unit: Unit, size: int) -> None:
    """A correct kernel on tensor cores would be accused where many small terms are cut beside a large one."""
    drawn = products(4000, size, seed=size)
    alike, falling = drawn.abs(), drawn.sort(-1, descending=True).values
    assert max(ratio(unit, terms) for terms in (drawn, alike, falling, -falling)) < 1
    assert ratio(unit, just_cut(unit, size)) < 1


def test_the_charge_is_no_larger_than_it_must_be() -> None:
    """On sm_70 every term but one can lose a whole unit: half the charge would accuse correct kernels there."""
    assert ratio(VOLTA, just_cut(VOLTA, 256)) > 0.98
    assert 0.2 < ratio(HOPPER, just_cut(HOPPER, 256)) < 0.3


def test_fewer_bits_are_beyond_the_charge() -> None:
    """Sums of 8-bit operands on sm_90 keep 14 bits: a kernel that falls into them must be seen."""
    drawn = products(400, 64, seed=1)
    off = (HOPPER_FP8.total(drawn) - drawn.sum(-1)).abs() / charged(drawn)
    assert float((off > 1).double().mean()) > 0.9


def test_sums_are_continued_from_an_accumulator() -> None:
    """The emulation must cut what a tile adds to an accumulator, or the tests beside this one would prove less."""
    terms = products(50, 64, seed=2)
    whole = AMPERE.total(terms)
    assert torch.equal(AMPERE.total(terms[:, 32:], AMPERE.total(terms[:, :32])), whole)
    assert torch.equal(whole, whole.float().double())
