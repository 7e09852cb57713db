"""Rows and sets of rows as they appear in explanations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase, VarlenCase
from attnfuzz.problems.wording import number, ranges, row_words


def weight(value: Tensor | float) -> str:
    """At most four significant digits; `0` for 0."""
    return "0" if float(value) == 0 else number(float(f"{float(value):.4g}"))


def joined(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def row_name(case: Case | AttentionCase, row: int) -> str:
    """`sequence 0, query head 3`."""
    first, head = divmod(row, case.num_q_heads)
    name = row_words(case, first) if isinstance(case, AttentionCase) else f"token {first}"
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
