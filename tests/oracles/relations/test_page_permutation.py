"""Pages in another order, at the limits of their ids, and entries of a block table that nobody needs."""

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
from attnfuzz.oracles.relations.page_relocation import (
    far_pages,
    far_table,
    limits_of,
    page_strides,
    pages_to_same_alignment,
)
from attnfuzz.problems.block_table import num_blocks
from attnfuzz.problems.cases import MaskedAttentionCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.recipes import Pages, Values
from tests.oracles.relations.objections import objection

NAMES: tuple[OracleName, ...] = ("page_permutation",)


def in_order_of_page_ids(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
    """All tokens of a sequence, those on the page with the lowest id first: right, but for the order of additions."""
    places = sorted((int(inputs.block_table[seq, i // inputs.block_size]), i % inputs.block_size) for i in range(n))
    k, v = (
        torch.stack([cache[page, offset, kv_head] for page, offset in places])
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    return k, v


def test_additions_in_the_order_of_page_ids(plant: Any, paged: PagedDecodeCase) -> None:
    """A prompt would be answered otherwise when its pages lie otherwise, and nobody could tell why."""
    failure = objection("page_permutation", plant("paged_decode", tokens=in_order_of_page_ids), paged)
    assert failure is not None
    assert failure.kind == "bits"
    assert failure.message.startswith("out[")
    assert " originally, but " in failure.message
    assert "with its pages at other places in the cache: the bits must be equal" in failure.message
    assert any("page 0 is now page " in line for line in failure.details)


@pytest.mark.by_day
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
@pytest.mark.parametrize("fixture", ["paged", "split"])
def test_correct_kernels_do_not_notice(fixture: str, layout: Any, plant: Any, request: pytest.FixtureRequest) -> None:
    """A false alarm: pages were moved without their tokens, or the table did not follow."""
    case: PagedDecodeCase = msgspec.structs.replace(request.getfixturevalue(fixture), layout=layout)
    kernel = plant(case.problem)
    assert applicable(kernel.declaration, case, NAMES)
    assert judge(kernel, case, device="cpu", relations=NAMES).failure is None


def test_shared_pages_move_together(plant: Any, paged: PagedDecodeCase) -> None:
    """A false alarm wherever sequences share a prefix."""
    case = msgspec.structs.replace(paged, seq_lens=(20, 9, 21), pages=Pages(shared_blocks=1, padding="garbage"))
    kernel = plant("paged_decode", supports=attnfuzz.Supports(unused_table_entries="garbage"))
    assert judge(kernel, case, device="cpu", relations=NAMES).failure is None


def test_one_page_cannot_move(plant: Any, paged: PagedDecodeCase) -> None:
    """A run would be spent on a case that does not change."""
    one_page = msgspec.structs.replace(paged, seq_lens=(5,), pages=Pages())
    assert not applicable(plant("paged_decode").declaration, one_page, NAMES)


def test_pages_keep_their_alignment(plant: Any, paged: PagedDecodeCase) -> None:
    """A matrix product of a CPU library may round otherwise at an address of another alignment: a false alarm."""
    seen: list[dict[int, Tensor]] = []

    def note(inputs: Any) -> None:
        rows = zip(inputs.block_table, inputs.seq_lens, strict=True)
        pages = {int(page) for row, n in rows for page in row[: -(-n // 3)]}
        seen.append({page: inputs.k_cache[page].clone() for page in pages})

    narrow = msgspec.structs.replace(
        paged, num_q_heads=1, num_kv_heads=1, head_size=4, block_size=3, seq_lens=(40, 7), dtype="float16"
    )
    judge(plant("paged_decode", before=note), narrow, device="cpu", relations=NAMES)
    before, after = seen[0], seen[-1]
    moved = [(i, j) for i, one in before.items() for j, other in after.items() if torch.equal(one, other)]
    assert any(i != j for i, j in moved)
    assert all((i - j) * narrow.block_size * narrow.head_size * 2 % 64 == 0 for i, j in moved)


def test_nothing_is_promised_about_bits(plant: Any, paged: PagedDecodeCase) -> None:
    """A kernel that declares itself nondeterministic would be held to bits."""
    kernel = plant("paged_decode", supports=attnfuzz.Supports(deterministic=False), tokens=in_order_of_page_ids)
    assert judge(kernel, paged, device="cpu", relations=NAMES).failure is None


def test_an_exception_on_the_changed_case_is_the_relations(plant: Any, split: SplitDecodeCase) -> None:
    """A case that raises only where its pages lie otherwise could not be reported, or not be seen again."""
    first_pages: list[int] = []

    def refuse(inputs: Any) -> None:
        first_pages.append(int(inputs.block_table[0, 0]))
        if first_pages[0] != first_pages[-1]:
            raise ValueError("no such page")

    failure = judge(plant("split_decode", before=refuse), split, device="cpu", relations=NAMES).failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("page_permutation", "raised ValueError in refuse")
    assert failure.message.startswith("with its pages at other places in the cache: the kernel raised ValueError")


CASE = PagedDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 3), scale=0.25, block_size=4)


def changed(**fields: object) -> PagedDecodeCase:
    return msgspec.structs.replace(CASE, **fields)


def test_limits_are_told_by_the_page_that_reaches_them() -> None:
    """A message would name a limit that has nothing to do with where it goes wrong."""
    assert page_strides(CASE) == {"k_cache": 64, "v_cache": 64}
    assert {limit.page: limit.words for limit in limits_of(CASE)} == {
        1 << 15: "2^15 page ids",
        1 << 16: "2^16 page ids",
        1 << 24: "2^31 bytes",
        1 << 25: "2^31 elements and 2^32 bytes",
        1 << 26: "2^32 elements",
    }
    (_, _, _, both, _) = limits_of(CASE)
    assert both.units == {"elements", "bytes"}


def test_caches_of_different_strides_have_limits_of_their_own() -> None:
    """What is true of K would be said of V."""
    words = [limit.words for limit in limits_of(changed(strides={"k_cache": "padded_rows"}))]
    assert "2^31 elements of k_cache and 2^32 bytes of k_cache" in words
    assert "2^31 elements of v_cache and 2^32 bytes of v_cache" in words


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        changed(head_size=13, block_size=7),
        changed(dtype="float32", strides={"v_cache": "padded_rows"}),
        changed(layout="packed", dtype="bfloat16"),
        changed(layout="interleaved", num_kv_heads=1, head_size=80),
        changed(block_size=256, head_size=256, num_kv_heads=1),
    ],
)
def test_pages_are_far_enough_and_aligned_as_before(case: PagedDecodeCase) -> None:
    """A right kernel would round differently on other alignments, a wrong one would not be reached."""
    strides, step = page_strides(case), pages_to_same_alignment(case)
    beyond, past_half = far_pages(case)
    for stride in strides.values():
        assert beyond * stride >= 1 << 32
        assert past_half * stride >= 1 << 31
    assert min(past_half * stride - (1 << 31) for stride in strides.values()) <= step * max(strides.values())
    assert beyond >= 1 << 16
    assert beyond % step == past_half % step == 0
    assert beyond + num_blocks(case) < 1 << 31
    assert beyond * max(strides.values()) % (1 << 32) < 1 << 31  # what wraps does not come out below


def test_ids_that_do_not_fit_are_left_out() -> None:
    """The block table could not name such a page."""
    assert far_pages(changed(head_size=1, block_size=1)) == []
    assert len(far_pages(changed(head_size=2, block_size=1))) == 1


@pytest.mark.parametrize(
    ("query_lens", "table"),
    [((1, 2, 0), (1, 5, 11)), ((1, 0, 0), (0, 0, 5)), ((2, 1, 1), None), ((0, 0, 1), None)],
)
def test_the_last_table_that_has_entries_reaches_beyond(
    query_lens: tuple[int, ...], table: tuple[int, int, int] | None
) -> None:
    """A later one would begin past 2^31, which `mask_indptr` cannot say; and a single entry cannot be beyond."""
    case = MaskedAttentionCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 3, 1), query_lens=query_lens, scale=0.25, block_size=4
    )
    assert far_table(case) == table
    assert far_table(CASE) is None


SLACK: tuple[OracleName, ...] = ("block_table_slack",)


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
    failure = judge(kernel, case, device="cpu", relations=SLACK).failure
    assert failure is not None
    assert failure.oracle == "block_table_slack", failure
    assert failure.cause == "read_without_weight"
    assert failure.details[-1].endswith("with small numbers the result is right, but 0 x NaN is NaN: mask the load")


@pytest.mark.parametrize("padding", ["zero", "wrong_page", "garbage"])
def test_correct_kernels_do_not_notice_slack(padding: Any, plant: Any, paged: PagedDecodeCase) -> None:
    """A false alarm: an entry that is in use was changed."""
    supports = attnfuzz.Supports(unused_table_entries="garbage", batch_invariant=True)
    case = msgspec.structs.replace(paged, pages=msgspec.structs.replace(paged.pages, padding=padding))
    kernel = plant("paged_decode", supports=supports)
    assert applicable(kernel.declaration, case, SLACK)
    assert judge(kernel, case, device="cpu", relations=SLACK).failure is None


@pytest.mark.parametrize("invariant", [True, False])
def test_only_who_promises_it_gets_a_wider_table(invariant: bool, plant: Any, full_pages: PagedDecodeCase) -> None:
    """A kernel may choose its splits by the width of the table, unless a row must not depend on its batch."""
    widths: list[int] = []
    supports = attnfuzz.Supports(batch_invariant=invariant)
    kernel = plant("paged_decode", supports=supports, before=lambda inputs: widths.append(inputs.block_table.shape[1]))
    judge(kernel, full_pages, device="cpu", relations=SLACK)
    assert len(widths) == 3
    assert (widths[-1] > widths[0]) is invariant


def test_nothing_unused_nothing_to_change(plant: Any, paged: PagedDecodeCase) -> None:
    """A run would be spent on a case that does not change."""
    case = msgspec.structs.replace(paged, seq_lens=(21, 24), pages=Pages())
    assert not applicable(plant("paged_decode").declaration, case, SLACK)
    zeros = attnfuzz.Supports(unused_table_entries="zero")
    assert not applicable(plant("paged_decode", supports=zeros).declaration, paged, SLACK)
