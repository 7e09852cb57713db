"""Kernels that compile themselves: a build is no hang, its memory is not the kernel's, and nobody begins it again."""

import fcntl
import os
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest

from attnfuzz.isolation import builds
from attnfuzz.isolation.builds import BuildWatch, OwnCompilers, never
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import Reply
from attnfuzz.isolation.process import ProcessSeen, waits_for_file_lock
from attnfuzz.isolation.zygote_client import Zygote
from tests.common.execution_clients import call, died, timed_out

encode = msgspec.json.encode
BUILD_S = 3.0
CASE_S = 1.2
"""Of a case, whose time is shorter than the build takes."""


def test_a_build_is_not_the_time_of_the_case(executor: Executor) -> None:
    """A kernel that compiles itself for a minute would be killed for hanging, and begin again for ever."""
    outcome = executor.call("build", msgspec.json.encode((BUILD_S, 0)), timeout_s=CASE_S)
    assert isinstance(outcome, Reply)
    assert outcome.body == b'"built"'
    assert outcome.built_s >= BUILD_S - 2 * builds.LOOK_EVERY_S
    assert executor.restarts == 0


def test_the_case_has_all_its_time_once_the_build_has_ended(executor: Executor) -> None:
    """A hang behind a build would never be found, or a case that follows a long build would be accused of one."""
    began = time.monotonic()
    outcome = timed_out(call(executor, "build_then_hang", (BUILD_S, 0), timeout_s=CASE_S))
    assert time.monotonic() - began >= BUILD_S + CASE_S - builds.LOOK_EVERY_S
    assert (outcome.after_s, outcome.cut_off) == (CASE_S, False)


def test_no_build_lasts_for_ever(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that starts a process and waits for it in vain would hold its worker for the rest of the campaign."""
    monkeypatch.setattr("attnfuzz.isolation.executor.BUILD_PATIENCE_S", 1.0)
    assert not timed_out(call(executor, "build", (60, 0), timeout_s=CASE_S)).cut_off


def test_the_deadline_ends_a_build_without_calling_it_a_hang(executor: Executor) -> None:
    """A campaign would run past its budget by ten minutes, or accuse a kernel that was still being built."""
    until = time.monotonic() + 2.0
    building = executor.call("build", b"[60, 0]", timeout_s=CASE_S, give_up=lambda builds: time.monotonic() >= until)
    assert timed_out(building).cut_off
    assert not timed_out(executor.call("hang", b"null", timeout_s=0.2, give_up=never)).cut_off


def starts(folder: Path, name: str) -> tuple[str, float]:
    """What has a program of this name run for longer than any test."""
    program = folder / name
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    return str(program), CASE_S


@pytest.mark.parametrize("name", ["ninja", "nvcc", "cc1plus"])
def test_a_kernel_that_starts_a_compiler_is_stopped_where_others_go_first(
    executor: Executor, tmp_path: Path, name: str
) -> None:
    """A campaign would wait for the builds of one kernel before it searches those that are ready."""
    compilers = OwnCompilers()
    program, _ = starts(tmp_path, name)
    assert timed_out(executor.call("start", encode(program), timeout_s=60.0, give_up=compilers)).cut_off
    assert compilers.seen


@pytest.mark.parametrize("name", ["ptxas", "gcc", "cc1"])
def test_what_triton_starts_is_no_kernel_that_compiles_itself(executor: Executor, tmp_path: Path, name: str) -> None:
    """Every Triton kernel of a fresh machine would be told to compile itself, and be searched after all others."""
    compilers = OwnCompilers()
    program, seconds = starts(tmp_path, name)
    outcome = executor.call("start_for", encode((program, seconds)), timeout_s=60.0, give_up=compilers)
    assert isinstance(outcome, Reply)
    assert outcome.built_s > 0  # it was seen, and its time is not that of the case
    assert not compilers.seen


def test_memory_of_a_build_is_not_the_kernels(zygote: Zygote) -> None:
    """A compiler that takes two gigabytes would be told as a kernel that outgrew its memory limit."""
    with Executor(zygote, memory_limit_bytes=200 << 20) as executor:
        assert call(executor, "build", (1.5, 400), timeout_s=10) == "built"


def test_builds_leave_the_machine_some_memory(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen compilers at once would bring the machine down."""
    monkeypatch.setattr(builds, "available_bytes", lambda: 50 << 20)
    with Executor(zygote, memory_limit_bytes=200 << 20) as executor:
        assert died(call(executor, "build", (60, 400), timeout_s=10)).reason == "children"
        assert call(executor, "echo", 1) == 1


@pytest.mark.night
def test_an_older_process_counts_only_while_it_computes(executor: Executor) -> None:
    """Every hang of a kernel that keeps a pool of compilers would take ten minutes to find, or its builds be killed."""
    call(executor, "have_a_helper", False)
    timed_out(call(executor, "sleep", 600, timeout_s=CASE_S))
    call(executor, "have_a_helper", True)
    assert call(executor, "sleep", BUILD_S, timeout_s=CASE_S) == "slept"


def is_locked(path: str) -> bool:
    with Path(path).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("poll_s", [0.0, 0.05], ids=["waiting", "polling"])
@pytest.mark.by_day("polling")
def test_waiting_for_another_ones_build_is_no_hang(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poll_s: float
) -> None:
    """Of sixteen workers that need the same build, fifteen would be killed while one compiles."""
    monkeypatch.setattr(builds, "_LONG_AT_WORK_S", 0.5)
    lock = str(tmp_path / "lock")
    with Executor(zygote) as first, Executor(zygote) as second:
        builder = threading.Thread(
            target=call, args=(first, "build_behind_lock", (lock, 3.5)), kwargs={"timeout_s": 20}
        )
        builder.start()
        while not is_locked(lock):
            time.sleep(0.01)
        assert call(second, "wait_for_lock", (lock, poll_s), timeout_s=2.0) == "locked"
        assert second.restarts == 0
        builder.join()


@pytest.mark.parametrize(("name", "compiles"), [("ptxas", False), ("ptxas-blackwell", False), ("ninja", True)])
def test_an_assembler_of_another_executor_is_nobodys_build(
    monkeypatch: pytest.MonkeyPatch, name: str, compiles: bool
) -> None:
    """A kernel that waits for the GPU would be told to compile itself while a large one is assembled elsewhere."""
    zygote, waiting, other, compiler = 1, 10, 11, 12
    parents = {waiting: zygote, other: zygote, compiler: other}
    ticks = iter((100, 200))

    def all_processes() -> dict[int, ProcessSeen]:
        computed = next(ticks)
        return {
            pid: ProcessSeen(
                name=name if pid == compiler else "python",
                parent=parent,
                has_ended=False,
                start_ticks=1,
                cpu_ticks=computed if pid == compiler else 5,
            )
            for pid, parent in parents.items()
        }

    monkeypatch.setattr(builds, "all_processes", all_processes)
    monkeypatch.setattr(builds, "now_in_ticks", lambda: 10_000)
    monkeypatch.setattr(builds, "waits_for_file_lock", lambda pid: False)
    watch = BuildWatch(waiting)
    watch.look()
    watch.look()
    assert watch.compiles_itself is compiles


def test_a_lock_that_nobody_builds_behind_is_a_hang_when_polled(executor: Executor, tmp_path: Path) -> None:
    """A kernel that sleeps for ever would be waited for as if it were a build."""
    with (tmp_path / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        timed_out(call(executor, "wait_for_lock", (str(tmp_path / "lock"), 0.05), timeout_s=CASE_S))


def test_a_process_that_waits_for_a_file_lock_is_known(tmp_path: Path) -> None:
    """The wait for somebody else's build would pass for a hang."""
    with (tmp_path / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = subprocess.Popen(["flock", str(tmp_path / "lock"), "true"])
        until = time.monotonic() + 30.0
        while not waits_for_file_lock(waiting.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert waits_for_file_lock(waiting.pid)
        assert not waits_for_file_lock(os.getpid())
    waiting.wait()


def test_a_process_that_is_gone_builds_nothing() -> None:
    """The watchdog would raise when an executor dies while it is being looked at."""
    watch = BuildWatch(1 << 30)
    assert not watch.look()
    assert not watch.look()
    assert not watch.takes_too_much_memory()
