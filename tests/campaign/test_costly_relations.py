"""attnfuzz.campaign: relations that cost as much as hundreds of cases get a share of each kernel's time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from attnfuzz.campaign.draw.costly_relations import CostlyRelations
from attnfuzz.campaign.messages import Found, Join, ToWorker
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.problems.cases import Case, DenseDecodeCase, encode_case
from attnfuzz.verdict import Drawn, Failure, Verdict
from tests.campaign.test_search_batches import BatchBench
from tests.common.search_bench import KERNEL, after

CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=8, seq_lens=(1,), scale=1.0)
NARROW = Failure(oracle="page_relocation", kind="offsets", message="narrow")


def turns(usual_s: float, *, takes_s: float, **workers: int) -> list[int]:
    """Those taken along with cases of a kernel that took ``usual_s``, a second each."""
    costly = CostlyRelations(DEFAULT_ORACLES, device="cuda", **workers)
    taken = []
    for _ in range(int(usual_s)):
        costly.judged("kernel", CASE, 1.0, passed=True)
        while (due := costly.due("kernel")) is not None:
            taken.append(due.turn)
            costly.taken("kernel", takes_s)
            costly.judged("kernel", CASE, 0.0, passed=True)
    return taken


def test_a_slow_kernel_has_each_of_them_within_a_minute() -> None:
    """A kernel with a narrow index passed 866 cases and was called right: none had drawn what shows it."""
    assert {turn % 5 for turn in turns(40, takes_s=0.9)} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("takes_s", [0.01, 0.1, 1.0])
def test_they_take_no_more_than_their_share(takes_s: float) -> None:
    """A GPU's rate of cases would fall by as much as they are slow."""
    taken = turns(300, takes_s=takes_s)
    assert taken == list(range(len(taken)))
    assert 0.03 < len(taken) * takes_s / 300 < 0.07


def test_workers_begin_with_different_ones() -> None:
    """All would try the same one first, and with many kernels none would come to the second."""
    first = [turns(3, takes_s=0.2, worker=worker, num_workers=14)[0] for worker in range(8)]
    assert first == list(range(8))


def test_the_first_is_taken_after_ordinary_cases_of_more_than_one_format() -> None:
    """It took 2.5 of the first 3 s, and a bug that any case of the second format shows was found after 7 s."""
    costly = CostlyRelations(DEFAULT_ORACLES, device="cuda")
    for seconds in (0.35, 0.8, 0.8, 0.8):
        costly.judged("kernel", CASE, seconds, passed=True)
        assert costly.due("kernel") is None
    costly.judged("kernel", CASE, 0.8, passed=True)
    assert costly.due("kernel") is not None


def test_there_is_no_turn_where_none_is_costly_or_no_case_has_passed() -> None:
    """A case would be judged once more for nothing."""
    costly = CostlyRelations(DEFAULT_ORACLES, device="cpu")
    costly.judged("kernel", CASE, 100.0, passed=True)
    assert costly.due("kernel") is None
    costly = CostlyRelations(DEFAULT_ORACLES, device="cuda")
    costly.judged("kernel", CASE, 100.0, passed=False)
    assert costly.due("kernel") is None


def test_who_asks_for_these_alone_has_them_drawn_as_any_other() -> None:
    """9,220 cases on a GPU, searched for narrow offsets alone, met them in 5 % of the time."""
    asked_alone = CostlyRelations(("accuracy", "page_relocation"), device="cuda")
    assert asked_alone.usual is None
    asked_alone.judged("kernel", CASE, 100.0, passed=True)
    assert asked_alone.due("kernel") is None


def test_a_kernel_that_compiles_for_seconds_is_not_compiled_for_them_by_all_workers_at_once() -> None:
    """Fourteen workers would each compile it for as long as judging a hundred cases takes, to ask the same three."""

    def begun(compile_s: float) -> int:
        workers = [CostlyRelations(DEFAULT_ORACLES, device="cuda", worker=i, num_workers=14) for i in range(14)]
        for costly in workers:
            costly.judged("kernel", CASE, 2.0, compile_s=compile_s, passed=True)
        return sum(costly.due("kernel") is not None for costly in workers)

    assert 1 <= begun(1.0) <= 5 < begun(0.0)


def test_a_search_of_seconds_asks_those_that_compile_little() -> None:
    """A kernel that compiles for a second had no turn in 20 s: each was expected to compile it four times more."""
    costly = CostlyRelations(DEFAULT_ORACLES, device="cuda")
    for _ in range(8):
        costly.judged("kernel", CASE, 1.5, compile_s=1.2, passed=True)
        while (due := costly.due("kernel")) is not None:
            costly.taken("kernel", 0.5)
    assert due is None
    costly.judged("kernel", CASE, 100.0, compile_s=1.2, passed=True)
    due = costly.due("kernel")
    assert due is not None
    assert due.turn >= 3


def test_a_turn_is_taken_on_a_case_with_small_tensors() -> None:
    """A graph is captured in tensors that have room for longer sequences, and a case that fills them has none."""
    costly = CostlyRelations(DEFAULT_ORACLES, device="cuda")
    costly.judged("kernel", CASE, 50.0, passed=True)
    costly.judged("kernel", msgspec.structs.replace(CASE, seq_lens=(1 << 16,)), 50.0, passed=True)
    due = costly.due("kernel")
    assert due is not None
    assert due.case == CASE


@dataclass
class NarrowBench(BatchBench):
    """A kernel that only a costly relation shows to be wrong, where it is asked for."""

    asked: int = 0

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        time.sleep(0.001)
        if isinstance(how["relations"], Drawn) and how["relations"].turn is not None:
            self.asked += 1
            assert cast(DenseDecodeCase, case).seq_lens
            return Verdict(failure=NARROW)
        if how["relations"] == ("page_relocation",):
            return Verdict(failure=NARROW)
        return super().judge(declaration, case, **how)

    def together(self, declaration: Declaration, cases: Sequence[DenseDecodeCase], **how: Any) -> list[Verdict] | None:
        time.sleep(0.001 * len(cases))
        assert isinstance(how["relations"], Drawn)
        assert "page_relocation" in how["relations"].without  # or it would be drawn by chance, whatever it takes
        return super().together(declaration, cases, **how)


def test_what_only_a_turn_shows_is_found() -> None:
    """The turn would be taken late, when a round of thousands of cases is over, or what it shows be lost."""
    bench = NarrowBench(lambda case: None, device="cuda", budget_s=30.0, enough=after(Found), most_together=8).run()
    assert bench.of(Found)[0].failure == NARROW
    assert bench.asked == 1
    assert sum(progress.cases for progress in bench.of(WorkerProgress)) < 3500  # 1 ms or more each


def _related(sent: Sequence[msgspec.Struct]) -> set[str]:
    """The relations of which a worker has reported that they had a word on a case."""
    return {name for progress in sent if isinstance(progress, WorkerProgress) for name in progress.related}


class ContentBench(NarrowBench):
    """A kernel that the costly relations have nothing to say against."""

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        verdict = super().judge(declaration, case, **how)
        return verdict if verdict.failure is None else Verdict(related=("page_relocation",))


def test_what_had_a_turn_is_known_to_have_looked() -> None:
    """A search would end with "page_relocation applies to none of 9220 cases", though it looked at some."""
    bench = ContentBench(lambda case: None, device="cuda", budget_s=30.0, most_together=8)
    bench.enough = lambda sent: bench.asked > 0 and bool(_related(sent))
    assert _related(bench.run().sent) == {"page_relocation"}


@dataclass
class EarlyBench(NarrowBench):
    """One case draws the relation before it is known what the kernel takes; later none does."""

    drew: Case | None = None

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        if self.drew is None:
            self.drew = case
            return Verdict(failure=NARROW)
        if len(self.judged) == 3:
            self.mail.append(Join(kernel=KERNEL))
        asked = how["relations"] if isinstance(how["relations"], tuple) else ()
        return super().judge(declaration, case, **how | {"relations": asked})


def test_what_a_relation_has_shown_early_is_asked_for_again() -> None:
    """The case would be judged again by another relation, or none, and pass."""
    least = msgspec.structs.replace(KERNEL, supports=msgspec.structs.replace(KERNEL.supports, head_sizes=(16,)))
    early: list[ToWorker] = [Join(kernel=least, is_settled=False)]
    bench = EarlyBench(
        lambda case: None, kernels=(), mail=early, budget_s=30.0, enough=after(Found), most_together=1
    ).run()
    (found,) = bench.of(Found)
    assert found.failure == NARROW
    assert bench.drew is not None
    assert bytes(found.case) == encode_case(bench.drew)
