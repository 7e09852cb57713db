"""How executors are set up: environments, several at once, what they hold, and services that cannot be made."""

import os
import threading
import time

import pytest

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import Died, ExecutorUnavailable, ServiceError
from attnfuzz.isolation.zygote_client import Zygote
from tests.unit.execution_clients import SERVICES, call, num_descriptors


def test_environment_is_that_of_one_executor(zygote: Zygote, executor: Executor) -> None:
    """Executors could not be given a GPU each."""
    with Executor(zygote, environment={"CUDA_VISIBLE_DEVICES": "3"}) as other:
        theirs, ours = call(other, "environment"), call(executor, "environment")
    assert isinstance(theirs, dict)
    assert isinstance(ours, dict)
    assert theirs["CUDA_VISIBLE_DEVICES"] == "3"
    assert ours["CUDA_VISIBLE_DEVICES"] == ""


def test_oversized_environment_is_refused(zygote: Zygote) -> None:
    """The zygote would drop the connection without a word."""
    with pytest.raises(ValueError, match="environment takes"):
        Executor(zygote, environment={"X": "x" * 200_000})


def test_executors_are_independent(zygote: Zygote, executor: Executor) -> None:
    """One worker's crash would be another worker's finding."""
    with Executor(zygote) as other:
        call(executor, "segfault")
        assert call(other, "echo", 1) == 1
        assert other.restarts == 0


def test_executors_of_several_threads_share_a_zygote(zygote: Zygote) -> None:
    """Workers in threads would get each other's answers."""
    answers: dict[int, list[object]] = {}

    def work(number: int) -> None:
        with Executor(zygote) as own:
            answers[number] = [call(own, "echo", number), type(call(own, "os_exit", number)), call(own, "echo", number)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [number, Died, number] for number in range(4)}


def test_executor_holds_no_connection_but_its_own(zygote: Zygote, executor: Executor) -> None:
    """A kernel could write into another worker's connection, or keep it open after its end."""
    with Executor(zygote) as other:
        assert call(other, "sockets") == 1
    assert call(executor, "sockets") == 1


def test_executor_is_set_apart_from_the_driver(executor: Executor) -> None:
    """A kernel could read the terminal, get its Ctrl-C, or have the driver killed when memory runs out."""
    limits = call(executor, "limits")
    assert limits == {"oom_score_adj": 1000, "session": executor.pid, "stdin": os.devnull}


@pytest.mark.parametrize("method", ["echo", "segfault", "os_exit", "spin", "answer_then_exit"])
def test_nothing_leaks_over_many_restarts(zygote: Zygote, method: str) -> None:
    """A long campaign would run out of file descriptors, in the driver or in the zygote, or of process IDs."""

    with Executor(zygote) as executor:
        executor.restart()
        ours, theirs = num_descriptors("self"), num_descriptors(zygote.pid)
        for _ in range(8):
            call(executor, method, 1, timeout_s=0.05)
            executor.restart()
        assert num_descriptors("self") == ours
        deadline = time.monotonic() + 10
        while num_descriptors(zygote.pid) > theirs:  # it closes a connection only after the driver has
            assert time.monotonic() < deadline, "the zygote keeps descriptors of executors that are gone"
            time.sleep(0.005)


@pytest.mark.parametrize(
    ("service", "error", "message"),
    [
        ("CannotBeMade", ServiceError, "no kernel to run"),
        ("DiesWhenMade", ExecutorUnavailable, "exit_status=7"),
        ("not_a_service", ServiceError, "must have a method handle"),
    ],
)
def test_service_that_cannot_be_made_is_an_error_at_once(service: str, error: type[Exception], message: str) -> None:
    """A broken service would be restarted for ever."""
    with Zygote.start(service=f"{SERVICES}:{service}", preload=()) as zygote, pytest.raises(error, match=message):
        Executor(zygote)


def test_fork_inside_a_call_does_not_confuse_the_driver(executor: Executor) -> None:
    """The forked copy's answer would be taken for that to the next call."""
    assert call(executor, "fork_and_answer_twice") == "parent"
    assert [call(executor, "echo", number) for number in range(20)] == list(range(20))
    assert executor.restarts == 0
