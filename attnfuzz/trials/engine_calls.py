"""How an adapter calls its engine on a case, as lines of Python: what stands in a script is the engine's own function.

The adapter runs, with the parts of the engine that it needs replaced by ones that note what they are given and pass it
on. Not every adapter can be followed so: one that gives an engine objects of its own making is not.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attnfuzz.declaration import EnginePlan, Kernel
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.arena import Arena
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.trials.as_code import definitions, number_text, packed_together, placed
from attnfuzz.trials.observation import call_options
from attnfuzz.trials.script_part import ScriptPart


class NotFollowed(Exception):  # noqa: N818 - says what happened
    """The adapter cannot be written as calls of its engine; the message is a sentence."""


def engine_calls(kernel: Kernel, case: Case, *, device: str, launches: bool) -> ScriptPart:
    """The calls of ``kernel``, which an adapter makes, on ``case``. Raises NotFollowed.

    Unless it ``launches``, the last call is not made: it would end this process.
    """
    plan = kernel.engine_plan
    if plan is None:
        raise NotFollowed("the kernel is no engine's")
    values = problem_of(case).values(case, device, kernel.declaration.supports)
    arena = Arena(device, poison="nan", prefill="nan", capacity=tensor_nbytes(case))
    inputs = problem_of(case).build(case, arena, kernel.declaration.supports, values)
    notes = _Notes(plan, _tensors_of(inputs), launches=launches)
    results: list[Any] = []
    with _filled_with_nan(), contextlib.suppress(_Stopped):
        returned = plan.function(inputs, **notes.parts, **call_options(kernel, case))
        notes.is_planned = True
        if callable(returned):
            returned = returned()
        outputs = problem_of(case).results or problem_of(case).returned_names(case, kernel.declaration.supports)
        parts = list(returned) if isinstance(returned, tuple | list) else [returned]
        given = [getattr(inputs, name) for name in outputs]  # which hold what is not returned
        results = [other if one is None else one for one, other in zip(parts, given, strict=False)]
    return notes.calls(results)


class _Stopped(BaseException):
    """The call that was noted last raised, or is not to be made."""


@contextlib.contextmanager
def _filled_with_nan() -> Iterator[None]:
    """Workspaces that nobody has written to hold NaN, as they do in the script."""
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)


def _tensors_of(inputs: Any) -> dict[str, Tensor]:
    names = getattr(inputs, "__dataclass_fields__", None) or vars(inputs)  # of a user's problem, a namespace
    return {name: value for name in names if isinstance(value := getattr(inputs, name), Tensor)}


class _Notes:
    """The calls so far, and the tensors that were given, as they were at their first call."""

    def __init__(self, plan: EnginePlan, inputs: Mapping[str, Tensor], *, launches: bool) -> None:
        self.is_planned = False
        self._launches = launches
        self._known = dict(inputs)
        self._held: dict[str, Tensor] = {}
        self._imports: dict[str, None] = {}
        self._lines: list[str] = []
        self._objects = 0
        self._after: dict[str, Tensor] = {}
        modules = {place.partition(":")[0] for place, _ in plan.needs.values()}
        self._interpreted = any(hasattr(sys.modules.get(name), "triton") for name in modules)
        self.parts = {name: self._part(place, value) for name, (place, value) in plan.needs.items()}

    def _part(self, place: str, value: Any) -> Any:
        """The stand-in for a part of the engine."""
        if callable(value) and not isinstance(value, type):
            return _Function(self, place, value)
        if isinstance(value, type) and not issubclass(value, enum.Enum) and not hasattr(value, "__enter__"):
            return _Class(self, place, value)
        return value

    def called(self, text: str, function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Note a call of ``function``, which is ``text`` in a script, and make it."""
        self._check_that_only_calls_write()
        names = _parameters(function)
        given = [self._text(one, names[i] if i < len(names) else "") for i, one in enumerate(arguments)]
        given += [f"{name}={self._text(one, name)}" for name, one in named.items()]
        line = f"{text}({', '.join(given)})"
        self._lines.append(line)
        if not self._launches and self.is_planned:
            raise _Stopped
        bare = [one.made if isinstance(one, _Made) else one for one in arguments]
        try:
            result = function(*bare, **{k: v.made if isinstance(v, _Made) else v for k, v in named.items()})
        except Exception as error:
            raise _Stopped from error
        self._after = {name: _copy_of(self._known[name]) for name in self._held}
        named_result, told = self._named(result)
        if named_result:
            self._lines[-1] = f"{named_result} = {line}"
        return told

    def _check_that_only_calls_write(self) -> None:
        """Raise where an adapter itself writes to tensors that the engine has got: that is no call of the engine."""
        for name, after in self._after.items():
            if not torch.equal(_bytes_of(after), _bytes_of(_copy_of(self._known[name]))):
                raise NotFollowed(f"the adapter itself changes {name} after a call")

    def _named(self, result: Any) -> tuple[str, Any]:
        """The name of a result, and what stands in for it."""
        if result is None:
            return "", None
        if isinstance(result, Tensor):
            return self._new("result", result), result
        if (
            isinstance(result, tuple | list)
            and result
            and all(isinstance(one, Tensor) or one is None for one in result)
        ):
            names = ["_" if one is None else self._new("result", one) for one in result]
            return f"{', '.join(names)}{',' if len(names) == 1 else ''}", result
        self._objects += 1
        name = f"made{self._objects}"
        return name, _Made(self, name, result)

    def import_of(self, place: str) -> str:
        """The name of what lies at ``place``, which is imported."""
        module, _, attribute = place.partition(":")
        first = attribute.partition(".")[0]
        self._imports[f"from {module} import {first}"] = None
        return attribute

    def _new(self, wanted: str, tensor: Tensor) -> str:
        """The name of a tensor that a call made; one that it was given keeps its own."""
        if (known := next((name for name, one in self._known.items() if _are_same(one, tensor)), None)) is not None:
            return known
        name = self._free(wanted)
        self._known[name] = tensor
        self._held.setdefault(name, tensor.new_empty(0))  # it is made by the call
        return name

    def _free(self, wanted: str) -> str:
        names = [wanted, *(f"{wanted}{i}" for i in range(2, 1000))]
        return next(name for name in names if name not in self._known)

    def _text(self, value: Any, parameter: str) -> str:
        match value:
            case _Made():
                return value.name
            case Tensor():
                return self._tensor(value, parameter)
            case enum.Enum():
                kind = type(value)
                return f"{self.import_of(f'{kind.__module__}:{kind.__qualname__}')}.{value.name}"
            case None | bool() | int() | str() | torch.dtype():
                return str(value) if not isinstance(value, str) else repr(value)
            case float():
                return number_text(value)
            case torch.device():
                return "DEVICE"
            case tuple() | list():
                parts = ", ".join(self._text(one, parameter) for one in value)
                return f"[{parts}]" if isinstance(value, list) else f"({parts}{',' if len(value) == 1 else ''})"
        raise NotFollowed(f"a {type(value).__name__} is passed to the engine")

    def _tensor(self, tensor: Tensor, parameter: str) -> str:
        for name, known in self._known.items():
            if _are_same(known, tensor):
                self._hold(name)
                return name
        for name, known in self._known.items():
            if _lies_in(tensor, known):
                self._hold(name)
                return placed(tensor, name, known)
        name = self._free(parameter or "tensor")
        self._known[name] = tensor
        self._hold(name)
        return name

    def _hold(self, name: str) -> None:
        if name not in self._held:
            self._held[name] = _copy_of(self._known[name])

    def calls(self, results: list[Any]) -> ScriptPart:
        """All of it, with the ``results`` that the kernel gave."""
        self._check_that_only_calls_write()
        told = []
        for one in results:
            names = [name for name in self._held if isinstance(one, Tensor) and _lies_in(one, self._known[name])]
            if not names:
                raise NotFollowed("a result is none that the engine was given, or returned")
            told.append(placed(one, names[0], self._known[names[0]]))
        given = {name: held for name, held in self._held.items() if held.numel() or not self._known[name].numel()}
        return ScriptPart(
            imports=tuple(self._imports),
            tensors=tuple(definitions(given)),
            together=packed_together(given),
            names=tuple(given),
            calls=tuple(self._lines),
            results=tuple(told),
            interpreted=self._interpreted,
        )


class _Function:
    """A function of the engine."""

    def __init__(self, notes: _Notes, place: str, function: Any) -> None:
        self._notes, self._place, self._function = notes, place, function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._notes.called(self._notes.import_of(self._place), self._function, arguments, named)


class _Class(_Function):
    """A class of the engine: what is made of it is noted like a function's result."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


class _Made:
    """An object that the engine made, ``name`` in a script: calls of its methods are noted."""

    def __init__(self, notes: _Notes, name: str, made: Any) -> None:
        self._notes, self.name, self.made = notes, name, made

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.made, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            return self._notes.called(f"{self.name}.{name}", found, arguments, named)

        return call


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of an operator in C++
        return []


def _are_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.numel() > 0 and (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())
    )


def _lies_in(tensor: Tensor, known: Tensor) -> bool:
    if not tensor.numel() or not known.numel():
        return False
    first, last = known.data_ptr(), known.data_ptr() + _nbytes(known)
    return first <= tensor.data_ptr() and tensor.data_ptr() + _nbytes(tensor) <= last


def _nbytes(tensor: Tensor) -> int:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span * tensor.element_size()


def _copy_of(tensor: Tensor) -> Tensor:
    """As it is now, on the host, with what lies between its elements."""
    if not tensor.numel():
        return tensor.cpu()
    span = _nbytes(tensor) // tensor.element_size()
    memory = tensor.as_strided((span,), (1,), tensor.storage_offset()).cpu().clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def _bytes_of(copy: Tensor) -> Tensor:
    """Bytes of a tensor that `_copy_of` made, with what lies between its elements."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(copy.untyped_storage())
