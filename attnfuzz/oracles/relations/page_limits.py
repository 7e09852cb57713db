"""Page ids at which something that is kept in too few bits runs out of them: plain integers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from attnfuzz.memory.far import CACHES, FAR
from attnfuzz.problems.block_table import num_blocks
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.shapes import ITEMSIZE, strides_of, tensor_specs
from attnfuzz.problems.strides import strided_layout

__all__ = ["Limit", "far_pages", "limits_of", "page_strides", "pages_to_same_alignment"]

Unit = Literal["elements", "bytes", "ids"]

_HALF = FAR >> 1
_SHORT_IDS = 1 << 16
_MOST_IDS = 1 << 31
_ALIGNMENT = 64
"""Bytes: libraries for CPUs may add in another order where the alignment of an operand differs."""


class Limit(NamedTuple):
    """From ``page`` on, ids or offsets pass ``words``; ``units`` says which of them."""

    page: int
    words: str
    units: frozenset[Unit]


def page_strides(case: PagedDecodeCase) -> dict[str, int]:
    """By cache, elements from one page to the next."""
    specs = tensor_specs(case)
    return {
        name: strided_layout(specs[name].shape, strides_of(case, name), ITEMSIZE[case.kv_dtype]).strides[0]
        for name in CACHES
        if name in specs
    }


def pages_to_same_alignment(case: PagedDecodeCase) -> int:
    """So many pages further, all caches are aligned as before."""
    steps = [stride * ITEMSIZE[case.kv_dtype] for stride in page_strides(case).values()]
    return math.lcm(*(_ALIGNMENT // math.gcd(_ALIGNMENT, step) for step in steps))


def far_pages(case: PagedDecodeCase) -> list[int]:
    """First page ids to be tried: past 2^32 elements and 2^16 ids, and just past 2^31 elements."""
    strides, step = page_strides(case).values(), pages_to_same_alignment(case)
    least = max(-(-FAR // min(strides)), _SHORT_IDS)
    # Right after a multiple of 2^32, so that what wraps comes out at the beginning of the cache and not below it.
    multiple = -(-least * max(strides) // FAR) * FAR
    wanted = (-(-multiple // max(strides)), -(-_HALF // min(strides)))
    found = (-(-first // step) * step for first in wanted)
    return [first for first in found if first + num_blocks(case) < _MOST_IDS]


def limits_of(case: PagedDecodeCase) -> list[Limit]:
    """In ascending order; what is reached with the same page is one limit."""
    reached: dict[int, list[tuple[str, Unit]]] = {}
    for page, words, unit in _limits(case):
        reached.setdefault(page, []).append((words, unit))
    return [
        Limit(page, " and ".join(dict.fromkeys(words for words, _ in both)), frozenset(unit for _, unit in both))
        for page, both in sorted(reached.items())
    ]


def _limits(case: PagedDecodeCase) -> Iterator[tuple[int, str, Unit]]:
    strides = page_strides(case)
    for power in (31, 32):
        for name, stride in strides.items():
            where = "" if len(set(strides.values())) == 1 else f" of {name}"
            yield -(-(1 << power) // stride), f"2^{power} elements{where}", "elements"
            yield -(-(1 << power) // (stride * ITEMSIZE[case.kv_dtype])), f"2^{power} bytes{where}", "bytes"
    for power in (15, 16):
        yield 1 << power, f"2^{power} page ids", "ids"
