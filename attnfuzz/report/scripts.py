"""Which findings a script shows, and how an engine's kernel is followed for one. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case
from attnfuzz.trials.calls import EngineCalls
from attnfuzz.verdict import USUAL_ORACLES

if TYPE_CHECKING:
    from attnfuzz.report.repro import Follow

__all__ = ["following", "why_no_script"]

_BY_ONE_RUN = frozenset({*USUAL_ORACLES, "guard_page"})


def why_no_script(oracle: str) -> str:
    """Why no script shows a finding of ``oracle``, which runs a kernel on the inputs of one case; empty if one does."""
    if oracle in _BY_ONE_RUN:
        return ""
    if oracle == "sanitizer":
        return "a script compares results, which need not show what compute-sanitizer found: replay it with --sanitizer"
    return f"{oracle} compares runs on several inputs, and a script holds only those of the case: use attnfuzz replay"


def following(runner: Runner, declaration: Declaration) -> Follow:
    """How the kernel calls its engine, asked of an executor of ``runner``."""

    def follow(case: Case, launches: bool) -> EngineCalls | None:
        return runner.engine_calls(declaration, case, launches=launches)

    return follow
