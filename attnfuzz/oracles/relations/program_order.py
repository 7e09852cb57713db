"""The programs of a launch in another order, or side by side: the same bits, for kernels that promise them.

Triton's interpreter runs them one after the other, so that a kernel whose programs wait for nothing is right there if
one of them reads what those before it have written, or adds to what another one is adding to. A GPU begins them in any
order and many at once. So the interpreter runs the launches of a case once more with the programs taking turns at each
access to memory, and once from the last program to the first, each of which stops behind its atomic operations. Of a
kernel that declares itself nondeterministic these runs are held to their bounds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.oracles import accuracy, registry
from attnfuzz.oracles.relations.relation import Changed, Relation, as_it_is, run_on, unequal_bits
from attnfuzz.problems.cases import Case, case_number
from attnfuzz.trials.observation import never_launches
from attnfuzz.trials.trial import Trial
from attnfuzz.triton_compat.interpreter_schedules import Conflict, Schedule, scheduled
from attnfuzz.verdict import RACE, Cause, Failure

_DECLARED = ("if its programs add to one number in any order, declare Supports(deterministic=False)",)
_RULE = "no program may count on when another one runs"
_CAUSE = Cause(mistake=RACE, words="the result depends on the order in which programs of a launch run")


def _applies(declaration: Declaration, case: Case) -> bool:
    """To all kernels whose calls are not known to launch nothing: those written in torch have no programs."""
    del case
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules
    return is_interpreted and not never_launches(declaration.target)


def _check(trial: Trial) -> Failure | None:
    seed = case_number(trial.case)
    for schedule, words in (
        (Schedule(is_reversed=False, seed=seed), "where the programs of each launch take turns as they access memory"),
        (
            Schedule(is_reversed=True, seed=seed),
            "where the last program of each launch begins, and each stops behind its atomic operations",
        ),
    ):
        changed = Changed(words, trial.case, trial.reference.values_on(trial.device), trial.placement)
        with scheduled(schedule) as seen:
            observed = run_on(trial, changed)
        if not seen.launches:
            return None
        failure = accuracy.objection(trial.reference, trial.compare(observed), observed.poison)
        if failure is not None:
            failure = msgspec.structs.replace(failure, message=f"{failure.message}, {words}: {_RULE}")
        elif trial.kernel.declaration.supports.deterministic:
            results = {name: result.cpu() for name, result in observed.results.items()}
            failure = unequal_bits(
                registry.PROGRAM_ORDER, trial.case, as_it_is(trial), results, words, details=_DECLARED, rule=_RULE
            )
        if failure is not None:
            return _told(failure, seen.conflict())
    return None


def _told(failure: Failure, conflict: Conflict | None) -> Failure:
    return msgspec.structs.replace(
        failure,
        oracle=registry.PROGRAM_ORDER.name,
        details=(*failure.details, *(() if conflict is None else (_of_conflict(conflict),))),
        causes=(_CAUSE,),
        maybe=(),
    )


def _of_conflict(conflict: Conflict) -> str:
    (file, line), (other_file, other_line) = conflict.stores, conflict.others
    places = f"{Path(file).name}:{line}", f"{Path(other_file).name}:{other_line}"
    return (
        f"program {conflict.storing} stores at {places[0]} what program {conflict.other} {conflict.does} at {places[1]}"
    )


PROGRAM_ORDER = Relation(registry.PROGRAM_ORDER, _applies, _check, drawn_on=("cpu",), of_any_problem=True)
