"""Which findings a script shows, and who tells what it holds of an engine's kernel, or of a problem of a user's.
Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from attnfuzz.declaration import Declaration
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import SANITIZER, oracle_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.trials.script_part import ScriptPart

Follow = Callable[[Case, bool], ScriptPart | None]
"""A function that makes a script's part about a case, see `Runner.script_part`."""


def why_no_script(oracle: str) -> str:
    """Why no script shows a finding of ``oracle``; empty if one does, which runs a kernel on the inputs of one case."""
    found = oracle_of(oracle)
    if found.shows_in_a_script:
        return ""
    if found.is_own:
        return f"{oracle} is an oracle of the kernel's own file, and a script compares results: use attnfuzz replay"
    if found is SANITIZER:
        return "a script compares results, which need not show what compute-sanitizer found: replay it with --sanitizer"
    return f"{oracle} compares runs on several inputs, and a script holds only those of the case: use attnfuzz replay"


class Following:
    """Asks executors of a ``runner``; of one that is started for ``device`` when it is first needed.

    A context manager, which ends what it has started.
    """

    def __init__(self, device: str, runner: Runner | None = None) -> None:
        self._device = device
        self._runner = runner
        self._started: Runner | None = None

    def of(self, declaration: Declaration) -> Follow | None:
        """The function that makes a script's part; None where the driver knows that, or nothing can be run."""
        if not declaration.calls and not isinstance(declaration.problem, OpenProblem):
            return None
        try:
            runner = self._runner or self._start()
        except ExecutorUnavailable:  # the adapter's source tells the same, in more lines
            return None
        return lambda case, launches: runner.script_part(declaration, case, launches=launches)

    def _start(self) -> Runner:
        if self._started is None:
            self._started = Runner(device=self._device)
        return self._started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._started is not None:
            self._started.close()
