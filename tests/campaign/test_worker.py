"""attnfuzz.campaign.worker: bugs of a pretended kernel are found, confirmed, shrunk and told apart."""

from __future__ import annotations

import time
from typing import cast

import msgspec

from attnfuzz.campaign.messages import (
    Busy,
    Confirmed,
    Duplicate,
    Found,
    Join,
    Minimised,
    Smaller,
    Stop,
    ToWorker,
    Unconfirmed,
    Unfinished,
)
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.identity.bug import tag_of
from attnfuzz.mistake import READ_BEFORE_WRITTEN
from attnfuzz.problems.cases import DenseDecodeCase, decode_case, encode_case
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Cause, Failure
from tests.common.named_features import named
from tests.common.search_bench import CRASH, KERNEL, WRONG, Bench, after, grouped

WRONG_LSE = Failure(oracle="accuracy", kind="lse:value", message="lse is wrong")


GROUPED = named("gqa_ratio>1", "gqa_ratio not pow2", "several query heads")


def test_a_bug_is_found_confirmed_and_shrunk_to_what_triggers_it() -> None:
    """This is the whole job."""
    bench = Bench(grouped, enough=after(Minimised)).run()
    found, confirmed, minimised = bench.of(Found)[0], bench.of(Confirmed)[0], bench.of(Minimised)[0]
    # if the machine goes down while shrinking, the failing case must be with the coordinator
    assert next(message for message in bench.sent if not isinstance(message, WorkerProgress)) is found
    assert found.kernel == KERNEL.target
    assert grouped(cast(DenseDecodeCase, decode_case("dense_decode", bytes(found.case)))) == WRONG
    assert (confirmed.failed, confirmed.runs) == (3, 3)
    assert bench.afresh == 2  # as it was found, and as it is saved: another kernel's stray write fails what follows
    assert minimised.complete
    assert minimised.features == GROUPED
    smallest = decode_case("dense_decode", bytes(bench.of(Smaller)[-1].case))
    assert isinstance(smallest, DenseDecodeCase)
    assert (smallest.num_q_heads, smallest.num_kv_heads, smallest.seq_lens) == (3, 1, (1,))


def test_one_bug_is_reported_once_and_its_failures_counted() -> None:
    """De-duplication is judged by how often a bug comes up again, and by what it has been seen in."""
    bench = Bench(grouped, most_cases=600).run()
    (found,) = bench.of(Found)
    case, _ = found.cases(KERNEL.problem)
    tag = tag_of(KERNEL.target, case, found.failure)  # known before the coordinator has answered
    counts = bench.of(WorkerProgress)
    assert sum(one.known_by_finding.get(tag, 0) for one in counts) == sum(one.known for one in counts) > 0


def test_what_another_worker_is_at_waits_until_it_is_done() -> None:
    """While a symptom is being shrunk elsewhere its cases are kept, and taken up if they turn out to be another bug."""
    busy = Busy(kernel=KERNEL.target, oracle="accuracy", kind="out:value", busy=True)
    waiting = Bench(grouped, budget_s=0.5, mail=[busy]).run()
    assert waiting.of(Found) == []

    def done(sent: list[msgspec.Struct]) -> bool:
        if len(sent) == 3:
            bench.mail.append(Busy(kernel=KERNEL.target, oracle="accuracy", kind="out:value", busy=False))
        return after(Minimised)(sent)

    bench = Bench(grouped, mail=[busy], enough=done)
    assert len(bench.run().of(Minimised)) == 1


def test_failures_that_never_come_back_are_not_chased_for_ever() -> None:
    """A disturbance of the machine must not be reported as a bug, nor vain confirmations take the whole budget."""
    last: list[DenseDecodeCase] = []

    def first_time_only(case: DenseDecodeCase) -> Failure | None:
        if case in last:
            return None
        last.append(case)
        return WRONG if case.gqa_ratio > 1 else None

    bench = Bench(first_time_only, most_cases=800).run()
    assert [message.runs for message in bench.of(Unconfirmed)] == [20] * 3
    assert bench.of(Confirmed) == []


def test_a_flaky_bug_is_confirmed_with_its_rate_and_shrunk() -> None:
    """A race is a bug although it does not show in every run."""
    calls = 0

    def two_of_three(case: DenseDecodeCase) -> Failure | None:
        nonlocal calls
        calls += case.gqa_ratio == 3
        return grouped(case) if calls % 3 else None

    bench = Bench(two_of_three, enough=after(Minimised)).run()
    assert bench.of(Confirmed)[0].failed < bench.of(Confirmed)[0].runs
    assert bench.of(Minimised)[0].features == GROUPED


def test_shrinking_does_not_slip_from_one_bug_to_another() -> None:
    """A crash that shrinks into a wrong value would lose the crash."""

    def crash_inside_wrong(case: DenseDecodeCase) -> Failure | None:
        if max(case.seq_lens) <= 1:
            return None
        return CRASH if case.gqa_ratio == 3 else WRONG

    bench = Bench(crash_inside_wrong, enough=after(Minimised, 2)).run()
    by_finding = {message.finding: message.features for message in bench.of(Minimised)}
    oracles = {message.finding: message.failure.oracle for message in bench.of(Found)}
    assert {oracles[name]: features for name, features in by_finding.items()} == {
        "crash": named("gqa_ratio>1", "gqa_ratio not pow2", "several query heads", "seq_len>1"),
        "accuracy": named("seq_len>1"),
    }
    for message in bench.of(Smaller):
        assert message.failure.oracle == oracles[message.finding]


def test_known_crashes_are_skipped_once_they_cost_too_much() -> None:
    """Each crash costs a process; a kernel that crashes for half of its inputs still has another half to search."""

    def slow_crash(case: DenseDecodeCase) -> Failure | None:
        time.sleep(0.02 if case.gqa_ratio > 1 else 0.001)
        return CRASH if case.gqa_ratio > 1 else None

    def skips(sent: list[msgspec.Struct]) -> bool:
        return isinstance(sent[-1], WorkerProgress) and sent[-1].skipped > 0

    bench = Bench(slow_crash, enough=skips).run()
    assert len(bench.of(Minimised)) == 1
    assert sum(progress.skipped for progress in bench.of(WorkerProgress)) > 0


def test_all_kernels_get_their_turn() -> None:
    """A kernel that comes last must not come never."""
    others = tuple(msgspec.structs.replace(KERNEL, target=f"kernels.py:k{i}") for i in range(5))
    names, met = {kernel.target for kernel in others}, set[str]()

    def enough(sent: list[msgspec.Struct]) -> bool:
        met.update(message.kernel for message in sent if isinstance(message, WorkerProgress))
        return met == names

    Bench(lambda case: None, budget_s=20.0, kernels=others, enough=enough).run()
    assert met == names


def test_the_search_ends_at_the_deadline_and_on_stop() -> None:
    """A worker that overstays is killed, and with it what it was shrinking."""
    assert Bench(lambda case: None, budget_s=0.5).run().judged
    assert Bench(lambda case: None, budget_s=600.0, mail=[Stop()]).run().mail == []


def test_what_fails_as_the_search_ends_is_told() -> None:
    """A case that is judged while the word to stop is on its way would count as one that passed."""
    bench = Bench(lambda case: WRONG if len(bench.judged) >= 20 else None, most_cases=20)
    assert [one.failure for one in bench.run().of(Found)] == [WRONG]


def test_shrinking_stops_at_the_deadline_with_what_it_has() -> None:
    """A finding cut off in the middle is still a finding."""

    def slow(case: DenseDecodeCase) -> Failure | None:
        failure = grouped(case)
        if failure and bench.of(Confirmed):
            time.sleep(bench.budget_s)
        return failure

    bench = Bench(slow, budget_s=2.5)
    bench.run()
    assert len(bench.of(Confirmed)) == 1
    assert [message.complete for message in bench.of(Minimised)] == [False]


def test_a_wrong_lse_that_becomes_a_wrong_output_is_one_bug() -> None:
    """Where a needle hides the error from the output, the same bug shows in the LSE alone."""

    def diluted(case: DenseDecodeCase) -> Failure | None:
        if max(case.seq_lens) <= 1:
            return None
        return WRONG_LSE if case.values.needles else WRONG

    bench = Bench(diluted, most_cases=1000, seed=2).run()
    assert [message.features for message in bench.of(Minimised)] == [named("seq_len>1")]
    assert bench.of(Smaller)[-1].failure == WRONG


def test_a_wrong_output_never_becomes_a_wrong_lse() -> None:
    """Shrinking must not drift from what users see to what they may not look at."""

    def both(case: DenseDecodeCase) -> Failure | None:
        if max(case.seq_lens) <= 1:
            return WRONG_LSE
        return WRONG if case.gqa_ratio > 1 else WRONG_LSE

    bench = Bench(both, enough=after(Minimised, 2)).run()
    kinds = {message.finding: message.failure.kind for message in bench.of(Found)}
    for message in bench.of(Smaller):
        assert (kinds[message.finding], message.failure.kind) != ("out:value", "lse:value")


def test_an_index_that_is_out_of_range_without_room_is_told_once() -> None:
    """A wrong index would be two findings: one of an IndexError, one of the numbers that it reads where it may."""

    def reads_astray(case: DenseDecodeCase) -> Failure | None:
        if max(case.seq_lens) < 5:
            return None
        return WRONG if case.extra_rows else Failure(oracle="exception", kind="IndexError in f", message="no")

    bench = Bench(reads_astray, enough=after(Duplicate), budget_s=10.0).run()
    assert len(bench.of(Minimised)) == 1
    assert {message.failure.kind for message in bench.of(Found)} == {"out:value", "IndexError in f"}


def test_a_bug_behind_one_that_is_nearly_always_there_is_found() -> None:
    """Most cases have more than one token; a bug that needs that hides every other wrong value."""

    def nearly_always(case: DenseDecodeCase) -> Failure | None:
        return WRONG if max(case.seq_lens) > 1 or case.gqa_ratio == 3 else None

    bench = Bench(nearly_always, enough=after(Minimised, 2), budget_s=10.0).run()
    assert {frozenset(message.features) for message in bench.of(Minimised)} == {
        named("seq_len>1"),
        GROUPED,
    }


def test_a_kernel_is_searched_only_in_what_is_built_of_it() -> None:
    """Each worker would start compilers of its own, which spoil each other's results and hold up its search."""
    part = Join(kernel=KERNEL, built=({"head_size": (32,)},))
    bench = Bench(lambda case: None, kernels=(), mail=[part], most_cases=100).run()
    assert {case.head_size for case in bench.judged} == {32}
    bench = Bench(lambda case: None, kernels=(), mail=[part, Join(kernel=KERNEL)], most_cases=200).run()
    assert {case.head_size for case in bench.judged} == {16, 32}


def an_unfinished(failure: Failure = WRONG) -> Unfinished:
    case = DenseDecodeCase(num_q_heads=3, num_kv_heads=1, head_size=16, seq_lens=(1,), scale=0.25)
    return Unfinished(kernel=KERNEL.target, case=msgspec.Raw(encode_case(case)), failure=failure)


def test_what_a_lost_worker_was_at_waits_until_its_kernel_is_built() -> None:
    """A campaign that goes on after an interrupt would end with a traceback, or lose the failure."""
    bench = Bench(grouped, kernels=(), mail=[an_unfinished(), Join(kernel=KERNEL)], enough=after(Found)).run()
    assert bench.of(Found)[0].case == an_unfinished().case


def test_what_fails_before_it_is_known_what_a_kernel_takes_is_judged_again() -> None:
    """A convention, told as a finding; or a bug that is met in the first seconds, lost."""
    least = msgspec.structs.replace(KERNEL, supports=Supports(strides="contiguous", lse="none"))
    early = Join(kernel=least, is_settled=False)
    waiting = Bench(grouped, kernels=(), mail=[early], most_cases=200).run()
    assert waiting.of(Found) == []
    failed = next(case for case in waiting.judged if isinstance(case, DenseDecodeCase) and grouped(case))

    def settles(sent: list[msgspec.Struct]) -> bool:
        if failed in bench.judged and not settled:
            settled.append(Join(kernel=KERNEL))
            bench.mail.extend(settled)
            settled_after.append(len(bench.judged))
        return after(Minimised)(sent)

    settled: list[Join] = []
    settled_after: list[int] = []
    bench = Bench(grouped, kernels=(), mail=[early], enough=settles)
    bench.run()
    assert failed in bench.judged[settled_after[0] :]
    assert bench.of(Found)

    settled_differently = Bench(lambda case: None, kernels=(), mail=[early, Join(kernel=KERNEL)], most_cases=200).run()
    assert settled_differently.of(Found) == []


def test_what_a_lost_worker_was_at_waits_until_it_is_known_what_its_kernel_takes() -> None:
    """A resumed campaign would shrink it within the least that the kernel takes, and tell another bug."""
    least = msgspec.structs.replace(KERNEL, supports=Supports(lse="none"))
    early: list[ToWorker] = [an_unfinished(), Join(kernel=least, is_settled=False)]
    assert Bench(grouped, kernels=(), mail=list(early), most_cases=50).run().of(Found) == []
    bench = Bench(grouped, kernels=(), mail=[*early, Join(kernel=KERNEL)], enough=after(Found)).run()
    assert bench.of(Found)[0].case == an_unfinished().case


def test_what_no_declaration_ends_does_not_wait_until_it_is_known_what_a_kernel_takes() -> None:
    """Memory that is read too early was told when all was known of the kernel: after the budget, if at all."""
    early = msgspec.structs.replace(WRONG, oracle="unwritten", causes=(Cause(mistake=READ_BEFORE_WRITTEN),))
    least = msgspec.structs.replace(KERNEL, supports=Supports(lse="none"))
    mail: list[ToWorker] = [an_unfinished(early), Join(kernel=least, is_settled=False)]
    bench = Bench(grouped, kernels=(), mail=mail, enough=after(Found), most_cases=200).run()
    assert bench.of(Found)[0].case == an_unfinished().case
