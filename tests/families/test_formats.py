"""`attnfuzz.families.formats`: what bytes stand for, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.families.formats import FORMATS, rotation


def test_numbers_are_those_of_the_formats() -> None:
    """Kernels would be held to another format than the one that engines have."""
    packed = torch.tensor([[0x21, 0xF7, 0x9A, 0x50, 0x11, 0x11, 0x11, 0x11]], dtype=torch.uint8)  # 16 codes
    scales = torch.tensor([[1.5]], dtype=torch.float8_e4m3fn)
    read = FORMATS["nvfp4"].read(packed, scales, of_all=torch.tensor([0.5]))
    of_codes = (0.5, 1.0, 6.0, -6.0, -1.0, -0.5, 0.0, 3.0)
    assert read[0, :8].tolist() == [0.75 * number for number in of_codes]
    wide = packed.repeat(1, 2)
    read = FORMATS["mxfp4"].read(wide, torch.tensor([[125]], dtype=torch.uint8))
    assert read[0, :8].tolist() == [number / 4 for number in of_codes]
    read = FORMATS["int4"].read(packed, torch.tensor([[0.25]]), torch.tensor([3], dtype=torch.uint8))
    assert read[0, :8].tolist() == [(code - 3) / 4 for code in (1, 2, 7, 15, 10, 9, 0, 5)]


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.numbers_in_one == 2])
def test_codes_come_back_as_they_were_packed(name: str) -> None:
    """A writer and a reader would disagree about which half of a byte is first."""
    codes = torch.arange(32, dtype=torch.uint8).remainder(16)[None]
    form = FORMATS[name]
    assert torch.equal(form.codes(form.packed(codes)), codes)


def test_each_block_has_its_own_scale() -> None:
    """The scale of one block would be that of all."""
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    read = FORMATS["nvfp4"].read(packed, scales, of_all=torch.tensor([1.0]))
    assert read[0].tolist() == [1.0] * 16 + [2.0] * 16


def test_zero_points_lie_in_the_scales_of_a_rotated_cache() -> None:
    """They would count in the scale, or be looked for elsewhere."""
    bits = torch.tensor([[0.25]]).view(torch.int32) | 3
    read = FORMATS["int4_rotated"].read(torch.tensor([[0x21]], dtype=torch.uint8), bits.view(torch.float32))
    assert read.tolist() == [[-0.5, -0.25]]


def test_numbers_of_8_bits_are_their_own_codes() -> None:
    """int8 would be read without its sign."""
    read = FORMATS["int8"].read(torch.tensor([[-3, 127]], dtype=torch.int8), torch.tensor([[0.5]]))
    assert read.tolist() == [[-1.5, 63.5]]


@pytest.mark.parametrize("head_size", [16, 48])
def test_the_rotation_is_taken_back_by_its_transpose(head_size: int) -> None:
    """Sizes that are no power of two would be rotated as a whole, and lengths would not be kept."""
    turn, block = rotation(head_size), 16
    assert torch.equal(turn @ turn.mT, block * torch.eye(head_size, dtype=torch.float64))
    assert not turn[:block, block:].any()
