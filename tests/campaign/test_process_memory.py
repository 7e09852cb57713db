"""attnfuzz.campaign.judge.process_memory: what ran in a process, and the memory that it may take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from attnfuzz.campaign.judge.process_memory import History, MemoryWatch, memory_limit
from attnfuzz.corpus import MAX_PRECEDING
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, DenseDecodeCase, encode_case
from tests.campaign.pretended_process import a_case
from tests.common.search_bench import KERNEL

OTHER = msgspec.structs.replace(KERNEL, name="other", target="kernels.py:other")
CASES = [
    DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(n,), scale=0.25) for n in range(1, 1000)
]


def test_cases_of_the_same_kernel_and_process_come_before() -> None:
    """A sequence with a case of another process would not be what led to the failure."""
    history = History()
    history.record(1, KERNEL, CASES[:3])
    history.record(2, KERNEL, CASES[3:5])
    history.record(2, OTHER, CASES[5:6])
    history.record(2, KERNEL, CASES[6:8])
    assert history.before(KERNEL, CASES[7]) == (CASES[3], CASES[4], CASES[6])
    assert history.before(KERNEL, CASES[6]) == (CASES[3], CASES[4])
    assert history.before(OTHER, CASES[5]) == ()


def test_a_case_that_ran_elsewhere_has_nothing_before_it() -> None:
    """Another process's cases would be blamed for it."""
    history = History()
    history.record(1, KERNEL, CASES[:3])
    assert history.before(KERNEL, CASES[9]) == ()


def test_the_first_case_of_a_batch_has_as_much_before_it_as_any() -> None:
    """The history of a long campaign must not grow, and must reach back behind the batch."""
    history = History()
    for start in range(0, 900, 30):
        history.record(1, KERNEL, CASES[start : start + 30])
    assert history.before(KERNEL, CASES[899]) == tuple(CASES[899 - MAX_PRECEDING : 899])
    assert history.before(KERNEL, CASES[870]) == tuple(CASES[870 - MAX_PRECEDING : 870])


GIB = 1 << 30


def test_the_limit_leaves_room_above_what_is_imported() -> None:
    """A kernel that comes with a large library would be ended before its first case."""
    assert memory_limit(3 * GIB, device="cpu", workers=2, available=64 * GIB) == 4 * GIB
    assert memory_limit(GIB, device="cuda", workers=2, available=64 * GIB) == 5 * GIB


def test_workers_share_what_there_is() -> None:
    """Sixteen kernels that leak would together take the machine down, each below its limit."""
    assert memory_limit(GIB // 2, device="cpu", workers=16, available=16 * GIB) < 0.81 * GIB
    assert memory_limit(GIB // 2, device="cpu", workers=64, available=GIB) == GIB // 2 + GIB // 4


CASE = a_case()


class Executor:
    """One process after the other, of 100 bytes of room each; ``gpu`` is the share of the GPU memory that is taken."""

    def __init__(self) -> None:
        self.watch = MemoryWatch(200)
        self.process, self.nbytes, self.gpu = 0, 100, 0.0

    def run(
        self, growth: int, *, cases: int = 1, declaration: Declaration = KERNEL, given: Sequence[Case] = ()
    ) -> bool:
        """Whether the process was replaced before. Growth without end takes it down."""
        fresh = self.watch.wants_fresh(declaration)
        if fresh:
            self.replace()
        self.watch.look_before(self.process, self.nbytes)
        self.nbytes += growth
        dead = self.nbytes > 200
        memory_bytes = 0 if dead else self.nbytes
        ran = given or [CASE] * cases
        self.watch.look_after(self.process, declaration, ran, memory_bytes=memory_bytes, gpu_share=self.gpu)
        if dead:
            self.replace()
        return fresh

    def replace(self) -> None:
        self.process, self.nbytes, self.gpu = self.process + 1, 100, 0.0


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


def test_many_processes_on_a_gpu_content_themselves_with_their_part() -> None:
    """Sixteen at half of a tenth each leave nothing for what the next batch needs, on any of them."""
    for sharing, suspected in ((1, False), (8, False), (16, True)):
        watch = MemoryWatch(None, sharing_gpu=sharing)
        watch.look_before(0, 100)
        watch.look_after(0, KERNEL, [CASE], memory_bytes=100, gpu_share=0.3)
        assert (watch.suspect is not None) is suspected
    watch.checked(KERNEL, leaks=True)
    watch.look_after(0, KERNEL, [CASE], memory_bytes=100, gpu_share=0.9)
    assert watch.wants_fresh(KERNEL)


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


def test_the_case_that_is_looked_at_is_one_that_memory_grew_with() -> None:
    """A kernel that leaks on some cases only would be let go for two others, and end its processes ever after."""
    leaking, content = a_case(2), a_case(3)
    executor = Executor()
    for _ in range(6):
        executor.run(10, given=[leaking])
        executor.run(0, given=[content])
    assert executor.watch.suspect == (KERNEL, leaking)


def test_another_case_of_a_batch_is_looked_at_after_one_that_does_not_leak() -> None:
    """Which case of a batch took the memory cannot be told."""
    looked_at = set()
    executor = Executor()
    batch = [a_case(length, num_q_heads=heads) for heads in (1, 2) for length in (1, 2)]
    for _ in range(4):
        for _ in range(3):
            executor.run(20, given=batch)
        assert executor.watch.suspect is not None
        looked_at.add(encode_case(executor.watch.suspect[1]))
        executor.watch.checked(KERNEL, leaks=False)
        executor.replace()
    assert len(looked_at) > 2


def test_a_process_that_died_has_not_shrunk() -> None:
    """After a few deaths a kernel that leaks would look as if it gave memory back, and never be replaced in time."""
    executor = Executor()
    executor.run(60)
    executor.watch.checked(KERNEL, leaks=True)
    for _ in range(6):
        executor.run(110)
    executor.run(45)
    assert executor.run(45)


def test_a_leak_that_another_worker_found_counts_here() -> None:
    """Each worker would look for it once more."""
    executor = Executor()
    executor.watch.leaks(KERNEL.target)
    assert not any(executor.run(10) for _ in range(4))
    assert executor.run(60) is False
    assert executor.watch.suspect is None
    assert executor.run(10)


def test_without_a_limit_nothing_is_suspected() -> None:
    """There is nothing to run out of."""
    watch = MemoryWatch(None)
    watch.look_before(0, 100)
    watch.look_after(0, KERNEL, [CASE], memory_bytes=10**12, gpu_share=0.0)
    assert watch.suspect is None
    assert not watch.wants_fresh(KERNEL)
