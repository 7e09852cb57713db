"""Offsets and ids in too few bits are found on a GPU with a handful of tokens; right kernels are left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.cases.supported import adapt_options
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case
from attnfuzz.verdict import Failure
from tests.gpu.bundled_cases import BUNDLED, fitted
from tests.oracles.relations.test_page_relocation import OTHER_LAYOUTS, PAGED, PLANTED, RIGHT
from tests.quality.mutants import Edit, Mutant
from tests.quality.planting import plant

RUNS = 20

FAR: dict[str, Case] = {str(case.problem): case for case, _ in RIGHT}


@pytest.fixture(scope="module")
def far() -> Iterator[Runner]:
    with Runner(device="cuda") as started:
        yield started


def judged(runner: Runner, target: str, case: Case, *relations: Any) -> Failure | None:
    (declaration,) = runner.declarations([target])
    return runner.judge(declaration, adapt_options(case, declaration.options), relations=relations).failure


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str, far: Runner, tmp_path: Path) -> None:
    """Kernels that break where caches are as large as in production would pass every other oracle."""
    kernel, case, edit, kind, words = PLANTED[name]
    target = plant(Mutant(name, kernel, "", "D", "page_relocation", {}, (edit,)), tmp_path)
    assert judged(far, target, case) is None
    failure = judged(far, target, case, "page_relocation")
    assert failure is not None
    assert failure.oracle == "page_relocation"
    if not failure.kind.startswith("raised cuda:"):  # an offset may come out where nothing is
        assert failure.kind == kind
        assert words in failure.message


def test_limit_is_named(far: Runner, tmp_path: Path) -> None:
    """Wrapped offsets would end in a lost context, which says nothing about pages."""
    edit = PLANTED["int32_page_offset"][2]
    target = plant(Mutant("words", "paged_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    failure = judged(far, target, PAGED, "page_relocation")
    assert failure is not None
    assert failure.kind == "page ids"
    assert "past 2^31 elements and 2^32 bytes" in failure.message


def test_offset_below_the_cache_is_no_crash_of_the_case(far: Runner, tmp_path: Path) -> None:
    """The case would be reported as one that crashes, which by itself it does not."""
    offset = "o_kt = i_block * stride_kb + i_off * stride_kt"
    edit = Edit("paged/paged_walk.py", offset, f"{offset}\n        o_kt = tl.where(o_kt >> 31, -(1 << 28), o_kt)")
    target = plant(Mutant("negative", "paged_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    failure = judged(far, target, PAGED, "page_relocation")
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("page_relocation", "raised cuda:illegal memory access")
    assert "with page ids from" in failure.message


@pytest.mark.parametrize("changes", OTHER_LAYOUTS)
def test_all_layouts_and_strides(changes: dict[str, Any], far: Runner, tmp_path: Path) -> None:
    """A layout whose pages do not go where they should would hide the bug, or blame the right kernel."""
    case = msgspec.structs.replace(PAGED, **changes)
    edit = PLANTED["int32_page_offset"][2]
    target = plant(Mutant("layouts", "paged_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    failure = judged(far, target, case, "page_relocation")
    assert failure is not None
    assert failure.oracle == "page_relocation"
    for kernel in ("paged_naive", "paged_eager"):
        assert judged(far, kernel, case, "page_relocation") is None


@pytest.mark.parametrize("kernel", BUNDLED)
def test_right_kernels_are_left_alone(kernel: str, far: Runner, record_property: Callable[[str, object], None]) -> None:
    """A false alarm on a kernel that can do it, or a run so slow that it cannot be afforded."""
    (declaration,) = far.declarations([kernel])
    case = fitted(declaration, FAR[str(declaration.problem)])
    seconds = {}
    for relations in ((), ("page_relocation",)):
        spent = 0.0
        for seed in range(RUNS):
            verdict = far.judge(declaration, reseeded(case, seed), relations=relations)
            assert verdict.failure is None, verdict.failure
            spent += verdict.timing.total_s - verdict.timing.compile_s
        seconds[bool(relations)] = round(1000 * spent / RUNS, 1)
    record_property(f"{kernel}_ms", f"{seconds[False]} without, {seconds[True]} with page_relocation")
    print(f"{kernel}: {seconds[False]} ms, {seconds[True]} ms with page_relocation")


def reseeded(case: Case, seed: int) -> Case:
    if hasattr(case, "values"):
        return msgspec.structs.replace(case, values=msgspec.structs.replace(case.values, seed=seed))
    return msgspec.structs.replace(case, seed=seed)


MEMORY = """
import torch
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.sparse import sparse_memory
from attnfuzz.memory.cuda_virtual import CudaVirtualMemory
from attnfuzz.memory.far import FarAllocator

# Counted here: what the GPU has left also tells of the processes that share it.
created, most = {}, 0
create, release = CudaVirtualMemory.create, CudaVirtualMemory.release

def counted_create(self, nbytes):
    global most
    handle = create(self, nbytes)
    created[handle] = nbytes
    most = max(most, sum(created.values()))
    return handle

def counted_release(self, handle):
    release(self, handle)
    del created[handle]

CudaVirtualMemory.create, CudaVirtualMemory.release = counted_create, counted_release
for turn in range(3):
    arena = Arena("cuda", poison="nan", prefill="nan")
    memory = FarAllocator(arena, first_page=1 << 26, stretched={"q": 0}, on_gpu=sparse_memory())
    for name in ("k_cache", "v_cache"):
        window = memory.tensor(name, (3, 4, 1, 16), torch.float16, strides="contiguous", role="input")
        assert window.isnan().all()
        window.fill_(turn)
        cache = memory.whole[name]
        assert cache.numel() > 1 << 32
        assert cache[-1].eq(turn).all() and cache[0].ne(turn).all() and cache[:512].isfinite().all()
    q = memory.tensor("q", (5, 3, 16), torch.float32, strides="contiguous", role="output")
    q.copy_(torch.arange(240.0).view(5, 3, 16))
    assert q.flatten().tolist() == list(range(240)) and q.stride(0) > 1 << 29
    torch.cuda.synchronize()
    del arena, memory, window, cache, q
    sparse_memory().release(but_for=turn)
assert most > 0
print(most + torch.cuda.max_memory_reserved() >> 20)
"""


def test_memory_stays_small(record_property: Callable[[str, object], None]) -> None:
    """Processes that share a GPU would take it from each other; in a process of its own, which uses CUDA."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    mebibytes = int(done.stdout)
    record_property("taken_mib", mebibytes)
    print(f"{mebibytes} MiB")
    assert mebibytes < 256
