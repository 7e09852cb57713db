"""Kernels that compile themselves when they are first called, as just-in-time compilers do. Right in every case."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attnfuzz
from attnfuzz.kernels.bundled import dense_naive

BUILD_S = 1.5
_SUPPORTS = attnfuzz.Supports(dtypes=("float16", "bfloat16"), head_sizes=(16, 32))


def _build(name: str) -> None:
    """Compile ``name`` unless that has been done, and note in a file that it was begun."""
    folder = Path(os.environ["ATTNFUZZ_TEST_BUILDS"])
    with (folder / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            with (folder / "begun").open("a") as begun:
                begun.write(f"{name}\n")
            subprocess.run([sys.executable, "-c", f"import time; time.sleep({BUILD_S})"], check=True)
            (folder / name).touch()


@attnfuzz.kernel("dense_decode", supports=_SUPPORTS)
def builds_itself(inputs: Any) -> Any:
    _build(f"{inputs.q.dtype}-{inputs.q.shape[-1]}")
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
