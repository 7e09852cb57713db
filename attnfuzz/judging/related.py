"""What relations say of a case of a batch, from runs that were made along with it."""

from __future__ import annotations

import msgspec
import torch

from attnfuzz.judging.batch import Asked, Batch
from attnfuzz.judging.judge import judge_relation, relation_raised
from attnfuzz.oracles import accuracy
from attnfuzz.oracles.relations.relation import FurtherRuns
from attnfuzz.oracles.verdict import Failure, Verdict

__all__ = ["judge_related"]


def judge_related(verdict: Verdict, batch: Batch, case: int, *, catch_interrupt: bool) -> Verdict:
    """`verdict`, that of all other oracles, or that of the first relation which objects to the case.

    It passed, or lacks but an LSE, in which runs that were made along with it are made again without.
    """
    for asked in batch.asked[case]:
        if verdict.failure is None:
            found = _of_one(verdict, batch, case, asked, catch_interrupt=catch_interrupt)
        else:
            output = batch.trial(case).without_lse()
            found = judge_relation(verdict, output, asked.relation, catch_interrupt=catch_interrupt)
        if found.failure is not verdict.failure or found.fatal:
            return found
    return verdict


def _of_one(verdict: Verdict, batch: Batch, case: int, asked: Asked, *, catch_interrupt: bool) -> Verdict:
    """As `judge_related`, of a single relation: from the runs that were seen, or by runs of its own."""
    if asked.further is None or any(_is_owed_to_others(batch, entry) for entry in asked.entries):
        return judge_relation(verdict, batch.trial(case), asked.relation, catch_interrupt=catch_interrupt)
    for changed, entry in zip(asked.further.runs, asked.entries, strict=True):
        raised = batch.raised(entry)
        if raised is not None and (changed.values is not None or raised.is_a(KeyboardInterrupt)):
            found = relation_raised(asked.relation.name, raised, catch_interrupt=catch_interrupt)
            return msgspec.structs.replace(found, error_ratio=verdict.error_ratio)
    failure = _objection(asked.further, batch, case, asked.entries)
    return verdict if failure is None else msgspec.structs.replace(verdict, failure=failure)


def _is_owed_to_others(batch: Batch, entry: int) -> bool:
    """Whether what became of a run may come from memory that others of the batch wrote to, or hold."""
    raised = batch.raised(entry)
    return batch.is_damaged(entry) or (raised is not None and raised.is_a(torch.OutOfMemoryError))


def _objection(further: FurtherRuns, batch: Batch, case: int, entries: range) -> Failure | None:
    for run, entry in enumerate(entries):
        wrong = batch.raised(entry) or (accuracy.check(batch.trial(entry)) if batch.is_wrong(entry) else None)
        failure = None if wrong is None else further.blame(batch.trial(case), run, wrong)
        if failure is not None:
            return failure
    failure = further.compare(batch.results(case), [batch.results(entry) for entry in entries])
    return None if failure is None else further.refine(batch.trial(case), failure)
