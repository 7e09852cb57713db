"""attnfuzz.campaign.stopping: Ctrl-C is counted, and what was there before is restored."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from attnfuzz.campaign.stopping import Interrupted, Interrupts


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
