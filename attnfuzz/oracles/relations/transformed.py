"""Runs of a trial's kernel on what a relation makes of the case, and the comparison of their results, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from attnfuzz.judging.elements import axes_of, blame_of, extent, first_index
from attnfuzz.judging.observation import KernelRaised, Observation, observe
from attnfuzz.judging.trial import Trial
from attnfuzz.judging.words import element
from attnfuzz.memory.patterns import bits
from attnfuzz.oracles.verdict import Failure, OracleName
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import CaseTooLarge, check_size
from attnfuzz.problems.placement import Placement

__all__ = ["Changed", "Results", "as_it_is", "fits", "results_of", "run_on", "unequal_bits", "where_bits_differ"]

Results = Mapping[str, Tensor]
"""What a kernel returned, by name, in host memory."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What a relation makes of a case: `words` end the sentence "the kernel returns x originally and y ...".

    `values`: None for those that are drawn for `case`. `placement`: where the live elements go, if not where `case`
    says.
    """

    words: str
    case: Case
    values: Any = None
    placement: Placement | None = None


def fits(case: Case) -> bool:
    """Whether a changed case is of a size that may be run."""
    try:
        check_size(case)
    except CaseTooLarge:
        return False
    return True


def results_of(trial: Trial, changed: Changed) -> Results:
    """Of a run on `changed`. Raises as `run_on` does."""
    return {name: result.cpu() for name, result in run_on(trial, changed).results.items()}


def run_on(trial: Trial, changed: Changed) -> Observation:
    """A run of the trial's kernel on `changed`, with the memory around it filled as in the trial's first run.

    Raises `KernelRaised`, with the words of the change.
    """
    try:
        seen = observe(
            trial.kernel,
            changed.case,
            changed.values,
            device=trial.device,
            poison="nan",
            prefill="nan",
            placement=changed.placement,
            wait=trial.wait,
            compile_clock=trial.compile_clock,
        )
    except KernelRaised as raised:
        raised.changed = changed.words
        raise
    trial.observations.append(seen)  # for the time that it took
    return seen


def as_it_is(trial: Trial) -> Results:
    """Of the trial's first run, on the case itself."""
    return {name: result.cpu() for name, result in trial.first.results.items()}


def where_bits_differ(one: Results, other: Results) -> dict[str, Bool[Tensor, "..."]]:
    """Each element whose bits differ. Zeros are equal whatever their sign, and so are all NaNs.

    What lies beside a partial LSE of -inf may be any number.
    """
    masks = {name: _differ(part, other[name]) for name, part in one.items()}
    if "partial_lse" in one:
        empty = one["partial_lse"].isneginf() & other["partial_lse"].isneginf()
        masks["partial_out"] = masks["partial_out"] & ~empty.unsqueeze(-1)
    return masks


def unequal_bits(
    oracle: OracleName,
    case: Case,
    one: Results,
    other: Results,
    words: str,
    *,
    details: tuple[str, ...],
    masks: Mapping[str, Bool[Tensor, "..."]] | None = None,
    as_it_was: str = "originally",
    rule: str = "the bits must be equal",
) -> Failure | None:
    """An objection to the first element that should have the same bits in `other`, a run changed as `words` say.

    `masks`: the elements that differ, if not all those that `where_bits_differ` finds. `rule`: what they break.
    """
    masks = where_bits_differ(one, other) if masks is None else masks
    name = next((name for name, mask in masks.items() if mask.any()), None)
    if name is None:
        return None
    axes = axes_of(name, case)
    index = first_index(masks[name])
    before, after = (_in_full(float(results[name][index])) for results in (one, other))
    return Failure(
        oracle=oracle,
        kind="bits",
        message=f"{element(name, axes, index)} is {before} {as_it_was}, but {after} {words}: {rule}",
        details=(f"it changes {extent(name, axes, masks[name])}", *details),
        tensor=name,
        blame=blame_of(case, axes, index),
    )


def _in_full(value: float) -> str:
    """As many digits as tell two float32 numbers apart."""
    text = f"{value:.9g}"
    return text if any(mark in text for mark in ".einf") else f"{text}.0"


def _differ(one: Tensor, other: Tensor) -> Bool[Tensor, "..."]:
    return (bits(one) != bits(other)) & (one != other) & ~(one.isnan() & other.isnan())
