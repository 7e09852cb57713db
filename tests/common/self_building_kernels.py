"""Kernels that compile themselves when they are first called, as just-in-time compilers do, and one that need not.

Right in every case, but for one that never gives a result. Of the folder ATTNFUZZ_TEST_BUILDS: ``begun`` names each
build that got anywhere, ``overlaps`` each that did while another one went on. Builds wait for the file ``may_end``
there if ATTNFUZZ_TEST_WAITS is set.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path
from typing import Any

import attnfuzz
from attnfuzz.kernels.bundled import dense_naive

_SCRIPT = """#!/bin/sh
sleep 2
exec 9>> at_work
flock --nonblock 9 || echo $1 >> overlaps
echo $1 >> begun
while [ "$ATTNFUZZ_TEST_WAITS" ] && [ ! -e may_end ]; do sleep 0.1; done
"""
_SUPPORTS = attnfuzz.Supports(dtypes=("float16", "bfloat16"), head_sizes=(16, 32))


def _build(name: str) -> None:
    """Compile ``name`` unless that has been done, and note in a file that it was begun."""
    folder = Path(os.environ["ATTNFUZZ_TEST_BUILDS"])
    with (folder / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            subprocess.run([_ninja(folder), name], check=True, cwd=folder)
            (folder / name).touch()


def _ninja(folder: Path) -> str:
    """A compiler that only takes time. Two of them at once tell of it, once each has been at work for a while."""
    program = folder / "ninja"
    if not program.exists():
        script = folder / f"ninja-{os.getpid()}"
        script.write_text(_SCRIPT)
        script.chmod(0o755)
        script.rename(program)
    return str(program)


@attnfuzz.kernel("dense_decode", supports=_SUPPORTS)
def builds_itself(inputs: Any) -> Any:
    _build(f"{inputs.q.dtype}-{inputs.q.shape[-1]}")
    return dense_naive.function(inputs)


@attnfuzz.kernel("dense_decode", supports=_SUPPORTS)
def builds_itself_too(inputs: Any) -> Any:
    _build(f"too-{inputs.q.dtype}-{inputs.q.shape[-1]}")
    return dense_naive.function(inputs)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float16",), head_sizes=(16,)))
def builds_itself_and_returns_elsewhere(inputs: Any) -> Any:
    _build("elsewhere")
    return inputs.out.to("meta")


@attnfuzz.kernel("dense_decode", supports=_SUPPORTS)
def is_ready(inputs: Any) -> Any:
    return dense_naive.function(inputs)


@attnfuzz.kernel("dense_decode", supports=_SUPPORTS, prepare=lambda: _build("prepared"))
def is_prepared(inputs: Any) -> Any:
    if not (Path(os.environ["ATTNFUZZ_TEST_BUILDS"]) / "prepared").exists():
        raise RuntimeError("prepare() has not been called")
    return dense_naive.function(inputs)


def _cannot() -> None:
    raise RuntimeError("no compiler is installed")


@attnfuzz.kernel("dense_decode", supports=_SUPPORTS, prepare=_cannot)
def cannot_be_prepared(inputs: Any) -> Any:
    return dense_naive.function(inputs)
