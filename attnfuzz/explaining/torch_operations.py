"""Writes down what a kernel computes with torch's own operations, and at which lines: for one run, not for cases."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.explaining.operations import BITS, Kind, Operation, Recording, SourcePlace
from attnfuzz.untrusted_text import author_of

_KINDS: dict[str, Kind] = {
    "add": "add", "sub": "add", "rsub": "add", "mul": "mul", "div": "div", "mm": "dot", "bmm": "dot", "mv": "dot",
    "dot": "dot", "addmm": "dot", "baddbmm": "dot", "addcmul": "add", "sum": "sum", "cumsum": "sum", "exp": "exp",
    "exp2": "exp", "log": "log", "log2": "log", "logsumexp": "log", "logaddexp": "log",
    "_softmax": "softmax", "sigmoid": "softmax", "max": "max", "amax": "max",
    "maximum": "max", "clamp": "max", "clamp_min": "max", "_to_copy": "convert", "copy": "convert",
}  # fmt: skip
"""By the name of the operation; those that write into a tensor have the same with an underscore."""
_MOVES = frozenset(
    {
        "_reshape_alias", "_unsafe_view", "alias", "as_strided", "cat", "clone", "constant_pad_nd", "detach", "expand",
        "flip", "gather", "index", "index_copy", "index_put", "index_select", "lift_fresh", "masked_fill", "narrow",
        "permute", "repeat", "reshape", "scatter", "select", "slice", "split", "squeeze", "stack", "t", "transpose",
        "unbind", "unsqueeze", "view", "where",
    }
)  # fmt: skip
_NEW = ("empty", "full", "ones", "zeros", "new_", "arange")
"""How the names of operations begin that take nothing of a tensor but its shape and format."""


@contextlib.contextmanager
def recorded() -> Iterator[list[Operation]]:
    """Fill a list with the operations on floating-point tensors meanwhile."""
    mode = _Recorder()
    with mode:
        yield mode.recording.operations


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.recording = Recording()
        self._made: dict[int, tuple[Tensor, Operation]] = {}
        """By a tensor's identity, for which the tensor is kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        base = name if name in _KINDS else name.removesuffix("_")
        is_new = name.startswith(_NEW)
        kind: Kind = "argument" if is_new else "move" if base in _MOVES else _KINDS.get(base, "other")
        given = [] if is_new else [self._maker_of(one) for one in _tensors((args, kwargs or {})) if _dtype(one)]
        place, calls = _where()
        for one in _tensors(result):
            if _dtype(one):
                made = self.recording.add(kind, _dtype(one), given, calls=(calls, name), place=place)
                self._made[id(one)] = one, made
        return result

    def _maker_of(self, tensor: Tensor) -> Operation:
        """Find what a tensor came of; of one that was there before, that it was given."""
        if id(tensor) not in self._made:
            kind: Kind = "load" if tensor.ndim else "argument"
            self._made[id(tensor)] = tensor, self.recording.add(kind, _dtype(tensor), calls=id(tensor))
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
        if not file.startswith("<") and author_of(file) in ("project", "installed"):
            calls.append((file, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return (calls[0][:2] if calls else None), tuple(calls)
