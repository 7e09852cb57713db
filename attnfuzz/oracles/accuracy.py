"""Results within their error bounds, or not."""

import torch

from attnfuzz.oracles.comparison import Comparison
from attnfuzz.oracles.elements import extent
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Failure
from attnfuzz.oracles.words import element, number, ratio

__all__ = ["check"]


def check(trial: Trial) -> Failure | None:
    """The first of out and lse that is beyond its bound, with what it points to."""
    if trial.symptoms.error_ratio <= 1:
        return None
    comparison = next(part for part in trial.comparison if bool((part.ratio > 1).any()))
    kind, index = _worst(comparison)
    got, expected, bound = (float(part[index]) for part in (comparison.got, comparison.expected, comparison.bound))
    axes, wrong = comparison.axes, comparison.ratio > 1
    error = float(comparison.ratio[index])
    return Failure(
        oracle="accuracy",
        kind=f"{comparison.name}:{kind}",
        message=f"{element(comparison.name, axes, index)} = {number(got)}, expected {number(expected)}"
        + (
            f" (error {number(abs(got - expected))} is {ratio(error)} x the bound {number(bound)})"
            if error < torch.inf
            else ""
        ),
        details=(f"beyond the bound: {extent(comparison.name, axes, wrong)}",),
        error_ratio=error,
    )


def _worst(comparison: Comparison) -> tuple[str, tuple[int, ...]]:
    """The kind of failure, NaN before infinity before a wrong number, and its worst element."""
    wrong = comparison.ratio > 1
    got = comparison.got.double()
    for kind, mask in (("nan", wrong & got.isnan()), ("inf", wrong & got.isinf())):
        if mask.any():
            return kind, tuple(int(i) for i in mask.nonzero()[0])
    flat = int(comparison.ratio.argmax())
    return "value", tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), comparison.ratio.shape))
