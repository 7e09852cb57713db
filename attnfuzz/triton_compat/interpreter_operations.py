"""Writes down what Triton's interpreter computes, and at which lines of the kernel: for one run, not for cases.

Each operation of a kernel is a method of the interpreter's builder, whose operands and results are handles; while
`recorded` is under way, a handle knows which operation it came of. An operation that a loop, or another program of the
grid, does again is the same one: what comes out is the graph of the kernel, not of its run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

from attnfuzz.explaining.operations import Kind, Operation, Recording, SourcePlace, first_of_users
from attnfuzz.triton_compat.patching import replaced, takes

Method = Callable[..., Any]

_KINDS: dict[str, Kind] = {
    "fadd": "add", "fsub": "add", "fmul": "mul", "fdiv": "div", "precise_divf": "div", "fma": "add", "dot": "dot",
    "exp": "exp", "exp2": "exp", "log": "log", "log2": "log", "fp_to_fp": "convert", "fp_trunc": "convert",
    "fp_ext": "convert", "si_to_fp": "argument", "ui_to_fp": "argument", "minimumf": "max", "minnumf": "max",
    "maximumf": "max", "maxnumf": "max", "select": "move", "reshape": "move", "trans": "move", "expand_dims": "move",
    "broadcast": "move", "splat": "move", "unsplat": "move", "cat": "move", "join": "move", "split": "move",
    "gather": "move",
}  # fmt: skip
"""By the name of the builder's method, ``create_`` left out."""
_FORMATS = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2", "fp8e4b8": "float8", "fp8e4b15": "float8", "fp8e5b16": "float8",
}  # fmt: skip
_SUMMED, _COMPARED = {"fadd"}, {"maximumf", "maxnumf", "minimumf", "minnumf"}
_CREATE = "create_"
_OPERATION = "attnfuzz_operation"
_FIRST_POINTER = 1
"""Operands of a store from here on are what is stored, and masks."""


@contextlib.contextmanager
def recorded() -> Iterator[list[Operation]]:
    """Fill a list with the operations of kernels that are interpreted meanwhile; with none, for an unknown Triton."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not _is_known(interpreter):
        yield []
        return
    recorder = _Recorder(interpreter)
    builder = vars(interpreter)["InterpreterBuilder"]
    methods = {name: method for name, method in vars(builder).items() if name.startswith(_CREATE)}
    with contextlib.ExitStack() as stack:
        wrapped = {name: recorder.operation(method, name.removeprefix(_CREATE)) for name, method in methods.items()}
        stack.enter_context(replaced(builder, wrapped))
        for kind in (vars(interpreter)[name] for name in ("ReduceOps", "ScanOps")):
            stack.enter_context(replaced(kind, {"apply": recorder.reduction(kind.apply)}))
        launch = vars(interpreter)["GridExecutor"]
        stack.enter_context(replaced(launch, {"__call__": recorder.launch(launch.__call__)}))
        yield recorder.recording.operations


def _is_known(interpreter: ModuleType) -> bool:
    names = ("InterpreterBuilder", "GridExecutor", "TensorHandle", "ReduceOps", "ScanOps")
    if not all(inspect.isclass(getattr(interpreter, name, None)) for name in names):
        return False
    builder, launch, handle, *reductions = (vars(interpreter)[name] for name in names)
    methods = ("fmul", "fadd", "exp", "dot", "load", "masked_load", "store", "fp_to_fp", "select")
    if not all(callable(getattr(builder, f"{_CREATE}{name}", None)) for name in methods):
        return False
    if list(inspect.signature(handle).parameters)[:2] != ["data", "dtype"] or hasattr(handle, "__slots__"):
        return False
    if not all(takes(one.apply, "self", "input") for one in reductions):
        return False
    return isinstance(getattr(inspect.unwrap(launch.__call__), "__code__", None), CodeType)


class _Recorder:
    """Wraps what computes. Methods that others call on the way are part of those."""

    def __init__(self, interpreter: ModuleType) -> None:
        self._handle = vars(interpreter)["TensorHandle"]
        self._launching = inspect.unwrap(vars(interpreter)["GridExecutor"].__call__).__code__
        self._sum = getattr(importlib.import_module("triton.language").standard, "_sum_combine", None)
        self.recording = Recording()
        self._launches = 0
        self._within: list[str] | None = None
        """Methods that have run within the one that is under way."""

    def launch(self, method: Method) -> Method:
        @functools.wraps(method)
        def recording(*args: Any, **kwargs: Any) -> Any:
            self._launches += 1
            return method(*args, **kwargs)

        return recording

    def operation(self, method: Method, name: str) -> Method:
        is_store = "store" in name or "atomic" in name
        kind: Kind = "store" if is_store else "load" if "load" in name else _KINDS.get(name, "other")

        @functools.wraps(method)
        def recording(*args: Any, **kwargs: Any) -> Any:
            if self._within is not None:
                self._within.append(name)
                return method(*args, **kwargs)
            self._within = []
            try:
                result = method(*args, **kwargs)
            finally:
                self._within = None
            given = args[1:] if kind != "load" else ()
            if is_store:
                self._write_down("store", "float32", given[_FIRST_POINTER:])
            for one in result if isinstance(result, tuple | list) else (result,):
                self._mark(one, kind, given)
            return result

        return recording

    def reduction(self, method: Method) -> Method:
        @functools.wraps(method)
        def recording(reduction: Any, given: Any) -> Any:
            if self._within is not None:
                return method(reduction, given)
            self._within = []
            try:
                result = method(reduction, given)
                inner = set(self._within)
            finally:
                self._within = None
            is_sum = getattr(reduction, "combine_fn", None) is self._sum or inner & _SUMMED
            is_other = inner and not inner & _COMPARED
            kind: Kind = "sum" if is_sum else "other" if is_other else "max"
            operands = [one.handle for one in (given if isinstance(given, tuple) else (given,))]
            for one in result if isinstance(result, tuple) else (result,):
                self._mark(one.handle, kind, operands)
            return result

        return recording

    def _mark(self, result: Any, kind: Kind, given: Any) -> None:
        """Have a result, if it is of floating-point numbers, know what made it. Some methods return their operand."""
        dtype = self._format_of(result)
        if dtype and not any(one is result for one in given):
            setattr(result, _OPERATION, self._write_down(kind, dtype, given))

    def _write_down(self, kind: Kind, dtype: str, given: Any) -> Operation:
        place, calls = self._where()
        operands = [self._maker_of(one) for one in given if self._format_of(one)]
        return self.recording.add(kind, dtype, operands, calls=calls, place=place, launch=self._launches)

    def _maker_of(self, handle: Any) -> Operation:
        """The operation that made a handle; else it is a number of the kernel's call, or a constant."""
        made: Operation | None = getattr(handle, _OPERATION, None)
        return self.recording.add("argument", self._format_of(handle)) if made is None else made

    def _format_of(self, handle: Any) -> str:
        """The format of its numbers; empty unless they are floating-point ones."""
        if not isinstance(handle, self._handle):
            return ""
        return _FORMATS.get(getattr(getattr(handle.dtype, "scalar", None), "name", ""), "")

    def _where(self) -> tuple[SourcePlace | None, object]:
        """The innermost line that is not Triton's own, and all calls on the way from the launch to here."""
        frame: FrameType | None = sys._getframe(1)
        calls: list[tuple[str, int, int]] = []
        while frame is not None and frame.f_code is not self._launching:
            if frame.f_code.co_filename != __file__:
                calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti))
            frame = frame.f_back
        return first_of_users((file, line) for file, line, _ in calls), tuple(calls)
