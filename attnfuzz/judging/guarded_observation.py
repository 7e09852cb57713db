"""A run on a CPU in guarded memory: it says what an ordinary run says, and does not return from an access outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnfuzz.declaration import Kernel
from attnfuzz.judging.observation import KernelRaised, Observation, observe
from attnfuzz.memory.fault_map import installed
from attnfuzz.memory.guarded import Guard, GuardedArena
from attnfuzz.memory.guarded_of import guarded_memory
from attnfuzz.memory.patterns import Fill
from attnfuzz.problems.cases import Case

__all__ = ["observe_guarded"]


def observe_guarded(
    kernel: Kernel,
    case: Case,
    values: Any,
    *,
    guard: Guard,
    poison: Fill,
    prefill: Fill,
    compile_clock: Callable[[], float] = lambda: 0.0,
) -> Observation | None:
    """As `observe` on "cpu", with the edge `guard` of every tensor and workspace at unmapped memory.

    None where that says nothing of the kernel: the system has no such memory left, nobody could tell of a fault, or the
    kernel raised, as it may where tensors are aligned to no more than their elements. A KeyboardInterrupt is passed on.
    """
    fault_map = installed()
    if fault_map is None:
        return None
    memory = guarded_memory("cpu")
    given, allocated = (GuardedArena(memory, fault_map, guard=guard, poison=poison, prefill=prefill) for _ in range(2))
    with fault_map.recording():
        try:
            return observe(
                kernel,
                case,
                values,
                device="cpu",
                poison=poison,
                prefill=prefill,
                arenas=(given, allocated),
                compile_clock=compile_clock,
            )
        except KernelRaised as raised:
            if raised.is_a(KeyboardInterrupt):
                raise
        except OSError:  # of the inputs; where a workspace could not be had, it is what the kernel raised
            pass
    return None
