"""attnfuzz.campaign.draw.schedule: batches grow while all goes well, and stay short in time."""

from __future__ import annotations

from attnfuzz.campaign.draw.schedule import BatchSize


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
