"""A problem of a user's file as the rest of an executor sees it: what it does not say follows from what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnfuzz.inputs.allocation import Allocator, PlainAllocator, allocate
from attnfuzz.problems.declared_numerics import FixedTolerance, Tolerance
from attnfuzz.problems.fields import Seed
from attnfuzz.problems.open_cases import OpenCase, ProblemError, implementation_of
from attnfuzz.problems.own import Expected, Problem
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import Supports
from attnfuzz.untrusted_text import text_of, type_name

OWN_TOLERANCES: dict[torch.dtype, FixedTolerance] = {
    torch.float64: FixedTolerance(1e-9, 1e-9),
    torch.float32: FixedTolerance(1e-5, 1e-5),
    torch.float16: FixedTolerance(4e-3, 4e-3),
    torch.bfloat16: FixedTolerance(3e-2, 3e-2),
}
"""For results that a problem gives no bound: about eight roundings to the dtype of numbers near 1, and in float32 what
sums of a few hundred of these lose. Other dtypes are compared bit for bit."""


@dataclass(frozen=True, slots=True)
class Target:
    """The right contents of the result ``name``, and how far each element may be off: float64, on the CPU.

    Where nobody looks, both are 0.
    """

    name: str
    value: Tensor
    bound: Tensor


@dataclass(frozen=True, slots=True)
class OpenValues:
    """Worked out once for a case: what is to come of it by a tolerance, and ``where`` in each result that counts.

    ``written``: by tensor, what the problem writes, and where; all on the host, so that a user's code meets no other
    memory, and runs once whatever is judged. ``origin``: the tensors that the targets are made from.
    """

    targets: Callable[[Tolerance], list[Target]]
    where: Mapping[str, Tensor | None]
    written: Mapping[str, tuple[Tensor, Tensor]]
    origin: tuple[Any, ...] = ()


_LATEST: list[tuple[Problem, OpenCase, OpenValues]] = []
"""Values of the cases that are being judged, the last one first: their runs and all oracles ask for the same."""
_MOST_KEPT = 96
_MOST_KEPT_ELEMENTS = 1 << 24


def values(case: OpenCase, device: torch.device | str, supports: Supports) -> OpenValues:
    """The values of ``case``, equal on every device. Raises ProblemError."""
    del device, supports
    problem = _problem_of(case)
    for known, last, found in _LATEST:
        if known is problem and last == case:
            return found
    tensors = filled(case)
    found = _worked_out(problem, case, tensors, _written(case, tensors))
    _LATEST.insert(0, (problem, case, found))
    room = _MOST_KEPT_ELEMENTS - sum(tensor.numel() for tensor, _ in found.written.values())
    for i, (*_, kept) in enumerate(_LATEST[1:], 1):
        room -= sum(tensor.numel() for tensor, _ in kept.written.values())
        if room < 0 or i == _MOST_KEPT:
            del _LATEST[i:]
            break
    return found


def rearranged(case: OpenCase, values: OpenValues, written: Mapping[str, tuple[Tensor, Tensor]]) -> OpenValues | None:
    """``values`` in other tensors, from which the problem makes the same results; None where it does not."""
    tensors = {name: tensor for name, (tensor, _) in written.items()}
    found = _worked_out(_problem_of(case), case, tensors, written)
    return found if have_same_results(values, found) else None


def asked_again(case: OpenCase, values: OpenValues, written: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Where each result has the same number and bound if the problem is asked about other tensors, and counts.

    Nowhere if the problem cannot answer.
    """
    expected: Mapping[str, Expected] = values.origin[0]
    nowhere = {name: torch.zeros_like(one.value, dtype=torch.bool) for name, one in expected.items()}
    try:
        found = _problem_of(case).reference(case, {name: tensor.clone() for name, (tensor, _) in written.items()})
    except Exception:  # noqa: BLE001 - a reference need not take numbers that it does not write
        return nowhere
    for name, one in expected.items():
        given = found[name]
        other = given if isinstance(given, Expected) else Expected(given)
        same = nowhere[name] = other.value.double() == one.value
        for own, its in ((one.where, other.where), (one.bound, other.bound)):
            if isinstance(own, Tensor) or isinstance(its, Tensor):
                one_of, other_of = (1.0 if part is None else part for part in (own, its))
                same &= torch.eq(*(torch.as_tensor(p, dtype=torch.float64, device="cpu") for p in (one_of, other_of)))
        if one.where is not None:
            same &= one.where
    return nowhere


def have_same_results(one: OpenValues, other: OpenValues) -> bool:
    """Whether both give every number alike, in the same places."""
    pairs = zip(one.origin[0].values(), other.origin[0].values(), strict=True)
    return all(_are_equal(a.value, b.value) and _are_equal(a.where, b.where) for a, b in pairs)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return torch.equal(one, other) if one is not None and other is not None else one is other


def _worked_out(
    problem: Problem, case: OpenCase, tensors: Mapping[str, Tensor], written: Mapping[str, tuple[Tensor, Tensor]]
) -> OpenValues:
    found = _asked(problem.reference, case, {name: tensor.clone() for name, tensor in tensors.items()})
    expected = _checked(case, found)
    bounds = dict(_asked(problem.bound, case, {name: tensor.clone() for name, tensor in tensors.items()}))
    bounds |= {name: one.bound for name, one in expected.items() if one.bound is not None}
    if unknown := set(bounds) - set(expected):
        raise ProblemError(f"{case.problem}.bound: {sorted(unknown)} are no results; these are {', '.join(expected)}")

    def targets(tolerance: Tolerance) -> list[Target]:
        found = []
        for name, one in expected.items():
            value = torch.where(one.where, one.value, 0.0) if one.where is not None else one.value
            bound = _bound(value, tensors[name].dtype, bounds.get(name), tolerance)
            found.append(Target(name, value, bound if one.where is None else torch.where(one.where, bound, 0.0)))
        return found

    counted = {name: one.where for name, one in expected.items()}
    return OpenValues(targets, counted, written, origin=(expected, bounds))


def _written(case: OpenCase, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The tensors as the problem writes them; elements that come out alike over other numbers count as written.

    Raises ProblemError if it writes other numbers at each call.
    """
    before, others = (allocate(case, PlainAllocator("cpu")) for _ in range(2))
    for other in others.values():
        if other.dtype is torch.bool:
            other.logical_not_()
        else:
            _bits(other).bitwise_not_()
    left = {name: _bits(other).clone() for name, other in others.items()}
    _asked(_problem_of(case).write, case, others)
    found = {}
    for name, tensor in tensors.items():
        bits, again = _bits(tensor), _bits(others[name])
        is_written = bits == again
        if not bool((is_written | ((bits == _bits(before[name])) & (again == left[name]))).all()):
            raise ProblemError(
                f"{case.problem}.write gives {name} other numbers at each call, so that no two runs compare; take them "
                "from attnfuzz.numbers, or a torch.Generator with the case's seed"
            )
        found[name] = tensor, is_written
    return found


def filled(case: OpenCase) -> dict[str, Tensor]:
    """All tensors on the host, as the problem writes them."""
    tensors = allocate(case, PlainAllocator("cpu"))
    _asked(_problem_of(case).write, case, tensors)
    return tensors


def build(case: OpenCase, allocator: Allocator, values: OpenValues) -> SimpleNamespace:
    """The inputs, in the memory of ``allocator``."""
    tensors = allocate(case, allocator)
    write(case, tensors, values)
    for name, where in only_changes(case, values).items():
        allocator.only_changes(name, where)
    return inputs(case, tensors)


def write(case: OpenCase, tensors: Mapping[str, Tensor], values: OpenValues, placement: None = None) -> None:
    """Fill in what the problem writes; tensors may have the runs that they are for as an additional first dimension."""
    del case, placement
    for name, tensor in tensors.items():
        value, is_written = (one.to(tensor.device) for one in values.written[name])
        _bits(tensor).copy_(torch.where(is_written, _bits(value), _bits(tensor)))


def only_changes(case: OpenCase, values: OpenValues) -> dict[str, Tensor]:
    """Where tensors that are changed in place may be, as far as not everywhere."""
    return {name: where for name in changed_names(case) if (where := values.where[name]) is not None}


def inputs(case: OpenCase, tensors: Mapping[str, Tensor]) -> SimpleNamespace:
    """The inputs of a kernel: the tensors, and the fields of the case but its seeds."""
    fields = {name: getattr(case, name) for name, kind in case.problem.fields.items() if not isinstance(kind, Seed)}
    return SimpleNamespace(**{**fields, **tensors})


def returned_names(case: OpenCase) -> tuple[str, ...]:
    """The outputs, in the order in which a kernel may return them."""
    return tuple(name for name, spec in tensor_specs(case).items() if spec.role == "output")


def changed_names(case: OpenCase) -> tuple[str, ...]:
    """The tensors that are changed in place."""
    return tuple(name for name, spec in tensor_specs(case).items() if spec.role == "in_place")


def held_before(case: OpenCase, values: OpenValues) -> dict[str, Tensor]:
    """Tensors that are changed in place, as they are before; NaN, or -1, where nobody has written."""
    return {name: values.written[name][0] for name in changed_names(case)}


def owned(case: OpenCase, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """``results`` with 0 in place of the elements that nobody looks at."""
    where = values(case, "cpu", Supports()).where
    return {name: _only(result, where[name]) for name, result in results.items()}


def axes(case: OpenCase, name: str) -> tuple[str, ...]:
    """Names of the dimensions of a tensor."""
    spec = tensor_specs(case)[name]
    named = spec.axes[: len(spec.shape)]
    return (*named, *(f"axis {i} =" for i in range(len(named), len(spec.shape))))


def dead_words(case: OpenCase, supports: Supports, row: int) -> list[str]:
    """Sentences that hold for each element."""
    del supports, row
    return [f"what must not matter here: whatever {case.problem}.write leaves out, and what lies around the tensors"]


def where_is(case: OpenCase, name: str, index: tuple[int, ...]) -> str:
    """The problem's words for an element."""
    if name not in tensor_specs(case):  # a workspace
        return ""
    try:
        return str(_problem_of(case).where_is(case, name, index))
    except Exception as error:  # noqa: BLE001 - a finding is not lost to its words
        return f"({case.problem}.where_is raised {type_name(error)}: {text_of(error)})"


def _problem_of(case: OpenCase) -> Problem:
    problem = implementation_of(case.problem)
    if not isinstance(problem, Problem):
        raise ProblemError(f"{case.problem.place} has not been imported here; load a kernel of it first")
    return problem


def _asked(method: Callable[..., Any], case: OpenCase, tensors: dict[str, Tensor]) -> Any:
    """The answer of a user's ``method``. Raises ProblemError."""
    try:
        return method(case, tensors)
    except (ProblemError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ProblemError.raised(method.__name__, case, error) from error


def _only(result: Tensor, where: Tensor | None) -> Tensor:
    if where is None:
        return result
    return _bits(result).masked_fill(~where.to(result.device), 0).view(result.dtype)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _checked(case: OpenCase, found: Mapping[str, Tensor | Expected]) -> dict[str, Expected]:
    place = f"{case.problem}.reference"
    specs = {name: spec for name, spec in tensor_specs(case).items() if spec.role != "input"}
    if not specs:
        raise ProblemError(f'{case.problem}.tensors: nothing is "output" or "in_place"; name what is computed')
    if set(found) != set(specs):
        raise ProblemError(f"{place}: gives {sorted(found)}; the results are {sorted(specs)}")
    checked = {}
    for name, spec in specs.items():
        given = found[name]
        one = given if isinstance(given, Expected) else Expected(given)
        if not isinstance(one.value, Tensor) or not isinstance(one.where, Tensor | None):
            raise ProblemError(f"{place}: {name} is {given!r:.80}; it must be a tensor, or an attnfuzz.Expected of two")
        one = replace(one, value=one.value.to("cpu"), where=None if one.where is None else one.where.to("cpu"))
        for part in (one.value, *(() if one.where is None else (one.where,))):
            if tuple(part.shape) != spec.shape:
                raise ProblemError(f"{place}: {name} has shape {tuple(part.shape)}; the tensor has {spec.shape}")
        if one.where is not None and one.where.dtype is not torch.bool:
            raise ProblemError(f"{place}: where of {name} is {one.where.dtype}; it must be bool")
        value = one.value.double()
        if bool((value.isnan() if one.where is None else value.isnan() & one.where).any()):
            raise ProblemError(
                f"{place}: {name} holds NaN, which is what dead memory holds; write all that the reference reads"
            )
        checked[name] = replace(one, value=value)
    return checked


def _bound(value: Tensor, dtype: torch.dtype, own: Tensor | float | None, tolerance: Tolerance) -> Tensor:
    if isinstance(tolerance, FixedTolerance):
        found: Any = tolerance.bound(value)
    elif own is not None:
        found = torch.as_tensor(own, dtype=torch.float64, device="cpu").expand_as(value)
    else:
        usual = OWN_TOLERANCES.get(dtype)
        found = torch.zeros_like(value) if usual is None else usual.bound(value)
    return torch.as_tensor(found, dtype=torch.float64, device="cpu").expand_as(value)
