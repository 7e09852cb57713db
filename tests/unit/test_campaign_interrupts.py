"""attnfuzz.campaign.interrupts: Ctrl-C is counted, and what was there before is restored."""

from __future__ import annotations

import os
import signal
import threading

from attnfuzz.campaign.interrupts import Interrupts


def test_signals_are_counted_and_do_not_raise() -> None:
    """KeyboardInterrupt in the middle of writing a finding would lose it."""
    with Interrupts() as interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert interrupts.count == 2


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
