"""Functions of CUDA's libdevice where kernels are interpreted: computed by torch.

`triton.language.extra.libdevice` holds stand-ins without a body, which the compiler replaces by those of the GPU at
hand. The interpreter calls them as they are, so that `libdevice.exp2(x)` is None. Here they are the functions of
`triton.language.extra.cuda`, which choose a symbol of the library by the types of their arguments, and that symbol is
looked up here.

Each is computed in float64 and rounded once, which is nearer to the truth than the library's units in the last place.
What torch has no function for raises a NotImplementedError: such a kernel cannot be run here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

Function = Callable[..., Tensor]

_COMPUTES = "attnfuzz_computes_libdevice"
_PREFIX = "__nv_"
_ROUNDED = re.compile(r"[fd](?P<name>add|sub|mul|div|rcp|sqrt|rsqrt)_rn|(?P<fma>fma)f?_rn")
"""Rounded to nearest, as everything here is; not with _rz, _rd and _ru."""
_SAME_NAME = (
    "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh", "div", "erf",
    "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "lgamma", "log", "log10", "log1p", "log2",
    "mul", "pow", "rsqrt", "sin", "sinh", "sqrt", "sub", "tan", "tanh", "trunc",
)  # fmt: skip
_FUNCTIONS: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in _SAME_NAME},
    "abs": torch.abs,
    "llabs": torch.abs,
    "fabs": torch.abs,
    "fdivide": torch.div,
    "rcp": torch.reciprocal,
    "fma": lambda x, y, z: x * y + z,
    "saturate": lambda x: x.nan_to_num(0.0, posinf=1.0, neginf=0.0).clamp(0, 1),
    "exp10": lambda x: torch.pow(10.0, x),
    "powi": torch.pow,
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
    "rcbrt": lambda x: x.sign() * x.abs() ** (-1 / 3),
    "rhypot": lambda x, y: 1 / torch.hypot(x, y),
    "rint": torch.round,
    "nearbyint": torch.round,
    "round": lambda x: torch.copysign((x.abs() + 0.5).floor(), x),
    "fdim": lambda x, y: torch.where(x > y, x - y, x.new_zeros(())),
    "ldexp": lambda x, n: x * torch.exp2(n),
    "scalbn": lambda x, n: x * torch.exp2(n),
    "sinpi": lambda x: torch.sin(torch.pi * torch.remainder(x, 2)),
    "cospi": lambda x: torch.cos(torch.pi * torch.remainder(x, 2)),
    "tgamma": lambda x: torch.where(x > 0, torch.exp(torch.lgamma(x)), x.new_full((), torch.nan)),
    "erfcx": torch.special.erfcx,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "isnan": torch.isnan,
    "isnand": torch.isnan,
    "isinf": torch.isinf,
    "isinfd": torch.isinf,
    "finite": torch.isfinite,
    "isfinited": torch.isfinite,
    "signbit": torch.signbit,
    "signbitd": torch.signbit,
    "int2float_rn": torch.clone,
    "uint2float_rn": torch.clone,
    "int2double_rn": torch.clone,
    "double2float_rn": torch.clone,
    "float2int_rn": torch.round,
    "float2int_rz": torch.trunc,
    "float2int_rd": torch.floor,
    "float2int_ru": torch.ceil,
}
"""By the symbol, without what says its type: of tensors of float64."""


def install_libdevice() -> bool:
    """Have kernels find them; returns False, changing nothing, for a Triton that is built differently."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder: Any = getattr(interpreter, "InterpreterBuilder", None)
    if getattr(builder, _COMPUTES, False):
        return True
    try:
        stand_ins, of_cuda = (
            importlib.import_module(f"triton.language.extra.{name}libdevice") for name in ("", "cuda.")
        )
    except ImportError:
        return False
    semantic = getattr(interpreter, "interpreter_semantic", None)
    if not inspect.isclass(builder) or semantic is None:
        return False
    handle = vars(interpreter)["TensorHandle"]
    numpy_dtype = vars(interpreter)["_get_np_dtype"]

    def create(self: object, library: str, path: str, symbol: str, operands: Any, kind: Any, is_pure: bool) -> Any:
        del self, library, path, is_pure
        numbers = _computed(symbol, [operand.data for operand in operands], numpy_dtype(kind))
        return handle(numbers, kind.scalar)

    vars(interpreter)["InterpreterBuilder"].create_extern_elementwise = create
    for name, function in _functions_of(of_cuda):
        called = functools.partial(function, _semantic=semantic)
        for module in (stand_ins, of_cuda):
            setattr(module, name, called)
    setattr(builder, _COMPUTES, True)
    return True


def _functions_of(module: ModuleType) -> list[tuple[str, Callable[..., Any]]]:
    found = inspect.getmembers(module, inspect.isfunction)
    return [(name, function) for name, function in found if "_semantic" in inspect.signature(function).parameters]


def _computed(symbol: str, operands: list[np.ndarray[Any, Any]], dtype: Any) -> np.ndarray[Any, Any]:
    function = _function(symbol)
    wide = (torch.from_numpy(np.ascontiguousarray(operand, dtype=np.float64)) for operand in operands)
    return function(*wide).numpy().astype(dtype)


@functools.cache
def _function(symbol: str) -> Function:
    name = symbol.removeprefix(_PREFIX)
    if rounded := _ROUNDED.fullmatch(name):
        return _FUNCTIONS[rounded["name"] or rounded["fma"]]
    for plain in (name, name.removesuffix("f"), name.removeprefix("fast_").removesuffix("f")):
        if symbol.startswith(_PREFIX) and plain in _FUNCTIONS:
            return _FUNCTIONS[plain]
    raise NotImplementedError(f"it has no {symbol} of libdevice")
