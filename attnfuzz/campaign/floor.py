"""How many cases a kernel must have been judged on before "nothing found" says something of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attnfuzz.campaign.statistics import KernelStatistics
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import CASE_TYPES
from attnfuzz.problems.choices import dtypes_of, head_sizes_of, layouts_of, options_of
from attnfuzz.problems.open_cases import OpenProblem

_LEAST = 4
_MOST = 16
"""A kernel that names hundreds of sizes is told of what they have in common by fewer cases."""
_MOST_SENTENCES = 3
_ROOM = 1.5
"""By which a budget that would do exceeds the time for as many cases: not all of it goes into cases."""


def floor_of(declaration: Declaration) -> int:
    """As many as a round of its formats takes: with fewer, some dtype, layout, head size or option did not occur."""
    supports = declaration.supports
    counts = [len(choices) for choices in options_of(supports, declaration.options).values()]
    if not isinstance(declaration.problem, OpenProblem):
        dtypes = dtypes_of(supports)
        counts += [len(dtypes), len(head_sizes_of(supports, dtypes[0]))]
        if "block_table" in CASE_TYPES[declaration.problem].tensor_names:
            counts.append(len(layouts_of(supports)))
    return min(_MOST, max([_LEAST, *counts]))


@dataclass(frozen=True, slots=True)
class TooFew:
    """A kernel that was judged on ``cases``, fewer than ``floor``, of ``case_s`` each; ``budget_s`` would do."""

    target: str
    cases: int
    floor: int
    case_s: float
    budget_s: float

    def __str__(self) -> str:
        cases = "1 case was" if self.cases == 1 else f"{self.cases} cases were"
        return (
            f"only {cases} judged of {self.target}, and a round of its formats takes {self.floor}; a case takes "
            f"{format_duration(self.case_s)} here: --budget {math.ceil(self.budget_s)}s would do"
        )


def sentences_of(kernels: Sequence[TooFew]) -> tuple[str, ...]:
    """Sentences about ``kernels``: each by itself, or many in one sentence."""
    if len(kernels) <= _MOST_SENTENCES:
        return tuple(map(str, kernels))
    names = ", ".join(f"{one.target} {one.cases} of {one.floor}" for one in kernels)
    budget_s = math.ceil(max(one.budget_s for one in kernels))
    return (
        f"{len(kernels)} kernels were judged on fewer cases than a round of their formats takes ({names}): "
        f"--budget {budget_s}s would do",
    )


def too_few(kernel: KernelStatistics, *, budget_s: float) -> TooFew | None:
    """A sentence on a kernel that was judged on too few cases within ``budget_s``; None if there were enough."""
    floor = floor_of(kernel.declaration)
    if not 0 < kernel.cases < floor:
        return None
    case_s = kernel.seconds / kernel.cases
    needed_s = _ROOM * max(floor * case_s, budget_s * floor / kernel.cases if math.isfinite(budget_s) else 0.0)
    return TooFew(kernel.declaration.target, kernel.cases, floor, case_s, needed_s)
