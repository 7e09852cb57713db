"""attnfuzz ci as a CI runs it: its exit status for known and new bugs, and what GitHub and Buildkite are told."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attnfuzz.cli.ci import seed_of_commit
from attnfuzz.cli.options import Shard, shard_of
from tests.common.in_process import attnfuzz, ending_after
from tests.common.planted_in_ci import KERNEL, REPAIRED, outside_of_a_ci
from tests.common.saved_findings import a_finding, save


def ci(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    options = ("--pedantic", "--quiet", "--workers", "1")  # nothing is asked of a kernel before it is searched
    return attnfuzz("ci", "--device", "cpu", *arguments, *options, cwd=cwd, **variables)


@pytest.fixture(autouse=True)
def _outside_of_a_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(outside_of_a_ci()):
        monkeypatch.delenv(name)


def test_a_bug_fails_the_job_until_it_is_known_and_again_once_it_is_repaired(tmp_path: Path) -> None:
    """A new bug would pass, a known one keep every pull request red, or a repaired one stay an open issue for ever."""
    (tmp_path / "mine.py").write_text(KERNEL)
    step = tmp_path / "step.md"
    run = ci(
        "mine.py", "--budget", "60s", "--fail-fast", cwd=tmp_path,
        GITHUB_ACTIONS="true", GITHUB_SHA="0000002a" * 5, GITHUB_STEP_SUMMARY=str(step),
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    folder = tmp_path / "attnfuzz-ci"
    (saved,) = (folder / "findings").glob("*.json")
    (annotation,) = [line for line in run.stdout.splitlines() if line.startswith("::")]
    line = 1 + KERNEL.splitlines().index("def mine(inputs):")
    place = f"::error file=mine.py,line={line},title=mine%3A accuracy/out%3Avalue [seq_len>1]::out[seq"
    assert annotation.startswith(place)
    assert step.read_text() == (folder / "summary.md").read_text()
    assert "### attnfuzz: new findings" in step.read_text()
    assert f"attnfuzz replay attnfuzz-ci/findings/{saved.name}" in step.read_text()
    assert "--seed 42" in run.stdout
    assert ElementTree.parse(folder / "junit.xml").getroot().find(".//failure") is not None
    assert (folder / "report.html").read_bytes().startswith(b"<!DOCTYPE html>")

    (tmp_path / "regressions").mkdir()
    document = json.loads(saved.read_bytes()) | {"issue": "https://example.org/issues/12"}
    (tmp_path / "regressions" / saved.name).write_text(json.dumps(document))
    with ending_after(cases=3):
        run = ci("mine.py", "--shard", "1/2", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"xfail  regressions/{saved.name}  mine.py:mine  known: https://example.org/issues/12" in run.stdout
    assert "1 run: 0 failed, 1 failed as expected; 1 case still open" in run.stdout
    assert "nothing new found" in (folder / "shard-1" / "summary.md").read_text()

    (tmp_path / "mine.py").write_text(REPAIRED)
    with ending_after(cases=1):
        run = ci("mine.py", cwd=tmp_path, GITHUB_ACTIONS="true")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "passes, though it is open; once repaired: attnfuzz triage --fixed " in run.stdout
    assert run.stdout.count(f"once repaired: attnfuzz triage --fixed regressions/{saved.name}") == 1
    title, *_ = (folder / "summary.md").read_text().splitlines()
    assert title == "### attnfuzz: saved cases that are not as expected"
    assert f"XPASS  regressions/{saved.name}" in run.stdout
    assert f"::error file=regressions/{saved.name},line=1,title=saved case of mine.py%3Amine::passes now" in run.stdout

    marked = attnfuzz("triage", "--fixed", f"regressions/{saved.name}", cwd=tmp_path)
    assert (marked.returncode, marked.stdout.splitlines()[-1]) == (0, "1 saved case: 0 open, 0 flaky, 1 fixed")
    assert attnfuzz("replay", "--known", "--device", "cpu", cwd=tmp_path).returncode == 0


def test_no_case_is_marked_fixed_that_nobody_named(tmp_path: Path) -> None:
    """A command that is meant for one file would mark all of a project's open bugs as repaired."""
    told = attnfuzz("triage", "--fixed", cwd=tmp_path)
    assert (told.returncode, told.stderr) == (
        2, "Error: --fixed marks the saved cases that you name: attnfuzz triage --fixed FILE\n"
    )  # fmt: skip


def test_what_cannot_be_tested_is_no_finding(tmp_path: Path) -> None:
    """A file that is not there would look like a bug, or like a search that found nothing."""
    agent = tmp_path / "buildkite-agent"
    agent.write_text('#!/bin/sh\necho "$@" > told\ncat >> told\n')
    agent.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    run = ci("nowhere.py", cwd=tmp_path, BUILDKITE="true", BUILDKITE_COMMIT="HEAD", PATH=path)
    assert run.returncode == 2
    assert run.stderr == "Error: kernel file 'nowhere.py' does not exist; give the path to a Python file\n"
    told = (tmp_path / "told").read_text().splitlines()
    assert told[0] == "annotate --style warning --context attnfuzz"
    assert told[1] == "### attnfuzz: not everything could be tested"


def test_saved_cases_are_listed_and_shared_out(tmp_path: Path) -> None:
    """Nobody would see which bugs wait for whom, or shards would run the same cases and leave others out."""
    (tmp_path / "mine.py").write_text(REPAIRED)
    folder = tmp_path / "regressions"
    save(folder, a_finding(5, "seq_len>1", device="another GPU", issue="https://example.org/issues/12"))
    save(folder, a_finding(6, "seq_len>1", device="another GPU", failed=20, runs=40))
    save(folder, a_finding(7, "seq_len>1", device="another GPU", status="fixed"))
    run = attnfuzz("triage", cwd=tmp_path)
    head, *rows, total = run.stdout.splitlines()
    assert head.split() == ["status", "since", "kernel", "finding", "issue", "file"]
    assert [row.split("mine.py:mine")[0].split() for row in rows] == [
        ["open", "-"], ["flaky", "20", "of", "40", "-"], ["fixed", "-"],
    ]  # fmt: skip
    assert "https://example.org/issues/12" in rows[0]
    assert total == '3 saved cases: 1 open, 1 flaky, 1 fixed; 1 without an "issue"'

    ran = []
    for number in (1, 2):
        run = attnfuzz(
            "replay", "--known", "--shard", f"{number}/2", "--json", "a.json", "--device", "cpu", cwd=tmp_path
        )
        assert run.returncode == 0, run.stdout + run.stderr  # found on another device: passing here says nothing
        ran.append([one["path"] for one in json.loads((tmp_path / "a.json").read_bytes())["results"]])
    assert [len(paths) for paths in ran] == [2, 1]
    assert sorted(ran[0] + ran[1]) == sorted(str(path.relative_to(tmp_path)) for path in folder.iterdir())
    run = attnfuzz("replay", "--shard", "3/2", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert "'3/2' must be I/N" in run.stderr


@pytest.mark.parametrize(
    ("variables", "shard"),
    [
        ({}, None),
        ({"BUILDKITE_PARALLEL_JOB": "0", "BUILDKITE_PARALLEL_JOB_COUNT": "3"}, Shard(1, 3, "BUILDKITE_PARALLEL_JOB")),
        ({"CI_NODE_INDEX": "3", "CI_NODE_TOTAL": "3"}, Shard(3, 3, "CI_NODE_INDEX")),
        ({"CI_NODE_TOTAL": "1"}, None),
        (
            {"SLURM_ARRAY_TASK_ID": "11", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "10"},
            Shard(2, 4, "SLURM_ARRAY_TASK_ID"),
        ),
        (
            {"SLURM_ARRAY_TASK_ID": "90", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "1"},
            Shard(91, None, "SLURM_ARRAY_TASK_ID"),
        ),
        ({"JOB_COMPLETION_INDEX": "5"}, Shard(6, None, "JOB_COMPLETION_INDEX")),
    ],
)
def test_a_scheduler_says_which_shard_this_is(variables: dict[str, str], shard: Shard | None) -> None:
    """Machines would search the same, or a saved case run on none of them."""
    assert shard_of(variables) == shard


def test_shards_have_seeds_of_their_own() -> None:
    """A commit gives all of them one seed, with which each would draw the same cases."""
    seeds = [Shard(number, 8).own(42) for number in range(1, 9)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_commit_is_a_seed() -> None:
    """The same pull request, run again, would search something else."""
    assert seed_of_commit({"CI_COMMIT_SHA": "0000002aff"}, lambda: "") == 42
    assert seed_of_commit({"BUILDKITE_COMMIT": "HEAD"}, lambda: "0000002bff") == 43
    assert seed_of_commit({}, lambda: "") is None
