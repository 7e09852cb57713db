"""Numbers, elements and ranges as they appear in messages."""

from collections.abc import Sequence

from attnfuzz.problems.cases import AttentionCase, PagedDecodeCase, has_query_lens
from attnfuzz.problems.told import plural as plural
from attnfuzz.problems.told import query_of_row
from attnfuzz.problems.told import ranges as ranges

__all__ = ["element", "number", "plural", "ranges", "ratio", "row_words", "shape_of", "token_name", "tokens_name"]


_MOST_LISTED = 6


def number(value: float) -> str:
    """At most six significant digits, always recognisable as a float."""
    text = f"{value:.6g}"
    return text if any(mark in text for mark in ".einf") else f"{text}.0"


def ratio(value: float) -> str:
    """Error over bound, three significant digits at most."""
    return f"{value:.3g}" if value < 1000 else f"{value:.2g}" if value >= 1e6 else f"{value:.0f}"


def element(name: str, axes: Sequence[str], index: Sequence[int]) -> str:
    """`out[seq 0, head 3, dim 5]`."""
    return f"{name}[{', '.join(f'{axis} {i}' for axis, i in zip(axes, index, strict=True))}]"


def row_words(case: AttentionCase, row: int) -> str:
    """`sequence 1`, or `query 0 of sequence 1` where a sequence may have several."""
    seq = case.row_seqs[row]
    return query_of_row(case, row) if has_query_lens(case.problem) else f"sequence {seq}"


def shape_of(dtype: str, shape: Sequence[int]) -> str:
    """`float16 [2, 3, 16]`."""
    return f"{dtype} {list(shape)}"


def token_name(case: AttentionCase, position: int) -> str:
    """`token 16 (page 1, offset 0)`: pages as the sequence counts them."""
    if not isinstance(case, PagedDecodeCase):
        return f"token {position}"
    page, offset = divmod(position, case.block_size)
    return f"token {position} (page {page}, offset {offset})"


def tokens_name(case: AttentionCase, positions: Sequence[int]) -> str:
    """`tokens 16-31 (page 1)`, or `tokens 3, 7, 11`."""
    if len(positions) == 1:
        return token_name(case, positions[0])
    first, last = positions[0], positions[-1]
    is_range = last - first + 1 == len(positions)
    text = f"tokens {first}-{last}" if is_range else "tokens " + _listed(positions)
    if is_range and isinstance(case, PagedDecodeCase):
        pages = first // case.block_size, last // case.block_size
        text += f" (page {pages[0]})" if pages[0] == pages[1] else f" (pages {pages[0]}-{pages[1]})"
    return text


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_MOST_LISTED])) + (", ..." if len(numbers) > _MOST_LISTED else "")
