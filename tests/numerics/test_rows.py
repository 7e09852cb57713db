"""Bounds of padded rows against the same formulas written with Python floats, one query head at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics import attention_bound
from attnfuzz.numerics.arithmetic import (
    EXP_ERROR,
    LOG_ERROR,
    SMALLEST_NORMAL_FLOAT32,
    Arithmetic,
    attention_arithmetic,
    merge_arithmetic,
    side_by_side,
)
from attnfuzz.numerics.bounds import attention_rows
from attnfuzz.numerics.row_units import RowUnits, attention_units
from attnfuzz.problems.declared_numerics import Numerics

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
U = 2.0**-24

Row = Sequence[float]


def gamma(n: int, unit: Any) -> float:
    return float(n * unit / (1 - n * unit))


def dot(one: Row, other: Row) -> float:
    return math.fsum(a * b for a, b in itertools.zip_longest(one, other))


def plain_bound(q: Row, k: list[Row], v: list[Row], scale: float, unit: Any) -> tuple[list[float], float]:
    """Bounds of one head's out and LSE, as the docstrings of `attnfuzz.numerics` derive them."""
    n, log_n = len(k), math.log(len(k))
    tokens = range(n)
    scores = [scale * dot(q, row) for row in k]
    products = [[scale * a * b for a, b in zip(q, row, strict=True)] for row in k]
    distances = [max(scores) - s for s in scores]

    def moves(i: int, of_score: int) -> Any:
        """What moves a score, in proportion to its products and to itself."""
        positive = sum(x for x in products[i] if x > 0)
        negative = -sum(x for x in products[i] if x < 0)
        error = gamma(len(q), unit.addition) * max(positive, negative)
        error += (3 * unit.addition + unit.operand) * (positive + negative)
        return error + U * (of_score + 5 * unit.is_split) * abs(scores[i])

    def score_error(i: int, of_score: int, of_distance: int) -> Any:
        error = moves(i, of_score) + U * of_distance * distances[i] + EXP_ERROR
        if unit.is_split:
            error += U * (8 * distances[i] + 8 * log_n) + EXP_ERROR + LOG_ERROR * (1 + log_n)
        return error

    def copies_apart(i: int) -> float:
        levels = math.ceil(math.log2(len(q)))
        positive = sum(x for x in products[i] if x > 0)
        negative = -sum(x for x in products[i] if x < 0)
        one = gamma(levels, unit.addition) * max(positive, negative) + unit.addition * (positive + negative)
        after = U * (2 * abs(scores[i]) + 3 * distances[i]) + EXP_ERROR
        if not unit.by_lse:
            return math.expm1(2 * unit.copies * (one + after))
        by_lse = 2 * after + U * (2 * abs(scores[i]) + 2 * distances[i] + 5 * log_n)
        if unit.is_split:  # of states: twice as they were, with |lse_s| for |s_i|
            by_lse += 2 * after + U * (2 * abs(scores[i]) + 6 * distances[i] + 12 * log_n)
            by_lse += U * (5 * abs(scores[i]) + 8 * distances[i] + 8 * log_n) + EXP_ERROR + LOG_ERROR * (1 + log_n)
        return math.expm1(2 * unit.copies * one + by_lse)

    d = [score_error(i, 2, 6) for i in tokens]
    rescales = []
    for i in tokens:
        low, high = scores[i] - moves(i, 2), max(scores[j] + moves(j, 2) for j in tokens)
        above = sum(scores[j] + moves(j, 2) > low for j in tokens if j != i)
        rescales.append(min(above, (high - low) / (U * max(low, -high))) if low > 0 or high < 0 else above)
    apart = [score_error(i, 5, 7) for i in tokens]
    d = [d[i] + EXP_ERROR * rescales[i] for i in tokens]
    d_lse = [score_error(i, 5, 7) + EXP_ERROR * rescales[i] for i in tokens]
    lse = math.log(math.fsum(map(math.exp, scores)))
    p = [math.exp(s - lse) for s in scores]

    def limit(i: int, sign: int) -> float:
        """Token i's weight with its score at one end of its interval, and all others' at the other end."""
        own = math.exp(scores[i] + sign * d[i])
        return own / (own + sum(math.exp(scores[j] - sign * d[j]) for j in tokens if j != i))

    upper = [limit(i, 1) for i in tokens]
    interval = [max(upper[i] - p[i], p[i] - limit(i, -1)) for i in tokens]
    lowest = sum(p[i] * math.exp(-d[i]) for i in tokens)
    first_order = [p[i] * math.expm1(d[i]) / lowest for i in tokens]
    weighted_rescales = sum(upper[i] * rescales[i] for i in tokens)
    of_sum = gamma(n + 8, unit.addition) + U * min(weighted_rescales, max(rescales))
    stage = LOG_ERROR * (1 + log_n) + U * (3 * abs(lse) + 4 * log_n)
    of_normaliser = 1 - (1 - of_sum) * math.exp(-unit.by_lse * (1 + unit.is_split) * stage)

    def out_error(column: Row) -> Any:
        average = dot(p, column)
        deviations = [abs(x - average) for x in column]
        magnitudes = [abs(x) for x in column]
        heavy = [w > 1e-8 for w in upper]
        hull = max(deviations[i] for i in tokens if heavy[i])
        hull += sum(upper[i] * deviations[i] for i in tokens if not heavy[i])
        moved = min(dot(first_order, deviations), dot(interval, deviations), hull)
        each = [min(max(unit.weight * w, unit.weight_absolute), w) for w in upper]
        largest = [max(pair) for pair in zip(magnitudes, deviations, strict=True)]
        error = min(dot(each, largest), unit.weight * max(largest) + unit.weight_absolute * sum(largest))
        signs = [max(x, 0.0) for x in column], [max(-x, 0.0) for x in column]
        partial_sum = max(min(dot(upper, sign), max(sign)) for sign in signs)
        once = (10 * U + unit.value + unit.tile + unit.partial) * min(dot(upper, magnitudes), max(magnitudes))
        second_order = 1 + unit.weight + unit.value + unit.tile
        on_weights = [copies_apart(i) + second_order * U * rescales[i] for i in tokens]
        weights = [upper[i] * on_weights[i] for i in tokens]
        error += min(dot(weights, magnitudes), max(on_weights) * max(magnitudes))
        error += second_order * (once + gamma(n + 8, unit.addition) * partial_sum)
        error += unit.partial_absolute + n * unit.tile_absolute + SMALLEST_NORMAL_FLOAT32 * (4 * (n + 8) + sum(largest))
        error = moved + (error + of_normaliser * (abs(average) + moved)) / (1 - of_normaliser)
        return error * (1 + unit.stored) + unit.stored * abs(average) + unit.stored_absolute

    highest = sum(p[i] * math.exp(d_lse[i]) for i in tokens)
    lse_error = max(math.log(highest), -math.log(sum(p[i] * math.exp(-d_lse[i]) for i in tokens)))
    rounded = [min(max(unit.weight * w, unit.weight_absolute * max(p)), w) for w in upper]
    top = max(scores[i] + apart[i] for i in tokens)
    for i in tokens:
        if top - scores[i] + apart[i] < unit.weight / 2:
            rounded[i] = min(rounded[i], upper[i] * math.expm1(top - scores[i] - apart[i]))
    of_rounded = unit.sums_rounded * sum(rounded)
    lse_error += -math.log1p(-of_sum - of_rounded) + (1 + unit.is_split) * stage
    return [out_error(column) for column in zip(*v, strict=True)], lse_error


def arithmetic(numerics: Numerics, dtype: torch.dtype, **more: bool) -> Arithmetic:
    flags = {"is_split": False, "partial_merge": False, "one_copy": False} | more
    return attention_arithmetic(numerics, in_dtype=dtype, out_dtype=dtype, **flags)


ARITHMETICS = [
    arithmetic(Numerics(), F16),
    arithmetic(Numerics(), BF16, is_split=True, one_copy=True),
    arithmetic(Numerics(matmul="tf32"), F32, is_split=True),
    arithmetic(Numerics(), F16, partial_merge=True),
    arithmetic(Numerics(tile_sums="input"), F16, is_split=True),
    arithmetic(Numerics(probabilities="float32", partials="float32", matmul="ieee"), F32),
]

LENGTHS = (5, 1, 12)


@pytest.mark.parametrize("logit_scale", [0.1, 3.0, 80.0])
@pytest.mark.parametrize("unit", ARITHMETICS)
def test_padded_rows_follow_the_derivation(unit: Arithmetic, logit_scale: float) -> None:
    """A term lost, or a row that sees its padding, would tighten bounds and accuse correct kernels."""
    generator = torch.Generator().manual_seed(0)
    group, head_size, longest = 2, 3, max(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(len(LENGTHS), group, head_size) * logit_scale
    k, v = normal(2, len(LENGTHS), longest, head_size)
    present = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
    last = torch.tensor(LENGTHS)[:, None, None].sub(1).expand(-1, -1, head_size)
    k, v = (torch.where(present[..., None], x, x.gather(1, last)) for x in (k, v))
    rows = attention_rows(q, k, v, present.double().unsqueeze(1), units(unit, head_size))
    for row, length in enumerate(LENGTHS):
        for head in range(group):
            out, lse = plain_bound(q[row, head].tolist(), k[row, :length].tolist(), v[row, :length].tolist(), 0.5, unit)
            assert rows.out_error[row, head].tolist() == pytest.approx(out, rel=1e-6)
            assert rows.lse_error[row, head].item() == pytest.approx(lse, rel=1e-6)


def units(unit: Arithmetic, head_size: int) -> RowUnits:
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    many = side_by_side([unit] * len(LENGTHS))
    columns = attention_units(
        many, scale=torch.full_like(lengths, 0.5), head_size=torch.full_like(lengths, head_size), num_tokens=lengths
    )
    return RowUnits.of_columns(columns)


def test_head_sizes_may_be_filled_up_with_anything_finite() -> None:
    """Dimensions that belong to a neighbour would reach a row's own result, or turn it into NaN."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, size, 4, generator=generator, dtype=torch.float64) for size in (2, 6, 6))
    own = attention_rows(q, k, v, q.new_ones(1, 1, 6), one_row(4, 6))
    q, k, v = (torch.nn.functional.pad(x, (0, 3), value=fill) for x, fill in ((q, 0.0), (k, 1e30), (v, -1e30)))
    filled = attention_rows(q, k, v, q.new_ones(1, 1, 6), one_row(4, 6))
    torch.testing.assert_close(filled.out[..., :4], own.out, rtol=1e-12, atol=0)
    torch.testing.assert_close(filled.out_error[..., :4], own.out_error, rtol=1e-9, atol=0)
    torch.testing.assert_close(filled.lse_error, own.lse_error, rtol=1e-9, atol=0)


def one_row(head_size: int, num_tokens: int) -> RowUnits:
    one = torch.ones(1, dtype=torch.float64)
    many = side_by_side([ARITHMETICS[0]])
    return RowUnits.of_columns(attention_units(many, scale=one, head_size=one * head_size, num_tokens=one * num_tokens))


def test_sums_without_information_are_refused() -> None:
    """A bound for 2^23 truncated additions would be negative, and call everything wrong."""
    with pytest.raises(ValueError, match=r"must stay below 0\.5"):
        one_row(16, 2**23)


def test_a_merge_rounds_only_its_result() -> None:
    """Roundings that a merge does not make would hide mistakes in it."""
    assert merge_arithmetic(F16) == Arithmetic(by_lse=1.0, stored=2.0**-11, stored_absolute=2.0**-25)
    assert merge_arithmetic(BF16).stored == 2.0**-8


def test_negative_scales_count_by_their_size() -> None:
    """The errors of products would count as a negative part of the bound."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(shape, generator=generator).half().double() for shape in ((2, 8), (9, 1, 8), (9, 1, 8)))
    keywords: dict[str, Any] = {"in_dtype": F16, "out_dtype": F16, "numerics": Numerics()}
    bound, mirrored = attention_bound(q, k, v, 0.3, **keywords), attention_bound(-q, k, v, -0.3, **keywords)
    torch.testing.assert_close(mirrored.out, bound.out, rtol=1e-12, atol=0)
    torch.testing.assert_close(mirrored.lse, bound.lse, rtol=1e-12, atol=0)
