"""Writes down which addresses a kernel reads and writes in Triton's interpreter, and at which lines: for one run.

An offset that did not fit into 32 bits is followed to the access that it is used for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnfuzz.explaining.operations import SourcePlace, first_of_users
from attnfuzz.triton_compat.patching import replaced

_CREATE = "create_"
_WRAPS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "shl": np.left_shift}
"""Operations that may exceed 32 bits, by the name of the builder's method."""
_CAST = "int_cast"
ACCESSES = {"masked_load": "load", "masked_store": "store", "atomic_rmw": "store", "atomic_cas": "store"}
"""Methods that all others which touch memory call, with what they do."""
_PLACE = "attnfuzz_wrapped"
_NARROW = "int32"
_MOST = 1 << 16
"""Accesses that are written down; a kernel of a shrunk case has hundreds."""


@dataclass(frozen=True, slots=True)
class AccessAt:
    """An access to ``address`` and perhaps others. Else as `attnfuzz.explaining.accesses.Access`."""

    kind: Literal["load", "store"]
    address: int
    place: SourcePlace
    narrow: SourcePlace | None = None
    unwritten: bool = False


@contextlib.contextmanager
def recorded(unwritten: Mapping[str, int]) -> Iterator[list[AccessAt]]:
    """Fill a list with the accesses of kernels that are interpreted meanwhile; with none, for an unknown Triton.

    ``unwritten``: by Triton's name of a format, the bits of a number that nobody has written.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not _is_known(interpreter):
        yield []
        return
    recorder = _Recorder(interpreter, unwritten)
    builder = vars(interpreter)["InterpreterBuilder"]
    methods = {name: one for name, one in vars(builder).items() if name.startswith(_CREATE) and callable(one)}
    wrapped = {name: recorder.wrapped(method, name.removeprefix(_CREATE)) for name, method in methods.items()}
    with replaced(builder, wrapped):
        yield recorder.accesses


def _is_known(interpreter: ModuleType) -> bool:
    builder, handle = (getattr(interpreter, name, None) for name in ("InterpreterBuilder", "TensorHandle"))
    if not inspect.isclass(builder) or not inspect.isclass(handle) or hasattr(handle, "__slots__"):
        return False
    methods = ("addptr", "load", "store", *_WRAPS, *ACCESSES)
    return all(callable(getattr(builder, f"{_CREATE}{name}", None)) for name in methods)


class _Recorder:
    def __init__(self, interpreter: ModuleType, unwritten: Mapping[str, int]) -> None:
        self.accesses: list[AccessAt] = []
        self._known: set[AccessAt] = set()
        self._handle = vars(interpreter)["TensorHandle"]
        self._unwritten = unwritten

    def wrapped(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def recording(builder: Any, *args: Any, **kwargs: Any) -> Any:
            made = method(builder, *args, **kwargs)
            given = operands(self._handle, args, kwargs)
            place = next((found for one in given if (found := getattr(one, _PLACE, None)) is not None), None)
            if name in ACCESSES and len(given) > 1:
                self._note("load" if ACCESSES[name] == "load" else "store", name, given, made)
            elif isinstance(made, self._handle):
                if place is None and name in (*_WRAPS, _CAST) and _has_wrapped(name, given, made):
                    place = place_of_caller()
                if place is not None and not any(one is made for one in given):
                    setattr(made, _PLACE, place)
            return made

        return recording

    def _note(self, kind: Literal["load", "store"], name: str, given: list[Any], made: Any) -> None:
        pointers, place, active = given[0], place_of_caller(), addresses_of(name, given)
        if place is None or not active.size or len(self.accesses) >= _MOST:
            return
        is_unwritten = False
        if kind == "load" and (bits := self._unwritten.get(str(made.dtype.scalar))) is not None:
            numbers = np.ascontiguousarray(made.data)
            is_unwritten = bool((numbers.view(f"u{numbers.dtype.itemsize}") == bits)[_mask(name, given)].any())
        # Of the elements of a line, the outermost tell the tensor, and whether some lie beside it.
        for address in dict.fromkeys((int(active[0]), int(active.min()), int(active.max()))):
            access = AccessAt(kind, address, place, getattr(pointers, _PLACE, None), is_unwritten)
            if access not in self._known:
                self._known.add(access)
                self.accesses.append(access)


def operands(handle: type, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    """Tensors of an operation in their order. A block pointer's mask is an array of NumPy, and no handle."""
    return [one for one in (*args, *named.values()) if isinstance(one, (handle, np.ndarray))]


def addresses_of(name: str, given: Sequence[Any]) -> NDArray[np.uint64]:
    """The addresses that one of `ACCESSES` touches: its pointers, the first of ``given``, but for those that its mask
    leaves out."""
    addresses: NDArray[np.uint64] = given[0].data
    return addresses.ravel() if name == "atomic_cas" else addresses[_mask(name, given)]


def bits_of(given: Sequence[Any]) -> list[int]:
    """The bits of what a store puts at each of its addresses."""
    numbers = np.ascontiguousarray(np.broadcast_to(given[1].data, given[0].data.shape)[_mask("masked_store", given)])
    stored: list[int] = numbers.view(f"u{numbers.dtype.itemsize}").tolist()
    return stored


def _mask(name: str, given: Sequence[Any]) -> NDArray[np.bool_]:
    """The mask of a load is the second operand, and else the last one."""
    mask = given[1 if ACCESSES[name] == "load" else -1]
    mask = np.broadcast_to(mask if isinstance(mask, np.ndarray) else mask.data, given[0].data.shape)
    return mask.astype(bool)


def _has_wrapped(name: str, given: list[Any], made: Any) -> bool:
    """Whether a sum or product in 32 bits, or what is made of a number of 64, is another number than in 64 bits."""
    if str(made.dtype.scalar) != _NARROW or len(given) != (1 if name == _CAST else 2):
        return False
    wide = [one.data.astype(np.int64) for one in given]
    return bool(((wide[0] if name == _CAST else _WRAPS[name](*wide)) != made.data).any())


def place_of_caller() -> SourcePlace | None:
    """The innermost line that is not Triton's own."""
    frame: FrameType | None = sys._getframe(1)
    places = []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return first_of_users(places)
