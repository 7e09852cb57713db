"""The end of an executor as a failure of the kernel that ran in it. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attnfuzz.internal_errors import gpu_memory_ran_out
from attnfuzz.isolation.memory_faults import GuardedRegion, MemoryFault
from attnfuzz.isolation.outcomes import Died, TimedOut
from attnfuzz.oracles.registry import CRASH, HANG
from attnfuzz.problems.wording import plural, shape_of
from attnfuzz.untrusted_text import Frame, author_of, gpu_error_in, kernel_frames
from attnfuzz.verdict import Failure, SourceLine

_PAST_TENSE = {"read": "read", "write": "wrote"}


def guard_failure(
    fault: MemoryFault, place: str, details: tuple[str, ...], sources: tuple[SourceLine, ...] = ()
) -> Failure | None:
    """The failure if ``fault`` is in the unmapped memory beside a tensor; None if it is anywhere else.

    ``place`` is where the kernel was, as in " at file.py:3, in load"; ``sources`` is the line of the access, if known.
    """
    region = next((region for region in fault.regions if region.low <= fault.address < region.high), None)
    if region is None:
        return None
    side, elements = _distance(region, fault.address)
    end = "end" if side == "past" else "start"
    message = (
        f"the kernel {_PAST_TENSE[fault.access]} {side} {region.name} ({shape_of(region.dtype, region.shape)}): "
        f"{plural(elements, 'element')} ({plural(elements * region.itemsize, 'byte')}) {side} its {end}{place}"
    )
    return Failure(
        oracle=region.oracle,
        kind=f"{fault.access} {side} {region.name}",
        message=message,
        details=details,
        tensor=region.name,
        sources=sources,
    )


def _distance(region: GuardedRegion, address: int) -> tuple[str, int]:
    """Which side of the tensor, and which element from its edge: 1 for the neighbour of its first or last one."""
    if address >= region.end:
        return "past", (address - region.end) // region.itemsize + 1
    return "before", -((address - region.start) // region.itemsize)


_FRAME = re.compile(r'^ +File "(?P<path>[^"\n]*)", line (?P<line>[1-9][0-9]{0,8}) in (?P<function>.*)$', re.MULTILINE)
_WAIT_FOR_GPU = re.compile(r'^ +File "[^"]*[/\\]torch[/\\]cuda[/\\][^"]*", line \d+ in synchronize$', re.MULTILINE)
_INTERPRETER = re.compile(r"[/\\]triton[/\\]runtime[/\\]interpreter\.py$")
_FAULTS = ("SIGSEGV", "SIGBUS")
_MAX_LINES = 24


def failure_of(outcome: Died | TimedOut) -> Failure:
    """The failure that tells an engineer how the process ended, and where the kernel was."""
    if isinstance(outcome, TimedOut):
        return _hang(outcome)
    frames = _kernel_frames(outcome.output_tail)
    place = f" at {frames[0]}" if frames else ""
    access = _frame_of_access(outcome)
    sources = () if access is None else (SourceLine.at(access.path, access.line),)
    callers = [frame for frame in frames if frame != access]
    if outcome.fault is not None:
        details = tuple(frame.with_source() for frame in callers[:_MAX_LINES])
        guarded = guard_failure(outcome.fault, place, details, sources)
        if guarded is not None:
            return guarded
    return Failure(
        oracle=CRASH.name,
        kind=_kind(outcome),
        message=_cause_of_death(outcome) + place,
        details=tuple(map(str, callers[:_MAX_LINES])) if frames else _tail(outcome.output_tail),
        sources=sources,
    )


def _hang(outcome: TimedOut) -> Failure:
    message = f"the kernel did not finish within {outcome.after_s:.3g} s"
    details = _tail(outcome.stack)
    if frames := _kernel_frames(outcome.stack):
        message += f"; it was at {frames[0]}"
        details = tuple(map(str, frames))
    elif _WAIT_FOR_GPU.search(outcome.stack):
        message += "; what it launched still runs on the GPU"
        details = ()
    return Failure(oracle=HANG.name, kind="timeout", message=message, details=details)


def _lost_gpu(died: Died) -> str:
    """The message of CUDA before torch ended the process; empty if that is not how it ended.

    torch raises the error where it meets it, or, if that is where nothing can be raised, aborts: which of these it is
    depends on how far the GPU is by then, so both have the same name.
    """
    is_torchs = died.signal_name == "SIGABRT" and not gpu_memory_ran_out(died.output_tail)
    return gpu_error_in(died.output_tail) if is_torchs else ""


def _kind(died: Died) -> str:
    if lost := _lost_gpu(died):
        return f"cuda:{lost}"
    if died.reason in ("memory", "children", "channel", "zygote"):
        return died.reason
    return died.signal_name or f"exit {died.exit_status}"


def _cause_of_death(died: Died) -> str:
    if lost := _lost_gpu(died):
        return f"the kernel left a CUDA error: {lost}"
    if died.reason == "memory":
        return "the kernel's process outgrew its memory limit"
    if died.reason == "children":
        return "the processes that the kernel started took almost all of the machine's free memory"
    if died.reason == "channel":
        return "the kernel closed or overwrote file descriptors that are not its own"
    if died.reason == "zygote":
        return "the process that kernels are forked from was killed or stopped each time the kernel ran"
    if died.signal_name == "SIGKILL":
        return "the kernel's process was killed with SIGKILL (the system may have run out of memory)"
    if died.signal_name is not None:
        return f"the kernel's process died of {died.signal_name}"
    return f"the kernel ended its process with exit status {died.exit_status}"


def _kernel_frames(stack: str) -> list[Frame]:
    """Frames of the code under test, innermost first, as faulthandler writes them."""
    return kernel_frames(_frames(stack))


def _frames(stack: str) -> Iterator[Frame]:
    for match in _FRAME.finditer(stack):
        yield Frame(match["path"], int(match["line"]), match["function"])


def _frame_of_access(died: Died) -> Frame | None:
    """The line that a process died at which Triton's interpreter ran; of what is compiled, Python knows only the call.

    Whoever wrote it: what a team's own code calls of an engine is the engine's.
    """
    frames = list(_frames(died.output_tail))
    if died.signal_name not in _FAULTS or not frames or not _INTERPRETER.search(frames[0].path):
        return None
    return next((frame for frame in frames if author_of(frame.path) in ("project", "installed")), None)


def _tail(output: str) -> tuple[str, ...]:
    return tuple(line for line in output.splitlines() if line.strip())[-_MAX_LINES:]
