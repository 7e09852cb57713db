"""Memory that a kernel must not write: around outputs and workspaces, between strided elements, and all inputs."""

from attnfuzz.memory.arena import Violation, violations
from attnfuzz.mistake import OTHER_STRIDES
from attnfuzz.oracles import registry
from attnfuzz.problems.shapes import strided_layout
from attnfuzz.problems.wording import element, plural, shape_of
from attnfuzz.trials.comparison import place_of
from attnfuzz.trials.observation import Observation
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Cause, Failure


def check(trial: Trial) -> Failure | None:
    """The worst stray write of the first run that made one."""
    for seen, damaged in zip(trial.runs, trial.checks.damaged, strict=True):
        if damaged:
            found = [*violations(seen.given), *violations(seen.allocated)]
            first = min(found, key=_rank)
            others = dict.fromkeys(map(_sentence, sorted(found, key=_rank)))  # two workspaces may be alike
            displaced = _displaced(trial, seen, first) or _by_other_strides(seen, first)
            return Failure(
                oracle=registry.RED_ZONE.name,
                kind=f"{first.name} modified" if first.where == "inside" else f"write {first.where} {first.name}",
                message=_sentence(first),
                details=(
                    *dict.fromkeys(one.words for one in displaced),
                    *place_of(trial.case, first.name, first.index if first.where == "inside" else ()),
                    *(f"also {other}" for other in [*others][1:9]),
                ),
                tensor=first.name,
                causes=displaced,
            )
    return None


def _displaced(trial: Trial, seen: Observation, stray: Violation) -> tuple[Cause, ...]:
    """The cause, if a row of a result that is changed in place lies where nothing is to be written, and not at its own
    place: what is never written there, and what is written elsewhere, are one mistake.
    """
    name, index = stray.name, stray.index
    if stray.where != "inside" or stray.role != "output" or not index:
        return ()
    part = next((part for part in trial.compare(seen) if part.name == name), None)
    region = next((one for one in seen.given.regions if one.name == name), None)
    if part is None or region is None:
        return ()
    lies = region.tensor[index[0]].to(part.expected.device).double()
    missing = (part.ratio > 1).flatten(1).all(1).nonzero().flatten().tolist()  # numbers of rows
    for row in missing:
        if bool(((lies - part.expected[row]).abs() <= part.bound[row]).all()):
            own, there = (element(name, part.axes[:1], (at,)) for at in (row, index[0]))
            words = f"what belongs at {own} lies at {there}, and is missing at its own place"
            return (Cause(mistake="displaced", way=name, words=words),)
    return ()


def _by_other_strides(seen: Observation, stray: Violation) -> tuple[Cause, ...]:
    """The causes, if a result was written just where the strides of another tensor, or none at all, would put it.

    Several, where these strides are the same here. The worst stray write may lie beside the tensor that follows.
    """
    if stray.where == "inside":
        return ()
    for result in (one for one in seen.given.regions if one.role == "output" and one.tensor.numel()):
        out = result.tensor
        shape = tuple(out.shape)
        others = {
            one.name: one.tensor.stride()
            for one in seen.given.regions
            if one.tensor.dim() == out.dim() and one.tensor.shape[:-1] == shape[:-1]
        }
        others["a contiguous tensor"] = strided_layout(shape, "contiguous", out.dtype.itemsize).strides
        for strides in dict.fromkeys(others.values()):
            if strides != out.stride() and seen.given.is_written_with(result.name, strides):
                names = [name for name, own in others.items() if own == strides]
                alike = ", which are the same here" if len(names) > 1 else ""
                told = f"{result.name} is written with the strides of {' or of '.join(names)}{alike}"
                ways = (f"{result.name}: the strides of {name}" for name in names)
                return tuple(Cause(mistake=OTHER_STRIDES, way=way, words=told) for way in ways)
    return ()


def _rank(violation: Violation) -> tuple[bool, bool, int]:
    return violation.where == "inside", violation.role == "input", -violation.elements


def _sentence(violation: Violation) -> str:
    tensor = f"{violation.name} ({shape_of(violation.dtype, violation.shape)})"
    changed = plural(violation.elements, "element")
    if violation.where == "inside" and violation.role == "output":
        at = f"{changed}, the first at {list(violation.index)}"
        return f"{tensor} was modified where nothing is to be written: {at}"
    if violation.where == "inside":
        return f"input {tensor} was modified: {changed}, the first at {list(violation.index)}"
    if violation.where == "between":
        return f"the kernel wrote {changed} between the elements of {tensor}, in memory that its strides skip"
    side = "past its end" if violation.where == "after" else "before its start"
    return (
        f"the kernel wrote {changed} {violation.where} {tensor}: "
        f"the nearest is {plural(violation.distance, 'element')} {side}"
    )
