"""Builders: every live element is where the layout says, and nothing else is written.

Places are worked out here one element at a time from the shapes in the documentation, not with the builders' own views.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.inputs.registry import problem_of
from attnfuzz.problems.block_table import block_table_rows, physical_pages
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    LsePair,
    MergeStatesCase,
    PagedDecodeCase,
    SplitDecodeCase,
    packed_width,
)
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import DTYPES, LAYOUTS, Supports
from attnfuzz.values import attention_values, merge_values

NORMAL = Values(keys="normal", values="normal", seed=3)
SUPPORTS = Supports()


def attention(**more: Any) -> dict[str, Any]:
    base = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 8, "seq_lens": (5, 0, 9), "scale": 0.25}
    return base | {"values": NORMAL} | more


def paged(**more: Any) -> PagedDecodeCase:
    pages = Pages(order="shuffled", spare_blocks=2, shared_blocks=1, extra_columns=2, padding="wrong_page")
    return PagedDecodeCase(**attention(block_size=4, pages=pages) | more)


def written(tensor: Tensor) -> int:
    return int((~tensor.isnan()).sum())


def in_cache(case: PagedDecodeCase, cache: Tensor, which: str, place: tuple[int, int], head: int) -> Tensor:
    """One token's vector, element by element."""
    size = case.head_size if which == "k" else case.value_size
    return torch.stack([cache[index_in_cache(case, which, place, head, d)] for d in range(size)])


def index_in_cache(case: PagedDecodeCase, which: str, place: tuple[int, int], head: int, d: int) -> tuple[int, ...]:
    page, offset = place
    x = packed_width(case.dtype)
    if case.layout == "HND":
        return page, head, offset, d
    if case.layout == "packed":
        return (page, head, d // x, offset, d % x) if which == "k" else (page, head, d, offset)
    return page, offset, head, d


def check_cache(case: PagedDecodeCase, inputs: Any) -> None:
    values = attention_values(case)
    places = set()
    for seq, pages in enumerate(physical_pages(case)):
        k, v = values.sequence(seq)
        for position in range(case.seq_lens[seq]):
            place = (pages[position // case.block_size], position % case.block_size)
            places.add(place)
            for head in range(case.num_kv_heads):
                assert torch.equal(in_cache(case, inputs.k_cache, "k", place, head), k[position, head])
                assert torch.equal(in_cache(case, inputs.v_cache, "v", place, head), v[position, head])
    live = len(places) * case.num_kv_heads
    assert (written(inputs.k_cache), written(inputs.v_cache)) == (live * case.head_size, live * case.value_size)
    assert torch.equal(inputs.q, values.q)
    assert inputs.seq_lens.tolist() == list(case.seq_lens)
    assert inputs.block_table.tolist() == [list(row) for row in block_table_rows(case)]
    assert (inputs.seq_lens.dtype, inputs.block_table.dtype) == (torch.int32, torch.int32)
    assert (inputs.scale, inputs.block_size, inputs.layout) == (case.scale, case.block_size, case.layout)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_cache_holds_live_tokens_only(layout: Any, dtype: Any, device: str) -> None:
    """Kernels would read a token where another one belongs, or dead memory would hold plausible numbers."""
    case = paged(layout=layout, dtype=dtype)
    inputs = problem_of(case).build(case, PlainAllocator(device), SUPPORTS)
    for name in ("q", "k_cache", "v_cache", "seq_lens", "block_table"):
        setattr(inputs, name, getattr(inputs, name).cpu())
    check_cache(case, inputs)
    assert written(inputs.out) == written(inputs.lse) == 0


@pytest.mark.parametrize("v_head_size", [5, 24])
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_heads_of_v_have_their_own_size(layout: Any, v_head_size: int) -> None:
    """A kernel would get V in rows of K's size, or room for an output of q's."""
    case = paged(layout=layout, v_head_size=v_head_size)
    inputs = problem_of(case).build(case, PlainAllocator(), SUPPORTS)
    check_cache(case, inputs)
    assert (inputs.q.shape, inputs.out.shape) == ((3, 4, 8), (3, 4, v_head_size))
    split = SplitDecodeCase(**attention(block_size=4, num_splits=2, v_head_size=v_head_size))
    assert problem_of(split).build(split, PlainAllocator(), SUPPORTS).partial_out.shape == (3, 4, 2, v_head_size)
    rows = DenseDecodeCase(**attention(v_head_size=v_head_size))
    dense = problem_of(rows).build(rows, PlainAllocator(), SUPPORTS)
    assert (dense.k.shape, dense.v.shape) == ((3, 9, 2, 8), (3, 9, 2, v_head_size))
    assert dense.out.shape == (3, 4, v_head_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_of_empty_sequences(layout: Any) -> None:
    """The simplest degenerate batch could not be built, or some page of it would be written."""
    case = paged(layout=layout, seq_lens=(0, 0))
    inputs = problem_of(case).build(case, PlainAllocator(), SUPPORTS)
    assert written(inputs.k_cache) == written(inputs.v_cache) == 0


PAIRS: tuple[LsePair, ...] = (("finite", "-inf"), ("+inf", "low"), ("-inf", "-inf"), ("high", "equal"))


@pytest.mark.parametrize("lse_layout", ["HT", "TH"])
def test_output_of_an_empty_state_is_what_is_declared(lse_layout: Any) -> None:
    """Kernels would be handed NaN where every engine writes zeros."""
    case = MergeStatesCase(num_q_heads=2, head_size=3, num_tokens=4, lse_pairs=PAIRS, lse_layout=lse_layout)
    live = merge_values(case).prefix_live
    for supports in (Supports(), Supports(lse="base2")):
        for values in (None, problem_of(case).values(case, "cpu", supports)):
            output = problem_of(case).build(case, PlainAllocator(), supports, values).prefix_output
            assert (output[~live] == 0).all()
            assert not live.all()
        (contents,) = problem_of(case).contents([case], "cpu", supports)
        assert contents.values.empty_are_zeros


@pytest.mark.parametrize("lse_layout", ["HT", "TH"])
def test_output_of_an_empty_state_stays_poison(lse_layout: Any) -> None:
    """A merge that multiplies an empty state's output by a zero weight would go unnoticed, where that is declared."""
    case = MergeStatesCase(num_q_heads=2, head_size=3, num_tokens=4, lse_pairs=PAIRS, lse_layout=lse_layout)
    inputs = problem_of(case).build(case, PlainAllocator(), Supports(empty_state_outputs="anything"))
    values = merge_values(case)
    for side in ("prefix", "suffix"):
        lse, output = getattr(inputs, f"{side}_lse"), getattr(inputs, f"{side}_output")
        expected = getattr(values, f"{side}_lse")
        assert torch.equal(lse if lse_layout == "TH" else lse.T, expected)
        live = expected.isfinite()
        assert torch.equal(output[live], getattr(values, f"{side}_output")[live])
        assert output[~live].isnan().all()
        assert not live.all()
    assert written(inputs.output) == written(inputs.output_lse) == 0
    assert inputs.lse_layout == lse_layout


CASES: list[Case] = [
    DenseDecodeCase(**attention()),
    paged(),
    SplitDecodeCase(**attention(block_size=4, num_splits=2)),
    MergeStatesCase(num_q_heads=2, head_size=3, num_tokens=4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
def test_registry_finds_values_build_and_reference(case: Case) -> None:
    """A case of some problem could not be judged, or its result would be looked for under another name."""
    problem = problem_of(case)
    values = problem.values(case, "cpu", SUPPORTS)
    inputs = problem.build(case, PlainAllocator(), SUPPORTS, values)
    expected = problem.reference(case, values)
    out, lse = (getattr(inputs, name) for name in problem.results)
    out, lse = problem.logical_result(case, out, lse)
    assert (out.shape, lse.shape) == (expected.out.shape, expected.lse.shape)
    assert {out.dtype, lse.dtype, expected.out.dtype, expected.lse.dtype} == {torch.float64}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
def test_every_strided_tensor_exists(case: Case) -> None:
    """A case could choose strides for a tensor that is never built."""
    of_variants = set() if "alibi_slopes" in tensor_specs(case) else {"alibi_slopes", "sinks"}
    of_caches = set() if "k_scale" in tensor_specs(case) else {"k_scale", "v_scale"}
    assert set(case.tensor_names) - of_variants - of_caches == set(tensor_specs(case))
