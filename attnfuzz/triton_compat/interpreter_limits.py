"""Whether an exception is a limit of Triton's interpreter: it would not be raised where kernels are compiled.

A kernel has no ``raise`` of its own, since the compiler takes none; the code that launches it has. So the place tells,
and whether a ``raise`` stands there:

* What the interpreter itself raises, at whatever it does in the compiler's stead, is a limit, and so is the want of a
  driver for a GPU. Not if the kernel asks for it: by an assertion, an axis that is not there, an index beyond a block,
  a loop whose step is 0, which never ends where it is compiled.
* `triton.language` is the same code for both. What it raises about its arguments, the compiler raises too. What Python
  raises in it comes of what the interpreter hands over: numbers where there are constants, a builder without a method.
* So it is in the kernel's own lines where a number, or a constant, lacks what the compiler's has.
"""

from __future__ import annotations

import functools
import importlib
import opcode
import re
from types import FrameType, TracebackType
from typing import NamedTuple

from attnfuzz.untrusted_text import printable, text_of, type_name

_INTERPRETER = "/triton/runtime/interpreter.py"
_OURS = "/attnfuzz/triton_compat/"
_DRIVER = "/triton/runtime/driver.py"
_LANGUAGE = "/triton/language/"
_NUMPY = "/numpy/"
_ASKED_FOR = frozenset({"_new_static_assert", "create_assert", "check_axis"})
"""Functions of the interpreter that raise for what a kernel says."""
_LAUNCH = "__call__"
"""The function of the interpreter that asserts how many dimensions a grid has."""
_LOOP = "counted"
"""The function of ours that makes the numbers of a kernel's loop."""
_OF_ANY_CODE = (IndexError, MemoryError, RecursionError)
"""Errors that the numbers of a kernel can lead to anywhere."""
_NO_METHOD = "'InterpreterBuilder' object has no attribute "
_LACKS = re.compile(r"'(?:bool|float|int|str|tuple)' object has no attribute '(\w+)'")
_OF_CONSTANTS = re.compile(r"'constexpr'")
_RAISE = opcode.opmap["RAISE_VARARGS"]


class _Frame(NamedTuple):
    path: str
    function: str
    raises: bool
    """By a statement of its own."""


def interpreter_limit_of(error: BaseException) -> str:
    """The limit of the interpreter that ``error`` comes from, in words; empty if there is none.

    ``error``: as it was raised first, without what Triton wraps around it.
    """
    places = _places(error)
    if not places or issubclass(type(error), _OF_ANY_CODE):
        return ""
    innermost = places[-1]
    kind, said = type(error), next(iter(text_of(error).strip().splitlines()), "")
    told = said or type_name(error)
    if innermost.path.endswith(_INTERPRETER) or _OURS in innermost.path:
        at_launch = innermost.function == _LAUNCH and issubclass(kind, AssertionError)
        if innermost.function in _ASKED_FOR or at_launch or (innermost.function == _LOOP and kind is ValueError):
            return ""
        if issubclass(kind, KeyError):
            return f"it does not know {said}"
        return told if issubclass(kind, NotImplementedError) else f"{type_name(error)}: {told}"
    if innermost.path.endswith(_DRIVER):
        return f"there is no GPU: {told}"
    if innermost.raises or not any(place.path.endswith(_INTERPRETER) for place in places):
        return ""
    if said.startswith(_NO_METHOD):
        return f"it has no {said.removeprefix(_NO_METHOD)}"
    lacks = _LACKS.match(said)
    if issubclass(kind, AttributeError) and lacks and lacks[1] in _attributes():
        return f"it does not wrap constants: {said}"
    is_of_types = issubclass(kind, TypeError) and _OF_CONSTANTS.search(said)
    if is_of_types or (_LANGUAGE in innermost.path and issubclass(kind, AttributeError | TypeError | KeyError)):
        return f"{type_name(error)}: {told}"
    return ""


def _places(error: BaseException) -> list[_Frame]:
    """Where ``error`` came from, outermost first, NumPy's own functions left out."""
    trace: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    found = []
    while trace is not None:
        frame: FrameType = trace.tb_frame
        path, code = printable(frame.f_code.co_filename), frame.f_code.co_code
        if _NUMPY not in path:
            raises = 0 <= trace.tb_lasti < len(code) and code[trace.tb_lasti] == _RAISE
            found.append(_Frame(path, frame.f_code.co_name, raises))
        trace = trace.tb_next
    return found


@functools.cache
def _attributes() -> frozenset[str]:
    """Attributes of a compiled kernel's value where the interpreter may have a number of Python's."""
    language = importlib.import_module("triton.language")
    return frozenset({*dir(language.tensor), *dir(language.constexpr), "value"})
