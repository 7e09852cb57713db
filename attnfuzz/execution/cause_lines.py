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
from attnfuzz.explaining.cause_lines import places_of
from attnfuzz.explaining.operations import Operation, Operations, SourcePlace
from attnfuzz.explaining.rig import Rig
from attnfuzz.explaining.ttir import operations_of_ttir
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.verdict import SourceLine
from attnfuzz.problems.cases import Case
from attnfuzz.said import code_line

__all__ = ["cause_lines"]


def cause_lines(
    kernel: Kernel, case: Case, replays: Sequence[str], *, device: str, compiled: Iterable[str] = ()
) -> tuple[SourceLine, ...]:
    """The lines at which ``kernel`` makes one of the roundings ``replays``; none where that is not known.

    ``compiled``: files with the TTIR of what Triton has compiled or found compiled, looked at after the run.
    """
    rig = Rig(kernel, case, device=device, is_over=lambda: False)
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules
    found: list[Operation] = []
    try:
        with contextlib.ExitStack() as recording:
            recorders = (torch_operations, interpreter_operations) if is_interpreted else (torch_operations,)
            parts = [recording.enter_context(recorder.recorded()) for recorder in recorders]
            rig.run()
    except KernelRaised:
        return ()
    found += [one for part in parts for one in part]
    for launch, file in enumerate(dict.fromkeys(compiled), 1):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # a cache that somebody has cleared
            found += operations_of_ttir(Path(file).read_text(encoding="utf-8"), launch)
    return tuple(map(_line, places_of(replays, Operations(found))))


def _line(place: SourcePlace) -> SourceLine:
    file, line = place
    return SourceLine(file=_shortest(file), line=line, text=code_line(file, line))


def _shortest(file: str) -> str:
    """Relative to the working directory, or else to the innermost folder of the module path that it lies in."""
    path = Path(file)
    folders = [Path.cwd(), *sorted({Path(folder) for folder in sys.path if folder}, key=lambda one: -len(one.parts))]
    folder = next((one for one in folders if path.is_relative_to(one)), None)
    return file if folder is None else str(path.relative_to(folder))
