"""Writes down what a kernel computes with torch's own operations, and at which lines: for one run, not for cases."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnfuzz
from attnfuzz.explaining.operations import BITS, Kind, Operation, SourcePlace

__all__ = ["recorded"]

_KINDS: dict[str, Kind] = {
    "add": "add", "sub": "add", "rsub": "add", "mul": "mul", "div": "div", "mm": "dot", "bmm": "dot", "mv": "dot",
    "dot": "dot", "addmm": "dot", "baddbmm": "dot", "addcmul": "add", "sum": "sum", "cumsum": "sum", "exp": "exp",
    "exp2": "exp", "log": "log", "log2": "log", "logsumexp": "log", "_softmax": "softmax", "max": "max", "amax": "max",
    "maximum": "max", "clamp": "max", "clamp_min": "max", "_to_copy": "convert", "copy": "convert",
}  # fmt: skip
"""By the name of the operation; those that write into a tensor have the same with an underscore."""
_MOVES = frozenset(
    {
        "_reshape_alias", "_unsafe_view", "alias", "as_strided", "cat", "clone", "constant_pad_nd", "detach", "expand",
        "flip", "gather", "index", "index_select", "masked_fill", "narrow", "permute", "repeat", "reshape", "select",
        "slice", "split", "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "view", "where",
    }
)  # fmt: skip
_LIBRARIES = (str(Path(torch.__file__).parent), "<")
_OWN = str(Path(attnfuzz.__file__).parent)
_KERNELS = str((Path(attnfuzz.__file__).parent / "kernels").resolve())


@contextlib.contextmanager
def recorded() -> Iterator[list[Operation]]:
    """Fill a list with the operations on floating-point tensors meanwhile."""
    mode = _Recorder()
    with mode:
        yield mode.found


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []
        self._made: dict[int, tuple[Tensor, Operation]] = {}
        """By a tensor's identity, for which the tensor is kept."""
        self._known: dict[object, Operation] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        base = name if name in _KINDS else name.removesuffix("_")
        kind: Kind = "move" if base in _MOVES else _KINDS.get(base, "other")
        given = [one for one in _tensors((args, kwargs or {})) if _dtype(one)]
        for one in _tensors(result):
            if _dtype(one):
                made = self._write_down(kind, _dtype(one), given)
                self._made[id(one)] = one, made
        return result

    def _write_down(self, kind: Kind, dtype: str, given: list[Tensor]) -> Operation:
        place, calls = _where()
        known = calls, kind, dtype
        made = self._known.get(known)
        if made is None:
            made = self._known[known] = Operation(kind, dtype, place)
            self.found.append(made)
        made.operands += [one for one in dict.fromkeys(map(self._maker_of, given)) if one not in made.operands]
        return made

    def _maker_of(self, tensor: Tensor) -> Operation:
        """What a tensor came of; of one that was there before, that it was given."""
        if id(tensor) not in self._made:
            kind: Kind = "load" if tensor.ndim else "argument"
            self._made[id(tensor)] = tensor, Operation(kind, _dtype(tensor))
            self.found.append(self._made[id(tensor)][1])
        return self._made[id(tensor)][1]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _dtype(tensor: Tensor) -> str:
    """The format of its numbers; empty unless they are floating-point ones."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype.is_floating_point:
        return name if name in BITS else "float8"
    return ""


def _where() -> tuple[SourcePlace | None, object]:
    """The innermost line of code that is neither torch's nor attnfuzz's, and all such lines on the way here."""
    frame: FrameType | None = sys._getframe(1)
    calls: list[tuple[str, int, int]] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_kernel_code(file):
            calls.append((file, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return (calls[0][:2] if calls else None), tuple(calls)


def _is_kernel_code(file: str) -> bool:
    if file.startswith(_LIBRARIES):
        return False
    return not file.startswith(_OWN) or file.startswith((_KERNELS, f"{_OWN}/kernels"))
