"""Rows, sets of rows and sets of tokens as they appear in explanations.

What a set of tokens has in common is said so that it may hold for other sequences, too (`descriptions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase, VarlenCase
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.wording import number, ranges, row_words

__all__ = ["descriptions", "joined", "row_name", "scope", "weight"]


def weight(value: Tensor | float) -> str:
    """At most four significant digits; `0` for 0."""
    return "0" if float(value) == 0 else number(float(f"{float(value):.4g}"))


def joined(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def row_name(case: Case | AttentionCase, row: int) -> str:
    """`sequence 0, query head 3`."""
    first, head = divmod(row, case.num_q_heads)
    name = f"token {first}" if isinstance(case, MergeStatesCase | OpenCase) else row_words(case, first)
    return f"{name}, query head {head}"


def scope(case: Case, rows: Iterable[int], *, count: int) -> str:
    """All rows that are meant, in a few words; `count` of them exist."""
    chosen = set(rows)
    if len(chosen) == count:
        return "every row" if count > 1 else row_name(case, 0)
    noun = "token" if isinstance(case, MergeStatesCase | VarlenCase) else "sequence"
    firsts = {row // case.num_q_heads for row in chosen}
    heads = {row % case.num_q_heads for row in chosen}
    if len(chosen) == 1:
        return row_name(case, chosen.pop())
    if len(firsts) * len(heads) == len(chosen):
        first = f"{noun}{'s' if len(firsts) > 1 else ''} {ranges(firsts)}"
        every = len(firsts) * case.num_q_heads
        head = f"query head{'s' if len(heads) > 1 else ''} {ranges(heads)}"
        if len(chosen) == every:
            return first
        if count == case.num_q_heads:
            return head
        return f"{head} of every {noun}" if every == count else f"{first}, {head}"
    return f"{len(chosen)} of {count} rows"


_TILES = (16, 32, 64, 128)


def descriptions(case: AttentionCase, length: int, positions: list[int], first: int = 0) -> Iterator[str]:
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
    if case.page_size > 1:
        yield from _in_steps(every, positions, case.page_size, "page")
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
