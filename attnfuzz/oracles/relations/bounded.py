"""Two runs on inputs with the same exact result, compared by the sum of their error bounds."""

from __future__ import annotations

from torch import Tensor

from attnfuzz.judging.comparison import Comparison, Reference, compare
from attnfuzz.judging.elements import extent, first_index
from attnfuzz.judging.observation import Observation
from attnfuzz.judging.trial import Trial
from attnfuzz.judging.words import element, number, ratio
from attnfuzz.oracles.relations.transformed import Changed, run_on
from attnfuzz.oracles.verdict import Failure, OracleName

__all__ = ["beyond", "compared", "too_far_apart"]

Parts = dict[str, Comparison]


def too_far_apart(oracle: OracleName, trial: Trial, changed: Changed) -> Failure | None:
    """An objection to the first element that is further from the run on the case than both bounds together allow."""
    return beyond(oracle, trial, compared(trial, changed, run_on(trial, changed)), changed.words)


def compared(trial: Trial, changed: Changed, seen: Observation) -> Parts:
    """A run on `changed` against its own reference, in host memory: `out`, and `lse` if the kernel returns it."""
    reference = Reference(
        trial.kernel.declaration, changed.case, device=trial.device, tolerance=trial.reference.tolerance
    )
    reference.values = changed.values
    return _on_host(compare(reference, seen))


def beyond(oracle: OracleName, trial: Trial, found: Parts, words: str) -> Failure | None:
    """As `too_far_apart`, for a result that has been compared with its reference."""
    for before in _on_host(trial.comparison).values():
        after = found[before.name]
        pair = Comparison(before.name, before.axes, after.got.double(), before.got.double(), before.bound + after.bound)
        mask = pair.ratio > 1
        if mask.any():
            return _objection(oracle, pair, mask, words, float(before.expected[first_index(mask)]))
    return None


def _objection(oracle: OracleName, pair: Comparison, mask: Tensor, words: str, expected: float) -> Failure:
    index = first_index(mask)
    worst = float(pair.ratio[index])
    as_it_is, changed = number(float(pair.expected[index])), number(float(pair.got[index]))
    return Failure(
        oracle=oracle,
        kind=pair.name,
        message=(
            f"{element(pair.name, pair.axes, index)} is {as_it_is} originally, but {changed} {words}: "
            f"the difference is {ratio(worst)} x what both error bounds allow together"
        ),
        details=(f"both should be {number(expected)}", f"it concerns {extent(pair.name, pair.axes, mask)}"),
        error_ratio=worst,
        tensor=pair.name,
    )


def _on_host(comparisons: list[Comparison]) -> Parts:
    return {
        one.name: Comparison(one.name, one.axes, one.got.cpu(), one.expected.cpu(), one.bound.cpu())
        for one in comparisons
        if one.name in ("out", "lse")
    }
