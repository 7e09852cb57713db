"""Whether a saved case still fails here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnfuzz.campaign.merging import SavedBug
from attnfuzz.campaign.replay import SavedCase, load_named, replay
from attnfuzz.corpus import regression_name
from attnfuzz.declaration import KernelLoadError
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.limits import CaseTooLarge

__all__ = ["Checked", "check_again"]

Outcome = Literal["fails", "passes", "unverified"]

_TRIES = 3
_MAX_CASES = 8
"""Of one bug: a hundred machines may have found it, and been right until it was repaired."""
_ORDER: tuple[Outcome, ...] = ("fails", "unverified", "passes")


@dataclass(frozen=True, slots=True)
class Checked:
    """One case, run again on the kernel it names. ``reason`` says why it is unverified."""

    saved: SavedCase
    outcome: Outcome
    reason: str = ""


def check_again(bug: SavedBug, runner: Runner, *, trust: bool = False) -> Checked:
    """The first case of ``bug`` that fails; if none does, the first that may fail elsewhere; else the first.

    ``trust``: see `load_named`. Raises ExecutorUnavailable.
    """
    best: Checked | None = None
    for saved in _distinct(bug)[:_MAX_CASES]:
        checked = _check(saved, runner, trust=trust)
        if best is None or _ORDER.index(checked.outcome) < _ORDER.index(best.outcome):
            best = checked
        if best.outcome == "fails" or saved.regression.status == "fixed":
            break
    if best is None:
        raise ValueError("a bug without files cannot be checked; it must have at least one")
    return best


def _distinct(bug: SavedBug) -> list[SavedCase]:
    cases: dict[str, SavedCase] = {}
    for saved in bug.files:
        cases.setdefault(regression_name(saved.regression), saved)
    return list(cases.values())


def _check(saved: SavedCase, runner: Runner, *, trust: bool) -> Checked:
    try:
        kernel = load_named(saved, runner, trust=trust).target
        for _ in range(_TRIES):
            results = list(replay([saved], runner, kernels=[kernel]))
            objections = [result.objection for result in results if result.objection]
            if objections or not results:
                reason = objections[0] if objections else f"the kernel does not compute {saved.regression.problem}"
                return Checked(saved, "unverified", reason)
            if any(result.failed for result in results):
                return Checked(saved, "fails")
    except (KernelLoadError, CaseTooLarge) as error:
        return Checked(saved, "unverified", str(error))
    found_on = saved.regression.environment.device
    if saved.regression.status == "open" and found_on not in ("", runner.device_name):
        return Checked(saved, "unverified", f"passes on {runner.device_name}, was found on {found_on}")
    return Checked(saved, "passes")
