"""attnfuzz.campaign: a rounding that a replay names is a design if its declaration ends it, though probes missed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from attnfuzz.campaign.declaration_inference import with_declared
from attnfuzz.campaign.messages import Adopted, Found, Join, WorkerProgress
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Cause, Failure, Relations, Verdict
from tests.unit.scripted_workers import KERNEL as CAMPAIGNS
from tests.unit.scripted_workers import Worker, campaign, finds, waits
from tests.unit.search_bench import KERNEL, Bench, after

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

    def judge(
        self,
        declaration: Declaration,
        case: Case,
        *,
        timeout_s: float,
        afresh: bool = False,
        relations: Relations = None,
    ) -> Verdict:
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
