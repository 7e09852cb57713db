"""Kernels that give other bits the second time."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.problems.cases import Case


def test_bits_that_change_between_runs(plant: Any, dense: Case, failure_of: Any) -> None:
    """A race would pass as long as each of its results is accurate."""
    calls = itertools.count()
    failure = failure_of(plant(after=lambda inputs, out, lse: (out * (1 + 2**-23 * next(calls)), lse)), dense)
    assert (failure.oracle, failure.kind) == ("determinism", "out")
    assert "on identical memory" in failure.message


def test_bits_that_change_between_runs_in_a_buffer_that_the_kernel_keeps(
    plant: Any, dense: Case, failure_of: Any
) -> None:
    """Both runs would be looked at in the same memory, as what the last call left there."""
    calls, kept = itertools.count(), dict[str, Tensor]()

    def store(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out, kept.setdefault("lse", torch.empty_like(lse)).copy_(lse * (1 + 2**-23 * next(calls)))

    failure = failure_of(plant(after=store), dense)
    assert (failure.oracle, failure.kind) == ("determinism", "lse")


def test_a_nan_is_a_nan_whatever_its_bits(plant: Any, dense: Case, failure_of: Any) -> None:
    """What lies in memory that nobody owns is another NaN each time, and "nan, then nan" would be told of it."""
    calls = itertools.count()

    def spoil(inputs: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out[-1, 0, 0] = torch.tensor(0x7FC00000 + next(calls), dtype=torch.int32).view(torch.float32)
        return out, lse

    failure = failure_of(plant(after=spoil), msgspec.structs.replace(dense, dtype="float32"))
    assert (failure.oracle, failure.kind) == ("accuracy", "out:nan")


def test_no_promise_no_failure(plant: Any, dense: Case) -> None:
    """A kernel that declares itself nondeterministic, as one with atomics must be, would be reported."""
    calls = itertools.count()
    supports = attnfuzz.Supports(deterministic=False)
    kernel = plant(supports=supports, after=lambda inputs, out, lse: (out * (1 + 2**-23 * next(calls)), lse))
    assert judge(kernel, dense, device="cpu").failure is None


def test_nondeterministic_kernel_is_still_held_to_dead_memory(plant: Any, dense: Case, failure_of: Any) -> None:
    """A kernel that declares itself nondeterministic would be excused from reading past the end."""
    calls = itertools.count()
    kernel = plant(
        supports=attnfuzz.Supports(deterministic=False),
        length=lambda n: n + 1 if n else 0,
        after=lambda inputs, out, lse: (out * (1 + 2**-23 * next(calls)), lse),
    )
    assert failure_of(kernel, dense).oracle == "dead_memory"
