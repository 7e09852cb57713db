"""attnfuzz.campaign: a rounding that a replay names is a design if its declaration ends it, though probes missed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.declaration_inference import with_declared
from attnfuzz.campaign.judge.case_judge import CaseJudge
from attnfuzz.campaign.messages import Adopted, Found, Join, Minimised
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case, DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Cause, Failure, Verdict
from tests.campaign.scripted_workers import KERNEL as CAMPAIGNS
from tests.campaign.scripted_workers import Worker, campaign, finds, waits
from tests.common.scripted_runner import judging, scripted
from tests.common.search_bench import KERNEL, Bench, after

ROUNDED = Failure(
    oracle="accuracy",
    kind="out:value",
    message="out is wrong; q x scale is rounded",
    causes=(
        Cause(mistake="scores_rounded", way="scaled query", numerics={"query": "scaled"}),
        Cause(mistake="scores_rounded", way="scores", numerics={"scores": "input"}),
    ),
)


@dataclass
class RoundsQueries(Bench):
    """Its kernel rounds q times the scale where heads have 32 elements; what it is held to otherwise is ``wrong``.

    ``path``: the cases in which it does so.
    """

    wrong: str = ""
    path: Callable[[DenseDecodeCase], bool] = lambda case: True

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, DenseDecodeCase)
        self.note([case])
        shows = case.head_size == 32 and declaration.numerics.query == "float32" and self.path(case)
        is_wrong = {"": False, "this case": case.head_size == 32, "others": case.values.keys == "fine"}[self.wrong]
        return Verdict(failure=ROUNDED if shows or is_wrong else None, error_ratio=0.5)

    def send(self, message: msgspec.Struct) -> None:
        super().send(message)
        if isinstance(message, Adopted):
            (kernel,) = self.kernels
            declared = with_declared(kernel, Supports(), Numerics(query="scaled"))
            self.mail.append(Join(kernel=declared))


def test_what_a_rounding_is_declared_by_is_adopted_and_is_no_finding() -> None:
    """A right kernel would have a finding wherever the first probes did not come to what it rounds."""
    bench = RoundsQueries(lambda case: None, adopting=True, most_cases=400).run()
    assert [(one.kernel, one.numerics) for one in bench.of(Adopted)] == [(KERNEL.target, {"query": "scaled"})]
    assert bench.of(Found) == []
    assert sum(one.cases for one in bench.of(WorkerProgress)) > 100


@pytest.mark.parametrize("wrong", ["this case", "others"])
def test_what_is_wrong_with_the_declaration_as_well_is_a_finding(wrong: str) -> None:
    """A bug that a replay takes for a rounding would be declared away."""
    bench = RoundsQueries(lambda case: None, adopting=True, wrong=wrong, enough=after(Found), most_cases=2000).run()
    assert (bench.of(Adopted), len(bench.of(Found))) == ([], 1)


@pytest.mark.parametrize(
    "path",
    [
        lambda case: max(case.seq_lens) < 64,
        lambda case: max(case.seq_lens) > 16,
        lambda case: case.num_kv_heads == 1,
        lambda case: case.num_kv_heads > 1,
    ],
    ids=["short", "long", "one head", "several heads"],
)
def test_what_one_path_rounds_is_a_finding(path: Callable[[DenseDecodeCase], bool]) -> None:
    """A change that narrows one path of a kernel would be taken for what the kernel does on purpose."""
    bench = RoundsQueries(lambda case: None, adopting=True, path=path, enough=after(Found), most_cases=2000).run()
    assert (bench.of(Adopted), len(bench.of(Found))) == ([], 1)


@dataclass
class ToldByOtherRuns(RoundsQueries):
    """Runs on other cases leave these of the mistakes that may be behind what it rounds."""

    left: tuple[Cause, ...] = ()

    def timed(self, deadline: float) -> CaseJudge:
        def explain(runner: Runner, declaration: Declaration, case: Case, failure: Failure) -> Explanation:
            return Explanation(told=msgspec.structs.replace(failure, causes=self.left))

        return judging(scripted(self.judge), deadline=deadline, explain=explain)


@pytest.mark.parametrize(
    ("left", "is_adopted"),
    [
        (ROUNDED.causes, True),
        ((), False),
        ((ROUNDED.causes[0], Cause(mistake="scores_rounded", way="products")), False),
    ],
    ids=["designs", "nothing", "a mistake as well"],
)
def test_a_rounding_is_a_design_if_runs_on_other_cases_leave_nothing_else(
    left: tuple[Cause, ...], is_adopted: bool
) -> None:
    """A mistake that gives the same numbers in one case would be declared away."""
    bench = ToldByOtherRuns(lambda case: None, adopting=True, left=left, most_cases=400).run()
    assert bool(bench.of(Adopted)) is is_adopted
    assert bool(bench.of(Found)) is not is_adopted


CONVERTS = Declaration(
    name="pretended",
    problem="paged_decode",
    supports=Supports(
        dtypes=("float16",), head_sizes=(16,), layouts=("NHD",), strides="contiguous", kv_dtypes=("float8_e4m3fn",)
    ),
    target="kernels.py:pretended",
)
CONVERTED = Cause(mistake="converted", way="K V to float16", numerics={"dequantised": "input"})


@dataclass
class Converts(Bench):
    """Its kernel keeps what an 8-bit cache stands for in float16, as runs on other cases tell and its own do not.

    ``path``: the cases in which it does so. ``others``: those that are wrong all the same.
    """

    kernels: tuple[Declaration, ...] = (CONVERTS,)
    path: Callable[[PagedDecodeCase], bool] = lambda case: True
    others: Callable[[PagedDecodeCase], bool] = lambda case: False

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, PagedDecodeCase)
        self.note([case])
        rounds = case.kv is not None and case.kv.scales == "scattered" and self.path(case)
        is_wrong = rounds and (declaration.numerics.dequantised == "float32" or self.others(case))
        failure = Failure(oracle="accuracy", kind="out:value", message="out is wrong", maybe=("cut_off",))
        return Verdict(failure=failure if is_wrong else None, error_ratio=0.5)

    def timed(self, deadline: float) -> CaseJudge:
        def explain(runner: Runner, declaration: Declaration, case: Case, failure: Failure) -> Explanation:
            return Explanation(told=msgspec.structs.replace(failure, causes=(CONVERTED,)))

        return judging(scripted(self.judge), deadline=deadline, explain=explain)

    def send(self, message: msgspec.Struct) -> None:
        super().send(message)
        if isinstance(message, Adopted):
            self.mail.append(Join(kernel=with_declared(CONVERTS, Supports(), Numerics(dequantised="input"))))


def test_a_rounding_that_only_runs_on_other_cases_tell_is_adopted() -> None:
    """A right kernel that converts its 8-bit cache before the products would be accused, with no word on how to say so.

    Of what its own numbers show several roundings are possible, of which that is none.
    """
    bench = Converts(lambda case: None, adopting=True, most_cases=1500).run()
    assert [one.numerics for one in bench.of(Adopted)] == [{"dequantised": "input"}]
    assert bench.of(Minimised) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": lambda case: max(case.seq_lens) < 64},
        {"path": lambda case: max(case.seq_lens) > 16},
        {"others": lambda case: case.values.keys == "fine"},
    ],
    ids=["short", "long", "others"],
)
def test_what_one_path_converts_or_is_wrong_besides_is_a_finding(wrong: Any) -> None:
    """Cases of a plain cache say nothing of what is done with another one, and would declare a bug away."""
    bench = Converts(lambda case: None, adopting=True, enough=after(Minimised), most_cases=2000, **wrong).run()
    assert (bench.of(Adopted), len(bench.of(Minimised))) == ([], 1)


@pytest.mark.parametrize(
    ("kernel", "adopting"),
    [
        (msgspec.structs.replace(KERNEL, numerics=Numerics(query="float32")), True),
        (msgspec.structs.replace(KERNEL, target="pretended"), True),
        (KERNEL, False),
    ],
    ids=["promised", "bundled", "verified or pedantic"],
)
def test_a_kernel_is_held_to_what_it_says(kernel: Declaration, adopting: bool) -> None:
    """Nobody could hold a kernel to its declaration, and `verify` would let it off."""
    enough = after(Found)
    bench = RoundsQueries(lambda case: None, kernels=(kernel,), adopting=adopting, enough=enough, most_cases=2000).run()
    assert (bench.of(Adopted), len(bench.of(Found))) == ([], 1)


def test_a_design_is_told_to_all_workers_and_the_finding_that_it_was_is_dropped(tmp_path: Path) -> None:
    """Each worker would come upon it for itself, and the first one's finding would be told all the same."""
    heard: list[Join] = []

    def adopts(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        worker.say(Adopted(kernel=CAMPAIGNS.target, numerics={"query": "scaled"}, failure=ROUNDED, finding="0-1"))
        waits(worker)

    def hears(worker: Worker) -> None:
        join = worker.hear(Join)
        assert isinstance(join, Join)
        heard.append(join)
        waits(worker)

    result = campaign(tmp_path, adopts, hears, budget_s=1.0)
    assert [join.kernel.numerics for join in heard] == [Numerics(query="scaled")]
    assert heard[0].kernel.assumed == ("query",)
    assert result.findings == ()
    assert list(tmp_path.rglob("*.json")) == []


LSE_WRONG = Failure(
    oracle="accuracy",
    kind="lse:value",
    message="lse is wrong; it is a logarithm to base 2",
    tensor="lse",
    causes=(Cause(mistake="lse_base2", way="base 2"),),
)
UNNAMED = Failure(oracle="accuracy", kind="out:value", message="out is wrong", tensor="out")


@dataclass
class RoundsBesideABug(RoundsQueries):
    """Its log-sum-exp is wrong from a length on, and replays give what is rounded of the output alone."""

    errs_beside: bool = False
    """Whether heads of 32 elements are wrong with the declaration of what is rounded, too."""

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, DenseDecodeCase)
        self.note([case])
        has_lse = declaration.supports.lse != "none"
        if case.head_size == 32 and (declaration.numerics.query == "float32" or self.errs_beside):
            return Verdict(failure=UNNAMED if has_lse else ROUNDED, error_ratio=2.0)
        return Verdict(failure=LSE_WRONG if has_lse else None, error_ratio=2.0)


def test_a_design_beside_another_bug_is_adopted_once_that_is_known() -> None:
    """A kernel with one bug would have two findings: replays of a rounding give no result that is wrong otherwise."""
    bench = RoundsBesideABug(lambda case: None, adopting=True, enough=after(Adopted), most_cases=4000).run()
    (adopted,) = bench.of(Adopted)
    assert adopted.numerics == {"query": "scaled"}
    assert [one.kind for minimised in bench.of(Minimised) for one in minimised.bugs] == ["lse:value"]


def test_a_second_bug_is_no_design() -> None:
    """It would be declared away as soon as the first one is known, which all the cases show that are tried."""
    bench = RoundsBesideABug(lambda case: None, adopting=True, errs_beside=True, most_cases=1500).run()
    assert bench.of(Adopted) == []
    kinds = {one.kind for minimised in bench.of(Minimised) for one in minimised.bugs}
    assert kinds == {"out:value", "lse:value"}
