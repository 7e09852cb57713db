"""attnfuzz.mutation.killers: whether a mutant runs at all."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attnfuzz.declaration import Declaration
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import Hunter
from attnfuzz.mutation.killers import never_runs
from attnfuzz.oracles.verdict import Failure, Verdict
from attnfuzz.problems.cases import MergeStatesCase

DECLARATION = Declaration(name="kernel", problem="merge_states")
RAISES = Verdict(failure=Failure(oracle="exception", kind="TypeError", message="the kernel raised TypeError"))
WRONG = Verdict(failure=Failure(oracle="accuracy", kind="out", message="out is wrong"))


class Executor:
    """In place of a runner: answers, or fails as the framework does, in this order."""

    def __init__(self, answers: Sequence[Verdict | ServiceError]) -> None:
        self._answers = list(answers)

    def judge(self, *arguments: Any, **named: Any) -> Verdict:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, ServiceError):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([RAISES], "the kernel raised TypeError"),
        ([RAISES, WRONG], None),
        ([RAISES, Verdict()], None),
        ([RAISES, ServiceError("unknown parameter type")], None),
    ],
    ids=["never", "wrong", "right", "damaged"],
)
def test_only_what_raises_everywhere_never_runs(answers: list[Verdict | ServiceError], said: str | None) -> None:
    """Code that is broken in some cases would not count, or one that spoils its process end in an error."""
    executor = cast(Runner, Executor(answers))
    stream = SimpleNamespace(take=lambda start, count: [MergeStatesCase(num_q_heads=1, head_size=8, num_tokens=1)])
    hunter = cast(Hunter, SimpleNamespace(streams={DECLARATION.target: stream}))
    assert never_runs(executor, hunter, [DECLARATION]) == said
