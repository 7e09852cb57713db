"""attnfuzz.campaign.memory_watch: who makes an executor grow, and when it is replaced."""

from __future__ import annotations

import msgspec

from attnfuzz.campaign.memory_watch import MemoryWatch
from tests.unit.pretended_process import KERNEL, a_case

OTHER = msgspec.structs.replace(KERNEL, name="other", target="kernels.py:other")
CASE = a_case()


class Executor:
    """One process after the other, of 100 bytes of room each; ``gpu`` is the share of the GPU memory that is taken."""

    def __init__(self) -> None:
        self.watch = MemoryWatch(200)
        self.process, self.nbytes, self.gpu = 0, 100, 0.0

    def run(self, growth: int, *, cases: int = 1, declaration: object = KERNEL) -> bool:
        """Whether the process was replaced before."""
        assert declaration in (KERNEL, OTHER)
        target = KERNEL if declaration is KERNEL else OTHER
        fresh = self.watch.wants_fresh(target)
        if fresh:
            self.process, self.nbytes, self.gpu = self.process + 1, 100, 0.0
        self.watch.look_before(self.process, self.nbytes)
        self.nbytes += growth
        self.watch.look_after(self.process, target, [CASE] * cases, memory_bytes=self.nbytes, gpu_share=self.gpu)
        return fresh


def test_the_kernel_that_grew_most_is_suspected_half_way_to_the_limit() -> None:
    """The one that happens to run there would be looked at, and the one that leaks never."""
    executor = Executor()
    for _ in range(4):
        executor.run(9)
        executor.run(1, declaration=OTHER)
    assert executor.watch.suspect is None
    executor.run(9)
    executor.run(1, declaration=OTHER)
    assert executor.watch.suspect == (KERNEL, CASE)


def test_gpu_memory_counts_as_well() -> None:
    """A kernel that leaks only there would be seen when nothing is left."""
    executor = Executor()
    executor.run(0)
    executor.gpu = 0.6
    executor.run(0)
    assert executor.watch.suspect == (KERNEL, CASE)


def test_a_kernel_that_leaks_never_reaches_the_limit() -> None:
    """Each death costs the cases that were running."""
    executor = Executor()
    executor.run(60)
    executor.watch.checked(KERNEL, leaks=True)
    for _ in range(20):
        executor.run(30)
        assert executor.nbytes < 200


def test_batches_of_a_kernel_that_leaks_fit_into_a_process() -> None:
    """A batch dies as a whole, and all of it is run again."""
    executor = Executor()
    executor.run(60, cases=10)
    assert executor.watch.batches(KERNEL, [CASE] * 32) == [[CASE] * 32]
    executor.watch.checked(KERNEL, leaks=True)
    parts = executor.watch.batches(KERNEL, [CASE] * 32)
    assert sum(map(len, parts)) == 32
    assert max(map(len, parts)) * 6 < 50
    assert executor.watch.batches(OTHER, [CASE] * 32) == [[CASE] * 32]


def test_a_kernel_that_needs_much_and_leaks_nothing_keeps_its_process() -> None:
    """A process for each case is what makes a search slow."""
    executor = Executor()
    executor.run(70)
    executor.watch.checked(KERNEL, leaks=False)
    assert not any(executor.run(0) for _ in range(200))
    executor.watch.checked(KERNEL, leaks=False)
    assert executor.watch.suspect is None
    assert sum(executor.run(0) for _ in range(500)) <= 2


def test_without_a_limit_nothing_is_suspected() -> None:
    """There is nothing to run out of."""
    watch = MemoryWatch(None)
    watch.look_before(0, 100)
    watch.look_after(0, KERNEL, [CASE], memory_bytes=10**12, gpu_share=0.0)
    assert watch.suspect is None
    assert not watch.wants_fresh(KERNEL)
