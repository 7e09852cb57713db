"""Which kernel comes next, how many cases are enough, and what ends a campaign."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from attnfuzz.campaign.draw.sampling import BatchSize, Schedule
from attnfuzz.campaign.floor import TooFew, floor_of, sentences_of
from attnfuzz.campaign.stopping import Interrupted, Interrupts, format_duration, parse_duration
from attnfuzz.cli.outcome import outcome_of, why_not_judged
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import BundledProblem
from attnfuzz.problems.supports import Supports
from attnfuzz.report.summary import summarise
from attnfuzz.report.terminal import make_console, print_result
from tests.common.report_results import MERGE, a_finding, a_result


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


@pytest.mark.parametrize(
    ("problem", "supports", "options", "floor"),
    [
        ("dense_decode", Supports(), {}, 10),
        ("dense_decode", Supports(head_sizes=(16,)), {}, 4),
        ("dense_decode", Supports(head_sizes=(16,)), {"tile": tuple(range(16, 400, 16))}, 16),
        ("dense_decode", Supports(head_sizes=tuple(range(16, 1024, 16))), {}, 16),
        ("paged_decode", Supports(head_sizes=(16, 64), layouts=("NHD",)), {"tile": (16, 32, 64, 128, 256)}, 5),
    ],
)
def test_the_floor_goes_by_what_the_contract_has(
    problem: BundledProblem, supports: Supports, options: dict[str, tuple[int, ...]], floor: int
) -> None:
    """A kernel for one format would be held to what one for ten needs, or the other way round."""
    declaration = Declaration(name="k", problem=problem, target="k", supports=supports, options=options)  # type: ignore[arg-type]
    assert floor_of(declaration) == floor


def test_too_few_cases_are_no_success_and_told_with_the_budget_that_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A kernel that takes seconds for a case would pass a job after two of them."""
    result = a_result()
    del result.statistics.kernels[MERGE.target]  # which has no case
    assert outcome_of(result).status == 0
    (*_, slow) = result.statistics.kernels.values()
    slow.cases, slow.seconds, result.statistics.budget_s = 2, 4.0, 60.0
    assert outcome_of(result).status == 2
    sentence = (
        "only 2 cases were judged of dense, and a round of its formats takes 10; a case takes 2.0s here: "
        "--budget 450s would do"
    )
    print_result(make_console(), result)
    assert f"\n{sentence}\n" in capsys.readouterr().out
    assert why_not_judged(result) == sentence
    assert summarise(result).too_few == (sentence,)


def test_many_kernels_are_told_in_one_sentence() -> None:
    """The first run of a newcomer would end in a page of the same sentence."""
    few = [TooFew(f"kernel_{number}", number, 13, 0.1, 20.0 + number) for number in range(1, 6)]
    assert len(sentences_of(few[:3])) == 3
    (sentence,) = sentences_of(few)
    assert sentence.startswith(
        "5 kernels were judged on fewer cases than a round of their formats takes (kernel_1 1 of"
    )
    assert sentence.endswith(": --budget 25s would do")


def test_a_kernel_of_which_something_is_known_needs_no_more_cases() -> None:
    """A search that ends at its first finding would be told to go on."""
    result = a_result(a_finding())
    for kernel in result.statistics.kernels.values():
        kernel.cases = 1
    assert a_finding().declaration.target not in {one.target for one in result.too_few}


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1h1m1s", 3661), ("0.5s", 0.5), (" 2m ", 120)]
)
def test_documented_forms_are_understood(text: str, seconds: float) -> None:
    """A budget read wrongly makes a campaign end early or run all night."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10x", "10", "s", "-5s", "0s", "1m1h", "1 m", "1e3s", "9999999h", "inf"])
def test_anything_else_is_refused_with_its_value(text: str) -> None:
    """Guessing a unit would be worse than asking."""
    with pytest.raises(ValueError, match=r"such as 90s, 10m or 1h30m") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.84, "0.8s"), (9.96, "10.0s"), (42.4, "42s"), (59.7, "1m00s"), (545, "9m05s"), (5400, "1h30m")],
)
def test_durations_are_shown_to_a_readers_precision(seconds: float, text: str) -> None:
    """Progress lines with nine digits, or without a unit, cannot be read at a glance."""
    assert format_duration(seconds) == text


def test_signals_are_counted_and_do_not_raise() -> None:
    """KeyboardInterrupt in the middle of writing a finding would lose it."""
    with Interrupts() as interrupts:
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert (interrupts.count, interrupts.first) == (2, signal.SIGHUP)


def test_an_orderly_end_that_takes_too_long_can_be_broken_off() -> None:
    """A campaign that waits for a disk which does not answer could only be killed."""
    with Interrupts():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_has_no_loop_yet_is_interrupted_at_once_but_not_its_clean_up() -> None:
    """Ctrl-C during the seconds of start-up would wait for them, or leave processes behind."""
    with Interrupts(raising=True) as interrupts:
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.count == 2


def test_an_ignored_signal_stays_ignored() -> None:
    """nohup would be of no use."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.count == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_the_handlers_of_before_are_restored() -> None:
    """A test runner or notebook that calls a campaign must keep its own Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_another_thread_can_run_a_campaign() -> None:
    """Only the main thread may set handlers; elsewhere there is nothing to count."""
    counts: list[int] = []

    def run() -> None:
        with Interrupts() as interrupts:
            counts.append(interrupts.count)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert counts == [0]
