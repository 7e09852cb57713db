"""Other timing: the same bits, for kernels that promise them, whatever waits for whatever else.

On an idle GPU a small case runs much alike each time. So what reads before another program, or another warp of its own,
has written may be right in all runs of a search, and wrong on a server that is busy. Here what Triton launches waits at
random: every second program before it begins, and warps before they access memory, stores and atomic operations more
often than loads. These runs are compared with one another, since they come of one program.

What another compiler has made waits for nothing by itself. So a call is also made on a stream of its own, behind work
that is not done, while a second stream keeps the GPU busy: its programs begin later, and in another order; and what a
kernel does on another stream than the caller's reads inputs that are not there yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import msgspec
import torch

from attnfuzz.declaration import Declaration
from attnfuzz.oracles import accuracy, registry
from attnfuzz.oracles.relations.relation import Changed, Relation, Results, as_it_is, run_on, unequal_bits
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.trials.observation import Observation
from attnfuzz.trials.trial import Trial
from attnfuzz.triton_compat.launches import delayed
from attnfuzz.verdict import RACE, Cause, Failure

_RUNS, _CLOSER_RUNS = 4, 16
_MOST_BYTES = 4 << 20
"""Largest case: loads of a loop wait one after the other."""
_LATE_CYCLES = 6_000_000
"""Three milliseconds, in which the inputs of a small case are built."""
_BUSY_BYTES, _BUSY_LAUNCHES = 32 << 20, 256
"""Bytes read and written on all of the GPU, and how often, so that it takes as long as the call, and longer."""

_RULE = "no program, and no warp, may count on when another one runs"
_DECLARED = "if its programs add to one number in any order, declare Supports(deterministic=False)"
_BARRIER = (
    "what another program is to find must be stored by all warps before an atomic operation announces it: "
    "`tl.debug_barrier()` between the two, or `__syncthreads()` and `__threadfence()`"
)
_STREAM = "launch everything on the current stream, and have it wait for what runs on any other"
_CAUSE = Cause(mistake=RACE, words="the result depends on when its programs, or warps of one, run")


def _applies(declaration: Declaration, case: Case) -> bool:
    del declaration
    return tensor_nbytes(case) <= _MOST_BYTES


def _check(trial: Trial, runs: int = _RUNS) -> Failure | None:
    before: Results | None = None
    for seen, words in _waiting(trial, runs):
        found = _objection(trial, seen, before, words, "where they wait otherwise", (_BARRIER, _DECLARED))
        if found is not None:
            return msgspec.structs.replace(found, causes=(_CAUSE,), maybe=())
        before = before or _on_host(seen)
    seen, words = _elsewhere(trial)
    return _objection(trial, seen, as_it_is(trial), words, "originally", (_STREAM, _BARRIER, _DECLARED))


def _waiting(trial: Trial, runs: int) -> Iterator[tuple[Observation, str]]:
    """Runs in which all that Triton launches waits at random; none if it launches nothing."""
    words = "where its programs and warps wait at random"
    for _ in range(runs):
        with delayed() as launched:
            seen = run_on(trial, _unchanged(trial, words))
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
        seen = run_on(trial, _unchanged(trial, words))
    torch.cuda.synchronize()
    return seen, words


@functools.cache
def _streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Always the same: torch keeps memory for each that there was."""
    return torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it


def _unchanged(trial: Trial, words: str) -> Changed:
    return Changed(words, trial.case, trial.reference.values_on(trial.device), trial.placement)


def _objection(
    trial: Trial, seen: Observation, before: Results | None, words: str, as_it_was: str, details: tuple[str, ...]
) -> Failure | None:
    """To what is beyond its bound, or has other bits than ``before``, of a kernel that promises the same."""
    found = accuracy.objection(trial.reference, trial.compare(seen), seen.poison)
    if found is not None:
        message, told = f"{found.message}, {words}: {_RULE}", (*found.details, *details)
        return msgspec.structs.replace(found, oracle=registry.DELAYS.name, message=message, details=told)
    if before is None or not trial.kernel.declaration.supports.deterministic:
        return None
    return unequal_bits(
        registry.DELAYS, trial.case, before, _on_host(seen), words, details=details, as_it_was=as_it_was, rule=_RULE
    )


def _on_host(seen: Observation) -> Results:
    return {name: result.cpu() for name, result in seen.results.items()}


_closer: Callable[[Trial], Failure | None] = functools.partial(_check, runs=_CLOSER_RUNS)

DELAYS = Relation(registry.DELAYS, _applies, _check, drawn_on=("cuda",), of_any_problem=True, closer=_closer)
