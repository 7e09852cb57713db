"""Inputs and references of the bundled problems, against the definitions written with Python floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.inputs.reference import attention_reference, merge_all
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
from attnfuzz.problems.recipes import LSE_KINDS, Pages, Values
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import DTYPES, LAYOUTS, Supports
from attnfuzz.values import LogicalAttention, attention_values, merge_values

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


INF = math.inf


def dense(**more: Any) -> DenseDecodeCase:
    base: dict[str, Any] = {"num_q_heads": 6, "num_kv_heads": 2, "head_size": 5, "seq_lens": (4, 0, 7), "scale": 0.7}
    return DenseDecodeCase(**base | {"values": Values(keys="normal", values="normal", seed=1)} | more)


def by_definition(case: Any, values: LogicalAttention, seq: int, head: int) -> tuple[list[float], float]:
    """One head's output and LSE in plain Python; query heads 0, 1, 2 read KV head 0, and 3, 4, 5 KV head 1."""
    k, v = values.sequence(seq)
    kv_head = 0 if head < 3 else 1
    q = values.q[seq, head].tolist()
    scores = [case.scale * math.fsum(a * b for a, b in zip(q, row, strict=True)) for row in k[:, kv_head].tolist()]
    if not scores:
        return [0.0] * case.value_size, -INF
    total = math.fsum(math.exp(s) for s in scores)
    columns = zip(*v[:, kv_head].tolist(), strict=True)
    return [math.fsum(math.exp(s) * x for s, x in zip(scores, c, strict=True)) / total for c in columns], math.log(
        total
    )


@pytest.mark.parametrize("v_head_size", [None, 3, 8])
def test_attention_is_its_definition(v_head_size: int | None) -> None:
    """Every verdict would be measured against something else than attention."""
    case = dense(v_head_size=v_head_size)
    values = attention_values(case)
    expected = attention_reference(case, values)
    for seq in range(3):
        for head in range(6):
            out, lse = by_definition(case, values, seq, head)
            assert expected.out[seq, head].tolist() == pytest.approx(out, rel=1e-13, abs=1e-13)
            assert expected.lse[seq, head].item() == pytest.approx(lse, rel=1e-13)


@pytest.mark.parametrize("keys", ["rising", "negative"])
def test_extreme_scores_stay_finite(keys: Any) -> None:
    """The reference itself would overflow where kernels must not."""
    case = dense(values=Values(keys=keys, logit_exponent=8), scale=8.0)
    expected = attention_reference(case, attention_values(case))
    assert expected.out.isfinite().all()
    assert expected.lse[[0, 2]].isfinite().all()
    assert expected.lse[0].abs().min() > 710  # exp overflows float64 above 709.8


def test_position_coded_values_come_out_of_a_single_key() -> None:
    """The output would not name the token that was read."""
    case = dense(seq_lens=(1,), values=Values())
    values = attention_values(case)
    assert torch.equal(attention_reference(case, values).out[0, 5], values.v[0, 1].double())


def test_only_empty_splits_give_the_empty_state() -> None:
    """An empty sequence's splits would merge to NaN instead of 0 and -inf."""
    merged, lse = merge_all(torch.full((1, 1, 2, 3), math.nan), torch.full((1, 1, 2), -INF))
    assert merged.tolist() == [[[0.0, 0.0, 0.0]]]
    assert lse.tolist() == [[-INF]]


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_bad_partial_lse_stays_visible(bad: float) -> None:
    """A NaN or +inf that a kernel left in one split would vanish in the merge."""
    merged, _ = merge_all(torch.ones(1, 1, 2, 3), torch.tensor([[[0.5, bad]]]))
    assert merged.isnan().all()
    merged, _ = merge_all(torch.tensor([[[[math.nan], [1.0]]]]), torch.zeros(1, 1, 2))
    assert merged.isnan().all()


def merged_by_definition(prefix: tuple[Any, float], suffix: tuple[Any, float], base: float) -> tuple[Any, float]:
    live = [(out, lse) for out, lse in (prefix, suffix) if math.isfinite(lse)]
    if not live:
        return [0.0] * len(prefix[0]), -INF
    top = max(lse for _, lse in live)
    weights = [base ** (lse - top) for _, lse in live]
    columns = zip(*(out for out, _ in live), strict=True)
    out = [math.fsum(w * x for w, x in zip(weights, c, strict=True)) / math.fsum(weights) for c in columns]
    return out, top * math.log(base) + math.log(math.fsum(weights))


@pytest.mark.parametrize("lse_base2", [False, True])
@pytest.mark.parametrize("suffix", LSE_KINDS)
@pytest.mark.parametrize("prefix", LSE_KINDS)
def test_merge_is_its_definition(prefix: Any, suffix: Any, lse_base2: bool) -> None:
    """States, empty or not, would be merged to something else than the state over both sets of keys."""
    case = MergeStatesCase(num_q_heads=2, head_size=3, num_tokens=2, lse_pairs=((prefix, suffix),), seed=5)
    values = merge_values(case, lse_base2=lse_base2)
    expected = problem_of(case).reference(case, values)
    for token in range(2):
        for head in range(2):
            at = (token, head)
            first = (values.prefix_output[at].tolist(), values.prefix_lse[at].item())
            second = (values.suffix_output[at].tolist(), values.suffix_lse[at].item())
            out, lse = merged_by_definition(first, second, 2.0 if lse_base2 else math.e)
            assert expected.out[at].tolist() == pytest.approx(out, rel=1e-13, abs=1e-13)
            assert expected.lse[at].item() == pytest.approx(lse, rel=1e-13)
