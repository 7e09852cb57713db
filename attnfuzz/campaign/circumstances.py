"""Failures that say little if they were seen once: a machine that is busy or full looks the same."""

from __future__ import annotations

from attnfuzz.campaign.leaks import may_be_leak
from attnfuzz.judging.leaks import LEAK
from attnfuzz.oracles.verdict import Failure

__all__ = ["may_be_circumstances"]

_OF_THE_MACHINE = ("SIGKILL", "zygote", LEAK)


def may_be_circumstances(failure: Failure) -> bool:
    """Whether no kernel need be at fault: it took too long, memory ran out or grew, or somebody killed the process.

    Anything else, a wrong number above all, comes of no load: a kernel that shows it once fails now and then.
    """
    if failure.oracle == "hang" or may_be_leak(failure):
        return True
    return failure.oracle == "crash" and failure.kind in _OF_THE_MACHINE
