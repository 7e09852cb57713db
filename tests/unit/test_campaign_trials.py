"""attnfuzz.campaign.triage.confirmation and first_death: cases run alone or one after the other in one process."""

from __future__ import annotations

from attnfuzz.campaign.identity.signature import Symptom
from attnfuzz.campaign.triage.confirmation import first_death
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case
from tests.unit.pretended_process import CRASH, KERNEL, WRONG, PretendedProcess, a_case

A, B, C = a_case(1), a_case(2), a_case(3)


def test_a_sequence_runs_in_one_fresh_process() -> None:
    """A case left over from before would be part of what the failure needs, and not of what is saved."""
    process = PretendedProcess(lambda case, earlier: WRONG if earlier == (A, B) else None)
    trials = process.trials()
    trials.alone(C)
    assert trials.after([A, B], C) == WRONG
    assert process.processes[-1] == [A, B, C]
    assert trials.after([B], C) is None


def test_a_case_before_that_ends_the_process_ends_the_sequence() -> None:
    """What follows would run in another process, where nothing has run."""
    process = PretendedProcess(lambda case, earlier: CRASH)
    assert process.trials().after([A, B], C) is None
    assert sum(map(len, process.processes)) == 1


def test_the_first_that_shows_the_symptom_is_found() -> None:
    """Later ones tell nothing: the process is damaged then."""
    process = PretendedProcess(lambda case, earlier: WRONG if earlier else None)
    assert process.trials().first_alike([A, B, C], Symptom.of(KERNEL.target, WRONG)) == (1, WRONG)
    assert process.trials().first_alike([A, B, C], Symptom.of(KERNEL.target, CRASH)) is None


def test_a_result_that_depends_on_other_calls_is_looked_for_in_fresh_processes() -> None:
    """After its first run the kernel remembers: the bug would be called flaky, and no smaller case would show it."""
    process = PretendedProcess(lambda case, earlier: None if earlier else WRONG)
    trials = process.trials(relations=("call_sequence",))
    assert [trials.alone(A), trials.alone(A), trials.alone(B)] == [WRONG] * 3
    trials = process.trials(relations=("batch_invariance",))
    assert [trials.alone(A, afresh=True), trials.alone(A)] == [WRONG, None]


class Noted(KnownDeaths):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, Case]] = []

    def died(self, declaration: Declaration, case: Case) -> None:
        self.told.append(("died", case))

    def passed(self, declaration: Declaration, case: Case) -> None:
        self.told.append(("passed", case))


def test_runs_alone_teach_what_dies() -> None:
    """Shrinking runs the best examples there are; a death after other cases says nothing of the case itself."""
    deaths = Noted()

    def bug(case: Case, earlier: object) -> Failure | None:
        return CRASH if case == A else WRONG if case == B else None

    trials = PretendedProcess(bug).trials(deaths)
    for case in (A, B, C):
        trials.alone(case)
    trials.after([B], A)
    assert deaths.told == [("died", A), ("passed", B), ("passed", C)]


def test_a_lost_batch_is_traced_to_the_case_that_dies() -> None:
    """None of its cases dies alone: the crash would be lost with the batch."""
    process = PretendedProcess(lambda case, earlier: CRASH if case == C and A in earlier else None)
    suspect = first_death(process.timed(), KERNEL, [A, B, C, B])
    assert suspect is not None
    assert (suspect.case, suspect.failure, suspect.preceding) == (C, CRASH, (A, B))
    assert first_death(process.timed(), KERNEL, [B, C]) is None
    assert first_death(process.timed(deadline=-10.0), KERNEL, [A, C]) is None
