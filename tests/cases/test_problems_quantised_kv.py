"""8-bit caches: what a case may ask for, the scales that belong to it, and the reference by its definition."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.cases.features import InputSpace, features
from attnfuzz.cases.supported import why_unsupported
from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.inputs.layouts import token_views
from attnfuzz.inputs.reference import attention_reference
from attnfuzz.inputs.registry import problem_of
from attnfuzz.problems.cases import DenseDecodeCase, PagedDecodeCase, decode_case, encode_case
from attnfuzz.problems.choices import strided_tensors_of
from attnfuzz.problems.quantised_kv import QuantisedKv, smallest_magnitudes
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import LAYOUTS, Supports
from attnfuzz.values import attention_values
from tests.common.named_features import words

SHAPE: dict[str, Any] = {"num_q_heads": 6, "num_kv_heads": 3, "head_size": 16, "seq_lens": (4, 0, 7), "scale": 0.7}
PER_HEAD = QuantisedKv(dtype="float8_e4m3fn", per="head", scales="scattered")
EVERYTHING = Supports(kv_dtypes=("float8_e4m3fn", "float8_e5m2"))


def paged(kv: QuantisedKv | None = PER_HEAD, **fields: Any) -> PagedDecodeCase:
    values = Values(keys="normal", values="normal", seed=1)
    return PagedDecodeCase(**{**SHAPE, "block_size": 4, "values": values, "kv": kv} | fields)


def test_a_plain_case_says_nothing_of_its_cache() -> None:
    """Saved cases would change, or be replayed with other scales."""
    assert decode_case("paged_decode", encode_case(paged())) == paged()
    assert b"kv" not in encode_case(paged(None)).replace(b"num_kv_heads", b"")
    assert not {"k_scale", "v_scale"} & set(tensor_specs(paged(None)))


def test_dense_decode_has_no_cache() -> None:
    """Its format would be ignored silently."""
    with pytest.raises(ValueError, match="no cache; use paged_decode"):
        DenseDecodeCase(**SHAPE, kv=PER_HEAD)


def test_packed_heads_are_made_of_16_bytes() -> None:
    """A head of 24 would be cut into pieces of 16 with 8 left over."""
    assert tensor_specs(paged(layout="packed"))["k_cache"].shape[-1] == 16
    with pytest.raises(ValueError, match=r"multiple of 16 \(16 bytes of float8_e4m3fn\)"):
        paged(layout="packed", head_size=24)


@pytest.mark.parametrize(
    ("supports", "words"),
    [
        (Supports(), r"kv.dtype='float8_e4m3fn', but the kernel declares kv_dtypes=()"),
        (Supports(kv_dtypes=("float8_e5m2",)), "kv.dtype='float8_e4m3fn', but"),
        (
            Supports(kv_dtypes=("float8_e4m3fn",), kv_scales=("tensor",)),
            "kv.per='head', but the kernel declares kv_scales=('tensor',)",
        ),
    ],
    ids=["nothing", "another format", "per tensor"],
)
def test_a_kernel_is_not_replayed_on_what_it_does_not_declare(supports: Supports, words: str) -> None:
    """`attnfuzz replay` would blame a kernel for a cache that it never promised to read."""
    assert words in (why_unsupported(supports, {}, paged()) or "")
    assert why_unsupported(EVERYTHING, {}, paged()) is None


def test_scales_differ_where_a_mistake_should_show() -> None:
    """A scale of 1, or the same for K and V or for all heads, could be left out or mixed up unseen."""
    for seed in range(20):
        scales = PER_HEAD.head_scales(3, seed)
        assert len({1.0, *scales.k, *scales.v}) == 7
        powers = QuantisedKv(dtype="float8_e5m2", scales="powers").head_scales(3, seed)
        assert powers.k == powers.k[:1] * 3
        assert 1.0 not in powers.k + powers.v
    assert QuantisedKv(dtype="float8_e5m2", per="head").head_scales(2, 5) == ((1.0, 1.0), (1.0, 1.0))


def test_scales_are_float32_numbers_with_all_bits() -> None:
    """The reference would use other scales than the kernel, or a kernel that rounds them to float16 be right."""
    drawn = [scale for seed in range(50) for part in PER_HEAD.head_scales(3, seed) for scale in part]
    exact = torch.tensor(drawn, dtype=torch.float64)
    assert torch.equal(exact.float().double(), exact)
    assert (exact.half().double() != exact).float().mean() > 0.9
    assert min(drawn) >= 1 / 16
    assert max(drawn) < 8


def test_wide_scales_reach_what_calibration_gives_and_stay_within_float16() -> None:
    """Scales of real caches, near 2^-9, would never be met; or a cache stand for what no float16 ever held."""
    wide = QuantisedKv(dtype="float8_e4m3fn", per="head", scales="wide")
    drawn = [scale for seed in range(200) for part in wide.head_scales(3, seed) for scale in part]
    assert 2**-12 <= min(drawn) < 2**-11
    assert 2**8 < max(drawn) < 2**9
    assert all(any(2.0**e <= scale < 2.0 ** (e + 1) for scale in drawn) for e in range(-12, 9) if e != -1)
    for seed in range(30):
        for recipe in ("fine", "large", "positions"):
            case = paged(wide)
            values = msgspec.structs.replace(case.values, values=recipe, seed=seed)
            exact = attention_values(msgspec.structs.replace(case, values=values)).dequantised()
            assert float(torch.maximum(exact.k.abs().max(), exact.v.abs().max())) <= 65504


def test_scales_of_saved_cases_stay_what_they_are() -> None:
    """A saved case would be replayed with other numbers."""
    assert PER_HEAD.head_scales(2, 7) == (
        (0.11145734041929245, 1.781378149986267),
        (0.16531504690647125, 3.462858200073242),
    )


def test_smallest_magnitudes() -> None:
    """The bound would count on digits that a subnormal number does not have."""
    assert smallest_magnitudes(PER_HEAD, QuantisedKv(dtype="float8_e4m3fn").head_scales(1, 0)) == (2**-9, 2**-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_holds_what_the_reference_reads(layout: Any) -> None:
    """A kernel would be judged against another cache than it was given."""
    case = paged(layout=layout)
    values = attention_values(case)
    inputs = problem_of(case).build(case, PlainAllocator(), EVERYTHING, values)
    k_slots, v_slots = token_views(inputs.k_cache, inputs.v_cache, layout)
    assert inputs.k_cache.dtype == inputs.v_cache.dtype == torch.float8_e4m3fn
    assert (inputs.q.dtype, inputs.k_scale.shape, inputs.v_scale.shape) == (torch.float16, (3,), (3,))
    page = int(inputs.block_table[2, 1])
    k, v = k_slots[page, 2].double().view(3, 16), v_slots[page, 2].double()
    exact = values.dequantised().sequence(2)
    assert torch.equal(k * inputs.k_scale.double()[:, None], exact[0][6])
    assert torch.equal(v * inputs.v_scale.double()[:, None], exact[1][6])
    assert values.dequantised().dequantised() is not values


def test_one_scale_for_the_whole_cache_is_a_tensor_of_one_element() -> None:
    """Kernels that take vLLM's scales would be given a tensor of another shape."""
    kv = QuantisedKv(dtype="float8_e5m2", scales="powers")
    case = paged(kv)
    inputs = problem_of(case).build(case, PlainAllocator(), EVERYTHING)
    assert (inputs.k_scale.tolist(), inputs.v_scale.tolist()) == tuple(list(part[:1]) for part in kv.head_scales(3, 1))


def test_reference_by_definition() -> None:
    """Every verdict on an 8-bit cache would rest on other keys and values."""
    case = paged()
    values = attention_values(case)
    expected = attention_reference(case, values)
    scales = PER_HEAD.head_scales(3, 1)
    for head in range(6):
        k, v = (part[:, head // 2].double() for part in values.sequence(2))
        scores = 0.7 * (k * scales.k[head // 2]) @ values.q[2, head].double()
        torch.testing.assert_close(expected.out[2, head], scores.softmax(0) @ (v * scales.v[head // 2]))
        torch.testing.assert_close(expected.lse[2, head], scores.logsumexp(0))


def test_features_name_the_cache() -> None:
    """Bugs that need scales and bugs that need 8 bits would have one signature."""
    plain = features(paged(None))
    assert words(features(paged()) - plain) == {"fp8 cache", "scale per head", "scales", "scales not pow2"}
    assert words(features(paged(QuantisedKv(dtype="float8_e5m2"))) - plain) == {"fp8 cache", "kv=float8_e5m2"}


def test_the_input_space_has_caches_of_kernels_that_read_them() -> None:
    """A campaign would not say that it never tried a scale per head."""
    supports = Supports(kv_dtypes=("float8_e4m3fn",), layouts=("packed",), head_sizes=(40, 64))
    space = InputSpace("paged_decode", supports, {})
    levels = [level.level for level in space.levels if level.field == "cache"]
    assert levels == ["plain", "float8_e4m3fn per tensor", "float8_e4m3fn per head"]
    assert "cache" not in [level.field for level in InputSpace("paged_decode", Supports(), {}).levels]


def test_strides_of_scales_are_drawn_for_kernels_that_read_them() -> None:
    """A scale with a stride would never be tried, or its stride be tried on a kernel that has none."""
    assert {"k_scale", "v_scale"} <= set(strided_tensors_of("paged_decode", EVERYTHING))
    assert not {"k_scale", "v_scale"} & set(strided_tensors_of("paged_decode", Supports()))
