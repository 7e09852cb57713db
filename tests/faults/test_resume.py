"""Fault injection (mirrors no module): a campaign that was killed goes on where it was."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec
import pytest

from attnfuzz.campaign.saved.state import CampaignState, load_state
from attnfuzz.report.summary import Summary
from tests.faults.campaigns import KERNELS, Campaign, assert_nothing_half_written, saved


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a campaign leaves that is killed once it has found and shrunk the bug."""
    folder = tmp_path_factory.mktemp("killed")
    with Campaign(folder, "--budget", "300s", "--seed", "7", workers=1) as campaign:
        campaign.wait_for("shrunk")
        deadline = time.monotonic() + 30
        while not load_state(folder / ".attnfuzz").known:
            assert time.monotonic() < deadline, "the finding is not in the state"
            time.sleep(0.1)
        campaign.process.kill()
        assert campaign.family.left_after() == []
    return folder


@pytest.fixture
def killed(left: Path, tmp_path: Path) -> Path:
    """A folder in which a campaign was killed."""
    return shutil.copytree(left, tmp_path / "killed")


def cases_of(state: CampaignState) -> int:
    return sum(kernel.cases for kernel in state.kernels)


@pytest.mark.parametrize("is_stopped_between", [False, True])
@pytest.mark.by_day("False")
def test_a_killed_campaign_goes_on_with_its_counts_and_what_it_knows(killed: Path, is_stopped_between: bool) -> None:
    """It would count from nothing, find the same bug again, or report that it found none."""
    before = between = load_state(killed / ".attnfuzz")
    if is_stopped_between:
        with Campaign(killed, "--resume", "--trust", "--budget", "300s", kernels="", workers=1) as campaign:
            campaign.wait_for_cases(cases_of(before) + 1)
            campaign.end()
        between = load_state(killed / ".attnfuzz")
        assert cases_of(between) > cases_of(before)
        assert between.elapsed_s > before.elapsed_s
    with Campaign(
        killed, "--resume", "--trust", "--budget", "1s", "--json", "a.json", kernels="", workers=1
    ) as campaign:
        assert campaign.wait() == 1
        assert campaign.family.left_after() == []
    summary = msgspec.json.decode((killed / "a.json").read_bytes(), type=Summary)
    findings = [finding for kernel in summary.kernels for finding in kernel.findings]
    assert summary.cases >= cases_of(between) > 0
    assert summary.elapsed_s > between.elapsed_s
    assert [finding.signature for finding in findings] == ["accuracy/out:value [seq_len>1]"]
    assert (len(saved(killed)), len(before.findings)) == (1, 1)
    assert not any(line.startswith(("found", "confirmed")) for line in campaign.output.splitlines())
    assert "seed 7" in campaign.output
    assert_nothing_half_written(killed)
    assert not (killed / ".attnfuzz" / "state.json").exists()


@pytest.mark.night
def test_other_kernels_are_not_taken_for_those_of_the_killed_campaign(killed: Path) -> None:
    """Its counts and known bugs would be put down to kernels that were never run."""
    with Campaign(killed, "--resume", kernels="crashes") as campaign:
        assert campaign.wait() == 2
    *progress, refusal = campaign.output.splitlines()
    assert refusal.startswith("Error: the interrupted campaign searched")
    assert f"not {KERNELS}:crashes; name the same kernels or none" in campaign.output
    assert all(line.startswith("loading ") for line in progress)


def test_a_state_that_names_a_strangers_file_is_refused_and_nothing_is_touched(killed: Path) -> None:
    """The file would be removed as soon as the finding shrinks, by a command that only goes on with a search."""
    stranger = killed / "mine.json"
    stranger.write_bytes(b"mine")
    state = killed / ".attnfuzz" / "state.json"
    document = msgspec.json.decode(state.read_bytes())
    document["findings"][0]["path"] = str(stranger)
    state.write_bytes(msgspec.json.encode(document))
    before = {path: path.read_bytes() for path in killed.rglob("*.json")}
    with Campaign(killed, "--resume", kernels="") as campaign:
        assert campaign.wait() == 2
    assert campaign.output.startswith("Error: .attnfuzz/state.json is no state of a campaign: ")
    assert "at `$.findings[0].path`" in campaign.output
    assert campaign.output.count("\n") == 1
    assert {path: path.read_bytes() for path in killed.rglob("*.json")} == before
