"""NaN in what one row of names has stays out of results that are not made of it."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.families import hybrid_decode_kernels, sparse_decode_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.mistake import WITHOUT_WEIGHT
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.oracles.relations.catalogue import chosen
from attnfuzz.strategies import cases
from tests.common.drawing import drawn_from
from tests.oracles.relations import contained_kernels as kernels

PAGED = {"lengths": (5, 9), "num_kv_heads": 2, "block_size": 4, "page_order": "shuffled", "dtype": "float16"}
SPARSE = {"named": (3, 0), "sentinel": "-1", "dtype": "float16"}


def failure_of(kernel: Any, fields: dict[str, Any]) -> Any:
    problem: Any = kernel.declaration.problem
    return judge(kernel, problem.case_type(**fields), device="cpu", relations=("containment",)).failure


@pytest.mark.parametrize(
    ("kernel", "fields", "told"),
    [
        (kernels.reads_the_next_sequence, PAGED, "of block_table names of k_cache and v_cache"),
        (kernels.reads_other_heads, PAGED, "of block_table names of k_cache and v_cache"),
        (kernels.reads_slot_0, SPARSE, "of indices names of kv_cache"),
    ],
)
def test_what_is_read_without_a_weight_is_told(kernel: Any, fields: dict[str, Any], told: str) -> None:
    """One request with an overflow would spoil all others of its batch, and every test pass."""
    found = [failure_of(kernel, fields | {"seed": seed}) for seed in range(4)]
    failures = [one for one in found if one is not None]
    assert failures
    for one in failures:
        assert (one.oracle, one.kind) == ("containment", "NaN in named entries")
        assert one.cause == WITHOUT_WEIGHT
        assert told in one.message


@pytest.mark.parametrize(
    ("kernel", "fields"),
    [
        (kernels.right, PAGED),
        (kernels.right, PAGED | {"shared_pages": 1}),
        (kernels.right, PAGED | {"extra_columns": 2, "unused_entries": "wrong_page"}),
        (hybrid_decode_kernels.hybrid_decode, PAGED | {"chunk": 3, "kernel_blocks": 2}),
        (sparse_decode_kernels.sparse_decode_eager, SPARSE | {"repeats": True}),
    ],
)
def test_right_kernels_keep_it_where_it_belongs(kernel: Any, fields: dict[str, Any]) -> None:
    """Whoever shares a page, or has a repeated slot, would be blamed for the result that this gives."""
    assert failure_of(kernel, fields) is None


def test_a_search_draws_it() -> None:
    """It would be there and never be asked."""
    declaration = kernels.right.declaration
    drawn = drawn_from(cases(declaration.problem), draws=200)
    asked = [one.name for case in drawn for one in chosen(declaration, case, DEFAULT_ORACLES, None, device="cpu")]
    assert "containment" in asked
