"""Processes of campaigns killed or stopped at random moments, and signals to the driver: nothing is lost or left."""

from __future__ import annotations

import random
import signal
import time
from typing import ClassVar

from tests.audit.auditing import Part
from tests.audit.yard import TRACEBACK, Fault, Seen
from tests.faults.campaigns import Campaign, assert_nothing_half_written, saved
from tests.faults.families import Family, Role

_KILLS = 270
_SIGNALS = 36
_PAUSES_S: dict[Role, float] = {"executor": 0.25, "worker": 2.0, "zygote": 7.0}
"""On average between two kills of a role: a campaign with nothing left alive has nothing to lose."""
_STOPPABLE: tuple[Role, ...] = ("worker", "zygote")
"""Whoever else is stopped is late, as a kernel that hangs is."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_UNLIKELY_S = 120.0


class Kills(Part):
    """The first inputs are kills, so many of a batch to one campaign; each of the others is a signal to a driver."""

    inputs: ClassVar[int] = _KILLS + _SIGNALS
    batch: ClassVar[int] = 30
    patience_s: ClassVar[float] = 900.0

    def run(self, numbers: range, dice: random.Random) -> Seen:
        number = numbers.start
        is_kill = number < _KILLS
        faults = self._killed(len(numbers), dice) if is_kill else self._signalled(_ENDING[number % len(_ENDING)], dice)
        return Seen(accepted=len(numbers), faults=faults)

    @classmethod
    def begins_batch(cls, number: int) -> bool:
        return number >= _KILLS or super().begins_batch(number)

    def _killed(self, kills: int, dice: random.Random) -> list[Fault]:
        seed = str(dice.randrange(2**32))
        with Campaign(self.yard.project, "--budget", "300s", "--seed", seed) as campaign:
            campaign.family.wait_for("worker")
            left_over = kills - _kill_at_random(campaign.family, kills, dice, campaign)
            if left_over:
                return [Fault("other", f"the campaign ended {left_over} kills early: {campaign.output[-300:]!r}")]
            campaign.wait_for("shrunk")
            campaign.process.terminate()
            return self._left(campaign, signal.SIGTERM, needs_finding=True)

    def _signalled(self, number: signal.Signals, dice: random.Random) -> list[Fault]:
        """At any moment from the first import to the middle of shrinking."""
        with Campaign(self.yard.project, "--budget", "300s", "--seed", str(dice.randrange(2**32))) as campaign:
            if dice.random() < 0.4:
                time.sleep(dice.uniform(0.5, 6.0))
                found = False
            else:
                campaign.wait_for(dice.choice(("found", "confirmed", "shrunk")))
                time.sleep(dice.uniform(0.0, 0.3))
                found = "confirmed" in campaign.output
            campaign.process.send_signal(number)
            return self._left(campaign, number, needs_finding=found)

    def _left(self, campaign: Campaign, number: signal.Signals, *, needs_finding: bool) -> list[Fault]:
        """What is wrong after the end that signal ``number`` brought about."""
        faults = []
        try:
            status = campaign.wait(_UNLIKELY_S)
        except TimeoutError:
            return [Fault("hang", f"signal {number} did not end the campaign")]
        expected = {128 + number, -number}  # a driver that is still importing is ended by the signal itself
        if status not in expected:
            faults.append(Fault("other", f"signal {number} ended it with {status}: {campaign.output[-300:]!r}"))
        if left := campaign.family.left_after():
            faults.append(Fault("other", f"{len(left)} processes left after signal {number}"))
        if TRACEBACK.decode() in campaign.output or "internal error" in campaign.output:
            faults.append(Fault("traceback", repr(campaign.output[-500:])))
        try:
            assert_nothing_half_written(campaign.folder)
            names = {one.kernel.rpartition(":")[2] for one in saved(campaign.folder)}
        except (AssertionError, ValueError) as error:
            return [*faults, Fault("other", f"something half-written: {error}")]
        if names - {"wrong"}:
            faults.append(Fault("other", f"a correct kernel was found wrong: {names}"))
        if needs_finding and not names:
            faults.append(Fault("other", f"the finding was lost: {campaign.output[-500:]!r}"))
        return faults


def _kill_at_random(family: Family, kills: int, dice: random.Random, campaign: Campaign) -> int:
    """Kill until so many have met somebody or the campaign has ended; how many have."""
    killed = 0
    due = {role: time.monotonic() + dice.expovariate(1 / pause_s) for role, pause_s in _PAUSES_S.items()}
    while killed < kills and campaign.process.poll() is None:
        role = min(due, key=lambda one: due[one])
        time.sleep(max(0.0, due[role] - time.monotonic()))
        due[role] = time.monotonic() + dice.expovariate(1 / _PAUSES_S[role])
        members = family.members(role)
        number = signal.SIGSTOP if role in _STOPPABLE and dice.random() < 0.3 else signal.SIGKILL
        killed += bool(members) and dice.choice(members).kill(number)
    return killed
