"""Which keys a query token sees, where that is more than "those up to itself": small data that stands for a mask.

A mask is a table of yes and no for each sequence, ``[query_len, seq_len]``. What is written down is a few numbers for a
sequence, `Mask.seqs`, so that masks shrink with their case, stay masks when lengths change, and can be told in words.
With n query tokens of a sequence of length L, the j-th stands at position ``p = L - n + j``; what lies before the first
of them is the context. Sequence s has the numbers ``seqs[s % len(seqs)]``:

* ``causal``: keys up to ``p``. No numbers.
* ``full``: all keys, as in an encoder or in cross attention. No numbers.
* ``tree``: the context, itself, and its ancestors among the query tokens: those that speculative decoding verifies at
  once (Miao et al., SpecInfer, arXiv 2305.09781). The numbers are parents: that of query token j, -1 for one that
  follows the context. A token without a number follows the one before it, so no numbers are the causal mask.
* ``pages``: keys up to ``p`` but for those in pages that are skipped, as attention to a few pages of a cache does
  (Tang et al., Quest, arXiv 2406.10774). The numbers are the pages that are skipped, counted as the sequence does.
* ``chunks``: keys up to ``p`` of its own chunk, as local attention in chunks sees them (Llama 4). The number is the
  length of a chunk; the first one begins with the sequence. None is the causal mask.
* ``bits``: any keys. Query token j has the number ``m[j % len(m)]``, and does not see key t where its bit ``t % 16`` is
  1; no numbers hide nothing. 65535 hides all.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Literal, get_args

import msgspec

MaskKind = Literal["causal", "full", "tree", "pages", "bits", "chunks"]
MASK_KINDS: tuple[MaskKind, ...] = get_args(MaskKind)

PERIOD = 16
"""Keys after which the pattern of a number of ``bits`` repeats."""
ALL_HIDDEN = (1 << PERIOD) - 1

_MOST_NUMBERS = 1 << 10
_RANGES = {"tree": (-1, 1 << 20), "pages": (0, 1 << 20), "bits": (0, ALL_HIDDEN), "chunks": (1, 1 << 24)}


class Mask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """See the module's text for what ``seqs`` means in each ``kind``."""

    kind: MaskKind = "causal"
    seqs: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _RANGES and self.seqs:
            raise ValueError(f"mask.seqs={self.seqs!r} must be left out of a mask that is {self.kind!r}")
        if len(self.seqs) > _MOST_NUMBERS or any(len(numbers) > _MOST_NUMBERS for numbers in self.seqs):
            raise ValueError(f"mask.seqs holds more than {_MOST_NUMBERS} entries; sequences share them in turn")
        low, high = _RANGES.get(self.kind, (0, 0))
        for i, numbers in enumerate(self.seqs):
            for number in numbers:
                if not low <= number <= high:
                    raise ValueError(f"mask.seqs[{i}] holds {number}: must be between {low} and {high}")
            if self.kind == "chunks" and len(numbers) > 1:
                raise ValueError(f"mask.seqs[{i}]={numbers!r} must be one number, the length of a chunk, or none")
        if len({*self.seqs}) <= 1:  # equal masks are written in one way
            msgspec.structs.force_setattr(self, "seqs", self.seqs[:1] if any(self.seqs) else ())

    def of(self, seq: int) -> tuple[int, ...]:
        """The numbers of sequence ``seq``."""
        return self.seqs[seq % len(self.seqs)] if self.seqs else ()

    @property
    def least_number(self) -> int:
        """The smallest that there may be in ``seqs``."""
        return _RANGES.get(self.kind, (0, 0))[0]


CAUSAL_MASK = Mask()


def parents_of(numbers: tuple[int, ...], query_len: int) -> tuple[int, ...]:
    """The parent of each query token, all of which come before it; -1 for one that follows the context."""
    return tuple(min(numbers[j], j - 1) if j < len(numbers) else j - 1 for j in range(query_len))


def table_starts(query_lens: Iterable[int], seq_lens: Iterable[int]) -> list[int]:
    """Where the table of each sequence begins in a flat mask, in entries, and where the last one ends."""
    sizes = (queries * keys for queries, keys in zip(query_lens, seq_lens, strict=True))
    return [0, *accumulate(sizes)]


@lru_cache(maxsize=64)
def seen_keys(mask: Mask, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], block_size: int) -> tuple[bytes, ...]:
    """The keys of its sequence that each query token of the batch sees: one byte for each, 1 or 0."""
    found: list[bytes] = []
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        numbers, context = mask.of(seq), seq_len - query_len
        if mask.kind == "full":
            found += [b"\1" * seq_len] * query_len
        elif mask.kind == "bits":
            found += [_pattern(numbers[j % len(numbers)] if numbers else 0, seq_len) for j in range(query_len)]
        elif mask.kind == "tree":
            found += _tree(parents_of(numbers, query_len), context)
        elif mask.kind == "chunks" and numbers:
            found += [_own_chunk(context + j, seq_len, numbers[0]) for j in range(query_len)]
        else:
            rows = (bytearray(b"\1" * (context + j + 1) + b"\0" * (query_len - j - 1)) for j in range(query_len))
            skipped = numbers if mask.kind == "pages" else ()
            found += [_without_pages(row, skipped, block_size) for row in rows]
    return tuple(found)


def _pattern(hidden: int, seq_len: int) -> bytes:
    once = bytes(1 - (hidden >> t & 1) for t in range(PERIOD))
    return (once * (seq_len // PERIOD + 1))[:seq_len]


def _own_chunk(position: int, seq_len: int, length: int) -> bytes:
    first = position // length * length
    return bytes(first) + b"\1" * (position + 1 - first) + bytes(seq_len - position - 1)


def _tree(parents: tuple[int, ...], context: int) -> list[bytes]:
    among: list[bytearray] = []
    for j, parent in enumerate(parents):
        row = bytearray(among[parent]) if parent >= 0 else bytearray(len(parents))
        row[j] = 1
        among.append(row)
    return [b"\1" * context + bytes(row) for row in among]


def _without_pages(row: bytearray, skipped: tuple[int, ...], block_size: int) -> bytes:
    for page in skipped:
        first, end = page * block_size, min((page + 1) * block_size, len(row))
        if first < end:
            row[first:end] = bytes(end - first)
    return bytes(row)
