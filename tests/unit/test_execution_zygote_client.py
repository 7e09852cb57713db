"""The driver's handle on a zygote."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

from attnfuzz.execution import Executor, ExecutorUnavailable, Reply, Zygote

SERVICES = Path(__file__).with_name("execution_services.py")


def call(executor: Executor, method: str, argument: object = None) -> object:
    outcome = executor.call(method, msgspec.json.encode(argument), timeout_s=20)
    assert isinstance(outcome, Reply)
    return msgspec.json.decode(outcome.body)


def kill(zygote: Zygote) -> None:
    os.kill(zygote.pid, signal.SIGKILL)
    assert zygote.wait_ended(10)


def test_restarts_are_bounded_and_the_error_is_clear() -> None:
    """A zygote that dies each time would be restarted for ever."""
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=(), max_restarts=1) as zygote, Executor(zygote) as executor:
        kill(zygote)
        assert call(executor, "echo", 1) == 1
        kill(zygote)
        for _ in range(2):
            with pytest.raises(ExecutorUnavailable, match=r"died 2 times, more than max_restarts=1|was closed"):
                executor.call("echo", b"1", timeout_s=20)


def test_closed_zygote_refuses_executors() -> None:
    """A closed zygote would quietly start again."""
    zygote = Zygote.start(service=f"{SERVICES}:Rogue", preload=())
    zygote.close()
    with pytest.raises(ExecutorUnavailable, match="was closed"):
        Executor(zygote)


def test_closing_twice_is_harmless() -> None:
    """Cleaning up after an error would raise another."""
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=()) as zygote:
        zygote.close()
    assert zygote.wait_ended(0)


def test_unknown_device_is_refused() -> None:
    """A typing error would run kernels on whatever device is there."""
    with pytest.raises(ValueError, match="device='gpu' must be 'cpu' or 'cuda'"):
        Zygote.start("gpu", service="x:y")  # type: ignore[arg-type]  # the mistake under test


def test_running_zygote_has_not_ended() -> None:
    """Waiting for the end would not wait."""
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=()) as zygote:
        assert not zygote.wait_ended(0.01)
