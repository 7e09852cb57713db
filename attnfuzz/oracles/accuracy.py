"""Results within their error bounds, or not."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from attnfuzz.cases.supported import supports_case
from attnfuzz.explaining.diagnose import Compared, Nearby, diagnose
from attnfuzz.explaining.measured_row import weighed_rows
from attnfuzz.explaining.reruns import Reruns
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.memory.patterns import Fill
from attnfuzz.oracles.relations.relation import Changed, fits, run_on
from attnfuzz.problems.cases import Case
from attnfuzz.problems.wording import element, number, ratio
from attnfuzz.trials.checksums import CHANGED
from attnfuzz.trials.comparison import Comparison, Reference, blame_of, compare, extent, first_index, place_of
from attnfuzz.trials.observation import KernelRaised, ResultError
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Blame, Failure


def check(trial: Trial) -> Failure | None:
    """The first of out and lse that is beyond its bound, with the mistakes that give it.

    Where the trial inquires, neighbouring cases are run until one mistake is left, and that is told.
    """
    if trial.checks.error_ratio <= 1:
        return None
    runs = partial(nearby, trial) if trial.inquire else None
    found = objection(
        trial.reference, trial.comparison, trial.first.poison, nearby=runs, weighed=lambda: _weighed(trial)
    )
    if found is None:  # it was beyond its bound when it was looked at first
        raise KernelRaised(ResultError(CHANGED), trial.first.poison, fatal=True)
    return found


def objection(
    reference: Reference,
    comparisons: list[Comparison],
    poison: Fill,
    *,
    nearby: Nearby | None = None,
    weighed: Callable[[], Iterable[AttentionRow]] = tuple,
) -> Failure | None:
    """Like `check`, for results that exist already. Without `nearby` no further runs are made. See `diagnose`."""
    comparison = next((part for part in comparisons if bool((part.ratio > 1).any())), None)
    if comparison is None:
        return None
    kind, index = _worst(comparison)
    found = diagnose(reference, poison, comparisons, comparison, index, nearby=nearby, weighed=weighed)
    tokens = found.causes[0].tokens if found.words and found.causes else ()
    is_base2 = bool(found.causes) and all(one.mistake == "lse_base2" for one in found.causes)
    is_rounding = bool(found.causes) and all(one.rounding for one in found.causes)
    words = (_sentence(comparison, index), found.words, _how_far_off(comparisons, comparison) if is_rounding else "")
    return Failure(
        oracle="accuracy",
        kind=f"{comparison.name}:{kind}",
        message="; ".join(filter(None, words)),
        details=(
            f"beyond the bound: {extent(comparison.name, comparison.axes, comparison.ratio > 1)}",
            *place_of(reference.case, comparison.name, index),
        ),
        error_ratio=float(comparison.ratio[index]),
        tensor=comparison.name,
        causes=found.causes,
        maybe=found.maybe,
        blame=blame_of(reference.case, comparison.axes, index) | Blame(tokens=tokens),
        remedy={"lse": "base2"} if is_base2 else {},
    )


def nearby(trial: Trial, cases: Iterable[Case], *, poison: Fill = "nan") -> Iterator[Compared]:
    """Runs on other cases beside what each should give, with what is dead filled with `poison`."""
    declaration = trial.kernel.declaration
    for changed in cases:
        if not supports_case(declaration.supports, declaration.options, changed) or not fits(changed):
            continue
        try:
            seen = run_on(trial, Changed("with other numbers or lengths", changed), poison=poison)
        except KernelRaised as raised:
            if raised.fatal:
                raise
            continue
        reference = trial.reference_of(changed)
        yield reference, compare(reference, seen.results)


def _weighed(trial: Trial) -> list[AttentionRow]:
    """Rows of the trial's case with measured weights; none of a kernel that raises where they are measured."""
    reruns = Reruns(trial.kernel, trial.case, device=trial.device, is_over=lambda: False)
    try:
        return weighed_rows(reruns)
    except KernelRaised as raised:
        if raised.fatal:
            raise
        return []


def _sentence(comparison: Comparison, index: tuple[int, ...]) -> str:
    got, expected, bound = (float(part[index]) for part in (comparison.got, comparison.expected, comparison.bound))
    sentence = f"{element(comparison.name, comparison.axes, index)} = {number(got)}, expected {number(expected)}"
    error = float(comparison.ratio[index])
    if math.isinf(error):
        return sentence
    return f"{sentence} (error {number(abs(got - expected))} is {ratio(error)} x the bound {number(bound)})"


def _how_far_off(comparisons: Iterable[Comparison], failed: Comparison) -> str:
    """How much a rounding matters: what is right all the same, and how far off the rest is."""
    told = []
    for part in comparisons:
        wrong = part.ratio > 1
        if not bool(wrong.any()):
            told.append(f"{part.name} is right")
            continue
        got, expected = part.got.double(), part.expected.double()
        numbers = expected[expected.isfinite()]  # none where all rows are empty, and the LSE is -inf
        off = float((got - expected)[wrong].abs().amax() / numbers.abs().amax()) if len(numbers) else math.inf
        if math.isfinite(off):
            percent = f"{100 * off:.0f}" if off >= 0.1 else f"{100 * off:.2g}"
            told.append(f"{part.name} is {percent} % of its largest number off")
        elif part is not failed:  # of which that is said already
            told.append(f"{part.name} is {'NaN' if math.isnan(off) else 'infinitely far off'}")
    return " and ".join(told)


def _worst(comparison: Comparison) -> tuple[str, tuple[int, ...]]:
    """The kind of failure, NaN before infinity before a wrong number, and its worst element."""
    wrong = comparison.ratio > 1
    got = comparison.got.double()
    for kind, mask in (("nan", wrong & got.isnan()), ("inf", wrong & got.isinf())):
        if mask.any():
            return kind, first_index(mask)
    worst = comparison.ratio == comparison.ratio.amax()
    return "value", first_index(worst)
