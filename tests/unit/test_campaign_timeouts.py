"""attnfuzz.campaign.judge.judging: how long a case may take is learned from those that passed."""

from __future__ import annotations

from attnfuzz.campaign.judge.judging import AdaptiveTimeout


def test_the_first_cases_have_the_longest_time() -> None:
    """The first case of a kernel may compile it; calling that a hang would be a false alarm."""
    timeout = AdaptiveTimeout(60.0)
    for _ in range(9):
        timeout.record(0.01)
    assert timeout.limit_s() == 60.0


def test_later_cases_have_twenty_times_the_slowest() -> None:
    """With the full time for each of many hanging cases, a kernel that hangs would use up the budget."""
    timeout = AdaptiveTimeout(60.0)
    for seconds in (0.5, *[0.01] * 9):
        timeout.record(seconds)
    assert timeout.limit_s() == 10.0
    assert timeout.limit_s(short=True) == 3.0


def test_the_limit_stays_within_its_ends() -> None:
    """A limit of milliseconds would take any hiccup of the machine for a hang; one beyond the longest is no limit."""
    fast, slow = AdaptiveTimeout(10.0), AdaptiveTimeout(10.0)
    for _ in range(10):
        fast.record(0.001)
        slow.record(3.0)
    assert fast.limit_s() == 2.0
    assert fast.limit_s(short=True) == 0.5
    assert slow.limit_s() == 10.0


def test_a_hang_is_certain_well_before_the_longest_time() -> None:
    """On a GPU, where the first case may compile for a minute, each hang would take minutes to look into."""
    gpu, cpu = AdaptiveTimeout(60.0), AdaptiveTimeout(10.0)
    assert gpu.certain_s == 60.0
    for timeout in (gpu, cpu):
        timeout.record(0.1, cases=10)
    assert gpu.certain_s == cpu.certain_s == 10.0
    gpu.record(2.0)
    assert gpu.certain_s == 40.0


def test_a_batch_may_take_as_long_as_all_of_its_cases_may() -> None:
    """The limit of a single case would call every large batch a hang."""
    timeout = AdaptiveTimeout(longest_s=10.0)
    timeout.record(0.25, cases=10)
    assert timeout.limit_s() == 5.0
    assert timeout.batch_limit_s(9) == 7.0


def test_a_batch_does_not_wait_for_what_hangs_in_it_as_long_as_a_case() -> None:
    """It is suspected of nothing: each of its cases is judged alone then, and waited for once more."""
    timeout = AdaptiveTimeout(longest_s=10.0)
    timeout.record(0.01)
    assert timeout.limit_s() == 10.0
    assert timeout.batch_limit_s(11) == 2.6


def test_the_first_case_of_a_format_has_a_patience_of_its_own() -> None:
    """A kernel that compiles within its own process would be killed half way, and accused of a hang."""
    timeout = AdaptiveTimeout(60.0)
    timeout.record(0.01, cases=100)
    assert (timeout.limit_s(), timeout.limit_s(first=True)) == (2.0, 60.0)
    for _ in range(10):
        timeout.record(1.5, first=True)
    assert (timeout.limit_s(), timeout.limit_s(first=True)) == (2.0, 30.0)
    assert timeout.certain_s == 30.0  # in a fresh process, where every format is new
