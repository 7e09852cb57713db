"""Which elements of a result are concerned, in words."""

from collections.abc import Sequence

from jaxtyping import Bool, Shaped
from torch import Tensor

from attnfuzz.oracles.verdict import Blame
from attnfuzz.oracles.words import element, number, ranges
from attnfuzz.problems.cases import Case
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
    seqs_of = problem_of(case).seqs_of
    if seqs_of is None:
        return Blame()
    at = dict(zip(axes, index, strict=True))
    row = at.get("seq", at.get("token", 0))
    return Blame(rows=((row, at["head"]),), seqs=seqs_of(case, row))


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
