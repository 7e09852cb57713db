"""Cases of the same format as another, bigger and smaller ones: what a kernel is called with before and after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.relations.transformed import fits
from attnfuzz.problems.cases import AttentionCase, Case, DenseDecodeCase, MergeStatesCase, PagedAttentionCase
from attnfuzz.problems.lengths import of_sequences, with_seq_lens
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.supported import supports_case

__all__ = ["Relative", "relatives_of"]

_MOST_MORE = 64
"""Tokens by which a sequence grows: past the ends of some pages, tiles and splits, and no longer than that takes."""
_OTHER_SEED = 0x5EED


class Relative(NamedTuple):
    """A case, and how its call is told: "a call with seq_lens=[10, 6]"."""

    case: Case
    words: str


def relatives_of(declaration: Declaration, case: Case) -> list[Relative]:
    """One with more tokens, at most twice as many, then one with half as many and another number of rows.

    Those that the kernel supports.
    """
    if isinstance(case, OpenCase):
        return []
    made = _merges(case) if isinstance(case, MergeStatesCase) else _attention(declaration, case)
    return [
        one
        for one in made
        if one.case != case and supports_case(declaration.supports, declaration.options, one.case) and fits(one.case)
    ]


def _merges(case: MergeStatesCase) -> Iterator[Relative]:
    for num_tokens in (case.num_tokens + min(case.num_tokens, _MOST_MORE), max(1, case.num_tokens // 2)):
        other = msgspec.structs.replace(case, num_tokens=num_tokens, seed=case.seed ^ _OTHER_SEED)
        yield Relative(other, f"a call with num_tokens={num_tokens}")


def _attention(declaration: Declaration, case: AttentionCase) -> Iterator[Relative]:
    longest = declaration.supports.max_seq_len or math.inf
    more = tuple(int(min(length + min(length, _MOST_MORE), longest)) for length in case.seq_lens)
    half = tuple(-(-length // 2) for length in case.seq_lens)
    fewer = tuple(range(case.num_seqs - 1)) if case.num_seqs > 1 else (0, 0)
    for kept, lengths in ((tuple(range(case.num_seqs)), more), (fewer, half)):
        fields = of_sequences(case, kept)
        if any(fields.get("query_lens", (1,))):  # without a query token there is no call
            seq_lens = tuple(lengths[seq] for seq in kept)
            yield Relative(_with_lengths(case, fields, seq_lens), f"a call with seq_lens={list(seq_lens)}")


def _with_lengths(case: AttentionCase, fields: dict[str, Any], seq_lens: tuple[int, ...]) -> Any:
    values = msgspec.structs.replace(case.values, needles=(), seed=case.values.seed ^ _OTHER_SEED)
    changes: dict[str, Any] = {**fields, "values": values}
    if isinstance(case, DenseDecodeCase):
        changes["extra_rows"] = 0
    if isinstance(case, PagedAttentionCase):
        changes |= {"query_slack": 0, "seq_slack": 0, "padding_tokens": 0}
    chosen = msgspec.structs.replace(case, **changes)
    return msgspec.structs.replace(chosen, **with_seq_lens(chosen, seq_lens))
