"""Strides, block tables, boundaries of tiles and the hash that shuffles pages."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.problems.block_table import block_table_rows, num_blocks, physical_pages, used_blocks
from attnfuzz.problems.boundaries import (
    boundary_lengths,
    boundary_positions,
    has_empty_split,
    num_splits_of,
    split_count,
    steps_of,
    tile_sizes,
)
from attnfuzz.problems.cases import PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.hashing import fold, mix, stream_key
from attnfuzz.problems.recipes import STRIDE_KINDS, Pages, StrideKind
from attnfuzz.problems.shapes import last_dim_contiguous, strided_layout
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import OptionValue, Supports
from tests.sample_cases import paged_case

SHAPES = [(5,), (1,), (3, 4), (1, 7), (2, 3, 16), (4, 2, 1, 13), (2, 2, 3, 2, 8), (3, 0, 4)]


def addresses(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> list[int]:
    indices = itertools.product(*map(range, shape))
    return [offset + sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]


@pytest.mark.parametrize("kind", STRIDE_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_elements_have_distinct_places_up_to_the_end(shape: tuple[int, ...], kind: StrideKind) -> None:
    """Two elements would share an address, lie outside, or leave a gap before the red zone behind them."""
    strides, storage_elements, offset = strided_layout(shape, kind, 2)
    places = addresses(shape, strides, offset)
    assert len(set(places)) == len(places)
    assert max(places, default=offset - 1) == storage_elements - 1
    assert min(places, default=offset) == offset


def test_strides_of_each_kind() -> None:
    """A recipe would test something else than its name says."""
    shape = (2, 3, 8)
    assert strided_layout(shape, "contiguous", 2) == ((24, 8, 1), 48, 0)
    assert strided_layout(shape, "offset", 2) == ((24, 8, 1), 49, 1)
    assert strided_layout(shape, "every_other", 2) == ((48, 16, 2), 95, 0)
    assert strided_layout(shape, "transposed", 2) == ((8, 16, 1), 48, 0)
    assert strided_layout(shape, "padded_rows", 2).strides == (33, 11, 1)
    assert strided_layout(shape, "outer_gap", 2) == ((32, 8, 1), 56, 0)
    assert strided_layout((5,), "outer_gap", 4).strides == (1,)
    assert strided_layout((5,), "transposed", 4).strides == (1,)
    assert strided_layout((5,), "padded_rows", 4).strides == (1,)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("row", [1, 2, 3, 4, 7, 8, 63, 64])
def test_padded_rows_break_alignment(row: int, itemsize: int) -> None:
    """Rows would stay aligned, so a kernel's vector loads would never meet an odd row."""
    stride = strided_layout((2, row), "padded_rows", itemsize).strides[0]
    assert stride - row in (3, 4)
    assert stride * itemsize % 8


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 16), (4, 2, 13), (3, 5, 2, 72), (2, 2, 3, 2, 8)], ids=str)
def test_an_outer_gap_is_what_a_slice_leaves(shape: tuple[int, ...], itemsize: int) -> None:
    """Gaps would be unlike those of a fused projection, or break the alignment that engines keep."""
    plain, gapped = (strided_layout(shape, kind, itemsize).strides for kind in ("contiguous", "outer_gap"))
    gap = gapped[0] - plain[0]
    assert gapped[1:] == plain[1:]
    assert gap > 0 == gap * itemsize % 16 == gap % plain[1]


@pytest.mark.parametrize("kind", STRIDE_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_last_dim_contiguous_tells_the_truth(shape: tuple[int, ...], kind: StrideKind) -> None:
    """A kernel that needs a contiguous last dimension would be given one that is not, or be spared valid strides."""
    tensor = PlainAllocator().tensor("x", shape, torch.float32, strides=kind, role="input")
    assert last_dim_contiguous(shape, kind) == (tensor.stride(-1) == 1)


def test_unknown_kind_is_refused() -> None:
    """A misspelt recipe would pass as contiguous."""
    unchecked: Any = inspect.unwrap(strided_layout)  # the test run checks annotated types first
    with pytest.raises(ValueError, match="stride kind 'sideways' must be one of"):
        unchecked((2, 3), "sideways", 2)


SEQ_LENS = [(0,), (1,), (8,), (5, 0, 9), (0, 0, 7), (9, 4, 12, 1), (3, 30)]


def paged(seq_lens: tuple[int, ...], **pages: Any) -> PagedDecodeCase:
    return paged_case(head_size=4, seq_lens=seq_lens, scale=1.0, pages=Pages(**pages))


def all_cases() -> list[PagedDecodeCase]:
    orders = ("identity", "reversed", "shuffled")
    choices = itertools.product(SEQ_LENS, orders, (0, 3), (0, 1, 2, 50))
    return [
        paged(seq_lens, order=order, spare_blocks=spare, shared_blocks=shared)
        for seq_lens, order, spare, shared in choices
    ]


def test_pages_are_owned_once_unless_shared() -> None:
    """Two sequences would overwrite each other's tokens, or a shared prefix would not be shared."""
    for case in all_cases():
        pages = physical_pages(case)
        assert [len(row) for row in pages] == [case.blocks_of(i) for i in range(case.num_seqs)]
        shared = min(case.pages.shared_blocks, len(pages[0]))
        for row in pages[1:]:
            common = min(shared, len(row))
            assert row[:common] == pages[0][:common]
        own = [page for i, row in enumerate(pages) for page in (row[min(shared, len(row)) :] if i else row)]
        assert len(set(own)) == len(own) == used_blocks(case)
        assert all(0 <= page < num_blocks(case) for page in own)


def test_orders() -> None:
    """The physical order of pages would not be the one that the case names."""
    assert physical_pages(paged((5, 0, 9))) == ((0, 1), (), (2, 3, 4))
    assert physical_pages(paged((5, 0, 9), order="reversed", spare_blocks=2)) == ((4, 3), (), (2, 1, 0))
    assert physical_pages(paged((5, 0, 9), shared_blocks=1)) == ((0, 1), (), (0, 2, 3))


def test_shuffled_order_is_fixed_forever() -> None:
    """Saved cases would be rebuilt with other page numbers."""
    case = paged((16, 12), order="shuffled", spare_blocks=3, seed=7)
    shuffled = ((9, 3, 8, 0), (4, 7, 2))
    assert physical_pages(case) == shuffled
    assert physical_pages(paged((16, 12), order="shuffled", spare_blocks=3, seed=8)) != shuffled


def test_shared_tokens_end_with_sequence_0() -> None:
    """Tokens past sequence 0's pages would be taken for shared ones."""
    assert paged((5, 30), shared_blocks=1).shared_tokens == 4
    assert paged((5, 30), shared_blocks=9).shared_tokens == 8
    assert paged((0, 30), shared_blocks=9).shared_tokens == 0


def test_cache_has_at_least_one_page() -> None:
    """A batch of empty sequences would get a cache of no elements."""
    assert num_blocks(paged((0, 0))) == 1
    assert num_blocks(paged((0, 0), spare_blocks=3)) == 3


@pytest.mark.parametrize("padding", ["zero", "wrong_page", "garbage"])
def test_rows_are_live_pages_then_padding(padding: str) -> None:
    """Entries past the last page would be undefined, or live ones overwritten."""
    for seq_lens in SEQ_LENS:
        case = paged(seq_lens, padding=padding, extra_columns=5, spare_blocks=2)
        rows = block_table_rows(case)
        assert {len(row) for row in rows} == {case.max_blocks_per_seq}
        for row, live in zip(rows, physical_pages(case), strict=True):
            assert row[: len(live)] == live
            unused = row[len(live) :]
            if padding == "zero":
                assert set(unused) <= {0}
            elif padding == "wrong_page":
                assert all(0 <= page < num_blocks(case) for page in unused)
                assert not set(unused) & set(live), "a page of the sequence itself is not wrong enough"
            else:
                assert set(unused) == {-1, 2**31 - 1, num_blocks(case)}


def test_wrong_page_of_a_sequence_that_owns_the_whole_cache() -> None:
    """Looking for a page that is not there would never end."""
    case = paged((8,), padding="wrong_page", extra_columns=7)
    assert set(block_table_rows(case)[0]) == {0, 1}


def test_tiles_are_the_integer_options_that_can_be_token_counts() -> None:
    """The boundary of a tile under an unusual name would never be aimed at."""
    options: dict[str, OptionValue] = {"BLOCK_N": 64, "tile": 16, "num_warps": 4, "num_splits": 8, "fast": True}
    assert tile_sizes(options) == (64, 16)
    assert split_count(options) == 8


def test_without_a_split_option_there_is_one_split() -> None:
    """A kernel without splits would be given cases that count empty ones."""
    assert split_count({"tile": 16}) == 1


def test_a_case_names_its_steps_and_splits() -> None:
    """The minimiser would not move lengths to the boundaries of the case at hand."""
    paged = simplest_case("paged_decode", Supports(block_sizes=(24,)), {"tile": (32,), "kv_splits": (3,)})
    split = simplest_case("split_decode", Supports(), {})
    assert isinstance(paged, PagedDecodeCase)
    assert isinstance(split, SplitDecodeCase)
    assert steps_of(paged) == (24, 32)
    assert num_splits_of(paged) == 3
    assert num_splits_of(msgspec.structs.replace(split, num_splits=5)) == 5


def test_lengths_surround_every_boundary() -> None:
    """Off-by-one errors at the end of a page, tile or split would stay out of reach."""
    lengths = boundary_lengths((16, 24), 4, 100)
    assert {0, 1, 2} <= set(lengths)
    for boundary in (16, 24, 32, 48, 4, 64, 96):
        assert {boundary - 1, boundary, boundary + 1} <= set(lengths)
    assert lengths == tuple(sorted(set(lengths)))
    assert max(lengths) == 100


def test_positions_name_first_and_last_token_of_each_part() -> None:
    """A needle would miss the token that a boundary error drops or doubles."""
    positions = boundary_positions(40, (16,), 3)
    assert {0, 39, 15, 16, 31, 32} <= set(positions)  # sequence, first and last page
    assert {13, 14, 27, 28} <= set(positions)  # splits of ceil(40 / 3) = 14 tokens
    assert all(0 <= position < 40 for position in positions)


def test_an_empty_sequence_has_no_position() -> None:
    """A needle would be put on a token that does not exist."""
    assert boundary_positions(0, (16,), 3) == ()


@pytest.mark.parametrize(
    ("seq_len", "num_splits", "empty"),
    [(5, 4, True), (8, 4, False), (3, 4, True), (0, 2, True), (0, 1, False)],
)
def test_empty_splits_are_those_of_flash_decoding(seq_len: int, num_splits: int, empty: bool) -> None:
    """A finding would be described by a feature that it does not have."""
    assert has_empty_split(seq_len, num_splits) is empty


MASK = 0xFFFFFFFF
WORDS = [0, 1, 2, 255, 65536, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF, *range(3, 4000, 37)]


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def test_mix_is_lowbias32() -> None:
    """The hash would no longer be the published one, and saved cases would rebuild other numbers."""
    assert [mix(word) for word in WORDS] == [lowbias32(word) for word in WORDS]


def test_golden_words() -> None:
    """A change of constants or of the folding order would silently change every saved case."""
    assert [mix(word) for word in (0, 1, 2, MASK, 0xDEADBEEF)] == [0, 1753845952, 3507691905, 1734902346, 3861431939]
    assert [stream_key(0, 1), stream_key(12345, 3)] == [2705548786, 2283828689]
    assert fold(stream_key(7, 2), 9) == 1007668853


def test_torch_and_python_agree() -> None:
    """Tensors would hold other numbers than the page map computed in Python expects."""
    words = torch.tensor(WORDS)
    assert mix(words).tolist() == [mix(word) for word in WORDS]
    assert words.tolist() == WORDS, "mix changed its argument"
    key = stream_key(3, 4)
    assert fold(key, words).tolist() == [fold(key, word) for word in WORDS]


def test_mix_has_no_collisions() -> None:
    """The shuffled page order relies on distinct pages having distinct hashes."""
    assert len(set(mix(torch.arange(1 << 16)).tolist())) == 1 << 16


def test_every_output_bit_depends_on_small_inputs() -> None:
    """Neighbouring counters would give visibly related numbers."""
    flipped = mix(torch.arange(4096)) ^ mix(torch.arange(4096) ^ 1)
    shares = torch.stack([(flipped >> bit & 1).double().mean() for bit in range(32)])
    assert shares.min() > 0.4
    assert shares.max() < 0.6
