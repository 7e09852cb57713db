"""What the wrappers of merge kernels work out on the host: blocks, and results in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_power_of_two

__all__ = ["Block", "block_of", "takes_place_of"]


class Block(NamedTuple):
    """Tokens, heads and elements of a head that a program takes, each a power of two."""

    tokens: int
    heads: int
    head_size: int

    def number_for(self, num_tokens: int, num_heads: int) -> int:
        """Blocks that cover all tokens and heads."""
        return math.ceil(num_tokens / self.tokens) * math.ceil(num_heads / self.heads)


def block_of(num_heads: int, head_size: int, block_elements: int, block_tokens: int) -> Block:
    """A block of at most ``block_elements`` elements, but at least one row, and at most ``block_tokens`` tokens.

    No more heads than there are, up to a power of two: tokens take their place. Raises ValueError.
    """
    check_power_of_two("block_elements", block_elements)
    check_power_of_two("block_tokens", block_tokens)
    width = triton.next_power_of_2(head_size)
    rows = max(1, block_elements // width)
    heads = min(max(1, rows // block_tokens), triton.next_power_of_2(max(1, num_heads)))
    return Block(rows // heads, heads, width)


def takes_place_of(results: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> bool:
    """Whether a result is the memory of an input, element for element.

    Raises ValueError if it begins where an input does, but lies there in another order: elements would be overwritten
    before they are read.
    """
    found = False
    for name, result in results.items():
        for other, tensor in inputs.items():
            if result.numel() and result.data_ptr() == tensor.data_ptr():
                if result.stride() != tensor.stride():
                    raise ValueError(
                        f"{name}.stride()={result.stride()} must be {tensor.stride()}, as {other} has them, to replace "
                        f"{other}; pass {name}={other} or memory of its own"
                    )
                found = True
    return found
