"""attnfuzz.campaign.draw.sampling: every kernel gets its share of time, and batches grow while all goes well."""

from __future__ import annotations

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


def test_the_size_doubles_while_all_goes_well_up_to_the_most() -> None:
    """One wait for the device per batch is what makes a GPU fast; an endless batch would answer to nobody."""
    size = BatchSize(32)
    seen = []
    for _ in range(7):
        seen.append(size.size)
        size.went_well(0.001 * size.size, size.size)
    assert seen == [1, 2, 4, 8, 16, 32, 32]


def test_slow_cases_make_small_batches() -> None:
    """A worker that judges for seconds without a look at the clock or its mail overruns budgets and stops."""
    size = BatchSize(32)
    for _ in range(8):
        size.went_well(0.06 * size.size, size.size)
    assert size.size == 5
    for _ in range(20):
        size.went_well(1.0, 1)
    assert size.size == 1


def test_the_first_case_of_a_process_is_no_reason_for_small_batches() -> None:
    """Code is loaded for it: on a GPU it took 0.35 s, and the next ten batches were of one or two cases."""
    size = BatchSize(32)
    seen = []
    for seconds in (0.35, 0.05, *(0.005 * 2**i for i in range(1, 5))):
        seen.append(size.size)
        size.went_well(seconds, size.size)
    assert seen == [1, 1, 2, 4, 8, 16]


def test_what_a_batch_takes_besides_its_cases_is_no_reason_for_small_ones() -> None:
    """A batch of a case takes ten times as long as each of thirty: on a GPU the first ten batches would be small."""
    size = BatchSize(32)
    for _ in range(5):
        size.went_well(0.05 + 0.005 * size.size, size.size)
    assert size.size == 32


def test_after_a_failure_cases_are_judged_alone_again() -> None:
    """A batch that dies is judged twice: where deaths are frequent, batches do not pay."""
    size = BatchSize(32)
    for _ in range(5):
        size.went_well(0.001, size.size)
    size.went_wrong()
    assert size.size == 1


def test_a_batch_that_was_not_full_proves_nothing_about_larger_ones() -> None:
    """What is left over at the end of a round must not let the size grow."""
    size = BatchSize(32)
    size.went_well(0.001, 1)
    size.went_well(0.002, 2)
    size.went_well(0.001, 1)
    assert size.size == 4
