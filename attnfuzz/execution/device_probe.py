"""Whether a GPU still answers a fresh process. Torch-free."""

from attnfuzz.execution.executor import Executor
from attnfuzz.execution.faults import failure_of
from attnfuzz.execution.judge_messages import DeviceReply
from attnfuzz.execution.likely_device import Device
from attnfuzz.execution.outcomes import ExecutorUnavailable, Reply
from attnfuzz.execution.watchdog import was_killed_from_outside

__all__ = ["why_no_answer"]

_PROBES = 2
_MOST_KILLED = 10
"""Calls that ended because something kills processes. An executor begins each of them three times."""


def why_no_answer(executor: Executor, device: Device, *, patience_s: float) -> str | None:
    """Why ``device`` does not answer within ``patience_s``; None if it does.

    A process that something killed says nothing about the device, so another one is asked. Raises
    `ExecutorUnavailable` if that goes on.
    """
    why, silent, killed = "", 0, 0
    while silent < _PROBES:
        outcome = executor.call("device", b"{}", timeout_s=patience_s)
        if isinstance(outcome, Reply):
            reply = outcome.read(DeviceReply)
            if reply is not None and reply.device == device:
                return None
            why = "torch does not find it"
        else:
            why = failure_of(outcome).message
            if was_killed_from_outside(outcome):
                killed += 1
                if killed == _MOST_KILLED:
                    raise ExecutorUnavailable(
                        f"something kills every process that starts to use the {device} device ({why}); look for what "
                        "does (out of memory?), or take fewer workers"
                    )
                continue
        silent += 1
    return why
