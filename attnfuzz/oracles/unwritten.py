"""Results that were never written, or that depend on memory nobody wrote."""

import functools
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.allocations import WORKSPACE
from attnfuzz.memory.patterns import bits, holds_prefill
from attnfuzz.mistake import READ_BEFORE_WRITTEN
from attnfuzz.oracles import registry
from attnfuzz.problems.wording import element, number, shape_of
from attnfuzz.trials.comparison import axes_of, blame_of, differing, extent, first_index, place_of
from attnfuzz.trials.observation import Observation
from attnfuzz.trials.trial import Trial, cause_of_difference
from attnfuzz.verdict import Cause, Failure


def check(trial: Trial) -> Failure | None:
    """Elements that still hold the pre-fill of each run, or what they held before; else results that change with it."""
    if trial.checks.unwritten:
        untouched = _untouched(trial)
        for name, mask in untouched.items():
            if mask.any():
                failure = _never_written(trial, name, mask)
                is_nothing = all(bool(one.all()) and one.numel() > 0 for one in untouched.values())
                return _nothing_written(failure, list(untouched)) if is_nothing else failure
    if trial.checks.error_ratio > 1 and (left := _left_as_it_was(trial)) is not None:
        return left
    return _read_before_written(trial) if cause_of_difference(trial) == "unwritten" else None


def _nothing_written(failure: Failure, names: Sequence[str]) -> Failure:
    """``failure`` of a kernel that gave no result at all, with the ways to give one."""
    returned = f"({', '.join(names)})" if len(names) > 1 else names[0]
    places = " and ".join(f"inputs.{name}" for name in names)
    said = f"the kernel gave no result: it must return {returned}, or write into {places}"
    return msgspec.structs.replace(failure, message=said, remedy={})


def lacks_lse(trial: Trial) -> bool:
    """Whether all of the output was written and nothing of the log-sum-exp beside it."""
    if not problem_of(trial.case).results:
        return False
    untouched = _untouched(trial)
    if untouched.keys() not in ({"out", "lse"}, {"output", "output_lse"}):
        return False  # partial states are merged by their LSE
    out, lse = untouched.values()
    return bool(lse.all()) and not bool(out.any())


def _untouched(trial: Trial) -> dict[str, Tensor]:
    """Elements that no run wrote. One run does not tell: a NaN keeps its payload when something is added to it.

    Nor do two where a number that was never written outweighs the others, as in a log-sum-exp over splits.
    """
    untouched = _holding_prefill(trial.runs)
    if not any(mask.any() for mask in untouched.values()):
        return untouched
    return _holding_prefill([*trial.runs, trial.prefilled_low])


def _holding_prefill(runs: Sequence[Observation]) -> dict[str, Tensor]:
    masks = [{name: holds_prefill(result, seen.prefill) for name, result in seen.results.items()} for seen in runs]
    return {name: functools.reduce(torch.logical_and, (mask[name] for mask in masks)) for name in masks[0]}


def _never_written(trial: Trial, name: str, mask: Tensor) -> Failure:
    axes = axes_of(name, trial.case)
    index = first_index(mask)
    problem = problem_of(trial.case)
    details = [
        f"never written: {extent(name, axes, mask)}",
        *place_of(trial.case, name, index),
        *problem.length_words(trial.case, index[0]),
    ]
    remedy: dict[str, str | bool] = {}
    if name in problem.results and name.endswith("lse") and mask.all():
        remedy = {"lse": "none"}
    return Failure(
        oracle=registry.UNWRITTEN.name,
        kind=name,
        message=f"{element(name, axes, index)} was never written",
        details=tuple(details),
        tensor=name,
        blame=blame_of(trial.case, axes, index),
        remedy=remedy,
    )


def _left_as_it_was(trial: Trial) -> Failure | None:
    """A tensor that is changed in place, if all that is wrong in it is what it held before the call, bit for bit."""
    before = problem_of(trial.case).held_before(trial.case, trial.reference.values)
    for part in trial.comparison:
        wrong = part.ratio.cpu() > 1
        if part.name not in before or not wrong.any():
            continue
        is_left = bits(trial.first.results[part.name].cpu()) == bits(before[part.name])
        if bool((wrong & ~is_left).any()):
            continue
        index = first_index(wrong)
        got, expected = (number(float(one[index])) for one in (part.got, part.expected))
        return Failure(
            oracle="unwritten",
            kind=part.name,
            message=f"{element(part.name, part.axes, index)} still holds what it held before the call: {got}, expected "
            f"{expected}",
            details=(
                f"left as it was: {extent(part.name, part.axes, wrong)}",
                *place_of(trial.case, part.name, index),
            ),
            tensor=part.name,
            blame=blame_of(trial.case, part.axes, index),
        )
    return None


def _read_before_written(trial: Trial) -> Failure:
    one, other = trial.first.results, trial.prefilled_otherwise.results
    masks = trial.differences(trial.first, trial.prefilled_otherwise)
    name = next(name for name, mask in masks.items() if mask.any())
    axes = axes_of(name, trial.case)
    where, got, got_otherwise, index = differing(name, axes, masks[name], one[name], other[name])
    # Where no other memory has to differ than that of buffers which the kernel keeps, it is one of these.
    is_kept = trial.prefilled_otherwise.kept and bool(trial.disagree(trial.first, trial.kept_otherwise))
    in_kept = ", in a buffer that the kernel keeps between calls" if is_kept else ""
    return Failure(
        oracle=registry.UNWRITTEN.name,
        kind="read before written",
        message=f"{where} changes with memory that is read before anything is written there{in_kept}: it is "
        f"{got} where that holds NaN, and {got_otherwise} where it holds finite numbers",
        details=(f"it changes {extent(name, axes, masks[name])}", *_workspaces(trial)),
        tensor=name,
        causes=(Cause(mistake=READ_BEFORE_WRITTEN),),
        blame=blame_of(trial.case, axes, index),
    )


def _workspaces(trial: Trial) -> list[str]:
    """The buffers that the kernel may have read too early."""
    seen = trial.prefilled_otherwise
    new = [(one.tensor.dtype, one.tensor.shape) for one in seen.allocated.regions if one.name == WORKSPACE]
    told = []
    for words, buffers in (("the kernel allocated workspaces", new), ("it keeps between calls", seen.kept)):
        shapes = [shape_of(str(dtype).removeprefix("torch."), shape) for dtype, shape in buffers]
        told += [f"{words} {', '.join(shapes[:8])}"] if shapes else []
    return told
