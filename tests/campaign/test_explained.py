"""attnfuzz.campaign.triage.explanation: explanations of findings, in isolation and within limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz.campaign.triage.explanation import explain_failure, explain_in_short, shortened
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import NO_TIME, Explanation
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.recipes import Values
from attnfuzz.verdict import Cause, Failure, SourceLine, Verdict

KERNELS = Path(__file__).parents[1] / "common" / "misbehaving_kernels.py"
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(7,), scale=0.25, dtype="float32")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cpu", timeout_s=30.0) as runner:
        yield runner


def declared(runner: Runner, name: str) -> Declaration:
    (declaration,) = runner.declarations([f"{KERNELS}:{name}"])
    return declaration


def explained(runner: Runner, name: str, *, total_s: float = 20.0) -> Explanation:
    declaration = declared(runner, name)
    failure = runner.judge(declaration, CASE).failure
    assert failure is not None
    return explain_failure(runner, declaration, CASE, failure, weighing_s=20.0, total_s=total_s)


KERNEL = Declaration(name="k", problem="dense_decode", target="k")


def pretending(monkeypatch: pytest.MonkeyPatch, runner: Runner, **answers: object) -> Runner:
    """``runner``, of which these methods answer so, whatever they are asked."""
    for name, answer in answers.items():
        monkeypatch.setattr(runner, name, lambda *_, answer=answer, **__: answer)
    return runner


def test_weights_and_changes_come_together(runner: Runner) -> None:
    """A finding would lack one half of its explanation."""
    found = explained(runner, "wrong_from_seven")
    assert "token 6 has weight 0, expected 0.1429" in found.lines
    assert found.changes[0].startswith("passes if changed to: seq_len 6 instead of 7")


def test_a_finding_does_not_say_its_cause_twice(runner: Runner) -> None:
    """Its first line ends with what another line says again."""
    declaration = declared(runner, "leaves_the_scale_out")
    case = msgspec.structs.replace(CASE, values=Values(keys="normal"))
    failure = runner.judge(declaration, case, inquire=True).failure
    assert failure is not None
    assert failure.message.endswith("; the scale is left out")
    whole = explain_failure(runner, declaration, case, failure, weighing_s=20.0, total_s=20.0)
    assert "the scale is left out" in whole.lines
    told = explain_in_short(runner, declaration, case, failure).lines
    assert told
    assert "the scale is left out" not in told


def test_an_access_outside_has_the_cause_that_wrong_numbers_of_a_similar_case_show(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a finding of its own beside wrong numbers that the same offset gives within a tensor."""
    cause = Cause(mistake="head_map", way="h", words="head 1 is read")
    beside = Failure(
        oracle="accuracy", kind="out:value", message="wrong; head 1 is read", tensor="out", causes=(cause,)
    )
    outside = Failure(oracle="guard_page", kind="read past k", message="a read past k", tensor="k")
    pretending(monkeypatch, runner, judge=Verdict(failure=beside), access_lines=Explanation())
    found = explain_in_short(runner, KERNEL, CASE, outside)
    assert found.told is not None
    assert found.told.message == "a read past k; in a similar case, head 1 is read"
    assert "in a similar case, head 1 is read" not in found.lines
    known = KnownBugs([Bug.seen_in(FailingCase(KERNEL, CASE, beside))])
    assert known.predicting(FailingCase(KERNEL, CASE, found.told)) is not None
    assert known.predicting(FailingCase(KERNEL, CASE, outside)) is None


def test_candidates_are_not_told_beside_what_runs_have_left_of_them(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detail would say "this, or that" beneath a headline that says which."""
    left, other = (
        Cause(mistake="head_map", words="head 1 is read"),
        Cause(mistake="another_query", words="row 1 is read"),
    )
    bug = Failure(oracle="accuracy", kind="out:value", message="wrong; head 1 is read", causes=(left,))
    measured = Explanation(lines=("head 1 is read, or row 1 is read", "token 0 has weight 0"), causes=(left, other))
    pretending(monkeypatch, runner, judge=Verdict(failure=bug), explain=measured)
    found = explain_failure(runner, KERNEL, CASE, bug, weighing_s=1.0, total_s=0.0)
    assert found.lines == ("token 0 has weight 0",)


def test_a_candidate_of_which_runs_leave_nothing_is_no_fact(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one case's weights may come of would be told as what the kernel does, though similar cases deny it."""
    bug = Failure(oracle="accuracy", kind="out:value", message="wrong")
    candidate = Cause(mistake="head_map", words="head 1 is read")
    measured = Explanation(lines=("head 1 is read", "token 0 has weight 0"), causes=(candidate,))
    pretending(monkeypatch, runner, judge=Verdict(failure=bug), explain=measured)
    found = explain_failure(runner, KERNEL, CASE, bug, weighing_s=1.0, total_s=0.0)
    assert found.lines == ("perhaps head 1 is read", "token 0 has weight 0")


def test_a_crash_is_explained_by_what_makes_it_pass(runner: Runner) -> None:
    """The kernel would take the explanation down with it, or its death would be told twice."""
    found = explained(runner, "segfaults_at_seven")
    assert found.lines == ()
    assert found.changes[0].startswith("passes if changed to: seq_len 6 instead of 7; seq_len 8 instead of 7")


def test_the_line_of_a_crash_is_part_of_its_explanation(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """`attnfuzz explain` would leave the text of the line out, which only the stack of the dead process tells."""
    line = SourceLine(file="kernels.py", line=31, text="tl.load(table + page)")
    crash = Failure(oracle="crash", kind="SIGSEGV", message="died", sources=(line,))
    pretending(monkeypatch, runner, judge=Verdict(failure=crash), explain=Explanation(lines=("it died again",)))
    found = explain_failure(runner, KERNEL, CASE, crash, weighing_s=1.0, total_s=0.0)
    assert (found.lines, found.sources) == ((), (line,))


def test_a_change_that_shows_another_bug_is_not_told(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Passes if changed to" would be said of changes with which another bug shows."""
    bug = Failure(oracle="accuracy", kind="out:value", message="wrong", causes=(Cause(mistake="tokens_dropped"),))
    others = {
        6: Failure(oracle="accuracy", kind="out:value", message="wrong", causes=(Cause(mistake="scale"),)),
        8: Failure(oracle="unwritten", kind="lse", message="wrong"),
    }

    def judge(declaration: Declaration, case: DenseDecodeCase, **_: object) -> Verdict:
        unnamed = Failure(oracle="accuracy", kind="out:value", message="wrong")
        return Verdict(failure=others.get(case.seq_lens[0]) or (unnamed if case.dtype == "float16" else None))

    monkeypatch.setattr(pretending(monkeypatch, runner, explain=Explanation()), "judge", judge)
    (passes,) = explain_failure(runner, KERNEL, CASE, bug, weighing_s=1.0, total_s=20.0).changes
    assert "seq_len" not in passes
    assert "bfloat16 instead of float32" in passes


def test_a_hang_is_not_run_again(runner: Runner) -> None:
    """Each further run would take as long as the watchdog waits."""
    failure = Failure(oracle="hang", kind="timeout", message="the kernel did not finish")
    declaration = declared(runner, "segfaults")  # would be seen to run
    assert explain_failure(runner, declaration, CASE, failure, weighing_s=9.0, total_s=9.0) == Explanation()


def test_a_death_while_weighing_is_told(runner: Runner) -> None:
    """Weights would be missing without a word."""
    found = runner.explain(declared(runner, "segfaults_at_seven"), CASE, seconds=5.0)
    assert len(found.lines) == 1
    assert found.lines[0].startswith("the weights of tokens cannot be measured: the kernel's process died of SIGSEGV")


def test_what_a_relation_objects_to_is_not_weighed(runner: Runner) -> None:
    """Seconds would be spent on runs that are known to be right."""
    failure = Failure(oracle="batch_invariance", kind="out", message="a row depends on its batch")
    found = explain_failure(runner, declared(runner, "correct"), CASE, failure, weighing_s=9.0, total_s=5.0)
    assert (found.lines, found.rows, found.runs) == ((), (), 0)
    assert found.changes[0].startswith("passes if changed to: ")


def test_changes_are_tried_on_a_kernel_that_remembers_nothing(runner: Runner) -> None:
    """All of them would seem to make a case pass that depends on the calls before it."""
    kernels = Path(__file__).parents[1] / "oracles" / "relations" / "remembering_kernels.py"
    (declaration,) = runner.declarations([f"{kernels}:plan_that_only_grows"])
    runner.restart()
    failure = runner.judge(declaration, CASE, relations=("call_sequence",)).failure
    assert failure is not None
    found = explain_failure(runner, declaration, CASE, failure, weighing_s=9.0, total_s=20.0)
    assert found.changes == ()


def test_a_lack_of_time_is_no_detail() -> None:
    """Findings would be told what attnfuzz did not do."""
    assert shortened(Explanation(lines=("token 2 is dropped", NO_TIME))).lines == ("token 2 is dropped",)


def test_details_of_a_finding_stay_readable() -> None:
    """One explanation could fill the report."""
    long = Explanation(lines=tuple(f"{i}" * 400 for i in range(9)), changes=("passes if changed to: x",))
    lines = shortened(long).lines
    assert len(lines) == 5
    assert max(map(len, lines)) <= 303
    assert lines[-1] == "passes if changed to: x"
