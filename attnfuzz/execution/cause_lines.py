"""The lines of a kernel that a rounding comes from, known from one run of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from attnfuzz.declaration import Kernel
from attnfuzz.execution import interpreter_operations
from attnfuzz.explaining import torch_operations
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.explaining.operations import Operation, Operations, SourcePlace, places_of
from attnfuzz.explaining.reruns import Reruns
from attnfuzz.explaining.ttir import operations_of_ttir
from attnfuzz.judging.observation import KernelRaised
from attnfuzz.oracles.verdict import SourceLine
from attnfuzz.problems.cases import Case
from attnfuzz.said import code_line, text_of, type_name

__all__ = ["cause_lines"]


def cause_lines(
    kernel: Kernel, case: Case, replays: Sequence[str], *, device: str, compiled: Iterable[str] = ()
) -> Explanation:
    """The lines at which ``kernel`` makes one of the roundings ``replays``, as `sources`; none if they are not known.

    ``compiled``: files with the TTIR of what Triton has compiled or found compiled, looked at after the run. A finding
    is not lost to a fault in here: the fault is what is told then.
    """
    try:
        found = _recorded(kernel, case, device)
        for launch, file in enumerate(dict.fromkeys(compiled), 1):
            with contextlib.suppress(OSError):  # somebody has cleared the cache
                found += operations_of_ttir(Path(file).read_text(encoding="utf-8"), launch)
        return Explanation(sources=tuple(map(_line, places_of(replays, Operations(found)))))
    except KernelRaised:
        return Explanation()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return Explanation(lines=(f"(attnfuzz could not look for the line: {type_name(error)}: {text_of(error)})",))


def _recorded(kernel: Kernel, case: Case, device: str) -> list[Operation]:
    """What torch and Triton's interpreter compute in a run."""
    reruns = Reruns(kernel, case, device=device, is_over=lambda: False)
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules
    with contextlib.ExitStack() as recording:
        parts = [recording.enter_context(torch_operations.recorded())]
        if is_interpreted:
            parts.append(recording.enter_context(interpreter_operations.recorded()))
        reruns.run()
    return [one for part in parts for one in part]


def _line(place: SourcePlace) -> SourceLine:
    file, line = place
    return SourceLine(file=_shortest(file), line=line, text=code_line(file, line))


def _shortest(file: str) -> str:
    """Relative to the working directory, or else to the innermost folder of the module path that it lies in."""
    path = Path(file)
    folders = [Path.cwd(), *sorted({Path(folder) for folder in sys.path if folder}, key=lambda one: -len(one.parts))]
    folder = next((one for one in folders if path.is_relative_to(one)), None)
    return file if folder is None else str(path.relative_to(folder))
