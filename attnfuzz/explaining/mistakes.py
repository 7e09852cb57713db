"""Mistakes replayed in float64: what a row would be with each, and which of them give what came out.

Attention is linear in V, so what a kernel would return if it dropped a token, counted it twice or read another head
follows from the weights and values at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.explaining.row import AveragedRow
from attnfuzz.verdict import MOST_PLACES, Cause

_BOUNDS = 8.0
"""A prediction may miss the number by this many error bounds: the mistake changes the bound, too."""

_UNEXPLAINED = 0.25
"""And by at most this part of the error it is to explain."""

_OF_SCORES = 2.0**-22
"""Of the largest score: by how much a weight may be off, the score being kept in float32."""

REFUTED = 4.0
"""Bounds by which a mistake misses a right row, and so is none that the kernel makes there."""

_UNCHANGED = 2.0**-10
"""Bounds by which a mistake changes a number that it leaves as it should be."""

_TINY = torch.finfo(torch.float64).tiny
"""Least bound that is divided by."""

_OUT_ALONE = ", in the output alone"

Key = tuple[str, str]
"""A mistake and the way in which it is made: what is the same in all cases."""


class Beside(NamedTuple):
    """Output and, behind it, the LSE if there is one: what came out, what should have, its bound, what is replayed."""

    got: Float64[Tensor, " elements"]
    expected: Float64[Tensor, " elements"]
    bound: Float64[Tensor, " elements"]
    replayed: Float64[Tensor, "results elements"]

    @property
    def error(self) -> Float64[Tensor, " elements"]:
        """How far what came out is from what should have."""
        return (self.got - self.expected).abs()

    @property
    def worst(self) -> int:
        """The element that is furthest beyond its bound."""
        return int((self.error / self.bound.clamp(min=_TINY)).argmax())

    @property
    def missed(self) -> Float64[Tensor, "results elements"]:
        """How far each result is from what came out; infinite where one of them is no number, and not the same one."""
        return torch.where(self.replayed == self.got, 0.0, (self.replayed - self.got).abs().nan_to_num(torch.inf))

    @property
    def unexplained(self) -> Float64[Tensor, " results"]:
        """Which part of the squares of all errors, in bounds, each result leaves."""
        bound = self.bound.clamp(min=_TINY)
        return (self.missed / bound).square().sum(-1) / (self.error / bound).square().sum()


@dataclass(frozen=True)
class Replay:
    """Results that a row would have: row i of `out` goes with row i of `lse`, modulo the number of these.

    An `lse` of None says that the log-sum-exp stays right. `cause` is the mistake, in a short, stable word. A result
    that is NaN is 0 / 0, of which a kernel may make anything; with an `lse` of NaN as well, even what is right.
    """

    cause: str
    out: Float64[Tensor, "results v_head_size"]
    lse: Float64[Tensor, " lses"] | None

    def lse_of(self, row: AveragedRow) -> Float64[Tensor, " results"]:
        """One for each row of `out`."""
        if self.lse is None:
            return torch.full((len(self.out),), row.lse, dtype=torch.float64, device="cpu")
        if len(self.lse) == len(self.out):
            return self.lse
        return self.lse.repeat(-(-len(self.out) // len(self.lse)))[: len(self.out)]

    def beside(self, row: AveragedRow) -> Beside:
        """These results beside what came out."""
        replayed = self.out if row.got_lse is None else torch.cat((self.out, self.lse_of(row)[:, None]), 1)
        return Beside(*row.results, replayed)

    def left_open(self, row: AveragedRow) -> Float64[Tensor, " results"]:
        """The largest part of the row's error, in bounds, that each result leaves open."""
        beside = self.beside(row)
        return (beside.missed / beside.bound.clamp(min=_TINY)).amax(1).nan_to_num(torch.inf)

    def leaves_open(self, row: AveragedRow) -> Bool[Tensor, " results"]:
        """Mark those of which nothing follows, not even that the row is wrong: what is read is nobody's."""
        return self.out.isnan().any(1) & self.lse_of(row).isnan()


@dataclass(frozen=True)
class Family(Replay):
    """A mistake made in several ways: `out[i]` and `lse[i]` are what way `i` gives, which `words(i)` tells of this row.

    `ways` name what is the same in other rows and cases. A row that a way leaves as it is need not have it.
    `tokens(i)` are those that it is about, and `rule(i)` says which that are in any row.
    """

    ways: Sequence[str]
    words: Callable[[int], str]
    tokens: Callable[[int], tuple[tuple[int, int], ...]] = lambda _: ()
    rule: Callable[[int], str] = lambda _: ""

    def as_cause(self, i: int) -> Cause:
        """Way `i`."""
        return Cause(
            mistake=self.cause,
            way=self.ways[i],
            words=self.words(i),
            rule=self.rule(i),
            tokens=self.tokens(i)[:MOST_PLACES],
        )


class Predicted(NamedTuple):
    """A row that a mistake gives, its LSE None if that stays right, the way in which it is made, and what that is here.

    ``rule``: what it is in any case, if ``words`` do not say it.
    """

    out: Float64[Tensor, " v_head_size"]
    lse: float | None
    way: str
    words: str
    rule: str = ""


def family(cause: str, found: Iterable[Predicted]) -> Iterator[Family]:
    """Ways of which there are few, as one family; none where there is none."""
    if listed := list(found):
        outs, lses, ways, words, rules = zip(*listed, strict=True)
        for is_right in (True, False):
            chosen = [i for i, lse in enumerate(lses) if (lse is None) is is_right]
            if chosen:
                lse = None if is_right else torch.tensor([lses[i] for i in chosen], dtype=torch.float64, device="cpu")
                of_ways, told, general = ([part[i] for i in chosen] for part in (ways, words, rules))
                out = torch.stack([outs[i] for i in chosen])
                yield Family(cause, out, lse, of_ways, told.__getitem__, rule=general.__getitem__)


@dataclass(frozen=True)
class Maker:
    """Makes the families of some ``mistakes``, for a row of attention or of a merge."""

    mistakes: Set[str]
    made: Callable[[Any], Iterator[Family]]

    @classmethod
    def of(cls, mistake: str, made: Callable[[Any], Iterable[Predicted]]) -> Maker:
        """Makes the ways of a single mistake."""
        return cls({mistake}, lambda row: family(mistake, made(row)))


class Match(NamedTuple):
    """A mistake that gives a row, and the largest part of the row's error, in bounds, that it leaves open."""

    cause: Cause
    left: float


def matches(row: AveragedRow, families: Iterable[Family]) -> Iterator[Match]:
    """Each way of each family that gives this row, LSE included.

    Where the LSE is right, it may have been computed apart from the output: then a mistake in the output alone will do.
    """
    given = _Given(row)
    lse_is_right = row.got_lse is not None and abs(row.got_lse - row.lse) <= row.lse_bound
    for one in families:
        both = given.by(one)
        if bool(both.any()):
            left = one.left_open(row)
            yield from (Match(one.as_cause(i), float(left[i])) for i in both.nonzero()[:, 0].tolist())
        if lse_is_right and one.lse is not None:
            is_given = given.by(Replay(one.cause, one.out, None)) & ~both
            if bool(is_given.any()):
                alone = in_output_alone(one)
                left = alone.left_open(row)
                yield from (Match(alone.as_cause(i), float(left[i])) for i in is_given.nonzero()[:, 0].tolist())


def in_output_alone(one: Family) -> Family:
    """The mistake, made in the output, beside a log-sum-exp without it."""
    ways = [way + _OUT_ALONE for way in one.ways]
    return replace(one, lse=None, ways=ways, words=lambda i: f"{one.words(i)}, for out alone: lse is right")


def silent(row: AveragedRow, families: Iterable[Family]) -> set[Key]:
    """Ways that make 0 / 0 of a row, or more than its dtype holds, of which a kernel may make anything."""
    largest = torch.finfo(row.dtype).max
    ends = ((one, ~(one.out.abs() <= largest).all(1)) for one in families)
    return {(one.cause, one.ways[i]) for one, says_nothing in ends for i in says_nothing.nonzero()[:, 0].tolist()}


class _Given:
    """Tells which results give what came out of a ``row``, and explain what is wrong with that."""

    def __init__(self, row: AveragedRow) -> None:
        self._row = row
        got, expected, bound = row.results
        size = len(row.got)
        largest_score = float(row.scores.abs().amax().nan_to_num(0.0, posinf=0.0))
        self._roundoff = torch.finfo(row.dtype).eps + _OF_SCORES * largest_score
        self._expected = expected.abs().nan_to_num(0.0, posinf=0.0)
        self._bounds = _BOUNDS * bound
        self._least_bound = bound.clamp(min=_TINY)
        error = torch.where(got == expected, 0.0, (got - expected).abs() / self._least_bound)  # also of two infinities
        self._most_left = _UNEXPLAINED * error.nan_to_num(torch.inf).max()
        is_wrong = (got - expected).abs() > bound
        self._wrong_parts = [part for part in (slice(size), slice(size, None)) if bool(is_wrong[part].any())]

    def by(self, replay: Replay) -> Bool[Tensor, " results"]:
        """Whether each of these does; most do not, which the first comparison tells."""
        row, beside = self._row, replay.beside(self._row)
        # Numbers of either sign that cancel round as their terms do, for which the largest result stands.
        largest = replay.out.abs().amax(-1, keepdim=True).nan_to_num(0.0, posinf=0.0)
        tolerance = self._bounds + self._roundoff * (largest + self._expected)
        if row.got_lse is not None:
            of_lse = beside.replayed[:, -1].abs().nan_to_num(0.0, posinf=0.0).clamp(min=abs(row.lse))
            tolerance[:, -1] = _BOUNDS * row.lse_bound + 1e-6 * (1 + of_lse)
        same = (beside.replayed == beside.got) | (beside.replayed.isnan() & beside.got.isnan())
        missed = torch.where(same, 0.0, (beside.replayed - beside.got).abs().nan_to_num(torch.inf))
        found = (missed <= tolerance).all(-1)
        if not bool(found.any()):
            return found
        found &= (missed / self._least_bound).amax(-1) <= self._most_left
        unchanged = (beside.replayed - beside.expected).abs() <= _UNCHANGED * beside.bound
        for part in self._wrong_parts:  # which a mistake changes that is to explain it
            found &= ~unchanged[:, part].all(-1)
        return found
