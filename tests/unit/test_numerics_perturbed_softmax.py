"""Limits on perturbed softmax weights against perturbations that reach them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics.scores import count_rescales
from attnfuzz.numerics.softmax_error import PerturbedSoftmax, log_totals, logsumexp_shift, perturbed_softmax

NUM_TOKENS = 6


def scores_and_errors(size_of_error: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, NUM_TOKENS, generator=generator, dtype=torch.float64) * 3
    return scores, torch.rand(1, NUM_TOKENS, generator=generator, dtype=torch.float64) * size_of_error


def limits_of(scores: Tensor, errors: Tensor) -> PerturbedSoftmax:
    log_p = scores.log_softmax(-1)
    return perturbed_softmax(log_p.exp(), errors, log_totals(log_p, errors))


def all_signs() -> Tensor:
    """Every way to move each score up or down: the extremes of all perturbations. `[64, NUM_TOKENS]`."""
    return torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * NUM_TOKENS)


@pytest.mark.parametrize("size_of_error", [1e-6, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("seed", range(3))
def test_no_perturbation_exceeds_the_limits_and_one_reaches_them(size_of_error: float, seed: int) -> None:
    """`upper` and `interval` must hold for the worst signs of the score errors, and be attained by some."""
    scores, errors = scores_and_errors(size_of_error, seed)
    limits = limits_of(scores, errors)
    perturbed = (scores + all_signs() * errors).softmax(-1)
    highest = perturbed.amax(0)
    rounding = 1e-12
    assert bool((highest <= limits.upper[0] * (1 + rounding)).all())
    torch.testing.assert_close(highest, limits.upper[0], rtol=1e-6, atol=0)
    moved = (perturbed - limits.p).abs().amax(0)
    assert bool((moved <= limits.interval[0] * (1 + 1e-6) + rounding).all())
    assert bool((moved >= 0.99 * limits.interval[0] - rounding).all())


@pytest.mark.parametrize("size_of_error", [1e-6, 1e-3, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_first_order_weights_bound_the_average_and_are_sharp(size_of_error: float, seed: int) -> None:
    """The sum of c_i |x_i - x*| must bound the change of the average, closely where errors are small."""
    scores, errors = scores_and_errors(size_of_error, seed)
    limits = limits_of(scores, errors)
    values = torch.randn(NUM_TOKENS, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    average = limits.p @ values
    moved = ((scores + all_signs() * errors).softmax(-1) @ values - average).abs().amax()
    allowed = (limits.first_order @ (values - average).abs()).item()
    assert moved.item() <= allowed
    assert moved.item() > (0.99 if size_of_error < 1e-2 else 0.3) * allowed


def test_infinite_and_huge_scores_give_no_nan() -> None:
    """Errors of 1e25 next to weights of 0 occur at huge logits and must not become 0 * inf."""
    scores = torch.tensor([[0.0, -torch.inf, -1e30, -1e3, 1e-3]], dtype=torch.float64)
    errors = torch.tensor([[1e-6, 1e-6, 1e25, 1e4, 1e4]], dtype=torch.float64)
    limits = limits_of(scores, errors)
    for limit in (limits.p, limits.upper, limits.interval, limits.first_order):
        assert bool(limit.isfinite().all())
    assert bool((limits.upper <= 1 + 1e-15).all())
    assert limits.upper[0].tolist() == [pytest.approx(1), 0, 0, pytest.approx(1), pytest.approx(1)]


@pytest.mark.parametrize("size_of_error", [1e-6, 1.0, 30.0])
def test_log_sum_exp_moves_at_most_as_allowed(size_of_error: float) -> None:
    """Moving all scores up, or all down, is the worst case and must be attained."""
    scores, errors = scores_and_errors(size_of_error, 0)
    moved = ((scores + all_signs() * errors).logsumexp(-1) - scores.logsumexp(-1)).abs().amax()
    torch.testing.assert_close(
        logsumexp_shift(log_totals(scores.log_softmax(-1), errors))[0, 0], moved, rtol=1e-6, atol=0
    )


def rescales(scores: Tensor, moves: Tensor, shift: Tensor | None = None) -> Tensor:
    lse = scores.logsumexp(-1, keepdim=True)
    return count_rescales(scores - lse, lse, moves, torch.ones_like(scores), shift)


def test_rescales_are_counted_in_any_order() -> None:
    """No order of the tokens may raise the running maximum above token i more often than counted."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 12, generator=generator, dtype=torch.float64)
    counted = rescales(scores, torch.full_like(scores, 1e-6))[0]
    most = torch.zeros(12)
    rising = scores[0].argsort()
    for order in [rising, rising.flip(0), *(torch.randperm(12, generator=generator) for _ in range(50))]:
        running = scores[0, order].cummax(0).values
        changes = (running[1:] > running[:-1]).flip(0).cumsum(0).flip(0)
        most[order[:-1]] = torch.maximum(most[order[:-1]], changes.float())
    assert bool((most <= counted).all())
    assert counted.max() == most.max() == 11
    assert counted[scores[0].argmax()] == 0


def test_equal_scores_rescale_as_often_as_float32_has_numbers_between_them() -> None:
    """A thousand equal scores would hide a dropped token; too few, and an unlucky order be reported."""
    moves = torch.full((1, 4000), 20 * 2.0**-24 * 5.1, dtype=torch.float64)
    counted = rescales(torch.full_like(moves, 5.1), moves)
    between = torch.arange(*(int((5.1 + sign * moves[0, 0]).float().view(torch.int32)) for sign in (-1, 1)))
    assert len(between) < counted.max() < 3 * len(between)
    assert bool((counted == counted[0, 0]).all())
    shifted = rescales(torch.full_like(moves, 5.1), moves, torch.full_like(moves[:, :1], 5.0))
    assert bool((shifted > 40 * counted).all())
    exact = rescales(torch.full_like(moves, 5.1), 0 * moves)
    assert exact.abs().max() == 0


def test_near_ties_count_as_rescales() -> None:
    """Scores equal up to their errors may come out in any order in float32, so each can raise the maximum."""
    scores = torch.zeros(1, 4, dtype=torch.float64)
    assert rescales(scores, torch.full_like(scores, 1e-6)).tolist() == [[3, 3, 3, 3]]
