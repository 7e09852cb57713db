"""Live elements far away, poison around them, decoys where short offsets land."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnfuzz.isolation.memory_faults import FaultMap, read_regions
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.far import FAR, FarAllocator, gapped_strides, landings, stretched_strides, wrapped


def allocator(**changes: Any) -> FarAllocator:
    return FarAllocator(Arena("cpu", poison="nan", prefill="nan"), **changes)


def test_pages_begin_where_they_are_told_to() -> None:
    """The case's tokens would lie at low ids after all."""
    first = FAR // 64
    memory = allocator(first_page=first)
    window = memory.tensor("k_cache", (3, 4, 1, 16), torch.float16, strides="contiguous", role="input")
    cache = memory.whole["k_cache"]
    assert cache.shape == (first + 3, 4, 1, 16)
    assert cache[first:].data_ptr() == window.data_ptr() == cache.data_ptr() + 2 * FAR
    assert window.isnan().all()


def test_a_mask_begins_where_it_is_told_to() -> None:
    """Offsets into it would fit into 32 bits after all."""
    first = (1 << 31) - 8
    memory = allocator(first_entry=first)
    window = memory.tensor("mask", (12,), torch.uint8, strides="contiguous", role="input")
    mask = memory.whole["mask"]
    assert mask.shape == (first + 12,)
    assert mask[first:].data_ptr() == window.data_ptr() == mask.data_ptr() + first
    assert window.eq(255).all()
    assert mask[first - 100 : first].eq(0).all()


def test_decoys_lie_where_short_offsets_and_ids_land() -> None:
    """A wrapped offset would read zeros, which are the right answer now and then."""
    first = FAR // 64
    memory = allocator(first_page=first)
    memory.tensor("k_cache", (3, 4, 1, 16), torch.float16, strides="contiguous", role="input")
    cache = memory.whole["k_cache"]
    assert len(set(cache[:3].flatten().tolist())) > 50  # 2^32 elements further down, and page id modulo 2^16
    assert cache[3:100].eq(0).all()
    assert first % (1 << 16) == 0


@pytest.mark.parametrize("shape", [(3, 4, 16), (5, 3, 12), (4, 2, 1), (2, 8, 5, 128)])
def test_small_gaps_are_compiled_for_already(shape: tuple[int, ...]) -> None:
    """On a GPU each kernel would be compiled for them, for as long as it judges a hundred cases."""
    contiguous = torch.empty(shape).stride()
    for axis in range(len(shape) - 1):
        strides = gapped_strides(shape, axis)
        assert strides[axis] > contiguous[axis]
        assert [stride % 16 for stride in strides] == [stride % 16 for stride in contiguous]


def test_a_wide_stride_passes_2_31_elements_and_fits_into_32_bits() -> None:
    """A stride that does not fit makes a 64-bit product of it, and nothing overflows."""
    assert stretched_strides((5, 3, 16), 0) == ((1 << 30) + 48, 16, 1)
    assert stretched_strides((2, 3, 16), 1)[1] == (1 << 30) + 16
    for shape in ((3, 7), (4, 7, 13), (5, 3, 16)):
        wide = stretched_strides(shape, 0)[0]
        assert wide < 1 << 31 <= (shape[0] - 1) * wide
        contiguous = torch.empty(shape).stride()[0]
        assert (wide - contiguous) % 64 == 0  # aligned alike: libraries may add in another order otherwise


def test_on_a_host_every_index_but_the_first_two_passes_2_31_elements() -> None:
    """Of a page with many tokens, a short sequence would have none whose index overflows in 32 bits."""
    for count in (3, 4, 7, 16):
        stride = allocator(stretched={"q": 0}).tensor(
            "q", (count, 3, 8), torch.float16, strides="contiguous", role="input"
        ).stride()[0]  # fmt: skip
        assert stride < 1 << 31 <= 2 * stride
        assert (count - 1) * stride >= (FAR if count > 3 else FAR >> 1)


def test_an_index_that_wraps_comes_out_beside_the_rows() -> None:
    """It would find the first row in place of the fifth, which may hold the same numbers."""
    rows = allocator(stretched={"q": 0}).tensor("q", (6, 3, 8), torch.float16, strides="contiguous", role="input")
    assert rows.isnan().all()
    landed = rows.as_strided((24,), (1,), 4 * rows.stride()[0] - FAR)
    assert not landed.isnan().any()
    assert len(set(landed.tolist())) > 10


def test_stretched_tensors_do_not_overlap() -> None:
    """Rows would overwrite each other, and a right kernel would be wrong."""
    memory = allocator(stretched={"out": 1})
    out = memory.tensor("out", (2, 3, 16), torch.float32, strides="contiguous", role="output")
    out.copy_(torch.arange(96.0).view(2, 3, 16))
    assert out.flatten().tolist() == list(range(96))
    assert memory.tensor("q", (2, 3, 16), torch.float32, strides="contiguous", role="input").is_contiguous()


def test_a_fault_below_is_told_by_the_tensors_name() -> None:
    """A death of an offset that came out negative could not be put down to anything."""
    record = bytearray(1 << 12)
    memory = allocator(first_page=FAR // 64, fault_map=FaultMap(memoryview(record)))
    window = memory.tensor("v_cache", (3, 4, 1, 16), torch.float16, strides="contiguous", role="input")
    (region,) = read_regions(bytes(record))
    assert (region.name, region.oracle, region.dtype) == ("v_cache", "page_relocation", "float16")
    assert region.low == region.start - (1 << 32)
    assert region.start < window.data_ptr() < region.end


@pytest.mark.parametrize(
    ("start", "length", "bits", "signed", "pieces"),
    [
        (5, 3, 16, False, [(5, 3)]),
        (65_536, 3, 16, False, [(0, 3)]),
        (65_534, 4, 16, False, [(65_534, 2), (0, 2)]),
        (32_767, 2, 16, True, [(32_767, 1), (-32_768, 1)]),
        ((1 << 31) + 7, 4, 32, True, [(-(1 << 31) + 7, 4)]),
        ((1 << 32) + 7, 4, 32, True, [(7, 4)]),
    ],
)
def test_a_range_wraps_as_integers_of_so_many_bits_do(
    start: int, length: int, bits: int, signed: bool, pieces: list[tuple[int, int]]
) -> None:
    """Decoys would lie where nobody looks, and a wrapped offset would read zeros."""
    assert list(wrapped(start, length, bits, signed=signed)) == pieces


def test_landings_of_elements_and_bytes() -> None:
    """An overflow in bytes, as of a buffer descriptor, comes out elsewhere than one in elements."""
    assert landings(100, 8, 2) == set()
    assert landings((1 << 30) + 100, 8, 2) == {(-(1 << 30) + 100, 8)}  # signed bytes
    just_past = (1 << 31) + 100
    assert landings(just_past, 8, 2) == {(-(1 << 31) + 100, 8), (100, 8)}  # signed elements; bytes of either sign
    assert landings((1 << 32) + 100, 8, 4) == {(100, 8)}
