"""Work that goes on when a call has returned: nobody waits for it, and nobody times it."""

from collections.abc import Collection, Mapping
from threading import Thread
from threading import enumerate as living_threads
from time import monotonic

import torch
from torch import Tensor

from attnfuzz.judging.results import ResultError
from attnfuzz.memory.patterns import bits

__all__ = ["check_finished", "check_joined", "living_threads"]

_PATIENCE_S = 0.25
"""For a thread that a call has left behind. One that waits for more to do may go on for ever."""


def check_finished(results: Mapping[str, Tensor], before: Collection[Thread]) -> None:
    """Raise `ResultError` if a thread that was not there `before` the call writes its `results` after it.

    Costs nothing where no thread was left. Threads that Python does not know of are not seen.
    """
    left = [thread for thread in living_threads() if thread not in before]
    if not left:
        return
    returned = {name: result.clone() for name, result in results.items()}
    until = monotonic() + _PATIENCE_S
    for thread in left:
        thread.join(max(0.0, until - monotonic()))
    if any(result.is_cuda for result in results.values()):
        torch.cuda.synchronize()
    _check_equal(returned, results, "a thread that it has started; join it before returning")


def check_joined(returned: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> None:
    """Raise `ResultError` if copies that the caller's stream made of `results` are not what they are at last."""
    _check_equal(returned, results, "a stream that the current one does not wait for; have it wait before returning")


def _check_equal(returned: Mapping[str, Tensor], results: Mapping[str, Tensor], by: str) -> None:
    for name, result in results.items():
        changed = int((bits(returned[name]) != bits(result)).sum())
        if changed:
            elements = "element" if changed == 1 else "elements"
            raise ResultError(f"{changed} {elements} of {name} were written after the kernel had returned, by {by}")
