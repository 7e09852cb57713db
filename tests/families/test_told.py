"""`attnfuzz.families`: what is wrong with planted kernels is told where a replay of the reference gives it."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.explaining.explain import explain_case
from tests.families import block_sparse_kernels, hybrid_decode_kernels, packed_decode_kernels

_PAGED: dict[str, Any] = {
    "lengths": (3,), "num_kv_heads": 1, "gqa_ratio": 1, "head_size": 32, "block_size": 4, "layout": "NHD",
    "page_order": "identity", "shared_pages": 0, "spare_pages": 0, "extra_columns": 0, "unused_entries": "zero",
    "cache_strides": "contiguous", "dtype": "float16", "seed": 3,
}  # fmt: skip
_LISTS: dict[str, Any] = {**_PAGED, "lengths": (41,), "head_size": 16, "query_len": 2, "topk": 4, "named": 2}
_CHUNKS: dict[str, Any] = {**_PAGED, "lengths": (23,), "head_size": 16, "chunk": 15, "kernel_blocks": 2}
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
    ("hybrid_decode", "whole_pages"): ({}, "a chunk begins with the page of its first token"),
    ("hybrid_decode", "everything"): ({"lengths": (50,)}, "chunks are ignored"),
}
"""Of a planted kernel fields of a case that shows its bug, and what is told of it."""
KERNELS = {
    "packed_decode": (packed_decode_kernels, _PAGED),
    "block_sparse": (block_sparse_kernels, _LISTS),
    "hybrid_decode": (hybrid_decode_kernels, _CHUNKS),
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
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_name(family: str, bug: str) -> None:
    """A reader would have an element and two numbers, and would have to guess at scales, lists and chunks."""
    fields, words = TELLS[family, bug]
    assert causes_of(family, bug, fields) == [words]


@pytest.mark.parametrize("family", KERNELS)
def test_nothing_is_told_of_a_right_kernel(family: str) -> None:
    """A reader would look for a mistake that is none."""
    for fields in [fields for (of, _), (fields, _) in TELLS.items() if of == family]:
        assert causes_of(family, "right", fields) == []
