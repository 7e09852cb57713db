"""Designs that engines ship are not accused, and what costs precision shows unless it is declared."""

from __future__ import annotations

import functools

import pytest
import torch

from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from tests.common.tensor_cores import HOPPER, HOPPER_FP8, VOLTA
from tests.quality.designs import DESIGNS, TARGET, Design, drawn_of, largest_ratios

CASES = 40
_MORE = 400
"""Where few cases lose as much as a design may: one in a hundred."""
SUMS_EXACT = Numerics(row_sum="float32")
TIGHTEST = Numerics(row_sum="float32", partials="float32")
DTYPES = ("float16", "bfloat16")
drawn = functools.cache(drawn_of)


def ids(design: Design) -> str:
    return design.name


def cases(dtype: str) -> list[DenseDecodeCase]:
    return drawn(dtype, CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("design", DESIGNS, ids=ids)
@pytest.mark.by_day("sum of rounded weights-*", "scores in 16 bits-float16", "chain of five merges-bfloat16")
def test_a_declared_design_stays_below_its_bound(design: Design, dtype: str) -> None:
    """A kernel that is built as an engine's is would be reported, whatever it declares."""
    ((out, lse),) = largest_ratios(design, cases(dtype), design.numerics)
    assert max(out, lse) < 1
    assert out > TARGET  # else the bound would hide what it is for


@pytest.mark.parametrize(
    "design", [one for one in DESIGNS if one.numerics != Numerics() and one.name != "tiles rounded"], ids=ids
)
@pytest.mark.by_day("q x scale rounded")
def test_what_must_be_declared_shows(design: Design) -> None:
    """A kernel that loses precision by a change would go on passing as what it was."""
    shown = (largest_ratios(design, drawn(dtype, count), SUMS_EXACT)[0] for count in (CASES, _MORE) for dtype in DTYPES)
    assert any(max(pair) > 1 for pair in shown)


@pytest.mark.parametrize("dtype", ["float32"])
def test_an_lse_that_weighs_splits_is_one_of_float32(dtype: str) -> None:
    """Splits that are combined by exp(lse_s - lse) would be accused, or such an LSE pass with the bits of bfloat16."""
    exact = Design("", "", lse=torch.clone, splits=4)
    short = Design("", "", lse=lambda lse: lse.bfloat16().float(), splits=4)
    (right, _), (wrong, _) = (largest_ratios(design, cases(dtype), Numerics())[0] for design in (exact, short))
    assert 0.01 < right < 1
    assert wrong > 100


@pytest.mark.night
def test_rounded_weights_in_the_sum_show_where_they_are_denied() -> None:
    """A kernel that sums in float32 today, and in 16 bits after a change, would pass with its declaration."""
    (design,) = (one for one in DESIGNS if one.sums_rounded and one.numerics == Numerics())
    for dtype in DTYPES:
        (_, lse), (out, loose) = largest_ratios(design, cases(dtype), SUMS_EXACT, Numerics())
        assert lse > 10
        assert max(out, loose) < 1


@pytest.mark.night
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_tensor_cores_that_keep_float32_stay_below_the_tightest_bound(dtype: str) -> None:
    """Truncation per block of terms would be accused, or sums that keep 14 bits pass for it."""
    cut, short = [
        [largest_ratios(Design("", "", unit=unit), cases(dtype), TIGHTEST)[0] for unit in units]
        for units in ((VOLTA, HOPPER), (HOPPER_FP8,))
    ]
    assert 0.1 < max(map(max, cut)) < 1
    assert max(short[0]) > 2
