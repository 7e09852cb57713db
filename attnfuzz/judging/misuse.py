"""Where a kernel cannot be called as it is written, whatever the case: what its author meant, in words."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from attnfuzz.declaration import Kernel
from attnfuzz.problems.cases import PROBLEMS
from attnfuzz.problems.module import CASE_TYPES, module_of
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.trials.observation import WrongDeviceError
from attnfuzz.untrusted_text import text_of

_INPUTS: tuple[type, ...] = tuple(module_of(problem).inputs_type for problem in PROBLEMS)
_WRONG_DEVICE = (
    "cpu tensor?",  # Triton, of a pointer to host memory
    "to be on the same device",  # torch
    "not compiled with CUDA",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
)
"""Words of torch and Triton on a tensor on another device than the inputs; they have no types for it."""


def misuse_of(error: BaseException, kernel: Kernel) -> str:
    """The arguments to write instead, if ``error`` says that the kernel was written for others; else empty.

    That its parameters do not fit the call, that its inputs have no such attribute, or that it mixes devices, or
    returns what is on another one. ``error``'s ``__class__``, which may be the kernel's code, is not asked.
    """
    kind = type(error)
    if issubclass(kind, TypeError) and not _can_be_called(kernel):
        options = tuple(kernel.declaration.options)
        names = [name for name in [*inspect.signature(kernel.function).parameters][1:] if name not in options]
        if not options:
            return "a kernel is called with its inputs alone, unless it declares options"
        which = "this one is" if len(options) == 1 else "these are"
        near = "".join(_did_you_mean(name, options) for name in names[:1])
        return f"options are passed by keyword: {which} {', '.join(options)}{near}"
    if kind is AttributeError and isinstance(error, AttributeError):  # the latter for type checkers
        asked, name = error.obj, error.name
        if is_dataclass(asked) and isinstance(asked, _INPUTS):
            known = [field.name for field in fields(asked)]
            return f"inputs has {', '.join(known)}{_did_you_mean(str(name), known)}"
    said = text_of(error)
    if issubclass(kind, WrongDeviceError) or any(words in said for words in _WRONG_DEVICE):
        problem = kernel.declaration.problem
        if isinstance(problem, OpenProblem):
            return "make every tensor on the device of the inputs"
        example = CASE_TYPES[problem].tensor_names[0]
        return f"make every tensor on the device of the inputs: device=inputs.{example}.device"
    return ""


def _can_be_called(kernel: Kernel) -> bool:
    try:
        inspect.signature(kernel.function).bind(object(), **kernel.declaration.options)
    except TypeError:
        return False
    except ValueError:  # it has no signature that Python knows
        return True
    return True


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]} where it says {name}?" if close else ""
