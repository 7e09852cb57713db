"""What of all that is there takes part. Torch-free."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from attnfuzz.bench.kernels.shapes import PROBLEMS_OF, Shape
from attnfuzz.bench.kernels.suites import SUITES
from attnfuzz.declaration import Declaration, KernelLoadError

__all__ = ["choose_kernels", "choose_shapes"]


def choose_kernels(declarations: Sequence[Declaration], *, named: bool) -> list[Declaration]:
    """Those with a problem that is timed; if the user ``named`` none, only what can be captured into a CUDA graph.

    Raises KernelLoadError if none is left.
    """
    timed = {problem for problems in PROBLEMS_OF.values() for problem in problems}
    chosen = [one for one in declarations if one.problem in timed and (named or one.supports.graph_replay)]
    if not chosen:
        names = ", ".join(one.target for one in declarations)
        raise KernelLoadError(f"of {names} none can be timed; name kernels of {', '.join(sorted(timed))}")
    return chosen


def choose_shapes(suites: Sequence[str], patterns: Sequence[str]) -> dict[str, list[Shape]]:
    """The shapes of ``suites`` whose label fits one of ``patterns``, or all. Raises KernelLoadError if none does."""
    found = {name: SUITES[name]() for name in suites}
    if not patterns:
        return found
    labels = [shape.label for shapes in found.values() for shape in shapes]
    kept = {
        name: [shape for shape in shapes if any(fnmatch.fnmatchcase(shape.label, one) for one in patterns)]
        for name, shapes in found.items()
    }
    if not any(kept.values()):
        raise KernelLoadError(f"--shape {' '.join(patterns)}: no shape has such a label; there are {', '.join(labels)}")
    return {name: shapes for name, shapes in kept.items() if shapes}
