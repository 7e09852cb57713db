"""Kernels that keep memory with each call: what is measured, and when it is a failure."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging import special_runs as growth_module
from attnfuzz.judging.leaks import LEAK, MemoryUse, find_leak
from attnfuzz.judging.runner import Runner
from attnfuzz.judging.special_runs import GrowthTrial
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.verdict import Failure

KERNELS = Path(__file__).parents[1] / "common" / "leaking_kernels.py"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")


class Cycle:
    """Freed by the collector alone."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python frees cycles later, and would have freed these."""
    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    (correct,) = load_kernels("dense_eager")

    def makes_cycles(inputs: Any) -> Any:
        alive.add(Cycle())
        return correct(inputs)

    # Of a process only the collector's part can be foretold: what is freed, malloc may keep, and tests before this one
    # have a say in that.
    monkeypatch.setattr(growth_module, "resident_bytes", lambda pid: len(alive))
    monkeypatch.setattr(growth_module, "descendant_bytes", lambda pid: 0)
    trial = GrowthTrial(Kernel(makes_cycles, correct.declaration), CASE, device="cpu")
    gc.disable()
    try:
        assert trial.use_after(20).host_bytes == 0
    finally:
        gc.enable()


MEBIBYTE = 1 << 20
LIMIT = 1500 * MEBIBYTE


def of_process(memory: Callable[[int], float], *, room: float = float("inf"), on_gpu: bool = False) -> Failure | None:
    """What is found where ``memory(n)`` bytes are taken after ``n`` calls, of a process that ends beyond ``room``."""
    calls = 0

    def use_after(more: int) -> MemoryUse | None:
        nonlocal calls
        calls += more
        nbytes = int(memory(calls))
        if nbytes > room:
            return None
        return MemoryUse(300 * MEBIBYTE, nbytes) if on_gpu else MemoryUse(nbytes)

    return find_leak(use_after)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_steady_growth_is_told_with_its_size(on_gpu: bool) -> None:
    """Without the size nobody knows what to look for."""
    found = of_process(lambda calls: calls * 16 * MEBIBYTE, on_gpu=on_gpu)
    assert found is not None
    assert (found.oracle, found.kind) == ("crash", LEAK)
    what = "GPU memory" if on_gpu else "memory"
    assert found.message == f"every call keeps another 16.0 MiB of {what} (seen over 16 calls)"


def test_a_leak_shows_from_kilobytes_to_a_tenth_of_the_memory() -> None:
    """The first needs many calls, of the last a process survives only a few."""
    for kibibytes in (8, 100, 1 << 10, 100 << 10):
        found = of_process(lambda calls, each=kibibytes: calls * each << 10, room=1 << 30)  # type: ignore[misc]
        assert found is not None, kibibytes


def test_what_fills_up_is_no_leak() -> None:
    """Every kernel with a cache would be reported."""
    for entries in (1, 5, 20, 60, 100):
        for each in (4 << 10, MEBIBYTE, 2 * MEBIBYTE):
            cache = of_process(lambda calls, most=entries, each=each: min(calls, most) * each)  # type: ignore[misc]
            assert cache is None, (entries, each)


def test_memory_that_goes_up_and_down_is_no_leak() -> None:
    """Allocators keep some of what they are given back, now more and now less."""
    for seed in range(50):
        random = Random(seed)
        assert of_process(lambda calls, random=random: random.randrange(64 * MEBIBYTE)) is None  # type: ignore[misc]
        total = 0

        def wander(calls: int, random: Random = random) -> int:
            nonlocal total
            total += random.randrange(-MEBIBYTE, MEBIBYTE)
            return total

        assert of_process(wander) is None


def test_a_process_that_ends_at_once_has_not_been_seen_to_grow() -> None:
    """Every crash would be a leak."""
    assert of_process(lambda calls: calls, room=0) is None
    assert of_process(lambda calls: calls * 16 * MEBIBYTE, room=64 * MEBIBYTE) is None


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cpu", memory_limit_bytes=LIMIT) as runner:
        yield runner


@pytest.mark.parametrize(
    ("kernel", "each"),
    [("keeps_16_mebibytes", "16.0 MiB"), ("keeps_a_little", "3"), ("keeps_much", "100.0 MiB"), ("keeps_inputs", "4.")],
)
@pytest.mark.by_day("keeps_a_little-*")
def test_kernels_that_leak(runner: Runner, kernel: str, each: str) -> None:
    """A kernel in a server calls itself to death."""
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    found = runner.find_leak(declaration, CASE)
    assert found is not None
    assert f"every call keeps another {each}" in found.message


@pytest.mark.parametrize("kernel", ["keeps_the_latest", "keeps_once", "makes_cycles"])
@pytest.mark.by_day("keeps_once")
def test_kernels_that_keep_memory_within_bounds(runner: Runner, kernel: str) -> None:
    """Caches are what makes kernels fast."""
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    assert runner.find_leak(declaration, CASE) is None


@pytest.mark.parametrize("kernel", ["dense_naive", "paged_split_k", "merge_states_triton", "dense_eager"])
@pytest.mark.night
def test_bundled_kernels_do_not_leak(runner: Runner, kernel: str) -> None:
    """Triton keeps what it has compiled, once for each specialisation, and torch what it has allocated."""
    (declaration,) = runner.declarations([kernel])
    case = simplest_case(declaration.problem, declaration.supports, declaration.options)
    assert runner.find_leak(declaration, case) is None


def test_looks_that_follow_each_other_take_one_process_each(runner: Runner) -> None:
    """A leak is shrunk by looking again and again, and starting a process takes most of a look on a GPU."""
    (declaration,) = runner.declarations([f"{KERNELS}:keeps_16_mebibytes"])
    runner.judge(declaration, CASE)
    before = runner.restarts
    found = [runner.find_leak(declaration, CASE) for _ in range(2)]
    assert None not in found
    assert runner.restarts == before + 3
