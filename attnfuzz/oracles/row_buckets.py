"""Blocks of rows of similar size, to be padded to one size and computed together. Torch-free.

A block is one sequence, whose rows are its KV heads, or one merge, whose rows are its (token, head) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["BlockSize", "Bucket", "buckets"]


class BlockSize(NamedTuple):
    """Its elements are the products of query heads, tokens and head size."""

    num_tokens: int
    head_size: int
    group: int
    num_rows: int


@dataclass(slots=True)
class Bucket:
    """Blocks, by index, and the size that all their rows are padded to."""

    blocks: list[int]
    num_tokens: int
    head_size: int
    group: int
    num_rows: int

    @property
    def row_elements(self) -> int:
        """Of one padded row."""
        return self.num_tokens * self.head_size * self.group


def buckets(sizes: Sequence[BlockSize], *, most_padding: int, most_elements: int) -> list[Bucket]:
    """Put blocks together, the longest first, for as long as that adds at most `most_padding` elements to a bucket.

    A bucket costs a number of launches that does not depend on its size, and padding costs what other elements do: with
    as much padding as takes the time of those launches, no partition is much cheaper. Only a block that has more than
    `most_elements` makes a larger bucket.
    """
    found: list[Bucket] = []
    own = 0
    for block in sorted(range(len(sizes)), key=lambda block: sizes[block], reverse=True):
        num_tokens, head_size, group, num_rows = sizes[block]
        elements = num_tokens * head_size * group * num_rows
        if found:
            last = found[-1]
            widest, largest_group = max(head_size, last.head_size), max(group, last.group)
            padded = last.num_tokens * widest * largest_group * (last.num_rows + num_rows)
            if padded <= most_elements and padded - own - elements <= most_padding:
                last.blocks.append(block)
                last.head_size, last.group = widest, largest_group
                last.num_rows += num_rows
                own += elements
                continue
        found.append(Bucket([block], num_tokens, head_size, group, num_rows))
        own = elements
    return found
