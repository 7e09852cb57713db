"""Triton kernels of families compile for a GPU, whatever is drawn: the interpreter takes what the compiler refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_script

MOST_PROGRAMS = {
    "block_sparse": 18,
    "cache_write": 110,
    "hybrid_decode": 6,
    "indexer_topk": 1,
    "latent_verify": 48,
    "merge_ranks": 45,
    "packed_decode": 36,
    "recurrent_decode": 64,
    "sparse_decode": 60,
}
"""Of the Triton kernel of each family, for which 300 drawn cases have it compiled: formats, dtypes and head sizes."""
_COMPILE = """
import sys
from attnfuzz.declaration import load_kernels
from attnfuzz.inputs.allocation import PlainAllocator, allocate
from attnfuzz.inputs.registry import problem_of
from attnfuzz.strategies import cases
from tests.quality.compiled import Call, Compiler
from tests.common.drawing import drawn_from

name, draws = sys.argv[1:]
(kernel,) = load_kernels(f"attnfuzz.families.{name}_kernels:{name}")
compiler, found = Compiler("sm_90"), 0
for case in drawn_from(cases(kernel.declaration.problem, supports=kernel.declaration.supports), draws=int(draws)):
    inputs = problem_of(case).inputs(case, allocate(case, PlainAllocator("cpu")))
    call = Call(name, "", getattr(case, "head_size", 0), lambda: kernel.function(inputs, **case.options))
    found += len(list(compiler.of(call)))
print(found)
"""


_COUNT = """
import sys
from triton import knobs
from attnfuzz.declaration import load_kernels
from attnfuzz.inputs.allocation import PlainAllocator, allocate
from attnfuzz.inputs.registry import problem_of
from attnfuzz.strategies import cases
from tests.quality.compiled import Compiler
from tests.common.drawing import drawn_from

Compiler("sm_90")
for name in sys.argv[1:]:
    (kernel,) = load_kernels(f"attnfuzz.families.{name}_kernels:{name}")
    programs = set()
    # Triton asks before it compiles, and does not if the answer is true
    knobs.runtime.jit_cache_hook = lambda fn, key, **_: programs.add((fn.name, key)) or True
    for case in drawn_from(cases(kernel.declaration.problem, supports=kernel.declaration.supports), draws=300):
        inputs = problem_of(case).inputs(case, allocate(case, PlainAllocator("cpu")))
        kernel.function(inputs, **case.options)
    print(name, len(programs))
"""


def test_a_familys_kernel_is_compiled_for_few_of_its_cases(tmp_path: Path) -> None:
    """On a GPU nine tenths of a search would go into the compiler, for strides of scales and sizes of pages."""
    run = run_script(_COUNT, *MOST_PROGRAMS, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    counts = {name: int(count) for name, count in map(str.split, run.stdout.splitlines())}
    assert counts.keys() == MOST_PROGRAMS.keys()
    assert {name: count for name, count in counts.items() if not 0 < count <= MOST_PROGRAMS[name]} == {}


@pytest.mark.parametrize(("name", "draws"), [("packed_decode", 10), *((name, 40) for name in MOST_PROGRAMS)])
@pytest.mark.by_day("packed_decode-10")
def test_a_familys_kernel_compiles(name: str, draws: int, tmp_path: Path) -> None:
    """On the first GPU all searches of the family would end with a compiler's message."""
    own = {"TRITON_INTERPRET": "0", "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    run = run_script(_COMPILE, name, draws, **own)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0
