"""Accesses outside: each tensor ends right before memory that is not mapped, and in a second run begins right after.

The results are those of the usual runs and are not looked at again. An access outside ends the process; the driver
tells from the fault which tensor it was (`attnfuzz.execution.guard_faults`).
"""

from functools import cache

from attnfuzz.declaration import Declaration
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.fault_map import FaultMap, installed
from attnfuzz.memory.guarded import GUARDS, Guard, GuardedArena, HostGuardedMemory
from attnfuzz.memory.patterns import Fill
from attnfuzz.oracles.observation import KernelRaised, call
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case
from attnfuzz.problems.registry import problem_of

__all__ = ["GUARD_PAGE"]

_FILL: Fill = "nan"


def _applies(declaration: Declaration, case: Case) -> bool:
    del declaration, case
    return True


def _check(trial: Trial) -> Failure | None:
    """None, if it returns at all. Does nothing in a process whose death nobody could explain, and on a GPU."""
    fault_map = installed()
    if fault_map is None or trial.device != "cpu":
        return None
    for guard in GUARDS:
        with fault_map.recording():
            _run(trial, guard, fault_map)
    return None


def _run(trial: Trial, guard: Guard, fault_map: FaultMap) -> None:
    """Run the kernel on tensors, and with workspaces, of which one edge is guarded."""
    given, allocated = (
        GuardedArena(_host_memory(), fault_map, guard=guard, poison=_FILL, prefill=_FILL) for _ in range(2)
    )
    values = trial.reference.values_on(trial.device)
    inputs = problem_of(trial.case).build(trial.case, given, trial.kernel.declaration.supports, values)
    allocations = TrackedAllocations(trial.device, poison=_FILL, prefill=_FILL, arena=allocated)
    try:
        call(trial.kernel, trial.case, inputs, allocations)
    except KernelRaised as raised:
        if not isinstance(raised.error, Exception):  # an interrupt, say
            raise
        # It ran on ordinary memory: what it refuses is an alignment, and that is its right.


@cache
def _host_memory() -> HostGuardedMemory:
    return HostGuardedMemory()


GUARD_PAGE = Relation("guard_page", _applies, _check, weight=2, devices=("cpu",))  # others do not see reads outside
