"""Scores in fewer bits are named by replaying them, and nothing else is blamed on them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.mistake import mistake_of
from attnfuzz.problems.cases import DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.recipes import Needle, Values
from attnfuzz.problems.variants import Variant
from attnfuzz.verdict import Failure

RECIPES: Any = ("normal", "fine", "integers", "negative")
SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = ((16, (1, 6)), (13, (2,)), (64, (5,)))
TWO = slice(2)


def cases(dtype: Any, exponents: tuple[int, ...] = (0, 4), shapes: slice = slice(None)) -> Iterator[DenseDecodeCase]:
    """As a search draws them: recipes, head sizes and exponents that make errors small or large."""
    for (head_size, seq_lens), keys, exponent in itertools.product(SHAPES[shapes], RECIPES, exponents):
        values: Any = Values(keys=keys, values="normal", logit_exponent=exponent, seed=len(keys) + exponent)
        yield DenseDecodeCase(
            num_q_heads=2,
            num_kv_heads=1,
            head_size=head_size,
            scale=1 / math.sqrt(head_size),
            dtype=dtype,
            seq_lens=seq_lens,
            values=values,
        )


def failures(
    kernel: Any, dtype: str, exponents: tuple[int, ...] = (0, 4), shapes: slice = slice(None)
) -> list[Failure]:
    drawn = cases(dtype, exponents, shapes)
    found = [judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure for case in drawn]
    return [failure for failure in found if failure is not None]


def in_halves(terms: Tensor) -> Tensor:
    while terms.shape[1] > 1:
        half = (terms.shape[1] + 1) // 2
        terms = terms[:, :half] + torch.nn.functional.pad(terms[:, half:], (0, 2 * half - terms.shape[1]))
    return terms[:, 0]


def in_order(terms: Tensor) -> Tensor:
    total = terms[:, 0]
    for i in range(1, terms.shape[1]):
        total = total + terms[:, i]
    return total


ROUNDED = {
    "products": lambda k, q, scale: (k * q).float().sum(-1) * scale,
    "query": lambda k, q, scale: k.float() @ (q * scale).float(),
    "products and their sum, once": lambda k, q, scale: ((k * q).float().sum(-1).to(k.dtype) * scale).float(),
    "products and sums, in order": lambda k, q, scale: in_order(k * q).float() * scale,
    "products and sums, in halves": lambda k, q, scale: (in_halves(k * q) * scale).float(),
    "scores": lambda k, q, scale: (k.float() @ q.float() * scale).to(k.dtype).float(),
}


@pytest.mark.night
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mistake", ROUNDED)
def test_scores_in_16_bits_are_one_cause(mistake: str, dtype: str, plant: Any) -> None:
    """One line of a kernel, `tl.sum(q * k)` in float16, would be reported once for each recipe and size of cases.

    Where it says nothing of how much that matters, a ratio of 200 to a bound would be taken for a wrong result.
    """
    found = failures(plant(dots=ROUNDED[mistake], numerics=Numerics(row_sum="float32")), dtype)
    of_scores = [failure for failure in found if "scores_rounded" in {one.mistake for one in failure.causes}]
    named = [failure for failure in found if failure in of_scores or "scores_rounded" in failure.maybe]
    assert len(of_scores) >= 0.8 * len(found)
    assert len(found) >= 8
    assert len(named) >= 0.9 * len(found), [failure.message for failure in found if failure not in named]
    told = [failure for failure in found if failure.causes and all(one.rounding for one in failure.causes)]
    assert told
    for failure in told:
        assert re.search(
            r"; (out is right and )?(out|lse) is (\S+ % of its largest number|infinitely far) off", failure.message
        )


@pytest.mark.parametrize("seed", [5, 6, 8])
@pytest.mark.by_day("5")
def test_rounding_that_gives_another_token_all_weight_may_be_it(seed: int, plant: Any) -> None:
    """Large scores, summed in an order that nobody knows, would be a second bug: its weights are 0 in float64."""
    values: Any = Values(keys="negative", values="integers", logit_exponent=8, seed=seed)
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 40, "seq_lens": (31,), "dtype": "bfloat16"}
    case = DenseDecodeCase(**shape, scale=1.0, values=values)

    def off_by_several_roundings(k: Tensor, q: Tensor, scale: float) -> Tensor:
        luck = 2 * torch.rand(len(k), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
        products = k.double() * q.double()
        return (scale * (products.sum(-1) + 8 * 2**-8 * luck * products.abs().sum(-1))).float()

    failure = judge(plant(dots=off_by_several_roundings), case, device="cpu", oracles=("accuracy",)).failure
    assert failure is not None
    assert "scores_rounded" in (failure.cause, *failure.maybe)


@pytest.mark.night
@pytest.mark.parametrize("order", ["in order", "in halves"])
def test_an_inexact_lse_beside_a_right_output_is_no_dropped_token(order: str, plant: Any) -> None:
    """Large values hide what is wrong with the output, and leaving out some range of tokens gives about any LSE."""
    kernel = plant(dots=ROUNDED[f"products and sums, {order}"])
    causes = []
    for seed in range(24):
        values: Any = Values(keys="fine", values="positions", logit_exponent=2, seed=seed)
        shape: Any = {"num_q_heads": 4, "num_kv_heads": 4, "head_size": 128, "seq_lens": (15,), "dtype": "bfloat16"}
        case = DenseDecodeCase(**shape, scale=1 / math.sqrt(128), values=values)
        failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
        causes += [failure.cause] if failure is not None else []
    assert len(causes) >= 12
    assert set(causes) <= {"scores_rounded", ""}


def test_overflow_is_named_where_it_shows_as_nan(plant: Any) -> None:
    """A reader would be told that the maximum is not subtracted, and look for what is there."""
    found = failures(plant(dots=ROUNDED["products and sums, in halves"]), "float16", (8,), slice(1))
    not_finite = [failure for failure in found if failure.kind.endswith(("nan", "inf"))]
    assert not_finite
    assert {failure.cause for failure in not_finite} == {"scores_rounded"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.by_day("0")
def test_a_lone_score_that_overflows_is_not_a_key_that_does(seed: int, plant: Any) -> None:
    """NaN throughout would be put down to keys converted to 8 bits, which end at 448."""
    values: Any = Values(keys="negative", values="integers", logit_exponent=6, seed=seed)
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "seq_lens": (1,), "dtype": "float16"}
    case = DenseDecodeCase(**shape, scale=0.25, values=values)
    steps = {"dots": ROUNDED["products and sums, in halves"], "weights": by_difference, "lse": lse_by_difference}
    failure = judge(plant(**steps), case, device="cpu", oracles=("accuracy",)).failure
    assert failure is not None
    assert failure.kind.endswith("nan")
    assert "scores_rounded" in {one.mistake for one in failure.causes}


@pytest.mark.night
def test_scores_that_overflow_are_told_from_keys_where_smaller_ones_are_only_inexact(plant: Any) -> None:
    """Similar cases are wrong too, by a rounding: that they are numbers must count."""
    steps = {"dots": ROUNDED["products and sums, in halves"], "weights": by_difference, "lse": lse_by_difference}
    causes = []
    recipes: Any = ("rising", "normal", "negative")
    for keys, needle in itertools.product(recipes, (None, Needle(seq=1, position=17, kv_head=0))):
        values: Any = Values(keys=keys, values="normal", logit_exponent=8, needles=() if needle is None else (needle,))
        shape: Any = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 96, "seq_lens": (1, 18), "dtype": "float16"}
        case = DenseDecodeCase(**shape, scale=0.1, values=values)
        failure = judge(plant(**steps), case, device="cpu", oracles=("accuracy",), relations=()).failure
        assert failure is not None
        assert "could not diagnose" not in failure.message
        causes += [failure.cause] if failure.kind.endswith("nan") else []
    assert len(causes) >= 4
    assert set(causes) == {"scores_rounded"}


def by_difference(scores: Tensor) -> Tensor:
    return (scores - scores.max()).exp() / (scores - scores.max()).exp().sum()


def lse_by_difference(scores: Tensor) -> Tensor:
    return scores.max() + (scores - scores.max()).exp().sum().log()


@pytest.mark.night
def test_nan_is_not_put_down_to_whatever_would_overflow(plant: Any) -> None:
    """0 / 0 in a tile would be told as keys in 8 bits, scores in 16, and exp without its maximum: as three bugs."""

    def weights(scores: Tensor) -> Tensor:
        exps = (scores - scores.max()).exp()
        of_tiles = [tile / tile.sum() * tile.sum() for tile in torch.split(exps, 4)]
        return torch.cat(of_tiles) / exps.sum()

    found = []
    for case in cases("float16", (0, 4, 6, 8)):
        case = msgspec.structs.replace(case, seq_lens=tuple(3 * length for length in case.seq_lens))
        failure = judge(plant(weights=weights), case, device="cpu", oracles=("accuracy",), relations=()).failure
        found += [failure] if failure is not None else []
    assert len(found) >= 8
    assert {failure.kind for failure in found} == {"out:nan"}
    named = [failure for failure in found if failure.cause]
    assert len(named) <= len(found) // 8, [failure.message for failure in named]


@pytest.mark.night
@pytest.mark.parametrize("begins", [-1e4, -5e4 * math.log(2)])
def test_a_maximum_that_begins_at_a_finite_number_is_named(begins: float, plant: Any) -> None:
    """FlashInfer's -5e4 in place of -inf showed as zeros, as an LSE and with empty sequences: as three bugs."""

    def weights(scores: Tensor) -> Tensor:
        top = scores.max().clamp(min=begins)
        return (scores - top).exp() / ((begins - top).exp() + (scores - top).exp().sum())

    def lse(scores: Tensor) -> Tensor:
        top = scores.max().clamp(min=begins)
        return top + ((begins - top).exp() + (scores - top).exp().sum()).log()

    def store_empty(out: Tensor, lse: Tensor) -> None:
        out.zero_()
        lse.fill_(begins + 3.0)

    causes = []
    for supports in (attnfuzz.Supports(), attnfuzz.Supports(lse="none")):
        kernel = plant(weights=weights, lse=lse, store_empty=store_empty, supports=supports)
        for case in cases("float16", (6, 8)):
            failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
            causes += [failure.cause] if failure is not None else []
    assert len(causes) >= 6
    assert set(causes) == {"maximum_begins_finite"}
    values: Any = Values(keys="negative", logit_exponent=8)
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "float16"}
    for seq_lens in ((0, 1), (1, 0)):
        empty = DenseDecodeCase(**shape, seq_lens=seq_lens, values=values)
        kernel = plant(weights=weights, lse=lse, store_empty=store_empty)
        failure = judge(kernel, empty, device="cpu", oracles=("accuracy",), relations=()).failure
        assert failure is not None
        assert failure.cause == "maximum_begins_finite"


@pytest.mark.parametrize("unit", ["before the scale", "to base 2"])
@pytest.mark.parametrize("lanes", [1, 15])
def test_a_finite_beginning_is_named_in_the_unit_of_the_kernel(unit: str, lanes: int, plant: Any) -> None:
    """-5e4 before the scale made 0 of one key without any cause, once its LSE lay below the right one or fitted a tile
    whose rest is masked to it: of FlashInfer's BatchAttention that was one bug told twice."""
    begins = -5e4 * (0.25 if unit == "before the scale" else math.log(2))
    lses = {"before the scale": -5e4 * math.log(2), "to base 2": begins}

    def lse(scores: Tensor) -> Tensor:
        return scores.logsumexp(0) if scores.max() > begins else torch.tensor(lses[unit] + math.log(lanes))

    def weights(scores: Tensor) -> Tensor:
        return scores.softmax(0) * (scores.max() > begins)

    values: Any = Values(keys="negative", values="positions", logit_exponent=7)
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "float16"}
    case = DenseDecodeCase(**shape, seq_lens=(1,), values=values)
    kernel = plant(weights=weights, lse=lse)
    failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
    assert failure is not None
    assert failure.cause == "maximum_begins_finite"
    assert " before the scale and " in failure.message
    assert "; lse is about -5e+04 " in failure.message


@pytest.mark.parametrize(
    ("is_subtracted", "cause"), [(True, "maximum_begins_finite"), (False, "maximum_not_subtracted")]
)
def test_where_no_weight_is_left_it_is_told_which_maximum_is_wrong(is_subtracted: bool, cause: str, plant: Any) -> None:
    """Sums of nothing, told as a sequence that is treated as empty, would be looked for in the loop over pages.

    Where no maximum is subtracted at all, a wrong first one would be looked for, and never be found.
    """

    def top(scores: Tensor) -> Tensor:
        return scores.float().max().clamp(min=0.0) * is_subtracted

    def sums(scores: Tensor) -> Tensor:
        return (scores.float() - top(scores)).exp().sum()

    kernel = plant(
        weights=lambda scores: (scores.float() - top(scores)).exp() / sums(scores).clamp(min=1e-30),
        lse=lambda scores: top(scores) + sums(scores).log(),
    )
    values: Any = Values(keys="negative", logit_exponent=6)
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "float16"}
    case = DenseDecodeCase(**shape, seq_lens=(2,), values=values)
    failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
    assert failure is not None
    assert failure.cause == cause
    assert "perhaps" not in failure.message
    assert failure.message.endswith("; out is 100 % of its largest number off and lse is infinitely far off")


def of_each_tile(scores: Tensor) -> Tensor:
    """Weights by tiles of 16, each beside its own maximum, before they are divided by their sum."""
    weights, top = scores[:0].float(), scores.new_tensor(0.0)
    for part in scores.float().split(16):  # type: ignore[no-untyped-call]  # torch does not annotate it
        weights = torch.cat((weights * (top - part.max()).exp(), (part - part.max()).exp()))
        top = part.max()
    return weights


MAXIMA: dict[str, tuple[str, str, Any]] = {
    "none": ("maximum_not_subtracted", "is not subtracted from the scores", lambda scores: scores.float().exp()),
    "first": (
        "maximum_of_one_part",
        "the maximum of the first tile or split alone",
        lambda scores: (scores.float() - scores[:2].max()).exp(),
    ),
    "last": (  # as far as is known
        "",
        "the maximum of the last tile or split alone",
        lambda scores: (scores.float() - scores[-2:].max()).exp(),
    ),
    "each": ("maximum_not_kept", "not the largest so far", of_each_tile),
}


@pytest.mark.parametrize(
    ("which", "has_lse"), [("none", True), ("first", True), ("first", False), ("last", False), ("each", True)]
)
def test_overflow_says_which_maximum_is_subtracted(which: str, has_lse: bool, plant: Any) -> None:
    """The maximum of the first split alone overflows as none does, and was looked for in the wrong line, if at all.

    That of the last tile would be told as that of each.
    """
    cause, words, exp = MAXIMA[which]
    supports = attnfuzz.Supports() if has_lse else attnfuzz.Supports(lse="none")
    kernel = plant(weights=lambda scores: exp(scores) / exp(scores).sum(), supports=supports)
    found = []
    shapes: Any = (("rising", 5), ("falling", 70))
    for keys, length in shapes:
        values: Any = Values(keys=keys, values="positions", logit_exponent=8)
        shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "float16"}
        case = DenseDecodeCase(**shape, seq_lens=(length,), values=values)
        failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
        found += [] if failure is None else [failure]
    assert found
    for failure in found:
        assert failure.cause == cause
        assert words in failure.message
        assert ("perhaps" in failure.message) is not bool(cause)


def test_places_that_fill_a_tile_are_told_with_their_score(plant: Any) -> None:
    """-30 in place of -inf behind the last key would be three bugs: a rounding, small weights and another maximum."""

    def with_others(scores: Tensor) -> Tensor:
        return torch.cat((scores, scores.new_full((-len(scores) % 16,), -30.0)))

    kernel = plant(
        weights=lambda scores: with_others(scores).softmax(0)[: len(scores)],
        lse=lambda scores: with_others(scores).logsumexp(0),
    )
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "float16"}
    for exponent in (3, 6):
        values: Any = Values(keys="negative", logit_exponent=exponent)
        case = DenseDecodeCase(**shape, seq_lens=(3,), values=values)
        failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
        assert failure is not None
        assert ("hidden_keys", "-30, tiles of 16") in {(one.mistake, one.way) for one in failure.causes}


@pytest.mark.by_day("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_another_16_bit_type_are_named(dtype: str, plant: Any) -> None:
    """A cast for float16 models was told as TF32, as float8, as 16-bit sums and as lost tokens: three findings."""
    kernel = plant(
        weights=lambda scores: (scores - scores.max()).exp(),
        average=lambda weights, v: weights.half().float() @ v / weights.sum(),
    )
    found = failures(kernel, dtype, shapes=slice(1, None))
    assert len(found) >= (8 if dtype == "float32" else 1)
    of_weights = [{one.mistake for one in failure.causes} >= {"weights_rounded"} for failure in found]
    assert sum(of_weights) >= 0.9 * len(found), [failure.message for failure in found]
    assert {failure.cause for failure in found} <= {"weights_rounded", "tf32", ""}


IN_FLOAT16: dict[str, Any] = {
    "V": lambda weights, v: weights @ v.half().float(),
    "unnormalised sums": lambda weights, v: (4 * weights @ v).half().float() / 4,
    "output": lambda weights, v: (weights @ v).half().float(),
}


@pytest.mark.parametrize("what", IN_FLOAT16)
@pytest.mark.by_day("output")
def test_float16_on_the_way_of_bfloat16_is_told_where_numbers_are_tiny(what: str, plant: Any) -> None:
    """Partial results in float16 give zeros, and nothing else is wrong: of ordinary numbers float16 has more bits."""
    shape: Any = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "bfloat16"}
    kernel = plant(average=IN_FLOAT16[what])
    shapes: Any = (("normal", 5), ("equal", 1))
    for keys, length in shapes:
        values: Any = Values(keys=keys, values="small")
        case = DenseDecodeCase(**shape, seq_lens=(length,), values=values)
        failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
        assert failure is not None
        assert failure.cause == "range_of_float16"
        assert "is float16 on the way, where numbers below 3e-08 are 0" in failure.message
        assert "perhaps" not in failure.message


@pytest.mark.parametrize("hidden", [-1e4, -5e4 * math.log(2), -5e4 * 0.25])
def test_masked_keys_with_a_finite_score_are_named(hidden: float, plant: Any) -> None:
    """Of FlashInfer's -5e4, rows that average what is masked were a second bug, of small numbers from nowhere."""

    def weights(scores: Tensor) -> Tensor:
        return scores.softmax(0) if scores.max() > hidden else torch.full_like(scores, 1 / 48)

    def lse(scores: Tensor) -> Tensor:
        return scores.logsumexp(0) if scores.max() > hidden else torch.tensor(hidden + math.log(47))

    kernel = plant(weights=weights, lse=lse)
    values: Any = Values(keys="negative", values="integers", logit_exponent=8)
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "float16"}
    failure = judge(
        kernel,
        DenseDecodeCase(**shape, seq_lens=(3,), values=values),
        device="cpu",
        oracles=("accuracy",),
        relations=(),
    ).failure
    assert failure is not None
    assert failure.cause == "maximum_begins_finite"


def by_tiles(tile: int, *, of_sum: Any = None, of_v: Any = None) -> dict[str, Any]:
    """Online softmax as kernels write it, with sums of their own dtypes."""

    def sums(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top, total = torch.tensor(-torch.inf), torch.tensor(0.0, dtype=of_sum or torch.float32)
        out = torch.zeros(v.shape[1], dtype=of_v or torch.float32)
        for start in range(0, len(v), tile):
            part = scores[start : start + tile]
            higher = torch.maximum(top, part.max())
            p, rescale = (part - higher).exp(), (top - higher).exp()
            total = (total.float() * rescale + p.sum()).to(total.dtype)
            out = (out.float() * rescale + p @ v[start : start + tile].float()).to(out.dtype)
            top = higher
        return out.float(), total.float(), top

    def lse(scores: Tensor) -> Tensor:
        _, total, top = sums(scores, scores[:, None])
        return top + total.log()

    def average(scores: Tensor, v: Tensor) -> Tensor:
        out, total, _ = sums(scores, v)
        return out / total

    return {"weights": lambda scores: scores, "average": average, "lse": lse}


def without_maximum(scores: Tensor) -> Tensor:
    return scores.float().exp() / scores.float().exp().sum()


def converted(dtype: torch.dtype, *, k: bool = False, v: bool = False) -> dict[str, Any]:
    dots = lambda keys, q, scale: keys.to(dtype).float() @ q.float() * scale  # noqa: E731
    average = lambda weights, values: weights @ values.to(dtype).float()  # noqa: E731
    return ({"dots": dots} if k else {}) | ({"average": average} if v else {})


def flushed(*, v: bool = False, out: bool = False) -> dict[str, Any]:
    """Numbers below the smallest normal one of float16 are 0."""

    def cut(numbers: Tensor) -> Tensor:
        return torch.where(numbers.abs() < 2.0**-14, 0.0, numbers.float())

    return {"average": lambda weights, values: (cut if out else torch.clone)(weights @ (cut(values) if v else values))}


def of_partial_states(change: Any) -> dict[str, Any]:
    """Four splits, whose log-sum-exps are changed before they are merged."""

    def merged(scores: Tensor) -> tuple[Tensor, Tensor]:
        parts = scores.float().split(-(-len(scores) // 4))  # type: ignore[no-untyped-call]
        states = change(torch.stack([part.logsumexp(0) for part in parts])).float()
        shares = states.softmax(0)
        return torch.cat(
            [share * part.softmax(0) for share, part in zip(shares, parts, strict=True)]
        ), states.logsumexp(0)

    return {"weights": lambda scores: merged(scores)[0], "lse": lambda scores: merged(scores)[1]}


CAUSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sum of weights x V in 16 bits, by token": ("float16", "sums_rounded", by_tiles(1, of_v=torch.float16)),
    "sum of weights in 16 bits, by token": ("bfloat16", "sums_rounded", by_tiles(1, of_sum=torch.bfloat16)),
    "both sums": ("float16", "sums_rounded", by_tiles(1, of_sum=torch.float16, of_v=torch.float16)),
    "sum of weights in float16, of float32": ("float32", "sums_rounded", by_tiles(16, of_sum=torch.float16)),
    "partial LSE in 16 bits": ("float16", "partial_lse_rounded", of_partial_states(lambda lse: lse.half())),
    "partial LSE in base 2": ("float16", "partial_lse", of_partial_states(lambda lse: lse / math.log(2))),
    "tiles in bfloat16, of float16": ("float16", "sums_rounded", by_tiles(16, of_v=torch.bfloat16)),
    "K to bfloat16": ("float16", "converted", converted(torch.bfloat16, k=True)),
    "V to e4m3": ("bfloat16", "converted", converted(torch.float8_e4m3fn, v=True)),
    "K and V to float16, of float32": ("float32", "converted", converted(torch.float16, k=True, v=True)),
    "exp of whole scores": (
        "float16",
        "maximum_not_subtracted",
        {"weights": without_maximum, "lse": lambda scores: scores.exp().sum().log()},
    ),
}


@pytest.mark.night
@pytest.mark.parametrize("mistake", CAUSES)
def test_what_is_rounded_or_converted_on_the_way_is_named(mistake: str, plant: Any) -> None:
    """A maintainer would be told a wrong number, and look for a wrong address."""
    dtype, cause, steps = CAUSES[mistake]
    found = []
    exponents = (0, 1) if "base" in mistake else (0, 3, 6)  # of a row that one part gives, the LSE alone is in base 2
    for seed, case in enumerate(cases(dtype, exponents)):
        case = msgspec.structs.replace(
            case,
            num_q_heads=8,
            seq_lens=tuple(40 * length for length in case.seq_lens),
            values=msgspec.structs.replace(case.values, seed=seed),
        )
        failure = judge(plant(**steps), case, device="cpu", oracles=("accuracy",), relations=()).failure
        found += [failure] if failure is not None else []
    named = [failure for failure in found if cause in (failure.cause, *failure.maybe)]
    assert len(found) >= 4, len(found)
    share = 0.7 if "base" in mistake else 0.8  # the number of splits is fitted, so two more rows must agree
    assert len(named) >= share * len(found), [failure.message for failure in found if failure.cause != cause]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_output_of_fewer_bits_is_named_whatever_is_rounded_before(dtype: str, plant: Any) -> None:
    """A cast to bfloat16 before the store would be told as sums in 16 bits, at the line of a product that is right."""

    def stored(weights: Tensor, v: Tensor) -> Tensor:
        sums = weights.to(getattr(torch, dtype)).float() @ v
        return (sums * (1 + 1e-4)).bfloat16().float()

    found = failures(plant(average=stored), dtype, (0,), shapes=slice(1))
    named = [one for one in found if "the output is rounded to bfloat16 before it is stored" in one.message]
    assert len(found) >= 3
    assert named == found, [one.message for one in found if one not in named]


@pytest.mark.night
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_of_rounded_weights_is_named_where_it_is_declared_away(dtype: str, plant: Any) -> None:
    """A kernel that summed in float32 until a change would be told wrong scores, or a 16-bit exp2."""
    rounded = getattr(torch, dtype)

    def lse(scores: Tensor) -> Tensor:
        return scores.max() + (scores - scores.max()).exp().to(rounded).float().sum().log()

    kernel = plant(lse=lse, numerics=attnfuzz.Numerics(row_sum="float32"))
    found = failures(kernel, dtype, shapes=TWO)
    named = [one for one in found if "before they are summed" in one.message and one.cause == "rounded_weights_summed"]
    assert len(found) >= 4
    assert len(named) >= 0.8 * len(found), [one.message for one in found if one not in named]
    assert all(one.designs[0] == {"row_sum": "input"} for one in named)
    assert not failures(plant(lse=lse), dtype, shapes=TWO)


@pytest.mark.parametrize("part", ["v", "out"])
@pytest.mark.by_day("v")
def test_what_is_taken_for_0_is_named(part: str, plant: Any) -> None:
    """A maintainer would look for a lost token where subnormal numbers are."""
    found = []
    for case in cases("float16", (0,), shapes=slice(1)):
        case = msgspec.structs.replace(case, values=msgspec.structs.replace(case.values, values="small"))
        failure = judge(
            plant(**flushed(**{part: True})), case, device="cpu", oracles=("accuracy",), relations=()
        ).failure
        found += [failure] if failure is not None else []
    assert len(found) >= 3
    named = [failure for failure in found if "flushed" in {one.mistake for one in failure.causes}]
    assert len(named) >= 0.8 * len(found), [failure.message for failure in found if failure not in named]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.by_day("float16")
def test_a_row_that_is_not_read_is_no_rounding(dtype: str, plant: Any) -> None:
    """A loop that ends too early would be told once more as numbers that are taken for 0, and as sums in 16 bits."""

    def alone(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        del lse
        return torch.zeros_like(out)

    kernel = plant(after=alone, supports=attnfuzz.Supports(lse="none"))
    for case in cases(dtype, (0,), shapes=slice(1)):
        case = msgspec.structs.replace(case, values=msgspec.structs.replace(case.values, values="small"))
        failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
        assert failure is not None
        assert not mistake_of(failure.cause).is_everywhere, failure.message


OTHERS: dict[str, dict[str, Any]] = {
    "the last token is dropped": {"length": lambda n: n - 1},
    "the scores are off by a hundredth": {"score": lambda scores: 1.01 * scores},
    "the LSE has base 2": {"lse": lambda scores: scores.logsumexp(0) / math.log(2)},
    "a token counts twice": {"score": lambda scores: scores + math.log(2) * (torch.arange(len(scores)) == 0)},
    "the output is not divided": {"weights": lambda scores: (scores - scores.max()).exp()},
    "exp in base 2": {"score": lambda scores: math.log(2) * scores},
}


@pytest.mark.night
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mistake", OTHERS)
def test_other_mistakes_are_not_blamed_on_rounding(mistake: str, dtype: str, plant: Any) -> None:
    """A dropped token would be told as a matter of precision, and be declared away."""
    found = failures(plant(**OTHERS[mistake]), dtype)
    blamed = [failure for failure in found if mistake_of(failure.cause).is_everywhere]
    assert len(found) >= 10
    assert len(blamed) <= 0.1 * len(found), [failure.message for failure in blamed]  # a bfloat16 has three digits


def with_rounded_products(inputs: Any) -> Tensor:
    """Decode over pages with a sink, where products of q and k are rounded before they are summed."""
    out = torch.zeros_like(inputs.q)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        pages = inputs.block_table[seq].long()
        k, v = (cache[pages].flatten(0, 1)[:length, 0] for cache in (inputs.k_cache, inputs.v_cache))
        for head, sink in enumerate(inputs.sinks.float()):
            scores = ROUNDED["products"](k, inputs.q[seq, head], inputs.scale)
            weights = torch.cat((scores, sink[None])).softmax(0)[:-1]
            out[seq, head] = (weights @ v.float()).to(out.dtype)
    return out


@pytest.mark.parametrize("seed", [0, 9])
def test_rounded_scores_beside_a_sink_that_outweighs_them_are_named(seed: int) -> None:
    """A number would be fitted to it, and told as a fact: "0.0034 is added to the sum of the weights"."""
    supports = attnfuzz.Supports(lse="none", variants=("sinks",))
    kernel = attnfuzz.kernel("paged_decode", supports=supports)(with_rounded_products)
    case = PagedDecodeCase(
        num_q_heads=1,
        num_kv_heads=1,
        head_size=16,
        dtype="float16",
        seq_lens=(4,),
        block_size=4,
        scale=0.25,
        values=Values(keys="fine", values="normal", logit_exponent=4, seed=seed),
        variant=Variant(sinks="high"),
    )
    failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
    assert failure is not None
    assert failure.cause == "scores_rounded"


@pytest.mark.parametrize(("length", "seed"), [(9, 2), (19, 0)])
def test_a_sum_that_is_too_large_by_something_else_each_time_begins_at_no_finite_number(
    length: int, seed: int, plant: Any, failure_of: Any
) -> None:
    """Of low scores any sum that is too large looks as if the maximum began at a number, of this row's own."""

    def run(scores: Tensor) -> tuple[float, Tensor]:
        """The maximum of the last tile of 8 that is far above, and the sum of the weights, which is not rescaled."""
        kept, total = -torch.inf, torch.zeros(())
        for tile in torch.split(scores, 8):
            kept = float(tile.max()) if float(tile.max()) - kept > 5.5 else kept
            total = total + (tile - kept).exp().sum()
        return kept, total

    def weights(scores: Tensor) -> Tensor:
        kept, total = run(scores)
        return (scores - kept).exp() / total

    def lse(scores: Tensor) -> Any:
        kept, total = run(scores)
        return kept + total.log()

    values = Values(keys="negative", values="normal", logit_exponent=4, seed=seed)
    case = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(length,), scale=0.25, values=values)
    failure = failure_of(plant(weights=weights, lse=lse), case)
    assert "maximum_begins_finite" not in {one.mistake for one in failure.causes}
    assert "begins at a finite number" not in failure.message
