"""Poisoned memory for what the kernels of a batch allocate themselves: filled once, copied back once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnfuzz.memory.arena import Arena
from attnfuzz.memory.fetch import Fetch
from attnfuzz.memory.patterns import POISON_BYTES, Fill

__all__ = ["WorkspacePool"]

_STRETCH_BYTES = 4 << 20


class WorkspacePool:
    """Gives chunks to arenas (see `ChunkSource`), from stretches that are filled when needed; large ones singly."""

    def __init__(self, device: torch.device | str, poison: Fill) -> None:
        self.device = torch.device(device)
        self.poison = poison
        self._full: list[UInt8[Tensor, " nbytes"]] = []
        self._current: UInt8[Tensor, " nbytes"] | None = None
        self._used = 0

    def take(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """The next chunk."""
        if nbytes > _STRETCH_BYTES:
            return self._poisoned(nbytes)
        if self._current is None or self._used + nbytes > _STRETCH_BYTES:
            self._full = self._given_out()
            self._current, self._used = self._poisoned(_STRETCH_BYTES), 0
        start, self._used = self._used, self._used + nbytes
        return self._current[start : self._used]

    def start(self, fetch: Fetch) -> None:
        """Have what was given out copied back."""
        for given in self._given_out():
            fetch.start_buffer(given)

    def is_whole(self, arenas: Sequence[Arena], fetch: Fetch) -> bool:
        """Whether all that ``arenas`` took is undamaged, at home; False also if some of it lies elsewhere."""
        found = {given.untyped_storage().data_ptr(): fetch.at_home(given) for given in self._given_out()}
        expected = {start: torch.full_like(given, POISON_BYTES[self.poison]) for start, given in found.items()}
        for arena in arenas:
            for region in arena.regions:
                tensor = region.tensor
                stretch = expected.get(tensor.untyped_storage().data_ptr())
                if stretch is None:
                    return False
                place = stretch.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                place.copy_(fetch.at_home(tensor))
        return all(torch.equal(found[start].view(torch.int64), expected[start].view(torch.int64)) for start in found)

    def _given_out(self) -> list[UInt8[Tensor, " nbytes"]]:
        return self._full if self._current is None else [*self._full, self._current[: self._used]]

    def _poisoned(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        return torch.full((nbytes,), POISON_BYTES[self.poison], dtype=torch.uint8, device=self.device)
