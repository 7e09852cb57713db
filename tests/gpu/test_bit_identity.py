"""The same case is the same input on CPU and GPU: all bits of memory, and reference and bound as far as float64 goes.

These tests use CUDA in pytest's own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.patterns import Fill
from attnfuzz.problems.cases import (
    CASE_TYPES,
    Case,
    DenseDecodeCase,
    LatentDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    SplitDecodeCase,
)
from attnfuzz.problems.recipes import (
    KEY_RECIPES,
    LSE_KINDS,
    STRIDE_KINDS,
    VALUE_RECIPES,
    Needle,
    Pages,
    Values,
)
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import DTYPES, LAYOUTS, Dtype, Layout, Supports
from attnfuzz.trials.expectations import bound_of

SUPPORTS = (Supports(), Supports(lse="base2"))
PAGES = Pages(order="shuffled", spare_blocks=2, shared_blocks=1, extra_columns=2, padding="garbage", seed=5)
ATTENTION: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "seq_lens": (5, 0, 37), "scale": 0.3}
KEYS: tuple[Any, ...] = KEY_RECIPES  # literals, which mypy would widen
VALUES: tuple[Any, ...] = VALUE_RECIPES
PAIRS: tuple[Any, ...] = tuple(product(LSE_KINDS, LSE_KINDS))


def recipes() -> Iterator[Values]:
    for seed, (keys, values) in enumerate(product(KEYS, VALUES)):
        yield Values(keys=keys, values=values, seed=seed)
    for exponent, keys in product((-6, 3), KEYS):
        needles = (Needle(seq=2, position=36, kv_head=1), Needle(seq=0, position=0, kv_head=0))
        yield Values(keys=keys, logit_exponent=exponent, needles=needles, seed=7)


def attention_cases(problem: type[Any], **fields: Any) -> Iterator[Case]:
    """Every recipe."""
    return (problem(**ATTENTION, values=values, **fields) for values in recipes())


def merge_case(**fields: Any) -> MergeStatesCase:
    """Every pair of kinds of log-sum-exp."""
    return MergeStatesCase(num_q_heads=7, head_size=13, num_tokens=11, lse_pairs=PAIRS, seed=3, **fields)


def strided(case: Case) -> Iterator[Case]:
    """``case`` in each kind of strides, all its tensors alike."""
    names = [name if name in case.tensor_names else "k_cache" for name in tensor_specs(case)]
    return (msgspec.structs.replace(case, strides=dict.fromkeys(names, kind)) for kind in STRIDE_KINDS)


def plain(case: Case, supports: Supports, device: str) -> list[Tensor]:
    """The storage of each tensor, padding and gaps included, as bytes on the CPU."""
    inputs = problem_of(case).build(case, PlainAllocator(device), supports)
    tensors = [tensor for name in case.tensor_names if (tensor := getattr(inputs, name)) is not None]
    storages = [torch.empty(0, dtype=torch.uint8, device=device).set_(part.untyped_storage()) for part in tensors]
    return [storage.cpu() for storage in storages]


def in_arena(case: Case, supports: Supports, fill: Fill, device: str) -> list[Tensor]:
    """Each chunk, with the red zones."""
    arena = Arena(device, poison=fill, prefill=fill)
    problem_of(case).build(case, arena, supports)
    return [chunk.cpu() for chunk, _ in arena.compared()]


def assert_same_bits(case: Case, build: Callable[[str], list[Tensor]]) -> None:
    for i, (one, other) in enumerate(zip(build("cpu"), build("cuda"), strict=True)):
        assert torch.equal(one, other), f"tensor or chunk {i} of {case}"


def check_inputs(case: Case, supports: Supports) -> None:
    for variant in strided(case):
        assert_same_bits(variant, partial(plain, variant, supports))
        assert_same_bits(variant, partial(in_arena, variant, supports, "nan"))
        assert_same_bits(variant, partial(in_arena, variant, supports, "finite"))


def check_results(case: Case, supports: Supports) -> None:
    declaration = Declaration(name="any", problem=case.problem, supports=supports)
    problem = problem_of(case)
    found = []
    for device in ("cpu", "cuda"):
        values = problem.values(case, device, supports)
        bound = bound_of(declaration, case, values, one_copy=False)
        expected = problem.reference(case, values)
        found.append([part.cpu() for part in (expected.out, expected.lse, bound.out, bound.lse)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("problem", ["paged_decode", "split_decode", "paged_attention"])
def test_paged_inputs(problem: Problem, layout: Layout, dtype: Dtype) -> None:
    """A case found on a GPU would be another one when it is replayed on a CPU."""
    more: dict[str, dict[str, Any]] = {
        "split_decode": {"num_splits": 3},
        "paged_attention": {"query_lens": (2, 0, 17), "padding_tokens": 3},
    }
    fields: dict[str, Any] = {"block_size": 4, "pages": PAGES, "layout": layout, "dtype": dtype}
    for case in attention_cases(CASE_TYPES[problem], **fields, **more.get(str(problem), {})):
        check_inputs(case, Supports())


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_inputs(dtype: Dtype) -> None:
    """As above, for keys and values in one cache."""
    shape = ATTENTION | {"num_kv_heads": 1, "v_head_size": 12, "block_size": 4, "pages": PAGES, "dtype": dtype}
    for values in recipes():
        if not values.needles:  # some of them lie in the second KV head
            check_inputs(LatentDecodeCase(**shape, values=values), Supports())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_inputs(dtype: Dtype) -> None:
    """As above, for K and V in one tensor each."""
    for case in attention_cases(DenseDecodeCase, dtype=dtype, extra_rows=2):
        check_inputs(case, Supports())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lse_layout", ["HT", "TH"])
@pytest.mark.parametrize("supports", SUPPORTS, ids=["natural", "base2"])
def test_merge_inputs(supports: Supports, lse_layout: str, dtype: Dtype) -> None:
    """As above, for two states to be merged."""
    check_inputs(merge_case(lse_layout=lse_layout, dtype=dtype), supports)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_results(dtype: Dtype) -> None:
    """What is a failure on a GPU would be none on a CPU, since references or bounds differ."""
    for case in attention_cases(SplitDecodeCase, block_size=4, pages=PAGES, dtype=dtype, num_splits=3):
        check_results(case, Supports())
    for case in attention_cases(PagedAttentionCase, block_size=4, pages=PAGES, dtype=dtype, query_lens=(2, 0, 17)):
        check_results(case, Supports())
    for case in attention_cases(DenseDecodeCase, dtype=dtype):
        check_results(case, Supports())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("supports", SUPPORTS, ids=["natural", "base2"])
def test_merge_results(supports: Supports, dtype: Dtype) -> None:
    """As above, for merging."""
    check_results(merge_case(dtype=dtype), supports)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_case(dtype: Dtype) -> None:
    """Numbers that are drawn chunk by chunk would depend on the device."""
    values = Values(keys="normal", values="large", seed=11)
    case = PagedDecodeCase(
        num_q_heads=8, num_kv_heads=8, head_size=64, seq_lens=(5000, 3), scale=0.01, block_size=16, dtype=dtype,
        pages=PAGES, values=values,
    )  # fmt: skip
    assert_same_bits(case, partial(plain, case, Supports()))
    check_results(case, Supports())
