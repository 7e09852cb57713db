"""What the bounds see of small mistakes: the command that prints the shares would print anything."""

from __future__ import annotations

import math

import pytest

from attnfuzz.problems.declared_numerics import Numerics
from tests.quality.designs import drawn_of
from tests.quality.tightness import MISTAKES, Mistake, cases_needed, shares

CASES = 12


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_share_is_counted_of_a_right_kernel(dtype: str) -> None:
    """Every share would be that of cases whose bound is too small."""
    assert shares(Mistake("right", ""), drawn_of(dtype, CASES), Numerics()) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["scale + 1 %", "last token dropped"])
def test_mistakes_show_in_some_of_few_drawn_cases(name: str) -> None:
    """Bounds would be so wide, or cases such, that a search needs hours for a plain mistake."""
    mistake = next(one for one in MISTAKES if one.name == name)
    assert max(shares(mistake, drawn_of("bfloat16", CASES), Numerics())) >= 0.25


def test_how_many_cases_a_search_needs() -> None:
    """A bug in one of a hundred cases would be told to be found by the hundredth."""
    assert [cases_needed(share) for share in (1.0, 0.9, 0.5, 0.01)] == [1, 1, 4, 230]
    assert cases_needed(0.0) == math.inf
