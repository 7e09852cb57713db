"""Results that depend on block-table entries which no sequence uses, within their bounds."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import OracleName
from attnfuzz.oracles.relations.catalogue import applicable
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.recipes import Pages, Values
from tests.oracles.relations.objections import objection

NAMES: tuple[OracleName, ...] = ("block_table_slack",)


@pytest.fixture
def full_pages(paged: PagedDecodeCase) -> PagedDecodeCase:
    """Every slot of every page holds a token, so that poison marks nothing."""
    values = Values(keys="normal", values="normal", seed=3)
    return msgspec.structs.replace(paged, seq_lens=(8, 0, 24), pages=Pages(padding="wrong_page"), values=values)


def every_entry_under_a_mask(inputs: Any) -> tuple[Tensor, Tensor]:
    """All entries of the table are followed; the average counts a token past the end with exp(-12) instead of 0."""
    out, lse = torch.empty_like(inputs.out), torch.empty_like(inputs.lse)
    group = inputs.q.shape[1] // inputs.k_cache.shape[2]
    for seq, head in itertools.product(*map(range, lse.shape)):
        n, kv_head = int(inputs.seq_lens[seq]), head // group
        if n == 0:
            out[seq, head], lse[seq, head] = 0, float("-inf")
            continue
        pages = inputs.block_table[seq].long()
        k, v = (cache[pages, :, kv_head].flatten(0, 1).float() for cache in (inputs.k_cache, inputs.v_cache))
        live = torch.arange(len(k)) < n
        scores = k @ inputs.q[seq, head].float() * inputs.scale
        masked = torch.where(live, scores, scores[live].max() - 12)
        out[seq, head], lse[seq, head] = masked.softmax(0) @ v, scores[live].logsumexp(0)
    return out, lse


@attnfuzz.kernel("paged_decode")
def loosely_masked(inputs: Any) -> Any:
    return every_entry_under_a_mask(inputs)


def test_a_mask_that_lets_a_little_through(full_pages: PagedDecodeCase) -> None:
    """Tokens of another user's sequence would enter a result, each with a weight too small for any tolerance."""
    case = msgspec.structs.replace(full_pages, dtype="float16")
    failure = objection("block_table_slack", loosely_masked, case)
    assert failure is not None
    assert "with unused block-table entries that are 0: the bits must be equal" in failure.message
    assert any(line.startswith("unused entries were ") and "of sequence 0" in line for line in failure.details)


def finite(scores: Tensor) -> Tensor:
    return scores.where(scores.isfinite(), -torch.inf)


def test_what_a_run_shows_by_itself_is_told(plant: Any, full_pages: PagedDecodeCase) -> None:
    """That NaN x 0 is NaN would be told as two bugs, by the memory and by the table that lead to it."""

    def whole_table(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        pages = inputs.block_table[seq].clamp(min=0).long()
        k, v = (cache[pages, :, kv_head].flatten(0, 1).float() for cache in (inputs.k_cache, inputs.v_cache))
        dead = (torch.arange(len(k)) >= n)[:, None]
        return k.masked_fill(dead, torch.inf), v

    pages = Pages(padding="zero", spare_blocks=2, extra_columns=2)
    values = msgspec.structs.replace(full_pages.values, keys="equal")
    case = msgspec.structs.replace(full_pages, seq_lens=(8, 8), pages=pages, values=values)
    kernel = plant("paged_decode", tokens=whole_table, score=finite)
    failure = judge(kernel, case, device="cpu", relations=NAMES).failure
    assert failure is not None
    assert failure.oracle == "block_table_slack", failure
    assert failure.cause == "read_without_weight"
    assert failure.details[-1].endswith("with small numbers the result is right, but 0 x NaN is NaN: mask the load")


@pytest.mark.parametrize("padding", ["zero", "wrong_page", "garbage"])
def test_correct_kernels_do_not_notice(padding: Any, plant: Any, paged: PagedDecodeCase) -> None:
    """A false alarm: an entry that is in use was changed."""
    supports = attnfuzz.Supports(unused_table_entries="garbage", batch_invariant=True)
    case = msgspec.structs.replace(paged, pages=msgspec.structs.replace(paged.pages, padding=padding))
    kernel = plant("paged_decode", supports=supports)
    assert applicable(kernel.declaration, case, NAMES)
    assert judge(kernel, case, device="cpu", relations=NAMES).failure is None


@pytest.mark.parametrize("invariant", [True, False])
def test_only_who_promises_it_gets_a_wider_table(invariant: bool, plant: Any, full_pages: PagedDecodeCase) -> None:
    """A kernel may choose its splits by the width of the table, unless a row must not depend on its batch."""
    widths: list[int] = []
    supports = attnfuzz.Supports(batch_invariant=invariant)
    kernel = plant("paged_decode", supports=supports, before=lambda inputs: widths.append(inputs.block_table.shape[1]))
    judge(kernel, full_pages, device="cpu", relations=NAMES)
    assert len(widths) == 3
    assert (widths[-1] > widths[0]) is invariant


def test_nothing_unused_nothing_to_change(plant: Any, paged: PagedDecodeCase) -> None:
    """A run would be spent on a case that does not change."""
    case = msgspec.structs.replace(paged, seq_lens=(21, 24), pages=Pages())
    assert not applicable(plant("paged_decode").declaration, case, NAMES)
    zeros = attnfuzz.Supports(unused_table_entries="zero")
    assert not applicable(plant("paged_decode", supports=zeros).declaration, paged, NAMES)
