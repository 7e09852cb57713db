"""The part of a script about one case, in lines of Python, made by the process that runs it. Torch-free."""

from __future__ import annotations

import msgspec

MAX_TENSOR_BYTES = 4 << 20
"""Most bytes of a case's tensors; a larger script could not be pasted anywhere."""


class ScriptPart(msgspec.Struct, frozen=True, kw_only=True):
    """``tensors``: lines that define what the kernel is given, which ``names`` lists; ``together`` is one line for all,
    of their bytes. ``calls``: lines that call it. ``results``: what it gives, as expressions in their order; none where
    it does not get so far.

    Of an engine's kernel ``imports`` are lines that import the engine's functions, which are called as its adapter
    calls them; ``interpreted``: they may be Triton's, which run on a CPU too. Of a problem of a user's ``calls`` call
    ``kernel``, and ``checks`` are lines that compare what it gives with what the problem says.
    """

    imports: tuple[str, ...] = ()
    tensors: tuple[str, ...]
    together: str
    names: tuple[str, ...]
    calls: tuple[str, ...]
    results: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    interpreted: bool = True
