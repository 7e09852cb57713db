"""A family of mistakes with the numbers each would give, and the test of whether one of them is the mistake made."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.oracles.diagnosis.row import AttentionRow

__all__ = [
    "Diagnosis",
    "Suspect",
    "chain",
    "explains_lse",
    "first_match",
    "first_match_of_lse",
    "nowhere",
]

_BOUNDS = 8.0
"""A prediction may miss the number by this many error bounds: the mistake changes the bound, too."""

_UNEXPLAINED = 0.25
"""And by at most this part of the error it is to explain."""

_SAME_BOUNDS = 2.0
"""Predictions that differ by less are those of mistakes that cannot be told apart, nor need be. Where others are nearer
than `_BOUNDS`, one of so many comes near to any number."""


@dataclass(frozen=True)
class Diagnosis:
    """What a wrong result points to, in `words`; `tokens`, as (sequence, position), are those that it is about.

    `cause` is the short, stable name of the mistake that gives this very result; empty if none was replayed. `maybe`:
    other causes that would give much the same. `numerics`: fields of `Numerics` that declare the mistake to be none.
    `replays`: all roundings, by name, that give this result. `is_fitted`: to a number that stands in no program yet.
    """

    words: str
    cause: str = ""
    tokens: tuple[tuple[int, int], ...] = ()
    maybe: tuple[str, ...] = ()
    numerics: Mapping[str, str] = field(default_factory=dict)
    replays: tuple[str, ...] = ()
    is_fitted: bool = False


def nowhere(i: int) -> tuple[tuple[int, int], ...]:
    """No tokens in particular."""
    del i
    return ()


@dataclass(frozen=True)
class Suspect:
    """`out[i]` and `lse[i]` are what the kernel returns if it makes mistake `i`, which `words(i)` names.

    `cause` names the family, and `tokens(i)` the tokens that the mistake is about.
    An `lse` of None says that the mistake leaves the log-sum-exp right. `is_fitted`: it has a number that fits best.
    """

    cause: str
    out: Float64[Tensor, "mistakes v_head_size"]
    lse: Float64[Tensor, " mistakes"] | None
    words: Callable[[int], str]
    tokens: Callable[[int], tuple[tuple[int, int], ...]] = nowhere
    is_fitted: bool = False

    def left_open(self, row: AttentionRow) -> Float64[Tensor, " mistakes"]:
        """The largest part of the row's error, in bounds, that each mistake leaves open."""
        rest = ((self.out - row.got).abs() / row.bound.clamp(min=torch.finfo(torch.float64).tiny)).amax(-1)
        if row.got_lse is not None:
            lse = torch.full_like(rest, row.lse) if self.lse is None else self.lse
            rest = torch.maximum(rest, (lse - row.got_lse).abs() / row.lse_bound)
        return rest.nan_to_num(torch.inf)

    def diagnosis(self, i: int, remark: str = "") -> Diagnosis:
        """Mistake `i`, with a remark."""
        return Diagnosis(self.words(i) + remark, self.cause, self.tokens(i), is_fitted=self.is_fitted)


def first_match(row: AttentionRow, suspects: Iterable[Suspect]) -> Diagnosis | None:
    """The mistake of the first family that predicts this row, LSE included.

    Where the LSE is right, it may have been computed apart from the output: then a mistake in the output alone will do.
    Without words if some do, of which none can be told from the others.
    """
    right = torch.tensor([row.lse], dtype=torch.float64, device="cpu")
    lse_is_right = row.got_lse is not None and bool(_agrees(row, right))
    in_out_alone: Diagnosis | None = None
    is_ambiguous = False
    for suspect in suspects:
        fits = _fit(row, suspect.out)
        if not bool((fits <= 1).any()):
            continue
        with_lse = torch.where(_lse_agrees(row, suspect), fits, torch.inf)
        if float(with_lse.min()) <= 1:
            if _stands_out(row, suspect, with_lse):
                return suspect.diagnosis(int(with_lse.argmin()))
            is_ambiguous = True
        if lse_is_right and in_out_alone is None and _stands_out(row, suspect, fits):
            in_out_alone = suspect.diagnosis(int(fits.argmin()), ", for out alone: lse is right")
    return in_out_alone or (Diagnosis("") if is_ambiguous else None)


def first_match_of_lse(row: AttentionRow, suspects: Iterable[Suspect]) -> Diagnosis | None:
    """The mistake of the first family that predicts the LSE and leaves the output as it is.

    An output that is right is near what such a mistake gives: with many ranges of tokens to choose from, some come near
    to any LSE.
    """
    for suspect in suspects:
        same_output = ((suspect.out - row.got).abs() <= _SAME_BOUNDS * row.bound).all(-1)
        if suspect.lse is None:
            continue
        found = (same_output & _lse_agrees(row, suspect) & explains_lse(row, suspect.lse)).nonzero()
        if len(found):
            return suspect.diagnosis(int(found[0]))
    return None


def explains_lse(row: AttentionRow, lse: Float64[Tensor, " mistakes"]) -> Bool[Tensor, " mistakes"]:
    """Whether these are much nearer to what the kernel returned than the right one is: else they explain nothing."""
    got = float("nan") if row.got_lse is None else row.got_lse
    missed = (lse - got).abs() <= _UNEXPLAINED * abs(got - row.lse)
    return (lse == got) | (lse.isfinite() & missed)


def _fit(row: AttentionRow, out: Float64[Tensor, "mistakes v_head_size"]) -> Float64[Tensor, " mistakes"]:
    """How badly each mistake explains the output; at most 1 for one that does."""
    roundoff = torch.finfo(getattr(torch, row.case.dtype)).eps
    tolerance = _BOUNDS * row.bound + roundoff * (out.abs() + row.expected.abs())
    missed = (row.got - out).abs()
    bound = row.bound.clamp(min=torch.finfo(torch.float64).tiny)  # large elements err by more than small ones are
    error = ((row.got - row.expected).abs() / bound).max()
    fits = torch.maximum((missed / tolerance).amax(-1), (missed / bound).amax(-1) / (_UNEXPLAINED * error))
    return fits.nan_to_num(torch.inf)


def _stands_out(row: AttentionRow, suspect: Suspect, fits: Float64[Tensor, " mistakes"]) -> bool:
    """Whether no other mistake of the family predicts much the same as the best, so that it fits not by chance."""
    apart = ((suspect.out - suspect.out[int(fits.argmin())]).abs() / row.bound).nan_to_num(torch.inf).amax(-1)
    return not bool((fits.isfinite() & (apart > _SAME_BOUNDS) & (apart < _BOUNDS)).any())


def _lse_agrees(row: AttentionRow, suspect: Suspect) -> Bool[Tensor, " mistakes"]:
    right = torch.full((len(suspect.out),), row.lse, dtype=torch.float64, device="cpu")
    return _agrees(row, right if suspect.lse is None else suspect.lse)


def _agrees(row: AttentionRow, lse: Float64[Tensor, " mistakes"]) -> Bool[Tensor, " mistakes"]:
    if row.got_lse is None:
        return torch.ones_like(lse, dtype=torch.bool)
    close = (lse - row.got_lse).abs() <= _BOUNDS * row.lse_bound + 1e-6 * (1 + lse.abs())
    return (lse == row.got_lse) | (lse.isfinite() & close)


def chain(families: Iterable[Callable[[AttentionRow], Iterator[Suspect]]], row: AttentionRow) -> Iterator[Suspect]:
    """The suspects of all families, made one after another."""
    for family in families:
        yield from family(row)
