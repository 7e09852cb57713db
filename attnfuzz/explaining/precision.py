"""Which rounding a kernel makes wherever it computes, told by runs in which each shows by itself.

Of one case some rounding gives any small error: a sum of two numbers is off by as much as its terms. `neighbours` makes
cases in which most roundings change nothing, and `Precision` replays all of them on what the kernel gives there. What
accounts for nearly all errors of all these runs, down to the last bits of what is stored, and makes none where there is
none, is the rounding; where a kernel sums in an order that nobody knows, only sizes can be compared, and what errs as
much wherever the kernel does, and nowhere else, may be it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.explaining.low_precision import OF_EMPTY_ROWS, Group, Rounding, designs, groups, roundings
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.isolation.progress import run_is_over
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.verdict import Cause

OF_MAXIMA = frozenset({"maximum_not_kept", "maximum_not_subtracted", "maximum_of_one_part"})
OF_SOME_NUMBERS = frozenset({OF_EMPTY_ROWS, "flushed", "maximum_of_hidden_keys", "range_of_float16", *OF_MAXIMA})
"""Mistakes that matter for numbers of some size alone: runs with ordinary ones say nothing of them."""

_ENOUGH_NUMBERS = 256
"""Of the rows of a run that are looked at."""
_FEWEST_ROWS, _MOST_ROWS = 2, 4
_OF_FLOAT32 = 2.0**-18
"""By how much a kernel may be off, relative to what it sums, that computes in float32: some roundings of 2^-23."""


class _Squares(NamedTuple):
    """Squares of errors of outputs and of log-sum-exps, in units of what rounding the right ones may take."""

    out: float = 0.0
    lse: float = 0.0

    def share_of(self, whole: _Squares) -> float:
        """Which part of another's errors these are, of outputs or of log-sum-exps, whichever is more.

        Infinite if there are some where the other has none.
        """
        return max(map(_share, self, whole, _SEEN))

    @property
    def are_seen(self) -> bool:
        return any(part > seen for part, seen in zip(self, _SEEN, strict=True))


_SEEN = _Squares(12.0, 3.0)
"""From which on there are any: a bit may fall either way, and there are some hundred outputs."""
_SAME = _Squares(4.0, 1.0)
"""By how much two may differ that are the same."""
_LEFT = 0.25
"""Part of these that the rounding may leave open."""
_LEFT_OF_RUN = 0.5
_AS_WELL = 2.0
"""Those that leave open at most so many times what the best one does are not told apart from it."""
_OF_ANY_ORDER = ("products and sums", "row sum", "accumulator", "both sums", "tile sums", "sums of eight")
"""What is rounded on the way, in an order of the kernel's own: how their names begin."""
_SIZES = 10.0
"""Squares of errors may be so many times as large, or as small, as those of any replayed order."""


def _penalty(left: _Squares, whole: _Squares) -> float:
    return sum(part / (of + seen) for part, of, seen in zip(left, whole, _SEEN, strict=True))


def _share(part: float, whole: float, seen: float) -> float:
    if whole > seen:
        return part / whole
    return 0.0 if part <= seen else math.inf


class _Replayed(NamedTuple):
    """The errors that the best way of a rounding leaves open, and how large its own errors are in its ways."""

    left: _Squares
    least: _Squares
    most: _Squares


class _Seen:
    """The errors of some ``rows`` with the same number of keys, and what each rounding leaves of them, by name."""

    def __init__(
        self,
        rows: Sequence[AttentionRow],
        declared: Numerics,
        *,
        one_copy: bool,
        asked: Collection[Group] | None = None,
    ) -> None:
        run_is_over()  # that it takes a while is not the kernel's doing
        units = _Units(rows)
        lses = torch.tensor([[row.lse] for row in rows], dtype=torch.float64, device="cpu")
        missed, _ = units.squares(torch.stack([row.expected[None] for row in rows]), lses)
        self.wrong = _Squares(*missed[0].tolist())
        self.roundings: dict[str, Rounding] = {}
        self.replayed: dict[str, _Replayed] = {}
        self.groups: dict[str, Group] = {}
        of_weights = declared.probabilities == "input"
        for way in designs(rows, declared):
            every = [groups(row, one_copy=one_copy, beside=way, of_weights=of_weights) for row in rows]
            for of_group in zip(*every, strict=True):
                group = of_group[0][0]
                if group.cause in OF_SOME_NUMBERS or (asked is not None and group not in asked):
                    continue
                for of_rows in zip(*(made for _, made in of_group), strict=True):
                    if len({len(one.out) for one in of_rows}) == 1:
                        self._note(group, of_rows, units)

    def _note(self, group: Group, of_rows: Sequence[Rounding], units: _Units) -> None:
        first, best = of_rows[0], self._best(of_rows, units)
        before = self.replayed.setdefault(first.name, best)
        self.roundings.setdefault(first.name, first)
        self.groups[first.name] = group
        if _penalty(best.left, self.wrong) < _penalty(before.left, self.wrong):
            self.replayed[first.name] = best

    def _best(self, of_rows: Sequence[Rounding], units: _Units) -> _Replayed:
        lses = [one.lse_of(row) for one, row in zip(of_rows, units.rows, strict=True)]
        left, own = units.squares(torch.stack([one.out for one in of_rows]), torch.stack(lses))
        best = min(left.tolist(), key=lambda way: _penalty(_Squares(*way), self.wrong))
        return _Replayed(_Squares(*best), *(_Squares(*ends.tolist()) for ends in (own.amin(0), own.amax(0))))

    def may_be(self, name: str) -> bool:
        """Whether the rounding leaves no more than there is, or errs where the rows do, in some order of its own."""
        one = self.replayed[name]
        return one.left.share_of(self.wrong) <= 1 or self.is_of_its_size(name)

    def is_of_its_size(self, name: str) -> bool:
        """Whether the rounding, in some order, errs about as much as the rows do."""
        one = self.replayed[name]
        return name.startswith(_OF_ANY_ORDER) and all(
            (least / _SIZES <= wrong <= most * _SIZES) if wrong > seen else least <= seen
            for wrong, least, most, seen in zip(self.wrong, one.least, one.most, _SEEN, strict=True)
        )


class _Units:
    """How much the right numbers of ``rows`` may be off as they are stored, and by float32 on the way."""

    def __init__(self, rows: Sequence[AttentionRow]) -> None:
        self.rows = rows
        self._dtype = rows[0].dtype
        of_type = torch.finfo(self._dtype)
        expected, got = (torch.stack(each) for each in zip(*((row.expected, row.got) for row in rows), strict=True))
        of_values = torch.stack([row.log_weights.softmax(0) @ row.v.abs() for row in rows])
        self._out = (of_type.eps / 2 * expected.abs() + _OF_FLOAT32 * of_values + of_type.tiny)[:, None]
        self._beside = torch.stack((got, self._stored(expected)))[:, :, None]
        products = [abs(row.case.scale) * float((row.k.abs() @ row.q.abs()).max()) for row in rows]
        of_lse = [_OF_FLOAT32 * (1 + abs(row.lse) + size) for row, size in zip(rows, products, strict=True)]
        self._lse = torch.tensor(of_lse, dtype=torch.float64, device="cpu")[:, None]
        lses = [[row.got_lse for row in rows if row.got_lse is not None], [row.lse for row in rows]]
        self._beside_lse = torch.tensor(lses, dtype=torch.float64, device="cpu")[:, :, None] if lses[0] else None

    def squares(self, out: Float64[Tensor, "rows ways v_head_size"], lse: Float64[Tensor, "rows ways"]) -> Tensor:
        """Squares of the errors that each of some results leaves open, and of those of these results themselves.

        Of outputs, and of log-sum-exps: sums over the rows.
        """
        of_out = ((self._stored(out) - self._beside) / self._out).square().sum(-1)
        of_lse = torch.zeros_like(of_out) if self._beside_lse is None else lse - self._beside_lse
        return torch.stack((of_out, (of_lse / self._lse).square()), -1).nan_to_num(torch.inf).sum(1)

    def _stored(self, out: Tensor) -> Tensor:
        return out.to(self._dtype).double()


class Precision:
    """Evidence of roundings in `runs`, the rows of each as many keys long. ``declared``: those that are no mistakes.

    ``one_copy``: of each score, as on a CPU.
    """

    def __init__(self, runs: Iterable[Sequence[AttentionRow]], declared: Numerics, *, one_copy: bool) -> None:
        self._one_copy = one_copy
        self._declared = declared
        self._runs: list[_Seen] = []
        possible: Collection[Group] | None = None
        for rows in runs:
            if rows and all(row.is_finite for row in rows):
                most = max(_FEWEST_ROWS, min(_ENOUGH_NUMBERS // len(rows[0].got), _MOST_ROWS))
                asked = rows[:: max(1, -(-len(rows) // most))]
                run = _Seen(asked, declared, one_copy=one_copy, asked=possible)
                self._runs.append(run)
                left = (name for name, one in run.roundings.items() if run.may_be(name) or self._is_declared(one))
                possible = {run.groups[name] for name in left}

    @property
    def is_known(self) -> bool:
        """Whether there was a run of finite numbers."""
        return bool(self._runs)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The roundings that account for all errors that nothing declared accounts for, the best one first."""
        return self._accounting(*self._declared_errors)

    @property
    def designs(self) -> tuple[Cause, ...]:
        """List roundings that account for all errors, declared or not: what is declared may overflow all the same."""
        errors = [run.wrong for run in self._runs]
        return self._accounting(_sum(errors), errors)

    def _accounting(self, errors: _Squares, of_runs: Sequence[_Squares]) -> tuple[Cause, ...]:
        """List roundings that leave little of the errors of all runs together, and of each."""
        if not errors.are_seen:
            return ()
        left = {}
        for name in self._everywhere:
            of_each = [run.replayed[name].left for run in self._runs]
            if all(
                one.share_of(whole) <= _LEFT_OF_RUN or run.is_of_its_size(name)
                for one, whole, run in zip(of_each, of_runs, self._runs, strict=True)
            ):
                left[name] = _sum(of_each)
        found = sorted(
            (name for name in left if left[name].share_of(errors) <= _LEFT), key=lambda name: sum(left[name])
        )
        return tuple(self._everywhere[name].as_cause() for name in found if _are_as_few(left[name], left[found[0]]))

    @property
    def perhaps(self) -> tuple[Cause, ...]:
        """List roundings made in some order that err as much as the kernel wherever it does, and nowhere else."""
        if not self._declared_errors[0].are_seen:
            return ()
        found = (one for name, one in self._everywhere.items() if all(run.is_of_its_size(name) for run in self._runs))
        return tuple(one.as_cause() for one in found if not self._is_declared(one))

    @cached_property
    def _everywhere(self) -> dict[str, Rounding]:
        """The roundings that no run speaks against for good."""
        first, *others = self._runs
        return {name: one for name, one in first.roundings.items() if all(name in run.replayed for run in others)}

    def _is_declared(self, one: Rounding) -> bool:
        declared = self._declared
        if "row_sum" in one.numerics and declared.probabilities != "input":  # then it says nothing
            return False
        return bool(one.numerics) and all(getattr(declared, name) == how for name, how in one.numerics.items())

    @cached_property
    def _declared_errors(self) -> tuple[_Squares, list[_Squares]]:
        """Say what the best of the declared roundings leaves of all errors, and of those of each run."""
        ways = [[run.wrong for run in self._runs]]
        ways += [
            [run.replayed[name].left for run in self._runs]
            for name, one in self._everywhere.items()
            if self._is_declared(one)
        ]
        whole = _sum(ways[0])
        best = min(ways, key=lambda way: _penalty(_sum(way), whole))
        return _sum(best), best

    def behind(self, wrong: Sequence[AttentionRow]) -> tuple[Cause, ...]:
        """List the roundings behind all these rows: they account for the runs' errors, and make these rows so wrong.

        Where a row is no number, it is also what is declared, and overflows.
        """
        is_of_numbers = all(row.is_finite for row in wrong)
        found = self.causes if is_of_numbers else (*self.causes, *self.designs)
        return tuple(
            one
            for i, one in enumerate(found)
            if one not in found[:i] and all(self._explains(one, row) for row in wrong)
        )

    def _explains(self, cause: Cause, row: AttentionRow) -> bool:
        """Whether most of the errors of a row, of whatever size, are the rounding's."""
        if not row.is_finite:
            every = roundings(row, one_copy=self._one_copy, causes={cause.mistake})
            return any(
                not bool(one.out.isfinite().all() & one.lse.isfinite().all()) for one in every if one.name == cause.way
            )
        seen = _Seen([row], self._declared, one_copy=self._one_copy, asked={self._runs[0].groups[cause.way]})
        left = seen.replayed[cause.way].left
        return all(part <= _LEFT_OF_RUN * whole for part, whole in zip(left, seen.wrong, strict=True) if whole > 1)


def _are_as_few(one: _Squares, best: _Squares) -> bool:
    return all(part <= _AS_WELL * least + same for part, least, same in zip(one, best, _SAME, strict=True))


def _sum(every: Iterable[_Squares]) -> _Squares:
    listed = list(every)
    return _Squares(sum(one.out for one in listed), sum(one.lse for one in listed))
