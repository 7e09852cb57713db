"""Explains a failed case: measures weights, replays roundings, and looks for changes that make it pass."""

from __future__ import annotations

import itertools
import time

import msgspec

from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.ablation import ablate
from attnfuzz.explaining.explanation import NO_TIME, Explanation, in_a_similar_case, in_words
from attnfuzz.explaining.neighbours import neighbours
from attnfuzz.judging.guard_naming import with_name
from attnfuzz.judging.runner import Runner
from attnfuzz.mistake import LSE_TRANSPOSED, OF_PROBLEM
from attnfuzz.oracles.registry import ACCURACY, CALL_SEQUENCE, CRASH, GUARD_PAGE, HANG, oracle_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.verdict import Cause, Failure, Verdict

_WEIGHING_S = 2.0
_EXPLAINING_S = 3.0
"""Seconds for each finding of a campaign, once; the explain command takes its time."""
_MOST_BESIDE = 8
"""Cases beside one with an access outside."""
_MOST_LINES = 4
_MOST_CHARACTERS = 300


def explain_failure(
    runner: Runner,
    declaration: Declaration,
    case: Case,
    failure: Failure,
    *,
    weighing_s: float,
    total_s: float,
    measures_faults: bool = True,
) -> Explanation:
    """Explain the ``failure`` of ``case``.

    ``measures_faults``: of an access outside on a GPU it is told how far that is, for which several processes end.

    No run for weights begins after ``weighing_s`` seconds, and none of a changed case after ``total_s``; of a case that
    hangs, none at all. Where a relation or an oracle of the kernel's own file objects, its weights are right.
    Raises what ``Runner.judge`` raises.
    """
    until = time.monotonic() + total_s
    if failure.oracle == HANG.name:
        return Explanation()
    oracle = oracle_of(failure.oracle)
    found = Explanation()
    judges_a_run = not oracle.is_relation and not oracle.is_own
    told = failure
    if judges_a_run or failure.causes:  # with the mistake that neighbouring cases leave, if it shows again
        again = runner.judge(declaration, case, relations=oracle.relations, inquire=True).failure
        told = again if again and (again.oracle, again.kind) == (failure.oracle, failure.kind) else failure
    if told.cause == LSE_TRANSPOSED:
        pass  # all numbers are right, where they are put
    elif (
        judges_a_run and told.causes and all(one.rounding for one in told.causes)
    ):  # replayed: single weights say nothing of it
        found = runner.cause_lines(declaration, case, told.replays)
    elif judges_a_run:
        found = runner.explain(declaration, case, seconds=weighing_s, oracle=failure.oracle)
    elif measures_faults:
        named = with_name(runner, declaration, case, Verdict(failure=failure)).failure
        if named is not None and named is not failure:
            found = Explanation(lines=(named.message,))
    if failure.oracle == GUARD_PAGE.name:
        beside = _causes_beside(runner, declaration, case)
        told = _with_causes(told, beside)
        found = msgspec.structs.replace(found, lines=tuple(filter(None, (*found.lines, in_words(beside)))))
    if lines := failure.sources or runner.access_lines(declaration, case, failure).sources:
        found = msgspec.structs.replace(found, sources=lines)
    if failure.oracle == CRASH.name and not found.runs:  # it has died again, which has been said
        found = Explanation(sources=failure.sources)
    if isinstance(case, OpenCase):
        found = msgspec.structs.replace(found, told=_with_causes(told, found.causes or ()))
    else:
        found = msgspec.structs.replace(found, told=told, lines=_without_candidates(found, told))

    def fails(changed: Case) -> bool | None:
        """As ``failure`` does; None for another failure, be it the same symptom of another cause."""
        if failure.oracle == CALL_SEQUENCE.name:  # what the kernel remembers of one run would hide it in the next
            runner.restart()
        other = runner.judge(declaration, changed, relations=oracle.relations).failure
        if other is None:
            return False
        causes = {other.cause, failure.cause} - {""}
        return True if (other.oracle, other.kind) == (failure.oracle, failure.kind) and len(causes) < 2 else None

    changes = ablate(case, fails, supports=declaration.supports, options=declaration.options, until=until)
    return msgspec.structs.replace(found, changes=changes)


def _without_candidates(found: Explanation, decided: Failure) -> tuple[str, ...]:
    """The lines, without that of all mistakes which give the measured weights where runs have left fewer of them.

    Where runs on similar cases have left none, it may be one of these.
    """
    candidates = found.causes or ()
    left, said = {one.words for one in decided.causes}, in_words(candidates)
    if not left and decided.oracle == ACCURACY.name:
        return tuple(f"perhaps {line}" if line == said else line for line in found.lines)
    if not left or left >= {one.words for one in candidates}:
        return found.lines
    return tuple(line for line in found.lines if line != said)


def _causes_beside(runner: Runner, declaration: Declaration, case: Case) -> tuple[Cause, ...]:
    """The mistake that wrong numbers in a similar case point to: what lies outside of a tensor tells of none.

    An offset that is wrong need not lead outside, and where it does not, it gives wrong numbers; the line that reads
    outside is as a rule not the one that is wrong.
    """
    for one in itertools.islice(neighbours(case), _MOST_BESIDE):
        if not supports_case(declaration.supports, declaration.options, one):
            continue
        seen = runner.judge(declaration, one, relations=()).failure
        if seen is None or seen.oracle != ACCURACY.name:
            continue
        told = runner.judge(declaration, one, relations=(), inquire=True).failure
        if told is not None and told.cause and not told.causes[0].rounding:
            is_clear = len({one.words for one in told.causes}) == 1
            return tuple(map(in_a_similar_case, told.causes)) if is_clear else ()
    return ()


def _with_causes(told: Failure, causes: tuple[Cause, ...]) -> Failure:
    """``told``, and the ``causes`` that runs with other inputs show; beside one without words, theirs alone.

    A mistake that the problem knows says why what is read had not been written.
    """
    if not causes or any(one.words for one in told.causes):
        return told
    words = dict.fromkeys(one.words for one in causes)
    message = "; ".join((told.message, *words))
    return msgspec.structs.replace(
        told, message=message, causes=causes if causes[0].mistake == OF_PROBLEM else told.causes or causes
    )


def explain_in_short(runner: Runner, declaration: Declaration, case: Case, failure: Failure) -> Explanation:
    """As `explain_failure`, in the time that a campaign has for it, and no longer than its findings tell."""
    found = explain_failure(
        runner, declaration, case, failure, weighing_s=_WEIGHING_S, total_s=_EXPLAINING_S, measures_faults=False
    )
    message = failure.message if found.told is None else found.told.message
    unsaid = tuple(line for line in found.lines if f"; {line}" not in message)
    return shortened(msgspec.structs.replace(found, lines=unsaid))


def shortened(explanation: Explanation) -> Explanation:
    """The lines of an explanation that go into the details of a finding."""
    lines = (*[line for line in explanation.lines if line != NO_TIME][:_MOST_LINES], *explanation.changes)
    short = tuple(line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..." for line in lines)
    return msgspec.structs.replace(explanation, lines=short, changes=(), runs=0)
