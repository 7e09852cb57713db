"""Bundled problems: each is a `ProblemModule` in a file of its own, and how it is found by its name. Torch-free.

Such a file names its case type, what kernels get and the facets of its fields, and computes the rest in methods, as an
`attnfuzz.Problem` does; torch is imported where these run. `attnfuzz.problems.cases` lists all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from attnfuzz.problems.attention import CaseBase, VarlenCase
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.supports import Layout, Supports

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnfuzz.problems.shapes import TensorSpec

Problem = str | OpenProblem
"""A bundled problem by its name, or one that a user's file defines, described."""
Case = CaseBase | OpenCase

_LIST = "attnfuzz.problems.cases"
"""What imports the files of all bundled problems."""

CASE_TYPES: dict[Problem, type[CaseBase]] = {}
"""Those of bundled problems, by name, once `_LIST` has been imported."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a case's tensors: the logical values, and where they go (None where that goes without saying)."""

    values: Any
    placement: Any


class ProblemModule:
    """All that is said of one problem beside its case type: its tensors, their contents, and how cases are drawn.

    ``inputs_type`` is the dataclass that kernels get, ``facets`` say all of the fields of a case, in the order in which
    shrinking goes through them. ``results`` names the two output tensors, out first. ``targets(values, tolerance)``:
    what the results are to hold, where the problem says that itself; None where bounds are derived
    (`attnfuzz.trials.expectations`). ``only_changes(values)``: of tensors that are changed in place, where they may be.
    ``seqs_of(case, row)``: the sequences that a row belongs to; None where results have no rows with heads.
    """

    case_type: ClassVar[type[CaseBase]]
    inputs_type: ClassVar[type]
    facets: ClassVar[tuple[Any, ...]] = ()
    results: ClassVar[tuple[str, ...]] = ("out", "lse")
    targets: ClassVar[Any] = None
    only_changes: ClassVar[Any] = staticmethod(lambda case, values: {})
    seqs_of: ClassVar[Any] = None

    # Without torch

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """All tensors of ``case`` by name, in the order in which they are allocated."""
        raise NotImplementedError

    def nbytes(self, case: Any) -> int:
        """Bytes beside those of the tensors: logical values, lists, and work of the reference and the error bound."""
        raise NotImplementedError

    def simplest_fields(self, supports: Supports, head_size: int, layout: Layout | None) -> dict[str, Any] | None:
        """The fields of the simplest case beside its format; None where ``supports`` leaves none."""
        raise NotImplementedError

    def draw(self, decisions: Any, plan: Any) -> CaseBase:
        """A case within ``plan`` (`attnfuzz.strategies.cases.Plan`)."""
        raise NotImplementedError

    def told_otherwise(self, case: Any, supports: Supports) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Other values of what is told to a kernel beside its tensors, in words, which leave the shapes as they are."""
        return ()

    def other_contents(self, case: Any, supports: Supports) -> Sequence[tuple[CaseBase, str]]:
        """With the same strides and the same numbers beside the tensors, other numbers in these."""
        return ()

    def as_supported(self, fields: dict[str, Any], supports: Supports) -> list[str]:
        """Change ``fields`` of another kernel's case to those that mean the same here; says in words what changed."""
        return []

    def axes(self, case: Any, name: str) -> tuple[str, ...]:
        """Names of the dimensions of a result."""
        raise NotImplementedError

    def dead_words(self, case: Any, supports: Supports, row: int) -> list[str]:
        """Which memory must not matter to a row."""
        raise NotImplementedError

    def length_words(self, case: Any, row: int) -> list[str]:
        """How much there is to a row."""
        return []

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """Words for where an element is; empty for nothing to say."""
        return ""

    def returned_names(self, case: Any, supports: Supports) -> tuple[str, ...]:
        """The results that a kernel may return, in this order, or write: the output alone where it declares no LSE."""
        return self.results if supports.lse != "none" else self.results[:1]

    def changed_names(self, case: Any) -> tuple[str, ...]:
        """The inputs that a kernel changes in place."""
        return ()

    # With torch

    def contents(self, cases: Sequence[Any], device: torch.device | str, supports: Supports) -> list[Contents]:
        """The contents of the tensors of each of ``cases``."""
        raise NotImplementedError

    def values(self, case: Any, device: torch.device | str, supports: Supports) -> Any:
        """The logical values of ``case``."""
        (contents,) = self.contents([case], device, supports)
        return contents.values

    def placements(self, cases: Sequence[Any], device: torch.device | str) -> Sequence[Any]:
        """Where the values of each of ``cases`` go."""
        return [None] * len(cases)

    def write(self, case: Any, tensors: dict[str, Tensor], values: Any, placement: Any) -> None:
        """Write the live elements; each tensor has the runs that it is written for as an additional first dimension."""
        raise NotImplementedError

    def inputs(self, case: Any, tensors: dict[str, Tensor]) -> Any:
        """The inputs that the kernel gets: ``tensors``, and the case's own fields, by the names of `inputs_type`."""
        numbers = self.numbers(case)
        others = {name: numbers.get(name, getattr(case, name, None)) for name in self.inputs_type.__annotations__}
        return self.inputs_type(**{name: value for name, value in others.items() if value is not None} | tensors)

    def numbers(self, case: Any) -> dict[str, Any]:
        """Inputs that `inputs_type` may name and that are neither a tensor nor, by that name, a field of ``case``."""
        return {}

    def reference(self, case: Any, values: Any) -> Any:
        """The exact result (`attnfuzz.inputs.reference.ExactResult`)."""
        raise NotImplementedError

    def logical_result(self, case: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The results of a kernel (LSE already natural) in the axes of the reference."""
        return out.double(), lse.double()

    def owned(self, case: Any, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """``results`` without what nobody looks at."""
        return results

    def held_before(self, case: Any, values: Any) -> Mapping[str, Tensor]:
        """The numbers that inputs which are changed in place hold until then."""
        return {}

    def build(self, case: Any, allocator: Any, supports: Supports, values: Any = None) -> Any:
        """Inputs of ``case`` in memory of ``allocator``; ``values`` saves drawing the numbers again."""
        from attnfuzz.inputs.allocation import allocate

        device = allocator.device
        tensors = allocate(case, allocator)
        one_run = {name: tensor[None] for name, tensor in tensors.items()}
        self.write(case, one_run, values or self.values(case, device, supports), *self.placements([case], device))
        return self.inputs(case, tensors)

    def filled(self, case: Any, supports: Supports) -> dict[str, Tensor]:
        """All tensors of ``case`` on the host, by name, with what a kernel may read; dead elements are NaN, or -1."""
        from attnfuzz.inputs.allocation import PlainAllocator, allocate

        (contents,) = self.contents([case], "cpu", supports)
        tensors = allocate(case, PlainAllocator("cpu"))
        one_run = {name: tensor[None] for name, tensor in tensors.items()}
        self.write(case, one_run, contents.values, contents.placement)
        return tensors


_MODULES: dict[Problem, ProblemModule] = {}
M = TypeVar("M", bound=ProblemModule)


def bundled(module: type[M]) -> type[M]:
    """Let the problem that ``module`` is of be found by its name."""
    CASE_TYPES[module.case_type.problem] = module.case_type
    _MODULES[module.case_type.problem] = module()
    return module


def module_of(problem: Problem) -> ProblemModule:
    """The module of a bundled problem."""
    if problem not in _MODULES:
        importlib.import_module(_LIST)
    if problem not in _MODULES:
        raise ValueError(f"problem={problem!r} must be one of {', '.join(map(str, _MODULES))}")
    return _MODULES[problem]


def case_type_of(problem: Problem) -> type[Case]:
    """The type of the cases of ``problem``."""
    if isinstance(problem, OpenProblem):
        return problem.case_type
    if problem not in _MODULES:
        importlib.import_module(_LIST)
    return CASE_TYPES[problem]


def has_query_lens(problem: Problem) -> bool:
    """Whether sequences of its cases have any number of query tokens."""
    return issubclass(case_type_of(problem), VarlenCase)
