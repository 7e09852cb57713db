"""A run's results against the float64 reference, element by element, and which elements are concerned, in words."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.open_module import Target
from attnfuzz.inputs.reference import ExactResult
from attnfuzz.inputs.registry import problem_of
from attnfuzz.numerics import Bound, error_ratio
from attnfuzz.problems.cases import Case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.problems.wording import element, numbers, ranges
from attnfuzz.trials.checksums import checksum
from attnfuzz.trials.expectations import Expectation, expectations, on_device
from attnfuzz.values.tokens import values_on
from attnfuzz.verdict import Blame


def axes_of(name: str, case: Case) -> tuple[str, ...]:
    """Names of the dimensions of the result `name`, in the order in which a kernel returns it."""
    return problem_of(case).axes(case, name)


def place_of(case: Case, name: str, index: tuple[int, ...]) -> tuple[str, ...]:
    """A line on what an element is, if the problem has a word for it."""
    words = problem_of(case).where_is(case, name, index)
    return (words,) if words else ()


def first_index(mask: Bool[Tensor, "*shape"]) -> tuple[int, ...]:
    """The first true element, in row-major order."""
    return tuple(int(i) for i in mask.nonzero()[0])


def extent(name: str, axes: Sequence[str], mask: Bool[Tensor, "*shape"]) -> str:
    """`6 of 96 elements of out (seq 0, head 1-2, dim 0-2)`."""
    where = ", ".join(
        f"{axis} {ranges(hit.tolist())}" for axis, hit in zip(axes, mask.nonzero().unbind(-1), strict=True)
    )
    return f"{int(mask.sum())} of {mask.numel()} elements of {name} ({where})"


def blame_of(case: Case, axes: Sequence[str], index: Sequence[int]) -> Blame:
    """The row that one element of a result belongs to, and its sequence; nothing where results have no such rows."""
    seqs_of = problem_of(case).seqs_of
    if seqs_of is None:
        return Blame()
    at = dict(zip(axes, index, strict=True))
    row = at.get("seq", at.get("token", 0))
    return Blame(rows=((row, at["head"]),), seqs=seqs_of(case, row))


def differing(
    name: str,
    axes: Sequence[str],
    mask: Bool[Tensor, "*shape"],
    one: Shaped[Tensor, "*shape"],
    other: Shaped[Tensor, "*shape"],
) -> tuple[str, str, str, tuple[int, ...]]:
    """The first differing element by name, its two values, and its index."""
    index = first_index(mask)
    return element(name, axes, index), *numbers(float(one[index]), float(other[index])), index


_LAUNCH_IN_ELEMENTS = 100_000
"""Elements that a CPU core processes in the time in which a GPU is told what to do."""


@dataclass(frozen=True)
class Comparison:
    """One result beside what it should be. `axes` name the dimensions in messages; LSEs are natural logarithms."""

    name: str
    axes: tuple[str, ...]
    got: Float[Tensor, "*shape"]
    expected: Float64[Tensor, "*shape"]
    bound: Float64[Tensor, "*shape"]

    @cached_property
    def ratio(self) -> Float64[Tensor, "*shape"]:
        """Error over bound; above 1 is a failure."""
        return error_ratio(self.got, self.expected, self.bound)


class Reference:
    """Logical values, expected result and bound of a case, each computed once and not before it is needed."""

    def __init__(
        self, declaration: Declaration, case: Case, *, device: str, tolerance: Tolerance, values: Any = None
    ) -> None:
        """`values`: those on `device`, if not those that are drawn for the case."""
        if values is not None:
            self.values = values
        self.declaration = declaration
        self.case = case
        self.device = device
        self.tolerance = tolerance
        self.seconds = 0.0

    @cached_property
    def values(self) -> Any:
        """`LogicalAttention`, or `LogicalStates` of a merge."""
        return problem_of(self.case).values(self.case, self.device, self.declaration.supports)

    @cached_property
    def values_on_cpu(self) -> Any:
        """`values`, for looking at single rows."""
        return self.values_on("cpu")

    def values_on(self, device: str) -> Any:
        """`values` in the memory of `device`."""
        return values_on(self.values, device)

    def checksum(self) -> int:
        """Checksum of all tensors that have been computed so far."""
        return checksum(vars(self).get(name) for name in ("values", "values_on_cpu", "expectation", "targets"))

    @property
    def expected(self) -> ExactResult:
        """The exact result in float64."""
        return self.expectation.expected

    @property
    def bound(self) -> Bound:
        """How far each element may be off."""
        return self.expectation.bound

    @cached_property
    def expectation(self) -> Expectation:
        """Both, in the memory of `device`."""
        started = time.perf_counter()
        values = self.values if self.case.work > _LAUNCH_IN_ELEMENTS else self.values_on_cpu
        request = (self.declaration, self.case, values)
        (found,) = expectations([request], tolerance=self.tolerance, one_copy=self.device == "cpu")
        self.seconds += time.perf_counter() - started
        return on_device(found, self.device)

    @cached_property
    def targets(self) -> list[Target] | None:
        """The targets that the problem sets for its results, in the memory of `device`; None where it sets none."""
        targets = problem_of(self.case).targets
        if targets is None:
            return None
        return [
            Target(one.name, one.value.to(self.device), one.bound.to(self.device))
            for one in targets(self.values, self.tolerance)
        ]


def compare(reference: Reference, results: Mapping[str, Shaped[Tensor, "..."]]) -> list[Comparison]:
    """Every part of `results` that has a right value: the logical result, and partial states that must be empty."""
    case = reference.case
    if reference.targets is not None:
        return [
            Comparison(one.name, axes_of(one.name, case), results[one.name].double(), one.value, one.bound)
            for one in reference.targets
        ]
    expected, bound = reference.expected, reference.bound
    out, *rest = results.values()
    lse = natural_lse(reference.declaration, rest[0]) if rest else None
    got_out, got_lse = problem_of(case).logical_result(case, out, expected.lse if lse is None else lse)
    rows = axes_of("out", case)[0]
    found = [Comparison("out", (rows, "head", "dim"), got_out, expected.out, bound.out)]
    if lse is not None:
        found.append(Comparison("lse", (rows, "head"), got_lse, expected.lse, bound.lse))
        if case.partial_states:
            found += _empty_partials(case, out, lse)
    return found


def natural_lse(declaration: Declaration, lse: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """The LSE that a kernel returned, in natural logarithms."""
    return lse.double() * (math.log(2) if declaration.supports.lse == "base2" else 1.0)


def _empty_partials(case: Any, out: Tensor, lse: Tensor) -> list[Comparison]:
    """An empty sequence leaves 0 and -inf in every split; what lies beside an LSE of -inf must be a number.

    All else is as it came out: any state is right that is merged to the right result.
    """
    empty = (torch.tensor(case.seq_lens, dtype=torch.int64, device=lse.device) == 0).view(-1, 1, 1).expand_as(lse)
    given = lse.nan_to_num(0.0, posinf=0.0, neginf=-torch.inf)
    outs = out.double()
    unused = lse.isneginf().unsqueeze(-1).expand_as(out)
    should_be = torch.where(unused & empty.unsqueeze(-1), 0.0, outs.nan_to_num(0.0, posinf=0.0, neginf=0.0))
    zeros = torch.zeros_like(should_be)
    return [
        Comparison(
            "partial_lse",
            ("seq", "head", "split"),
            torch.where(empty, lse, given),
            given.masked_fill(empty, -torch.inf).double(),
            zeros[..., 0],
        ),
        Comparison(
            "partial_out", ("seq", "head", "split", "dim"), torch.where(unused, outs, should_be), should_be, zeros
        ),
    ]
