"""attnfuzz.campaign.saved.replay: which kernels a saved case runs on, and where they are found."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest
from rich.console import Console

from attnfuzz.campaign.saved.replay import Replayed, SavedCase, cleared, replay, replay_command, resolve_target
from attnfuzz.corpus import FindingRecord, Regression
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.builds import BuildWatch, GiveUp, never
from attnfuzz.isolation.outcomes import DeadlinePassed
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.verdict import Failure, Relations, Verdict
from attnfuzz.problems.cases import Case, DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.report.saved_cases import print_total

CASE = DenseDecodeCase(
    num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3,), scale=0.25, options={"tile": 32, "old": 1}
)
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

    def judge(self, declaration: Declaration, case: Case, *, relations: Relations = None) -> Verdict:
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


def test_other_kernels_are_asked_only_where_that_is_wanted() -> None:
    """Whoever replays a case of their own would wait for kernels of attnfuzz, and read about them."""
    runner = PretendedRunner("naive")
    results = run(runner, saved())
    assert [(result.kernel.target, result.failed) for result in results] == [("mine", False)]


def test_a_bundled_kernel_that_does_not_take_a_case_is_passed_over_and_another_says_why() -> None:
    """There are two dozen bundled ones; of an engine's kernel silence would look like a pass."""
    runner = PretendedRunner()
    assert [result.kernel.target for result in run(runner, saved(), on=["big"])] == ["mine"]
    results = run(runner, saved(), on=["engine:big"])
    assert "head_size=16" in (results[1].objection or "")


def test_another_kernel_says_nothing_of_the_one_that_is_accused() -> None:
    """A bug would be marked fixed because a kernel that never had it passes, or called open because another fails."""
    case = saved()
    for kernel, failing, said in (
        ("naive", (), "1 saved case, 1 run: 0 failed"),
        ("naive", ("naive",), "1 saved case, 1 run: 1 failed"),
        ("mine", (), '1 saved case, 1 run: 0 failed; 1 open case now passing: set "status" to "fixed"'),
        ("mine", ("mine",), "1 saved case, 1 run: 1 failed; 1 case still open"),
    ):
        assert total(case, run(PretendedRunner(*failing), case, kernels=[kernel])) == said
    fixed = SavedCase(case.path, msgspec.structs.replace(case.regression, status="fixed"))
    for one, told in (("naive", "2 runs: 1 failed"), ("mine", "2 runs: 1 failed; 1 case marked fixed")):
        assert total(fixed, run(PretendedRunner(one), fixed, on=["naive"])).endswith(told)
    mine_alone = run(PretendedRunner("naive"), case, on=["naive"])
    assert total(case, mine_alone).endswith('2 runs: 1 failed; 1 open case now passing: set "status" to "fixed"')


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
    """--kernel is how a repaired copy, or a kernel whose file has moved, is tried on old cases."""
    runner = PretendedRunner()
    results = run(runner, saved("gone.py:gone"), kernels=["naive"])
    assert [result.kernel.target for result in results] == ["naive"]


def test_a_named_kernel_that_does_not_support_the_case_says_why() -> None:
    """Silence would look like a pass."""
    runner = PretendedRunner()
    (result,) = run(runner, saved(), kernels=["big"])
    assert result.verdict is None
    assert "head_size=16" in (result.objection or "")


def test_a_kernel_that_is_gone_is_named_with_its_file() -> None:
    """Of a hundred regressions, one has to know which one to repair."""
    with pytest.raises(KernelLoadError, match=r"regressions/a\.json: no kernel 'gone'; name another kernel"):
        run(PretendedRunner(), saved("gone"))


def test_a_kernel_of_another_problem_is_refused() -> None:
    """Its inputs are not those of the case."""
    with pytest.raises(KernelLoadError, match="computes paged_decode"):
        run(PretendedRunner(), saved("paged"))


def test_nothing_runs_before_all_kernels_are_found() -> None:
    """After minutes of replaying, a typo in the last file would be a poor surprise."""
    runner = PretendedRunner()
    with pytest.raises(KernelLoadError):
        run(runner, saved(), saved("gone"))
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


def test_all_files_whose_kernels_cannot_run_are_named() -> None:
    """One would repair a folder file by file."""
    with pytest.raises(KernelLoadError) as refused:
        run(PretendedRunner(), saved("gone"), saved(), saved("lost"))
    assert [line.partition("; name")[0] for line in str(refused.value).splitlines()] == [
        "regressions/a.json: no kernel 'gone'", "regressions/a.json: no kernel 'lost'"
    ]  # fmt: skip


def test_cases_that_were_running_are_cleared_if_they_pass_everywhere() -> None:
    """What took a campaign down must stay; what did not would be spoken of for ever."""
    record = FindingRecord(oracle="crash", kind="journal", message="was running")
    running = [
        SavedCase(Path(name), Regression(problem="dense_decode", kernel=kernel, case=CASE, finding=record))
        for name, kernel in (("journal-7/a.json", "mine"), ("journal-7/b.json", "mine"), ("regressions/a.json", "mine"))
    ]
    in_journal = {Path("journal-7/a.json"), Path("journal-7/b.json")}
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
