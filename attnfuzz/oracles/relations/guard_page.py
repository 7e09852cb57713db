"""Accesses outside: each tensor ends right before memory that is not mapped, and in a second run begins right after.

The results are those of the usual runs and are not looked at again. On a CPU, an access outside ends the process; the
driver tells from the fault which tensor it was (`attnfuzz.judging.executor_deaths`). On a GPU it costs the process its
CUDA context, and CUDA tells no address. So the search, which guards all tensors at once, knows no more of a fault than
at which edge; whoever looks into it asks for this relation by name, and gets a run for each tensor, which alone is
guarded: the one that faults names it, and those before it cost next to nothing. How far beyond it the access is, and
whether it is a write, takes runs in fresh processes (`attnfuzz.judging.guard_naming`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import problem_of
from attnfuzz.isolation.memory_faults import FaultMap, installed
from attnfuzz.memory.allocations import WORKSPACE, TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.cuda_virtual import DriverError
from attnfuzz.memory.guarded import GUARDS, Guard, GuardedArena, guarded_memory
from attnfuzz.memory.patterns import Fill
from attnfuzz.oracles import registry
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.registry import OracleName
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.problems.cases import Case, case_number
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.shapes import Role, tensor_specs
from attnfuzz.trials.observation import KernelRaised, build_through_host, call
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Drawn, Failure, Relations

_FILL: Fill = "nan"

_SMALL_NBYTES = 4 << 20
"""Largest case that is written faster on the host than on a GPU."""


@dataclass(frozen=True, slots=True)
class Guarding:
    """Which edge of which tensors (None: all) lies at unmapped memory.

    ``room`` and ``aligned`` are those of `GuardedArena`.
    """

    guard: Guard
    names: tuple[str, ...] | None = None
    room: int = 0
    aligned: bool = True

    def covers(self, name: str) -> bool:
        return self.names is None or name in self.names


class _Chosen:
    """An `Allocator` that has tensors guarded by name; the others come from ordinary memory."""

    def __init__(self, guarded: Arena, ordinary: Arena, guarding: Guarding) -> None:
        self.device = guarded.device
        self._arenas = {True: guarded, False: ordinary}
        self._guarding = guarding

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, strides: StrideKind, role: Role
    ) -> Tensor:
        """As the arena's."""
        return self._arenas[self._guarding.covers(name)].tensor(name, shape, dtype, strides=strides, role=role)

    def only_changes(self, name: str, where: Tensor) -> None:
        """As the arena's."""
        self._arenas[self._guarding.covers(name)].only_changes(name, where)


def run_guarded(trial: Trial, guarding: Guarding, fault_map: FaultMap) -> list[GuardedArena]:
    """Run the kernel; the arenas of guarded tensors and of guarded workspaces, as the run left them.

    A kernel that refuses its inputs ran on ordinary memory before: it is an alignment that it does not take, and that
    is its right. Raises `KernelRaised` for what costs the process its CUDA context, and for what is no exception, and
    `torch.OutOfMemoryError` where a GPU has no memory for such tensors.
    """
    memory = guarded_memory(trial.device)
    given, allocated = (
        GuardedArena(
            memory,
            fault_map,
            guard=guarding.guard,
            poison=_FILL,
            prefill=_FILL,
            room=guarding.room,
            aligned=guarding.aligned,
        )
        for _ in range(2)
    )
    case, supports, allocator = (
        trial.case,
        trial.kernel.declaration.supports,
        _Chosen(given, _ordinary(trial), guarding),
    )
    if trial.device != "cpu" and tensor_nbytes(case) <= _SMALL_NBYTES:
        inputs = build_through_host(case, allocator, supports)
    else:
        inputs = problem_of(case).build(case, allocator, supports, trial.reference.values_on(trial.device))
    workspaces = allocated if guarding.covers(WORKSPACE) else _ordinary(trial)
    allocations = TrackedAllocations(trial.device, poison=_FILL, prefill=_FILL, arena=workspaces)
    try:
        call(trial.kernel, trial.case, inputs, allocations, wait=True)
    except KernelRaised as raised:
        if not raised.is_a(Exception) or context_lost(raised.error) is not None:
            raise
    return [given, allocated]


def _ordinary(trial: Trial) -> Arena:
    return Arena(trial.device, poison=_FILL, prefill=_FILL)


_MOST_NBYTES = 1 << 26
"""Largest case: many processes share a GPU, and each tensor has at least one granule of its memory to itself."""

_EDGES: dict[Guard, str] = {"end": "ending", "start": "beginning"}

_FAULTS_TELL_WHERE = ("cpu",)
"""Devices on which the address of an access outside is known."""

_ONE_IN_AT_ITS_START = 4
"""Cases of which one has tensors that begin at unmapped memory in its second run; those of the others end there, which
is where most accesses outside go."""


def guard_of(
    declaration: Declaration, case: Case, oracles: Sequence[OracleName], relations: Relations, *, device: str
) -> Guard | None:
    """Which edge of each tensor lies at unmapped memory in the second run of `case`; None for an ordinary run.

    On a CPU such a run takes no longer than an ordinary one, and so each case has one where guard_page may object: the
    relation itself is not drawn there. Where all `relations` judge a case it comes last, so that they have their say.
    """
    if (
        device != "cpu"
        or registry.GUARD_PAGE.name not in oracles
        or installed() is None
        or not _applies(declaration, case)
    ):
        return None
    if relations == "all" or (relations is not None and _is_left_out(relations)):
        return None
    return "start" if (case_number(case) >> 8) % _ONE_IN_AT_ITS_START == 0 else "end"


def _is_left_out(relations: tuple[OracleName, ...] | Drawn) -> bool:
    if isinstance(relations, Drawn):
        return registry.GUARD_PAGE.name in relations.without
    return registry.GUARD_PAGE.name not in relations


def _applies(_: Declaration, case: Case) -> bool:
    return tensor_nbytes(case) <= _MOST_NBYTES


def _check(trial: Trial) -> Failure | None:
    """None, if it returns at all. Does nothing in a process whose death nobody could explain."""
    _run_each(trial, (Guarding(guard) for guard in GUARDS))
    return None


def _check_closer(trial: Trial) -> Failure | None:
    """As `_check`, with the tensor that is reached beyond, where one alone shows it."""
    if trial.device not in _FAULTS_TELL_WHERE:
        names = (*tensor_specs(trial.case), WORKSPACE)
        if not _run_each(trial, (Guarding(guard, (name,)) for guard in GUARDS for name in names)):
            return None
    return _check(trial)


def _run_each(trial: Trial, guardings: Iterable[Guarding]) -> bool:
    """Whether there is memory for runs with each of ``guardings``. Raises `KernelRaised` where one faults."""
    fault_map = installed()
    if fault_map is None or not _has_memory(trial.device):
        return False
    for guarding in guardings:
        with fault_map.recording():
            try:
                run_guarded(trial, guarding, fault_map)
            except KernelRaised as raised:
                name = "" if guarding.names is None else guarding.names[0]
                whose = f"{name} alone" if name else "each tensor"
                raised.changed = f"with {whose} {_EDGES[guarding.guard]} at unmapped memory"
                raised.tensor = name
                raise
            except torch.OutOfMemoryError:
                return False
    return True


def _has_memory(device: str) -> bool:
    """Whether there is such memory: not on every virtual GPU."""
    try:
        guarded_memory(device)
    except DriverError:
        return False
    return True


GUARD_PAGE = Relation(
    registry.GUARD_PAGE,
    _applies,
    _check,
    weight=2,  # others do not see reads outside
    drawn_on=("cuda",),
    of_any_problem=True,
    closer=_check_closer,
)
