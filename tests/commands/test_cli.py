"""attnfuzz.cli: the installed command line, its exit statuses and its one-sentence refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult
from attnfuzz.cli import main
from attnfuzz.cli.outcome import outcome_of
from attnfuzz.corpus import FindingRecord, Regression, encode_regression, write_regression
from attnfuzz.problems.cases import DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.report.summary import Summary
from tests.common import limited_kernels
from tests.common.in_process import attnfuzz, ending_after
from tests.common.report_results import DENSE, MERGE, a_finding, a_result

COMMAND = Path(sys.executable).with_name("attnfuzz")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25)

BROKEN = """
import attnfuzz
from attnfuzz.kernels import eager


SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,), strides="contiguous")


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def mine(inputs):
    out, lse = eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
    out[inputs.seq_lens > 1] += 1  # the bug
    return out, lse
"""


SLOW = """
import time
import attnfuzz

@attnfuzz.kernel("dense_decode")
def slow(inputs):
    time.sleep(60.0)
"""


def refused(*arguments: object, cwd: Path) -> str:
    """The sentence with which ``attnfuzz`` refuses, checked to be one."""
    run = attnfuzz(*arguments, cwd=cwd)
    assert run.returncode == 2, run.stderr
    assert all(line.startswith("loading ") for line in run.stdout.splitlines()), run.stdout
    assert run.stderr.startswith("Error: ")
    assert run.stderr.count("\n") == 1, run.stderr
    return run.stderr


def failing(error: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """A command in which ``error`` is raised."""
    script = f"""
import sys, tempfile
import attnfuzz.corpus, attnfuzz.cli
def load_regression(path): raise {error}
attnfuzz.corpus.load_regression = load_regression
tempfile.tempdir = {str(temporary)!r}
sys.argv = ["attnfuzz", "show", "a.json"]
attnfuzz.cli.main()
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False)


def a_regression(**changes: Any) -> Regression:
    record = FindingRecord(oracle="accuracy", message="wrong")
    regression = Regression(problem="dense_decode", kernel="dense_eager", case=CASE, finding=record)
    return msgspec.structs.replace(regression, **changes)


def a_document(**case: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(encode_regression(a_regression()))
    document["case"].update(case)
    return document


def test_help_is_quick_and_loads_nothing_heavy(tmp_path: Path) -> None:
    """A command line that needs seconds to say what it can do is not used."""
    script = (
        "import sys; sys.argv = ['attnfuzz', 'explore', '--help']\n"
        "from attnfuzz.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'triton', 'hypothesis', 'numpy', 'rich'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.rstrip().endswith("set()")
    assert "--budget" in run.stdout


def test_it_runs_as_a_module_too(tmp_path: Path) -> None:
    """A GPU machine without a package index runs an uninstalled clone."""
    command = [sys.executable, "-m", "attnfuzz", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    for name in ("explore", "declare", "replay", "list", "show", "repro", "doctor"):
        assert f"\n  {name} " in run.stdout
    assert "..." not in run.stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explore", "--budget", "10x"), ["'10x'", "90s, 10m or 1h30m"]),
        (("explore", "--workers", "0"), ["'0'", "between 1 and"]),
        (("explore", "--workers", "many"), ["'many'", "'auto'"]),
        (("explore", "--oracle", "psychic"), ["'psychic'", "accuracy"]),
        (("explore", "--json", "no/folder/a.json"), ["no/folder/a.json", "cannot be written"]),
        (("explore", "--html", "no/folder/a.html"), ["--html", "no/folder/a.html", "cannot be written"]),
        (("explore", "--junit", "."), ["--junit", "'.'", "cannot be written"]),
        (("explore", "--save-dir", "a_file"), ["'a_file'", "is a file"]),
        (
            ("explore", "--save-dir", "a_file/below/that"),
            ["'a_file/below/that' cannot be read or written (Not a directory)"],
        ),
        (
            ("explore", "--save-dir", "made/" + 300 * "a"),
            ["cannot be made (File name too long: ", "name another folder"],
        ),
        (("explore", "--save-dir", "a_link"), ["'a_link' cannot be made (File exists: 'a_link')"]),
        (("explore", "--save-dir", "/proc/here"), ["'/proc/here' cannot be made (No such file"]),
        (("explore", "--device", "tpu"), ["'tpu'", "cuda"]),
        (("explore", "--against", "none.json"), ["--against", "'none.json' cannot be read (No such file"]),
        (("explore", "--against", "a_file"), ["'a_file' is no summary of attnfuzz", "explore --json"]),
        (("frobnicate",), ["frobnicate"]),
        (("replay", "none.json"), ["none.json does not exist"]),
        (("replay",), ["no regression file", "regressions"]),
        (("show", "none.json"), ["none.json does not exist"]),
        (("repro", "none.json"), ["none.json does not exist"]),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: tuple[str, ...], words: list[str], tmp_path: Path) -> None:
    """A traceback, or a page of usage, hides what was wrong."""
    (tmp_path / "a_file").touch()
    (tmp_path / "a_link").symlink_to("nowhere")
    sentence = refused(*arguments, cwd=tmp_path)
    for word in words:
        assert word in sentence
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file", "a_link"]


@pytest.mark.parametrize("name", ["a" * 300, "loop", "file/below", "\udcff"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "NAME"),
        ("replay", "file", "--json", "NAME"),
        ("show", "NAME"),
        ("explain", "NAME"),
        ("explain", "file", "-o", "NAME.svg"),
        ("explain", "file", "--json", "NAME"),
        ("repro", "NAME"),
        ("repro", "file", "-o", "NAME"),
        ("merge", "NAME"),
        ("merge", "file", "-o", "NAME"),
        ("explore", "gone.py", "--json", "NAME"),
        ("explore", "gone.py", "--junit", "NAME"),
        ("explore", "gone.py", "--html", "NAME"),
        ("mutants", "gone.py", "--resume", "NAME"),
        ("mutants", "gone.py", "--equivalent", "NAME"),
        ("mutants", "gone.py", "--json", "NAME"),
        ("mutants", "gone.py", "-o", "NAME"),
        ("bench", "kernels", "gone.py", "--json", "NAME"),
        ("bench", "tune", "gone.py", "--python", "NAME"),
        ("bench", "tune", "gone.py", "--json", "NAME"),
    ],
    ids=" ".join,
)
@pytest.mark.by_day("replay NAME-*", "explain file -o NAME.svg-*", "*-name0")
def test_a_name_that_no_file_can_have_is_one_sentence(
    arguments: tuple[str, ...],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python raises five kinds of exceptions for them, at the first place that looks at the path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "loop.svg").symlink_to("loop")
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["attnfuzz", *(word.replace("NAME", name) for word in arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert printed.out == ""
    assert re.fullmatch(r"Error: .*\b(does not exist|cannot be (read|written)|is not UTF-8)\b.*\n", printed.err)


@pytest.mark.parametrize("command", ["replay", "show", "explain", "repro", "merge"])
def test_a_named_pipe_among_regressions_holds_nobody_up(command: str, tmp_path: Path) -> None:
    """Opening one waits until somebody writes to it, past any budget."""
    os.mkfifo(tmp_path / "a.json")
    sentence = refused(command, tmp_path / "a.json" if command in ("show", "explain", "repro") else ".", cwd=tmp_path)
    assert "a.json cannot be read (it is a named pipe, no file)" in sentence


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (json.dumps(a_document())[:-40], ["not complete JSON"]),
        (json.dumps(a_document(tile=3)), ["unknown field `tile`", "$.case"]),
        (json.dumps(a_document(num_q_heads="two")), ['"two"', "$.case.num_q_heads"]),
        (json.dumps(a_document(seq_lens=[-3])), ["seq_lens[0]=-3", "between 0 and"]),
        (json.dumps(a_document(seq_lens=[1 << 24] * 64, head_size=1024)), ["TiB", "limit"]),
        (json.dumps({**a_document(), "format": "attnfuzz.regression/2"}), ["newer attnfuzz", "upgrade"]),
    ],
)
def test_a_bad_regression_is_one_sentence_and_stays_as_it_is(data: str, words: list[str], tmp_path: Path) -> None:
    """The file is somebody's evidence; it must be named, and not touched."""
    path = tmp_path / "bad.json"
    path.write_text(data)
    for command in ("replay", "show"):
        sentence = refused(command, path, cwd=tmp_path)
        for word in ("bad.json", *words):
            assert word in sentence
    assert path.read_text() == data


@pytest.mark.parametrize("command", ["show", "replay", "explain", "repro", "merge"])
def test_a_glob_in_a_file_is_refused_whatever_is_to_be_done_with_it(command: str, tmp_path: Path) -> None:
    """The first kernel that fits would be run, and the case be called repaired."""
    path = tmp_path / "bad.json"
    path.write_bytes(encode_regression(a_regression(kernel="paged_*")))
    arguments = (tmp_path, "-o", "merged") if command == "merge" else (path,)
    assert '"paged_*" may stand for several kernels' in refused(command, *arguments, cwd=tmp_path)


def test_every_bad_regression_is_named_before_any_runs(tmp_path: Path) -> None:
    """Mending one file after the other, with a replay between each, would take a morning."""
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{")
    write_regression(a_regression(), tmp_path)
    run = attnfuzz("replay", tmp_path, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert "a.json" in run.stderr
    assert "b.json" in run.stderr


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("paged_niave", ["'paged_niave'", "did you mean 'paged_naive'?"]),
        ("raises.py", ["raises.py does not import", "ZeroDivisionError"]),
        ("mine.py:yours", ["'yours'", "mine.py", "mine"]),
        ("gone.py", ["'gone.py' does not exist"]),
        ("exits.py", ["exits.py", "SystemExit"]),
        (f"{'a' * 300}.py", ["a.py' does not exist"]),
        ("narrow.py", ["no case fits", "narrow.py:narrow", "packed"]),
    ],
)
@pytest.mark.by_day("raises.py-*")
def test_a_kernel_that_cannot_be_searched_is_one_sentence(kernel: str, words: list[str], tmp_path: Path) -> None:
    """The first mistake everyone makes is in naming the kernel."""
    (tmp_path / "mine.py").write_text(BROKEN)
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    (tmp_path / "narrow.py").write_text(
        "import attnfuzz\n"
        "@attnfuzz.kernel('paged_decode', supports=attnfuzz.Supports(head_sizes=(13,), layouts=('packed',)))\n"
        "def narrow(inputs): ...\n"
    )
    sentence = refused("explore", kernel, "--workers", "1", cwd=tmp_path)
    for word in words:
        assert word in sentence
    assert not (tmp_path / ".attnfuzz").exists()


def test_a_gpu_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling back to the CPU silently would report a GPU as tested."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no usable GPU" in refused("explore", "--device", "cuda", "--workers", "1", cwd=tmp_path)


@pytest.mark.night
def test_found_saved_replayed_repaired_replayed(tmp_path: Path) -> None:
    """The life of a bug, through the installed command line: exit statuses 1, 1 and 0."""
    kernel = tmp_path / "mine.py"
    kernel.write_text(BROKEN)
    run = attnfuzz("explore", "mine.py", "--budget", "60s", "--fail-fast", "--json", "summary.json", cwd=tmp_path)
    assert run.returncode == 1, run.stderr
    assert "attnfuzz replay regressions/dense_decode-mine-accuracy-" in run.stdout

    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes(), type=Summary)
    assert summary.stop_reason == "fail_fast"
    (finding,) = summary.kernels[0].findings
    assert (finding.oracle, finding.signature) == ("accuracy", "accuracy/out:value [seq_len>1]")
    saved = json.loads((tmp_path / str(finding.path)).read_text())
    assert saved["case"]["seq_lens"] == [2]

    run = attnfuzz("replay", "--json", "replay.json", cwd=tmp_path)
    assert run.returncode == 1, run.stderr
    assert "still open" in run.stdout
    results = json.loads((tmp_path / "replay.json").read_text())["results"]
    assert {result["kernel"]: result["outcome"] for result in results} == {"mine.py:mine": "fail"}
    run = attnfuzz("replay", "--on", "dense_*", "--json", "replay.json", cwd=tmp_path)
    results = json.loads((tmp_path / "replay.json").read_text())["results"]
    assert {result["kernel"]: result["outcome"] for result in results} == {
        "mine.py:mine": "fail",
        "dense_naive": "pass",
        "dense_eager": "pass",
    }
    run = attnfuzz("replay", "--kernel", "dense_eager", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("1 saved case, 1 run: 0 failed\n")

    before = (tmp_path / str(finding.path)).read_bytes()
    kernel.write_text(BROKEN.replace("+= 1", "+= 0"))
    run = attnfuzz("replay", finding.path, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"1 open case now passing; once repaired: attnfuzz triage --fixed {finding.path}" in run.stdout
    assert (tmp_path / str(finding.path)).read_bytes() == before


@pytest.mark.night
@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="this run compiles kernels for a GPU")
def test_what_triton_cannot_interpret_is_told_and_no_finding(tmp_path: Path) -> None:
    """On a CPU a correct kernel would be accused, or one that never ran be said to be right."""
    (tmp_path / "mine.py").write_text(Path(limited_kernels.__file__).read_text())
    options = ("--budget", "4s", "--workers", "1", "--device", "cpu")
    never = attnfuzz("explore", "mine.py:with_assembly", *options, cwd=tmp_path)
    assert never.returncode == 2, never.stdout + never.stderr
    why = "not runnable here: Triton's interpreter cannot run this kernel: inline_asm not supported in interpreter mode"
    assert re.search(rf"^mine.py:with_assembly: [1-9]\d* cases? left out, {why}; use a GPU$", never.stdout, re.M)
    assert "no case was judged" in never.stdout
    assert "raise --budget" not in never.stdout
    sometimes = attnfuzz("explore", "mine.py:sometimes_with_assembly", *options, cwd=tmp_path)
    assert sometimes.returncode == 0, sometimes.stdout + sometimes.stderr
    assert why in sometimes.stdout
    assert "nothing found in" in sometimes.stdout

    record = FindingRecord(oracle="exception", message="found elsewhere")
    case = msgspec.structs.replace(CASE, dtype="float32")
    saved = Regression(problem="dense_decode", kernel="mine.py:with_assembly", case=case, finding=record)
    write_regression(saved, tmp_path / "regressions")
    run = attnfuzz("replay", cwd=tmp_path)
    assert run.returncode == 2, run.stdout + run.stderr  # nothing was judged
    assert run.stdout.startswith("skip")
    assert "inline_asm not supported" in run.stdout
    assert run.stdout.endswith("1 saved case, 0 runs: 0 failed; 1 case ran on no kernel\n")


def test_nothing_found_is_said_within_the_budget(tmp_path: Path) -> None:
    """The sentence that a kernel's author wants to read, with the effort behind it, and no files left behind."""
    kernels = ("dense_eager", "merge_states_eager")
    options = ("--budget", "120s", "--workers", "1", "--json", "a.json", "--seed", "5")
    with ending_after(cases=13):  # what a round of their formats takes
        run = attnfuzz("explore", *kernels, *options, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = msgspec.json.decode((tmp_path / "a.json").read_bytes(), type=Summary)
    assert summary.stop_reason == "budget"
    assert summary.cases == sum(kernel.cases for kernel in summary.kernels) > 0
    assert all(0 <= kernel.max_error_ratio < 1 for kernel in summary.kernels)  # few cases may all be exact
    found, following = run.stdout.splitlines()[-2:]
    assert f"nothing found in {summary.cases} cases" in found
    assert following.startswith("these kernels come with attnfuzz; next, yours: attnfuzz explore ")
    assert "seed 5" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.night
def test_only_what_is_new_fails(tmp_path: Path) -> None:
    """A build that is red since last week tells nobody that something broke today."""
    kernel = tmp_path / "mine.py"
    kernel.write_text(BROKEN)
    options = ("--workers", "1", "--device", "cpu", "--fail-fast")
    run = attnfuzz("explore", "mine.py", "--budget", "60s", *options, "--json", "last.json", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr

    against = (*options, "--against", "last.json", "--junit", "junit.xml", "--html", "a.html", "--json", "a.json")
    run = attnfuzz("explore", "mine.py", "--budget", "4s", *against, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("nothing new found, 1 known from last.json, in ")
    (suite,) = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "1")
    summary = msgspec.json.decode((tmp_path / "a.json").read_bytes(), type=Summary)
    assert summary.stop_reason == "budget"  # not ended by what does not count
    assert [finding.known for finding in summary.kernels[0].findings] == [True]
    page = (tmp_path / "a.html").read_text()
    assert "known from last.json" in page
    assert "script that shows it without attnfuzz" in page

    kernel.write_text(BROKEN.replace("# the bug", "\n    lse[inputs.seq_lens == 1] += 1"))
    run = attnfuzz("explore", "mine.py", "--budget", "60s", *against, cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 new finding" in run.stdout.splitlines()[-1]


def test_what_a_declaration_ends_does_not_count() -> None:
    """A kernel for contiguous tensors would fail its build, where all else is right."""
    outside = a_finding(remedy=Supports(strides="contiguous"))

    def reached(*findings: Finding) -> CampaignResult:
        result = a_result(*findings)
        del result.statistics.kernels[MERGE.target]  # which has no case
        return result

    assert outcome_of(reached(outside)).status == 0
    assert outcome_of(reached(outside, a_finding(DENSE))).status == 1
    result = reached(outside)
    result.statistics.pedantic = True
    assert outcome_of(result).status == 1


@pytest.mark.night
def test_a_finding_counts_more_than_a_kernel_that_was_never_reached(tmp_path: Path) -> None:
    """A CI job that tells bugs (1) from an environment to repair (2) would not report the bug."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "mine.py").write_text(BROKEN)
    run = attnfuzz("explore", "mine.py", "slow.py", "--budget", "5s", "--json", "a.json", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    summary = msgspec.json.decode((tmp_path / "a.json").read_bytes(), type=Summary)
    assert summary.unreached == ("slow",)


@pytest.mark.night
def test_no_case_at_all_is_no_success(tmp_path: Path) -> None:
    """ "Nothing found" in nothing looks the same to a shell."""
    (tmp_path / "slow.py").write_text(SLOW)
    run = attnfuzz("explore", "slow.py", "--budget", "1s", cwd=tmp_path)
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("no case was judged in ")


@pytest.mark.night
def test_start_up_does_not_count_against_the_budget(tmp_path: Path) -> None:
    """With a kernel that takes seconds to import, or on a slow machine, a short budget would be over before a case."""
    (tmp_path / "mine.py").write_text(f"import time\ntime.sleep(4.0)\n{BROKEN}".replace("+= 1", "+= 0"))
    run = attnfuzz("explore", "mine.py", "--budget", "5s", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "for 5.0s with" in run.stdout
    assert "\nnothing found in " in run.stdout


def test_an_error_of_attnfuzz_itself_is_no_finding(tmp_path: Path) -> None:
    """A CI job would send somebody to look for a bug in a kernel, with a page of traceback in hand."""
    run = failing("TypeError('no good')", tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("Error: attnfuzz itself failed: TypeError: no good (the traceback is in ")
    assert run.stderr.count("\n") == 1
    (file,) = tmp_path.glob("attnfuzz-error-*.txt")
    assert str(file) in run.stderr
    assert file.read_text().startswith("Traceback ")
    assert file.read_text().endswith("TypeError: no good\n")


def test_without_room_for_a_file_the_traceback_follows_the_sentence(tmp_path: Path) -> None:
    """The one thing that helps to repair it would be lost."""
    run = failing("TypeError('no good')", tmp_path / "missing")
    assert run.returncode == 2
    sentence, trace, *_, last = run.stderr.splitlines()
    assert sentence.startswith("Error: attnfuzz itself failed: TypeError: no good (the traceback follows, as no file ")
    assert trace.startswith("Traceback ")
    assert last == "TypeError: no good"


@pytest.mark.parametrize("error", ['RuntimeError("can\'t start new thread")', "BlockingIOError(11, 'try again')"])
def test_a_limit_on_processes_is_one_sentence(error: str, tmp_path: Path) -> None:
    """It is the machine's doing, and neither a bug of attnfuzz nor of a kernel."""
    run = failing(error, tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("Error: no process or thread can be started (")
    assert run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_saves_and_reports_what_was_found_and_exits_130(tmp_path: Path) -> None:
    """Interrupted after an hour, a search must not have been for nothing, nor leave a CI system nothing to show."""
    (tmp_path / "mine.py").write_text(BROKEN)
    reports = ["--html", "report.html", "--junit", "junit.xml", "--json", "summary.json"]
    command = [str(COMMAND), "explore", "mine.py", "--pedantic", "--budget", "120s", "--workers", "1", *reports]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with process, process.stdout as lines:
        for line in lines:
            if line.startswith("shrunk"):
                break
        os.kill(process.pid, signal.SIGINT)
        rest = lines.read()
        assert process.wait(30) == 130, rest
    assert "interrupted: 1 finding" in rest
    (saved,) = (tmp_path / "regressions").glob("*.json")
    page = (tmp_path / "report.html").read_text()
    assert "interrupted before its time was over" in page
    assert saved.name in page
    (failure,) = ElementTree.parse(tmp_path / "junit.xml").getroot().iter("failure")
    assert "attnfuzz replay regressions/dense_decode-mine-accuracy-" in (failure.text or "")
    assert json.loads((tmp_path / "summary.json").read_text())["stop_reason"] == "interrupted"


def test_list_shows_kernels_and_what_they_declare(tmp_path: Path) -> None:
    """Whether a failure breaks a promise can only be judged by who can read the promises."""
    (tmp_path / "mine.py").write_text(BROKEN)
    short = attnfuzz("list", "paged_naive", "mine.py", cwd=tmp_path)
    assert short.returncode == 0, short.stderr
    assert [line.split()[0] for line in short.stdout.splitlines()] == ["kernel", "paged_naive", "mine.py:mine"]
    assert "tile=16|32|64  num_warps=4|2|8  num_stages=3|1" in short.stdout
    full = attnfuzz("list", "-v", "mine.py:mine", cwd=tmp_path)
    for words in ("supports.dtypes: float32", "supports.strides: contiguous", "supports.block_sizes: any", "numerics."):
        assert words in full.stdout


def test_show_draws_the_case_and_says_what_fails(tmp_path: Path) -> None:
    """A picture of the pages is read faster than the JSON."""
    case = PagedDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(5, 0), scale=0.25, block_size=4)
    record = FindingRecord(oracle="accuracy", message="token 4 of sequence 0 is dropped")
    path = write_regression(a_regression(problem="paged_decode", case=case, finding=record), tmp_path)
    run = attnfuzz("show", path, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "token 4 of sequence 0 is dropped" in run.stdout
    assert "page" in run.stdout


@pytest.mark.night
def test_repro_writes_a_script_from_anywhere(tmp_path: Path) -> None:
    """The kernel's file is named relative to where it was searched, and the script is written somewhere else."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "mine.py").write_text(BROKEN)
    path = write_regression(a_regression(kernel="mine.py:mine"), tmp_path / "regressions")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = attnfuzz("repro", path, "-o", "script.py", cwd=elsewhere)
    assert run.returncode == 0, run.stderr
    compile((elsewhere / "script.py").read_text(), "script.py", "exec")
