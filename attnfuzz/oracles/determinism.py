"""Runs a case twice and compares bits, for kernels that promise the same ones."""

from attnfuzz.oracles import registry
from attnfuzz.trials.comparison import axes_of, blame_of, differing, extent
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Failure


def check(trial: Trial) -> Failure | None:
    """Two runs that agree in everything, dead memory included, gave different bits."""
    found = trial.difference
    if found is None or found.cause != "determinism":
        return None
    one, other = found.one.results, found.other.results
    masks = trial.differences(found.one, found.other)
    name = next(name for name, mask in masks.items() if mask.any())
    axes = axes_of(name, trial.case)
    where, got, got_again, index = differing(name, axes, masks[name], one[name], other[name])
    return Failure(
        oracle=registry.DETERMINISM.name,
        kind=name,
        message=f"{where} is {got} in one run and {got_again} in the next, on identical memory",
        details=(
            f"it changes {extent(name, axes, masks[name])}",
            "if the kernel is not meant to be deterministic, declare Supports(deterministic=False)",
        ),
        tensor=name,
        blame=blame_of(trial.case, axes, index),
    )
