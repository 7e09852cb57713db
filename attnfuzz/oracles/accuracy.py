"""Results within their error bounds, or not."""

import math

from attnfuzz.oracles.comparison import Comparison
from attnfuzz.oracles.diagnosis import explain
from attnfuzz.oracles.elements import blame_of, extent, first_index
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Blame, Failure
from attnfuzz.oracles.words import element, number, ratio

__all__ = ["check"]


def check(trial: Trial) -> Failure | None:
    """The first of out and lse that is beyond its bound, with what it points to."""
    if trial.symptoms.error_ratio <= 1:
        return None
    comparison = next(part for part in trial.comparison if bool((part.ratio > 1).any()))
    kind, index = _worst(comparison)
    found = explain(trial.reference, trial.first, trial.comparison, comparison, index)
    blame = blame_of(trial.case, comparison.axes, index)
    return Failure(
        oracle="accuracy",
        kind=f"{comparison.name}:{kind}",
        message=_sentence(comparison, index) + (f"; {found.words}" if found is not None and found.words else ""),
        details=(f"beyond the bound: {extent(comparison.name, comparison.axes, comparison.ratio > 1)}",),
        error_ratio=float(comparison.ratio[index]),
        tensor=comparison.name,
        cause="" if found is None else found.cause,
        maybe=() if found is None else found.maybe,
        blame=blame if found is None else blame | Blame(tokens=found.tokens),
        numerics={} if found is None else dict(found.numerics),
        replays=() if found is None else found.replays,
        remedy={"lse": "base2"} if found is not None and found.cause == "lse_base2" else {},
    )


def _sentence(comparison: Comparison, index: tuple[int, ...]) -> str:
    got, expected, bound = (float(part[index]) for part in (comparison.got, comparison.expected, comparison.bound))
    sentence = f"{element(comparison.name, comparison.axes, index)} = {number(got)}, expected {number(expected)}"
    error = float(comparison.ratio[index])
    if math.isinf(error):
        return sentence
    return f"{sentence} (error {number(abs(got - expected))} is {ratio(error)} x the bound {number(bound)})"


def _worst(comparison: Comparison) -> tuple[str, tuple[int, ...]]:
    """The kind of failure, NaN before infinity before a wrong number, and its worst element."""
    wrong = comparison.ratio > 1
    got = comparison.got.double()
    for kind, mask in (("nan", wrong & got.isnan()), ("inf", wrong & got.isinf())):
        if mask.any():
            return kind, first_index(mask)
    worst = comparison.ratio == comparison.ratio.amax()
    return "value", first_index(worst)
