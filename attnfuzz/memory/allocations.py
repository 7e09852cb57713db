"""Red zones and pre-fill for the buffers that a kernel allocates itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnfuzz.memory.arena import Arena, ChunkSource
from attnfuzz.memory.image import Fetch
from attnfuzz.memory.kept import KEPT, UNINITIALISED, OperationMode
from attnfuzz.memory.patterns import POISON_BYTES, Fill

WORKSPACE = "workspace"
"""The name of every tracked buffer until `Arena.rename` gives it a better one."""

_MAX_TRACKED_BYTES = 256 << 20
"""Most bytes of one run. Beyond it buffers stay as torch made them (Triton's autotuner has one of 256 MiB)."""

_CHUNK_BYTES = 1 << 16
_SHARED_CHUNK_BYTES = 1 << 14

_aten = torch.ops.aten

_INITIALISED = {
    _aten.full.default,
    _aten.full_like.default,
    _aten.new_full.default,
    _aten.new_ones.default,
    _aten.new_zeros.default,
    _aten.ones.default,
    _aten.ones_like.default,
    _aten.zeros.default,
    _aten.zeros_like.default,
}

_ALLOCATES = {id(func): False for func in UNINITIALISED} | {id(func): True for func in _INITIALISED}
"""By identity, since every operation of a kernel passes here and an operation's hash is computed in Python."""


class TrackedAllocations(OperationMode):
    """While active, tensors made by `torch.empty`, `zeros`, `full` and their relatives come from `arena`.

    Uninitialised ones hold pre-fill, and so does what the kernel keeps of those of earlier calls (`KeptBuffers`). What
    PyTorch's own operators allocate for their results is not touched.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        poison: Fill,
        prefill: Fill,
        source: ChunkSource | None = None,
        arena: Arena | None = None,
        kept: Fill | None = None,
    ) -> None:
        """`source`: see `Arena`. `arena` is used in place of one that the other arguments describe.

        `kept`: what buffers hold that the kernel keeps and has not written to, if not pre-fill as new ones do.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        capacity = _CHUNK_BYTES if source is None else _SHARED_CHUNK_BYTES
        self.arena = arena or Arena(device, poison=poison, prefill=prefill, capacity=capacity, source=source)
        self._fill_kept = kept or self.arena.prefill
        self.kept: list[Tensor] = []
        """Buffers from earlier calls that the kernel keeps, and has not written to everywhere."""

    def __enter__(self) -> TrackedAllocations:
        if self.arena.device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            self.kept = KEPT.renew(self._fill_kept)
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **kwargs) if kwargs else func(*args)
        initialised = _ALLOCATES.get(id(func))
        if isinstance(made, list):
            # A C++ operator may leave tensors of a list undefined, as FlashAttention 3 does with the buffers of splits
            # that it did not make. These arrive as None, and torch cannot hand on a list that holds one.
            return [torch.empty(0, dtype=torch.float32, device="cpu") if part is None else part for part in made]
        if initialised is None or not self._is_trackable(made):
            return made
        if initialised:
            return self._place(made, prefill=False).copy_(made)
        # Not a view of the arena's: what is given lives for as long as the kernel holds on to it, and no longer.
        place = self._place(made)
        given = torch.empty(0, dtype=place.dtype, device=place.device).set_(
            place.untyped_storage(), place.storage_offset(), place.shape, place.stride()
        )
        KEPT.add(given, self.arena.prefill)
        return given

    def _place(self, like: Tensor, *, prefill: bool = True) -> Tensor:
        shape, strides = tuple(like.shape), like.stride()
        return self.arena.strided(WORKSPACE, shape, strides, like.dtype, role="output", prefill=prefill)

    def _is_trackable(self, made: object) -> bool:
        if not isinstance(made, Tensor) or made.layout is not torch.strided:
            return False
        if made.device.type != self.arena.device.type or made.dtype.itemsize > 8:
            return False
        if not made.numel() or 0 in made.stride() or self.arena.is_full:
            return False
        return self.arena.nbytes + made.untyped_storage().nbytes() <= _MAX_TRACKED_BYTES


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
