"""attnfuzz.campaign.worker on a kernel that reaches outside: that costs a few processes, and no other case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnfuzz.campaign.messages import Found, Minimised
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.verdict import Drawn, Failure, Verdict
from tests.unit.test_campaign_search_batches import BatchBench

FAULT = Failure(oracle="guard_page", kind="read past k", message="the kernel read past k")


@dataclass
class FaultyBench(BatchBench):
    """Each case draws the oracle guard_page, unless it is left out; ``spared`` are those that it was left out for."""

    spared: list[Case] = field(default_factory=list)
    deaths: int = 0

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        verdict = super().judge(declaration, case, **how)
        if isinstance(how["relations"], Drawn):
            assert how["relations"].without == ("guard_page",)
            self.spared.append(case)
            return Verdict(error_ratio=0.5)
        self.deaths += verdict.failure is not None
        return verdict


def reaches_in_groups(case: DenseDecodeCase) -> Failure | None:
    return FAULT if case.gqa_ratio == 3 else None


def test_cases_that_reach_outside_are_searched_without_guarded_memory() -> None:
    """Each of them would cost a process, or none of them would be judged by any other oracle."""
    bench = FaultyBench(reaches_in_groups, budget_s=3.0).run()
    (found,), (minimised,) = bench.of(Found), bench.of(Minimised)
    assert found.failure == FAULT
    assert minimised.complete
    assert len(bench.spared) > 20
    assert bench.deaths < 40  # confirming and shrinking take some
    assert sum(progress.skipped for progress in bench.of(WorkerProgress)) == 0
    assert bench.lost < 5
    assert len(bench.spared) < bench.count() / 2  # others are judged as ever
