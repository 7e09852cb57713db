"""Results that depend on memory no sequence owns: page tails, spare pages, rows past a length, gaps, red zones."""

from functools import partial

from attnfuzz.explaining.diagnose import OF_PLACES, Diagnosis, diagnose, past_the_end_within_bounds
from attnfuzz.explaining.tokens import OF_PADDING
from attnfuzz.inputs.registry import problem_of
from attnfuzz.mistake import WITHOUT_WEIGHT
from attnfuzz.oracles.accuracy import nearby
from attnfuzz.problems.shapes import strides_of, tensor_specs
from attnfuzz.trials.comparison import axes_of, blame_of, differing, extent, first_index, place_of
from attnfuzz.trials.observation import Observation
from attnfuzz.trials.trial import Trial, cause_of_difference
from attnfuzz.verdict import Cause, Failure


def check(trial: Trial) -> Failure | None:
    """Two runs on the same live inputs, with NaN and with finite numbers everywhere else, gave different bits.

    What that points to is told where the trial inquires: what is seen in passing may come of an earlier call.
    """
    if cause_of_difference(trial) != "dead_memory" or trial.second is None:
        return None
    one, other = trial.first.results, trial.second.results
    masks = trial.differences(trial.first, trial.second)
    name = next(name for name, mask in masks.items() if mask.any())
    axes = axes_of(name, trial.case)
    where, got, got_otherwise, index = differing(name, axes, masks[name], one[name], other[name])
    found = _reason(trial, trial.second, index if name == "out" else None)
    return Failure(
        oracle="dead_memory",
        kind=name,
        message=f"{where} changes with memory that holds no token: it is {got} where that holds NaN, "
        f"and {got_otherwise} where it holds small numbers"
        + (f"; {found.words}" if found is not None and found.words and trial.inquire else ""),
        details=(
            f"it changes {extent(name, axes, masks[name])}",
            *place_of(trial.case, name, index),
            *problem_of(trial.case).dead_words(trial.case, trial.kernel.declaration.supports, index[0]),
        ),
        tensor=name,
        causes=() if found is None else found.causes,
        blame=blame_of(trial.case, axes, index),
    )


def _same_numbers(one: Observation, other: Observation) -> bool:
    """Whether all results are equal; of zeros, 0 times a number has its sign."""
    return all(bool(((part == other.results[name]) | part.isnan()).all()) for name, part in one.results.items())


def _reason(trial: Trial, second: Observation, index: tuple[int, ...] | None) -> Diagnosis | None:
    """The cause that the run with finite numbers points to: NaN only tells that something was read, numbers tell what.

    Nothing that a kernel does with scores by themselves makes it read dead memory.
    """
    comparisons = trial.compare(second)
    failed = next((part for part in comparisons if bool((part.ratio > 1).any())), None)
    if failed is None:
        if all(_same_numbers(second, other) for other in trial.poisoned_otherwise):
            without = "with small numbers the result is right"
            kinds = {strides_of(trial.case, name) for name in tensor_specs(trial.case)}
            if kinds == {"contiguous"}:  # what lies in a gap between elements is kept out by no mask
                without += ", but 0 x NaN is NaN: mask the load"
            return Diagnosis(without, (Cause(mistake=WITHOUT_WEIGHT, words=without),))
        read = None if index is None else past_the_end_within_bounds(trial.reference, second.poison, comparisons, index)
        return read or Diagnosis("other numbers there change it as well, within its bounds")
    return diagnose(
        trial.reference,
        second.poison,
        comparisons,
        failed,
        first_index(failed.ratio > 1),
        nearby=partial(nearby, trial, poison=second.poison) if trial.inquire else None,
        among=lambda one: one.mistake in OF_PLACES or one.way == OF_PADDING,
    )
