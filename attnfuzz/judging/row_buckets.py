"""Blocks of rows of similar size, to be padded to one size and computed together. Torch-free.

A block is one query token, whose rows are KV heads, or one merge, whose rows are its (token, head) pairs.
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
    """Put each block, the longest first, where it adds the least padding, unless that is more than `most_padding`.

    A bucket takes a number of operations that does not depend on its size, and padding takes the time that other
    elements take. On drawn cases, a quarter of the elements that take the time of a bucket's launches was the best
    `most_padding`. Only a block of its own has more than `most_elements`.
    """
    found: list[Bucket] = []
    for block in sorted(range(len(sizes)), key=lambda block: sizes[block], reverse=True):
        num_tokens, head_size, group, num_rows = size = sizes[block]
        best, least = None, most_padding
        for bucket in found:
            padding, elements = _when_added(bucket, size)
            if padding <= least and elements <= most_elements:
                best, least = bucket, padding
                if padding == 0:
                    break
        if best is None:
            found.append(Bucket([block], num_tokens, head_size, group, num_rows))
            continue
        best.blocks.append(block)
        best.head_size, best.group = max(head_size, best.head_size), max(group, best.group)
        best.num_rows += num_rows
    return found


def _when_added(bucket: Bucket, size: BlockSize) -> tuple[int, int]:
    """How many elements of padding a block adds, which is no longer than the others, and all elements then."""
    num_tokens, head_size, group, num_rows = size
    row_elements = bucket.num_tokens * max(head_size, bucket.head_size) * max(group, bucket.group)
    elements = row_elements * (bucket.num_rows + num_rows)
    return elements - bucket.row_elements * bucket.num_rows - num_tokens * head_size * group * num_rows, elements
