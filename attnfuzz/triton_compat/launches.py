"""Launches of Triton on a GPU: the TTIR of each kernel, and the tensors that it is launched with."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """``addresses`` are those of tensors, by the name of the argument."""

    ttir: str
    addresses: dict[str, int]


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Fill a list with what is launched meanwhile; with nothing where no Triton is installed, or one unknown."""
    launches: list[Launch] = []
    jit = importlib.import_module("triton.runtime.jit") if importlib.util.find_spec("triton") else None
    function = getattr(jit, "JITFunction", None)
    run = vars(function).get("run") if isinstance(function, type) else None
    if run is None or not callable(run):
        yield launches
        return

    @functools.wraps(run)
    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = run(self, *args, **kwargs)
        ttir = getattr(compiled, "asm", {}).get("ttir")
        if isinstance(ttir, str):
            given = dict(zip(getattr(self, "arg_names", ()), args, strict=False)) | kwargs
            tensors: list[tuple[str, Any]] = [(name, getattr(one, "base", one)) for name, one in given.items()]
            addresses = {name: one.data_ptr() for name, one in tensors if hasattr(one, "data_ptr")}
            launches.append(Launch(ttir, addresses))
        return compiled

    setattr(function, "run", recording)  # noqa: B010 - of a class that a type checker does not know
    try:
        yield launches
    finally:
        setattr(function, "run", run)  # noqa: B010 - as above
