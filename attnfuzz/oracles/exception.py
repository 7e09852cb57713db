"""Exceptions on a supported case, results that cannot be any, and CUDA errors that leave the process unusable."""

import os
from collections.abc import Iterator, Sequence

import msgspec
import torch

from attnfuzz.environment import interpreter_problem
from attnfuzz.mistake import LSE_TRANSPOSED
from attnfuzz.oracles import registry
from attnfuzz.oracles.registry import OracleName
from attnfuzz.trials.observation import KernelRaised, ResultError, TransposedError
from attnfuzz.triton_compat.interpreter_limits import interpreter_limit_of
from attnfuzz.untrusted_text import Frame, cause_of, code_line, gpu_error_in, kernel_frames, places, text_of, type_name
from attnfuzz.verdict import RESULT, Cause, Failure, SourceLine, Verdict

_WRAPPERS = ("InterpreterError", "CompilationError", "CompileTimeAssertionFailure")
"""Triton's exceptions around the one that says what happened."""

_SHOWN_FRAME_WAITED = "CUDA reports errors late: the line shown may only have waited for the kernel that failed"
_NO_FRAME = "CUDA reports errors late: run with CUDA_LAUNCH_BLOCKING=1 to see the launch that fails"
_MAX_FRAMES = 8
_MAX_LINES = 20


class EnvironmentProblem(RuntimeError):  # noqa: N818 - a condition with a remedy, not a kernel's error
    """The installed libraries cannot run kernels of this kind; the message says which and what to do."""


def verdict(raised: KernelRaised, oracles: Sequence[OracleName]) -> Verdict:
    """The verdict on an exception. A lost CUDA context is a crash, whatever the kernel raised.

    What only Triton's interpreter cannot do is nobody's failure: the case is then ``not_runnable``.

    That is fatal whether asked for or not, and so is memory that ran out: the kernel may still hold it. Raises
    `EnvironmentProblem`.
    """
    error = raised.error
    if raised.is_a(ResultError):
        causes = (Cause(mistake=LSE_TRANSPOSED),) if raised.is_a(TransposedError) else ()
        failure = Failure(oracle=registry.EXCEPTION.name, kind=RESULT, message=text_of(error), causes=causes)
        return Verdict(failure=failure if registry.EXCEPTION.name in oracles else None, fatal=raised.fatal)
    what = context_lost(error)
    if what is not None:
        return Verdict(failure=_crash(what, error) if registry.CRASH.name in oracles else None, fatal=True)
    # Triton's interpreter fails in any kernel where it does not go with the installed NumPy.
    if type_name(error) == "InterpreterError" and (problem := interpreter_problem()) is not None:
        raise EnvironmentProblem(problem) from error
    if limit := interpreter_limit(error):
        return Verdict(not_runnable=limit)
    fatal = raised.fatal or raised.is_a(torch.OutOfMemoryError)
    return Verdict(failure=_failure(error) if registry.EXCEPTION.name in oracles else None, fatal=fatal)


def raised_outside(error: BaseException) -> Failure | None:
    """The exception of code under test that was not called: a signal handler or a hook; None if it was not its."""
    if not _kernel_frames(error):
        return None
    failure = _failure(error)
    return msgspec.structs.replace(
        failure,
        kind=RESULT,  # no refusal of the case
        message=f"{failure.message} outside of its call, from a timer, a signal handler or a hook that it left behind",
    )


def left_error(error: BaseException) -> Failure | None:
    """The crash that an ``error`` of attnfuzz's own work on a GPU comes of; None while the CUDA context is intact.

    A kernel that writes far past its tensors can overwrite the code of others: what runs next ends in an illegal
    instruction, after the kernel has returned.
    """
    what = context_lost(error)
    return None if what is None else _crash(what, error)


def interpreter_limit(error: BaseException) -> str:
    """The limit of Triton's interpreter that made the kernel raise, in words; empty if there is another reason."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return ""
    *_, cause = _chain(error)
    lacking = interpreter_limit_of(cause)
    return f"Triton's interpreter cannot run this kernel: {lacking}" if lacking else ""


def _failure(error: BaseException) -> Failure:
    *_, cause = _chain(error)
    name = type_name(cause)
    frames = _kernel_frames(error)
    said = text_of(cause)
    first = _first_line(said)
    if not first and frames and issubclass(type(cause), AssertionError):
        first = code_line(frames[-1].path, frames[-1].line)
    message = f"the kernel raised {name}" + (f": {first}" if first else "")
    kind = name
    if frames:
        kind = f"{name} in {frames[-1].function}"
        message += f" ({frames[-1].position})"
    details = [*_shown(frames), *(line for line in said.strip().splitlines()[1 : _MAX_LINES + 1] if line.strip())]
    if cause is not error:
        details.append(f"raised inside Triton as {type_name(error)}")
    at = SourceLine.at(frames[-1].path, frames[-1].line) if frames else None
    return Failure(oracle=registry.EXCEPTION.name, kind=kind, message=message, details=tuple(details), raised_at=at)


def _crash(what: str, error: BaseException) -> Failure:
    frames = _kernel_frames(error)
    return Failure(
        oracle=registry.CRASH.name,
        kind=f"cuda:{what}",
        message=f"the kernel left a CUDA error: {what}",
        details=(*_shown(frames), _SHOWN_FRAME_WAITED if frames else _NO_FRAME),
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and, in turn, what Triton's wrappers were put around; the last is what happened."""
    yield error
    while type_name(error) in _WRAPPERS and (cause := cause_of(error)) is not None:
        error = cause
        yield error


def _kernel_frames(error: BaseException) -> list[Frame]:
    """Frames of the code under test, outermost first."""
    return kernel_frames(place for part in _chain(error) for place in places(part))


def _shown(frames: Sequence[Frame]) -> Iterator[str]:
    yield from (frame.with_source() for frame in frames[-_MAX_FRAMES:])


def _first_line(said: str) -> str:
    return next((line.strip() for line in said.splitlines() if line.strip()), "")


def _cuda_error(error: BaseException) -> str:
    """The CUDA error in a few words: "illegal memory access"; empty if it is no error of CUDA's."""
    return gpu_error_in(text_of(error)) if issubclass(type(error), RuntimeError) else ""


def context_lost(error: BaseException) -> str | None:
    """The CUDA error that outlives the call; None if the context is intact, one launch merely refused.

    What was raised does not tell: a kernel may wrap CUDA's error, or raise while a faulty launch is still under way.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        return _cuda_error(error) or _cuda_error(lost) or _first_line(text_of(lost))
    return None
