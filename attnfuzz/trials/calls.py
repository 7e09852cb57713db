"""The calls that an adapter makes of its engine, in lines of Python. Torch-free."""

from __future__ import annotations

import msgspec

__all__ = ["EngineCalls"]


class EngineCalls(msgspec.Struct, frozen=True, kw_only=True):
    """``imports``: lines that import the engine's functions. ``tensors``: lines that define what they are given, which
    ``names`` lists. ``calls``: lines that call them. ``results``: the kernel's results as expressions, in their order;
    none where the kernel does not get so far. ``interpreted``: its functions may be Triton's, which run on a CPU too.
    """

    imports: tuple[str, ...]
    tensors: tuple[str, ...]
    names: tuple[str, ...]
    calls: tuple[str, ...]
    results: tuple[str, ...] = ()
    interpreted: bool = True
