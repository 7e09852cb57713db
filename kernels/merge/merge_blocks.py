"""Work of the merge kernels' wrappers on the host: blocks, and results in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_power_of_two


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


def takes_place_of(results: Mapping[str, Tensor | None], inputs: Mapping[str, Tensor]) -> bool:
    """Whether a result is the memory of an input, element for element.

    Raises ValueError if it overlaps with one in another way: elements would be overwritten before they are read. Of two
    tensors with different strides that have gaps, that is not known, and the caller's to see to.
    """
    found = False
    for name, result in results.items():
        for other, tensor in inputs.items():
            if result is None or not _overlap(result, tensor):
                continue
            if behind := result.data_ptr() - tensor.data_ptr():
                raise ValueError(
                    f"{name}, which begins {behind} bytes behind {other}, must not overlap with it; "
                    f"pass {name}={other} or memory of its own"
                )
            if result.stride() != tensor.stride():
                raise ValueError(
                    f"{name}.stride()={result.stride()} must be {tensor.stride()}, as {other} has them, to replace "
                    f"{other}; pass {name}={other} or memory of its own"
                )
            found = True
    return found


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether both have an element in common, as far as that is known."""
    if not one.numel() or not other.numel():
        return False
    apart = one.data_ptr() - other.data_ptr()
    if not -_extent(one) < apart < _extent(other):
        return False
    if one.data_ptr() == other.data_ptr():
        return True
    if one.stride() == other.stride() and one.element_size() == other.element_size() and one.shape == other.shape:
        steps = sorted(zip(one.stride(), one.shape, strict=True), reverse=True)
        return apart % one.element_size() == 0 and _are_apart_by(apart // one.element_size(), steps)
    return all(_extent(tensor) == tensor.numel() * tensor.element_size() for tensor in (one, other))


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _are_apart_by(distance: int, steps: list[tuple[int, int]]) -> bool:
    """Whether two elements of a tensor lie so far apart; ``steps``: its strides with their sizes, largest first.

    Each stride is larger than all that the smaller ones reach, since no two elements share memory. So of what is left
    a stride is taken as often as it fits, or once more.
    """
    if not steps:
        return distance == 0
    (stride, size), *smaller = steps
    if stride == 0 or size == 1:
        return _are_apart_by(distance, smaller)
    times = distance // stride
    return any(abs(n) < size and _are_apart_by(distance - n * stride, smaller) for n in (times, times + 1))
