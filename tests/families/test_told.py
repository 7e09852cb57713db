"""`attnfuzz.families`: what is wrong with planted kernels is told where a replay of the reference gives it."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.explaining.explain import explain_case
from tests.families import (
    block_sparse_kernels,
    cache_write_kernels,
    hybrid_decode_kernels,
    latent_verify_kernels,
    merge_ranks_kernels,
    packed_decode_kernels,
    recurrent_decode_kernels,
    sparse_decode_kernels,
)

_PAGED: dict[str, Any] = {
    "lengths": (3,), "num_kv_heads": 1, "gqa_ratio": 1, "head_size": 32, "block_size": 4, "layout": "NHD",
    "page_order": "identity", "shared_pages": 0, "spare_pages": 0, "extra_columns": 0, "unused_entries": "zero",
    "cache_strides": "contiguous", "dtype": "float16", "seed": 3,
}  # fmt: skip
_LISTS: dict[str, Any] = {**_PAGED, "lengths": (41,), "head_size": 16, "query_len": 2, "topk": 4, "named": 2}
_CHUNKS: dict[str, Any] = {**_PAGED, "lengths": (23,), "head_size": 16, "chunk": 15, "kernel_blocks": 2}
_TOKENS: dict[str, Any] = {
    "tokens": (2, 3), "padded": 0, "num_heads": 2, "values_per_key": 2, "head_size": 16, "v_head_size": 16,
    "keeps": "last", "accepts": "one", "gates": "given", "per_channel": False, "normalised": True, "sentinel": -1,
    "spare_slots": 0, "strides": "contiguous", "state_strides": "contiguous", "state_dtype": "float32",
    "beta_dtype": "float32", "dtype": "float16", "seed": 3,
}  # fmt: skip
_RANKS: dict[str, Any] = {
    "seq_lens": (9, 4), "query_len": 1, "num_ranks": 3, "padded": 0, "num_heads": 1, "head_size": 16,
    "ownership": "interleaved", "empty": "-inf", "empty_outputs": "zeros", "lses": "usual", "base": "2",
    "parts": "float32", "strides": "contiguous", "lse": True, "dtype": "float16", "seed": 3,
}  # fmt: skip
_INDICES: dict[str, Any] = {
    "named": (9, 17), "topk": 64, "num_heads": 1, "head_size": 32, "v_head_size": 32, "sentinel": "-1",
    "scattered": True, "has_lengths": True, "repeats": True, "spare_slots": 2, "cache": "same",
    "q_strides": "contiguous", "scores": "usual", "lse": True, "empty_lse": "-inf", "dtype": "float16", "seed": 3,
}  # fmt: skip
_DRAFTS: dict[str, Any] = {
    "contexts": (5, 20), "query_len": 3, "ragged": True, "num_heads": 1, "rank": 16, "rope_size": 16,
    "block_size": 16, "spare_blocks": 0, "causal": True, "latents": "same", "q_strides": "contiguous",
    "scores": "usual", "lse": True, "dtype": "float16", "seed": 3,
}  # fmt: skip
_WRITTEN: dict[str, Any] = {
    "num_tokens": 3, "skipped": 1, "num_kv_heads": 1, "head_size": 16, "block_size": 16, "spare_blocks": 1,
    "layout": "NHD", "cache": "fp8", "rotary": "none", "rotated": "whole", "repeats": "none",
    "strides": "contiguous", "cache_strides": "contiguous", "zeros": False, "one_sided": False, "dtype": "float16",
    "seed": 3,
}  # fmt: skip
TELLS: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("packed_decode", "high_first"): (
        {"cache_format": "int4"},
        "the two halves of each byte of k_cache and v_cache are exchanged",
    ),
    ("packed_decode", "planes"): (
        {"cache_format": "nvfp4"},
        "the lower halves of all bytes are taken for the first half of a head",
    ),
    ("packed_decode", "symmetric"): ({"cache_format": "int4"}, "zero points are taken to be 8"),
    ("packed_decode", "zeros_of_k"): ({"cache_format": "int4"}, "k_zeros is read in place of v_zeros"),
    ("packed_decode", "three_bits"): (
        {"cache_format": "int4_rotated"},
        "zero points are read without their highest bit",
    ),
    ("packed_decode", "subnormal"): (
        {"cache_format": "nvfp4"},
        "the smallest number, which is subnormal, is read as 0",
    ),
    ("packed_decode", "global_of_k"): ({"cache_format": "nvfp4"}, "k_global is read in place of v_global"),
    ("packed_decode", "first_block"): (
        {"cache_format": "nvfp4", "head_size": 64},
        "k_scales and v_scales: the first block's is taken for each block",
    ),
    ("packed_decode", "swizzled"): (
        {"cache_format": "nvfp4", "head_size": 64},
        "v_scales are read in squares of four tokens and four blocks",
    ),
    ("packed_decode", "bias"): (
        {"cache_format": "mxfp4"},
        "exponents of scales are taken to have a bias of 128",
    ),
    ("packed_decode", "unsigned"): ({"cache_format": "int8"}, "int8 is read as uint8"),
    ("packed_decode", "scale_of_head_0"): (
        {"cache_format": "fp8", "num_kv_heads": 2},
        "k_scales and v_scales: that of the first head is taken for each",
    ),
    ("packed_decode", "scale_of_page"): (
        {"cache_format": "fp8"},
        "k_scales and v_scales: that of the first offset is taken for each",
    ),
    ("packed_decode", "unsigned_rotation"): (
        {"cache_format": "int4_rotated"},
        "the rotation's first row is taken for each of its rows",
    ),
    ("packed_decode", "v_stays_rotated"): ({"cache_format": "int4_rotated"}, "V is not rotated back"),
    ("block_sparse", "not_cut"): ({}, "a row sees all of a block, also what is behind its sequence"),
    ("block_sparse", "cut_at_the_end"): ({}, "a row sees what is behind its position"),
    ("block_sparse", "last_is_whole"): ({}, "the block of a row's position is left out unless it ends there"),
    ("block_sparse", "minus_one"): ({}, "-1 is taken for the first block"),
    ("block_sparse", "up_to_the_first"): ({"list_order": "shuffled"}, "a list ends at its first -1"),
    ("block_sparse", "one_head"): (
        {"num_kv_heads": 3, "has_last": False},
        "block_lists: that of the first kv head is taken for each",
    ),
    ("block_sparse", "first_row"): (
        {"lengths": (41, 90), "has_last": False},
        "the list of a sequence's first query token is taken for all of them",
    ),
    ("block_sparse", "pages"): ({}, "blocks are taken to have as many tokens as pages"),
    ("block_sparse", "always_last"): (
        {"has_last": False, "named": 1},
        "the block of a row's position is seen where its list does not name it",
    ),
    ("hybrid_decode", "names_blocks"): (
        {"kernel_blocks": 4, "spare_pages": 2},
        "an entry of the table is taken for a block of the kernel, not for a page",
    ),
    ("hybrid_decode", "packed"): (
        {"v_cache_strides": "outer_gap"},
        "k_cache and v_cache are read as if contiguous",
    ),
    ("hybrid_decode", "stride_of_k"): (
        {"v_cache_strides": "outer_gap"},
        "v_cache is read by the strides of k_cache",
    ),
    ("hybrid_decode", "offset_in_page"): (
        {},
        "the last place of a kernel's block is never read: places go by one fewer",
    ),
    ("hybrid_decode", "window"): ({}, "a chunk is taken for a sliding window"),
    ("hybrid_decode", "next_chunk"): (
        {"lengths": (30,)},
        "the last token of a chunk is taken for one of the next",
    ),
    ("hybrid_decode", "after_the_last"): (
        {"lengths": (30,)},
        "no token is seen where a chunk ends with the last one",
    ),
    ("hybrid_decode", "whole_pages"): ({}, "a chunk begins with the page of its first token"),
    ("hybrid_decode", "everything"): ({"lengths": (50,)}, "chunks are ignored"),
    ("recurrent_decode", "accepted"): (
        {"keeps": "each", "accepts": "some", "seed": 1},
        "a sequence begins from its first slot, however many tokens were accepted",
    ),
    ("recurrent_decode", "accepted_before"): (  # the number of a padded row, which is 1
        {"keeps": "each", "accepts": "some", "tokens": (2,), "padded": 1, "seed": 0},
        "a sequence begins from the slot that the number of the sequence before says",
    ),
    ("recurrent_decode", "decay_after"): ({}, "the state decays after it was corrected, not before"),
    ("recurrent_decode", "head_map"): ({}, "heads share keys in turn, not side by side"),
    ("recurrent_decode", "key_length"): ({}, "k is not divided by its length"),
    ("recurrent_decode", "chain"): ({"keeps": "tree"}, "a token goes on from the one before it, not from its parent"),
    ("recurrent_decode", "beta_of_v"): ({}, "beta is multiplied with v, and not with what the state says of the key"),
    ("recurrent_decode", "asked_first"): ({}, "what the state says of a key is taken before it decays"),
    ("merge_ranks", "base"): ({}, "logarithms to base 2 are taken for natural ones"),
    ("merge_ranks", "average"): ({}, "ranks weigh alike, in the log-sum-exp, too"),
    ("merge_ranks", "two_ranks"): ({}, "ranks past the second are left out"),
    ("merge_ranks", "local_lse"): ({}, "the log-sum-exp is that of the first rank"),
    ("merge_ranks", "by_ranks"): ({}, "weights are divided by the number of ranks, not by their sum"),
    ("sparse_decode", "minus_one"): ({}, "-1 names the last slot"),
    ("sparse_decode", "too_large"): ({"sentinel": "largest"}, "an index past the last slot names the last one"),
    ("sparse_decode", "up_to_the_first"): ({}, "a list ends at its first index that names no slot"),
    ("sparse_decode", "once"): ({}, "a slot that is named twice counts once"),
    ("sparse_decode", "values_last"): ({"head_size": 96}, "values are the last numbers of a row"),
    ("sparse_decode", "no_length"): ({}, "what stands behind topk_length is read, too"),
    ("sparse_decode", "one_more"): ({}, "the place at topk_length is read, too"),
    ("sparse_decode", "counted"): ({}, "topk_length counts the slots that a list names, not its places"),
    ("latent_verify", "sees_later"): ({}, "a new token sees those after it"),
    ("latent_verify", "from_the_start"): ({}, "the mask is that of new tokens at the start of a sequence"),
    ("latent_verify", "all_causal"): ({"causal": False}, "a new token does not see those after it"),
    ("latent_verify", "uniform"): ({}, "new tokens are masked as if each sequence had query_len of them"),
    ("latent_verify", "no_rope"): ({}, "scores leave out the rotary part"),
    ("latent_verify", "values_last"): ({}, "values are the last numbers of a row"),
    ("latent_verify", "rank_scale"): ({}, "the scale is that of the rank"),
    ("cache_write", "multiplied"): ({}, "K and V are multiplied with their scales, not divided by them"),
    ("cache_write", "k_scale"): ({}, "k_scale is read in place of v_scale"),
}
"""Of a planted kernel fields of a case that shows its bug, and what is told of it."""
KERNELS = {
    "packed_decode": (packed_decode_kernels, _PAGED),
    "block_sparse": (block_sparse_kernels, _LISTS),
    "hybrid_decode": (hybrid_decode_kernels, _CHUNKS),
    "recurrent_decode": (recurrent_decode_kernels, _TOKENS),
    "merge_ranks": (merge_ranks_kernels, _RANKS),
    "sparse_decode": (sparse_decode_kernels, _INDICES),
    "latent_verify": (latent_verify_kernels, _DRAFTS),
    "cache_write": (cache_write_kernels, _WRITTEN),
}


def causes_of(family: str, name: str, fields: dict[str, Any]) -> list[str]:
    kernels, usual = KERNELS[family]
    kernel = getattr(kernels, name)
    case = kernel.declaration.problem.case_type(**usual | fields)
    return [cause.words for cause in explain_case(kernel, case, device="cpu", seconds=600.0).causes or ()]


@pytest.mark.parametrize(("family", "bug"), TELLS)
@pytest.mark.by_day(
    "packed_decode-symmetric", "packed_decode-swizzled", "packed_decode-scale_of_head_0",
    "block_sparse-cut_at_the_end", "block_sparse-one_head", "hybrid_decode-window", "hybrid_decode-names_blocks",
    "packed_decode-v_stays_rotated", "block_sparse-not_cut", "hybrid_decode-packed", "hybrid_decode-stride_of_k",
    "recurrent_decode-accepted", "recurrent_decode-beta_of_v", "merge_ranks-average", "merge_ranks-by_ranks",
    "sparse_decode-minus_one", "sparse_decode-no_length", "latent_verify-uniform", "cache_write-*",
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_name(family: str, bug: str) -> None:
    """A reader would have an element and two numbers, and would have to guess at scales, lists and chunks."""
    fields, words = TELLS[family, bug]
    assert causes_of(family, bug, fields) == [words]


SMALL: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("block_sparse", "one_head"): (
        {
            "lengths": (17,),
            "num_kv_heads": 2,
            "block_size": 1,
            "query_len": 1,
            "topk": 1,
            "named": 1,
            "has_last": False,
            "seed": 0,
        },
        "",
    ),
    ("block_sparse", "up_to_the_first"): (
        {"lengths": (17,), "block_size": 1, "query_len": 1, "topk": 2, "named": 1, "seed": 0, "list_order": "shuffled"},
        "a list ends at its first -1",
    ),
    ("hybrid_decode", "relative_pages"): (
        {"lengths": (5,), "chunk": 1, "kernel_blocks": 1, "seed": 0},
        "16 of 128 elements of v_cache (page 1, block 0, offset 0, head 0, dim 0-15) are read 64 elements before their "
        "places, as many as 1 page has",
    ),
}
"""Cases in which a mistake gives the results of another one, and goes on to where all but lengths grow by little."""


@pytest.mark.parametrize(("family", "bug"), SMALL)
@pytest.mark.by_day("*up_to_the_first", "*relative_pages")
def test_what_only_a_small_case_bears_out_is_not_told(family: str, bug: str) -> None:
    """A reader would look for what is taken for each: the first column of a table, place of a list, head of a cache."""
    fields, words = SMALL[family, bug]
    assert causes_of(family, bug, fields) == ([words] if words else [])


@pytest.mark.parametrize("family", KERNELS)
def test_nothing_is_told_of_a_right_kernel(family: str) -> None:
    """A reader would look for a mistake that is none."""
    every = [fields for (of, _), (fields, _) in TELLS.items() if of == family]
    for fields in [one for i, one in enumerate(every) if one not in every[:i]]:
        assert causes_of(family, "right", fields) == []
