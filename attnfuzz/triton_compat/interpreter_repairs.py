"""Repairs of the arithmetic of Triton's interpreter.

Without them, kernels that are right on a GPU look wrong on a CPU (Triton 3.6 to 3.9):

* It keeps bfloat16 as 16-bit integers and computes with those: `x * y`, `tl.dot(x, y)` and `tl.sum(x)` give noise.
  Here they are widened to float32, and results that are bfloat16 again are rounded to nearest, ties to even.
* Its conversion of float32 to bfloat16 drops bits, twice the error of the compiler's, which rounds to nearest; that of
  integers and of float64 gives noise, and that of subnormal numbers back to float32 other numbers. All are repaired
  but `fp_downcast_rounding="rtz"`, which asks for dropped bits.
* The result of a comparison is marked with the type of what was compared, so that combining a block mask with a
  scalar comparison, `mask & (lse > float("-inf"))`, raises a TypeError. Here it is a boolean.
* It reads NaN and infinity of an 8-bit format as numbers, so that dead memory of such a cache would not be NaN, and the
  smallest numbers of float8_e5m2 wrongly when it makes float16 of them, as `tl.dot` does. Rounding to such a format, it
  loses the carry into the exponent, and what is too large becomes anything. Here it is rounded to nearest, ties to
  even, up to the largest finite number, as PTX does (`cvt.rn.satfinite`).
* It has no constants of bfloat16: `x + 2.5` and `tl.full(shape, 1.0, tl.bfloat16)` end in an AttributeError. Here they
  are rounded to nearest, as the compiler does.
* It takes an integer below 2^31 for 32 bits, even where the kernel's signature says `stride: tl.int64`, so that offsets
  wrap that do not on a GPU. Here it has the type that the signature gives it.
* NumPy warns of `inf - inf` and of maxima of NaN, which is an exception where warnings are errors. A GPU goes on.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from attnfuzz.triton_compat.patching import takes

Method = Callable[..., Any]

_ARITHMETIC = (
    "fadd", "fsub", "fmul", "fdiv", "frem", "precise_divf", "minimumf", "minnumf", "maximumf", "maxnumf", "fma",
    "clampf", "fabs",
)  # fmt: skip
_FLOAT_COMPARISONS = tuple(f"fcmp{order}{test}" for order in "OU" for test in ("LT", "GT", "LE", "GE", "EQ", "NE"))
_CASTS = ("si_to_fp", "ui_to_fp", "fp_trunc", "fp_ext")
_INTEGERS = {f"{sign}{bits}": np.dtype(f"{sign}{bits // 8}") for sign in "iu" for bits in (8, 16, 32, 64)}
"""Types of integers, as Triton's compiler and as NumPy call them."""
_INT_COMPARISONS = ("icmpEQ", "icmpNE", *(f"icmp{sign}{test}" for sign in "SU" for test in ("LT", "GT", "LE", "GE")))


def install_repairs() -> bool:
    """Repair the interpreter of this process; False, changing nothing, for a Triton that is built differently."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = getattr(interpreter, "InterpreterBuilder", None)
    if getattr(builder, "attnfuzz_repaired", False):
        return True
    if not inspect.isclass(builder) or not _is_known(interpreter, builder):
        return False
    repairs = _Repairs(interpreter)
    for names, repair in (
        (_ARITHMETIC, repairs.arithmetic),
        (_FLOAT_COMPARISONS, repairs.comparison),
        (_INT_COMPARISONS, repairs.comparison),
        (("dot",), repairs.dot),
        (("fp_to_fp",), repairs.conversion),
        (_CASTS, repairs.cast),
    ):
        for name in names:
            setattr(builder, f"create_{name}", repair(vars(builder)[f"create_{name}"]))
    if not hasattr(builder, "get_bf16"):
        vars(interpreter)["InterpreterBuilder"].get_bf16 = repairs.constant
    reductions = vars(interpreter)["ReduceOps"]
    reductions.sum = repairs.sum(vars(reductions)["sum"])
    launch = vars(interpreter)["GridExecutor"]
    launch.__call__ = _without_warnings(vars(launch)["__call__"])
    launch._init_args_hst = repairs.arguments(vars(launch)["_init_args_hst"])
    vars(interpreter)["_implicit_cvt"] = repairs.argument(vars(interpreter)["_implicit_cvt"])
    vars(interpreter)["InterpreterBuilder"].attnfuzz_repaired = True
    return True


def _without_warnings(method: Method) -> Method:
    @functools.wraps(method)
    def repaired(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
            return method(*args, **kwargs)

    return repaired


def _is_known(interpreter: ModuleType, builder: type) -> bool:
    names = (*_ARITHMETIC, *_FLOAT_COMPARISONS, *_INT_COMPARISONS, "dot", "fp_to_fp", *_CASTS)
    handle = getattr(interpreter, "TensorHandle", None)
    if not inspect.isclass(handle) or not all(callable(vars(builder).get(f"create_{name}")) for name in names):
        return False
    reductions, launch = (getattr(interpreter, name, None) for name in ("ReduceOps", "GridExecutor"))
    known = (
        (reductions, "sum", ("self", "input")),
        (launch, "_init_args_hst", ("self", "args_dev", "kwargs")),
        (interpreter, "_implicit_cvt", ("arg",)),
        (builder, "create_fp_to_fp", ("self", "src", "dst_type", "rounding_mode")),
        *((builder, f"create_{name}", ("self", "src", "dst_type")) for name in _CASTS),
    )
    if not all(takes(vars(owner or object).get(name), *parameters) for owner, name, parameters in known):
        return False
    if not callable(getattr(importlib.import_module("triton.runtime.jit"), "_normalize_ty", None)):
        return False
    dot = list(inspect.signature(vars(builder)["create_dot"]).parameters)
    return list(inspect.signature(handle).parameters)[:2] == ["data", "dtype"] and dot[:4] == ["self", "a", "b", "d"]


class _TypedInt(int):
    """An integer argument whose type the kernel's signature says, as the compiler spells it: ``i64``."""

    triton_type: str


class _Repairs:
    """Wraps methods of the interpreter's builder, whose operands are handles of NumPy arrays with a Triton type."""

    def __init__(self, interpreter: ModuleType) -> None:
        self._handle = vars(interpreter)["TensorHandle"]
        self._language = importlib.import_module("triton.language")
        self._float8 = {
            self._language.float8e4nv: _numbers_of_float8(4, 3, has_infinity=False),
            self._language.float8e5: _numbers_of_float8(5, 2, has_infinity=True),
        }
        self._normalised = vars(importlib.import_module("triton.runtime.jit"))["_normalize_ty"]
        self._wide = {self._language.float16: np.float16, self._language.float32: np.float32}

    def arithmetic(self, method: Method) -> Method:
        def repaired(builder: object, *operands: Any) -> Any:
            if not self._is_bfloat16(operands[0]):
                return method(builder, *operands)
            result = method(builder, *map(self._widened, operands))
            return self._handle(_to_bfloat16_bits(result.data), self._language.bfloat16)

        return repaired

    def comparison(self, method: Method) -> Method:
        def repaired(builder: object, *operands: Any) -> Any:
            result = method(builder, *map(self._widened, operands))
            return self._handle(result.data.astype(bool), self._language.int1)

        return repaired

    def dot(self, method: Method) -> Method:
        def repaired(builder: object, a: Any, b: Any, *rest: Any) -> Any:
            return method(builder, self._as_float32(a), self._as_float32(b), *rest)

        return repaired

    @property
    def constant(self) -> Method:
        def made(builder: object, value: float) -> Any:
            del builder
            return self._handle(_to_bfloat16_bits(np.array([value], np.float32)), self._language.bfloat16)

        return made

    def conversion(self, method: Method) -> Method:
        def repaired(builder: object, source: Any, destination: Any, rounding: Any) -> Any:
            numbers, wide = self._float8.get(source.dtype.scalar), destination.scalar
            if numbers is not None and wide in self._wide:
                return self._handle(numbers[source.data].astype(self._wide[wide]), wide)
            if numbers is not None and wide == self._language.bfloat16:
                return self._handle(_to_bfloat16_bits(numbers[source.data]), wide)
            # Triton 3.9 asks for these two as well, and drops bits; older ones go by way of float32.
            half = self._language.float16
            if source.dtype.scalar == half and wide == self._language.bfloat16:
                return self._handle(_to_bfloat16_bits(source.data), wide)
            if self._is_bfloat16(source) and wide == half:
                return self._handle(self._widened(source).data.astype(np.float16), wide)
            narrow = self._float8.get(wide)
            if narrow is not None and numbers is None and getattr(rounding, "name", "RTNE") == "RTNE":
                return self._handle(_to_float8_bits(self._widened(source).data, narrow), wide)
            return method(builder, source, destination, rounding)

        return repaired

    def cast(self, method: Method) -> Method:
        def repaired(builder: object, source: Any, destination: Any) -> Any:
            if destination.scalar == self._language.bfloat16:
                return self._handle(_to_bfloat16_bits(source.data), destination.scalar)
            return method(builder, self._widened(source), destination)

        return repaired

    def sum(self, method: Method) -> Method:
        def repaired(reduction: Any, tensor: Any) -> Any:
            if not self._is_bfloat16(tensor.handle):
                return method(reduction, tensor)
            wide = self._widened(tensor.handle).data
            total = np.asarray(np.sum(wide, axis=reduction.axis, keepdims=reduction.keep_dims))
            return reduction.to_tensor(_to_bfloat16_bits(total).reshape(total.shape), tensor.dtype)

        return repaired

    def arguments(self, method: Method) -> Method:
        """Around what copies a launch's arguments to the host: those by position and those by keyword."""

        @functools.cache
        def types_of(kernel: Callable[..., Any]) -> dict[str, str]:
            # The interpreter has compiled the kernel anew, and made text of its annotations: `tl.int64`, `"tl.int64"`.
            texts = {name: str(kind).strip("'\"").rpartition(".")[2] for name, kind in kernel.__annotations__.items()}
            normalised = {name: self._normalised(text) for name, text in texts.items()}
            return {name: kind for name, kind in normalised.items() if kind in _INTEGERS}

        def typed(value: Any, kind: str | None) -> Any:
            limits = np.iinfo(_INTEGERS[kind]) if type(value) is int and kind is not None else None
            if limits is None or not limits.min <= value <= limits.max:
                return value
            argument = _TypedInt(value)
            argument.triton_type = str(kind)
            return argument

        def repaired(launch: Any, arguments: Any, keywords: Any) -> Any:
            host, named = method(launch, arguments, keywords)
            types = types_of(launch.fn)
            names = inspect.getfullargspec(launch.fn).args if types else ()
            host = [typed(value, types.get(name)) for name, value in zip(names, host, strict=False)] if types else host
            return host, {name: typed(value, types.get(name)) for name, value in named.items()}

        return repaired

    def argument(self, method: Method) -> Method:
        def repaired(argument: Any) -> Any:
            if not isinstance(argument, _TypedInt):
                return method(argument)
            scalar = self._language.str_to_ty(argument.triton_type, None)
            data = np.array([argument], dtype=_INTEGERS[argument.triton_type])
            return self._language.tensor(self._handle(data, scalar), scalar)

        return repaired

    def _is_bfloat16(self, operand: Any) -> bool:
        return isinstance(operand, self._handle) and operand.dtype.scalar == self._language.bfloat16

    def _as_float32(self, operand: Any) -> Any:
        numbers = self._float8.get(operand.dtype.scalar)
        if numbers is None:
            return self._widened(operand)
        return self._handle(numbers[operand.data], self._language.float32)

    def _widened(self, operand: Any) -> Any:
        if not self._is_bfloat16(operand):
            return operand
        bits = operand.data.astype(np.uint32) << np.uint32(16)
        return self._handle(bits.view(np.float32), self._language.float32)


def _numbers_of_float8(exponent_bits: int, fraction_bits: int, *, has_infinity: bool) -> np.ndarray[Any, Any]:
    """The number of each of the 256 bit patterns, as float32.

    Without infinity only the pattern of all ones is NaN; else the largest exponent is for these, as in IEEE 754.
    """
    codes = np.arange(256)
    fraction = codes & (1 << fraction_bits) - 1
    exponent = codes >> fraction_bits & (1 << exponent_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    hidden = np.where(exponent > 0, 1 << fraction_bits, 0)
    numbers = np.ldexp(np.float32(1) * (hidden + fraction), np.maximum(exponent, 1) - bias - fraction_bits)
    is_top = exponent == (1 << exponent_bits) - 1
    if has_infinity:
        numbers = np.where(is_top, np.where(fraction == 0, np.inf, np.nan), numbers)
    else:
        numbers = np.where(is_top & (fraction == (1 << fraction_bits) - 1), np.nan, numbers)
    return np.where(codes & 128, -numbers, numbers).astype(np.float32)


def _to_float8_bits(values: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The nearest of ``numbers``, those of all bit patterns, ties to even; NaN stays NaN."""
    positive = numbers[:128]
    finite = positive[np.isfinite(positive)].astype(np.float64)
    halfway, size = (finite[1:] + finite[:-1]) / 2, np.abs(values).astype(np.float64)
    below, above = (np.searchsorted(halfway, size, side=side) for side in ("left", "right"))
    codes = np.where(np.isnan(values), 0x7F, np.where(below % 2 == 0, below, above))
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def _to_bfloat16_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper half of float32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return (np.where(np.isnan(values), quiet_nan, rounded >> np.uint32(16))).astype(np.uint16)
