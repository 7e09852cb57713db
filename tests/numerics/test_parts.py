"""The parts of an error bound: units of rounding, sums on tensor cores, softmax under errors, stored scores."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Declaration
from attnfuzz.numerics import error_ratio, half_smallest_subnormal, unit_roundoff
from attnfuzz.numerics.arithmetic import accumulation_roundoff, gamma
from attnfuzz.numerics.scores import count_rescales
from attnfuzz.numerics.softmax_error import PerturbedSoftmax, log_totals, logsumexp_shift, perturbed_softmax
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.recipes import Needle, Values
from attnfuzz.trials.expectations import Expectation, expectations
from attnfuzz.values import attention_values
from tests.common.tensor_cores import AMPERE, HOPPER, HOPPER_FP8, VOLTA, Unit
from tests.sample_cases import dense_case

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_roundoff_is_half_the_machine_epsilon(dtype: torch.dtype) -> None:
    """Half the distance from 1 to the next number is the relative error of rounding to nearest."""
    assert unit_roundoff(dtype) == torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_smallest_subnormal_is_where_rounding_to_zero_ends(dtype: torch.dtype) -> None:
    """A number just above half the smallest subnormal must round up to it, and the half itself to zero."""
    half = half_smallest_subnormal(dtype)
    assert torch.tensor(half, dtype=torch.float64).to(dtype).item() == 0
    assert torch.tensor(half * 1.01, dtype=torch.float64).to(dtype).item() == 2 * half


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """A dtype the model does not know must not get another one's error."""
    with pytest.raises(ValueError, match=r"must be one of torch.float16, torch.bfloat16, torch.float32"):
        unit_roundoff(dtype)
    with pytest.raises(ValueError, match=r"must be one of torch.float16, torch.bfloat16, torch.float32"):
        half_smallest_subnormal(dtype)


def test_tensor_cores_truncate() -> None:
    """Accumulation on tensor cores loses up to one ulp for each term, twice what rounding does."""
    assert accumulation_roundoff(Numerics(matmul="ieee")) == 2.0**-24
    assert accumulation_roundoff(Numerics(matmul="tensor_core")) == 2.0**-23
    assert accumulation_roundoff(Numerics(matmul="tf32")) == 2.0**-23


def test_gamma_covers_a_product_of_roundings() -> None:
    """n roundings in the same direction compound; gamma_n must not be less than that, nor much more."""
    n, u = 1000, 2.0**-11
    compounded = (1 + u) ** n - 1
    assert compounded < gamma(n, u) < 2 * compounded


def test_gamma_refuses_sums_without_information() -> None:
    """Beyond n u = 1/2 the formula turns negative and would pass anything as wrong."""
    with pytest.raises(ValueError, match=r"must stay below 0\.5"):
        gamma(2**23, 2.0**-24)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("got", "expected", "bound", "ratio"),
    [
        (1.5, 1.0, 0.25, 2.0),
        (0.5, 1.0, 1.0, 0.5),
        (1.0, 1.0, 0.0, 0.0),
        (0.0, -0.0, 0.0, 0.0),
        (1.5, 1.0, 0.0, INF),
        (-INF, -INF, 0.0, 0.0),
        (-INF, -INF, INF, 0.0),
        (INF, INF, 1.0, 0.0),
        (INF, -INF, 1.0, INF),
        (-INF, 1.0, 1.0, INF),
        (-INF, 1.0, INF, INF),
        (1.0, -INF, 1.0, INF),
        (1.0, -INF, INF, INF),
        (NAN, 1.0, 1.0, INF),
        (NAN, 1.0, INF, INF),
        (NAN, -INF, INF, INF),
        (2.0, 1.0, INF, 0.0),
        (2.0, 1.0, NAN, INF),
        (NAN, NAN, INF, 0.0),
        (1.0, NAN, INF, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ratio_of_one_element(got: float, expected: float, bound: float, ratio: float, dtype: torch.dtype) -> None:
    """A NaN or a wrong infinity must never pass, and an exact result never fail."""
    tensors = torch.tensor([got], dtype=dtype), *torch.tensor([[expected], [bound]], dtype=torch.float64)
    assert error_ratio(*tensors).tolist() == [ratio]


def test_shape_is_kept() -> None:
    """The verdict names the worst element by its index, so the ratio must have the result's shape."""
    ones = torch.ones(2, 3, 4, dtype=torch.float64)
    assert error_ratio(ones.half(), ones, ones).shape == (2, 3, 4)


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


LARGE = Values(keys="equal", logit_exponent=8, needles=(Needle(seq=0, position=3, kv_head=0),))
CASE = dense_case(num_q_heads=2, head_size=64, seq_lens=(7, 5), scale=2**-8, dtype="float16", values=LARGE)


def expected(numerics: Numerics, case: DenseDecodeCase = CASE) -> Expectation:
    declaration = Declaration(name="any", problem="dense_decode", numerics=numerics)
    (found,) = expectations([(declaration, case, attention_values(case))], tolerance="bound", one_copy=True)
    return found


def test_nothing_is_expected_of_rows_whose_scores_it_cannot_hold() -> None:
    """A kernel that does as it declares would be accused of NaN; or none would be found in any row beside it."""
    found = expected(Numerics(scores="input"))
    assert found.expected.out[0].isnan().all()
    assert found.expected.lse[0].isnan().all()
    assert found.bound.out[0].isposinf().all()
    assert found.expected.out[1].isfinite().all()
    assert found.bound.out[1].isfinite().all()


def test_that_is_so_of_float16_alone_and_if_it_is_declared() -> None:
    """NaN of a kernel with a bug would be let off."""
    assert expected(Numerics()).expected.out.isfinite().all()
    wide = msgspec.structs.replace(CASE, dtype="bfloat16")
    assert expected(Numerics(scores="input"), wide).expected.out.isfinite().all()


def test_a_chain_of_unknown_length_has_a_link_for_each_key() -> None:
    """A chain of eight merges would be accused unless its kernel happens to have an option of that name."""
    declaration = attnfuzz.Numerics(partials="chained")
    case = msgspec.structs.replace(CASE, values=Values(values="normal"), seq_lens=(40, 2))
    once, chained = (expected(numerics, case).bound.out for numerics in (Numerics(), declaration))
    assert math.isclose(float((chained[0] / once[0]).max()), 20, rel_tol=0.9)
    assert torch.allclose(chained[1], once[1])  # two keys merge once
