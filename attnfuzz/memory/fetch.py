"""Copies from a GPU to the host, all of them started before anything is waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

__all__ = ["Fetch", "pinned"]


class Fetch:
    """Start copies, wait for the device, then look at them; what is at ``home`` already is not copied.

    ``home``: "cpu", or the GPU itself for what is to be looked at there.
    """

    def __init__(self, home: torch.device | str = "cpu") -> None:
        self._home = torch.device(home).type
        self._buffers: dict[int, UInt8[Tensor, " nbytes"]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def start_buffer(self, buffer: UInt8[Tensor, " nbytes"]) -> None:
        """Copy ``buffer``, which starts its storage: tensors in it are found in the copy from then on."""
        if buffer.device.type != self._home:
            copy = pinned(buffer.numel())
            self._buffers[buffer.untyped_storage().data_ptr()] = copy.copy_(buffer, non_blocking=True)

    def start_storage(self, tensor: Shaped[Tensor, "..."]) -> None:
        """Copy all of the storage that ``tensor`` is a part of, if that has not been started."""
        storage = tensor.untyped_storage()
        if tensor.device.type != self._home and storage.data_ptr() not in self._buffers:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.start_buffer(whole)

    def start(self, tensors: Sequence[Shaped[Tensor, "..."]]) -> None:
        """Copy those of ``tensors`` that are not part of a buffer already on its way: one copy for each dtype."""
        away = [
            tensor
            for tensor in tensors
            if tensor.device.type != self._home and tensor.untyped_storage().data_ptr() not in self._buffers
        ]
        for dtype in dict.fromkeys(tensor.dtype for tensor in away):
            chosen = [tensor for tensor in away if tensor.dtype == dtype]
            joined = torch.cat([tensor.reshape(-1) for tensor in chosen])
            copy = pinned(joined.nbytes).view(dtype).copy_(joined, non_blocking=True)
            parts = torch.split(copy, [tensor.numel() for tensor in chosen])
            for tensor, part in zip(chosen, parts, strict=True):
                self._tensors[id(tensor)] = tensor, part.view(tensor.shape)

    def at_home(self, tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The copy of ``tensor``; one that nobody asked for is made now."""
        if tensor.device.type == self._home:
            return tensor
        buffer = self._buffers.get(tensor.untyped_storage().data_ptr())
        if buffer is not None:
            return buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        _, copy = self._tensors.get(id(tensor), (None, None))
        return tensor.cpu() if copy is None else copy


def pinned(nbytes: int) -> UInt8[Tensor, " nbytes"]:
    """Host memory that a GPU reads and writes by itself; torch keeps what is given back for the next one to ask."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
