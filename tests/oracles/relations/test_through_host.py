"""Inputs that are written on the host and sent are those that are written where they are."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.arena import Arena
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.trials.observation import build_through_host

SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 0.25, "seq_lens": (5, 0, 37)}
PAGES = Pages(order="shuffled", spare_blocks=2, extra_columns=1, shared_blocks=1)
PAGED: dict[str, Any] = {**SHAPE, "block_size": 8, "pages": PAGES, "values": Values(keys="normal", values="normal")}
CASES: list[Case] = [
    DenseDecodeCase(**SHAPE, extra_rows=2, strides={"k": "every_other", "q": "offset"}),
    PagedDecodeCase(**PAGED),
    PagedDecodeCase(**PAGED, layout="interleaved", dtype="bfloat16"),
    PagedDecodeCase(**PAGED, layout="packed", strides={"v_cache": "transposed", "block_table": "padded_rows"}),
    SplitDecodeCase(**PAGED, num_splits=4, dtype="float32"),
    MergeStatesCase(num_q_heads=4, head_size=16, num_tokens=9, lse_pairs=(("finite", "-inf"), ("high", "equal"))),
]


def arena() -> Arena:
    return Arena("cpu", poison="nan", prefill="finite")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
@pytest.mark.parametrize("lse", ["natural", "base2"])
def test_numbers_places_and_strides_are_the_same(case: Case, lse: Any) -> None:
    """A relation would run another case than the one that passed, and blame the kernel."""
    supports = Supports(lse=lse)
    usual = problem_of(case).build(case, arena(), supports)
    sent = build_through_host(case, arena(), supports)
    assert type(sent) is type(usual)
    for field in fields(usual):
        one, other = getattr(usual, field.name), getattr(sent, field.name)
        if not isinstance(one, Tensor):
            assert one == other
            continue
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0)), field.name


def test_tensors_are_changed_before_they_are_sent() -> None:
    """Page ids would be those of pages that lie elsewhere."""
    case = PagedDecodeCase(**PAGED)
    edit = {"block_table": lambda table: table.add_(1000), "no tensor of this case": lambda table: table.zero_()}
    inputs = build_through_host(case, arena(), Supports(), edit=edit)
    usual = problem_of(case).build(case, arena(), Supports())
    assert torch.equal(inputs.block_table, usual.block_table + 1000)
