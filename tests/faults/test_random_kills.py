"""Fault injection (mirrors no module): processes are killed at random moments, and nothing is lost or invented."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import Died, Reply
from attnfuzz.isolation.zygote_client import Zygote
from tests.common.execution_clients import SERVICES, assert_gone
from tests.faults.campaigns import Campaign, assert_nothing_half_written, saved
from tests.faults.families import Family, Role

SEED = int(os.environ.get("ATTNFUZZ_FAULT_SEED", "0")) or secrets.randbits(32)
"""Printed with a failure; set the variable to have the same kills again."""

CALL_KILLS = 160
CAMPAIGN_KILLS = 50
CAMPAIGNS_KILLED = 4
_PAUSES_S: dict[Role, float] = {"executor": 0.25, "worker": 2.0, "zygote": 7.0}
"""On average between two kills of a role: a campaign with nothing left alive has nothing to lose."""


@pytest.fixture(autouse=True)
def dice() -> random.Random:
    print(f"ATTNFUZZ_FAULT_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with (
        Zygote.start(service=f"{SERVICES}:Rogue", preload=(), max_restarts=CALL_KILLS) as zygote,
        Executor(zygote) as started,
    ):
        yield started


@pytest.mark.night
def test_every_call_is_answered_whatever_is_killed_meanwhile(executor: Executor, dice: random.Random) -> None:
    """An executor or zygote killed at the wrong moment would answer the wrong call, hang, or be the kernel's fault."""
    for number in range(CALL_KILLS):
        victim = executor.pid if dice.random() < 0.8 else executor._zygote.pid
        delay_us = int(1e6 * dice.uniform(0.0, 0.03))
        killer = os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep {delay_us / 1e6}; kill -9 {victim}"], os.environ)
        outcome = executor.call("sleep", b"0.01", timeout_s=20)
        assert isinstance(outcome, Reply | Died)
        if isinstance(outcome, Died):  # three kills in one call: as likely as the machine is busy
            assert outcome.exit_status == -signal.SIGKILL
        os.waitpid(killer, 0)
        reply = executor.call("echo", str(number).encode(), timeout_s=20)
        assert isinstance(reply, Died) or reply == Reply(str(number).encode())
    left = executor.pid
    executor.close()
    assert_gone(left)


def kill_at_random(family: Family, dice: random.Random, kills: int, alive: Campaign) -> Counter[Role]:
    """Kill until ``kills`` have met somebody, or the campaign has ended; how many of each role."""
    killed: Counter[Role] = Counter()
    due = {role: time.monotonic() + dice.expovariate(1 / pause_s) for role, pause_s in _PAUSES_S.items()}
    while killed.total() < kills and alive.process.poll() is None:
        role = min(due, key=lambda one: due[one])
        time.sleep(max(0.0, due[role] - time.monotonic()))
        due[role] = time.monotonic() + dice.expovariate(1 / _PAUSES_S[role])
        members = family.members(role)
        killed[role] += bool(members) and dice.choice(members).kill()
    return killed


@pytest.mark.night
def test_a_campaign_survives_random_kills_of_its_processes(tmp_path: Path, dice: random.Random) -> None:
    """A worker, executor or zygote that the system kills would end the search, lose findings or invent them."""
    with Campaign(tmp_path, "--budget", "120s", "--seed", str(SEED)) as campaign:
        campaign.wait_for("searching")  # before that nothing has been drawn or kept
        killed = kill_at_random(campaign.family, dice, CAMPAIGN_KILLS, campaign)
        print(dict(killed), campaign.output)
        campaign.wait_for("shrunk")
        campaign.process.terminate()
        status = campaign.wait()
        print(campaign.output)
        assert campaign.family.left_after() == []
    assert (killed.total(), status) == (CAMPAIGN_KILLS, 128 + signal.SIGTERM)
    assert "internal error" not in campaign.output
    assert {regression.kernel.rpartition(":")[2] for regression in saved(tmp_path)} == {"wrong"}
    assert_nothing_half_written(tmp_path)
    assert list(campaign.temporary.iterdir()) == []


@pytest.mark.night
def test_a_campaign_killed_at_random_moments_goes_on_each_time(tmp_path: Path, dice: random.Random) -> None:
    """kill -9, a power cut, a preempted job: what was found would be gone, or processes go on without a master."""
    resumed = 0
    for _ in range(CAMPAIGNS_KILLED):
        can_resume = (tmp_path / ".attnfuzz" / "state.json").exists()
        resumed += can_resume
        with Campaign(tmp_path, *(["--resume"] if can_resume else ["--budget", "300s"])) as campaign:
            campaign.wait_for("searching")  # before that nothing has been drawn or kept
            time.sleep(dice.uniform(0.0, 4.0))
            campaign.process.kill()
            assert campaign.family.left_after() == [], campaign.output
        assert "Error" not in campaign.output, campaign.output
        assert_nothing_half_written(tmp_path)
    assert resumed
    assert {regression.kernel.rpartition(":")[2] for regression in saved(tmp_path)} <= {"wrong"}
