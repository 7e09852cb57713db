"""Which rounding gives all wrong rows of a case: of scores, weights, sums, keys or values (see `low_precision`).

Such a kernel is wrong everywhere by a little, so a rounding counts as found only if it gives all wrong rows of a case.
In which order a kernel sums cannot be known, and on a GPU several threads may each have a copy of a score, summed in an
order of its own: where no replay gives the rows, sizes tell what may be behind them (`perhaps`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import torch
from jaxtyping import Bool
from torch import Tensor

from attnfuzz.explaining.low_precision import OF_EMPTY_ROWS, Rounding, roundings
from attnfuzz.explaining.mistakes import REFUTED, Key
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.inputs.reference import row_log_weights
from attnfuzz.isolation.progress import run_is_over
from attnfuzz.verdict import Cause

MOST_ROWS = 8
"""Wrong rows that are replayed: each takes some milliseconds."""

_BOUNDS = 2.0
_UNEXPLAINED = 0.25
"""Part of the error that one replay may leave open: other roundings act on the same scores."""
_MOST_EXACT_WAYS = 12
_ROUNDINGS = 12
"""One after the other: eight in a thread, and as its sum meets those of others."""
_LARGEST_EXPONENT = 700.0
_OF_ITS_BOUND = 0.5
"""Part of its bound from which on an error is counted."""
_TELLING = 3
"""Wrong numbers, whatever values make equal, that none of some thirty mistakes gives by chance."""
_OF_FEW_NUMBERS = frozenset(
    {
        "exponential_rounded",
        "flushed",
        OF_EMPTY_ROWS,
        "maximum_of_hidden_keys",
        "maximum_not_kept",
        "maximum_of_one_part",
        "output_rounded",
        "rounded_weights_summed",
        "scores_rounded",
        "tf32",
        "weights_rounded",
    }
)
"""Causes that are told of fewer wrong numbers: there are not many of their kind, and kernels have them."""
_ACCOUNTED = 0.1
"""Part of the squares of a row's errors, right numbers included, that a rounding leaves if it accounts for the row:
that many numbers come out of none of some thirty mistakes by chance, however few of them are beyond their bounds."""
_ENOUGH_NUMBERS = 8
_SMALLEST_TILE = 16


@dataclass(frozen=True)
class WrongRows:
    """The wrong ``rows`` of a case, while ``others`` are right, and the rounding that gives them, if one does.

    ``one_copy``: of each score, as on a CPU.
    ``beside_empty``: rows without keys are wrong too. ``causes``: of which alone, if not of all.
    """

    rows: Sequence[AttentionRow]
    others: Sequence[AttentionRow]
    one_copy: bool
    beside_empty: bool = False
    causes: Collection[str] | None = None

    @cached_property
    def is_telling(self) -> bool:
        """Whether so many numbers are wrong that none of so many mistakes gives them all by chance.

        Heads that read the same with the same query say what one of them says.
        """
        different = {(tuple(row.expected.tolist()), tuple(row.got.tolist())): row for row in self.rows}
        return sum(map(_wrong_numbers, different.values())) >= _TELLING

    def exactly(self, *, of_few: bool = False) -> tuple[Cause, ...]:
        """The roundings that give each wrong row, to within its error bound, and leave right rows right.

        ``of_few``: of few numbers as well, which some of thirty mistakes give by chance.

        Those that leave least open of the errors go first: a part of what a design rounds gives nearly the same where
        the other part matters less, and other cases tell.
        """
        found = self._of_any_numbers if of_few else self._exact
        ordered = sorted(found, key=lambda rounding: self._left_by(rounding.name))
        return tuple(self.as_told(rounding.as_cause()) for rounding in ordered)

    def as_told(self, cause: Cause) -> Cause:
        """The cause, with words on what overflows here."""
        is_of_float16 = cause.mistake == "scores_rounded" and self.rows[0].case.dtype == "float16"
        if is_of_float16 and not all(row.is_finite for row in self.rows):
            words = f"{cause.words}, which overflows beyond {torch.finfo(torch.float16).max:.0f}"
            return msgspec.structs.replace(cause, words=words)
        return cause

    def kept(self, causes: Iterable[Cause]) -> set[Key]:
        """Keep ``causes`` that other wrong rows do not speak against: some way gives them, or such errors."""
        names = {(one.mistake, one.way) for one in causes}
        fitting = {(one.cause, one.name) for one in self._fitting(_is_given)}
        possible = set(self.perhaps())
        return {key for key in names if key in fitting or key[0] in possible}

    def refuted(self, causes: Iterable[Cause]) -> set[Key]:
        """List ``causes`` that would make a right row wrong."""
        return {(one.mistake, one.way) for one in causes if one.way in self._refuted}

    def _left_by(self, name: str) -> float:
        replayed = next(one for one in self._replayed if one[0].name == name)
        return max(float(rounding.left_open(row).min()) for row, rounding in zip(self.rows, replayed, strict=True))

    def perhaps(self) -> tuple[str, ...]:
        """Causes that may give errors of such a size, in whatever order and with whatever copies."""
        if not self.rows:
            return ()
        sizes: dict[str, Callable[[AttentionRow], bool]] = {
            "weights_rounded": lambda row: _has_right_lse(row) and _is_off_by_at_most(row, 1),
            "rounded_weights_summed": lambda row: _is_off_by_at_most(row, 1),
        }
        if self.rows[0].case.dtype != "float32":
            sizes |= {
                "scores_rounded": _is_of_its_size,
                "sums_rounded": lambda row: _is_off_by_at_most(row, -(-row.num_tokens // _SMALLEST_TILE)),
                "cut_off": lambda row: _is_off_by_at_most(row, 2),  # a bit of the weights, and one of the output
            }
        return tuple(cause for cause, is_of_its_size in sizes.items() if all(map(is_of_its_size, self.rows)))

    @cached_property
    def _exact(self) -> Sequence[Rounding]:
        found = self._of_any_numbers
        if not self.is_telling:
            accounting = {rounding.name for rounding in self._fitting(_accounts_for)}
            found = [one for one in found if one.cause in _OF_FEW_NUMBERS or one.name in accounting]
            found.sort(key=lambda rounding: rounding.name not in accounting)
        return found

    @cached_property
    def _of_any_numbers(self) -> list[Rounding]:
        """However few there are."""
        found = self._fitting(_is_exact)
        refuted = self._refuted if found else ()
        return [one for one in found if one.name not in refuted]

    @cached_property
    def _refuted(self) -> set[str]:
        """Roundings that would make one of the others wrong that is right, or infinite or NaN that is a number."""
        return {
            rounding.name
            for row in self.others
            for rounding in self._replay(row)
            if not rounding.is_finite_at_all or (row.is_right and not bool((rounding.left_open(row) <= REFUTED).any()))
        }

    def _fitting(self, fits: Callable[[AttentionRow, Rounding], bool]) -> Sequence[Rounding]:
        return [replayed[0] for replayed in self._replayed if all(map(fits, self.rows, replayed))]

    @cached_property
    def _replayed(self) -> list[tuple[Rounding, ...]]:
        return list(zip(*map(self._replay, self.rows), strict=True))

    def _replay(self, row: AttentionRow) -> Iterator[Rounding]:
        run_is_over()  # that it takes a while is not the kernel's doing
        for rounding in roundings(row, one_copy=self.one_copy, causes=self.causes, in_passing=True):
            if rounding.cause == OF_EMPTY_ROWS or not self.beside_empty:
                yield rounding


def _wrong_numbers(row: AttentionRow) -> int:
    """Elements of output and LSE whose error is of the size of its bound; those that values make equal count once, and
    all that follow from the weights of few tokens no more often than these."""
    wrong = ~((row.expected - row.got).abs() <= _OF_ITS_BOUND * row.bound)
    lse_is_wrong = row.got_lse is not None and not abs(row.lse - row.got_lse) <= _OF_ITS_BOUND * row.lse_bound
    return min(int(torch.unique(row.v[:, wrong], dim=1).shape[1]), _directions(row)) + int(lse_is_wrong)


def _directions(row: AttentionRow) -> int:
    """Into how many independent directions an output goes wrong if its weights do, and so its errors say of mistakes.

    Not limited where weights do not account for the errors, or many tokens have weight. Between two tokens all follows
    from one number, and some mistake always gives that.
    """
    shares, towards = row.log_weights.softmax(0), row.v - row.expected
    bound = row.bound.clamp(min=torch.finfo(torch.float64).tiny)
    visible = (shares[:, None] * towards.abs() / bound).amax(1) > 1
    number = int(visible.sum())
    if number > _ENOUGH_NUMBERS or not row.is_finite:
        return len(row.got)
    directions, error = (towards[visible] / bound).T, (row.got - row.expected) / bound
    left = error if number == 0 else error - directions @ torch.linalg.lstsq(directions, error[:, None]).solution[:, 0]
    return max(1, number - 1) if bool((left.abs() <= 1).all()) else len(row.got)


def _is_exact(row: AttentionRow, rounding: Rounding) -> bool:
    """Whether one of the ways gives the row, and explains its error: at its worst, and in all of its elements.

    Of a small error, the worst element alone comes out by chance. What is not finite must be so in the same elements.
    """
    return len(rounding.out) <= _MOST_EXACT_WAYS and _is_given(row, rounding)


def _is_given(row: AttentionRow, rounding: Rounding) -> bool:
    """Say whether one of the ways, however many, gives the row."""
    beside = rounding.beside(row)
    finite, worst = beside.got.isfinite(), beside.worst
    is_right = (beside.missed <= _BOUNDS * beside.bound)[:, finite].all(-1)
    if not bool(finite.all()):
        return bool((is_right & _same_where_not_finite(beside.replayed, beside.got)).any())
    is_right &= beside.missed[:, worst] <= _UNEXPLAINED * beside.error[worst]
    unexplained = torch.minimum(beside.unexplained, _as_stored(row, rounding).beside(row).unexplained)
    return bool((is_right & (unexplained <= _UNEXPLAINED)).any())


def _accounts_for(row: AttentionRow, rounding: Rounding) -> bool:
    """Whether one of the ways gives nearly all errors of the row, once it is stored, down to the last bits."""
    numbers = min(len(torch.unique(row.v, dim=1)[0]), _directions(row))
    if not row.is_finite or numbers < _ENOUGH_NUMBERS:
        return False
    return bool((_as_stored(row, rounding).beside(row).unexplained <= _ACCOUNTED).any())


def _as_stored(row: AttentionRow, rounding: Rounding) -> Rounding:
    """With outputs of the type in which they are returned, whose last bit is part of small errors."""
    return replace(rounding, out=rounding.out.to(row.dtype).double())


def _same_where_not_finite(ways: Tensor, got: Tensor) -> Bool[Tensor, " ways"]:
    """Whether NaN, inf and -inf stand where the kernel has them, and nowhere else."""
    found = [kind(ways) == kind(got) for kind in (torch.isnan, torch.isposinf, torch.isneginf)]
    return torch.stack(found).all(0).all(-1)


def _is_of_its_size(row: AttentionRow) -> bool:
    """Whether the row is no further off than scores may make it that were rounded wherever they can be.

    Products, sums and the scaled score are rounded, so score s_i errs by up to d_i = n u |scale| sum |q_d k_d| for n
    roundings one after the other. Its weight in the sum of values and in the sum that divides it may come of different
    copies, so that it is between exp(s_i - d_i) / sum exp(s + d) and exp(s_i + d_i) / sum exp(s - d).
    """
    dtype = getattr(torch, row.case.dtype)
    products = (row.k.abs() @ row.q.abs()).clamp(min=torch.finfo(torch.float64).tiny)
    if not row.is_finite:
        return bool(products.max() > torch.finfo(dtype).max)
    errors = _ROUNDINGS * torch.finfo(dtype).eps * abs(row.case.scale) * products
    low, bottom = row_log_weights(row.case, row.row, row.head, row.scores - errors)
    high, top = row_log_weights(row.case, row.row, row.head, row.scores + errors)
    largest, smallest = (high - bottom).clamp(max=_LARGEST_EXPONENT).exp(), (low - top).exp()
    slack = torch.maximum(largest - row.shares, row.shares - smallest) @ row.v.abs()
    is_out = bool(((row.got - row.expected).abs() <= slack + _BOUNDS * row.bound).all())
    if row.got_lse is None:
        return is_out
    slack_of_lse = _BOUNDS * row.lse_bound
    return is_out and bool(bottom - slack_of_lse <= row.got_lse <= top + slack_of_lse)


def _has_right_lse(row: AttentionRow) -> bool:
    return row.got_lse is None or abs(row.got_lse - row.lse) <= row.lse_bound


def _is_off_by_at_most(row: AttentionRow, units: int) -> bool:
    """So many units in the last place of what is summed, in 16 bits, beyond its bounds."""
    dtype = torch.bfloat16 if row.case.dtype == "float32" else getattr(torch, row.case.dtype)
    if not row.is_finite:
        return bool(((row.weights[:, None] * row.v.abs()).sum(0) > torch.finfo(dtype).max).any())
    each = torch.finfo(dtype).eps * units
    slack = each * (row.shares @ row.v.abs() + row.expected.abs()) + _BOUNDS * row.bound
    is_out = bool(((row.got - row.expected).abs() <= slack).all())
    return is_out and (row.got_lse is None or abs(row.got_lse - row.lse) <= each + _BOUNDS * row.lse_bound)
