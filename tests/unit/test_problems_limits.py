"""Size limits: right to the byte for tensors, and known without allocating or listing anything."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from attnfuzz.inputs.allocation import PlainAllocator, allocate
from attnfuzz.problems.block_table import block_table_rows
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.limits import (
    DEFAULT_LIMIT_BYTES,
    CaseTooLarge,
    case_nbytes,
    check_size,
    list_nbytes,
    tensor_nbytes,
)
from attnfuzz.problems.recipes import STRIDE_KINDS, Pages, StrideKind


def attention(**more: Any) -> dict[str, Any]:
    return {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "seq_lens": (5, 0, 9), "scale": 0.25} | more


CASES: list[Case] = [
    DenseDecodeCase(**attention(extra_rows=3)),
    PagedDecodeCase(**attention(block_size=4, pages=Pages(spare_blocks=3, shared_blocks=1, extra_columns=2))),
    PagedDecodeCase(**attention(block_size=4, layout="interleaved", dtype="bfloat16")),
    SplitDecodeCase(**attention(block_size=3, layout="packed", num_splits=5, dtype="float32")),
    SplitDecodeCase(**attention(block_size=3, layout="packed", num_splits=5, v_head_size=40)),
    DenseDecodeCase(**attention(v_head_size=5)),
    MergeStatesCase(num_q_heads=3, head_size=5, num_tokens=7, lse_layout="TH"),
]


@pytest.mark.parametrize("kind", STRIDE_KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
def test_tensor_bytes_are_exact(case: Case, kind: StrideKind) -> None:
    """A case could take more memory than its limit allows, or be refused although it fits."""
    one_cache = getattr(case, "layout", "") == "interleaved"
    strides = {name: kind for name in case.tensor_names if not (one_cache and name == "v_cache")}
    case = msgspec.structs.replace(case, strides=strides)
    tensors = allocate(case, PlainAllocator()).values()
    assert tensor_nbytes(case) == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert case_nbytes(case) > tensor_nbytes(case)


HUGE: list[Case] = [
    DenseDecodeCase(**attention(seq_lens=(1 << 24,) * 20000)),
    DenseDecodeCase(**attention(extra_rows=1 << 24, num_kv_heads=4, seq_lens=(1,) * 40000)),
    PagedDecodeCase(**attention(block_size=1, seq_lens=(1 << 24,) * 20000)),
    PagedDecodeCase(**attention(block_size=1 << 20, num_kv_heads=4, head_size=1024, pages=Pages(spare_blocks=1 << 20))),
    PagedDecodeCase(**attention(block_size=1 << 20, head_size=1, v_head_size=1024, pages=Pages(spare_blocks=1 << 20))),
    PagedDecodeCase(**attention(block_size=1, seq_lens=(1,) * 65536, pages=Pages(extra_columns=1 << 16))),
    MergeStatesCase(num_q_heads=1024, head_size=1024, num_tokens=1 << 20),
]


@pytest.mark.parametrize("case", HUGE, ids=lambda case: case.problem)
def test_huge_case_is_refused_at_once(case: Case) -> None:
    """A regression file that asks for terabytes would fill the memory, or list 10^11 pages, before it is refused."""
    with pytest.raises(CaseTooLarge, match=r"the case needs [\d.e+]+ [GTP]iB .* but the limit is 1 GiB; shorten"):
        check_size(case)


LISTED: list[Case] = [
    PagedDecodeCase(**attention(block_size=16, seq_lens=(1,) * 2048, pages=Pages(extra_columns=1 << 14))),
    PagedDecodeCase(
        **attention(block_size=16, seq_lens=(1,) * 64, pages=Pages(extra_columns=1 << 16, padding="wrong_page"))
    ),
    PagedDecodeCase(**attention(num_q_heads=2, head_size=1, block_size=1, seq_lens=(1 << 21,))),
    PagedDecodeCase(
        **attention(num_q_heads=2, head_size=1, block_size=1, pages=Pages(spare_blocks=1 << 20, order="shuffled"))
    ),
]


@pytest.mark.parametrize("case", LISTED, ids=["columns", "wrong pages", "pages", "spare pages"])
def test_a_case_of_small_tensors_and_long_lists_is_refused(case: Case) -> None:
    """Python makes a block table out of lists, of 4.5 GiB and half a minute, where the tensors took 0.5 GiB."""
    assert tensor_nbytes(case) < DEFAULT_LIMIT_BYTES
    with pytest.raises(CaseTooLarge, match=r"pages and block tables take .* as lists but the limit is 128 MiB; lower"):
        check_size(case)


def test_the_block_table_of_a_large_server_is_taken() -> None:
    """256 sequences of up to 128 Ki tokens are no attack."""
    check_size(PagedDecodeCase(**attention(block_size=16, seq_lens=(1,) * 256, pages=Pages(extra_columns=8192))))


def test_lists_take_no_more_than_is_counted() -> None:
    """The limit would be of something else than memory."""
    for pages in (
        Pages(extra_columns=4000),
        Pages(extra_columns=500, padding="wrong_page", spare_blocks=2000),
        Pages(order="shuffled", spare_blocks=50_000),
    ):
        case = PagedDecodeCase(**attention(block_size=1, seq_lens=(100,) * 200, pages=pages))
        tracemalloc.start()
        entries = [entry for row in block_table_rows(case) for entry in row]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(entries) == case.num_seqs * case.max_blocks_per_seq
        assert peak < list_nbytes(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
def test_limit_is_inclusive(case: Case) -> None:
    """A case of exactly the limit would be refused, or one a byte above it accepted."""
    needed = case_nbytes(case)
    check_size(case, needed)
    with pytest.raises(CaseTooLarge, match=f"{needed} bytes"):
        check_size(case, needed - 1)
