"""Which strides are made wide."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.declaration import Declaration
from attnfuzz.memory.far import stretched_strides
from attnfuzz.oracles.relations.page_relocation import stretched_axes, stretched_cache_axes
from attnfuzz.problems.cases import (
    BundledProblem,
    DenseDecodeCase,
    LatentDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.supports import Supports

ANY = Declaration(name="any", problem="dense_decode", supports=Supports(strides="any"))
SERVING = Declaration(name="serving", problem="dense_decode")
ROWS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 4, "head_size": 16, "seq_lens": (5, 3, 7), "scale": 0.25}
CASE = DenseDecodeCase(**ROWS)


def declared_for(problem: BundledProblem, **fields: Any) -> Declaration:
    return Declaration(name="of_engines", problem=problem, supports=Supports(**fields))


def supporting(**fields: Any) -> Declaration:
    return msgspec.structs.replace(ANY, supports=Supports(**fields))


def test_each_index_of_a_kernel_meets_a_wide_stride_in_two_turns() -> None:
    """A 32-bit product of one index would never overflow."""
    first, second = (stretched_axes(ANY, CASE, turn) for turn in range(2))
    assert first == {"q": 0, "k": 1, "v": 2, "seq_lens": 0, "out": 1, "lse": 0}
    assert second == {"q": 1, "k": 2, "v": 1, "seq_lens": 0, "out": 2, "lse": 1}


def test_only_what_the_kernel_takes_is_changed() -> None:
    """A kernel would be blamed for what it never promised."""
    assert stretched_axes(supporting(strides="contiguous"), CASE, 0) == {}
    assert stretched_axes(supporting(strides="last_contiguous"), CASE, 1) == {
        "q": 1,
        "k": 2,
        "v": 1,
        "out": 0,
        "lse": 0,
    }
    assert "lse" not in stretched_axes(supporting(strides="any", lse="none"), CASE, 0)
    assert "q" not in stretched_axes(ANY, msgspec.structs.replace(CASE, strides={"q": "offset"}), 0)


@pytest.mark.parametrize(
    ("fields", "axis"),
    [({"seq_lens": (5,)}, 1), ({"seq_lens": (5, 5), "num_q_heads": 1, "num_kv_heads": 1}, 2)],
)
def test_dimensions_of_three_come_first(fields: dict[str, Any], axis: int) -> None:
    """A stride that does not fit into 32 bits itself makes the product a 64-bit one."""
    assert stretched_axes(ANY, msgspec.structs.replace(CASE, **fields), 0)["q"] == axis


def test_many_rows_stay_together() -> None:
    """Each row that lies apart takes a page of memory."""
    long = msgspec.structs.replace(CASE, seq_lens=(2000,))
    assert stretched_axes(ANY, long, 0).keys() == {"q", "out", "lse"}
    assert stretched_axes(ANY, CASE, 1, most_rows=50) == {"q": 1, "k": 0, "v": 0, "seq_lens": 0, "out": 0, "lse": 1}
    paged = msgspec.structs.replace(PAGED, seq_lens=(3,))
    assert stretched_cache_axes(PAGES, paged, 0).keys() == {"k_cache", "v_cache"}
    assert stretched_cache_axes(PAGES, paged, 0, most_rows=2) == {}


PAGED = PagedDecodeCase(num_q_heads=4, num_kv_heads=4, head_size=8, seq_lens=(5, 3, 7), scale=0.25, block_size=4)
PAGES = Declaration(name="pages", problem="paged_decode", supports=Supports(strides="any"))


@pytest.mark.parametrize(
    ("layout", "turns"),
    [
        ("NHD", [{"k_cache": 1, "v_cache": 2}, {"k_cache": 2, "v_cache": 1}]),
        ("HND", [{"k_cache": 2, "v_cache": 1}, {"k_cache": 1, "v_cache": 2}]),
        ("packed", [{"k_cache": 3, "v_cache": 1}, {"k_cache": 1, "v_cache": 3}]),
        ("interleaved", [{"kv_cache": 2}, {"kv_cache": 3}]),
    ],
)
def test_tokens_and_heads_of_a_cache_have_a_turn_each(layout: Any, turns: list[dict[str, int]]) -> None:
    """An offset within a page, or a head, in 32 bits would never overflow: pages alone do not make them large."""
    case = msgspec.structs.replace(PAGED, layout=layout)
    assert [stretched_cache_axes(PAGES, case, turn) for turn in range(2)] == turns
    assert stretched_axes(PAGES, case, 0).keys().isdisjoint(("k_cache", "v_cache", "kv_cache"))


@pytest.mark.parametrize("seed", range(6))
def test_every_dimension_has_its_turn_in_some_case(seed: int) -> None:
    """An index that two turns leave out would never overflow, whatever is drawn."""
    values = Values(seed=seed)
    dense = [stretched_axes(ANY, msgspec.structs.replace(CASE, values=values), turn) for turn in range(2)]
    assert [axes["q"] for axes in dense] == [seed % 3, (seed + 1) % 3]
    packed = msgspec.structs.replace(PAGED, layout="packed", head_size=24, seq_lens=(5,), values=values)
    caches = [stretched_cache_axes(PAGES, packed, turn) for turn in range(2)]
    assert [axes["v_cache"] for axes in caches] == [(1, 3, 2)[seed % 3], (1, 3, 2)[(seed + 1) % 3]]


def test_heads_of_two_give_way_to_tokens() -> None:
    """With one narrow index in two, every other run would show nothing."""
    case = msgspec.structs.replace(PAGED, num_q_heads=2, num_kv_heads=2)
    assert stretched_cache_axes(PAGES, case, 0) == {"k_cache": 1, "v_cache": 1}


def test_caches_stay_as_they_are_where_nothing_can_be_stretched() -> None:
    """A kernel would be blamed for strides that it does not take, or addresses be asked for that no machine has."""
    plain = msgspec.structs.replace(PAGED, num_kv_heads=1, num_q_heads=1, block_size=1)
    narrow = msgspec.structs.replace(PAGES, supports=Supports(strides="contiguous"))
    long = msgspec.structs.replace(PAGED, seq_lens=(3000,))
    for declaration, case in ((PAGES, plain), (narrow, PAGED), (PAGES, long), (ANY, CASE)):
        assert stretched_cache_axes(declaration, case, 0) == {}


def test_engines_have_pages_tokens_and_sequences_that_lie_far_apart() -> None:
    """The heads of a token would be gigabytes apart, as in no engine, or the last tokens of a long batch never far."""
    turns = [stretched_axes(SERVING, CASE, turn) for turn in range(2)]
    assert turns == [{"k": 1, "v": 1}, {"k": 0, "v": 0}]
    plain = msgspec.structs.replace(SERVING, problem="paged_decode")
    assert [stretched_cache_axes(plain, PAGED, turn) for turn in range(2)] == [{"k_cache": 0, "v_cache": 0}, {}]
    merge = msgspec.structs.replace(SERVING, problem="merge_states")
    states = MergeStatesCase(num_q_heads=2, head_size=16, num_tokens=5)
    assert stretched_axes(merge, states, 0) == {"prefix_output": 0, "suffix_output": 0, "output": 0}
    split = msgspec.structs.replace(SERVING, problem="split_decode")
    partials = SplitDecodeCase(**ROWS, block_size=4, num_splits=3)
    assert stretched_axes(split, partials, 0) == {"partial_out": 0}


def test_queries_are_many_in_prompts_only() -> None:
    """A right kernel would be told first of a q that no server has: as many sequences as are decoded together hold 2^28
    elements, and a batch of prompts more than 2^31."""
    prompts = PagedAttentionCase(**ROWS, query_lens=(2, 1, 1), block_size=4)
    decode = PagedDecodeCase(**ROWS, block_size=4)
    latent = LatentDecodeCase(
        num_q_heads=4, head_size=24, v_head_size=16, num_kv_heads=1, seq_lens=(5, 3, 7), scale=0.25, block_size=4
    )
    for turn in range(2):
        assert {"q", "out"} <= stretched_axes(declared_for("paged_attention"), prompts, turn).keys()
        assert not stretched_axes(declared_for("paged_decode"), decode, turn)
        assert not stretched_axes(declared_for("latent_decode"), latent, turn)
        assert {"q", "out"} <= stretched_axes(declared_for("paged_decode", strides="any"), decode, turn).keys()


def test_no_stride_of_an_engine_passes_32_bits() -> None:
    """A kernel whose strides are constants would be told of one that does not fit its indices, and compiles in none."""
    for rows, found in (((1, 1), set()), ((1, 1, 1), {"q", "out"})):
        prompts = PagedAttentionCase(**ROWS | {"seq_lens": rows}, query_lens=rows, block_size=4)
        assert stretched_axes(declared_for("paged_attention"), prompts, 0).keys() == found
        pages = declared_for("paged_decode")
        paged = PagedDecodeCase(**ROWS | {"seq_lens": rows}, block_size=4)
        assert bool(stretched_cache_axes(pages, paged, 0)) is bool(found)
    strides = stretched_strides((3, 4, 16), 0, least=0)
    assert max(strides) < 1 << 31 <= 2 * strides[0]
