"""A runner whose process is pretended: functions of a test judge what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, cast

from attnfuzz.campaign.judge.case_judge import CaseJudge
from attnfuzz.campaign.judge.journal import Journal
from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case
from attnfuzz.verdict import Failure, Relations, Verdict


class Judge(Protocol):
    def __call__(self, declaration: Declaration, case: Case, **how: Any) -> Verdict: ...


def scripted(
    judge: Judge,
    *,
    together: Callable[..., Sequence[Verdict] | None] = lambda declaration, cases, timeout_s, relations: None,
    find_leak: Callable[..., Failure | None] = lambda declaration, case, timeout_s: None,
    pid: Callable[[], int | None] = lambda: None,
    lost: Failure | None = None,
    is_ready: Callable[[], bool] = lambda: True,
) -> Runner:
    """``judge`` is told whether the process is new; each case counts as one of a process that no other ran in.

    ``lost``: how batches that are lost lose their processes.
    """
    return cast(Runner, _ScriptedRunner(judge, together, find_leak, pid, lost, is_ready))


def judging(runner: Runner, *, deadline: float = 1e12, journal: Path | None = None, **how: Any) -> CaseJudge:
    """What has cases judged by ``runner``, of which none takes 10 s."""
    return CaseJudge(runner, deadline=deadline, longest_s=10.0, journal=Journal(journal), **how)


class _ScriptedRunner:
    timeout_s = 10.0

    def __init__(
        self,
        judge: Judge,
        together: Callable[..., Sequence[Verdict] | None],
        find_leak: Callable[..., Failure | None],
        pid: Callable[[], int | None],
        lost: Failure | None,
        is_ready: Callable[[], bool],
    ) -> None:
        self._judge = judge
        self._together = together
        self._find_leak = find_leak
        self._pid = pid
        self.lost = lost
        self._is_ready = is_ready
        self._is_fresh = False
        self._looks = 0

    @property
    def pid(self) -> int | None:
        return self._pid()

    @property
    def is_ready(self) -> bool:
        return self._is_ready()

    @property
    def restarts(self) -> int:
        self._looks += 1
        return self._looks

    def judge(
        self, declaration: Declaration, case: Case, *, timeout_s: float | None = None, relations: Relations = None
    ) -> Verdict:
        assert timeout_s is not None
        afresh, self._is_fresh = self._is_fresh, False
        return self._judge(declaration, case, timeout_s=timeout_s, afresh=afresh, relations=relations)

    def judge_together(self, declaration: Declaration, cases: Sequence[Case], **how: Any) -> list[Verdict] | None:
        verdicts = self._together(declaration, cases, **how)
        return None if verdicts is None else list(verdicts)

    def find_leak(self, declaration: Declaration, case: Case, *, timeout_s: float | None = None) -> Failure | None:
        return self._find_leak(declaration, case, timeout_s=timeout_s)

    def sibling(self) -> Self:
        self._is_fresh = True
        return self

    def close(self) -> None:
        return
