"""Pages behind a window: which are freed, that nothing of theirs is written, and that a kernel may decline them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import find

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.inputs.writing import placements, write_pages
from attnfuzz.problems.block_table import freed_tokens
from attnfuzz.problems.cases import PagedAttentionCase, PagedDecodeCase, decode_case, encode_case
from attnfuzz.problems.recipes import Pages
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import VARIANTS, Variant
from attnfuzz.strategies.cases import cases
from attnfuzz.values import attention_values
from attnfuzz.values.tokens import token_table

SHAPE: dict[str, Any] = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 8, "scale": 1.0, "block_size": 4}


def paged(*seq_lens: int, window: int = 3, **fields: Any) -> PagedDecodeCase:
    return PagedDecodeCase(**SHAPE, seq_lens=seq_lens, variant=Variant(window=window, freed_pages=True), **fields)


def test_only_whole_pages_before_the_window_are_freed() -> None:
    """A token that the query sees would be dead memory, and a right kernel accused."""
    # windows of 3 begin with tokens 3, 4 and 8
    assert freed_tokens(paged(6, 7, 11, 0)) == (0, 4, 8, 0)
    assert freed_tokens(paged(40, window=40)) == (0,)


def test_the_first_query_token_decides() -> None:
    """What a prompt's first token sees would be dead since its last one does not."""
    variant = Variant(window=3, freed_pages=True)
    case = PagedAttentionCase(**SHAPE, seq_lens=(12, 12, 12), query_lens=(1, 4, 0), variant=variant)
    # the first query tokens stand at 11 and 8
    assert freed_tokens(case) == (8, 4, 8)


def test_nothing_is_freed_without_a_window() -> None:
    """All of a plain sequence would be dead, or equal cases have unequal bytes."""
    assert Variant(freed_pages=True) == Variant()
    kept = PagedDecodeCase(**SHAPE, seq_lens=(40,), variant=Variant(window=3))
    assert freed_tokens(kept) == (0,)
    assert b"freed" not in encode_case(kept)
    assert decode_case("paged_decode", encode_case(paged(40))) == paged(40)


@pytest.mark.parametrize("shared_blocks", [0, 1])
def test_freed_pages_are_not_written_unless_another_sequence_keeps_them(shared_blocks: int) -> None:
    """A kernel that reads them would find the right numbers there; or one that shares them would lose its own."""
    case = paged(11, 6, pages=Pages(shared_blocks=shared_blocks))
    tensors = {
        name: torch.full((1, *shape), torch.nan, dtype=torch.float16)
        for name, shape in {"q": (2, 1, 8), "k_cache": (5, 4, 1, 8), "v_cache": (5, 4, 1, 8)}.items()
    }
    tensors["block_table"] = torch.zeros((1, 2, 3), dtype=torch.int32)
    tensors["seq_lens"] = torch.zeros((1, 2), dtype=torch.int32)
    (placement,) = placements([case], token_table([case], "cpu"))
    write_pages(case, tensors, attention_values(case, "cpu"), placement)
    first, second = tensors["block_table"][0, :, 0].tolist()
    assert (first == second) is bool(shared_blocks)
    for cache in ("k_cache", "v_cache"):
        written = ~tensors[cache][0].isnan().any(-1).any(-1)  # [page, offset]
        assert written[first].tolist() == [bool(shared_blocks)] * 4
        assert written[second].all()
        assert written[tensors["block_table"][0, 0, 1]].sum() == 0
        assert written[tensors["block_table"][0, 0, 2]].tolist() == [True] * 3 + [False]


def test_a_kernel_may_decline_them() -> None:
    """Who keeps all pages would be shown findings that cannot happen there, with no word to end them."""
    declining = Supports(variants=VARIANTS, freed_pages=False)
    why = why_unsupported(declining, {}, paged(40))
    assert why == "variant.freed_pages=True, but the kernel declares freed_pages=False"
    assert why_unsupported(Supports(variants=VARIANTS), {}, paged(40)) is None


def test_they_are_drawn() -> None:
    """Kernels that leak what a freed page holds would pass."""
    found = find(
        cases("paged_decode", supports=Supports(variants=VARIANTS)),
        lambda case: isinstance(case, PagedDecodeCase) and any(freed_tokens(case)),
    )
    assert isinstance(found, PagedDecodeCase)
    assert found.variant.freed_pages
