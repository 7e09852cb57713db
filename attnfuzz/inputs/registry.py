"""From a case to what is known of its problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnfuzz.inputs import open_module
from attnfuzz.inputs.allocation import Allocator
from attnfuzz.problems.module import Case, ProblemModule, module_of
from attnfuzz.problems.module import Contents as Contents
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.supports import Supports


class _OpenModule(ProblemModule):
    """A user's problem writes its inputs itself."""

    results = ()
    values = staticmethod(open_module.values)
    inputs = staticmethod(open_module.inputs)
    changed_names = staticmethod(open_module.changed_names)
    held_before = staticmethod(open_module.held_before)
    owned = staticmethod(open_module.owned)
    axes = staticmethod(open_module.axes)
    dead_words = staticmethod(open_module.dead_words)
    where_is = staticmethod(open_module.where_is)
    targets = staticmethod(lambda values, tolerance: values.targets(tolerance))
    only_changes = staticmethod(open_module.only_changes)
    write = staticmethod(open_module.write)

    def returned_names(self, case: Any, supports: Supports) -> tuple[str, ...]:
        del supports
        return open_module.returned_names(case)

    def contents(self, cases: Sequence[Any], device: torch.device | str, supports: Supports) -> list[Contents]:
        return [Contents(self.values(case, device, supports), None) for case in cases]

    def build(self, case: Any, allocator: Allocator, supports: Supports, values: Any = None) -> Any:
        return open_module.build(case, allocator, values or self.values(case, allocator.device, supports))

    def filled(self, case: Any, supports: Supports) -> dict[str, Tensor]:
        del supports
        return open_module.filled(case)


_OPEN = _OpenModule()


def problem_of(case: Case) -> ProblemModule:
    """The problem of ``case``, with all that is known of it."""
    return _OPEN if isinstance(case, OpenCase) else module_of(case.problem)
