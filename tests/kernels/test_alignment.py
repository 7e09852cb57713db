"""What strides have in common."""

from __future__ import annotations

import torch

from attnfuzz.kernels.common.alignment import common_alignment, in_units


def test_alignment_is_that_of_every_row() -> None:
    """Strides in units would lose their remainder, and rows be read from elsewhere."""
    tensors = [torch.zeros(3, 2, size) for size in (64, 24, 12)]
    assert common_alignment(*(t.half() for t in tensors[:2])) == 8
    assert common_alignment(*(t.half() for t in tensors)) == 4
    assert common_alignment(*tensors) == 4
    assert common_alignment(tensors[0], tensors[2][..., 1:], torch.zeros(3, 2, 7)) == 1
    assert in_units(tensors[1].stride(), 8) == (6, 3, 1)
