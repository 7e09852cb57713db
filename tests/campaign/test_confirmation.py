"""attnfuzz.campaign.triage.confirmation: a failure comes back, or now and then, or after certain cases, or never."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.messages import Smaller
from attnfuzz.campaign.triage.confirmation import (
    Allowance,
    confirm,
    fewer,
    find_preceding,
    first_death,
    more_alike,
    rate_of,
    retries_of,
)
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.declaration import Declaration
from attnfuzz.mistake import READ_BEFORE_WRITTEN
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.verdict import Cause, Failure, Verdict
from tests.campaign.pretended_process import PretendedProcess, a_case, looked_into
from tests.common.search_bench import CRASH, KERNEL, WRONG

OTHERS = tuple(a_case(length) for length in range(10, 30))


WIDE = a_case(5, head_size=32)


def now_and_then(failure: Failure, seed: int = 1, *, rate: float = 0.25) -> PretendedProcess:
    """Fails by chance, whatever ran before."""
    random = Random(seed)
    return PretendedProcess(lambda case, earlier: failure if random.random() < rate else None)


def after_wide(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
    return CRASH if case.num_q_heads == 3 and WIDE in earlier else None


def test_a_case_that_always_fails_is_run_a_few_times() -> None:
    """Each further run of a crash costs a process."""
    for failure, runs in ((WRONG, 3), (CRASH, 2)):
        process = now_and_then(failure, rate=1.0)
        found = confirm(process.suspect(a_case(), *OTHERS, failure=failure), process.retries())
        assert (len(found.failures), found.runs, found.is_flaky) == (runs, runs, False)
        assert found.failing.preceding == ()


def test_a_crash_that_needs_an_earlier_case_is_confirmed_with_just_that_one() -> None:
    """It would be dropped as not reproducible, and the one bug that users never manage to report stays in."""
    process = PretendedProcess(after_wide)
    suspect = process.suspect(a_case(num_q_heads=3), *OTHERS[:7], WIDE, *OTHERS[7:])
    found = confirm(suspect, process.retries())
    assert (found.failing.case, found.failing.preceding) == (suspect.case, (WIDE,))
    assert (len(found.failures), found.is_flaky) == (2, False)


class DiesInOneRelation(PretendedProcess):
    """The kernel dies where ``value_affinity`` judges the case, which is what each case draws."""

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        verdict = super().judge(declaration, case, **how)
        dies = how["relations"] in (None, ("value_affinity",))
        return Verdict(failure=CRASH) if dies else verdict


def test_a_death_in_a_relation_is_looked_for_there_from_then_on() -> None:
    """Smaller cases draw other relations and would pass: the crash could not be shrunk, or not even be confirmed."""
    process = DiesInOneRelation(lambda case, earlier: None)
    retries = process.retries()
    found = confirm(process.suspect(a_case()), retries)
    assert (len(found.failures), found.is_flaky) == (2, False)
    assert retries.relations == ("value_affinity",)


DIFFERS = Failure(oracle="determinism", kind="out", message="out differs between two runs")


REMEMBERED = Failure(oracle="call_sequence", kind="bits", message="out differs after another call")


class Remembers(PretendedProcess):
    """``call_sequence`` objects to the first cases that it judges, so many of them; no other oracle does."""

    objections: float = math.inf

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        verdict = super().judge(declaration, case, **how)
        if how["relations"] != ("call_sequence",) or self.objections <= 0:
            return verdict
        self.objections -= 1
        return Verdict(failure=REMEMBERED)


@pytest.mark.parametrize(
    "seen", [DIFFERS, Failure(oracle="block_table_slack", kind="bits", message="out differs with another table")]
)
def test_bits_that_other_calls_change_are_looked_for_in_a_sequence_of_calls(seen: Failure) -> None:
    """In a batch other cases run between two runs of one; alone it never fails again, and the bug would be dropped."""
    process = Remembers(lambda case, earlier: None)
    retries = process.retries()
    found = confirm(process.suspect(a_case(), *OTHERS, failure=seen), retries)
    assert (found.failing.failure, len(found.failures), found.is_flaky) == (REMEMBERED, 3, False)
    assert found.failing.preceding == ()
    assert retries.relations == ("call_sequence",)
    finished, sent = looked_into(process.suspect(a_case(), failure=seen), process.timed())
    assert finished
    assert REMEMBERED in [message.failure for message in sent if isinstance(message, Smaller)]


@pytest.mark.parametrize("seen", [DIFFERS, WRONG])
def test_what_earlier_calls_left_in_memory_is_told_as_that_memory(seen: Failure) -> None:
    """A buffer that is kept and read too early would be told once as such, once as a race and once as wrong numbers."""
    causes = (Cause(mistake=READ_BEFORE_WRITTEN),)
    unwritten = Failure(oracle="unwritten", kind="read before written", message="made of memory", causes=causes)
    process = PretendedProcess(lambda case, earlier: seen if earlier else unwritten)
    found = confirm(process.suspect(a_case(), *OTHERS, failure=seen), process.retries())
    assert (found.failing.failure, found.failing.preceding, found.is_flaky) == (unwritten, (), False)


def test_bits_that_other_calls_change_now_and_then_are_not_blamed_on_them() -> None:
    """A race would be told as something that the kernel remembers."""
    process = Remembers(lambda case, earlier: None)
    process.objections = 2
    retries = process.retries()
    assert not confirm(process.suspect(a_case(), failure=DIFFERS), retries).failures
    assert retries.relations == ()


def test_each_finding_is_pursued_with_its_own_relation() -> None:
    """Shrinking would slip to what another relation objects to, or pay for relations that have no say."""
    process = PretendedProcess(lambda case, earlier: None)
    bits = Failure(oracle="value_affinity", kind="bits", message="no")
    found = [
        retries_of(process.suspect(a_case(), failure=failure), process.timed(), KnownDeaths()).relations
        for failure in (bits, WRONG, CRASH)
    ]
    assert found == [("value_affinity",), (), ()]


def test_a_counter_of_calls_is_found_as_a_sequence() -> None:
    """Here no case matters, only how many there were."""
    process = PretendedProcess(lambda case, earlier: CRASH if len(earlier) == 4 else None)
    found = confirm(process.suspect(a_case(), *OTHERS), process.retries())
    assert len(found.failing.preceding) == 4


def test_a_failure_of_the_second_run_in_a_process_is_no_chance() -> None:
    """What a kernel leaves behind for its own next call is a bug of every call but the first, and not a flaky one."""
    process = PretendedProcess(lambda case, earlier: WRONG if case in earlier else None)
    found = confirm(process.suspect(a_case(), failure=WRONG), process.retries())
    assert not found.is_flaky
    assert found.failing.preceding == (a_case(),)


def test_what_fails_now_and_then_is_flaky() -> None:
    """Of a bug that shows one time in four, three runs show nothing two times in five."""
    for failure in (WRONG, CRASH):
        found = []
        for seed in range(20):
            process = now_and_then(failure, seed)
            found.append(confirm(process.suspect(a_case(), *OTHERS, failure=failure), process.retries()))
        assert sum(bool(one.failures) and one.is_flaky for one in found) >= 18
        assert not any(one.failing.preceding for one in found)


def test_the_rate_is_that_of_twenty_runs() -> None:
    """A rate of three runs says nothing."""
    process = now_and_then(WRONG)
    rate = rate_of(process.suspect(a_case(), failure=WRONG), process.retries())
    assert (rate.runs, rate.is_flaky) == (20, True)
    assert 1 <= len(rate.failures) <= 10


@pytest.mark.parametrize(
    ("failure", "runs"), [(CRASH, 20), (Failure(oracle="hang", kind="timeout", message="still running"), 1)]
)
def test_what_never_comes_back_is_not_confirmed(failure: Failure, runs: int) -> None:
    """A disturbance of the machine is no bug of the kernel; of a hang it is so likely that it is not waited for."""
    process = PretendedProcess(lambda case, earlier: None)
    retries = process.retries()
    found = confirm(process.suspect(a_case(), *OTHERS, failure=failure), retries)
    assert (found.failures, found.runs, retries.relations) == ([], runs, ())


A, B, C = a_case(1), a_case(2), a_case(3)


def test_a_sequence_runs_in_one_fresh_process() -> None:
    """A case left over from before would be part of what the failure needs, and not of what is saved."""
    process = PretendedProcess(lambda case, earlier: WRONG if earlier == (A, B) else None)
    retries = process.retries()
    retries.alone(C)
    assert retries.after([A, B], C) == WRONG
    assert process.processes[-1] == [A, B, C]
    assert retries.after([B], C) is None


def test_a_case_before_that_ends_the_process_ends_the_sequence() -> None:
    """What follows would run in another process, where nothing has run."""
    process = PretendedProcess(lambda case, earlier: CRASH)
    assert process.retries().after([A, B], C) is None
    assert sum(map(len, process.processes)) == 1


def test_a_result_that_depends_on_other_calls_is_looked_for_in_fresh_processes() -> None:
    """After its first run the kernel remembers: the bug would be called flaky, and no smaller case would show it."""
    process = PretendedProcess(lambda case, earlier: None if earlier else WRONG)
    retries = process.retries(relations=("call_sequence",))
    assert [retries.alone(A), retries.alone(A), retries.alone(B)] == [WRONG] * 3
    retries = process.retries(relations=("batch_invariance",))
    assert [retries.alone(A, afresh=True), retries.alone(A)] == [WRONG, None]


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

    retries = PretendedProcess(bug).retries(deaths)
    for case in (A, B, C):
        retries.alone(case)
    retries.after([B], A)
    assert deaths.told == [("died", A), ("passed", B), ("passed", C)]


def test_a_lost_batch_is_traced_to_the_case_that_dies() -> None:
    """None of its cases dies alone: the crash would be lost with the batch."""
    process = PretendedProcess(lambda case, earlier: CRASH if case == C and A in earlier else None)
    suspect = first_death(process.timed(), KERNEL, [A, B, C, B])
    assert suspect is not None
    assert (suspect.case, suspect.failure, suspect.preceding) == (C, CRASH, (A, B))
    assert first_death(process.timed(), KERNEL, [B, C]) is None
    assert first_death(process.timed(deadline=-10.0), KERNEL, [A, C]) is None


CASES = tuple(a_case(last_length) for last_length in range(1, 65))


@pytest.mark.parametrize("needed", [(63,), (0,), (20,), (5, 40), (0, 1, 62)])
def test_only_what_is_needed_is_kept(needed: tuple[int, ...]) -> None:
    """Sixty cases in a file hide the two that matter."""
    wanted = [CASES[i] for i in needed]
    assert fewer(CASES, lambda kept: all(case in kept for case in wanted)) == tuple(wanted)


def test_the_last_few_are_tried_first() -> None:
    """A sequence takes as long to run as it is, and most bugs need what ran just before."""
    tried: list[int] = []

    def fails(kept: Sequence[Case]) -> bool:
        tried.append(len(kept))
        return CASES[-3] in kept

    fewer(CASES, fails)
    assert tried[:3] == [1, 2, 4]
    assert max(tried) == 4


def test_so_many_runs_are_made_whatever_they_take() -> None:
    """A machine that has much to do would tell other things than one that has not."""
    made: list[int] = []

    def fails(kept: Sequence[Case]) -> bool:
        made.append(len(kept) + 1)
        return False

    assert fewer(CASES, Allowance(100).limited(fails)) == CASES
    assert 60 < sum(made) <= 100


def test_an_earlier_case_that_fails_alike_ends_the_sequence() -> None:
    """The shorter sequence says more about the bug."""
    process = PretendedProcess(lambda case, earlier: CRASH if CASES[2] in earlier else None)
    found = find_preceding(process.suspect(a_case(99), *CASES), [CASES], process.retries())
    assert found is not None
    assert (found.case, found.preceding) == (CASES[3], CASES[:3])


def test_a_case_that_fails_alone_needs_no_others() -> None:
    """It would be saved with cases that have nothing to do with it, as its own predecessors."""
    process = PretendedProcess(lambda case, earlier: CRASH)
    assert find_preceding(process.suspect(a_case(99), *CASES), [CASES], process.retries()) is None


def test_another_crash_on_the_way_is_not_taken_for_it() -> None:
    """The process that the failing case ran in had survived."""
    process = PretendedProcess(lambda case, earlier: CRASH if case == CASES[1] and earlier else None)
    suspect = process.suspect(a_case(99), *CASES, failure=WRONG)
    assert find_preceding(suspect, [CASES], process.retries()) is None


def test_preceding_cases_become_as_like_the_failing_one_as_they_can_be() -> None:
    """Nothing would tell which part of an earlier call is kept, among all in which it happens to be another one."""
    suspect = PretendedProcess(lambda case, earlier: None).suspect(a_case(7), WIDE, a_case(9, num_q_heads=2))
    assert more_alike(suspect, lambda cases: len(cases) == 2) == (a_case(7), a_case(7))

    def fails(cases: Sequence[Case]) -> bool:
        assert isinstance(cases[1], DenseDecodeCase)
        return cases[1].seq_lens[0] >= 8

    assert more_alike(suspect, fails) == (a_case(7), a_case(9))


def test_a_case_that_needs_another_is_tried_after_one_that_is_nearly_the_same() -> None:
    """Among a hundred earlier calls those that matter would be looked for in vain, and the bug called flaky."""
    scaled = msgspec.structs.replace(a_case(7), scale=0.5)
    process = PretendedProcess(lambda case, earlier: WRONG if case == a_case(7) and scaled in earlier else None)
    found = confirm(process.suspect(a_case(7), *OTHERS, failure=WRONG), process.retries())
    assert (found.failing.preceding, found.is_flaky) == ((scaled,), False)
    assert "a call that is the same but for scale (0.5 there, 0.25 here)" in found.failing.told.message
    assert [(one.mistake, one.way) for one in found.failing.told.causes] == [("kept_between_calls", "scale")]
