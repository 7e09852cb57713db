"""Accesses outside: each tensor ends right before memory that is not mapped, and in a second run begins right after.

The results are those of the usual runs and are not looked at again. On a CPU, an access outside ends the process; the
driver tells from the fault which tensor it was (`attnfuzz.execution.guard_faults`). On a GPU it costs the process its
CUDA context, and CUDA tells no address. Which tensor it was is found out afterwards, for a finding that somebody is
going to read: further runs, in fresh processes, guard some tensors and leave room beside them
(`attnfuzz.execution.guard_naming`). Until then a failure says no more than at which edge. The search and the shrinking
go by that: each such run costs a process and a second.
"""

import zlib
from collections.abc import Sequence

import torch

from attnfuzz.declaration import Declaration
from attnfuzz.memory.cuda_virtual import DriverError
from attnfuzz.memory.fault_map import installed
from attnfuzz.memory.guarded import GUARDS, Guard
from attnfuzz.memory.guarded_of import guarded_memory
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.relations.guarded_run import Guarding, run_guarded
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import DrawnWithout, Failure, OracleName, Relations
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.limits import tensor_nbytes

__all__ = ["GUARD_PAGE", "guard_of"]

_MOST_NBYTES = 1 << 26
"""Of a case: many processes share a GPU, and each tensor has at least one granule of its memory to itself."""

_EDGES: dict[Guard, str] = {
    "end": "with each tensor ending at unmapped memory",
    "start": "with each tensor beginning at unmapped memory",
}

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
    if device != "cpu" or "guard_page" not in oracles or installed() is None or not _applies(declaration, case):
        return None
    if relations == "all" or (relations is not None and _is_left_out(relations)):
        return None
    return "start" if (zlib.crc32(encode_case(case)) >> 8) % _ONE_IN_AT_ITS_START == 0 else "end"


def _is_left_out(relations: tuple[OracleName, ...] | DrawnWithout) -> bool:
    if isinstance(relations, DrawnWithout):
        return "guard_page" in relations.oracles
    return "guard_page" not in relations


def _applies(declaration: Declaration, case: Case) -> bool:
    del declaration
    return tensor_nbytes(case) <= _MOST_NBYTES


def _check(trial: Trial) -> Failure | None:
    """None, if it returns at all. Does nothing in a process whose death nobody could explain."""
    fault_map = installed()
    if fault_map is None or not _has_memory(trial.device):
        return None
    for guard in GUARDS:
        with fault_map.recording():
            try:
                run_guarded(trial, Guarding(guard), fault_map)
            except KernelRaised as raised:
                raised.changed = _EDGES[guard]
                raise
            except torch.OutOfMemoryError:
                return None
    return None


def _has_memory(device: str) -> bool:
    """Whether there is such memory: not on every virtual GPU."""
    try:
        guarded_memory(device)
    except DriverError:
        return False
    return True


GUARD_PAGE = Relation(
    "guard_page",
    _applies,
    _check,
    weight=2,  # others do not see reads outside
    drawn_on=("cuda",),
    costly_on=("cuda",),
    of_any_problem=True,
)
