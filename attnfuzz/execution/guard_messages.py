"""What driver and executor say to each other to find out which tensor a kernel reached beyond: JSON, torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["Edge", "GuardReply", "GuardRequest", "Neighbourhood"]

Edge = Literal["end", "start"]


class GuardRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run the kernel `target` on `case` with `edge` of the tensors `names` at unmapped memory, others in ordinary one.

    `room`: bytes between edge and unmapped memory. Unless `aligned` is False there are as many more as it takes for
    tensors to be aligned as usual.
    """

    target: str
    case: msgspec.Raw
    edge: Edge
    names: tuple[str, ...]
    room: int = 0
    aligned: bool = True


class Neighbourhood(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A guarded tensor after a run.

    `nbytes`: from its first to its last element. `written`: the nearest element beyond the edge that the kernel wrote
    to, 1 for the neighbour of the last or first one; 0 if none of the next 64 KiB changed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: Annotated[int, msgspec.Meta(ge=1)]
    nbytes: int
    written: int


class GuardReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fault`: what CUDA says if the run cost the process its context, which ends then; `tensors` is empty if so."""

    fault: str | None = None
    tensors: tuple[Neighbourhood, ...] = ()
