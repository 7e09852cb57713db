"""Buffers that a kernel keeps from one call to the next: memory, too, that nobody has written to yet.

What `torch.empty` gave a kernel is uninitialised until the kernel writes there, be that many calls later. So its
elements that nobody has written to are pre-filled anew before each run, as those of a new buffer are: one run has NaN
where another has numbers. What a call has written stays as it is: a kernel may know that it has filled a table, count
its calls, or set a lock.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from attnfuzz.memory.patterns import Fill, holds_prefill, prefill_

__all__ = ["KEPT", "KeptBuffers"]

_MOST_NBYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Of buffers that are looked at before a run: on a CPU some milliseconds for each MiB."""
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
    """What kernels were given uninitialised, for as long as they hold on to it, or to a view of it."""

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
        """Pre-fill what kernels keep and have not written to; the buffers that may have such elements."""
        found: list[Tensor] = []
        left: list[_Buffer] = []
        nbytes = 0
        with torch.inference_mode():  # a kernel may have made them in it
            for buffer in self._buffers:
                tensor = buffer.tensor()
                if tensor is None:
                    continue
                is_too_much = (nbytes := nbytes + tensor.nbytes) > _MOST_NBYTES[tensor.device.type]
                if is_too_much or _renewed(buffer, tensor, fill):
                    left.append(buffer)
                    found.append(tensor)
        self._buffers = left
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
