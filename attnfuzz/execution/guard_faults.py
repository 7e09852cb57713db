"""A fault beside a guarded tensor in the words of an engineer: which one, which way, how far. Torch-free."""

from __future__ import annotations

from attnfuzz.execution.outcomes import MemoryFault
from attnfuzz.judging.words import plural, shape_of
from attnfuzz.memory.fault_map import GuardedRegion
from attnfuzz.oracles.verdict import Failure

__all__ = ["guard_failure"]


_PAST_TENSE = {"read": "read", "write": "wrote"}


def guard_failure(fault: MemoryFault, place: str, details: tuple[str, ...]) -> Failure | None:
    """The failure if ``fault`` is in the unmapped memory beside a tensor; None if it is anywhere else.

    ``place`` is where the kernel was, as in " at file.py:3, in load".
    """
    region = next((region for region in fault.regions if region.low <= fault.address < region.high), None)
    if region is None:
        return None
    side, elements = _distance(region, fault.address)
    end = "end" if side == "past" else "start"
    message = (
        f"the kernel {_PAST_TENSE[fault.access]} {side} {region.name} ({shape_of(region.dtype, region.shape)}): "
        f"{plural(elements, 'element')} ({plural(elements * region.itemsize, 'byte')}) {side} its {end}{place}"
    )
    return Failure(
        oracle=region.oracle,
        kind=f"{fault.access} {side} {region.name}",
        message=message,
        details=details,
        tensor=region.name,
    )


def _distance(region: GuardedRegion, address: int) -> tuple[str, int]:
    """Which side of the tensor, and which element from its edge: 1 for the neighbour of its first or last one."""
    if address >= region.end:
        return "past", (address - region.end) // region.itemsize + 1
    return "before", -((address - region.start) // region.itemsize)
