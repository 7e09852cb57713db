"""Triton kernels of families compile for a GPU, whatever is drawn: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = (
    "block_sparse",
    "cache_write",
    "hybrid_decode",
    "indexer_topk",
    "latent_verify",
    "merge_ranks",
    "packed_decode",
    "recurrent_decode",
    "sparse_decode",
)
_COMPILE = """
import sys
from attnfuzz.declaration import load_kernels
from attnfuzz.inputs.allocation import PlainAllocator, allocate
from attnfuzz.inputs.registry import problem_of
from attnfuzz.strategies import cases
from tests.quality.compiled import Call, Compiler
from tests.unit.drawing import drawn_from

(name,) = sys.argv[1:]
(kernel,) = load_kernels(f"attnfuzz.families.{name}_kernels:{name}")
compiler, found = Compiler("sm_90"), 0
for case in drawn_from(cases(kernel.declaration.problem, supports=kernel.declaration.supports), draws=40):
    inputs = problem_of(case).inputs(case, allocate(case, PlainAllocator("cpu")))
    call = Call(name, "", getattr(case, "head_size", 0), lambda: kernel.function(inputs, **case.options))
    found += len(list(compiler.of(call)))
print(found)
"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.by_day("packed_decode")
def test_a_familys_kernel_compiles(name: str, tmp_path: Path) -> None:
    """On the first GPU all searches of the family would end with a compiler's message."""
    own = {"TRITON_INTERPRET": "0", "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _COMPILE, name]
    run = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0
