"""Which elements of a result are concerned, in words."""

from collections.abc import Sequence

from jaxtyping import Bool, Shaped
from torch import Tensor

from attnfuzz.oracles.verdict import Blame
from attnfuzz.oracles.words import element, number, ranges
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.registry import problem_of

__all__ = ["axes_of", "blame_of", "differing", "extent", "first_index", "place_of"]


def axes_of(name: str, case: Case) -> tuple[str, ...]:
    """Names of the dimensions of the result `name`, in the order in which a kernel returns it."""
    return problem_of(case).axes(case, name)


def place_of(case: Case, name: str, index: tuple[int, ...]) -> tuple[str, ...]:
    """A line on what an element is, if the problem has a word for it."""
    words = problem_of(case).where_is(case, name, index)
    return (words,) if words else ()


def first_index(mask: Bool[Tensor, "*shape"]) -> tuple[int, ...]:
    """The first true element, in row-major order."""
    return tuple(int(i) for i in mask.nonzero()[0])


def extent(name: str, axes: Sequence[str], mask: Bool[Tensor, "*shape"]) -> str:
    """`6 of 96 elements of out (seq 0, head 1-2, dim 0-2)`."""
    where = ", ".join(
        f"{axis} {ranges(hit.tolist())}" for axis, hit in zip(axes, mask.nonzero().unbind(-1), strict=True)
    )
    return f"{int(mask.sum())} of {mask.numel()} elements of {name} ({where})"


def blame_of(case: Case, axes: Sequence[str], index: Sequence[int]) -> Blame:
    """The row that one element of a result belongs to, and its sequence; nothing where results have no such rows."""
    at = dict(zip(axes, index, strict=True))
    if isinstance(case, OpenCase):
        return Blame()
    row = at.get("seq", at.get("token", 0))
    seqs = (case.row_seqs[row],) if isinstance(case, AttentionCase) else ()
    return Blame(rows=((row, at["head"]),), seqs=seqs)


def differing(
    name: str,
    axes: Sequence[str],
    mask: Bool[Tensor, "*shape"],
    one: Shaped[Tensor, "*shape"],
    other: Shaped[Tensor, "*shape"],
) -> tuple[str, str, str, tuple[int, ...]]:
    """The first differing element by name, its two values, and its index."""
    index = first_index(mask)
    return element(name, axes, index), number(float(one[index])), number(float(other[index])), index
