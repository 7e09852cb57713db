"""Poisoned memory for what the kernels of a batch allocate themselves: filled once, copied back once."""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Tensor

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

    def _poisoned(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        return torch.full((nbytes,), POISON_BYTES[self.poison], dtype=torch.uint8, device=self.device)
