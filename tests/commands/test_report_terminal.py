"""attnfuzz.report.terminal: what a campaign prints can be read, copied and believed."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Earlier, FindingEvent, Reporter, Statistics, StopReason
from attnfuzz.campaign.statistics import KernelStatistics, WorkerProgress
from attnfuzz.cli.outcome import outcome_of
from attnfuzz.declaration import Declaration
from attnfuzz.mistake import NARROW_OFFSETS, WITHOUT_WEIGHT
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.report.progress import LineReporter, LiveReporter, status_line
from attnfuzz.report.terminal import make_console, make_reporter, print_result, verdict_sentence
from attnfuzz.verdict import Cause, Failure
from tests.common.named_features import named
from tests.common.report_results import statistics_of

KERNEL = Declaration(name="k", problem="dense_decode", target="my kernels.py:k")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)
FAILURE = Failure(
    oracle="accuracy",
    kind="out:value",
    message="out[seq 0, head 0, dim 0] = 2.0, expected 1.0 [bold]not markup[/bold]",
    details=("token 16 of sequence 0 is dropped",),
)
LONG_FOLDER = Path("a folder") / ("x" * 150)


def a_finding(**fields: Any) -> Finding:
    failure = fields.pop("failure", FAILURE)
    finding = Finding("0-1", KERNEL, CASE, failure, first_seen_s=1.0, path=LONG_FOLDER / "a.json", **fields)
    finding.failed = finding.runs = 3
    return finding


def statistics(*findings: Finding, cases: int = 10) -> Statistics:
    made = statistics_of([KERNEL], *findings)
    made.kernels[KERNEL.target].add(WorkerProgress(kernel=KERNEL.target, cases=cases, seconds=2.0, max_error_ratio=0.5))
    return made


def a_result(*findings: Finding, stop_reason: StopReason = "budget", cases: int = 10, **fields: Any) -> CampaignResult:
    return CampaignResult(
        stop_reason=stop_reason,
        elapsed_s=60.0,
        statistics=statistics(*findings, cases=cases),
        findings=findings,
        **fields,
    )


def a_console(*, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), width=100, force_terminal=terminal, highlight=False, markup=False, color_system=None
    )


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def printed(result: CampaignResult) -> str:
    console = a_console()
    print_result(console, result)
    return output(console)


def test_a_finding_comes_with_all_it_takes_to_act_on_it() -> None:
    """Message, details, place and the one command that shows it again."""
    text = printed(a_result(a_finding(shrunk_s=2.0, steps=5)))
    assert FAILURE.message in text
    assert FAILURE.details[0] in text
    assert "dense_decode, float16, head_size 16, 1 query head on 1 KV head, seq_lens 1\n" in text
    assert "accuracy/out:value\n" in text
    assert "shrunk in 5 steps" in text
    assert f"attnfuzz replay 'a folder/{'x' * 150}/a.json'" in text
    assert text.rstrip().splitlines()[-1].startswith("1 finding in 10 cases")


def test_the_table_has_a_row_for_every_kernel() -> None:
    """A kernel that had no case must show as such."""
    header, row = printed(a_result()).strip().splitlines()[:2]
    assert header.split("  ")[0] == "kernel"
    assert row.split() == ["k", "dense_decode", "10", "0.5", "-", "0"]


REFUSAL = Failure(oracle="exception", kind="ValueError in k", message="the kernel raised ValueError: no keys")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (a_result(), "nothing found in 10 cases"),
        (a_result(a_finding(shrunk_s=2.0), a_finding(shrunk_s=3.0)), "2 findings in 10 cases"),
        (a_result(stop_reason="interrupted"), "interrupted: nothing found in 10 cases"),
        (
            a_result(a_finding(remedy=Supports(lse="none"))),
            "nothing found within what it was found to take; 1 question, in 10 ",
        ),
        (
            a_result(a_finding(failure=REFUSAL, remedy=Supports(empty_sequences=False))),
            "nothing found, and 1 possibly out of contract, in 10 ",
        ),
        (a_result(unconfirmed=(a_finding(),)), "nothing confirmed in 10 cases"),
        (a_result(cases=0), "no case was judged in 1m00s; raise --budget"),
        (a_result(cases=0, troubles=("no workers",)), "no case was judged in 1m00s"),
        (a_result(stop_reason="workers_lost"), "every worker was lost: "),
    ],
)
def test_the_last_sentence_says_what_it_amounts_to(result: CampaignResult, words: str) -> None:
    """ "Nothing found" after no case at all would be the worst of reports."""
    assert verdict_sentence(result).startswith(words)


def test_where_nothing_is_found_the_next_step_is_told() -> None:
    """The first search of a newcomer finds nothing in kernels that are right, and would leave him there."""
    assert "next: a larger --budget searches on, and attnfuzz ci searches each commit" in printed(a_result())
    bundled = a_result()
    (kernel,) = bundled.statistics.kernels.values()
    bundled.statistics.kernels = {"dense_naive": kernel}
    assert "next, yours: attnfuzz explore path/to/your_kernel.py" in printed(bundled)
    for other in (a_result(a_finding()), a_result(stop_reason="interrupted"), a_result(cases=0)):
        assert "next" not in printed(other)


def test_kernels_that_were_never_reached_are_named() -> None:
    """ "Nothing found" would be taken for them too."""
    result = a_result()
    for name in ("idle", "other"):
        idle = Declaration(name=name, problem="dense_decode", target=f"kernels.py:{name}")
        result.statistics.kernels[idle.target] = KernelStatistics(declaration=idle)
    assert "2 kernels were never reached: kernels.py:idle, kernels.py:other; raise --budget\n" in printed(result)
    assert verdict_sentence(result).endswith("; not all was judged, as told above")
    assert "not all was judged" not in verdict_sentence(a_result())


def test_a_kernel_that_rests_on_more_than_it_declares_is_told_once_what_to_declare() -> None:
    """Findings that one line ends would read as false alarms; or a bug among them would seem to end with it, too."""
    found = [a_finding(shrunk_s=2.0), a_finding(shrunk_s=2.0), a_finding(shrunk_s=2.0)]
    assert "Supports(" not in printed(a_result(*found))
    for finding in found[:2]:
        finding.case = msgspec.structs.replace(CASE, strides={"q": "every_other"})
    text = printed(a_result(*found))
    line = '2 of 3 findings go away if you declare Supports(strides="contiguous")'
    assert text.splitlines().count(line) == 1
    assert text.rstrip().splitlines()[-1].startswith("3 findings in 10 cases")


def test_what_could_not_be_saved_is_printed_whole() -> None:
    """With a folder that cannot be written, the terminal is the only place left for a finding."""
    finding = a_finding()
    finding.path = None
    text = printed(a_result(finding))
    assert '"format": "attnfuzz.regression/1"' in text
    assert "attnfuzz replay" not in text


def test_doubts_are_told() -> None:
    """Flaky, cut off, known before, never seen again, internal errors: each changes what a reader does next."""
    flaky = a_finding(known_as=Path("old.json"), replaces=Path("larger.json"))
    flaky.failed = 1
    text = printed(a_result(flaky, unconfirmed=(a_finding(),), troubles=("worker 0 ended early: killed",)))
    for words in (
        "flaky: failed 1 of 3",
        "not shrunk",
        "already known",
        "replaces larger.json",
        "not confirmed: my kernels.py:k",
        "did not fail again in 3 runs",
        "internal error: worker 0 ended early",
    ):
        assert words in text


def test_what_is_missing_here_is_not_called_an_error_of_attnfuzz() -> None:
    """A user who has to install another NumPy would report a bug instead."""
    text = printed(a_result(stop_reason="environment", troubles=("pip install another NumPy",)))
    assert "cannot go on here: pip install another NumPy" in text
    assert "internal error" not in text


def test_an_error_of_a_users_problem_is_not_called_one_of_attnfuzz() -> None:
    """Its author would report a bug of attnfuzz, and be told that a larger budget is next."""
    trouble = "mine.py:k cannot be judged on some cases: Mine.write raised KeyError: 'v'"
    text = printed(a_result(troubles=(trouble,), of_problems=frozenset({trouble})))
    assert f"\n{trouble}\n" in text
    assert "internal error" not in text
    assert "next:" not in text


def test_plain_lines_carry_the_whole_path() -> None:
    """A path wrapped at column 80 cannot be copied out of a log."""
    console = a_console()
    LineReporter(console).finding("confirmed", a_finding())
    assert output(console).count("\n") == 1
    assert str(LONG_FOLDER) in output(console)


def test_plain_progress_comes_every_five_seconds_and_not_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four lines a second for an hour make a log that nobody reads."""
    console = a_console()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reporter = LineReporter(console)
    made = statistics()
    for _ in range(40):
        now[0] += 0.25
        reporter.progress(made)
    assert output(console).count("cases (") == 2


def test_what_is_waited_for_is_said_at_once_and_not_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search looks stuck for the seconds in which torch is imported and kernels are asked what they take."""
    console = a_console()
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reporter = LineReporter(console)
    for done in range(8):
        reporter.waiting(f"asking 17 kernels what they take: {done} done")
        reporter.waiting(f"asking 17 kernels what they take: {done} done")
        now[0] += 0.25
    said = output(console).splitlines()
    assert said == [f"asking 17 kernels what they take: {done} done" for done in (0, 2, 4, 6)]


def test_what_keeps_kernels_from_having_cases_is_told() -> None:
    """ "34s: 0 cases" does not say whether there will ever be any."""
    made = statistics()
    made.asking, made.compiling = 1, 12
    assert "asking 1 kernel what it takes, 12 workers compiling, " in status_line(made)
    made.asking, made.compiling = 2, 0
    assert "asking 2 kernels what they take, " in status_line(made)
    made.asking = 0
    assert "asking" not in status_line(made)
    assert "compiling" not in status_line(made)


def test_a_kernel_of_which_is_not_known_what_it_takes_is_named() -> None:
    """Nothing found would be taken for its word."""
    made = statistics()
    result = CampaignResult(
        stop_reason="budget",
        elapsed_s=60.0,
        statistics=made,
        findings=(),
        unsettled={
            one: "what it takes was not found out in 9 probes (so far: it raises for dtype float32)"
            for one in made.kernels
        },
    )
    console = a_console()
    print_result(console, result)
    (target,) = made.kernels
    told = output(console)
    assert f"{target}: what it takes was not found out in 9 probes (so far: it raises for dtype float32)" in told
    assert "raise --budget" in told
    assert outcome_of(result).status == 2


def test_events_of_every_kind_are_shown() -> None:
    """Whoever watches wants to see a finding at once, and what becomes of it."""
    console = a_console()
    reporter = LineReporter(console)
    finding = a_finding()
    made = statistics()
    made.deadline += 60
    reporter.started(made)
    events: tuple[FindingEvent, ...] = ("found", "confirmed", "unconfirmed", "known", "shrunk")
    for event in events:
        reporter.finding(event, finding)
    finding.shrunk_s, finding.same_as = 2.0, "0a1b2c"
    reporter.finding("shrunk", finding)
    reporter.finding("known", finding)
    reporter.finished()
    assert output(console).splitlines()[-1].endswith(": the same bug as #0a1b2c")
    first_words = [re.split(" #| my ", line)[0].strip() for line in output(console).splitlines()[1:]]
    case = "dense_decode, float16, head_size 16, 1 query head on 1 KV head, seq_lens 1"
    assert first_words == ["found", case, "confirmed", "once only", "known bug", "cut off", "shrunk", "known bug"]
    assert "searching 1 kernel on a processor for 1m00s with 2 workers, seed 7" in output(console)


def test_the_number_of_workers_is_said_once_and_why_if_it_was_chosen() -> None:
    """Twice in two lines, readers look for the difference."""
    console = a_console()
    made = statistics()
    made.why_so_many = "one for each CPU core"
    made.deadline += 60
    LineReporter(console).started(made)
    assert "for 1m00s with 2 workers (one for each CPU core), seed 7" in output(console)


def test_flaky_findings_come_after_the_others() -> None:
    """Whoever repairs a kernel starts with what fails every time; a flaky one may be the machine's doing."""
    flaky, steady = a_finding(steps=1), a_finding(steps=2)
    flaky.failed = 1
    text = printed(a_result(flaky, steady))
    order = [text.index(words) for words in ("1. my kernels.py:k", "Flaky: these", "2. my kernels.py:k")]
    assert order == sorted(order)
    assert text.index("failed 1 of 3 runs") > text.index("2. my kernels.py:k")


def test_what_a_declaration_ends_comes_after_the_bugs() -> None:
    """The bug would be the ninth of eleven findings."""
    strided = msgspec.structs.replace(a_finding().case, strides={"q": "every_other"})
    remedy = Supports(strides="contiguous")
    undeclared = a_finding(steps=1, shrunk_s=2.0, features=named("strides:q=every_other"), remedy=remedy)
    undeclared.case = strided
    bug = a_finding(steps=2, shrunk_s=2.0)
    text = printed(a_result(undeclared, bug))
    order = [text.index(words) for words in ("1. my kernels.py:k", "in 2 steps", "Questions: ", "in 1 step")]
    assert order == sorted(order)
    assert text.rstrip().splitlines()[-1].startswith("1 finding; 1 question, in 10 cases")
    assert ", 1 finding, 1 question, " in status_line(statistics(undeclared, bug))
    assert "  findings\n" in text
    assert " 1\n" in text.splitlines(keepends=True)[2]  # of the kernel's row, too


@pytest.mark.parametrize(
    ("told", "cut_off", "one"),
    [
        (("accuracy", "lse:value", "tokens_counted_twice"), ("accuracy", "out:value"), True),
        (("accuracy", "lse:value", "lse_formula"), ("accuracy", "out:value"), False),
        (("red_zone", "write before out", ""), ("crash", "SIGABRT"), True),
        (("red_zone", "read before q", ""), ("crash", "SIGABRT"), False),
        (("accuracy", "out:value", "tokens_dropped"), ("crash", "SIGABRT"), False),
    ],
)
def test_what_was_not_tested_tells_no_second_bug(
    told: tuple[OracleName, str, str], cut_off: tuple[OracleName, str], one: bool
) -> None:
    """A token that lse has twice was told again where out showed it last, and an abort beside the write behind it."""
    oracle, kind, cause = told
    causes = (Cause(mistake=cause, words="so"),) if cause else ()
    bug = a_finding(steps=2, shrunk_s=2.0, failure=Failure(oracle=oracle, kind=kind, message="bug", causes=causes))
    cut = a_finding(failure=Failure(oracle=cut_off[0], kind=cut_off[1], message="cut off"), steps=1)
    assert ("1 further failing case was not told apart from it" in printed(a_result(bug, cut))) is one


def test_what_was_not_shrunk_is_one_line_beneath_the_bug_that_it_may_be() -> None:
    """A search that ends early would tell one bug twice, the second time in a large case and with a chance cause."""
    cut, bug = a_finding(steps=1, cases_seen=3), a_finding(steps=2, shrunk_s=2.0)
    fault = msgspec.structs.replace(bug.failure, oracle="guard_page", kind="SIGSEGV", causes=())
    outside = a_finding(failure=fault)
    text = printed(a_result(cut, outside, bug))
    assert "in 2 steps" in text
    assert "was cut off" not in text
    names = f"{bug.failure.name}, guard_page/SIGSEGV"
    assert f"   4 further failing cases were not told apart from it: {names}" in text.splitlines()
    assert text.rstrip().splitlines()[-1].startswith("1 finding, and 2 failures not told apart, in 10 cases")
    assert " 1\n" in text.splitlines(keepends=True)[2]  # of the kernel's row, too


@pytest.mark.parametrize(
    "other",
    [
        {"declaration": msgspec.structs.replace(KERNEL, target="my kernels.py:other")},
        {"shrunk_s": None},
        {"failed": 1},
        {"remedy": Supports(strides="contiguous")},
    ],
    ids=["of another kernel", "not shrunk either", "flaky", "out of contract"],
)
def test_what_was_not_shrunk_counts_where_it_can_be_no_other(other: dict[str, Any]) -> None:
    """A bug would be put down to nothing, and in the last case the command succeed."""
    cut, beside = a_finding(), a_finding(shrunk_s=2.0)
    for name, value in other.items():
        setattr(beside, name, value)
    result = a_result(cut, beside)
    assert result.statistics.disposition(cut) == "counts"
    assert result.fails


@pytest.mark.parametrize(
    ("told", "seen"),
    [
        ({"causes": (Cause(mistake="head_map"),)}, {"causes": (Cause(mistake=NARROW_OFFSETS),)}),
        ({"kind": "lse:value", "tensor": "lse"}, {"tensor": "out"}),
        ({}, {"oracle": "crash", "kind": "memory"}),
        ({"oracle": "dead_memory", "kind": "out", "causes": (Cause(mistake=WITHOUT_WEIGHT),)}, {}),
    ],
    ids=["another cause", "the output, too", "the process died", "where all numbers are finite"],
)
def test_what_was_not_shrunk_counts_where_evidence_tells_it_from_the_bug(
    told: dict[str, Any], seen: dict[str, Any]
) -> None:
    """A second bug of the kernel would be a line beneath the first, and nobody would look for it."""
    bug = a_finding(failure=msgspec.structs.replace(FAILURE, **told), shrunk_s=2.0, features=named("seq_len>1"))
    cut = a_finding(failure=msgspec.structs.replace(FAILURE, **seen))
    result = a_result(cut, bug)
    assert [result.statistics.disposition(one) for one in (bug, cut)] == ["counts", "counts"]
    assert "not told apart" not in printed(result)


def test_what_a_declaration_ends_counts_if_all_is_the_contract() -> None:
    """With --pedantic it was asked for by name, and the command would say that there is nothing."""
    result = a_result(a_finding(remedy=Supports(strides="contiguous")))
    result.statistics.pedantic = True
    text = printed(result)
    assert "Questions" not in text
    assert text.rstrip().splitlines()[-1].startswith("1 finding in 10 cases")


def test_known_findings_are_marked_and_not_counted() -> None:
    """Of three findings of last night, nobody would see which one is of today."""
    known, new = a_finding(steps=1, shrunk_s=2.0), a_finding(steps=2, shrunk_s=2.0)
    new.failure = msgspec.structs.replace(FAILURE, kind="lse:value")
    result = a_result(known, new)
    told = ("target", KERNEL.target, "cause", known.cause)
    result.statistics.against = Earlier("last.json", frozenset({told}))
    text = printed(result)
    assert re.findall(r"\((new|known from last\.json)\)", text) == ["known from last.json", "new"]
    assert verdict_sentence(result).startswith("1 new finding, 1 known from last.json, in 10 cases")
    result = a_result(known)
    result.statistics.against = Earlier("last.json", frozenset({told}))
    assert verdict_sentence(result).startswith("nothing new found, 1 known from last.json, in 10 cases")


def test_shrinking_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case shrinks in a hundred steps within seconds; a log wants to know that it does, not every one of them."""
    console = a_console()
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reporter = LineReporter(console)
    finding = a_finding()
    for finding.steps in range(1, 41):
        now[0] += 0.1
        reporter.finding("smaller", finding)
    lines = output(console).splitlines()
    assert 1 < len(lines) <= 3
    assert lines[0].startswith(f"shrinking #{finding.tag} my kernels.py:k, 1 step: dense_decode, float16")


def test_all_lines_about_a_finding_carry_one_hash() -> None:
    """Of several findings of a kernel, nobody could tell which was confirmed, which shrunk, and what became of it."""
    console = a_console()
    reporter = LineReporter(console)
    finding = a_finding()
    other = Finding("0-2", KERNEL, CASE, msgspec.structs.replace(FAILURE, kind="lse:value"), first_seen_s=1.0)
    tag = f" #{finding.tag} "
    reporter.finding("found", finding)
    finding.case = msgspec.structs.replace(CASE, seq_lens=(0,))
    finding.failure = msgspec.structs.replace(FAILURE, kind="out:nan")
    events: tuple[FindingEvent, ...] = ("confirmed", "smaller", "unconfirmed", "known", "shrunk")
    for event in events:
        reporter.finding(event, finding)
    finding.shrunk_s = 2.0
    reporter.finding("shrunk", finding)
    lines = [line for line in output(console).splitlines() if not line.startswith(" ")]
    words = ["found", "confirmed", "shrinking", "once", "known", "cut", "shrunk"]
    assert [line.split()[0] for line in lines] == words
    assert all(tag in line for line in lines)
    assert f"{tag.strip()}: first seen after" in printed(a_result(finding))
    assert other.tag != finding.tag


@pytest.mark.parametrize(
    ("terminal", "quiet", "term", "kind"),
    [
        (True, False, "xterm-256color", LiveReporter),
        (True, False, "dumb", LineReporter),
        (False, False, "xterm-256color", LineReporter),
        (True, True, "xterm-256color", Reporter),
    ],
)
def test_the_reporter_fits_where_it_prints(
    terminal: bool, quiet: bool, term: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live panel in a log file, or on a terminal that cannot move its cursor, is a mess of control characters."""
    monkeypatch.setenv("TERM", term)
    assert type(make_reporter(a_console(terminal=terminal), quiet=quiet)) is kind


def test_what_the_output_cannot_say_does_not_end_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour's work would be lost to a Greek letter in somebody's error message, where LANG is C."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    console = make_console()
    console.print("ε > bound")
    console.file.flush()
    assert written.getvalue() == b"? > bound\n"
