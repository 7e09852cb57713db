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

_POOL_BYTES = 4 << 20


class WorkspacePool:
    """Gives chunks to arenas (see `ChunkSource`). Filled when first asked; beyond its end, chunks are filled singly."""

    def __init__(self, device: torch.device | str, poison: Fill) -> None:
        self.device = torch.device(device)
        self.poison = poison
        self._pool: UInt8[Tensor, " nbytes"] | None = None
        self._used = 0

    def take(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """The next chunk."""
        if self._pool is None:
            self._pool = self._poisoned(_POOL_BYTES)
        if self._used + nbytes > _POOL_BYTES:
            return self._poisoned(nbytes)
        start, self._used = self._used, self._used + nbytes
        return self._pool[start : self._used]

    def start(self, fetch: Fetch) -> None:
        """Have what was given out copied back."""
        if self._pool is not None:
            fetch.start_buffer(self._pool[: self._used])

    def is_whole(self, arenas: Sequence[Arena], fetch: Fetch) -> bool:
        """Whether all that ``arenas`` took is undamaged, at home; False also if some of it lies elsewhere."""
        if self._pool is None:
            return True
        found = fetch.at_home(self._pool[: self._used])
        expected = torch.full_like(found, POISON_BYTES[self.poison])
        for arena in arenas:
            for region in arena.regions:
                tensor = region.tensor
                if tensor.untyped_storage().data_ptr() != self._pool.untyped_storage().data_ptr():
                    return False
                place = expected.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                place.copy_(fetch.at_home(tensor))
        return torch.equal(found.view(torch.int64), expected.view(torch.int64))

    def _poisoned(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        return torch.full((nbytes,), POISON_BYTES[self.poison], dtype=torch.uint8, device=self.device)
