"""How numbers, elements, tokens and rows are told, and which memory is not a row's. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase
from attnfuzz.problems.block_table import freed_tokens
from attnfuzz.problems.module import has_query_lens

_MOST_LISTED = 6


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


def dead_pages(case: PagedDecodeCase, row: int) -> list[str]:
    """Sentences on the dead memory of a paged cache."""
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


def number(value: float) -> str:
    """At most six significant digits, always recognisable as a float."""
    text = f"{value:.6g}"
    return text if any(mark in text for mark in ".einf") else f"{text}.0"


def numbers(one: float, other: float) -> tuple[str, str]:
    """As `number`; with as many digits as tell any two float32 apart where six do not."""
    found = number(one), number(other)
    return found if found[0] != found[1] else (f"{one:.9g}", f"{other:.9g}")


def ratio(value: float) -> str:
    """Error over bound, three significant digits at most."""
    return f"{value:.3g}" if value < 1000 else f"{value:.2g}" if value >= 1e6 else f"{value:.0f}"


def element(name: str, axes: Sequence[str], index: Sequence[int]) -> str:
    """`out[seq 0, head 3, dim 5]`."""
    return f"{name}[{', '.join(f'{axis} {i}' for axis, i in zip(axes, index, strict=True))}]"


def row_words(case: AttentionCase, row: int) -> str:
    """`sequence 1`, or `query 0 of sequence 1` where a sequence may have several."""
    seq = case.row_seqs[row]
    if not has_query_lens(case.problem):
        return f"sequence {seq}"
    return query_of_row(case, row)


def shape_of(dtype: str, shape: Sequence[int]) -> str:
    """`float16 [2, 3, 16]`."""
    return f"{dtype} {list(shape)}"


def token_name(case: AttentionCase, position: int) -> str:
    """`token 16 (page 1, offset 0)`: pages as the sequence counts them."""
    if not case.page_size:
        return f"token {position}"
    page, offset = divmod(position, case.page_size)
    return f"token {position} (page {page}, offset {offset})"


def tokens_name(case: AttentionCase, positions: Sequence[int]) -> str:
    """`tokens 16-31 (page 1)`, or `tokens 3, 7, 11`."""
    if len(positions) == 1:
        return token_name(case, positions[0])
    first, last = positions[0], positions[-1]
    is_range = last - first + 1 == len(positions)
    text = f"tokens {first}-{last}" if is_range else "tokens " + _listed(positions)
    if is_range and case.page_size:
        pages = first // case.page_size, last // case.page_size
        text += f" (page {pages[0]})" if pages[0] == pages[1] else f" (pages {pages[0]}-{pages[1]})"
    return text


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_MOST_LISTED])) + (", ..." if len(numbers) > _MOST_LISTED else "")
