"""Buffers that a kernel keeps from one call to the next: memory, too, that nobody has written to yet.

What `torch.empty` gave a kernel is uninitialised until the kernel writes there, be that many calls later. So its
elements that nobody has written to are pre-filled anew before each run, as those of a new buffer are: one run has NaN
where another has numbers. What a call has written stays as it is: a kernel may know that it has filled a table, count
its calls, or set a lock.

So is what its modules made when they were imported, as servers make a workspace once (`buffers_of_modules`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.memory.patterns import Fill, holds_prefill, prefill_

_aten = torch.ops.aten

UNINITIALISED = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
"""Operations whose result holds what its memory held before."""

_MOST_NBYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Most bytes of buffers that are looked at before a run: on a CPU some milliseconds for each MiB."""
_MOST_BUFFERS = 64
"""A kernel that keeps more of them leaks, and is told so by others."""
_RUNS_BETWEEN_LOOKS = 8
"""On a GPU, whether anything is left that nobody has written to is not asked more often: the answer is waited for."""


@dataclass(slots=True)
class _Buffer:
    """``fill`` is what its elements held that nobody has written to, and ``unwritten`` which these may be at most."""

    tensor: weakref.ref[Tensor]
    fill: Fill
    unwritten: Bool[Tensor, "..."] | None = None
    runs: int = 0


class KeptBuffers:
    """Uninitialised memory that kernels were given, for as long as they hold on to it, or to a view of it."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def add(self, tensor: Shaped[Tensor, "..."], fill: Fill) -> None:
        """``tensor``, all of which has just been pre-filled, is given to a kernel; it must be nobody's view."""
        # In a format of 8 bits, or a short integer, what a kernel writes may look like what was there before.
        is_telling = tensor.dtype.itemsize >= 2 and (tensor.dtype.is_floating_point or tensor.dtype.itemsize >= 4)
        if not is_telling or tensor.nbytes > _MOST_NBYTES.get(tensor.device.type, 0):
            return
        if len(self._buffers) >= _MOST_BUFFERS:
            alive = [buffer for buffer in self._buffers if buffer.tensor() is not None]
            self._buffers = alive[1 - _MOST_BUFFERS :]
        self._buffers.append(_Buffer(weakref.ref(tensor), fill))

    def renew(self, fill: Fill) -> list[Tensor]:
        """Pre-fill what kernels keep and have not written to; the buffers that may have such elements, newest first.

        Of more than is looked at, the newest are: a kernel that keeps one for each shape uses that now.
        """
        found: list[Tensor] = []
        left: list[_Buffer] = []
        nbytes = 0
        with torch.inference_mode():  # a kernel may have made them in it
            for buffer in reversed(self._buffers):
                tensor = buffer.tensor()
                if tensor is None:
                    continue
                is_too_much = (nbytes := nbytes + tensor.nbytes) > _MOST_NBYTES[tensor.device.type]
                if is_too_much:
                    left.append(buffer)
                elif _renewed(buffer, tensor, fill):
                    left.append(buffer)
                    found.append(tensor)
        self._buffers = left[::-1]
        return found


def _renewed(buffer: _Buffer, tensor: Tensor, fill: Fill) -> bool:
    """Whether anything may be left that nobody has written to: on a GPU it is seldom waited for."""
    held = holds_prefill(tensor, buffer.fill)
    unwritten = held if buffer.unwritten is None else held & buffer.unwritten
    buffer.runs += 1
    is_asked = tensor.device.type == "cpu" or buffer.runs % _RUNS_BETWEEN_LOOKS == 0
    if is_asked and not bool(unwritten.any()):
        return False
    prefill_(tensor, fill, where=unwritten)
    buffer.fill, buffer.unwritten = fill, unwritten
    return True


KEPT = KeptBuffers()
"""Those of this process."""


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates neither
    """A mode that sees a kernel's operations and changes nothing about how they are compiled."""

    supports_higher_order_operators = True
    """FlexAttention is one where it is not compiled; torch refuses to call it in a mode that does not say so."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing its compiler (2 s) to make sure that this class is not compiled."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True keeps `torch.compile` from falling back to eager mode in here: compiled kernels are tested as such."""
        return True


class _BuffersOfModules(OperationMode):  # type: ignore[no-untyped-call]  # torch annotates neither
    """See `buffers_of_modules`."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **kwargs) if kwargs else func(*args)
        is_looked_at = func in UNINITIALISED and type(made) is Tensor and made.layout is torch.strided
        if is_looked_at and 0 < made.nbytes <= _MOST_NBYTES.get(made.device.type, 0):
            prefill_(made, "nan")
            KEPT.add(made, "nan")
        return made


def buffers_of_modules() -> TorchDispatchMode:
    """While active, what `torch.empty` and its relatives give to modules is pre-filled, and kept from then on."""
    return _BuffersOfModules()  # type: ignore[no-untyped-call]  # as above
