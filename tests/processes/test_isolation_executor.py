"""Executors: calls, limits, restarts, and how they are set up."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.link import OUTPUT_TAIL_BYTES
from attnfuzz.isolation.messages import FrameError
from attnfuzz.isolation.outcomes import Died, ExecutorUnavailable, ServiceError, TimedOut, signal_name
from attnfuzz.isolation.zygote_client import Zygote
from tests.common.execution_clients import SERVICES, assert_gone, call, died, num_descriptors, timed_out


def test_answers_calls_in_one_process(executor: Executor) -> None:
    """Calls would not be answered, or each would pay for a process of its own."""
    assert call(executor, "echo", {"lengths": [1, 2, 3], "text": "é"}) == {"lengths": [1, 2, 3], "text": "é"}
    assert call(executor, "pid") == call(executor, "pid") == executor.pid
    assert executor.restarts == 0


@pytest.mark.parametrize(
    ("method", "argument", "status", "name", "reason"),
    [
        ("segfault", None, -signal.SIGSEGV, "SIGSEGV", "signal"),
        ("abort", None, -signal.SIGABRT, "SIGABRT", "signal"),
        ("os_exit", 0, 0, None, "exit"),
        ("os_exit", 200, 200, None, "exit"),
        ("sys_exit", None, 0, None, "exit"),
        ("sys_exit", 5, 5, None, "exit"),
        ("sys_exit", "goodbye", 1, None, "exit"),
        ("interrupt", None, 1, None, "exit"),
        ("close_everything", None, 113, None, "channel"),
        ("close_everything_and_exit", 4, 4, None, "exit"),
        ("close_everything_and_hang", None, -signal.SIGKILL, "SIGKILL", "channel"),
        ("garble_channel", "not a frame", -signal.SIGKILL, "SIGKILL", "channel"),
        ("garble_channel", "\x00\x00\x00\x02{}", -signal.SIGKILL, "SIGKILL", "channel"),
    ],
)
def test_death_is_reported_exactly_and_the_next_call_works(
    executor: Executor, method: str, argument: object, status: int, name: str | None, reason: str
) -> None:
    """A crash would be reported as another one, or would take later cases down with it."""
    first = call(executor, "pid")
    death = died(call(executor, method, argument))
    assert (death.exit_status, death.signal_name, death.reason) == (status, name, reason)
    assert executor.pid is None
    second = call(executor, "pid")
    assert second == executor.pid != first
    assert executor.restarts == 1
    assert_gone(first)


def test_stack_of_a_segfault_names_the_service(executor: Executor) -> None:
    """The author of a crashing kernel would not learn where it crashed."""
    tail = died(call(executor, "segfault")).output_tail
    assert "Segmentation fault" in tail
    assert "in segfault" in tail
    assert "isolation/zygote.py" not in tail


def test_text_of_sys_exit_is_kept(executor: Executor) -> None:
    """The only explanation of an exit would be lost."""
    assert "goodbye" in died(call(executor, "sys_exit", "goodbye")).output_tail


def test_output_tail_is_the_last_of_it_and_bounded(executor: Executor) -> None:
    """A chatty kernel would fill the driver's memory, or the tail would hold its oldest output."""
    tail = died(call(executor, "print_then_exit", 100_000)).output_tail
    assert tail.endswith("line 99999\n")
    assert len(tail) <= OUTPUT_TAIL_BYTES


def test_output_of_an_earlier_call_is_not_attributed_to_a_later_one(executor: Executor) -> None:
    """A death would be explained with what another case printed."""
    call(executor, "write_stdout", 80)
    assert "noise" not in died(call(executor, "os_exit", 1)).output_tail


@pytest.mark.parametrize("num_bytes", [0, 17, 3_000_000])
def test_garbage_on_stdout_does_not_reach_the_channel(executor: Executor, num_bytes: int) -> None:
    """A kernel that prints would garble answers, or block once a pipe is full."""
    assert call(executor, "write_stdout", num_bytes) == "written"
    assert call(executor, "echo", 1) == 1


def test_hang_in_python_times_out_with_its_stack(executor: Executor) -> None:
    """An endless loop would stop the campaign, or its place would stay unknown."""
    pid = executor.pid
    started = time.monotonic()
    outcome = timed_out(call(executor, "spin", timeout_s=0.2))
    assert time.monotonic() - started >= 0.2
    assert outcome.after_s == 0.2
    assert "in spin" in outcome.stack
    assert not outcome.still_alive
    assert_gone(pid)
    assert call(executor, "echo", 1) == 1


def test_runs_of_one_call_have_their_time_each(executor: Executor) -> None:
    """A case whose relation makes many runs of a slow kernel would be told to hang, and pass in a replay."""
    pid = executor.pid
    assert call(executor, "run", (4, 0.75), timeout_s=2.5) == "ran"
    assert executor.pid == pid
    assert isinstance(call(executor, "run", (1, 30.0), timeout_s=0.2), TimedOut)


def test_hang_with_signals_blocked_times_out(executor: Executor) -> None:
    """A process that ignores every signal it can would never be ended."""
    pid = executor.pid
    assert timed_out(call(executor, "block_signals_and_sleep", timeout_s=0.1)).stack == ""
    assert_gone(pid)


def test_stopped_process_that_reads_nothing_times_out(executor: Executor) -> None:
    """Sending a large request to a process that does not read would block the driver for ever."""
    pid = executor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    timed_out(call(executor, "echo", "x" * 4_000_000, timeout_s=0.1))
    assert_gone(pid)


def test_endless_output_times_out(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking in output would starve the time limit."""
    monkeypatch.setattr("attnfuzz.isolation.executor._STACK_WAIT_S", 0.3)  # for its stack, which never comes alone
    timed_out(call(executor, "print_forever", timeout_s=0.2))
    assert call(executor, "echo", 1) == 1


def test_memory_limit_ends_a_process_that_grows(zygote: Zygote) -> None:
    """A kernel that allocates without bound would have the machine's memory."""
    with Executor(zygote, memory_limit_bytes=200 << 20) as executor:
        death = died(call(executor, "grow", 2000))
        assert (death.reason, death.signal_name) == ("memory", "SIGKILL")
        assert call(executor, "grow", 8) == 2


def test_a_kill_from_outside_is_not_charged_to_the_call(executor: Executor, tmp_path: Path) -> None:
    """When the system runs out of memory, a finding would be made of whichever kernel ran."""
    assert call(executor, "kill_itself_at_first", [str(tmp_path / "runs"), 2]) == 3
    assert executor.restarts == 2


def test_a_call_that_is_killed_each_time_is_to_blame(executor: Executor, tmp_path: Path) -> None:
    """A case that has the system run out of memory would be repeated for ever."""
    death = died(call(executor, "kill_itself_at_first", [str(tmp_path / "runs"), 99]))
    assert (death.reason, death.signal_name) == ("signal", "SIGKILL")
    assert (tmp_path / "runs").stat().st_size == 3


@pytest.mark.parametrize("limit", [0, -1])
def test_senseless_memory_limit_is_refused(zygote: Zygote, limit: int) -> None:
    """A limit that kills every executor would look like kernels that eat memory."""
    with pytest.raises(ValueError, match=f"memory_limit_bytes={limit}"):
        Executor(zygote, memory_limit_bytes=limit)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_senseless_timeout_is_refused(executor: Executor, timeout_s: float) -> None:
    """Every call would be a hang."""
    with pytest.raises(ValueError, match="timeout_s="):
        call(executor, "echo", timeout_s=timeout_s)


def test_exception_in_the_service_is_raised_with_its_traceback(executor: Executor) -> None:
    """A bug of the framework would pass for a verdict, or cost an executor."""
    with pytest.raises(ServiceError, match="KeyError: 'which one'"):
        call(executor, "fail", "which one")
    assert call(executor, "echo", 1) == 1
    assert executor.restarts == 0


def test_exit_after_reply_answers_and_replaces_the_process(executor: Executor) -> None:
    """After a sticky CUDA error the verdict would be lost, or the next case would run on a broken context."""
    first = executor.pid
    assert call(executor, "answer_then_exit", "verdict") == "verdict"
    assert_gone(first)
    assert call(executor, "pid") != first
    assert executor.restarts == 1
    assert executor.last_idle_death is None


def test_death_between_calls_is_charged_to_neither(zygote: Zygote, executor: Executor) -> None:
    """A late crash would be reported for an innocent case."""
    pid = executor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSEGV)
    assert_gone(pid)
    with Executor(zygote):  # once this is forked, the zygote has sent the notice of the death
        assert call(executor, "echo", 1) == 1
    assert executor.last_idle_death is not None
    assert executor.last_idle_death.signal_name == "SIGSEGV"


def test_stray_answer_is_ignored(executor: Executor) -> None:
    """What a kernel wrote to the channel would be taken for the answer to a call."""
    frame = b'{"type":"answer","number":999,"body":"wrong"}'
    assert call(executor, "forge", list(len(frame).to_bytes(4, "big") + frame)) == "forged"
    assert call(executor, "echo", "right") == "right"


@pytest.mark.parametrize("frame", [b'{"type":"hello","pid":1}', b'{"type":"answer","body":"wrong"}', b"null"])
def test_stray_message_of_another_kind_is_a_lost_channel(executor: Executor, frame: bytes) -> None:
    """A second greeting, or a message that is none, would crash the driver."""
    assert died(call(executor, "forge", list(len(frame).to_bytes(4, "big") + frame))).reason == "channel"
    assert call(executor, "echo", 1) == 1


def test_restart_gives_a_fresh_process(executor: Executor) -> None:
    """State could not be thrown away on request."""
    first = executor.pid
    executor.restart()
    assert_gone(first)
    assert call(executor, "pid") != first
    assert executor.restarts == 1


def test_closed_executor_refuses_calls(zygote: Zygote) -> None:
    """A closed executor would quietly start processes that nobody ends."""
    executor = Executor(zygote)
    pid = executor.pid
    executor.close()
    assert_gone(pid)
    with pytest.raises(RuntimeError, match="was closed"):
        call(executor, "echo")


@pytest.mark.parametrize("payload", [b"", b"{", b"plain", b"1 2"])
def test_payload_that_is_not_json_is_refused(executor: Executor, payload: bytes) -> None:
    """A caller's mistake would look like a crash of the kernel."""
    with pytest.raises(ValueError, match="must be a JSON document"):
        executor.call("echo", payload, timeout_s=5)
    assert executor.restarts == 0


def test_large_frames_pass_and_too_large_ones_are_refused_both_ways(executor: Executor) -> None:
    """Large answers would be cut, or a runaway one would be read into the driver's memory."""
    assert call(executor, "echo", "x" * (8 << 20)) == "x" * (8 << 20)
    with pytest.raises(FrameError, match="exceeds the limit"):
        call(executor, "echo", "x" * (65 << 20))
    with pytest.raises(ServiceError, match="exceeds the limit"):
        call(executor, "large", 65 << 20)
    assert call(executor, "echo", 1) == 1
    assert executor.restarts == 0


def test_driver_may_be_interrupted_by_signals(executor: Executor) -> None:
    """A timer in the driver would break a call off."""
    ticks = itertools.count()
    previous = signal.signal(signal.SIGALRM, lambda *_: next(ticks))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        assert call(executor, "sleep", 0.2) == "slept"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert next(ticks) > 0


def test_answer_to_an_interrupted_call_is_not_taken_for_the_next(executor: Executor) -> None:
    """After Ctrl-C or the end of the budget, the next case would get the verdict on this one."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    pid = executor.pid
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(executor, "sleep", 1000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert call(executor, "echo", "mine") == "mine"
    assert_gone(pid)


@pytest.mark.parametrize(
    ("status", "name"),
    [(0, None), (255, None), (-signal.SIGSEGV, "SIGSEGV"), (-signal.SIGKILL, "SIGKILL"), (-40, "SIG40")],
)
def test_signals_are_named(status: int, name: str | None) -> None:
    """Reports would show numbers, or an exit code for a signal."""
    assert signal_name(status) == name


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


@pytest.mark.parametrize("method", ["echo", "segfault", "os_exit", "hang", "answer_then_exit"])
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
