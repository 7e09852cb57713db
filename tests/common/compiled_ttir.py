"""TTIR of kernels with each of their mistakes, as a GPU would get it, made without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.scripts import run_script

_COMPILE = """
import importlib, json, sys
folder, module, types, constants = json.loads(sys.argv[1])
sys.path.insert(0, folder)
kernels = importlib.import_module(module)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

found = {}
for mistake in kernels.MISTAKES:
    values = constants | {"MISTAKE": mistake}
    known = types | dict.fromkeys(values, "constexpr")
    signature = {name: known.get(name, "i32") for name in kernels.decode_kernel.arg_names}
    source = ASTSource(kernels.decode_kernel, signature=signature, constexprs=values)
    found[mistake] = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
print(json.dumps(found))
"""


def ttir_of_mistakes(kernels: Path, types: dict[str, str], cache: Path) -> dict[str, str]:
    """Of the ``decode_kernel`` of this file with each of its ``MISTAKES``; arguments without a type are ``i32``.

    In a process of its own: in that of the tests, Triton interprets.
    """
    asked: list[Any] = [str(kernels.parent), kernels.stem, types, {"D": 16, "TILE": 16}]
    run = run_script(_COMPILE, json.dumps(asked), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    assert run.returncode == 0, run.stderr
    answer: dict[str, str] = json.loads(run.stdout)
    return answer
