"""attnfuzz.numerics.rounded: numbers that carry the largest error that float32 can have made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics.rounded import Rounded, exactly

Computed = Callable[[Tensor, Tensor], Tensor]
Carried = Callable[[Rounded, Rounded], Rounded]

OPERATIONS: dict[str, tuple[Computed, Carried]] = {
    "sum": (lambda x, y: x + y, lambda x, y: x + y),
    "difference": (lambda x, y: x - y, lambda x, y: x - y),
    "product": (lambda x, y: x * y, lambda x, y: x * y),
    "quotient": (lambda x, y: x / y, lambda x, y: x / y),
    "exponential": (lambda x, _: x.exp(), lambda x, _: x.exp()),
    "logarithm": (lambda x, y: (1 + y.exp()).log(), lambda _, y: (exactly(1.0) + y.exp()).log()),
    "root": (lambda x, y: (x * x).rsqrt(), lambda x, _: (x * x).rsqrt()),
    "dot": (lambda x, y: (x * y).sum(-1), lambda x, y: x.dot(y)),
    "chain": (
        lambda x, y: ((x * y).sum(-1).exp() * (x.exp() / (1 + y.exp())).sum(-1)).float(),
        lambda x, y: (x.dot(y).exp() * (x.exp() / (exactly(1.0) + y.exp())).sum(-1)).stored("float32"),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_float32_gives_is_within_the_bound_and_not_far(name: str) -> None:
    """A right kernel would be told to be wrong, or a wrong one not."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(200, 64, generator=generator).clamp(-2, 2) + 3 * (name == "quotient") for _ in range(2))
    computed, carried = OPERATIONS[name]
    found = carried(exactly(x), exactly(y))
    assert torch.allclose(found.value, computed(x.double(), y.double()).double(), rtol=1e-3)
    error = (computed(x, y).double() - found.value).abs()
    assert bool((error <= found.error).all())
    assert float((error / found.error).max()) > 0.005
    assert float((found.error / found.value.abs().clamp(min=1.0)).max()) < 1e-3


def test_errors_of_operands_are_carried_on() -> None:
    """What a first step got wrong would be forgotten by the next."""
    x, off = torch.tensor([0.7, 3.0], dtype=torch.float64), torch.tensor([0.01, 0.02], dtype=torch.float64)
    number = Rounded(x, off)
    for carried, exact in (
        (number * number, lambda x: x * x),
        (number - exactly(1.0), lambda x: x - 1),
        (exactly(1.0) / number, lambda x: 1 / x),
        (number.exp(), torch.exp),
        (number.log(), torch.log),
        (number.rsqrt(), torch.rsqrt),
        (number.dot(exactly(2.0)), lambda x: (2 * x).sum()),
    ):
        for sign in (-1, 1):
            assert bool(((exact(x + sign * off) - exact(x)).abs() <= carried.error).all())


def test_a_number_that_may_be_zero_has_no_bound() -> None:
    """A quotient without a bound would be compared with one."""
    near = Rounded(torch.tensor(1e-3, dtype=torch.float64), torch.tensor(2e-3, dtype=torch.float64))
    with pytest.raises(ValueError, match="quotient"):
        exactly(1.0) / near
    with pytest.raises(ValueError, match="logarithm"):
        near.log()
    nothing = exactly(0.0).log()
    assert (float(nothing.value), float(nothing.error)) == (-torch.inf, 0.0)
