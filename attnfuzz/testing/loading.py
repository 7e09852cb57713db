"""The kernel that a test names, as another process loads it, and the runner of this process that judges it."""

from __future__ import annotations

import ast
import atexit
import os
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from attnfuzz.declaration import BUNDLED_MODULE, Declaration, Kernel, load_kernels
from attnfuzz.isolation.devices import DeviceLease
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.declared_numerics import Tolerance

Found = TypeVar("Found", Kernel, Declaration)


def declaration_of(kernel: Kernel | str, *, device: str, isolated: bool) -> Declaration:
    """The declaration of one kernel, its ``target`` set unless the kernel is not ``isolated``.

    Raises ValueError for something else than one kernel, or one that no other process can load.
    """
    if isinstance(kernel, str):
        return _load_elsewhere(kernel, device) if isolated else load_here(kernel).declaration
    if not isinstance(kernel, Kernel):
        raise ValueError(f"kernel={kernel!r} must be decorated with @attnfuzz.kernel, or be the name of such a kernel")
    target = target_of(kernel)
    if isolated and not target:
        raise ValueError(
            f"kernel {kernel.declaration.name!r} is not at the top level of a file, so no other process can load it; "
            "move it there or pass isolated=False"
        )
    return msgspec.structs.replace(kernel.declaration, target=target)


def load_here(target: str) -> Kernel:
    """Import the one kernel named ``target`` in this process. Raises KernelLoadError or ValueError."""
    return _only(load_kernels(target), target)


def target_of(kernel: Kernel) -> str:
    """How another process loads ``kernel``: by bundled name, module or file; "" if it cannot."""
    module = sys.modules.get(kernel.__module__)
    names = [name for name, value in vars(module).items() if value is kernel] if module else []
    place = kernel.declaration.target.rpartition(":")[0]
    if not names or not place:
        return kernel.declaration.target
    if kernel.__module__ == BUNDLED_MODULE:
        return kernel.declaration.name
    return f"{kernel.__module__ if _imports_relatively(Path(place)) else place}:{names[0]}"


def _imports_relatively(path: Path) -> bool:
    """Whether the file can only be imported as part of its package."""
    tree = ast.parse(path.read_bytes())
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(tree))


def _load_elsewhere(target: str, device: str) -> Declaration:
    return _only(shared_runner(device).declarations([target]), target)


def _only(found: list[Found], target: str) -> Found:
    if len(found) != 1:
        declarations = [one.declaration if isinstance(one, Kernel) else one for one in found]
        names = ", ".join(repr(declaration.name) for declaration in declarations)
        raise ValueError(f"kernel={target!r} names {len(found)} kernels ({names}); name one of them")
    return found[0]


_runners: dict[tuple[object, ...], Runner] = {}
_lease: DeviceLease | None = None


def pin_to(lease: DeviceLease) -> None:
    """Have the runners that are asked for from now on use this GPU only."""
    global _lease
    _lease = lease


def shared_runner(
    device: str = "auto", oracles: tuple[OracleName, ...] = DEFAULT_ORACLES, tolerance: Tolerance = "bound"
) -> Runner:
    """The runner of this process for these settings. It is closed when the process ends."""
    key = (os.getpid(), device, oracles, tolerance, _lease)  # a forked child may not use its parent's pipes
    if key not in _runners:
        if not _runners:
            atexit.register(_close_all)
        _runners[key] = Runner(
            device=device, oracles=oracles, tolerance=tolerance, environment=_lease.environment if _lease else None
        )
    return _runners[key]


def _close_all() -> None:
    for key, runner in _runners.items():
        if key[0] == os.getpid():
            runner.close()
    _runners.clear()
