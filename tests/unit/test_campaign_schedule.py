"""attnfuzz.campaign.draw.sampling: every kernel gets its share of time, and batches grow while all goes well."""

from __future__ import annotations

import pytest

from attnfuzz.campaign.draw.sampling import BatchSize, Schedule


def run(schedule: Schedule, turns: int, seconds: dict[str, float] | None = None) -> list[str]:
    order = []
    for _ in range(turns):
        target = schedule.next_target()
        schedule.record(target, seconds=(seconds or {}).get(target, 1.0), cases=10)
        order.append(target)
    return order


def test_all_kernels_come_before_any_comes_again() -> None:
    """A bug in the last kernel of the list must not wait until the others have used up the budget."""
    assert run(Schedule(["a", "b", "c"]), 3) == ["a", "b", "c"]


def test_time_is_equalised_not_turns() -> None:
    """A kernel that hangs (or shrinks for long) must not take the time of the others."""
    order = run(Schedule(["slow", "fast"]), 11, {"slow": 10.0, "fast": 1.0})
    assert order.count("fast") == 10


def test_workers_start_at_different_kernels() -> None:
    """Two workers that search the same kernel first reach the others only half as soon."""
    firsts = {Schedule(list("abcd"), worker=worker, num_workers=2).next_target() for worker in range(2)}
    assert firsts == {"a", "c"}


def test_a_worker_goes_on_where_the_one_before_it_comes_last() -> None:
    """What a slow worker has not come to would wait while the others repeat what it has done."""
    assert run(Schedule(list("abcdef"), worker=1, num_workers=3), 6) == ["c", "d", "b", "a", "f", "e"]


def test_fewer_cases_break_a_tie() -> None:
    """Of two kernels with the same time, the one whose cases are slow has seen less of its inputs."""
    schedule = Schedule(["many", "few"])
    schedule.record("many", seconds=1.0, cases=50)
    schedule.record("few", seconds=1.0, cases=5)
    assert schedule.next_target() == "few"


def test_slices_fit_the_budget() -> None:
    """Slices longer than what is left, or a first round that leaves no time for other kernels, break the budget."""
    schedule = Schedule([f"kernel{i}" for i in range(20)])
    assert schedule.slice_s("kernel0", 1000.0) == 1.0
    assert schedule.slice_s("kernel0", 12.0) == 0.3
    assert schedule.slice_s("kernel0", 0.1) == 0.0025
    schedule.record("kernel0", seconds=1.0, cases=1)
    assert schedule.slice_s("kernel0", 1000.0) == 3.0


def test_what_a_failure_takes_is_charged_to_its_kernel() -> None:
    """A kernel with many bugs must not live on the time of the others."""
    schedule = Schedule(["buggy", "other"])
    for target in ("buggy", "other"):
        schedule.record(target, seconds=1.0, cases=1)
    schedule.charge("other", 0.5)
    assert schedule.next_target() == "buggy"
    schedule.charge("buggy", 30.0)
    assert schedule.next_target() == "other"


def test_a_kernel_that_takes_its_process_down_gets_half_the_time() -> None:
    """Three of those beside five healthy ones would take more than a third of all time."""
    schedule = Schedule(["fatal", "other"])
    run(schedule, 2)
    schedule.is_fatal("fatal")
    order = run(schedule, 30)
    assert order.count("other") == 2 * order.count("fatal")


FAST, FIRST = [0.001] * 7, [0.35, 0.05, *[0.005] * 4]
SIZES: dict[str, tuple[list[float], float, list[int]]] = {
    "an endless batch would answer to nobody": (FAST, 0.0, [1, 2, 4, 8, 16, 32, 32, 32]),
    "a worker that judges for seconds overruns budgets": ([0.06] * 7, 0.0, [1, 2, 4, 5, 5, 5, 5, 5]),
    "and lets go of large ones": ([0.005, 0.005, *[1.0] * 6], 0.0, [1, 2, 4, 1, 1, 1, 1, 1, 1]),
    "code is loaded for the first case of a process": (FIRST, 0.0, [1, 1, 2, 4, 8, 16, 32]),
    "a batch takes more than its cases": ([0.005] * 6, 0.05, [1, 2, 4, 8, 16, 32, 32]),
}
"""By why: seconds of each case of the batches, of each batch besides, and the sizes of those and the next."""


@pytest.mark.parametrize("why", SIZES)
def test_batches_grow_while_all_goes_well_and_take_no_seconds(why: str) -> None:
    """One wait for the device per batch is what makes a GPU fast; but results and mail are looked at between them."""
    cases, besides, expected = SIZES[why]
    size = BatchSize(32)
    seen = [size.size]
    for case_s in cases:
        size.went_well(besides + case_s * size.size, size.size)
        seen.append(size.size)
    assert seen == expected


def test_batches_begin_again_after_a_failure_and_do_not_grow_by_what_is_left_over() -> None:
    """A batch that dies is judged twice; and one that was not full proves nothing about larger ones."""
    size = BatchSize(32)
    for cases in (1, 2, 1):
        size.went_well(0.001 * cases, cases)
    assert size.size == 4
    size.went_wrong()
    assert size.size == 1
