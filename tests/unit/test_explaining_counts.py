"""attnfuzz.explaining.measured_row: how often each token was counted."""

from __future__ import annotations

import math

import torch

from attnfuzz.explaining.measured_row import Counts, count_tokens

EQUAL = torch.full((4,), 0.25, dtype=torch.float64)
BOUND = torch.full((4,), 1e-6, dtype=torch.float64)


def counted(*weights: float, expected: torch.Tensor = EQUAL, lse_error: float | None = None) -> Counts:
    got = torch.tensor(weights, dtype=torch.float64)
    found = count_tokens(got, expected, BOUND[: len(weights)], lse_error)
    assert found is not None
    return found


def test_a_dropped_token_counts_zero_times() -> None:
    """The other weights, which grow, would be taken for wrong."""
    found = counted(1 / 3, 1 / 3, 1 / 3, 0.0)
    assert found.times.tolist() == [1, 1, 1, 0]
    assert found.sum == "same"


def test_a_token_left_out_of_the_output_alone_is_told_from_a_dropped_one() -> None:
    """A divisor that counts all tokens would be overlooked."""
    found = counted(0.25, 0.25, 0.25, 0.0)
    assert found.positions(0) == [3]
    assert found.sum == "all"


def test_a_token_counted_twice_is_found_beside_its_like() -> None:
    """Of two equal tokens, halving one and doubling the other look alike but for the sum."""
    half = torch.full((2,), 0.5, dtype=torch.float64)
    assert counted(1 / 3, 2 / 3, expected=half).times.tolist() == [1, 2]


def test_the_lse_tells_a_token_read_twice_from_a_dropped_one() -> None:
    """Of two equal tokens, one of which is read in place of the other, the other would be called dropped."""
    half = torch.full((2,), 0.5, dtype=torch.float64)
    assert counted(1.0, 0.0, expected=half, lse_error=0.0).times.tolist() == [2, 0]
    assert counted(1.0, 0.0, expected=half, lse_error=-math.log(2)).times.tolist() == [1, 0]


def test_a_common_factor_is_no_count() -> None:
    """A wrong divisor would be taken for tokens counted more than once."""
    found = counted(0.1, 0.1, 0.1, 0.1)
    assert found.times.tolist() == [1, 1, 1, 1]
    assert found.sum == "other"
    assert math.isclose(found.factor, 0.4)


def test_other_scores_are_no_counts() -> None:
    """Weights of other keys would be forced into whole numbers."""
    got = torch.tensor([0.31, 0.2, 0.23, 0.26], dtype=torch.float64)
    assert count_tokens(got, EQUAL, BOUND) is None


def test_a_sink_that_is_left_out_is_no_count() -> None:
    """The one token of a row would be told as counted three times, which gives nearly the weight that it has."""
    expected, got = torch.tensor([0.94], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    found = count_tokens(got, expected, BOUND[:1], beside=0.06)
    assert found is not None
    assert found.times.tolist() == [1]
