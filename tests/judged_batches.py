"""Batches of cases on a runner, as a campaign has them judged."""

from collections.abc import Sequence

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case
from attnfuzz.verdict import Verdict


def judge_each(runner: Runner, declaration: Declaration, cases: Sequence[Case], *, timeout_s: float) -> list[Verdict]:
    """The verdict on each of ``cases``: together, or where the batch is lost one after the other."""
    verdicts = runner.judge_together(declaration, cases, timeout_s=timeout_s)
    return [runner.judge(declaration, case) for case in cases] if verdicts is None else verdicts
