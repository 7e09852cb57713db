"""A kernel's process pretended: it remembers what ran in it, and a crash or hang ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from attnfuzz.campaign.judge.case_judge import CaseJudge
from attnfuzz.campaign.triage.confirmation import Retries
from attnfuzz.campaign.triage.investigation import Investigation
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import FailingCase, KnownBugs
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.verdict import Failure, Relations, Verdict
from tests.common.scripted_runner import judging, scripted
from tests.common.search_bench import CRASH, KERNEL
from tests.sample_cases import dense_case


def a_case(length: int = 1, *, head_size: int = 16, num_q_heads: int = 1) -> DenseDecodeCase:
    return dense_case(num_q_heads=num_q_heads, head_size=head_size, seq_lens=(length,), scale=head_size**-0.5)


def looked_into(
    suspect: FailingCase,
    judge: CaseJudge,
    known: KnownBugs | None = None,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[bool, list[msgspec.Struct]]:
    """Whether ``suspect`` is a bug, and what the coordinator is told of it, under the name 0-1."""
    sent: list[msgspec.Struct] = []
    investigation = Investigation(
        "0-1",
        suspect,
        judge=judge,
        known=KnownBugs() if known is None else known,
        send=sent.append,
        is_over=is_over,
        deadline=time.monotonic() + 60.0,
    )
    return investigation.run(), sent


@dataclass
class PretendedProcess:
    """``bug`` tells what becomes of a case after those that ran before it in the same process."""

    bug: Callable[[DenseDecodeCase, Sequence[Case]], Failure | None]
    processes: list[list[Case]] = field(default_factory=lambda: [[]])

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, DenseDecodeCase)
        if how["afresh"]:
            self.processes.append([])
        failure = self.bug(case, tuple(self.processes[-1]))
        self.processes[-1].append(case)
        if failure is not None and failure.oracle in ("crash", "hang"):
            self.processes.append([])
        return Verdict(failure=failure)

    def timed(self, deadline: float = 1e12) -> CaseJudge:
        return judging(scripted(self.judge), deadline=deadline)

    def retries(self, deaths: KnownDeaths | None = None, relations: Relations = ()) -> Retries:
        return Retries(self.timed(), KERNEL, deaths=KnownDeaths() if deaths is None else deaths, relations=relations)

    def suspect(self, case: Case, *preceding: Case, failure: Failure = CRASH) -> FailingCase:
        return FailingCase(KERNEL, case, failure, preceding)
