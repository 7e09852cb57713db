"""Size limits: right to the byte for tensors, and known without allocating or listing anything."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.problems.allocation import PlainAllocator, allocate
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.limits import CaseTooLarge, case_nbytes, check_size, tensor_nbytes
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
def test_limit_is_inclusive(case: Case) -> None:
    """A case of exactly the limit would be refused, or one a byte above it accepted."""
    needed = case_nbytes(case)
    check_size(case, needed)
    with pytest.raises(CaseTooLarge, match=f"{needed} bytes"):
        check_size(case, needed - 1)
