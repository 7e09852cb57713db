"""What relations say of a case of a batch, from runs that were made along with it."""

from __future__ import annotations

import msgspec
import torch

from attnfuzz.oracles import accuracy
from attnfuzz.oracles.batch import Batch
from attnfuzz.oracles.entries import Asked
from attnfuzz.oracles.judge import judge_relation, relation_raised
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.relations.relation import FurtherRuns
from attnfuzz.oracles.verdict import Failure, Verdict

__all__ = ["judge_related"]


def judge_related(verdict: Verdict, batch: Batch, case: int, *, catch_interrupt: bool) -> Verdict:
    """`verdict`, that of all other oracles on a case that passed, or that of the first relation which objects to it."""
    for asked in batch.asked[case]:
        found = _of_one(verdict, batch, case, asked, catch_interrupt=catch_interrupt)
        if found.failure is not None or found.fatal:
            return found
    return verdict


def _of_one(verdict: Verdict, batch: Batch, case: int, asked: Asked, *, catch_interrupt: bool) -> Verdict:
    if asked.further is None or any(map(batch.is_damaged, asked.entries)):  # damaged perhaps by another case
        return judge_relation(verdict, batch.trial(case), asked.relation, catch_interrupt=catch_interrupt)
    blamable: dict[int, Failure | KernelRaised] = {}
    for run, entry in enumerate(asked.entries):
        raised = batch.raised(entry)
        if raised is not None and isinstance(raised.error, torch.OutOfMemoryError):  # for want of what others hold
            return judge_relation(verdict, batch.trial(case), asked.relation, catch_interrupt=catch_interrupt)
        is_drawn = asked.further.runs[run].values is None
        if raised is not None and (not is_drawn or isinstance(raised.error, KeyboardInterrupt)):
            found = relation_raised(asked.relation.name, raised, catch_interrupt=catch_interrupt)
            return msgspec.structs.replace(found, error_ratio=verdict.error_ratio)
        what = raised or (accuracy.check(batch.trial(entry)) if batch.is_wrong(entry) else None)
        if what is not None:
            blamable[run] = what
    failure = _objection(asked.further, batch, case, asked.entries, blamable)
    return verdict if failure is None else msgspec.structs.replace(verdict, failure=failure)


def _objection(
    further: FurtherRuns,
    batch: Batch,
    case: int,
    entries: range,
    blamable: dict[int, Failure | KernelRaised],
) -> Failure | None:
    for run, what in blamable.items():
        failure = further.blame(batch.trial(case), run, what)
        if failure is not None:
            return failure
    failure = further.compare(batch.results(case), [batch.results(entry) for entry in entries])
    return None if failure is None else further.refine(batch.trial(case), failure)
