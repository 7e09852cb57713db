"""`attnfuzz.families.formats`: what bytes stand for, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.families.formats import FORMATS


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


@pytest.mark.parametrize("name", FORMATS)
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
