"""What the rows of a bundled problem's case are, and which memory is not theirs, in words. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnfuzz.problems.cases import AttentionCase, DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.freed import freed_tokens
from attnfuzz.problems.supports import Supports

__all__ = ["dead_pages", "dead_rows", "dead_states", "length_of_row", "plural", "query_of_row", "ranges"]


def plural(count: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ranges(numbers: Iterable[int], *, most: int = 6) -> str:
    """``0-3, 7``; the rest is left out after ``most`` runs."""
    runs: list[list[int]] = []
    for i in sorted(set(numbers)):
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:most]]
    return ", ".join(words + (["..."] if len(runs) > most else []))


def query_of_row(case: AttentionCase, row: int) -> str:
    """``query 0 of sequence 1``."""
    seq = case.row_seqs[row]
    return f"query {row - case.rows_of(seq).start} of sequence {seq}"


def length_of_row(case: AttentionCase, row: int) -> list[str]:
    """How many keys a row attends to, where each sequence has one row."""
    return [f"sequence {row} has length {case.seq_lens[row]}"]


def dead_states(case: Any, supports: Supports, row: int) -> list[str]:
    """Of two states to be merged."""
    del case, row
    states = "outputs of states whose LSE is -inf or +inf, and " if supports.empty_state_outputs == "anything" else ""
    return [f"what must not matter here: {states}whatever lies around the tensors"]


def dead_rows(case: DenseDecodeCase, supports: Supports, row: int) -> list[str]:
    """Of a dense K and V."""
    del supports
    seq_len = case.seq_lens[row]
    return [f"sequence {row} has no token in rows {seq_len} and up of k and v (its length is {seq_len})"]


def dead_pages(case: PagedDecodeCase, supports: Supports, row: int) -> list[str]:
    """Of a paged cache."""
    del supports
    seq = case.row_seqs[row]
    seq_len, last = case.seq_lens[seq], case.blocks_of(seq) - 1
    if last < 0:
        return [f"sequence {seq} is empty: it has no token anywhere in the cache, and no page in its block-table row"]
    used = seq_len - last * case.block_size
    free = ranges(range(used, case.block_size))
    offsets = f"offset{'s' if case.block_size - used > 1 else ''} {free}"
    tail = f"{offsets} of its page {last}, " if used < case.block_size else ""
    freed = freed_tokens(case)[seq] // case.block_size
    pages = "page 0, which lies" if freed == 1 else f"pages 0-{freed - 1}, which lie"
    behind = f"{pages} behind its window and may be another sequence's by now, " if freed else ""
    after = f"{tail}pages that its block-table row names after page {last}"
    return [f"sequence {seq} (length {seq_len}) has no token in: {behind}{after}"]
