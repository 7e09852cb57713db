"""attnfuzz.campaign.readiness: how many kernels are asked at a time."""

from __future__ import annotations

import queue
import threading
from typing import Any, Self, cast

import pytest

from attnfuzz.campaign import readiness
from attnfuzz.campaign.readiness import Readiness
from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.verdict import Verdict

_SOON_S = 20.0
_NOT_SOON_S = 0.3


class OnGpu:
    """A runner whose cases take until ``answers`` is set, and that tells which kernels it is asked about, and which by
    its heir."""

    device = "cuda"
    is_heir_of: OnGpu | None = None

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.inherited: list[str] = []
        self.answers: dict[str, threading.Event] = {}
        self.may_end = threading.Event()
        self.may_end.set()

    def heir(self) -> OnGpu:
        made = OnGpu()
        made.asked, made.answers, made.may_end = self.asked, self.answers, self.may_end
        made.is_heir_of = self
        return made

    def sibling(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        assert self.may_end.wait(_SOON_S)

    def give_up_builds(self, when: object) -> None:
        return

    def judge(self, declaration: Declaration, case: object, **how: Any) -> Verdict:
        if self.is_heir_of is not None:
            self.is_heir_of.inherited.append(declaration.target)
        self.asked.put(declaration.target)
        assert self.answers[declaration.target].wait(_SOON_S)
        return Verdict()


def test_half_of_the_cores_ask_until_a_kernel_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers of sixteen kernels would share all cores, and the first case of any would wait for those of all."""
    monkeypatch.setattr(readiness, "cores", lambda: 4)
    runner = OnGpu()
    kernels = [Declaration(name=one, problem="dense_decode", target=f"mine.py:{one}") for one in "abcd"]
    runner.answers = {kernel.target: threading.Event() for kernel in kernels}
    asking = Readiness(
        cast(Runner, runner), kernels, make_runner=lambda: pytest.fail("nothing is built"), note=print, infers=False
    )
    asking.start()
    first = {runner.asked.get(timeout=_SOON_S) for _ in range(2)}
    assert first == {"mine.py:a", "mine.py:b"}
    with pytest.raises(queue.Empty):
        runner.asked.get(timeout=_NOT_SOON_S)
    runner.answers["mine.py:b"].set()
    assert {runner.asked.get(timeout=_SOON_S) for _ in range(2)} == {"mine.py:c", "mine.py:d"}
    for answer in runner.answers.values():
        answer.set()
    asking.wait()
    assert {join.kernel.target for join in asking.take()} == set(runner.answers)
    assert runner.inherited == ["mine.py:a"]  # a process that has no context of the GPU yet would have to make one


def test_a_kernel_is_searched_before_the_process_has_ended_that_looked_at_it() -> None:
    """Each search would begin a quarter of a second later: a GPU takes that long to let go of a process."""
    runner = OnGpu()
    kernel = Declaration(name="a", problem="dense_decode", target="mine.py:a")
    runner.answers = {kernel.target: threading.Event()}
    runner.answers[kernel.target].set()
    runner.may_end.clear()
    asking = Readiness(
        cast(Runner, runner), [kernel], make_runner=lambda: pytest.fail("nothing is built"), note=print, infers=False
    )
    asking.start()
    asking.wait_for_first()
    assert [join.kernel for join in asking.take()] == [kernel]
    assert not runner.may_end.is_set()
    runner.may_end.set()
    with asking:
        pass
