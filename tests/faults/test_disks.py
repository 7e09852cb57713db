"""Fault injection (mirrors no module): full disks, and folders that cannot be written or vanish."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz.corpus import load_regression
from tests.faults.campaigns import Campaign, assert_nothing_half_written, saved

FALLBACK = ".attnfuzz/findings"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without room, beside the one for everything else."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount the small file system that this needs")
    try:
        with (folder / "filler").open("wb", buffering=0) as filler:
            assert filler.write(b"x" * (1 << 20)) < 1 << 20
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.night
def test_with_a_full_disk_findings_go_elsewhere_and_come_back(tmp_path: Path, full_disk: Path) -> None:
    """A disk that is full for a while would cost the findings of that time."""
    with Campaign(tmp_path, "--budget", "120s", "--save-dir", str(full_disk / "regressions")) as campaign:
        campaign.wait_for("shrunk")
        assert f"findings go to {FALLBACK}" in campaign.output
        found = list((tmp_path / FALLBACK).iterdir())  # the other worker may have begun with a finding of its own
        assert {load_regression(path).kernel.rpartition(":")[2] for path in found} == {"wrong"}
        (full_disk / "filler").unlink()
        campaign.process.terminate()
        campaign.wait()
        assert campaign.family.left_after() == []
    assert "Traceback" not in campaign.output
    assert len(saved(full_disk)) == 1
    assert list((tmp_path / FALLBACK).iterdir()) == []
    assert_nothing_half_written(full_disk)


@pytest.mark.night
def test_where_nothing_can_be_written_any_more_findings_are_printed(tmp_path: Path) -> None:
    """With every disk full, the campaign would end in a traceback, or leave files that cannot be read."""
    reader, writer = os.pipe()
    with (
        Campaign(tmp_path, "--budget", "300s", "--fail-fast", output=writer) as campaign,
        os.fdopen(reader, encoding="utf-8") as lines,
    ):
        os.close(writer)
        output = lines.readline()
        for member in campaign.family.members():
            resource.prlimit(member.pid, resource.RLIMIT_FSIZE, (0, 0))
        output += lines.read()
        assert campaign.wait() == 1, output
        assert campaign.family.left_after() == []
    assert "findings are printed but not saved" in output
    assert '"format": "attnfuzz.regression/' in output
    assert "Traceback" not in output
    assert "internal error" not in output
    assert saved(tmp_path) == []
    assert_nothing_half_written(tmp_path)


def test_without_room_for_temporary_files_no_campaign_begins(tmp_path: Path) -> None:
    """A traceback would be all that a user sees of a machine whose disk is full."""
    with Campaign(tmp_path, prefix=["prlimit", "--fsize=0:0"], output=subprocess.PIPE) as campaign:
        output, _ = campaign.process.communicate(timeout=60)
        assert campaign.wait() == 2
        assert campaign.family.left_after() == []
    assert output.startswith(b"Error: ")
    assert output.count(b"\n") == 1


@pytest.mark.night
def test_a_folder_that_cannot_be_written_is_spoken_of_and_worked_around(tmp_path: Path) -> None:
    """A read-only file system would swallow what was found."""
    options = ("--budget", "300s", "--fail-fast", "--save-dir", "/proc", "--json", "a.json")
    with Campaign(tmp_path, *options) as campaign:
        assert campaign.wait() == 1
        assert campaign.family.left_after() == []
    assert campaign.output.count("cannot write to /proc ") == 1
    kernels = msgspec.json.decode((tmp_path / "a.json").read_bytes())["kernels"]
    (finding,) = [finding for kernel in kernels for finding in kernel["findings"]]
    assert Path(finding["path"]).parent == Path(FALLBACK)
    assert load_regression(tmp_path / finding["path"]).kernel.endswith(":wrong")


@pytest.mark.night
@pytest.mark.parametrize("what", ["regressions", ".attnfuzz"])
def test_a_folder_that_vanishes_while_a_campaign_runs_is_made_again(tmp_path: Path, what: str) -> None:
    """Somebody cleans up: the findings so far would be gone, or the campaign."""
    with Campaign(tmp_path, "--budget", "120s") as campaign:
        campaign.wait_for("shrunk")
        remove(tmp_path / what)
        campaign.process.terminate()
        assert campaign.wait() == 143
        assert campaign.family.left_after() == []
    assert len(saved(tmp_path)) == 1
    assert "Traceback" not in campaign.output


@pytest.mark.night
def test_without_its_working_directory_a_campaign_keeps_what_it_found(tmp_path: Path) -> None:
    """A job's folder is removed while it runs: what it found would be gone with it."""
    folder = tmp_path / "work"
    folder.mkdir()
    with Campaign(folder, "--budget", "120s", temporary=tmp_path) as campaign:
        campaign.wait_for("shrunk")
        remove(folder)
        campaign.process.terminate()
        assert campaign.wait() == 143
        assert campaign.family.left_after() == []
    assert "Traceback" not in campaign.output
    (rescued,) = campaign.temporary.glob("attnfuzz-findings-*/*.json")
    assert load_regression(rescued).kernel.endswith(":wrong")
    assert str(rescued) in campaign.output


def remove(folder: Path) -> None:
    """Remove a folder in which something may be made meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
