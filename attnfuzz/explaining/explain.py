"""Everything that runs of a failing case can tell about it, in lines and as weights to draw.

Rows that say the same are told in one line.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from torch import Tensor

from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Kernel
from attnfuzz.explaining.diagnose import OF_VALUES, given_by_all
from attnfuzz.explaining.drawing import rows_to_draw, tokens_to_blame
from attnfuzz.explaining.explanation import NO_TIME, Explanation, WeightedRow, in_words
from attnfuzz.explaining.influences import dead_influences, find_unwritten, foreign_influences, table_influences
from attnfuzz.explaining.measured_row import MeasuredRow, Reading, is_measurable, read_from, read_row, split_mistakes
from attnfuzz.explaining.merges import read_merged_row
from attnfuzz.explaining.neighbours import longer_cases, neighbours, of_other_strides
from attnfuzz.explaining.own_pages import misread
from attnfuzz.explaining.own_problems import (
    NOT_READ,
    mistaken,
    read_elsewhere,
    taken_for_another,
    written_elsewhere,
)
from attnfuzz.explaining.places import Places
from attnfuzz.explaining.reruns import OutOfRuns, Reruns
from attnfuzz.explaining.rounding_diagnosis import MOST_ROWS
from attnfuzz.explaining.row import Query
from attnfuzz.explaining.weights import MAX_PLACES, MAX_WEIGHTS, Weights, measure, settle_keys, without_keys
from attnfuzz.explaining.words import joined, scope
from attnfuzz.memory.patterns import bits
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase
from attnfuzz.problems.open_cases import OpenCase, ProblemError
from attnfuzz.problems.wording import number, ranges
from attnfuzz.trials.observation import KernelRaised
from attnfuzz.untrusted_text import text_of, type_name
from attnfuzz.values import LogicalAttention
from attnfuzz.values.tokens import values_on
from attnfuzz.verdict import Blame, Cause

_MOST_GROUPS = 3


def summarise(case: Case, readings: Mapping[int, Reading], *, count: int) -> list[str]:
    """Tell what is wrong with `readings` (by row), of `count` rows in all; once, if it is the same of many.

    One of each kind goes before a second one of any.
    """
    alike: dict[Reading, list[int]] = {}
    for row, reading in readings.items():
        alike.setdefault(reading, []).append(row)
    seen = Counter[str]()
    places: dict[Reading, tuple[bool, int, int]] = {}
    for reading, _ in sorted(alike.items(), key=lambda one: -len(one[1])):
        places[reading] = reading.vague, seen[reading.what], len(places)
        seen[reading.what] += 1
    groups = sorted(alike.items(), key=lambda one: places[one[0]])
    lines = [
        reading.exact if count == 1 else f"{scope(case, rows, count=count)}: {reading.exact}"
        for reading, rows in groups[:_MOST_GROUPS]
    ]
    if others := sum(len(rows) for _, rows in groups[_MOST_GROUPS:]):
        lines.append(f"and {others} other row{'s' if others > 1 else ''}")
    return lines


_MOST_ROWS = 128
_MOST_LINES = 8
_LEAST_OF_KEYS = 2.0**-10
"""Of the largest number of a key, what is read of keys; rounded weights depend on keys, too, and leave less."""


def explain_case(
    kernel: Kernel, case: Case, *, device: str, seconds: float, oracle: OracleName = "accuracy"
) -> Explanation:
    """Run `kernel` on variations of `case`, to which `oracle` objects; begin no run after so many seconds.

    A crash or hang ends or blocks this process, as in judging.
    """
    until = time.monotonic() + seconds

    def reruns_of(one: Case) -> Reruns:
        return Reruns(kernel, one, device=device, is_over=lambda: time.monotonic() > until)

    declared = kernel.declaration
    explaining: _Explaining | _OfOwnProblem
    if isinstance(case, OpenCase):  # weights are those of attention
        beside = (longer_cases(case), neighbours(case), of_other_strides(case))
        taken = ((one for one in some if supports_case(declared.supports, declared.options, one)) for some in beside)
        explaining = _OfOwnProblem(reruns_of(case), *(map(reruns_of, some) for some in taken))
    else:
        explaining = _Explaining(reruns_of(case), oracle)
    try:
        explaining.explain()
    except OutOfRuns:
        explaining.lines.append(NO_TIME)
    except KernelRaised:
        pass  # the failure says that it does; no weight can be measured of a run without a result
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # no reason to lose a finding
        explaining.lines.append(f"(attnfuzz could not explain this: {type_name(error)}: {text_of(error)})")
    return Explanation(
        lines=tuple(explaining.lines[:_MOST_LINES]),
        rows=tuple(explaining.drawn),
        blame=explaining.blamed,
        runs=explaining.reruns.runs,
        causes=explaining.causes,
    )


class _OfOwnProblem:
    """Finds out what is taken for something else, and what is read or written elsewhere, if not in the case then in one
    of ``others``. Of mistakes that give the case's results, the ``longer`` ones and the others leave one; of those
    about strides, cases ``of_strides`` do.
    """

    def __init__(
        self, reruns: Reruns, longer: Iterable[Reruns], others: Iterable[Reruns], of_strides: Iterable[Reruns]
    ) -> None:
        self.reruns = reruns
        self.lines: list[str] = []
        self.drawn: list[WeightedRow] = []
        self.blamed = Blame()
        self.causes: tuple[Cause, ...] | None = None
        self._longer = itertools.tee(longer, 2)
        self._others = itertools.tee(others, 3)
        self._of_strides = of_strides

    def explain(self) -> None:
        """The first mistake that is told, and the first case that tells where."""
        known, others = map(itertools.chain, self._longer, self._others)
        for cause in itertools.chain(
            self._mistaken(known),
            taken_for_another(self.reruns, itertools.chain(others, self._of_strides)),
            written_elsewhere(self.reruns),
            misread(self.reruns),  # which makes cases of its own
            read_elsewhere(self.reruns),
        ):
            if cause.mistake != NOT_READ or not self.causes:  # of several inputs the first is told
                self.causes = (cause,)
            if cause.mistake != NOT_READ:
                return
        for one in self._others[-1]:
            for cause in itertools.chain(written_elsewhere(one), read_elsewhere(one)):
                if cause.mistake != NOT_READ:
                    words = f"in a similar case ({_told(one.case)}), {cause.words}"
                    self.causes = (msgspec.structs.replace(cause, words=words),)
                    return

    def _mistaken(self, others: Iterable[Reruns]) -> Iterator[Cause]:
        """`mistaken`, and a line where the problem cannot say which mistakes it knows."""
        try:
            yield from mistaken(self.reruns, others)
        except ProblemError as error:
            self.lines = [f"the problem's own mistakes were not looked for: {error}"]


def _told(case: Case) -> str:
    return ", ".join(f"{name} {getattr(case, name)}" for name in case.__struct_fields__ if name != "options")


class _Explaining:
    """Collects `lines` and `drawn` rows, so that nothing is lost where time runs out."""

    def __init__(self, reruns: Reruns, oracle: OracleName) -> None:
        self.reruns = reruns
        self.oracle = oracle
        self.places = Places.of(reruns)
        self.lines: list[str] = []
        self.drawn: list[WeightedRow] = []
        self.blamed = Blame()
        self.causes: tuple[Cause, ...] | None = None
        self._measured: dict[int, MeasuredRow] = {}
        self._num_rows: int = reruns.case.num_rows * reruns.case.num_q_heads

    def explain(self) -> None:
        """All steps; where dead memory enters is found out first if that is what the failure is about."""
        if self._is_unstable():
            return
        settle_keys(self.reruns)
        steps = [self._trace]
        if not is_measurable(self.reruns, self.places):
            self.lines.append(
                f"the case has {self.places.count} places to read from and {self._num_rows} rows, too many to measure "
                f"their weights (at most {MAX_PLACES} places, and {MAX_WEIGHTS} weights); shrink it first"
            )
        elif self.reruns.case.scores_read_values:
            self.lines.append(
                "V is a part of the keys that the queries are multiplied with, so the weights of tokens cannot be read "
                "off with unit vectors in its place"
            )
        else:
            steps.insert(self.oracle == "dead_memory", self._weigh)
        for step in steps:
            step()

    def _is_unstable(self) -> bool:
        """Whether runs of the same input disagree."""
        runs = []
        for _ in range(2):
            self.reruns.reset()
            runs.append(self.reruns.run())
        self.lines += [f"the kernel changes its input {name}" for name in self.reruns.changed_inputs()]
        differs = [name for name, part in runs[0].items() if bool((bits(part) != bits(runs[1][name])).any())]
        if differs:
            self.lines.append(
                f"two runs of the same input differ in {joined(differs)}: the kernel depends on something besides its "
                "input, so the weights of tokens cannot be measured"
            )
        return bool(differs)

    def _weigh(self) -> None:
        unwritten = find_unwritten(self.reruns)
        self.lines += unwritten.lines
        if unwritten.lacks_lse:
            self.reruns.leave_out_lse()
        weights = measure(self.reruns, self.places)
        suspects = self._suspects(weights)
        readings = {row: reading for row in suspects[:_MOST_ROWS] if (reading := self._read(weights, row))}
        self.drawn = rows_to_draw(self.reruns.case, self.places, weights, sorted(readings))
        self.blamed = tokens_to_blame(self.reruns.case, self.places, weights, sorted(readings))
        written = {row: reading for row, reading in readings.items() if row not in unwritten.rows}
        if not unwritten.rows:
            self.lines += self._dimensions(weights)
        self.lines += self._mistakes(written)
        self.lines += summarise(self.reruns.case, written, count=self._num_rows)
        self.lines += self._constants(weights, unwritten.rows)
        self.lines += self._foreign([row for row, reading in written.items() if reading.vague])
        if not readings and not self.lines:
            right = "every weight is right" + ("" if weights.lse is None else ", and so is the LSE")
            beside = ": the error shows only with the numbers that the case has in place of the unit vectors"
            self.lines.append(right + (beside if self.oracle == "accuracy" else ""))

    def _mistakes(self, readings: Mapping[int, Reading]) -> Iterator[str]:
        """The mistakes that give the weights of all rows that were read, if these are one or two."""
        measured = [self._measured[one] for one in sorted(readings)[:MOST_ROWS] if one in self._measured]
        finite = [one for one in measured if one.num_tokens and bool(one.got.isfinite().all())]
        if rows := [row for one in finite if (row := one.diagnosable) is not None]:
            self.causes = tuple(one for one in given_by_all(rows) if one.mistake not in OF_VALUES)
            if said := in_words(self.causes):
                yield said

    def _suspects(self, weights: Weights) -> list[int]:
        """Rows that may be wrong."""
        case = self.reruns.case
        rows = set(weights.wrong_rows)
        if isinstance(case, AttentionCase):
            rows |= {row for row in range(self._num_rows) if not case.row_lens[row // case.num_q_heads]}
        if weights.by_split is not None:
            rows |= set(range(self._num_rows))
        if len(rows) > _MOST_ROWS:
            self.lines.append(f"{len(rows)} rows are wrong; of the first {_MOST_ROWS}:")
        return sorted(rows)

    def _read(self, weights: Weights, row: int) -> Reading | None:
        if isinstance(self.reruns.case, MergeStatesCase):
            return read_merged_row(self.reruns.case, self.places, weights, self._values, row)
        if not isinstance(self.reruns.case, AttentionCase):
            return None
        query, (values, keys) = Query.numbered(self.reruns.case, row), self._read_from
        measured = MeasuredRow(**vars(query), places=self.places, weights=weights, values=values, keys=keys)
        self._measured[row] = measured
        found = read_row(measured)
        if mistakes := tuple(split_mistakes(measured)):
            return Reading("; ".join((*mistakes[:2], *([] if found is None else [found.exact]))), "tokens")
        return found

    @functools.cached_property
    def _read_from(self) -> tuple[LogicalAttention, Tensor]:
        """Values on the host, and the key of every place, times its scale in an 8-bit cache."""
        return self._values, read_from(self.reruns, self.places, self._values)

    @functools.cached_property
    def _values(self) -> Any:
        """Logical values of the case, on the host."""
        return values_on(self.reruns.values, "cpu")

    def _dimensions(self, weights: Weights) -> Iterator[str]:
        if bool(weights.dims_differ.all()):
            yield "the output is not a weighted sum of V: its weights depend on the values"
        elif bool(weights.dims_differ.any()):
            dims = ranges(weights.dims_differ.nonzero()[:, 0].tolist())
            yield f"dimensions {dims} of the output weigh the tokens otherwise than the rest"

    def _constants(self, weights: Weights, unwritten: frozenset[int]) -> Iterator[str]:
        finite = weights.constant.isfinite().all(-1)
        rows = [row for row in (weights.has_constant & finite).nonzero()[:, 0].tolist() if row not in unwritten]
        if has_keys := isinstance(self.reruns.case, AttentionCase):
            rows = [row for row in rows if self.reruns.case.row_lens[row // self.reruns.case.num_q_heads]]
        if rows:
            part = weights.constant[rows[0]]
            dim = int(part.abs().argmax())
            is_of_keys = (
                has_keys
                and bool((without_keys(self.reruns, self.places)[rows] == 0).all())
                and float(part.abs().max()) > _LEAST_OF_KEYS * float(self._read_from[1].abs().max())
            )
            values = "any value in the cache" if has_keys else "the outputs that are merged"
            what = "is read from K" if is_of_keys else f"does not come from {values}"
            beside = ", and 0 where all keys are, too" if is_of_keys else ""
            yield (
                f"{self._where(rows)}part of the output {what} "
                f"(out[dim {dim}] = {number(float(part[dim]))} where all values are 0{beside})"
            )

    def _foreign(self, vague: list[int]) -> Iterator[str]:
        """Inputs of other rows that enter one whose weights point to no mistake."""
        if vague:
            for what in foreign_influences(self.reruns, self.places, vague[0]):
                yield f"{self._where(vague[:1])}depends on {what}, which it must not read"

    def _trace(self) -> None:
        """Where memory enters the result that must not matter."""
        for place, rows in dead_influences(self.reruns, self.places):
            self.lines.append(f"{self._where(rows)}NaN enters from {place}")
        for place, rows in table_influences(self.reruns):
            self.lines.append(f"{self._where(rows)}depends on {place}")

    def _where(self, rows: Collection[int]) -> str:
        """The rows that a line is about; nothing if there is only one."""
        return "" if self._num_rows == 1 else f"{scope(self.reruns.case, rows, count=self._num_rows)}: "
