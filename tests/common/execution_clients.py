"""What tests of executors share: calls, outcomes, and looking at processes from outside."""

import time
from pathlib import Path

import msgspec

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import Died, Reply, TimedOut

SERVICES = Path(__file__).with_name("execution_services.py")


def call(executor: Executor, method: str, argument: object = None, *, timeout_s: float = 20.0) -> object:
    """The outcome; a reply's body decoded."""
    outcome = executor.call(method, msgspec.json.encode(argument), timeout_s=timeout_s)
    return msgspec.json.decode(outcome.body) if isinstance(outcome, Reply) else outcome


def died(outcome: object) -> Died:
    assert isinstance(outcome, Died)
    return outcome


def timed_out(outcome: object) -> TimedOut:
    assert isinstance(outcome, TimedOut)
    return outcome


def assert_gone(pid: object) -> None:
    """The process ends soon; a zombie that a container's init never collects counts as ended."""
    assert isinstance(pid, int)
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.005)


def num_descriptors(pid: int | str) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
