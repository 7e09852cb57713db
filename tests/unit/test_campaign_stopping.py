"""attnfuzz.campaign.stopping: budgets as people write them, and Ctrl-C counted."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from attnfuzz.campaign.stopping import Interrupted, Interrupts, format_duration, parse_duration


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
