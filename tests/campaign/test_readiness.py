"""attnfuzz.campaign.readiness: how many kernels are asked at a time."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import pytest

from attnfuzz.campaign import readiness
from attnfuzz.campaign.readiness import Readiness
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.builds import BuildWatch, GiveUp
from attnfuzz.isolation.outcomes import DeadlinePassed
from attnfuzz.judging.messages import BuildReply, BuiltReply
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Failure, Verdict

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


def readiness_of(runner: object, *kernels: Declaration, infers: bool = False) -> Readiness:
    """Of what builds nothing."""
    return Readiness(
        cast(Runner, runner), kernels, make_runner=lambda: pytest.fail("nothing is built"), note=print, infers=infers
    )


def test_half_of_the_cores_ask_until_a_kernel_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers of sixteen kernels would share all cores, and the first case of any would wait for those of all."""
    monkeypatch.setattr(readiness, "cores", lambda: 4)
    runner = OnGpu()
    kernels = [Declaration(name=one, problem="dense_decode", target=f"mine.py:{one}") for one in "abcd"]
    runner.answers = {kernel.target: threading.Event() for kernel in kernels}
    asking = readiness_of(runner, *kernels)
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
    asking = readiness_of(runner, kernel)
    asking.start()
    asking.wait_for_first()
    assert [join.kernel for join in asking.take()] == [kernel]
    assert not runner.may_end.is_set()
    runner.may_end.set()
    with asking:
        pass


class RefusesFloat32(OnGpu):
    """Of a kernel that raises for float32, and of which the rest is not heard for long."""

    def judge(self, declaration: Declaration, case: object, **how: Any) -> Verdict:
        assert isinstance(case, DenseDecodeCase)
        if case.head_size == 128:
            return super().judge(declaration, case)
        raised = Failure(oracle="exception", kind="TypeError", message="the kernel raised TypeError: no float32")
        return Verdict(failure=raised if case.dtype == "float32" else None)

    def heir(self) -> OnGpu:
        return self


def test_what_is_known_when_time_is_up_is_told() -> None:
    """A minute of probes would come to nothing: nobody would hear of what the kernel was seen to refuse."""
    runner = RefusesFloat32()
    kernel = Declaration(name="a", problem="dense_decode", target="mine.py:a")
    runner.answers = {kernel.target: threading.Event()}
    asking = readiness_of(runner, kernel, infers=True)
    with asking:
        asking.start()
        assert runner.asked.get(timeout=_SOON_S) == kernel.target
        threading.Timer(0.2, runner.answers[kernel.target].set).start()
        how_far = asking.stop_asking()
    said = r"what it takes was not found out in \d+ probes \(so far: it raises for dtype float32\)"
    assert re.fullmatch(said, how_far[kernel.target])
    assert runner.asked.empty()


class Building:
    """A runner of kernels that compile themselves, which notes how many of it and its siblings build at a time."""

    device = "cpu"
    is_building = 0
    most = 0
    order: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.give_up: GiveUp | None = None

    def heir(self) -> Building:
        made = Building()
        made.give_up = self.give_up
        return made

    sibling = heir

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        return

    close = __exit__

    @property
    def zygote(self) -> Building:
        return self

    def give_up_builds(self, when: GiveUp) -> None:
        self.give_up = when

    def begin_builds(self, cases: list[tuple[Declaration, object]]) -> BuildReply | None:
        return None

    def prepare(self, declarations: list[Declaration]) -> list[Declaration]:
        return declarations

    def judge(self, declaration: Declaration, case: object, **how: Any) -> Verdict:
        watch = BuildWatch(None)
        watch.compiles_itself = True
        assert self.give_up is not None
        if self.give_up(watch):
            raise DeadlinePassed
        Building.is_building += 1
        Building.most = max(Building.most, Building.is_building)
        Building.order.append(declaration.target)
        time.sleep(_NOT_SOON_S)
        Building.is_building -= 1
        return Verdict()


@pytest.mark.parametrize(("builds_apart", "most"), [(True, 2), (False, 1)])
def test_builds_that_share_nothing_are_made_at_once(
    builds_apart: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of an engine's kernels would wait for what all before it build, minutes for each."""
    monkeypatch.setattr(readiness, "cores", lambda: 4)
    monkeypatch.setattr(readiness, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(Building, "most", 0)
    monkeypatch.setattr(Building, "order", [])
    kernels = [
        Declaration(
            name=one,
            problem="dense_decode",
            supports=Supports(dtypes=("float16", "float32"), head_sizes=(64,)),
            target=f"mine.py:{one}",
            builds_apart=builds_apart,
        )
        for one in "abc"
    ]
    asking = Readiness(
        cast(Runner, Building()), kernels, make_runner=lambda: cast(Runner, Building()), note=print, infers=False
    )
    with asking:
        asking.start()
        until = time.monotonic() + _SOON_S
        while len(Building.order) < 6 and time.monotonic() < until:
            asking.take()
            time.sleep(0.01)
    assert Building.most == most
    if not builds_apart:  # first what the first case of each needs
        assert Building.order == [f"mine.py:{one}" for one in "abcabc"]


class WithBuilder(Building):
    """A runner of kernels whose engine has a builder: modules ``missing``, by target, of which none is built so far."""

    missing: ClassVar[dict[str, list[str]]] = {}
    far: ClassVar[list[BuiltReply]] = []
    asked: ClassVar[list[str]] = []
    begun: ClassVar[list[str]] = []

    def heir(self) -> WithBuilder:
        made = WithBuilder()
        made.give_up = self.give_up
        return made

    sibling = heir

    def begin_builds(self, cases: list[tuple[Declaration, object]]) -> BuildReply | None:
        WithBuilder.begun += [declaration.target for declaration, _ in cases]
        missing = [self.missing.get(declaration.target, []) for declaration, _ in cases]
        return BuildReply(missing, "modules of Engine", "/kept", "ENGINE_FOLDER")

    def built(self) -> BuiltReply | None:
        return self.far.pop(0) if self.far else BuiltReply(0, is_over=False)

    def judge(self, declaration: Declaration, case: object, **how: Any) -> Verdict:
        WithBuilder.asked.append(declaration.target)
        return Verdict()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Readiness, list[str]]]:
    """Makes what builds kernels a and b, of an engine with a builder, and c, beside the notes that it writes."""
    for name in ("missing", "far", "asked", "begun"):
        monkeypatch.setattr(WithBuilder, name, type(getattr(WithBuilder, name))())
    monkeypatch.setattr(readiness, "_ASK_BUILDER_EVERY_S", 0.01)

    def made(**how: Any) -> tuple[Readiness, list[str]]:
        notes: list[str] = []
        kernels = [
            Declaration(
                name=one,
                problem="dense_decode",
                supports=Supports(dtypes=("float16", "float32"), head_sizes=(64,)),
                target=f"mine.py:{one}",
                builds_apart=one != "c",
            )
            for one in "abc"
        ]
        asking = Readiness(
            cast(Runner, WithBuilder()),
            kernels,
            make_runner=lambda: cast(Runner, WithBuilder()),
            note=notes.append,
            infers=False,
        )
        return asking, notes

    return made


def _until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _SOON_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_kernels_of_an_engine_need_is_built_as_one_job(job: Callable[..., tuple[Readiness, list[str]]]) -> None:
    """Each kernel would have its modules compiled by itself, and the modules that kernels share would come last."""
    WithBuilder.missing = {"mine.py:a": ["decode"], "mine.py:b": ["decode", "prefill"]}
    WithBuilder.far = [BuiltReply(0, is_over=False), BuiltReply(1, is_over=False), BuiltReply(1, is_over=False)]
    asking, notes = job()
    with asking:
        asking.start()
        joined = set[str]()

        def are_ready() -> bool:
            joined.update(join.kernel.target for join in asking.take() if not join.built)
            return len(joined) == 3 and "building 2 modules of Engine: 1 done" in notes

        _until(are_ready)
    assert WithBuilder.begun == ["mine.py:a", "mine.py:b", "mine.py:a", "mine.py:b"]  # first what each begins with
    assert "building 2 modules of Engine; modules of Engine are kept in /kept; ENGINE_FOLDER names" in str(notes)
    (compiling,) = (note for note in notes if "compile themselves" in note)
    assert "mine.py:c" not in compiling


def test_kernels_of_which_all_is_built_are_not_built_again(job: Callable[..., tuple[Readiness, list[str]]]) -> None:
    """A second campaign would wait for compilers that have nothing to do."""
    asking, notes = job()
    with asking:
        asking.start()
        asking.wait()
        assert {join.kernel.target for join in asking.take()} == {"mine.py:a", "mine.py:b", "mine.py:c"}
    assert notes == ["modules of Engine are kept in /kept; ENGINE_FOLDER names another folder"]


def test_a_kernel_of_another_engine_does_not_wait_for_a_builder(
    job: Callable[..., tuple[Readiness, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing an engine takes seconds, in which nothing would be searched."""
    may_answer = threading.Event()

    def begin(runner: WithBuilder, cases: object) -> None:
        assert may_answer.wait(_SOON_S)

    monkeypatch.setattr(WithBuilder, "begin_builds", begin)
    asking, _ = job()
    with asking:
        asking.start()
        _until(lambda: any(join.kernel.target == "mine.py:c" for join in asking.take()))
        assert "mine.py:a" not in WithBuilder.asked
        may_answer.set()
        asking.wait()
        assert "mine.py:a" in WithBuilder.asked
