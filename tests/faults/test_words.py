"""Fault injection (mirrors no module): whatever a kernel says, a campaign goes on, and what it saves is clean."""

from __future__ import annotations

import ast
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import msgspec
import pytest

from attnfuzz.declaration import KernelLoadError
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.report.summary import Summary
from tests.common.in_process import attnfuzz
from tests.faults.campaigns import KERNELS, Campaign, assert_nothing_half_written, saved

TALKING = Path(__file__).with_name("talking_kernels.py")
REPORTS = ("--json", "a.json", "--junit", "a.xml", "--html", "a.html")


def assert_clean(text: str) -> None:
    """No character that a terminal, a browser or an editor would obey, or that is no character."""
    harmful = {one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert harmful <= {"\n"}


@pytest.mark.night
@pytest.mark.parametrize(
    ("kernel", "kind", "words"),
    [
        ("mute", "MuteError in mute", "asked for its text, it raised RuntimeError"),
        ("halved", "ValueError in halved", r"half of a pair: \ud800 and \udfff"),
        ("long_winded", "ValueError in long_winded", "first line"),
        ("colourful", r"ValueError in \x1b[2Jshout\x00", r"\x1b[31mred\x1b[0m \x9b2J \x07 \x00 \u202eright-to-left"),
    ],
)
def test_a_kernel_does_not_end_a_campaign_by_what_it_says(kernel: str, kind: str, words: str, tmp_path: Path) -> None:
    """Every worker would be lost with nothing found, or the report could be neither read nor trusted."""
    with Campaign(
        tmp_path, "--budget", "300s", "--fail-fast", *REPORTS, kernels=f"{TALKING}:{kernel}", workers=1
    ) as campaign:
        assert campaign.wait() == 1, campaign.output
        assert campaign.family.left_after() == []
    (regression,) = saved(tmp_path)
    (file,) = (tmp_path / "regressions").glob("*.json")
    assert regression.finding.kind == kind
    assert words in regression.finding.message
    assert file.stat().st_size < 64 << 10
    assert len(campaign.output) < 128 << 10
    assert_clean(campaign.output)
    for part in (regression.finding.message, regression.finding.kind, *regression.finding.details):
        assert_clean(part)

    shown = attnfuzz("show", file, cwd=tmp_path)
    assert shown.returncode == 0
    assert words in " ".join(shown.stdout.split())
    assert_clean(shown.stdout)
    replayed = attnfuzz("replay", file, "--kernel", f"{KERNELS}:right", cwd=tmp_path)
    assert replayed.returncode == 0
    assert_clean(replayed.stdout)
    script = attnfuzz("repro", file, "--trust", cwd=tmp_path)
    assert script.returncode == 0, script.stderr
    ast.parse(script.stdout)
    assert_clean(script.stdout)

    assert [one.tag for one in ElementTree.parse(tmp_path / "a.xml").iter() if one.tag in ("error", "failure")]
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    HTMLParser().feed(page)
    assert_clean(page)
    assert_clean((tmp_path / "a.xml").read_text(encoding="utf-8"))
    summary = msgspec.json.decode((tmp_path / "a.json").read_bytes(), type=Summary)
    assert [finding.message for one in summary.kernels for finding in one.findings] == [regression.finding.message]
    assert_nothing_half_written(tmp_path)


@pytest.mark.parametrize(
    ("kernel", "oracle", "kind", "words"),
    [
        ("strange", "exception", "StrangeError in strange", "words of a kind"),
        ("returns_mutely", "exception", "RuntimeError in _refuse", "no comment"),
        ("prints_and_exits", "crash", "exit 3", "at /dev/zero:1, in read"),
        ("garbles", "crash", "channel", "file descriptors that are not its own"),
        ("floods", "crash", "channel", "file descriptors that are not its own"),
    ],
)
def test_what_a_process_says_is_a_verdict(kernel: str, oracle: str, kind: str, words: str, runner: Runner) -> None:
    """The driver would raise on what a kernel returns, prints, or writes into the driver's own channel."""
    (declaration,) = runner.declarations([f"{TALKING}:{kernel}"])
    for seq_len in (3, 9):  # of the two answers of `garbles`, one is nested too deeply, the other no verdict
        case = DenseDecodeCase(
            num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(seq_len,), scale=0.25, dtype="float32"
        )
        failure = runner.judge(declaration, case).failure
        assert failure is not None
        assert (failure.oracle, failure.kind) == (oracle, kind)
        assert words in failure.message
        assert_clean("\n".join((failure.message, *failure.details)))
    (declaration,) = runner.declarations([f"{KERNELS}:right"])
    assert runner.judge(declaration, case).failure is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("from tests.faults.talking_kernels import MuteError\nraise MuteError", "MuteError: (asked for its text"),
        ("raise ValueError('half \\ud800 \\x1b[2J')", r"ValueError: half \ud800 \x1b[2J"),
        ("raise ValueError('x' * 50_000_000)", "characters left out"),
        ("raise ModuleNotFoundError(name=5)", "ModuleNotFoundError"),
        ("@attnfuzz.kernel('dense_decode', name='\\x1b[2J')\ndef k(inputs): ...", "without control characters"),
        ("@attnfuzz.kernel('dense_decode', name=7)\ndef k(inputs): ...", "name=7 must be text"),
        ("@attnfuzz.kernel('dense_decode', supports=7)\ndef k(inputs): ...", "supports=7 must be"),
        ("@attnfuzz.kernel('dense_decode', options={'a': ('\\x00',)})\ndef k(inputs): ...", "without control"),
        ("@attnfuzz.kernel('dense_decode', options={'a': (1e999,)})\ndef k(inputs): ...", "numbers are finite"),
        ("@attnfuzz.kernel('dense_decode', options={'a': (1 << 80,)})\ndef k(inputs): ...", "integers have 64 bits"),
        ("@attnfuzz.kernel('dense_decode')\ndef k(inputs): ...\nglobals()['\\x1b[2J'] = k\ndel k", "target="),
    ],
)
def test_a_file_that_cannot_be_loaded_says_so_in_clean_words(
    source: str, words: str, runner: Runner, tmp_path: Path
) -> None:
    """The traceback of a bug of attnfuzz would be shown, or the terminal would obey what a kernel's file says."""
    file = tmp_path / "mine.py"
    file.write_text(f"import attnfuzz\n{source}\n", encoding="utf-8")
    with pytest.raises(KernelLoadError) as refusal:
        runner.declarations([str(file)])
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 8192
    assert_clean(str(refusal.value))


@pytest.mark.night
def test_other_kernels_of_a_campaign_are_searched(tmp_path: Path) -> None:
    """A kernel that nobody can listen to would take the others with it."""
    talking = ("mute", "halved", "long_winded", "garbles")
    kernels = " ".join((*(f"{TALKING}:{name}" for name in talking), "wrong", "right"))
    with Campaign(tmp_path, "--budget", "300s", kernels=kernels) as campaign:
        for name in (*(f"{TALKING}:{name}" for name in talking), f"{KERNELS}:wrong"):
            campaign.wait_for("shrunk ", f" {name} ")
        campaign.end()
    found = {(one.kernel.rpartition(":")[2], one.finding.oracle) for one in saved(tmp_path)}
    assert found == {*((name, "exception") for name in talking[:3]), ("garbles", "crash"), ("wrong", "accuracy")}
    assert "internal error" not in campaign.output
    assert_clean(campaign.output)


def test_what_a_strangers_file_says_does_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    """Whoever looks at a file from an issue would have the terminal do what it says."""
    dirty = "\x1b[2J\x9b31m\x00\u202e"
    document = {
        "format": "attnfuzz.regression/1",
        "problem": "dense_decode",
        "kernel": f"{dirty}.py:k",
        "case": {"num_q_heads": 1, "head_size": 16, "num_kv_heads": 1, "seq_lens": [3], "scale": 0.25},
        "finding": {"oracle": "accuracy", "kind": dirty, "message": dirty, "details": [dirty], "features": [dirty]},
        "note": dirty,
        "environment": {"device": dirty},
    }
    file = tmp_path / "theirs" / "a.json"
    file.parent.mkdir()
    file.write_bytes(msgspec.json.encode(document))
    for command, status in (
        (("show", file), 0),
        (("replay", file, "--kernel", f"{KERNELS}:right"), 2),  # whose kernel takes no such case
        (("replay", file), 2),
        (("merge", file.parent, "-o", "merged", "--no-verify"), 1),
        (("show", f"no\x1b[2J{file}"), 2),
    ):
        run = attnfuzz(*command, cwd=tmp_path)
        assert run.returncode == status, run.stderr
        assert_clean(run.stdout + run.stderr)
    for options, words in (({"a": dirty}, "without control characters"), ({dirty: 1}, "the name of an option=")):
        case = {**cast(dict[str, Any], document["case"]), "options": options}
        file.write_bytes(msgspec.json.encode(document | {"case": case}))
        run = attnfuzz("show", file, cwd=tmp_path)
        assert (run.returncode, run.stdout) == (2, "")
        assert words in run.stderr
        assert_clean(run.stderr)
