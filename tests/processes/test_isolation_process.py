"""What is asked of the operating system."""

import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attnfuzz.isolation.process import (
    available_bytes,
    child_pids,
    cpu_wait_s,
    descendant_bytes,
    die_with_parent,
    disable_core_dumps,
    ended_child,
    is_blocked,
    kill_group,
    prefer_as_oom_victim,
    resident_bytes,
    start_time,
)


def exit_status_of_fork(action: Callable[[], int]) -> int:
    """How a forked copy of this process ends that exits with what `action` returns."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(action())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def gone() -> int:
    """The process ID of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_waiting_for_a_cpu_is_measured_in_seconds() -> None:
    """Slow executors on a busy machine would be taken for kernels that hang, or kernels that hang for slow ones."""
    spin = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\nwhile True: pass"
    rivals = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.5)
        before, of_sleeper = [cpu_wait_s(rival.pid) for rival in rivals], cpu_wait_s(sleeper.pid)
        time.sleep(1.0)
        waited = sum(cpu_wait_s(rival.pid) - earlier for rival, earlier in zip(rivals, before, strict=True))
        assert 0.5 < waited < 2.5
        assert cpu_wait_s(sleeper.pid) - of_sleeper < 0.1
    finally:
        for process in (*rivals, sleeper):
            process.kill()
            process.wait()
    assert cpu_wait_s(sleeper.pid) == 0.0


def comes_true(question: Callable[[], bool]) -> bool:
    until = time.monotonic() + 30.0
    while not question() and time.monotonic() < until:
        time.sleep(0.01)
    return question()


def test_a_process_that_waits_within_the_kernel_is_blocked(tmp_path: Path) -> None:
    """One that waits for a driver's lock would pass for one that runs without end, and be killed for it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # the parent of a vfork waits until the child has begun another program, for which this one waits for the FIFO
    opens = f"[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, os.O_RDONLY, 0)]"
    script = f"import os, time; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions={opens}); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        assert comes_true(lambda: is_blocked(process.pid))
        fifo.open("w").close()
        assert comes_true(lambda: not is_blocked(process.pid))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not is_blocked(process.pid)


def test_resident_memory_is_measured_in_bytes() -> None:
    """The memory limit would be off by the size of a page, or miss growth."""
    before = resident_bytes(os.getpid())
    with mmap.mmap(-1, 64 << 20) as held:  # bytes of Python's could lie where the heap holds freed ones
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        after = resident_bytes(os.getpid())
    assert before is not None
    assert after is not None
    assert 60 << 20 <= after - before <= 80 << 20
    usage_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after <= usage_kib * 1024 * 1.1


def test_ended_process_has_no_memory_and_no_start(gone: int) -> None:
    """A dead executor would crash the watchdog."""
    assert resident_bytes(gone) is None
    assert descendant_bytes(gone) == 0
    assert start_time(gone) is None


def test_start_time_tells_processes_apart() -> None:
    """A reused process ID would be killed for its predecessor."""
    own, parent = start_time(os.getpid()), start_time(os.getppid())
    assert own is not None
    assert parent is not None
    assert own >= parent


def test_children_are_listed_until_collected() -> None:
    """Adopted processes would be overlooked."""
    with subprocess.Popen(["sleep", "100"]) as process:
        assert process.pid in child_pids(os.getpid())
        process.kill()
        process.wait()
        assert process.pid not in child_pids(os.getpid())


def test_ended_child_is_named_but_not_collected() -> None:
    """A process ID could be reused between the notice of a death and the signal to its group."""

    def check() -> int:
        assert ended_child() is None
        child = os.fork()
        if child == 0:
            os._exit(5)
        while ended_child() is None:
            pass
        assert ended_child() == child
        _, status = os.waitpid(child, 0)
        assert ended_child() is None
        return os.waitstatus_to_exitcode(status)

    assert exit_status_of_fork(check) == 5


def test_core_dumps_are_off() -> None:
    """Each crash would write gigabytes and take seconds."""

    def check() -> int:
        disable_core_dumps()
        return int(resource.getrlimit(resource.RLIMIT_CORE)[0])

    assert exit_status_of_fork(check) in (0, 1)


def test_executor_comes_first_when_memory_runs_out() -> None:
    """The kernel would kill the driver for what its executor took."""

    def check() -> int:
        prefer_as_oom_victim()
        with open("/proc/self/oom_score_adj") as file:  # noqa: PTH123 - the child of a fork does as little as it can
            return int(file.read()) // 10

    assert exit_status_of_fork(check) == 100


def test_process_whose_parent_is_gone_already_ends() -> None:
    """A zygote that dies during a fork would leave an executor behind."""

    def check() -> int:
        die_with_parent(parent_pid=1 << 30)
        return 0

    assert exit_status_of_fork(check) == -signal.SIGKILL


def test_process_whose_parent_lives_goes_on() -> None:
    """No executor could start."""
    own = os.getpid()

    def check() -> int:
        die_with_parent(own)
        return 3

    assert exit_status_of_fork(check) == 3


def test_group_is_killed_with_its_leader() -> None:
    """What a kernel started would survive it."""
    shell = "sleep 100 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        kill_group(process.pid)
        assert process.stdout.read() == b""  # at the end of file, no process of the group holds the pipe
        assert process.wait() == -signal.SIGKILL


def test_killing_what_is_gone_is_harmless(gone: int) -> None:
    """Cleaning up after a death would raise."""
    kill_group(gone)


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    """In a container, the machine's memory says nothing."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:  4096 kB\n")
    assert available_bytes(tmp_path) == 4096 * 1024
    groups = tmp_path / "sys" / "fs" / "cgroup"
    groups.mkdir(parents=True)
    (groups / "memory.max").write_text("max\n")
    (groups / "memory.current").write_text("5\n")
    assert available_bytes(tmp_path) == 4096 * 1024
    (groups / "memory.max").write_text("1000\n")
    assert available_bytes(tmp_path) == 995


def test_memory_that_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    """A system without /proc would get a limit of nothing."""
    assert available_bytes(tmp_path) is None
