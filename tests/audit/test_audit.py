"""The audit of the night: that it notices what it looks for, and a few inputs of each part that do no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.auditing import PARTS, audit, batches, part_named
from tests.audit.kills import Kills
from tests.audit.yard import Fault, Yard, faults_of


@pytest.mark.night
def test_whatever_must_not_happen_is_noticed() -> None:
    """A night without a violation would say nothing."""
    total = audit("planted", range(8), seed=0, place="tests.audit.violations:Planted")
    noticed = [(violation.number, violation.fault.kind) for violation in total.violations]
    assert noticed == [
        (1, "traceback"), (2, "hang"), (3, "foreign"), (4, "foreign"), (5, "code"), (6, "other"), (7, "other"),
    ]  # fmt: skip
    assert "planted" in total.violations[0].fault.text
    assert total.inputs == 8


def test_tracebacks_of_commands_are_noticed_wherever_they_go(tmp_path: Path) -> None:
    """A traceback that is put into a file, with one sentence on the terminal, would pass for a refusal."""
    yard = Yard(tmp_path)
    yard.clear()
    script = "import sys; print('Error: see b.log', file=sys.stderr); open('b.log', 'w').write({!r}); sys.exit(2)"
    text = "Traceback (most recent call last):\n  File x\nKeyError: 'planted'\n"
    done = yard.command(prefix=("python3", "-c", script.format(text)))
    assert faults_of(done).faults == []
    assert yard.faults_in_files() == [Fault("traceback", "in the file b.log: \"KeyError: 'planted'\"")]
    done = yard.command(prefix=("python3", "-c", "raise KeyError('planted')"))
    assert faults_of(done).faults == [Fault("traceback", "\"KeyError: 'planted'\"")]


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("import time; time.sleep(600)", "hang", "took"),
        ("import os; os.abort()", "other", "exit status -6"),
        ("print(chr(27) + '[2J')", "other", "control character"),
        ("import sys; sys.exit(2)", "other", "without a word"),
        ("import os, time; os.fork() or time.sleep(600)", "other", "1 processes left"),
    ],
)
def test_how_a_command_ends_is_looked_at(tmp_path: Path, script: str, kind: str, words: str) -> None:
    """A hang, a crash or a process that is left would pass for an answer."""
    yard = Yard(tmp_path)
    yard.clear()
    limit_s = 1.0 if kind == "hang" else 60.0
    done = yard.command(prefix=("python3", "-c", script), limit_s=limit_s, others_end_within_s=0.1)
    (fault,) = faults_of(done).faults
    assert fault.kind == kind
    assert words in fault.text


def test_inputs_are_tried_in_the_batches_that_they_belong_to() -> None:
    """A number would reproduce other inputs than those that it was printed for."""
    assert batches(Kills, [5, 6, 29, 30, 31, 269, 270, 271]) == [
        range(5, 7), range(29, 30), range(30, 32), range(269, 270), range(270, 271), range(271, 272),
    ]  # fmt: skip


def test_the_whole_audit_is_as_large_as_it_was() -> None:
    """The counts that are published would no longer be those of the command."""
    counts = {name: part_named(place).inputs for name, place in PARTS.items()}
    least = {
        "regressions": 19_000,
        "cases": 20_866,
        "files": 242,
        "links": 66,
        "settings": 132,
        "states": 58,
        "idle": 20,
    }
    assert counts["kills"] == 270 + 36
    assert {name: count for name, count in least.items() if counts[name] < count} == {}


@pytest.mark.night
@pytest.mark.parametrize(
    ("part", "numbers"),
    [
        ("regressions", range(200, 240)),
        ("cases", range(2000, 2012)),
        ("files", [181]),  # an empty file
        ("links", [0, 61]),  # in place of .gitignore, and of a case in a journal
        ("settings", [9, 70]),
        ("states", [60, 61]),  # an empty state, and one of bytes
        ("kills", [271]),  # SIGQUIT
        ("idle", [17, 21]),  # a case whose kernel cannot run, an empty folder
    ],
)
def test_a_few_inputs_of_each_part_do_no_harm(part: str, numbers: list[int]) -> None:
    """A part would not run at all when it is needed, or attnfuzz has come to fail where it did not."""
    total = audit(part, numbers, seed=0)
    assert total.violations == []
    assert total.inputs == len(numbers)
