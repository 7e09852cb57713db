"""Blocks of the wide merge kernels, and results in place."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.kernels.merge.merge_blocks import Block, block_of, takes_place_of


@pytest.mark.parametrize(
    ("num_heads", "head_size", "elements", "tokens", "expected"),
    [
        (32, 128, 4096, 8, Block(8, 4, 128)),
        (32, 128, 4096, 1, Block(1, 32, 128)),
        (2, 64, 4096, 1, Block(32, 2, 64)),  # few heads: tokens in their place
        (5, 80, 1024, 2, Block(2, 4, 128)),
        (8, 1024, 512, 4, Block(1, 1, 1024)),  # a block has a row at least
        (1, 13, 64, 64, Block(4, 1, 16)),
    ],
)
def test_block(num_heads: int, head_size: int, elements: int, tokens: int, expected: Block) -> None:
    """Programs would be wider than their tensors, and idle, or larger than asked for, and out of registers."""
    assert block_of(num_heads, head_size, elements, tokens) == expected


def test_blocks_are_counted_up() -> None:
    """Heads or tokens that do not fill a block would be left out."""
    assert [Block(4, 2, 16).number_for(tokens, 3) for tokens in (0, 1, 4, 5)] == [0, 2, 2, 4]


def test_memory_of_another_tensor_is_known() -> None:
    """A kernel would load LSEs after other threads have overwritten them."""
    memory = torch.zeros(4, 4)
    assert takes_place_of({"output": memory}, {"prefix": torch.zeros(4, 4), "suffix": memory})
    assert not takes_place_of({"output": memory[1:]}, {"suffix": memory[:1]})
    assert not takes_place_of({"output": torch.zeros(0, 4)}, {"suffix": torch.zeros(0, 4)})
    with pytest.raises(ValueError, match=r"output.stride\(\)=\(1, 4\) must be \(4, 1\), as suffix has them"):
        takes_place_of({"output": memory.t()}, {"suffix": memory})


def test_results_that_overlap_with_an_input_are_refused() -> None:
    """Programs would read rows that others have replaced already: another result each time."""
    memory = torch.zeros(6, 2, 8)
    with pytest.raises(ValueError, match="output, which begins 64 bytes behind suffix, must not overlap"):
        takes_place_of({"output": memory[1:]}, {"suffix": memory[:-1]})
    with pytest.raises(ValueError, match="-128 bytes behind suffix, must not overlap"):
        takes_place_of({"output": memory[:4, :, ::2]}, {"suffix": memory[2:, :, ::2]})
    with pytest.raises(ValueError, match="must not overlap"):
        takes_place_of({"output": memory[:2].view(4, 8)}, {"suffix": memory[1:]})


def test_tensors_that_lie_between_each_other_do_not_overlap() -> None:
    """States that are kept side by side could not be merged into memory beside them."""
    memory = torch.zeros(6, 4, 8)
    assert not takes_place_of({"output": memory[:, 0]}, {"prefix": memory[:, 1], "suffix": memory[:, 3]})
    assert not takes_place_of({"output": memory[:, :, ::2]}, {"prefix": memory[:, :, 1::2]})
    assert not takes_place_of({"output": memory[1::2]}, {"prefix": memory[::2]})
