"""8-bit caches of the paged kernels: the definition, wherever scales lie, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels import eager, eager_attention
from attnfuzz.kernels.grouped import launch as launch_grouped
from attnfuzz.kernels.paged import launch as launch_paged
from attnfuzz.kernels.paged import launch_attention, launch_partitioned
from attnfuzz.kernels.q_block import launch as launch_q_block
from tests.kernels.arguments import made

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 4
LENGTHS = (0, 1, 7, 33)
SPLIT = {"num_splits": 3}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def per_head() -> tuple[Tensor, Tensor]:
    return torch.tensor([0.37, 5.2]), torch.tensor([3.3, 0.21])


def one_query_each() -> Tensor:
    return torch.arange(len(LENGTHS) + 1, dtype=torch.int32)


QUERIES: dict[str, Any] = {"cu_seqlens_q": one_query_each, "max_query_len": 1, "max_seq_len": 33}


def inputs(dtype: torch.dtype = E4M3, layout: str = "NHD") -> dict[str, Any]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    pages = [-(-length // PAGE) for length in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    for seq, count in enumerate(pages):
        table[seq, :count] = torch.arange(sum(pages[:seq]), sum(pages[: seq + 1]))
    shape = (sum(pages), PAGE, KV_HEADS, SIZE)
    k, v = ((2 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2))
    if layout == "packed":
        k, v = k.view(*shape[:3], 1, 16).permute(0, 2, 3, 1, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()
    return {
        "q": torch.randn(len(LENGTHS), HEADS, SIZE, generator=generator),
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "scale": 0.25,
        "block_size": PAGE,
        "layout": layout,
    }


def scaled() -> dict[str, Any]:
    k_scale, v_scale = per_head()
    return {"k_scale": k_scale, "v_scale": v_scale}


def by_definition(
    given: dict[str, Any], seq: int, head: int, k_scale: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor]:
    pages, kv_head = given["block_table"][seq].long(), head // 2
    k, v = (given[name].float()[pages].flatten(0, 1)[: LENGTHS[seq], kv_head] for name in ("k_cache", "v_cache"))
    k, v = (part.double() * scale[kv_head % len(scale)].double() for part, scale in ((k, k_scale), (v, v_scale)))
    scores = given["scale"] * (k @ given["q"][seq, head].double())
    if not len(scores):
        return torch.zeros(SIZE, dtype=torch.float64), torch.tensor(-torch.inf, dtype=torch.float64)
    return scores.softmax(0) @ v, scores.logsumexp(0)


def spread(scale: Tensor) -> Tensor:
    """The same numbers, every third of a larger tensor."""
    return scale.repeat_interleave(3)[1::3]


KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "triton": (launch_paged.paged_decode, {"tile": 16}),
    "triton split": (launch_paged.split_paged_decode, {**SPLIT, "tile": 16}),
    "triton queries": (launch_attention.paged_attention, {**QUERIES, "tile": 16}),
    "q block": (launch_q_block.q_block_attention, {**QUERIES, "num_segments": 1}),
    "q block segments": (launch_q_block.q_block_attention, {**QUERIES, "num_segments": 3, "static_grid": True}),
    "eager": (eager.paged_decode, {}),
    "eager split": (eager.split_paged_decode, SPLIT),
    "eager queries": (eager_attention.paged_attention, QUERIES),
}

PACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "v1": (launch_partitioned.paged_attention_v1, {}),
    "v2": (launch_partitioned.paged_attention_v2, {"partition_size": 12}),
}


@pytest.mark.parametrize(
    "arranged",
    [lambda scale: scale[:1], lambda scale: scale, spread],
    ids=["per tensor", "per head", "strided"],
)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.by_day("*-torch.float8_e4m3fn-per head", "triton-*")
def test_scales_are_their_definition(name: str, dtype: torch.dtype, arranged: Callable[[Tensor], Tensor]) -> None:
    """The kernels that 8-bit caches are demonstrated on would be wrong themselves."""
    kernel, more = KERNELS[name]
    given = inputs(dtype)
    k_scale, v_scale = (arranged(scale) for scale in per_head())
    out, lse = kernel(**given, **made(more), k_scale=k_scale, v_scale=v_scale)
    for seq in range(len(LENGTHS)):
        for head in range(HEADS):
            expected_out, expected_lse = by_definition(given, seq, head, k_scale, v_scale)
            torch.testing.assert_close(out[seq, head].double(), expected_out, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(lse[seq, head].double(), expected_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_matrix_units_take_the_dtype_of_q(num_splits: int, layout: str) -> None:
    """Weights would be rounded to 8 bits, or the cache's numbers not be scaled."""
    given = inputs(layout=layout)
    given["q"] = given["q"].half()
    k_scale, v_scale = per_head()
    out, lse = launch_grouped.grouped_decode(**given, num_splits=num_splits, tile=16, k_scale=k_scale, v_scale=v_scale)
    plain = {**inputs(), "q": given["q"]}
    for seq in range(len(LENGTHS)):
        for head in range(HEADS):
            expected_out, expected_lse = by_definition(plain, seq, head, k_scale, v_scale)
            torch.testing.assert_close(out[seq, head].double(), expected_out, rtol=4e-3, atol=4e-3)
            torch.testing.assert_close(lse[seq, head].double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["triton", "triton split", "eager", "eager split", "v1", "v2"])
def test_packed_caches_have_16_elements_to_a_piece(name: str) -> None:
    """Keys of the layout that PagedAttention's kernels read would be taken apart wrongly."""
    kernel, more = (KERNELS | PACKED)[name]
    scales = scaled()
    packed = inputs(layout="packed")
    if name in PACKED:
        del packed["layout"]
    torch.testing.assert_close(kernel(**packed, **more, **scales), eager.paged_decode(**inputs(), **scales))


def test_dead_slots_may_hold_nan() -> None:
    """A cache that was never written to would turn every result into NaN."""
    given = inputs()
    right = launch_paged.paged_decode(**given, **scaled())
    for name in ("k_cache", "v_cache"):
        given[name].view(torch.uint8)[given["block_table"][3, 8].long(), 1:] = 0xFF
    got = launch_paged.paged_decode(**given, **scaled())
    torch.testing.assert_close(got, right, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (lambda: {"v_scale": None}, "an 8-bit cache has k_scale and v_scale"),
        (lambda: {name: scale.repeat(2) for name, scale in scaled().items()}, r"must be \[1\] or \[num_kv_heads=2\]"),
        (lambda: {"k_scale": per_head()[0][:1]}, r"v_scale.shape=\[2\] must be \[num_kv_scales\]"),
        (lambda: {"k_scale": per_head()[0].half()}, "k_scale.dtype=torch.float16 must be torch.float32"),
        (
            lambda: {"v_cache": inputs(E5M2)["v_cache"]},
            "v_cache.dtype=torch.float8_e5m2 must be torch.float8_e4m3fn",
        ),
        (lambda: {name: inputs()[name].float() for name in ("k_cache", "v_cache")}, "and no other has"),
    ],
    ids=["one missing", "too many", "unequal", "half", "two formats", "plain cache"],
)
@pytest.mark.parametrize("module", [launch_paged, eager], ids=["triton", "eager"])
def test_scales_that_make_no_sense_are_refused(module: Any, changes: Callable[[], dict[str, Any]], words: str) -> None:
    """Scales would be read past their end, or left out without a word."""
    with pytest.raises(ValueError, match=words):
        module.paged_decode(**inputs() | scaled() | changes())


def test_kernels_without_scales_refuse_the_cache() -> None:
    """They would read it as it is, and be wrong by its scales."""
    given = inputs()
    given["q"] = given["q"].half()
    with pytest.raises(ValueError, match="pass both to a kernel that takes them"):
        launch_grouped.grouped_decode(**given)
