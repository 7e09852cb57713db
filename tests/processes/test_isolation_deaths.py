"""Nothing outlives its owner, whichever process is killed with SIGKILL."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz.isolation import executor as executor_module
from attnfuzz.isolation import zygote_client
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.link import Link
from attnfuzz.isolation.outcomes import Died, Reply, TimedOut
from attnfuzz.isolation.process import child_pids, is_stopped
from attnfuzz.isolation.zygote_client import Zygote

SERVICES = Path(__file__).parents[1] / "common" / "execution_services.py"

DRIVER = """
import json, sys
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.zygote_client import Zygote

def call(executor, method, argument, timeout_s=60):
    return json.loads(executor.call(method, json.dumps(argument).encode(), timeout_s=timeout_s).body)

if __name__ == "__main__":
    zygote = Zygote.start(service=sys.argv[1], preload=())
    busy, idle = Executor(zygote), Executor(zygote)
    pids = {"zygote": zygote.pid, "busy": busy.pid, "idle": idle.pid}
    pids["forked"] = call(busy, "fork_child", None)
    pids["program"] = call(busy, "start_program", False)
    pids["session"] = call(busy, "start_program", True)
    pids["daemon"] = call(busy, "start_daemon", None)
    print(json.dumps(pids), flush=True)
    call(busy, "hang", None, timeout_s=600)
"""

DRIVER_OF_A_STOPPED_ZYGOTE = """
import json, os, signal, sys, threading
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.zygote_client import Zygote

if __name__ == "__main__":
    started = []
    thread = threading.Thread(target=lambda: started.append(Zygote.start(service=sys.argv[1], preload=())))
    thread.start()  # as the threads do that lend a zygote to workers, and which end before the campaign does
    thread.join()
    executor = Executor(started[0])
    os.kill(started[0].pid, signal.SIGSTOP)
    print(json.dumps([started[0].pid, executor.pid]), flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=()) as started:
        yield started


def call(executor: Executor, method: str, argument: object = None) -> object:
    outcome = executor.call(method, msgspec.json.encode(argument), timeout_s=20)
    return msgspec.json.decode(outcome.body) if isinstance(outcome, Reply) else outcome


def offspring(executor: Executor) -> list[int]:
    """Start every kind of process that could be left behind."""
    pids = [
        call(executor, "fork_child"),
        call(executor, "start_program", False),
        call(executor, "start_program", True),
        call(executor, "start_daemon"),
    ]
    numbers = [pid for pid in pids if isinstance(pid, int)]
    assert len(numbers) == 4
    assert all(is_running(pid) for pid in numbers)
    return numbers


def is_running(pid: int) -> bool:
    """Whether the process exists; a zombie that a container's init never collects does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: object, what: str) -> None:
    deadline = time.monotonic() + 10
    while not (callable(condition) and condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), f"of {pids}, some are still there")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder whose path is short enough for sockets, as those of pytest are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def driver(tmp_path: Path, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A driver in a process of its own, busy in a call that never ends, and all that hangs on it."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, script, f"{SERVICES}:Rogue"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def test_killed_driver_leaves_nothing(driver: tuple[subprocess.Popen[str], dict[str, int]], temporary: Path) -> None:
    """A killed campaign would leave processes that hold the GPU, or files in the temporary folder."""
    process, pids = driver
    assert all(map(is_running, pids.values()))
    assert len(list(temporary.iterdir())) == 1
    process.kill()
    assert_gone(list(pids.values()))
    wait_until(lambda: not list(temporary.iterdir()), "the socket's folder is still there")


def test_driver_killed_with_its_zygote_leaves_no_executor(
    driver: tuple[subprocess.Popen[str], dict[str, int]],
) -> None:
    """With no one left to clean up, executors and what they forked would run on."""
    process, pids = driver
    os.kill(pids["zygote"], signal.SIGSTOP)  # so that it cannot act on the driver's death before its own
    process.kill()
    os.kill(pids["zygote"], signal.SIGKILL)
    try:
        assert_gone([pids[name] for name in ("zygote", "busy", "idle", "forked")])
    finally:  # started by exec, these have no one: the documented limit of the isolation
        for name in ("program", "session", "daemon"):
            os.kill(pids[name], signal.SIGKILL)


def test_killed_driver_leaves_no_stopped_zygote(tmp_path: Path) -> None:
    """A kernel that stops its parent would leave 300 MB of it and its executors with every campaign that is killed."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER_OF_A_STOPPED_ZYGOTE)
    with subprocess.Popen([sys.executable, script, f"{SERVICES}:Rogue"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        wait_until(lambda: is_stopped(pids[0]), "the zygote is not stopped")
        process.kill()
        assert_gone(pids)


def test_a_stopped_zygote_goes_on_when_it_is_needed(zygote: Zygote) -> None:
    """Whoever needs another process would wait minutes for it, past the budget of a campaign, and then give up."""
    with Executor(zygote) as executor:
        replaced = call(executor, "pid")
        os.kill(zygote.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(zygote.pid), "the zygote is not stopped")
        executor.restart()
        assert call(executor, "echo", 1) == 1
        assert isinstance(replaced, int)
        assert_gone([replaced])


def test_a_zygote_that_says_nothing_is_replaced(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a debugger holds, or that hangs, would keep whoever needs another process waiting."""
    monkeypatch.setattr(Link, "wake_zygote", lambda link: False)
    monkeypatch.setattr(executor_module, "_FORK_WAIT_S", 0.5)
    silent = zygote.pid
    os.kill(silent, signal.SIGSTOP)
    monkeypatch.setattr(zygote_client, "is_stopped", lambda pid: False)
    with Executor(zygote) as executor:
        assert call(executor, "echo", 1) == 1
        assert_gone([silent])


def test_a_call_that_stops_the_zygote_each_time_is_to_blame(zygote: Zygote) -> None:
    """A kernel that stops its parent would pass."""
    with Executor(zygote) as executor:
        outcome = call(executor, "stop_parent")
        assert isinstance(outcome, Died)
        assert outcome.reason == "zygote"
        assert call(executor, "echo", 1) == 1
        assert zygote.restarts == 0


def test_a_call_that_stops_the_zygote_and_hangs_can_be_ended(zygote: Zygote) -> None:
    """It would pass for a process that cannot be killed, and end the campaign as if its device were lost."""
    with Executor(zygote) as executor:
        outcome = executor.call("stop_parent_and_hang", b"null", timeout_s=1)
        assert isinstance(outcome, TimedOut)
        assert not outcome.still_alive


def test_a_zygote_stopped_once_is_not_charged_to_the_call(zygote: Zygote) -> None:
    """Whatever runs while another kernel of the campaign stops the zygote would be blamed for it."""
    with Executor(zygote) as executor:
        stopper = threading.Timer(0.3, os.kill, [zygote.pid, signal.SIGSTOP])
        stopper.start()
        assert call(executor, "sleep", 2) == "slept"
        stopper.join()
        assert zygote.restarts == 0


def test_closing_a_stopped_zygote_leaves_nothing(zygote: Zygote) -> None:
    """What executors have started in sessions of their own is the zygote's to end, also if a kernel has stopped it."""
    with Executor(zygote) as executor:
        pids = offspring(executor)
        os.kill(zygote.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(zygote.pid), "the zygote is not stopped")
        zygote.close()
        assert_gone(pids)


def test_ended_driver_leaves_nothing(tmp_path: Path) -> None:
    """A driver that ends without closing its executors would leave them behind."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.replace('call(busy, "hang"', 'sys.exit(); call(busy, "hang"'))
    finished = subprocess.run(
        [sys.executable, script, f"{SERVICES}:Rogue"], stdout=subprocess.PIPE, text=True, check=True
    )
    assert_gone(list(json.loads(finished.stdout).values()))


def test_killed_executor_leaves_nothing(zygote: Zygote) -> None:
    """What a crashed kernel started would keep its memory and its GPU."""
    with Executor(zygote) as executor:
        pids = offspring(executor)
        assert isinstance(call(executor, "segfault"), Died)
        assert_gone(pids)


def test_closed_executor_leaves_nothing(zygote: Zygote) -> None:
    """What a kernel started would outlive the executor's orderly end."""
    with Executor(zygote) as executor:
        pids = offspring(executor)
    assert_gone(pids)


def test_killed_zygote_leaves_nothing_and_is_replaced(zygote: Zygote) -> None:
    """Executors would run on without anyone to reap them, or the campaign would end."""
    with Executor(zygote) as executor:
        forked, program, *_ = pids = offspring(executor)
        first, first_zygote = executor.pid, zygote.pid
        assert first is not None
        os.kill(first_zygote, signal.SIGKILL)
        assert_gone([first_zygote, first, forked])
        assert call(executor, "echo", 1) == 1
        assert_gone([program])
        assert (zygote.restarts, executor.restarts) == (1, 1)
        assert zygote.pid != first_zygote
    for pid in pids[2:]:  # in sessions of their own, with their keeper dead: the documented limit of the isolation
        os.kill(pid, signal.SIGKILL)


def test_call_is_repeated_when_the_zygote_dies_during_it(zygote: Zygote, tmp_path: Path) -> None:
    """The death of a helper process would be reported as the kernel's."""
    with Executor(zygote) as executor:
        assert call(executor, "kill_once", [zygote.pid, str(tmp_path / "killed")]) == "done before"
        assert zygote.restarts == 1


def test_terminated_zygote_leaves_nothing(zygote: Zygote) -> None:
    """An administrator's kill would leave what the executors started."""
    with Executor(zygote) as executor:
        pids = offspring(executor)
        os.kill(zygote.pid, signal.SIGTERM)
        assert_gone([*pids, executor.pid or 0])


def test_zygote_reaps_all_that_it_inherits(zygote: Zygote) -> None:
    """Zombies would pile up over a long campaign until no process can be started."""
    with Executor(zygote) as executor:
        offspring(executor)
        call(executor, "segfault")
    wait_until(lambda: not child_pids(zygote.pid), f"children of {zygote.pid} remain")
