"""Drawing on the host in 32-bit words: the integers that 64-bit words give."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.values.draws import HashedRecipe, draw, draw_on_host, element_words, exact, exact_on_host

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


def test_states_are_left_alone() -> None:
    """The second tensor that is drawn from the same rows would hold other numbers."""
    states = STATES.clone()
    first = draw_on_host(states, "normal", 3, 8)
    assert torch.equal(states, STATES)
    assert torch.equal(draw_on_host(states, "normal", 3, 8), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [-14, -5, 0, 3])
def test_same_bits_as_the_conversion_elsewhere(dtype: torch.dtype, exponent: int) -> None:
    """A batch would be judged on other numbers than its cases alone."""
    integers = torch.arange(-256, 257, dtype=torch.int32)
    found, expected = exact_on_host(integers, dtype, exponent), exact(integers, dtype, exponent)
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
