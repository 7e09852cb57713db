"""The outcome of a command, which alone decides its exit status: every command returns an `Outcome`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnfuzz.campaign.result import CampaignResult


_FINE = 0
_FAILED = 1
NOT_JUDGED = 2
"""Also of wrong usage and environments, where nothing came to be judged."""
_SIGNALS = 128


def interrupted_by(signal: int) -> int:
    """The exit status of what a signal ended, as shells give it."""
    return _SIGNALS + signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Counts of all that a command judged.

    ``judged``: how many there were of what it judges, cases as a rule; None of a command that judges nothing, such as
    one that draws a case, and where it was asked for a part in which there is nothing. ``failed``: something is wrong
    with what was judged. ``missed``: there is something that it should have judged and could not. ``signal``: the
    number of the one that interrupted it.
    """

    judged: int | None
    failed: bool = False
    missed: bool = False
    signal: int | None = None

    @property
    def status(self) -> int:
        """The exit status: 0 says that all was judged, something at least, and nothing found.

        An interruption goes before findings, and findings before what could not be judged.
        """
        if self.signal is not None:
            return interrupted_by(self.signal)
        if self.failed:
            return _FAILED
        return NOT_JUDGED if self.missed or self.judged == 0 else _FINE

    @classmethod
    def of_all(cls, outcomes: Iterable[Outcome]) -> Outcome:
        """The outcome of a command which runs others; one that judged nothing at all counts as missed."""
        parts = list(outcomes)
        counted = [one.judged for one in parts if one.judged is not None]
        return cls(
            judged=sum(counted) if counted else None,
            failed=any(one.failed for one in parts),
            missed=any(one.missed or one.judged == 0 for one in parts),
            signal=next((one.signal for one in parts if one.signal is not None), None),
        )


SHOWN = Outcome(judged=None)
"""Outcome of a command that has shown what it was asked for."""


def outcome_of(result: CampaignResult) -> Outcome:
    """The outcome of a campaign. Only findings that count fail it: see `Statistics.disposition`."""
    from attnfuzz.report.remarks import remarks_on

    missed = any(remark.weight != "note" for remark in remarks_on(result))
    return Outcome(
        judged=result.statistics.cases,
        failed=result.fails,
        missed=missed or result.stop_reason in ("workers_lost", "environment"),
        signal=result.interrupted_by,
    )


def why_not_judged(result: CampaignResult) -> str:
    """In one sentence, for a command about kernels of which nothing can be said without a case."""
    if result.stop_reason == "interrupted":
        return "interrupted before there was a verdict"
    if result.troubles:
        return result.troubles[0].strip()
    reasons = [why for kernel in result.statistics.kernels.values() for why in kernel.not_runnable]
    if reasons:
        return f"no case can run here: {reasons[0]}; use a GPU"
    for how_far in result.unbuilt.values():
        return f"it compiles itself, and within the budget {how_far}; raise --budget"
    for how_far in result.unsettled.values():
        return f"within the budget, {how_far}; raise --budget"
    for doubt in result.unconfirmed:
        return f"a failure was seen and could not be confirmed: {doubt.failure.message}; raise --budget"
    for one in result.too_few:
        return str(one)
    return "no case was judged within the budget; raise --budget"
