"""From reports to findings: in words what the kernel did."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import CRASH, EXCEPTION, HANG, SANITIZER
from attnfuzz.problems.cases import Case
from attnfuzz.problems.wording import plural
from attnfuzz.sanitizer.report import SanitizerReport
from attnfuzz.sanitizer.running import Note, Outcome, Sanitizer, TensorBytes, Tool
from attnfuzz.verdict import Failure

_SHOWN_LINES = 12
_NEAR_BYTES = 1 << 20
_WHERE_TO_LOOK = {
    "memcheck": "the first access outside any allocation; each tensor was an allocation of its own",
    "racecheck": "two accesses to shared memory, of which one writes, without a barrier between them",
    "initcheck": "memory that nothing has written: a result, or what the kernel allocated itself",
    "synccheck": "a barrier that not all threads reach that must",
}


def judge_sanitized(
    sanitizer: Sanitizer, declaration: Declaration, case: Case, preceding: Sequence[Case] = ()
) -> Failure | None:
    """The tool's objections to `case`, or to those of `preceding`, which run before it."""
    return failure_of(sanitizer.run(declaration, [*preceding, case]), sanitizer.tool)


def failure_of(outcome: Outcome, tool: Tool) -> Failure | None:
    """None for a process in which nothing was wrong."""
    if outcome.reports:
        return _reported(outcome.reports, outcome.notes, tool)
    if outcome.unread:
        return Failure(
            oracle=SANITIZER.name,
            kind=f"{tool}: another report",
            message=f"{tool} objects: {outcome.unread[0]}",
            details=tuple(outcome.unread[1:_SHOWN_LINES]),
        )
    if outcome.raised is not None:
        raised = outcome.raised
        return Failure(
            oracle=EXCEPTION.name, kind=raised.kind, message=f"the kernel raised {raised.kind}: {raised.raised}"
        )
    if outcome.status is None:
        return Failure(oracle=HANG.name, kind=HANG.name, message=f"the kernel did not come back under {tool}")
    if outcome.status:
        said = tuple(outcome.output.splitlines()[-_SHOWN_LINES:])
        message = f"the process ended with status {outcome.status} under {tool}"
        return Failure(oracle=CRASH.name, kind=f"exit {outcome.status}", message=message, details=said)
    return None


def _reported(reports: Sequence[SanitizerReport], notes: Sequence[Note], tool: Tool) -> Failure:
    first = reports[0]
    tensors = [place for note in notes for place in note.tensors]
    others = len(reports) - 1
    more = (f"and {plural(others, 'more report')} of this run",) if others else ()
    return Failure(
        oracle=SANITIZER.name,
        kind=f"{tool}: {first.what}",
        message=" ".join(filter(None, (first.what, _where(first), _by_whom(first), _at(first, tensors)))),
        details=(*first.lines[:_SHOWN_LINES], *more, _WHERE_TO_LOOK[tool]),
    )


def _where(report: SanitizerReport) -> str:
    source = f" ({report.source})" if report.source else ""
    return f"in {report.kernel}{source}" if report.kernel else ""


def _by_whom(report: SanitizerReport) -> str:
    return f"by thread ({report.thread}) of block ({report.block})" if report.thread else ""


def _at(report: SanitizerReport, tensors: Sequence[TensorBytes]) -> str:
    if report.address is None:
        return ""
    near = _nearest(report.address, tensors)
    state = f", which is {report.state}" if report.state else ""
    return f"at {report.address:#x}{state}" + (f": {near}" if near else "")


def _nearest(address: int, tensors: Sequence[TensorBytes]) -> str:
    """Where an address lies, seen from the tensor that is nearest; later cases count first, theirs is the memory."""
    distances = [(_distance(address, place), place) for place in reversed(tensors) if place.nbytes]
    distance, place = min(distances, key=lambda found: abs(found[0]), default=(_NEAR_BYTES, None))
    if place is None or abs(distance) >= _NEAR_BYTES:
        return ""
    if not distance:
        return f"{plural(address - place.start, 'byte')} into {place.name}"
    return f"{plural(abs(distance), 'byte')} {'past the end' if distance > 0 else 'before the start'} of {place.name}"


def _distance(address: int, place: TensorBytes) -> int:
    """Bytes past the last one of a tensor (1 is the first of them), or below 0 before its start."""
    if address < place.start:
        return address - place.start
    return max(0, address - (place.start + place.nbytes) + 1)
