"""Mistakes with the scales of an 8-bit cache are named, and right rows are not accused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attnfuzz.explaining.diagnose import given_by_all
from attnfuzz.explaining.explain import explain_case
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.inputs.reference import row_weights
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, Variant
from attnfuzz.values import attention_values
from tests.oracles.conftest import paged_tokens

SMALL = torch.full((16,), 1e-6, dtype=torch.float64)


def told(row: AttentionRow) -> set[str]:
    """All that would give this row."""
    return {one.words for one in given_by_all([row])}


def row_that_got(k_scale: Any, v_scale: Any, *, read_as: str | None = None, variant: Variant = PLAIN_VARIANT) -> Any:
    """A row of query head 2, on KV head 1, of a kernel that takes these scales: functions of those of K and of V."""
    case = PagedDecodeCase(
        num_q_heads=4,
        num_kv_heads=2,
        head_size=16,
        seq_lens=(9,),
        scale=0.25,
        block_size=4,
        values=Values(keys="integers", values="normal", seed=5),
        variant=variant,
        kv=QuantisedKv(dtype="float8_e4m3fn", per="head", scales="scattered"),
    )
    values = attention_values(case)
    assert values.kv_scales is not None
    k, v = values.sequence(0)
    if read_as is not None:
        k, v = (part.to(torch.float8_e4m3fn).view(getattr(torch, read_as)).float() for part in (k, v))
    of_k, of_v = values.kv_scales.tolist()
    dots = case.scale * k_scale(of_k, of_v) * (k[:, 1].double() @ values.q[0, 2].double())
    weights, lse = row_weights(case, 0, 2, dots)
    return AttentionRow(
        case=case,
        values=values.dequantised(),
        kv_scales=values.kv_scales,
        row=0,
        head=2,
        got=weights @ v[:, 1].double() * v_scale(of_k, of_v),
        got_lse=float(lse),
        bound=SMALL,
        lse_bound=1e-7,
        poison=0.0,
    )


MISTAKES: list[tuple[Any, Any, str]] = [
    (lambda k, v: 1.0, lambda k, v: 1.0, "the scales of K and V are left out"),
    (lambda k, v: 1.0, lambda k, v: v[1], "the scale of K is left out"),
    (lambda k, v: k[1], lambda k, v: 1.0, "the scale of V is left out"),
    (lambda k, v: v[1], lambda k, v: k[1], "the scales of K and V are swapped"),
    (lambda k, v: k[1] ** 2, lambda k, v: v[1], "the scale of K is applied twice"),
    (lambda k, v: k[1], lambda k, v: v[1] ** 2, "the scale of V is applied twice"),
    (lambda k, v: k[1], lambda k, v: 1 / v[1], "V is divided by its scale"),
    (lambda k, v: v[1], lambda k, v: v[1], "K is multiplied with the scale of V"),
    (lambda k, v: k[0], lambda k, v: v[0], "KV head 1 is read with the scales of KV head 0"),
    (lambda k, v: k[0], lambda k, v: v[1], "KV head 1 is read with the scale of K of KV head 0"),
]


@pytest.mark.parametrize("variant", [PLAIN_VARIANT, Variant(sinks="level", window=5)], ids=["plain", "variant"])
@pytest.mark.parametrize(("k_scale", "v_scale", "words"), MISTAKES, ids=[words for *_, words in MISTAKES])
@pytest.mark.by_day("*-variant")
def test_a_wrong_scale_is_named(k_scale: Any, v_scale: Any, words: str, variant: Variant) -> None:
    """Whoever has to repair the kernel would have to guess which scale is wrong."""
    assert words in told(row_that_got(k_scale, v_scale, variant=variant))


def test_a_soft_cap_before_the_scale_of_k_is_named() -> None:
    """Weights that are wrong somehow would not say that the scale stands on the wrong side of the cap."""
    right = row_that_got(lambda k, v: k[1], lambda k, v: v[1], variant=Variant(soft_cap=1.0))
    of_k = right.kv_scales[0, 1]
    scores = torch.tanh(right.scores / of_k) * of_k
    out, lse = right.given(scores, case=msgspec.structs.replace(right.case, variant=PLAIN_VARIANT))
    assert told(replace(right, got=out, got_lse=lse)) == {"the soft cap is applied before the scale of K"}


def test_a_page_that_is_read_without_its_scale_is_named() -> None:
    """A partial page with code of its own would be shown as weights that are too large."""
    right = row_that_got(lambda k, v: k[1], lambda k, v: v[1])
    v = right.v.clone()
    v[8:] /= right.kv_scales[1, 1]
    wrong = replace(right, got=right.shares @ v)
    assert "token 8 (page 2, offset 0) of sequence 0 is read without the scales of the cache, for V alone" in told(
        wrong
    )


@pytest.mark.parametrize(("of_v", "words"), [(0, "is left out"), (2, "is applied twice")])
def test_measured_weights_say_which_scale_is_a_factor_of_all(of_v: int, words: str, plant: Any) -> None:
    """Weights that are right would be told to be some number times the right ones."""

    def tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        k, v = (part.float() for part in paged_tokens(inputs, seq, n, kv_head))
        return k * inputs.k_scale, v * inputs.v_scale**of_v

    case = PagedDecodeCase(
        num_q_heads=1,
        num_kv_heads=1,
        head_size=16,
        seq_lens=(9,),
        scale=0.25,
        block_size=4,
        kv=QuantisedKv(dtype="float8_e4m3fn", per="tensor", scales="powers"),
    )
    lines = explain_case(plant("paged_decode", tokens=tokens), case, device="cpu", seconds=60.0).lines
    assert any(line.startswith("the weights are right, but the scale of V, ") and words in line for line in lines)


def test_a_scale_that_is_left_out_of_one_kv_head_is_told_apart_from_that_of_the_other_tensor(
    plant: Any, failure_of: Any
) -> None:
    """A path for one KV head without V's scale would be told to leave out K's as well, of which nothing is wrong."""

    def tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        k, v = (part.float() for part in paged_tokens(inputs, seq, n, kv_head))
        of_v = 1.0 if inputs.k_cache.shape[2] == 1 else inputs.v_scale
        return k * inputs.k_scale, v * of_v

    kernel = plant("paged_decode", tokens=tokens, supports=Supports(layouts=("NHD",), kv_dtypes=("float8_e4m3fn",)))
    case = PagedDecodeCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1,), scale=0.25, block_size=1,
        kv=QuantisedKv(dtype="float8_e4m3fn", scales="powers"),
    )  # fmt: skip
    failure = failure_of(kernel, case)
    assert {one.mistake for one in failure.causes} == {"v_scale"}
    assert "; the scale of V is left out" in failure.message


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fnuz"])
def test_a_cache_read_in_another_format_is_named(dtype: str) -> None:
    """Wrong numbers everywhere would be blamed on keys."""
    row = row_that_got(lambda k, v: k[1], lambda k, v: v[1], read_as=dtype)
    assert f"the cache is read as {dtype}" in told(row)


def test_a_wrong_lse_beside_a_right_output_is_named() -> None:
    """An LSE from unscaled keys would be reported as a number."""
    right = row_that_got(lambda k, v: k[1], lambda k, v: v[1])
    with_one_key = replace(right, case=replace_lengths(right.case))
    wrong = float(with_one_key.case.scale * (with_one_key.k[0] @ with_one_key.q) / with_one_key.kv_scales[0, 1])
    assert "the scale of K is left out" in told(replace(with_one_key, got=with_one_key.v[0], got_lse=wrong))


def test_a_maximum_without_the_scale_of_k_is_named() -> None:
    """Scores that are right would be told to be halved, or a scale to be left out that is not."""
    right = row_that_got(lambda k, v: k[1], lambda k, v: v[1])
    wrong = right.lse - right.top + right.top / float(right.kv_scales[0, 1])
    assert "the maximum in lse lacks the scale of K" in told(replace(right, got_lse=wrong))


def replace_lengths(case: PagedDecodeCase) -> PagedDecodeCase:
    return PagedDecodeCase(**{name: getattr(case, name) for name in case.__struct_fields__} | {"seq_lens": (1,)})


def test_other_mistakes_are_still_named() -> None:
    """A dropped token would be blamed on scales, or on nothing."""
    right = row_that_got(lambda k, v: k[1], lambda k, v: v[1])
    weights, lse = row_weights(right.case, 0, 2, right.scores[:-1])
    found = told(replace(right, got=weights @ right.v[:-1], got_lse=float(lse)))
    assert found == {"token 8 (page 2, offset 0) of sequence 0 is dropped"}
