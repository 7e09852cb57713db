"""Numbers, elements and ranges as they appear in messages."""

from collections.abc import Sequence

from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.told import plural as plural
from attnfuzz.problems.told import query_of_row
from attnfuzz.problems.told import ranges as ranges

__all__ = ["element", "number", "plural", "ranges", "ratio", "row_words", "shape_of"]


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
    if case.problem != "paged_attention":
        return f"sequence {seq}"
    return query_of_row(case, row)


def shape_of(dtype: str, shape: Sequence[int]) -> str:
    """`float16 [2, 3, 16]`."""
    return f"{dtype} {list(shape)}"
