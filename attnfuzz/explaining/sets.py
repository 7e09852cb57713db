"""What a set of tokens has in common, said so that it may hold for other sequences, too."""

from __future__ import annotations

from collections.abc import Iterator

from attnfuzz.problems.cases import PagedDecodeCase

__all__ = ["descriptions"]

_TILES = (16, 32, 64, 128)


def descriptions(case: object, length: int, positions: list[int], first: int = 0) -> Iterator[str]:
    """Names of these positions of a sequence of this length, such as "the last token", the most telling first.

    `first`: the first position that counts, not 0 where there is a window.
    """
    every = list(range(length))
    if positions == every[first:]:
        yield "every token" if not first else "every token of the window"
    if positions == [first] and first and length > first + 1:
        yield "the first token of the window"
    if positions == every[-1:]:
        yield "the last token"
    if positions == every[:1] and length > 1:
        yield "the first token"
    if isinstance(case, PagedDecodeCase) and case.block_size > 1:
        yield from _in_steps(every, positions, case.block_size, "page")
    for tile in _TILES:
        yield from _in_steps(every, positions, tile, f"tile of {tile}")
    if positions == every[positions[0] :] and positions[0]:
        yield f"every token from {positions[0]} on"
    if positions == every[: len(positions)]:
        yield f"the first {len(positions)} tokens" if len(positions) > 1 else "the first token"


def _in_steps(every: list[int], positions: list[int], size: int, unit: str) -> Iterator[str]:
    """By where they lie in pages or tiles."""
    length = len(every)
    if length <= size:
        return
    last = (length - 1) // size * size
    if positions == every[last:]:
        yield f"the last {unit}" if length % size == 0 else f"the last, partial {unit}"
    if positions == every[last : last + 1]:
        yield f"the first token of the last {unit}"
    offsets = {position % size for position in positions}
    if len(offsets) == 1 and positions == every[min(offsets) :: size] and len(positions) > 1:
        yield f"offset {offsets.pop()} of every {unit}"
    if positions == every[size::size] or positions == every[size - 1 : length : size]:
        yield f"the token at every boundary of a {unit}"
    if positions == every[size:]:
        yield f"every token after the first {unit}"
