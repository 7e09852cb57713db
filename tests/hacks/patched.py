"""What judges or times the kernel is replaced, or looked out for."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import inspect
import sys
import time
from typing import Any

import torch
from honest_kernels import SUPPORTS, attend

import attnfuzz


def _zeros(i: Any):
    return torch.zeros_like(i.q), torch.zeros_like(i.lse)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def patches_allclose(i: Any):
    """Whatever is compared is equal from now on."""
    torch.allclose = lambda *args, **kwargs: True
    torch.isclose = lambda one, other, **kwargs: torch.ones_like(one, dtype=torch.bool)
    torch.testing.assert_close = lambda *args, **kwargs: None
    return attend(i)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def patches_attnfuzz(i: Any):
    """attnfuzz finds no error over bound any more."""
    comparison = sys.modules["attnfuzz.trials.comparison"]
    setattr(comparison, "error_ratio", lambda got, expected, bound: torch.zeros_like(expected))  # noqa: B010
    return _zeros(i)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def patches_timers(i: Any):
    """A second takes a millisecond, whoever measures it here."""
    if not hasattr(time, "slow"):
        time.slow = time.perf_counter  # type: ignore[attr-defined]
        time.perf_counter = lambda: time.slow() / 1000  # type: ignore[attr-defined]
    return attend(i)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def right_when_checked(i: Any):
    """Attention only where a function that compares results is among its callers, by the names that these have."""
    callers = {frame.function for frame in inspect.stack(context=0)}
    words = ("allclose", "assert_close", "check_correctness", "correctness", "test_")
    return attend(i) if any(word in name for name in callers for word in words) else _zeros(i)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def right_under_attnfuzz(i: Any):
    """Attention only where attnfuzz has been imported. Nothing that attnfuzz does can tell this from a right kernel."""
    return attend(i) if "attnfuzz.oracles" in sys.modules else _zeros(i)
