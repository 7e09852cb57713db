"""Single changes to a case that keep the rest of it meaningful: needles follow their tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.lengths import of_sequences, with_seq_lens
from attnfuzz.problems.recipes import Needle, Values

__all__ = [
    "changed",
    "first_head_needles",
    "keep_sequences",
    "rescaled_length",
    "with_head_size",
    "with_heads",
    "with_lengths",
]

C = TypeVar("C", bound=msgspec.Struct)
A = TypeVar("A", bound=AttentionCase)
MoveToken = Callable[[int, int, int], int]


def changed(case: C, **fields: Any) -> C | None:
    """``case`` with other values of ``fields``; None where the case type forbids the combination."""
    try:
        return msgspec.structs.replace(case, **fields)
    except ValueError:  # such as a head size that the packed layout cannot hold
        return None


def keep_sequences(case: A, kept: Sequence[int]) -> A | None:
    """Only the sequences with these numbers, in this order."""
    place = {seq: i for i, seq in enumerate(kept)}
    moved = [
        msgspec.structs.replace(needle, seq=place[needle.seq]) for needle in case.values.needles if needle.seq in place
    ]
    return _with_needles(case, moved, **of_sequences(case, kept))


def with_lengths(case: A, lengths: Sequence[int], move: MoveToken | None = None) -> A | None:
    """Other lengths for the same sequences, with the query tokens that ``with_seq_lens`` gives them.

    A needle stays at its position or, if that is gone, on the last token.
    ``move(position, old_length, new_length)`` places it otherwise.
    """
    place = move or _keep_position
    moved = [
        msgspec.structs.replace(needle, position=place(needle.position, case.seq_lens[needle.seq], lengths[needle.seq]))
        for needle in case.values.needles
        if lengths[needle.seq]
    ]
    return _with_needles(case, moved, **with_seq_lens(case, lengths))


def with_heads(case: A, num_kv_heads: int, gqa_ratio: int) -> A | None:
    """A needle in a KV head that is gone moves to the last one."""
    moved = [
        msgspec.structs.replace(needle, kv_head=min(needle.kv_head, num_kv_heads - 1)) for needle in case.values.needles
    ]
    return _with_needles(case, moved, num_kv_heads=num_kv_heads, num_q_heads=num_kv_heads * gqa_ratio)


def with_head_size(case: C, head_size: int) -> C | None:
    """A scale of ``1/sqrt(head_size)`` follows the head size."""
    if isinstance(case, AttentionCase) and case.scale == default_scale(case.head_size):
        return changed(case, head_size=head_size, scale=default_scale(head_size))
    return changed(case, head_size=head_size)


def rescaled_length(length: int, old: int, new: int) -> int:
    """As many whole steps of ``new`` tokens as there were of ``old``, and as near to the end of the last one."""
    steps, rest = divmod(length, old)
    if rest == old - 1:
        rest = new - 1
    return steps * new + min(rest, new - 1)


def _keep_position(position: int, old_length: int, new_length: int) -> int:
    return new_length - 1 if position == old_length - 1 else min(position, new_length - 1)


def first_head_needles(values: Values) -> Values:
    """All needles in KV head 0."""
    return _replace_needles(values, [msgspec.structs.replace(needle, kv_head=0) for needle in values.needles])


def _replace_needles(values: Values, needles: list[Needle]) -> Values:
    return msgspec.structs.replace(values, needles=tuple(sorted(set(needles))))


def _with_needles(case: A, needles: list[Needle], **fields: Any) -> A | None:
    values = _replace_needles(case.values, needles)
    return changed(case, values=values, **fields)
