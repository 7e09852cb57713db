"""The programs of a launch in another order, side by side, or late: the same bits, for kernels that promise them.

`program_order`: Triton's interpreter runs them one after the other, so that a kernel whose programs wait for nothing is
right there if one of them reads what those before it have written, or adds to what another one is adding to. A GPU
begins them in any order and many at once. So the interpreter runs the launches of a case once more with the programs
taking turns at each access to memory, and once from the last program to the first, each of which stops behind its
atomic operations.

`delays`: on an idle GPU a small case runs much alike each time. So what reads before another program, or another warp
of its own, has written may be right in all runs of a search, and wrong on a server that is busy. Here what Triton
launches waits at random: every second program before it begins, and warps before they access memory, stores and atomic
operations more often than loads. These runs are compared with one another, since they come of one program.

What another compiler has made waits for nothing by itself. So a call is also made on a stream of its own, behind work
that is not done, while a second stream keeps the GPU busy: its programs begin later, and in another order; and what a
kernel does on another stream than the caller's reads inputs that are not there yet.

Of a kernel that declares itself nondeterministic these runs are held to their bounds.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from attnfuzz.declaration import Declaration
from attnfuzz.mistake import RACE
from attnfuzz.oracles import accuracy, registry
from attnfuzz.oracles.registry import Oracle
from attnfuzz.oracles.relations.relation import Relation, Results, as_it_is, on_host, run_on, unchanged, unequal_bits
from attnfuzz.problems.cases import Case, case_number
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.trials.observation import Observation, never_launches
from attnfuzz.trials.trial import Trial
from attnfuzz.triton_compat.interpreter_schedules import Conflict, Schedule, scheduled
from attnfuzz.triton_compat.launches import delayed
from attnfuzz.verdict import Cause, Failure

_RULE = "no program, and no warp, may count on when another one runs"
_DECLARED = "if its programs add to one number in any order, declare Supports(deterministic=False)"


def _objection(
    oracle: Oracle,
    trial: Trial,
    seen: Observation,
    before: Results | None,
    words: str,
    *,
    as_it_was: str = "originally",
    advice: tuple[str, ...] = (),
) -> Failure | None:
    """To what is beyond its bound, or has other bits than ``before``, of a kernel that promises the same."""
    found = accuracy.objection(trial.reference, trial.compare(seen), seen.poison)
    if found is not None:
        message, details = f"{found.message}, {words}: {_RULE}", (*found.details, *advice)
        return msgspec.structs.replace(found, oracle=oracle.name, message=message, details=details)
    if before is None or not trial.kernel.declaration.supports.deterministic:
        return None
    details, results = (*advice, _DECLARED), on_host(seen.results)
    return unequal_bits(oracle, trial.case, before, results, words, details=details, as_it_was=as_it_was, rule=_RULE)


def _may_launch(declaration: Declaration, _: Case) -> bool:
    """To all kernels whose calls are not known to launch nothing: those written in torch have no programs."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules
    return is_interpreted and not never_launches(declaration.target)


def _in_another_order(trial: Trial) -> Failure | None:
    seed = case_number(trial.case)
    cause = Cause(mistake=RACE, words="the result depends on the order in which programs of a launch run")
    for schedule, words in (
        (Schedule(is_reversed=False, seed=seed), "where the programs of each launch take turns as they access memory"),
        (
            Schedule(is_reversed=True, seed=seed),
            "where the last program of each launch begins, and each stops behind its atomic operations",
        ),
    ):
        with scheduled(schedule) as seen:
            observed = run_on(trial, unchanged(trial, words))
        if not seen.launches:
            return None
        failure = _objection(registry.PROGRAM_ORDER, trial, observed, as_it_is(trial), words)
        if failure is not None:
            conflict = seen.conflict()
            details = (*failure.details, *(() if conflict is None else (_told(conflict),)))
            return msgspec.structs.replace(failure, details=details, causes=(cause,), maybe=())
    return None


def _told(conflict: Conflict) -> str:
    (file, line), (other_file, other_line) = conflict.stores, conflict.others
    places = f"{Path(file).name}:{line}", f"{Path(other_file).name}:{other_line}"
    return (
        f"program {conflict.storing} stores at {places[0]} what program {conflict.other} {conflict.does} at {places[1]}"
    )


PROGRAM_ORDER = Relation(registry.PROGRAM_ORDER, _may_launch, _in_another_order, drawn_on=("cpu",), of_any_problem=True)

_RUNS, _CLOSER_RUNS = 4, 16
_MOST_BYTES = 4 << 20
"""Largest case that is delayed: loads of a loop wait one after the other."""
_LATE_CYCLES = 6_000_000
"""Three milliseconds, in which the inputs of a small case are built."""
_BUSY_BYTES, _BUSY_LAUNCHES = 32 << 20, 256
"""Bytes read and written on all of the GPU, and how often, so that it takes as long as the call, and longer."""

_BARRIER = (
    "what another program is to find must be stored by all warps before an atomic operation announces it: "
    "`tl.debug_barrier()` between the two, or `__syncthreads()` and `__threadfence()`"
)
_STREAM = "launch everything on the current stream, and have it wait for what runs on any other"


def _is_small(_: Declaration, case: Case) -> bool:
    return tensor_nbytes(case) <= _MOST_BYTES


def _delayed(trial: Trial, runs: int = _RUNS) -> Failure | None:
    cause = Cause(mistake=RACE, words="the result depends on when its programs, or warps of one, run")
    before: Results | None = None
    for seen, words in _waiting(trial, runs):
        found = _objection(
            registry.DELAYS, trial, seen, before, words, as_it_was="where they wait otherwise", advice=(_BARRIER,)
        )
        if found is not None:
            return msgspec.structs.replace(found, causes=(cause,), maybe=())
        before = before or on_host(seen.results)
    seen, words = _elsewhere(trial)
    return _objection(registry.DELAYS, trial, seen, as_it_is(trial), words, advice=(_STREAM, _BARRIER))


def _waiting(trial: Trial, runs: int) -> Iterator[tuple[Observation, str]]:
    """Runs in which all that Triton launches waits at random; none if it launches nothing."""
    words = "where its programs and warps wait at random"
    for _ in range(runs):
        with delayed() as launched:
            seen = run_on(trial, unchanged(trial, words))
        if not launched.launches:
            return
        yield seen, words


def _elsewhere(trial: Trial) -> tuple[Observation, str]:
    words = "on a stream of its own, behind work that is not done, while another one keeps the GPU busy"
    late, busy = _streams()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        memory = torch.zeros(_BUSY_BYTES, dtype=torch.uint8, device=trial.device)
        for _ in range(_BUSY_LAUNCHES):
            memory.add_(1)
    with torch.cuda.stream(late):
        torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch has no public name for it
        seen = run_on(trial, unchanged(trial, words))
    torch.cuda.synchronize()
    return seen, words


@functools.cache
def _streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Always the same: torch keeps memory for each that there was."""
    return torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it


DELAYS = Relation(
    registry.DELAYS,
    _is_small,
    _delayed,
    drawn_on=("cuda",),
    of_any_problem=True,
    closer=functools.partial(_delayed, runs=_CLOSER_RUNS),
)
