"""Mistakes replayed in float64: what a row would be with each, and whether one of them gives what came out.

Attention is linear in V, so what a kernel would return if it dropped a token, counted it twice or read another head
follows from the weights and values at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.explaining.row import AveragedRow
from attnfuzz.verdict import MOST_PLACES, Cause

__all__ = [
    "MOST_TOLD",
    "REFUTED",
    "Beside",
    "Diagnosis",
    "Family",
    "Predicted",
    "Replay",
    "chain",
    "every_match",
    "families_of_one",
    "family",
    "first_match",
    "first_match_of_lse",
]

_Row = TypeVar("_Row", bound=AveragedRow)

_BOUNDS = 8.0
"""A prediction may miss the number by this many error bounds: the mistake changes the bound, too."""

_UNEXPLAINED = 0.25
"""And by at most this part of the error it is to explain."""

_SAME_BOUNDS = 2.0
"""Predictions that differ by less are those of mistakes that cannot be told apart, nor need be. Where others are nearer
than `_BOUNDS`, one of so many comes near to any number."""


REFUTED = 4.0
"""Bounds by which a mistake misses a right row, and so is none that the kernel makes."""

MOST_TOLD = 2
"""Mistakes that are told where a case cannot tell them apart."""

_TINY = torch.finfo(torch.float64).tiny
"""Least bound that is divided by."""


@dataclass(frozen=True)
class Diagnosis:
    """What a wrong result points to, in `words`; `tokens`, as (sequence, position), are those that it is about.

    `cause` is the short, stable name of the mistake that gives this very result; empty if none was replayed. `maybe`:
    other causes that would give much the same. `roundings`: all that give this result, the likeliest first.
    `is_fitted`: to a number that stands in no program yet.
    """

    words: str
    cause: str = ""
    tokens: tuple[tuple[int, int], ...] = ()
    maybe: tuple[str, ...] = ()
    roundings: tuple[Cause, ...] = ()
    is_fitted: bool = False

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Every mistake that gives this."""
        if self.roundings or not self.cause:
            return self.roundings
        return (Cause(mistake=self.cause, words=self.words, tokens=self.tokens[:MOST_PLACES]),)


def _nowhere(i: int) -> tuple[tuple[int, int], ...]:
    del i
    return ()


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
        """How far each result is from what came out; infinite where one of them is no number."""
        return (self.replayed - self.got).abs().nan_to_num(torch.inf)

    @property
    def unexplained(self) -> Float64[Tensor, " results"]:
        """Which part of the squares of all errors, in bounds, each result leaves."""
        bound = self.bound.clamp(min=_TINY)
        return (self.missed / bound).square().sum(-1) / (self.error / bound).square().sum()


@dataclass(frozen=True)
class Replay:
    """Results that a row would have: row i of `out` goes with row i of `lse`, modulo the number of these.

    An `lse` of None says that the log-sum-exp stays right. `cause` is a short, stable name.
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
        if row.got_lse is None:
            return Beside(row.got, row.expected, row.bound, self.out)
        lse = torch.tensor([[row.got_lse], [row.lse], [row.lse_bound]], dtype=torch.float64, device="cpu")
        got, expected, bound = (torch.cat(pair) for pair in zip((row.got, row.expected, row.bound), lse, strict=True))
        return Beside(got, expected, bound, torch.cat((self.out, self.lse_of(row)[:, None]), 1))

    def left_open(self, row: AveragedRow) -> Float64[Tensor, " results"]:
        """The largest part of the row's error, in bounds, that each result leaves open."""
        beside = self.beside(row)
        return (beside.missed / beside.bound.clamp(min=_TINY)).amax(1).nan_to_num(torch.inf)


@dataclass(frozen=True)
class Family(Replay):
    """Mistakes of one kind: `out[i]` and `lse[i]` are what mistake `i` gives, which `words(i)` names.

    `tokens(i)` are those that the mistake is about. `is_fitted`: it has a number that fits best.
    """

    words: Callable[[int], str]
    tokens: Callable[[int], tuple[tuple[int, int], ...]] = _nowhere
    is_fitted: bool = False

    def diagnosis(self, i: int, remark: str = "") -> Diagnosis:
        """Mistake `i`, with a remark."""
        return Diagnosis(self.words(i) + remark, self.cause, self.tokens(i), is_fitted=self.is_fitted)


Predicted = tuple[Float64[Tensor, " v_head_size"], float | None, str]
"""What a mistake gives, its LSE None if that stays right, and what it is in words."""


def family(cause: str, found: Iterable[Predicted]) -> Iterator[Family]:
    """Mistakes of which there are few, as one family; none where there is none."""
    if listed := list(found):
        outs, lses, words = zip(*listed, strict=True)
        lse = torch.tensor(lses, dtype=torch.float64, device="cpu")
        yield Family(cause, torch.stack(outs), lse, words.__getitem__)


def families_of_one(cause: str, found: Iterable[Predicted]) -> Iterator[Family]:
    """Mistakes that are so different that each is a family, the likeliest first."""
    for out, value, words in found:
        lse = None if value is None else torch.tensor([value], dtype=torch.float64, device="cpu")
        yield Family(cause, out[None], lse, [words].__getitem__)


def first_match(row: AveragedRow, families: Iterable[Family]) -> Diagnosis | None:
    """The mistake of the first family that predicts this row, LSE included, or of the first that does so exactly.

    Where the LSE is right, it may have been computed apart from the output: then a mistake in the output alone will do.
    Without words if some do, of which none can be told from the others.
    """
    right = torch.tensor([row.lse], dtype=torch.float64, device="cpu")
    lse_is_right = row.got_lse is not None and bool(_agrees(row, right))
    in_out_alone: Diagnosis | None = None
    is_ambiguous = False
    nearly: Diagnosis | None = None
    for candidates in families:
        if (is_ambiguous or nearly is not None) and candidates.is_fitted:  # some number always fits
            continue
        fits = _fit(row, candidates.out)
        if not bool((fits <= 1).any()):
            continue
        with_lse = torch.where(_agrees(row, candidates.lse_of(row)), fits, torch.inf)
        if float(with_lse.min()) <= 1:
            i = int(with_lse.argmin())
            if _stands_out(row, candidates, with_lse):
                if candidates.is_fitted or float(candidates.left_open(row)[i]) <= _SAME_BOUNDS:
                    return candidates.diagnosis(i)
                nearly = nearly or candidates.diagnosis(i)
            is_ambiguous = True
        if lse_is_right and in_out_alone is None and _stands_out(row, candidates, fits):
            in_out_alone = candidates.diagnosis(int(fits.argmin()), ", for out alone: lse is right")
    return nearly or in_out_alone or (Diagnosis("") if is_ambiguous else None)


def every_match(row: AveragedRow, families: Iterable[Family]) -> Iterator[Diagnosis]:
    """Of each family that predicts this row, LSE included, the mistake that does it best."""
    for candidates in families:
        fits = torch.where(_agrees(row, candidates.lse_of(row)), _fit(row, candidates.out), torch.inf)
        if bool((fits <= 1).any()):
            yield candidates.diagnosis(int(fits.argmin()))


def first_match_of_lse(row: AveragedRow, families: Iterable[Family]) -> Diagnosis | None:
    """The mistake of the first family that predicts the LSE and leaves the output as it is.

    An output that is right is near what such a mistake gives: with many ranges of tokens to choose from, some come near
    to any LSE.
    """
    for candidates in families:
        same_output = ((candidates.out - row.got).abs() <= _SAME_BOUNDS * row.bound).all(-1)
        if candidates.lse is None:
            continue
        found = (same_output & _agrees(row, candidates.lse_of(row)) & _explains_lse(row, candidates.lse)).nonzero()
        if len(found):
            return candidates.diagnosis(int(found[0]))
    return None


def _explains_lse(row: AveragedRow, lse: Float64[Tensor, " mistakes"]) -> Bool[Tensor, " mistakes"]:
    """Whether these are much nearer to what the kernel returned than the right one is: else they explain nothing."""
    got = float("nan") if row.got_lse is None else row.got_lse
    missed = (lse - got).abs() <= _UNEXPLAINED * abs(got - row.lse)
    return (lse == got) | (lse.isfinite() & missed)


def _fit(row: AveragedRow, out: Float64[Tensor, "mistakes v_head_size"]) -> Float64[Tensor, " mistakes"]:
    """How badly each mistake explains the output; at most 1 for one that does."""
    roundoff = torch.finfo(row.dtype).eps
    # Numbers of either sign that cancel round as their terms do, for which the largest result stands.
    tolerance = _BOUNDS * row.bound + roundoff * (out.abs().amax(-1, keepdim=True) + row.expected.abs())
    missed = (row.got - out).abs()
    bound = row.bound.clamp(min=_TINY)  # large elements err by more than small ones are
    error = ((row.got - row.expected).abs() / bound).max()
    fits = torch.maximum((missed / tolerance).amax(-1), (missed / bound).amax(-1) / (_UNEXPLAINED * error))
    return fits.nan_to_num(torch.inf)


def _stands_out(row: AveragedRow, candidates: Family, fits: Float64[Tensor, " mistakes"]) -> bool:
    """Whether no other mistake of the family predicts much the same as the best, so that it fits not by chance."""
    apart = ((candidates.out - candidates.out[int(fits.argmin())]).abs() / row.bound).nan_to_num(torch.inf).amax(-1)
    return not bool((fits.isfinite() & (apart > _SAME_BOUNDS) & (apart < _BOUNDS)).any())


def _agrees(row: AveragedRow, lse: Float64[Tensor, " mistakes"]) -> Bool[Tensor, " mistakes"]:
    if row.got_lse is None:
        return torch.ones_like(lse, dtype=torch.bool)
    close = (lse - row.got_lse).abs() <= _BOUNDS * row.lse_bound + 1e-6 * (1 + lse.abs())
    return (lse == row.got_lse) | (lse.isfinite() & close)


def chain(families: Iterable[Callable[[_Row], Iterator[Family]]], row: _Row) -> Iterator[Family]:
    """All families of mistakes, made one after another."""
    for made in families:
        yield from made(row)
