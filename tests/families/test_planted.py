"""`attnfuzz.families`: planted bugs of each kind are found and shrunk, and right kernels are silent."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz
from attnfuzz.families import block_sparse_kernels as block_sparse_bundled
from attnfuzz.families import history_kernels as history_bundled
from attnfuzz.families import hybrid_decode_kernels as hybrid_decode_bundled
from attnfuzz.families import indexer_topk_kernels as indexer_topk_bundled
from attnfuzz.families import latent_verify_kernels as latent_verify_bundled
from attnfuzz.families import merge_ranks_kernels as merge_ranks_bundled
from attnfuzz.families import packed_decode_kernels as packed_decode_bundled
from attnfuzz.families import recurrent_decode_kernels as recurrent_decode_bundled
from attnfuzz.families import sparse_decode_kernels as sparse_decode_bundled
from tests.families import (
    block_sparse_kernels,
    history_kernels,
    hybrid_decode_kernels,
    indexer_topk_kernels,
    latent_verify_kernels,
    merge_ranks_kernels,
    packed_decode_kernels,
    recurrent_decode_kernels,
    sparse_decode_kernels,
)
from tests.families.searched import smallest_cases


def is_small_block_sparse(bug: str, case: Any) -> bool:
    shape = (case.gqa_ratio, case.head_size, case.sparse_block) == (1, 16, 16)
    heads = 3 if bug in ("one_head", "first_row") else 1  # each has a list of its own, drawn by the seed
    return bool(shape and case.num_kv_heads <= heads and len(case.lengths) <= 2 and sum(case.lengths) <= 34)


def is_small_history(bug: str, case: Any) -> bool:
    shape = (case.num_kv_heads, case.gqa_ratio, case.head_size) == (1, 1, 16)
    return bool(shape and case.num_steps <= 3 and len(case.prompts) <= (3 if bug == "old_table" else 2))


def is_small_hybrid_decode(bug: str, case: Any) -> bool:
    del bug
    return bool((case.head_size, case.num_kv_heads, case.gqa_ratio) == (16, 1, 1) and sum(case.lengths) <= 20)


def is_small_indexer_topk(bug: str, case: Any) -> bool:
    most = 1 if bug in ("one_short", "last_again", "zero_fill", "unwritten", "no_length") else 70
    return bool(
        case.topk == (64 if bug == "tiles" else 16) and sum(case.lengths) <= most and case.strides == "contiguous"
    )


def is_small_latent_verify(bug: str, case: Any) -> bool:
    most = (64 if bug in ("whole_tiles", "page_size") else 20, 256 if bug == "one_scale" else 16)
    return bool(case.num_heads == 1 and sum(case.contexts) <= most[0] and case.rank <= most[1])


def is_small_merge_ranks(bug: str, case: Any) -> bool:
    shape = (case.head_size, case.padded) == (16, 0)
    return bool(shape and sum(case.seq_lens) <= 20 and case.num_ranks <= (3 if bug == "two_ranks" else 2))


def is_small_packed_decode(bug: str, case: Any) -> bool:
    shape = (2 if bug == "scale_of_head_0" else 1, 1)
    return bool((case.num_kv_heads, case.gqa_ratio) == shape and sum(case.lengths) <= 4 and case.head_size <= 64)


def is_small_recurrent_decode(bug: str, case: Any) -> bool:
    return sum(case.tokens) <= 4 and (case.head_size, case.v_head_size) == (16, 16)


def is_small_sparse_decode(bug: str, case: Any) -> bool:
    shape = (case.num_heads, case.dtype) == (1, "bfloat16")
    return bool(shape and sum(case.named) <= 8 and len(case.named) <= (3 if bug == "first_length" else 2))


FAMILIES: dict[str, tuple[Any, Any, Any, int, int]] = {
    "block_sparse": (block_sparse_kernels, block_sparse_bundled, is_small_block_sparse, 60, 15),
    "history": (history_kernels, history_bundled, is_small_history, 40, 8),
    "hybrid_decode": (hybrid_decode_kernels, hybrid_decode_bundled, is_small_hybrid_decode, 60, 15),
    "indexer_topk": (indexer_topk_kernels, indexer_topk_bundled, is_small_indexer_topk, 100, 20),
    "latent_verify": (latent_verify_kernels, latent_verify_bundled, is_small_latent_verify, 60, 20),
    "merge_ranks": (merge_ranks_kernels, merge_ranks_bundled, is_small_merge_ranks, 100, 30),
    "packed_decode": (packed_decode_kernels, packed_decode_bundled, is_small_packed_decode, 60, 15),
    "recurrent_decode": (recurrent_decode_kernels, recurrent_decode_bundled, is_small_recurrent_decode, 40, 12),
    "sparse_decode": (sparse_decode_kernels, sparse_decode_bundled, is_small_sparse_decode, 60, 20),
}
"""Of each its planted kernels, the bundled ones, what is a small case, and how many cases either kind is asked."""
PLANTED = [(family, bug) for family, (kernels, *_) in FAMILIES.items() for bug in kernels.PLANTED]
RIGHT = [(family, name) for family in FAMILIES for name in ("right", f"{family}_eager", family)]
RIGHT += [("sparse_decode", "sparse_decode_auto")]


@pytest.mark.parametrize(("family", "bug"), PLANTED)
@pytest.mark.by_day(
    "block_sparse-cut_at_the_end", "block_sparse-up_to_the_first",
    "history-plan_by_batch_size", "history-first_write_stays", "hybrid_decode-names_blocks", "hybrid_decode-window",
    "indexer_topk-ties_first", "indexer_topk-zero_fill", "indexer_topk-sign_of_bits",
    "latent_verify-sees_later", "latent_verify-one_scale",
    "merge_ranks-both_empty", "merge_ranks-believes", "merge_ranks-base",
    "packed_decode-high_first", "packed_decode-zeros_of_k", "packed_decode-first_block", "packed_decode-subnormal",
    "recurrent_decode-sentinel_is_slot_0", "recurrent_decode-gate_step",
    "sparse_decode-minus_one", "sparse_decode-once", "sparse_decode-no_length",
)  # fmt: skip
def test_planted_bugs_are_found_and_shrunk(family: str, bug: str) -> None:
    """A kernel that masks, merges, keeps or reads what it should not would pass, or be shown on a large case."""
    kernels, _, is_small, *_ = FAMILIES[family]
    cases = smallest_cases(getattr(kernels, bug))
    assert [case for case in cases if not is_small(bug, case)] == []


@pytest.mark.parametrize(("family", "name"), RIGHT)
@pytest.mark.by_day("*_eager")
def test_right_kernels_are_silent(family: str, name: str) -> None:
    """Empty ranks, padded rows, sentinels, or what 8 bits or float32 hold would be called bugs."""
    kernels, bundled, _, of_right, of_bundled = FAMILIES[family]
    kernel, asked = (kernels.right, of_right) if name == "right" else (getattr(bundled, name), of_bundled)
    attnfuzz.fuzz(kernel, max_examples=asked, device="cpu")(lambda: None)()


def test_zero_points_may_be_summed_apart_from_codes() -> None:
    """What float32 loses where two sums cancel would be called a bug of vLLM's way to read int4."""
    attnfuzz.fuzz(packed_decode_kernels.folded, max_examples=60, device="cpu")(lambda: None)()


def test_states_may_be_merged_one_after_another() -> None:
    """A ring, which rounds the log-sum-exp with each state, would be accused of the last bit of a large one."""
    attnfuzz.fuzz(merge_ranks_kernels.folded, max_examples=100, device="cpu")(lambda: None)()
