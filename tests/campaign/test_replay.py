"""attnfuzz.campaign.saved.replay: which kernels a saved case runs on, after which cases, and how often."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch
from rich.console import Console

import attnfuzz
from attnfuzz.campaign.saved.replay import (
    Replayed,
    SavedCase,
    cleared,
    judge_sequence,
    preceding_for,
    replay,
    replay_command,
    resolve_target,
    run_saved,
    runs_to_see,
)
from attnfuzz.corpus import FindingRecord, Regression, encode_regression, write_regression
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.builds import BuildWatch, GiveUp, never
from attnfuzz.isolation.outcomes import DeadlinePassed
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import ORACLES, OracleName, oracle_of
from attnfuzz.problems.cases import Case, DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.report.saved_cases import print_total
from attnfuzz.testing import check
from attnfuzz.verdict import Failure, Relations, Verdict
from tests.sample_cases import dense_case

CASE = dense_case(options={"tile": 32, "old": 1})


MINE = Declaration(name="mine", problem="dense_decode", options={"tile": (16, 32)}, target="mine")


NAIVE = Declaration(name="naive", problem="dense_decode", target="naive")


BIG = Declaration(name="big", problem="dense_decode", supports=Supports(head_sizes=(128,)), target="big")


PAGED = Declaration(name="paged", problem="paged_decode", target="paged")


ENGINES_BIG = Declaration(name="big", problem="dense_decode", supports=BIG.supports, target="engine:big")


WRONG = Failure(oracle="accuracy", kind="out:value", message="wrong")


class PretendedRunner:
    """Knows a few kernels, of which ``failing`` fail and ``building`` compile themselves when they are called."""

    def __init__(self, *failing: str, building: Sequence[str] = ()) -> None:
        self.failing = failing
        self.building = building
        self.give_up: GiveUp = never
        self.judged: list[tuple[str, Case]] = []

    def declarations(self, targets: Sequence[str], *, within: Path | None = None) -> list[Declaration]:
        del within
        bundled = {kernel.target: kernel for kernel in (MINE, NAIVE, BIG, PAGED)}
        if list(targets) == ["engine:big"]:
            return [ENGINES_BIG]
        if list(targets) == ["*"]:
            return list(bundled.values())
        unknown = [target for target in targets if target not in bundled]
        if unknown:
            raise KernelLoadError(f"no kernel {unknown[0]!r}")
        return [bundled[target] for target in targets]

    def give_up_builds(self, when: GiveUp) -> None:
        self.give_up = when

    def judge(
        self, declaration: Declaration, case: Case, *, relations: Relations = None, inquire: bool = False
    ) -> Verdict:
        if declaration.target in self.building:
            builds = BuildWatch(None)
            builds.compiles_itself = True
            if self.give_up(builds):
                raise DeadlinePassed
        self.judged.append((declaration.target, case))
        return Verdict(failure=WRONG if declaration.target in self.failing else None)


def saved(kernel: str = "mine", path: Path = Path("regressions/a.json")) -> SavedCase:
    record = FindingRecord(oracle="accuracy", message="wrong")
    return SavedCase(path, Regression(problem="dense_decode", kernel=kernel, case=CASE, finding=record))


def run(
    runner: PretendedRunner, *cases: SavedCase, kernels: Sequence[str] = (), on: Sequence[str] = ()
) -> list[Replayed]:
    return list(replay(cases, cast(Runner, runner), kernels=kernels, on=on))


def total(case: SavedCase, results: list[Replayed]) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_total(console, [case], results)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def test_a_case_runs_on_its_kernel_first_and_on_all_that_support_it() -> None:
    """A bug of one kernel is often one of its relatives too, also where these compute another problem."""
    runner = PretendedRunner("mine", "paged")
    results = run(runner, saved(), on=["*"])
    assert [(result.kernel.target, result.failed, result.changes) for result in results] == [
        ("mine", True, ()),
        ("naive", False, ()),
        ("paged", True, ("as paged_decode",)),
    ]
    (_, paged) = runner.judged[-1]
    assert isinstance(paged, PagedDecodeCase)
    assert (paged.seq_lens, paged.block_size) == (CASE.seq_lens, 16)


def test_kernels_that_compile_themselves_come_after_all_others() -> None:
    """Whoever replays a case everywhere would wait for one engine's compiler before reading of any kernel."""
    runner = PretendedRunner(building=["mine", "paged"])
    results = run(runner, saved(), saved("naive"), on=["*"])
    assert [result.kernel.target for result in results] == ["naive", "naive", "mine", "paged", "mine", "paged"]


def test_a_bundled_kernel_that_does_not_take_a_case_is_passed_over_and_another_says_why() -> None:
    """There are two dozen bundled ones; of an engine's kernel silence would look like a pass."""
    runner = PretendedRunner()
    assert [result.kernel.target for result in run(runner, saved(), on=["big"])] == ["mine"]
    results = run(runner, saved(), on=["engine:big"])
    assert "head_size=16" in (results[1].objection or "")


def test_another_kernel_says_nothing_of_the_one_that_is_accused() -> None:
    """A bug would be marked fixed because a kernel that never had it passes, or called open because another fails."""
    case = saved()
    now_passing = f"now passing; once repaired: attnfuzz triage --fixed {case.path}"
    for kernel, failing, said in (
        ("naive", (), "1 saved case, 1 run: 0 failed"),
        ("naive", ("naive",), "1 saved case, 1 run: 1 failed"),
        ("mine", (), f"1 saved case, 1 run: 0 failed; 1 open case {now_passing}"),
        ("mine", ("mine",), "1 saved case, 1 run: 1 failed; 1 case still open"),
    ):
        assert total(case, run(PretendedRunner(*failing), case, kernels=[kernel])) == said
    fixed = SavedCase(case.path, msgspec.structs.replace(case.regression, status="fixed"))
    for one, told in (("naive", "2 runs: 1 failed"), ("mine", "2 runs: 1 failed; 1 case marked fixed")):
        assert total(fixed, run(PretendedRunner(one), fixed, on=["naive"])).endswith(told)
    mine_alone = run(PretendedRunner("naive"), case, on=["naive"])
    assert total(case, mine_alone).endswith("2 runs: 1 failed; 1 open case " + now_passing)


def test_the_accused_kernel_is_known_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repaired, and replayed by the name that a campaign prints elsewhere, it would never be called repaired."""
    (tmp_path / "kernels.py").touch()
    monkeypatch.chdir(tmp_path)
    mine = msgspec.structs.replace(MINE, target=f"{tmp_path}/kernels.py:mine")
    other = msgspec.structs.replace(MINE, target=f"{tmp_path}/kernels.py:other")
    runner = PretendedRunner()
    monkeypatch.setattr(runner, "declarations", lambda targets: [mine, other])
    results = run(runner, saved("kernels.py:mine"), kernels=["kernels.py"])
    assert [result.is_own for result in results] == [True, False]


def test_options_are_adapted_to_each_kernel() -> None:
    """A case saved with another kernel's options would be refused or crash for the wrong reason."""
    runner = PretendedRunner()
    run(runner, saved(), on=["naive"])
    assert {target: dict(case.options) for target, case in runner.judged} == {"mine": {"tile": 32}, "naive": {}}


def test_chosen_kernels_run_instead() -> None:
    """--kernel is how a repaired copy is tried on old cases; of one that does not take them silence would be a pass."""
    results = run(PretendedRunner(), saved("gone.py:gone"), kernels=["naive", "big"])
    assert [result.kernel.target for result in results] == ["naive", "big"]
    assert results[1].verdict is None
    assert "head_size=16" in (results[1].objection or "")


def test_all_files_whose_kernels_cannot_run_are_named_before_any_runs() -> None:
    """One would repair a folder file by file, or meet a typo in the last file after minutes of replaying."""
    runner = PretendedRunner()
    with pytest.raises(KernelLoadError) as refused:
        run(runner, saved("gone"), saved(), saved("paged"))
    gone, other = str(refused.value).splitlines()
    assert gone.startswith("regressions/a.json: no kernel 'gone'; name another kernel")
    assert "computes paged_decode" in other
    assert runner.judged == []


def test_kernel_files_are_found_from_here_or_above_the_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets are relative to where the campaign ran, which is rarely where the replay runs."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "src").mkdir(parents=True)
    (project / "src" / "kernels.py").touch()
    elsewhere.mkdir()
    regression = project / "regressions" / "a.json"
    monkeypatch.chdir(project)
    assert resolve_target("src/kernels.py:k", regression, project) == "src/kernels.py:k"
    monkeypatch.chdir(elsewhere)
    assert resolve_target("src/kernels.py:k", regression, project) == f"{project}/src/kernels.py:k"
    assert resolve_target("src/kernels.py", regression, project) == f"{project}/src/kernels.py"
    assert resolve_target("src/kernels.py:k", elsewhere / "a.json", project) == f"{project}/src/kernels.py:k"
    for target in ("paged_naive", "package.module:k"):
        assert resolve_target(target, regression, project) == target
    for place in ("gone.py", f"{'long' * 1000}.py"):
        with pytest.raises(KernelLoadError, match=rf"no file '{place}'.*--kernel"):
            resolve_target(f"{place}:k", regression, project)


def test_kernel_files_above_the_root_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to a folder above, such as /tmp, would choose what a replay runs."""
    project = tmp_path / "project"
    (project / "regressions").mkdir(parents=True)
    (tmp_path / "planted.py").touch()
    monkeypatch.chdir(project)
    with pytest.raises(KernelLoadError, match=r"no file 'planted\.py'"):
        resolve_target("planted.py:k", project / "regressions" / "a.json", project)


def test_the_command_shown_can_be_typed_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign on a kernel outside of the project would end with a command that is refused."""
    monkeypatch.chdir(tmp_path)
    assert replay_command(Path("a b.json"), "mine.py:mine") == "attnfuzz replay 'a b.json'"
    assert replay_command(Path("a.json"), "dense_eager") == "attnfuzz replay a.json"
    assert replay_command(Path("a.json"), "../m.py:mine") == "attnfuzz replay a.json --kernel ../m.py:mine"


def test_cases_that_were_running_are_cleared_if_they_pass_everywhere(tmp_path: Path) -> None:
    """What took a campaign down must stay; what did not would be spoken of for ever."""
    record = FindingRecord(oracle="crash", kind="journal", message="was running")
    journal = tmp_path / ".attnfuzz" / "journal-7"
    journal.mkdir(parents=True)
    in_journal = {journal / "worker-0.json", journal / "worker-1.json"}
    regression = Regression(problem="dense_decode", kernel="mine", case=CASE, finding=record, note="journal")
    for path in in_journal:
        path.write_bytes(encode_regression(regression))
    running = [SavedCase(path, regression) for path in (*sorted(in_journal), Path("regressions/a.json"))]
    assert cleared(run(PretendedRunner(), *running, saved())) == in_journal
    assert cleared(run(PretendedRunner("naive"), *running, on=["naive"])) == set()


def test_cases_that_were_running_are_not_called_repaired() -> None:
    """Nothing was known to be wrong with them, and a status to be set there helps nobody."""
    record = FindingRecord(oracle="crash", kind="journal", message="was running")
    case = SavedCase(Path("a.json"), Regression(problem="dense_decode", kernel="mine", case=CASE, finding=record))
    console = Console(file=io.StringIO(), width=200)
    for failing, removed in (((), {case.path}), (("mine",), set[Path]())):
        print_total(console, [case], run(PretendedRunner(*failing), case), removed=removed)
    assert isinstance(console.file, io.StringIO)
    passed, failed = console.file.getvalue().splitlines()
    assert passed.endswith("1 run: 0 failed; 1 case of a killed campaign passing, removed")
    assert failed.endswith("1 run: 1 failed; 1 case of a killed campaign")


KERNELS = Path(__file__).parent / "stateful_kernels.py"


def a_case(num_q_heads: int = 1, head_size: int = 16) -> DenseDecodeCase:
    scale = head_size**-0.5
    return dense_case(
        num_q_heads=num_q_heads, head_size=head_size, num_kv_heads=num_q_heads, seq_lens=(1,), scale=scale
    )


def saved_case(kernel: str, case: Case, *preceding: Case, failed: int = 0, runs: int = 0) -> Regression:
    record = FindingRecord(oracle="crash", message="it crashed", failed=failed, runs=runs)
    return Regression(
        problem="dense_decode", kernel=f"{KERNELS}:{kernel}", case=case, preceding=preceding, finding=record
    )


AFTER_WIDE = saved_case("crashes_after_wide_heads", a_case(3), a_case(head_size=32))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    of_two_calls = [name for name in ORACLES if not oracle_of(name).is_relation]
    with Runner(device="cpu", oracles=of_two_calls) as runner:
        yield runner


def the(kernel: str, runner: Runner) -> Declaration:
    return runner.declarations([f"{KERNELS}:{kernel}"])[0]


def test_a_case_fails_after_the_one_that_it_needs_and_not_without(runner: Runner) -> None:
    """A saved_case sequence that replays as a pass is a lost crash."""
    declaration = the("crashes_after_wide_heads", runner)
    assert run_saved(AFTER_WIDE, declaration, runner).failed == 1
    assert run_saved(saved_case("crashes_after_wide_heads", AFTER_WIDE.case), declaration, runner).failed == 0


def test_a_sequence_is_run_in_a_process_of_its_own(runner: Runner) -> None:
    """What ran before in the process would be part of the sequence, and what it leaves behind part of the next."""
    declaration = the("crashes_at_the_tenth_call", runner)
    sequence = saved_case("crashes_at_the_tenth_call", a_case(), *[a_case()] * 4)
    assert [run_saved(sequence, declaration, runner).failed for _ in range(2)] == [1, 1]
    shorter = saved_case("crashes_at_the_tenth_call", a_case(), *[a_case()] * 3)
    assert run_saved(shorter, declaration, runner).failed == 0


def test_what_is_remembered_of_one_run_does_not_hide_it_in_the_next(runner: Runner) -> None:
    """A kernel whose plan only grows would be called repaired as soon as its case had been run once."""
    kernels = Path(__file__).parents[1] / "oracles" / "relations" / "remembering_kernels.py"
    finding = FindingRecord(oracle="call_sequence", message="other bits after another call")
    with Runner(device="cpu") as asking:
        (declaration,) = asking.declarations([f"{kernels}:plan_that_only_grows"])
        case = dense_case(seq_lens=(5, 1), dtype="float32")
        again = Regression(problem="dense_decode", kernel=declaration.target, case=case, finding=finding)
        first, second = (asking.judge(declaration, case, relations=("call_sequence",)).failure for _ in range(2))
        assert (first is not None, second) == (True, None)  # it has grown
        assert [run_saved(again, declaration, asking).failed for _ in range(2)] == [1, 1]


def test_a_flaky_case_is_run_until_it_should_have_shown_and_its_rate_told(runner: Runner) -> None:
    """One run of a kernel that is wrong one time in four passes more often than not, and so does who tries it."""
    flaky = saved_case("wrong_one_time_in_four", a_case(2), failed=4, runs=20)
    (result,) = replay([SavedCase(Path("a.json"), flaky)], runner, kernels=[flaky.kernel])
    assert result.failed
    assert result.runs == 14
    assert 0 < result.failed_runs < result.runs


def test_the_number_of_runs_follows_from_the_rate() -> None:
    """Too few runs call a flaky kernel repaired, too many take minutes."""
    assert runs_to_see(0, 0) == runs_to_see(3, 3) == 1
    assert runs_to_see(1, 2) == 5
    assert runs_to_see(1, 1000) == 60


def test_check_runs_the_sequence_of_a_file(tmp_path: Path) -> None:
    """The pytest plugin checks files: without their sequence they would all pass, and open ones fail for that."""
    path = write_regression(AFTER_WIDE, tmp_path)
    with pytest.raises(attnfuzz.KernelFailure, match=f"attnfuzz replay .*{path.name} --kernel"):
        check(AFTER_WIDE.kernel, path, device="cpu")
    check(AFTER_WIDE.kernel, AFTER_WIDE.case, device="cpu")


def test_cases_that_another_kernel_does_not_support_are_left_out(runner: Runner) -> None:
    """A kernel would crash on input that it never promised to take."""
    declaration = Declaration(name="k", problem="dense_decode", supports=attnfuzz.Supports(head_sizes=(16,)))
    assert preceding_for(declaration, saved_case("k", a_case(), a_case(head_size=32), a_case(2))) == (a_case(2),)


def verdicts(*oracles: OracleName | None) -> tuple[list[Verdict], Sequence[Case]]:
    failures = [Failure(oracle=oracle, kind="kind", message="no") if oracle else None for oracle in oracles]
    return [Verdict(failure=failure) for failure in failures], [a_case(n + 1) for n in range(len(oracles))]


@pytest.mark.parametrize(
    ("oracles", "expected", "judged"),
    [
        ((None, None, "crash"), "crash", 3),
        (("accuracy", None, None), "accuracy", 3),
        (("accuracy", None, "hang"), "hang", 3),
        (("crash", None, None), "crash", 1),
        ((None, None, None), None, 3),
    ],
)
def test_a_preceding_case_that_fails_is_not_passed_over(
    oracles: tuple[OracleName | None, ...], expected: str | None, judged: int
) -> None:
    """A kernel that dies before the last case has not passed it."""
    answers, (*preceding, case) = verdicts(*oracles)
    seen: list[Case] = []

    def judge(one: Case) -> Verdict:
        seen.append(one)
        return answers[len(seen) - 1]

    failure = judge_sequence(preceding, case, judge).failure
    assert (failure and failure.oracle) == expected
    assert seen == [*preceding, case][:judged]


LEAKING = Path(__file__).parents[1] / "common" / "leaking_kernels.py"


def leak(kernel: str) -> Regression:
    case = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1,), scale=0.25, dtype="float32")
    record = FindingRecord(oracle="crash", kind="leak", message="every call keeps another 16.0 MiB of memory")
    return Regression(problem="dense_decode", kernel=f"{LEAKING}:{kernel}", case=case, finding=record)


def test_a_leak_shows_again_until_it_is_mended(runner: Runner) -> None:
    """One call of a kernel that leaks is right, and its regression would pass on the day it was saved_case."""
    for kernel, kinds in (("keeps_16_mebibytes", ["leak"]), ("keeps_once", [])):
        (declaration,) = runner.declarations([f"{LEAKING}:{kernel}"])
        failure = run_saved(leak(kernel), declaration, runner).verdict.failure
        assert [one.kind for one in (failure,) if one is not None] == kinds


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.by_day("False")
def test_check_says_that_a_kernel_leaks(tmp_path: Path, isolated: bool) -> None:
    """The pytest plugin goes this way, and xfail is strict; an old process has room for a leak to go into."""
    for mebibytes in (18, 24, 31):  # freed, each makes the C library take blocks of that size from its heap
        torch.ones(mebibytes << 20, dtype=torch.uint8)
    blocks = [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(20)]
    del blocks[:-1]
    path = write_regression(leak("keeps_16_mebibytes"), tmp_path)
    with pytest.raises(attnfuzz.KernelFailure, match=r"every call keeps another 16\.0 MiB") as failed:
        check(f"{LEAKING}:keeps_16_mebibytes", path, device="cpu", isolated=isolated)
    assert f"attnfuzz replay {path}" in str(failed.value)
    check(f"{LEAKING}:keeps_once", path, device="cpu", isolated=isolated)


@pytest.mark.night
def test_a_process_that_outgrew_its_memory_has_a_limit_again(runner: Runner) -> None:
    """Without one it would take the machine's memory, and pass."""
    (declaration,) = runner.declarations([f"{LEAKING}:keeps_much"])
    case = leak("keeps_much").case
    record = FindingRecord(oracle="crash", kind="memory", message="the kernel's process outgrew its memory limit")
    saved_run = Regression(
        problem="dense_decode", kernel=declaration.target, case=case, preceding=(case,) * 7, finding=record
    )
    failure = run_saved(saved_run, declaration, runner).verdict.failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("crash", "memory")
