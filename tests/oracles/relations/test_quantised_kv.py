"""Relations on cases with an 8-bit cache: scales go where K and V go, and right kernels are not accused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import attnfuzz
from attnfuzz.declaration import Declaration, Kernel, load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.kernels import eager
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.quantised_kv import KV_DTYPES, KvDtype, KvGranularity, QuantisedKv
from attnfuzz.problems.recipes import Pages, Values

INSIDE = tuple(name for name in DEFAULT_ORACLES if name not in ("guard_page", "page_relocation"))
BY_BOUNDS: tuple[OracleName, ...] = ("layout", "repaging", "gqa_expansion", "compose")
SUPPORTS = attnfuzz.Supports(unused_table_entries="garbage", kv_dtypes=KV_DTYPES)


def paged(kv_dtype: KvDtype = "float8_e4m3fn", per: KvGranularity = "head", **fields: Any) -> PagedDecodeCase:
    base: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "seq_lens": (9, 0, 6), "scale": 0.25}
    base |= {"values": Values(keys="normal", values="normal", seed=3), "pages": Pages(order="shuffled", spare_blocks=2)}
    kv = QuantisedKv(dtype=kv_dtype, per=per, scales="scattered")
    return PagedDecodeCase(**{**base, "block_size": 4, "kv": kv, **fields})


def kernel(after: Callable[..., Any] = lambda inputs, out, lse: (out, lse), **declared: Any) -> Kernel:
    """A right kernel but for what comes ``after``."""

    def function(inputs: Any) -> Any:
        names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "scale", "block_size", "layout")
        given = {name: getattr(inputs, name) for name in names}
        out, lse = eager.paged_decode(**given, k_scale=inputs.k_scale, v_scale=inputs.v_scale)
        return after(inputs, out, lse)

    numerics = declared.pop("numerics", attnfuzz.Numerics(probabilities="float32", partials="float32", matmul="ieee"))
    declaration = Declaration(name="planted", problem="paged_decode", supports=SUPPORTS, numerics=numerics, **declared)
    return Kernel(function, declaration)


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_no_relation_accuses_a_right_kernel(dtype: KvDtype, per: KvGranularity) -> None:
    """A false alarm: K and V of the changed case were read with other scales, or with none."""
    right, case = load_kernels("paged_eager")[0], paged(dtype, per)
    assert judge(right, case, device="cpu", oracles=INSIDE, relations="all").failure is None
    assert judge(right, case, device="cpu", oracles=BY_BOUNDS, relations=BY_BOUNDS).failure is None


def test_v_is_scaled_by_its_scale() -> None:
    """Powers of two times V, which float8 does not hold, would make another case or none; a clamp would pass."""
    clamped = kernel(lambda inputs, out, lse: (out.clamp(-4096, 4096), lse))
    case = paged("float8_e5m2", dtype="bfloat16")
    failure = judge(clamped, case, device="cpu", relations=("value_affinity",)).failure
    assert failure is not None
    assert "with V times -1 and its scale times 2**" in failure.message
    assert "the scale of V" not in failure.message


@pytest.mark.parametrize(
    ("times", "words"),
    [(-1, "the scale of V makes no difference"), (1, "the result grows as the square of the scale of V")],
)
def test_a_scale_of_v_that_is_left_out_or_counted_twice_is_named(times: int, words: str) -> None:
    """A scale of 1 hides it from accuracy, so that the relation would tell it as a bug of its own."""
    wrong = kernel(lambda inputs, out, lse: (out * inputs.v_scale[0] ** times, lse))
    one = QuantisedKv(dtype="float8_e4m3fn", per="tensor", scales="one")
    case = paged(dtype="bfloat16", kv=one)
    failure = judge(wrong, case, device="cpu", relations=("value_affinity",)).failure
    assert failure is not None
    assert failure.cause == "v_scale"
    assert failure.message.endswith(words)


def test_scales_of_expanded_heads_are_those_of_their_heads() -> None:
    """A kernel that is wrong for many scales would pass: the expanded case would have as few as before."""

    def by_head_count(inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> Any:
        return (out * 2 if len(inputs.k_scale) == 4 else out), lse

    case = msgspec.structs.replace(paged(), seq_lens=(9, 3))
    failure = judge(
        kernel(by_head_count), case, device="cpu", oracles=("gqa_expansion",), relations=("gqa_expansion",)
    ).failure
    assert failure is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.by_day("float16")
def test_a_kernel_that_rounds_what_the_cache_stands_for_may_say_so(dtype: Any) -> None:
    """vLLM's way of writing it would be accused: by accuracy, or by value_affinity of float16's subnormal numbers."""

    def rounded(inputs: Any) -> Any:
        scales = (scale.expand(2)[:, None] for scale in (inputs.k_scale, inputs.v_scale))
        caches = (inputs.k_cache, inputs.v_cache)
        k, v = ((cache.float() * scale).to(inputs.q.dtype) for cache, scale in zip(caches, scales, strict=True))
        given = {name: getattr(inputs, name) for name in ("block_table", "seq_lens", "scale", "block_size", "layout")}
        return eager.paged_decode(inputs.q, k, v, **given)

    supports = attnfuzz.Supports(unused_table_entries="garbage", kv_dtypes=KV_DTYPES, layouts=("NHD",))
    declared = attnfuzz.Numerics(probabilities="float32", partials="float32", matmul="ieee", dequantised="input")
    declaration = Declaration(name="rounding", problem="paged_decode", supports=supports, numerics=declared)
    for kv_dtype in KV_DTYPES:
        for values in (Values(keys="fine", values="fine", seed=3), Values(keys="fine", values="normal", seed=3)):
            case = paged(kv_dtype, dtype=dtype, values=values)
            verdict = judge(Kernel(rounded, declaration), case, device="cpu", oracles=INSIDE, relations="all")
            assert verdict.failure is None
    strict = msgspec.structs.replace(declaration, numerics=attnfuzz.Numerics(matmul="ieee"))
    case = paged(dtype=dtype, seq_lens=(1, 2))
    failure = judge(Kernel(rounded, strict), case, device="cpu", relations=()).failure
    assert failure is not None
    assert failure.oracle == "accuracy"


def test_a_cache_read_past_its_end_is_dead_memory() -> None:
    """NaN of an 8-bit cache would be a number in the oracle's eyes."""

    def stray(inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> Any:
        last = inputs.v_cache[inputs.block_table[0, 2].long(), 3, 0, 0].float()  # page 2 holds one token of sequence 0
        return out + 0 * last, lse

    failure = judge(kernel(stray), paged(), device="cpu", relations=()).failure
    assert failure is not None
    assert failure.oracle == "dead_memory"
