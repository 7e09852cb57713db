"""Results that depend on where pages lie, within their bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import OracleName
from attnfuzz.oracles.relations.catalogue import applicable
from attnfuzz.problems.cases import PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.recipes import Pages
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
