"""A case on a kernel: the runs that oracles compare, each made when first asked for, and why two of them disagree."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.inputs.writing import Placement
from attnfuzz.memory.guarded import Guard
from attnfuzz.memory.patterns import Fill
from attnfuzz.problems.cases import Case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.trials.checksums import CHANGED
from attnfuzz.trials.comparison import Comparison, Reference, compare
from attnfuzz.trials.observation import KernelRaised, Observation, ResultError, Times, observe, observe_guarded
from attnfuzz.trials.run_checks import CaseRuns, RunChecks, elements_differ, look
from attnfuzz.verdict import Timing


class Trial:
    """Runs and reference of `case` on `kernel`, cached."""

    def __init__(
        self,
        kernel: Kernel,
        case: Case,
        *,
        device: str,
        tolerance: Tolerance,
        reference: Reference | None = None,
        placement: Placement | None = None,
        twice: bool = True,
        guard: Guard | None = None,
        inquire: bool = False,
        compile_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`reference`: if it is known, on the device where runs are looked at. `twice`: whether there is a second run.

        `placement`: where the live elements go, if not where the case says. `guard`: see `second`, which there is then.
        `inquire`: whether
        neighbouring cases are asked what is behind a failure. `compile_clock`: see `observe`.
        """
        self.kernel = kernel
        self.case = case
        self.device = device
        self.placement = placement
        self.twice = twice or guard is not None
        self.guard = guard
        self.inquire = inquire
        self.compile_clock = compile_clock
        self.reference = reference or Reference(kernel.declaration, case, device=device, tolerance=tolerance)
        self.times: list[Times] = []
        self._clean_in_guard: Observation | None = None

    @cached_property
    def first(self) -> Observation:
        """Everything NaN that is dead or not written yet."""
        return self._observe("nan", "nan")

    @cached_property
    def second(self) -> Observation | None:
        """Everything finite: equal bits in `first` say that nothing dead or unwritten was used.

        With a `guard`, on a CPU, that edge of every tensor lies at unmapped memory, if `first` is right by itself. What
        such a run shows counts only if it is what an ordinary one shows: operations of torch may give a tensor at
        another alignment other bits.
        """
        if not self.twice:
            return None
        return self._guarded_second() or self._observe("finite", "finite")

    @cached_property
    def repeated(self) -> Observation:
        """As `first`."""
        return self._observe("nan", "nan")

    @cached_property
    def prefilled_otherwise(self) -> Observation:
        """As `first`, except for what outputs and workspaces held."""
        return self._observe("nan", "finite")

    @cached_property
    def kept_otherwise(self) -> Observation:
        """As `first`, except for what buffers held that the kernel keeps between calls and has not written to."""
        return self._observe("nan", "nan", kept="finite")

    @cached_property
    def prefilled_low(self) -> Observation:
        """As `prefilled_otherwise`, with numbers that lose every comparison."""
        return self._observe("nan", "low")

    @cached_property
    def poisoned_otherwise(self) -> tuple[Observation, Observation]:
        """As `second`, with large numbers in what is dead: where they make no difference, none of it has a weight.

        Small ones may have a small weight, too, beside keys whose scores are large.
        """
        return self._observe("low", "finite"), self._observe("high", "finite")

    @cached_property
    def difference(self) -> "Difference | None":
        """The difference between the first and the second run; None if they agree.

        A kernel that counts its calls may give the same bits in any two runs of a few, so what differed with other
        memory is made twice more, and the first run after it: of what comes with every so many calls, up to five, some
        two runs on the same memory differ then.
        """
        if self.second is None or not self.checks.differs:
            return None
        promised = self.kernel.declaration.supports.deterministic
        if promised and bool(self.disagree(self.first, self.repeated)):
            return Difference("determinism", self.first, self.repeated)
        is_unwritten = bool(self.disagree(self.first, self.prefilled_otherwise))
        otherwise = self.prefilled_otherwise if is_unwritten else self.second
        for seen in (otherwise, otherwise, self.first) if promised else ():
            again = self._observe(seen.poison, seen.prefill)
            if bool(self.disagree(seen, again)):
                return Difference("determinism", seen, again)
        return Difference("unwritten" if is_unwritten else "dead_memory", self.first, otherwise)

    def adopt(self, runs: Sequence[Observation], checks: RunChecks) -> None:
        """Take over the first run, and the second but for one with a `guard`, made and looked at elsewhere."""
        vars(self).update(zip(("first", "second"), runs, strict=False))
        vars(self)["checks" if self.guard is None else "alone"] = checks

    def beside(
        self,
        *,
        kernel: Kernel | None = None,
        case: Case | None = None,
        reference: Reference | None = None,
        placement: Placement | None = None,
        twice: bool = True,
        inquire: bool = False,
    ) -> "Trial":
        """A trial of its own, of another kernel, case or reference where these are given."""
        return Trial(
            kernel or self.kernel,
            case or self.case,
            device=self.device,
            tolerance=self.reference.tolerance,
            reference=reference,
            placement=placement,
            twice=twice,
            inquire=inquire,
            compile_clock=self.compile_clock,
        )

    def reference_of(self, case: Case, values: Any = None) -> Reference:
        """The results that another case should give the kernel; ``values``: those on the device, if not those that are
        drawn."""
        declaration, tolerance = self.kernel.declaration, self.reference.tolerance
        return Reference(declaration, case, device=self.device, tolerance=tolerance, values=values)

    def look_closer(self) -> None:
        """Make the second run after all, upon symptoms in the first."""
        self.twice = True
        for cached in ("second", "checks"):
            self.__dict__.pop(cached, None)

    def without_lse(self) -> "Trial":
        """These runs as those of a kernel that returns the output alone."""
        found = copy(self)
        found.kernel, found.guard = self.kernel.without_lse(), None
        for name, member in vars(Trial).items():
            if isinstance(member, cached_property):
                vars(found).pop(name, None)
        found.first, found.second = _output_of(self.first), self.second and _output_of(self.second)
        found.checks = replace(found.checks, damaged=self.checks.damaged, unwritten=False)
        return found

    @property
    def timing(self) -> Timing:
        """Seconds of the runs that it has made and of its reference; the total is left to the caller."""
        build_s, compile_s, kernel_s = map(sum, zip(*self.times, strict=True)) if self.times else (0.0, 0.0, 0.0)
        return Timing(build_s=build_s, compile_s=compile_s, kernel_s=kernel_s, reference_s=self.reference.seconds)

    @property
    def runs(self) -> list[Observation]:
        """The first run and, if there is one, the second."""
        first = self.first  # before the second one
        return [first] if self.second is None else [first, self.second]

    @cached_property
    def comparison(self) -> list[Comparison]:
        """The first run against the reference."""
        return self.compare(self.first)

    def compare(self, seen: Observation) -> list[Comparison]:
        """A run against the reference, in whose memory they are compared: in a batch that is the host's."""
        results = {name: result.to(self.reference.device) for name, result in seen.results.items()}
        return compare(self.reference, results)

    @cached_property
    def alone(self) -> RunChecks:
        """Checks of the first run by itself, after a wait for the device."""
        return self._look([self.first])

    @cached_property
    def checks(self) -> RunChecks:
        """Checks of both runs, after a wait for the device."""
        runs = self.runs
        if runs[-1] is self._clean_in_guard:
            return replace(self.alone, damaged=(*self.alone.damaged, False))
        return self._look(runs)

    def _look(self, runs: Sequence[Observation]) -> RunChecks:
        """`look` at a batch of this case alone. No run may have raised."""
        damaged = torch.stack(list(map(_damaged, runs))).tolist()
        seen = CaseRuns(self.reference, [seen.results for seen in runs], tuple(damaged))
        return look(self.kernel.declaration, [seen])[0]

    def disagree(self, one: Observation, other: Observation) -> Bool[Tensor, ""]:
        """Whether two runs gave different bits; of a kernel that declares itself nondeterministic, other NaNs."""
        return torch.stack([mask.any() for mask in self.differences(one, other).values()]).any()

    def differences(self, one: Observation, other: Observation) -> dict[str, Bool[Tensor, "..."]]:
        """`disagree`, for each element of each result."""
        by_bits = self.kernel.declaration.supports.deterministic
        return {name: elements_differ(part, other.results[name], by_bits=by_bits) for name, part in one.results.items()}

    def _guarded_second(self) -> Observation | None:
        """The second run in guarded memory; None if it is to be an ordinary one."""
        if self.guard is None or self.alone.any():
            return None
        values, before = self.reference.values_on(self.device), self.reference.checksum()
        seen = observe_guarded(
            self.kernel,
            self.case,
            values,
            guard=self.guard,
            poison="finite",
            prefill="finite",
            compile_clock=self.compile_clock,
        )
        self._check_reference(before, "finite")
        if seen is None:
            return None
        self.times.append(seen.times)
        if _damaged(seen) or self.disagree(self.first, seen):
            return None
        self._clean_in_guard = seen
        return seen

    def _check_reference(self, before: int, poison: Fill) -> None:
        """Raise `KernelRaised` if a run has changed what it is compared with, whose checksum was ``before``."""
        if self.reference.checksum() != before:
            raise KernelRaised(ResultError(CHANGED), poison, fatal=True)

    def _observe(self, poison: Fill, prefill: Fill, *, kept: Fill | None = None) -> Observation:
        values, before = self.reference.values_on(self.device), self.reference.checksum()
        seen = observe(
            self.kernel,
            self.case,
            values,
            device=self.device,
            poison=poison,
            prefill=prefill,
            placement=self.placement,
            kept=kept,
            compile_clock=self.compile_clock,
        )
        self._check_reference(before, poison)
        seen = seen if self.reference.device == self.device else seen.on_host()
        self.times.append(seen.times)
        return seen


def _output_of(seen: Observation) -> Observation:
    output = next(iter(seen.results))  # output first: `named_results`
    return replace(seen, results={output: seen.results[output]})


def _damaged(seen: Observation) -> Bool[Tensor, ""]:
    return seen.given.damage() | seen.allocated.damage()


Cause = Literal["determinism", "unwritten", "dead_memory"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two runs that gave other bits, and why."""

    cause: Cause
    one: Observation
    other: Observation


def cause_of_difference(trial: Trial) -> Cause | None:
    """None if both runs agree. Takes up to five further runs, once for a trial."""
    return None if trial.difference is None else trial.difference.cause
