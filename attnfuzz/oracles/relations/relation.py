"""A relation: runs of a kernel on changed cases, and a comparison of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import Contents
from attnfuzz.inputs.writing import Placement
from attnfuzz.memory.patterns import Fill, bits
from attnfuzz.oracles.registry import Oracle, OracleName
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import CaseTooLarge, check_size
from attnfuzz.problems.wording import element
from attnfuzz.trials.comparison import axes_of, blame_of, extent, first_index
from attnfuzz.trials.observation import KernelRaised, Observation, observe
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Failure

Results = Mapping[str, Tensor]
"""Results of a kernel by name, in host memory."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A case as a relation changes it: `words` end the sentence "the kernel returns x originally and y ...".

    `values`: None for those that are drawn for `case`. `placement`: where the live elements go, if not where `case`
    says.
    """

    words: str
    case: Case
    values: Any = None
    placement: Placement | None = None


class NothingRunError(Exception):
    """Raised by a relation none of whose runs could be made: it has no word on the case."""


class NotInThisProcessError(NothingRunError):
    """Raised where runs are made in processes of their own: this one says nothing of whether they can be."""


def fits(case: Case) -> bool:
    """Whether a changed case is of a size that may be run."""
    try:
        check_size(case)
    except CaseTooLarge:
        return False
    return True


def unchanged(trial: Trial, words: str) -> Changed:
    """The case as it is, for a run in which something else is changed, as ``words`` say."""
    return Changed(words, trial.case, trial.reference.values_on(trial.device), trial.placement)


def on_host(results: Results) -> Results:
    """Results in host memory."""
    return {name: result.cpu() for name, result in results.items()}


def results_of(trial: Trial, changed: Changed) -> Results:
    """The results of a run on `changed`. Raises as `run_on` does."""
    return on_host(run_on(trial, changed).results)


def run_on(trial: Trial, changed: Changed, *, poison: Fill = "nan") -> Observation:
    """A run of the trial's kernel on `changed`, with the memory around it filled as in the trial's first run.

    `poison`: what is dead holds that instead.

    Raises `KernelRaised`, with the words of the change.
    """
    try:
        seen = observe(
            trial.kernel,
            changed.case,
            changed.values,
            device=trial.device,
            poison=poison,
            prefill="nan",
            placement=changed.placement,
            compile_clock=trial.compile_clock,
        )
    except KernelRaised as raised:
        raised.changed = changed.words
        raise
    trial.times.append(seen.times)
    return seen


def as_it_is(trial: Trial) -> Results:
    """The results of the trial's first run, on the case itself."""
    return on_host(trial.first.results)


def where_bits_differ(one: Results, other: Results) -> dict[str, Bool[Tensor, "..."]]:
    """Each element whose bits differ. Zeros are equal whatever their sign, and so are all NaNs.

    What lies beside a partial LSE of -inf may be any number.
    """
    masks = {
        name: (bits(part) != bits(other[name])) & (part != other[name]) & ~(part.isnan() & other[name].isnan())
        for name, part in one.items()
    }
    if "partial_lse" in one:
        empty = one["partial_lse"].isneginf() & other["partial_lse"].isneginf()
        masks["partial_out"] = masks["partial_out"] & ~empty.unsqueeze(-1)
    return masks


def unequal_bits(
    oracle: Oracle,
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
        oracle=oracle.name,
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


@dataclass(frozen=True, slots=True)
class FurtherRuns:
    """All that a relation wants to see of a case: `runs` that are known before any of them is made, in their order.

    `compare` objects, or not, to their results beside those of the run on the case as it is. `refine` may find better
    words for its objection by runs of a trial of the case. `blame` is asked what it means that accuracy objects to one
    of `runs` whose numbers are drawn, or that it raised.
    """

    runs: Sequence[Changed]
    compare: Callable[[Results, Sequence[Results]], Failure | None]
    refine: Callable[[Trial, Failure], Failure] = lambda trial, failure: failure
    blame: Callable[[Trial, int, Failure | KernelRaised], Failure | None] = lambda trial, run, what: None

    def objection(self, trial: Trial, others: Sequence[Results]) -> Failure | None:
        """Compare the results of all `runs` with those of the trial's first run, and refine an objection."""
        failure = self.compare(as_it_is(trial), others)
        return None if failure is None else self.refine(trial, failure)


Further = Callable[[Declaration, Any, Contents], FurtherRuns | None]
"""Makes the runs of a case and what is in its tensors, on any device; None if there is nothing to be made of it."""


@dataclass(frozen=True, slots=True)
class Relation:
    """`check` runs the kernel of a trial, that all usual oracles are content with, on what it makes of the case.

    `applies` says whether there is something to be made of a case under what the kernel declares. `check` may raise
    `KernelRaised`. `weight`: how often it is drawn, compared with others; by a case from which more can be told than
    from most, perhaps more often. `drawn_on`: those devices, of its oracle's, on which it is drawn. `further`: what
    `check` runs and compares, if that can be done along with other cases. `alone_on`: devices on which it is not, since
    `check` does more than that. `of_any_problem`: it is no law of attention, and holds for problems that users define
    too. `cases`: the type of those that it says something of, so that its functions get no others; `under_a_mask`: of
    masked ones, too. `promise`: the field of `Supports` that is True of a kernel that says that it holds. `closer`: in
    place of `check` where the relation is asked for by name, as for a failure that somebody looks into: it takes more
    runs, and tells more; `closer_further` likewise in place of `further`.
    """

    oracle: Oracle
    applies: Callable[[Declaration, Any], bool]
    check: Callable[[Trial], Failure | None]
    weight: int | Callable[[Declaration, Any], int] = 1
    drawn_on: tuple[str, ...] = ("cpu", "cuda")
    further: Further | None = None
    alone_on: tuple[str, ...] = ()
    of_any_problem: bool = False
    cases: type = object
    under_a_mask: bool = True
    promise: str = ""
    closer: Callable[[Trial], Failure | None] | None = None
    closer_further: Further | None = None

    def looking_closer(self) -> Relation:
        """The relation as it judges a failure that somebody looks into."""
        return replace(self, check=self.closer or self.check, further=self.closer_further or self.further)

    def is_promised(self, declaration: Declaration) -> bool:
        """Whether the kernel says of itself that the relation holds."""
        return bool(self.promise) and getattr(declaration.supports, self.promise) is True

    @property
    def name(self) -> OracleName:
        """The name of its oracle."""
        return self.oracle.name


def runs_of(relation: Relation, trial: Trial) -> Sequence[Changed]:
    """The runs that the relation makes of the trial's case; None where it makes runs of another kind."""
    if relation.further is None:
        return ()
    contents = Contents(trial.reference.values_on(trial.device), None)
    wanted = relation.further(trial.kernel.declaration, trial.case, contents)
    return () if wanted is None else wanted.runs


def one_by_one(further: Further) -> Callable[[Trial], Failure | None]:
    """The `check` that makes the runs of `further` by themselves."""

    def check(trial: Trial) -> Failure | None:
        contents = Contents(trial.reference.values_on(trial.device), None)
        wanted = further(trial.kernel.declaration, trial.case, contents)
        if wanted is None:
            return None
        as_it_is(trial)  # before the others
        return wanted.objection(trial, [results_of(trial, changed) for changed in wanted.runs])

    return check
