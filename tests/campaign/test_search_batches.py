"""attnfuzz.campaign.worker with batches: whatever becomes of one, no case is lost, counted twice or left unweighed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

import msgspec

from attnfuzz.campaign.draw.sampling import WorkingSets
from attnfuzz.campaign.judge.case_judge import CaseJudge
from attnfuzz.campaign.messages import (
    Confirmed,
    FormatCompiled,
    Found,
    Minimised,
    Smaller,
    Stop,
    ToWorker,
    Trouble,
    Unconfirmed,
)
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import Bug
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.formats import Format, format_key, format_of
from attnfuzz.verdict import Drawn, Failure, Verdict, ends_process
from tests.common.named_features import named
from tests.common.scripted_runner import judging, scripted
from tests.common.search_bench import CRASH, HANG, KERNEL, WRONG, Bench, after, grouped, long

GROUPED = named("gqa_ratio>1", "gqa_ratio not pow2", "several query heads")


@dataclass
class BatchBench(Bench):
    """Judges batches too: one with a case that crashes or hangs is lost, as with a real process."""

    batches: list[list[DenseDecodeCase]] = field(default_factory=list)
    verdicts: Counter[bytes] = field(default_factory=Counter)
    overlaps: int = 0
    lost: int = 0
    most_together: int = 64
    lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, deadline: float) -> CaseJudge:
        return judging(
            scripted(self.judge, together=self.together),
            deadline=deadline,
            complain=lambda text: self.send(Trouble(message=text)),
        )

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        self.overlaps += not self.lock.acquire(blocking=False)
        verdict = super().judge(declaration, case, **how)
        self.verdicts[msgspec.json.encode(case)] += 1
        self.lock.release()
        return verdict

    def together(self, declaration: Declaration, cases: Sequence[DenseDecodeCase], **how: Any) -> list[Verdict] | None:
        self.overlaps += not self.lock.acquire(blocking=False)
        try:
            self.batches.append(list(cases))
            failures = [self.bug(case) for case in cases]
            if any(ends_process(failure) for failure in failures):
                self.lost += 1
                return None
            self.note(cases)
            self.verdicts.update(msgspec.json.encode(case) for case in cases)
            return [Verdict(failure=failure, error_ratio=0.5) for failure in failures]
        finally:
            self.lock.release()

    def batches_encoded(self) -> list[set[bytes]]:
        return [{msgspec.json.encode(case) for case in batch} for batch in self.batches]

    def count(self) -> int:
        return sum(progress.cases for progress in self.of(WorkerProgress))


@dataclass
class FormatsBench(BatchBench):
    """As on a GPU, where there are six formats."""

    setup_formats: list[Format] = field(
        default_factory=lambda: [
            Format(dtype="float16", head_size=size, num_q_heads=heads * ratio, num_kv_heads=heads)
            for size in (16, 32)
            for heads, ratio in ((1, 1), (2, 1), (1, 5))
        ]
    )

    def formats(self) -> WorkingSets:
        return WorkingSets(lambda declaration: cycle(self.setup_formats))


def test_cases_are_judged_in_growing_batches_and_each_is_counted_once() -> None:
    """Batches are what makes a GPU fast, and the number of cases is what users are told."""
    bench = BatchBench(lambda case: None, most_cases=400).run()
    sizes = [len(batch) for batch in bench.batches]
    assert sizes[:8] == [2, 2, 4, 4, 8, 8, 16, 16]  # the next was drawn before the last had gone well
    assert 16 < max(sizes) <= 64
    assert set(bench.verdicts.values()) == {1}
    assert bench.count() == len(bench.verdicts)


def test_slow_batches_grow_with_each_that_goes_well() -> None:
    """Half of a kernel's first second on a GPU would go by in batches of the size that the last one has proved."""

    def slow(case: DenseDecodeCase) -> None:
        time.sleep(0.02)

    sizes = [len(batch) for batch in BatchBench(slow, most_cases=60).run().batches]
    assert sizes[:3] == [2, 4, 8]


def test_runner_is_never_used_by_two_threads_at_once() -> None:
    """An executor answers one call at a time: two would read each other's answers."""

    def slow(case: DenseDecodeCase) -> Failure | None:
        time.sleep(0.0002)
        return WRONG if case.gqa_ratio == 3 else None

    known = Bug(kernel=KERNEL.target, oracle="accuracy", kind="out:value", features=named("seq_len>1"))
    bench = BatchBench(slow, mail=[known], enough=after(Minimised)).run()  # singles look behind the known bug
    assert bench.overlaps == 0
    assert len(bench.batches) > 4
    assert len(bench.of(Minimised)) == 1


def test_a_known_bug_passes_silently_and_others_are_still_found() -> None:
    """One bug per campaign would be useless; and a failing case in a batch must be told from others all the same."""
    bench = BatchBench(lambda case: grouped(case) or long(case), enough=after(Minimised, 2)).run()
    features = [message.features for message in bench.of(Minimised)]
    assert GROUPED in features
    assert named("seq_len>1") in features
    assert len(bench.of(Found)) == 2


def test_every_failure_of_a_batch_is_weighed() -> None:
    """Two bugs may show in one batch; the second must not be lost to the first."""
    seen: list[Failure] = []
    lse = Failure(oracle="accuracy", kind="lse:value", message="lse is wrong")
    nan = Failure(oracle="dead_memory", kind="out:nan", message="reads dead memory")
    rare = (WRONG, lse, nan)

    def once_each(case: DenseDecodeCase) -> Failure | None:
        """Three failures in a row, which never come back."""
        if len(bench.batches) > 4 and len(seen) < 3:
            seen.append(rare[len(seen)])
            return seen[-1]
        return None

    bench = BatchBench(once_each, enough=after(Found, 3))
    bench.run()
    assert [message.failure for message in bench.of(Found)] == [WRONG, lse, nan]


def test_a_crash_in_a_batch_is_found_and_the_other_cases_are_still_judged() -> None:
    """The batch goes down as a whole, and with it what was known of its cases: nothing."""
    bench = BatchBench(lambda case: CRASH if case.gqa_ratio == 3 else None, enough=after(Minimised)).run()
    assert bench.lost > 0
    assert bench.of(Minimised)[0].features == GROUPED
    bench = BatchBench(lambda case: CRASH if case.gqa_ratio == 3 else None, most_cases=300).run()
    *early, _, _ = bench.batches_encoded()  # what is left of the last ones waits for a turn that never comes
    others = {msgspec.json.encode(case) for batch in bench.batches for case in batch if case.gqa_ratio != 3}
    assert set().union(*early) & others <= set(bench.verdicts)


def test_a_batch_that_dies_of_no_case_alone_is_told() -> None:
    """A kernel that ends its process after so many calls would lose every batch without a word."""

    @dataclass
    class Dying(BatchBench):
        def timed(self, deadline: float) -> CaseJudge:
            runner = scripted(self.judge, together=self.together, lost=CRASH)
            return judging(runner, deadline=deadline)

        def together(self, *asked: Any, **how: Any) -> None:
            return None

    bench = Dying(lambda case: None, enough=after(Unconfirmed)).run()
    (found, *_), (unconfirmed, *_) = bench.of(Found), bench.of(Unconfirmed)
    assert (found.failure, found.finding) == (CRASH, unconfirmed.finding)
    assert unconfirmed.lost_together
    assert found.preceding


def test_a_hang_in_a_batch_is_found() -> None:
    """As for a crash: which case hung shows when each is judged alone."""
    bench = BatchBench(lambda case: HANG if case.gqa_ratio == 3 else None, enough=after(Minimised)).run()
    assert bench.lost > 0
    assert bench.of(Minimised)[0].features == GROUPED


def test_after_a_finding_batches_begin_small_again() -> None:
    """Where failures are frequent, most of a large batch is judged twice."""
    bench = BatchBench(grouped)
    sizes: list[int] = []

    def note(sent: list[msgspec.Struct]) -> bool:
        if isinstance(sent[-1], Minimised):
            sizes.append(len(bench.batches))
        return bool(sizes) and len(bench.batches) > sizes[0] + 3

    bench.enough = note
    bench.run()
    (at,) = sizes
    first, *later = (len(batch) for batch in bench.batches[at : at + 3])
    assert first == 2
    assert all(size <= 2 * before for before, size in pairwise((first, *later)))


def test_an_error_of_the_framework_in_a_batch_costs_the_case_that_it_is_for() -> None:
    """The others of its batch are judged; batch and case are complained about once, and the case counts neither way."""
    bench = BatchBench(lambda case: None, enough=after(Trouble, 2))
    cursed: list[Case] = []
    together, judge = bench.together, bench.judge

    def fails_together(declaration: Declaration, cases: Sequence[DenseDecodeCase], **how: Any) -> list[Verdict] | None:
        if len(cases) == 8 and not cursed:
            cursed.append(cases[3])
            raise ServiceError("an oracle divided by zero")
        return together(declaration, cases, **how)

    def fails_alone(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        if case in cursed:
            raise ServiceError("an oracle divided by zero")
        return judge(declaration, case, **how)

    bench.together = fails_together  # type: ignore[method-assign]  # an instance that stumbles once
    bench.judge = fails_alone  # type: ignore[method-assign]  # as above
    bench.run()
    of_batch, of_case = bench.of(Trouble)
    assert "are judged one by one" in of_batch.message
    assert "cannot be judged" in of_case.message
    assert set(bench.verdicts.values()) == {1}
    assert msgspec.json.encode(cursed[0]) not in bench.verdicts
    assert bench.count() == len(bench.verdicts)


def test_the_last_batch_counts_and_its_failures_are_reported() -> None:
    """What was judged before the deadline was judged, although nobody has looked at it yet."""
    budget_s = 1.0
    deadline = time.monotonic() + budget_s

    def at_the_end(case: DenseDecodeCase) -> Failure | None:
        if len(bench.batches) < 2:
            return None
        time.sleep(max(0.0, deadline + 0.2 - time.monotonic()))  # this batch ends after the deadline
        return WRONG

    bench = BatchBench(at_the_end, budget_s=budget_s)
    bench.run()
    assert len(bench.of(Found)) >= 1
    assert bench.count() >= len(set().union(*bench.batches_encoded()))


def test_a_batch_that_hangs_does_not_keep_a_stopped_worker() -> None:
    """The coordinator gives workers three seconds to end; one that is killed has not told its last counts."""
    hanging = threading.Event()

    def hangs(case: DenseDecodeCase) -> Failure | None:
        if len(bench.batches) == 3:
            bench.mail.append(Stop())
            hanging.wait(600.0)
        return None

    bench = BatchBench(hangs)
    thread = threading.Thread(target=bench.run)
    thread.start()
    thread.join(120.0)
    was_kept = thread.is_alive()
    hanging.set()
    assert not was_kept
    assert bench.count() == len(bench.verdicts)


def test_with_formats_all_cases_keep_to_them_and_new_ones_are_published() -> None:
    """On a GPU a format of its own for each case is what takes the time; one that is kept to oneself helps nobody."""
    bench = FormatsBench(lambda case: None, most_cases=400).run()
    published = [message.format for message in bench.of(FormatCompiled)]
    _, *others = bench.setup_formats  # the first is that of the simplest case, which was run before the search
    assert others[: len(published)] == published
    assert 0 < len(others) <= len(published) + 1  # the end of the time may cut the last one off
    assert {format_key(format_of(case)) for case in bench.judged} <= set(map(format_key, bench.setup_formats))
    assert bench.count() == len(bench.verdicts) > len(published)


def test_a_users_kernel_is_searched_at_once_in_the_format_that_it_was_looked_at_in() -> None:
    """Its first case would wait for a compiler that takes a second, though another format lies in Triton's cache."""
    others = [Format(dtype="float16", head_size=32, num_q_heads=5, num_kv_heads=1)]
    bench = FormatsBench(lambda case: None, most_cases=1, setup_formats=others).run()
    assert {(case.head_size, case.num_q_heads) for case in bench.judged} == {(16, 1)}


@dataclass
class CompilingBench(FormatsBench):
    """The first case of each format takes a while."""

    def judge(self, declaration: Declaration, case: Case, **settings: Any) -> Verdict:
        self.compile([case])
        return super().judge(declaration, case, **settings)

    def together(self, declaration: Declaration, cases: Sequence[DenseDecodeCase], **settings: Any) -> Any:
        self.compile(cases)
        return super().together(declaration, cases, **settings)

    def compile(self, cases: Sequence[Case]) -> None:
        known = {format_key(format_of(case)) for case in self.judged}
        time.sleep(0.1 * len({format_key(format_of(case)) for case in cases} - known))


def test_the_first_formats_are_compiled_before_whole_rounds_go_by() -> None:
    """A bug that any case of the second format shows was found after two rounds of hundreds of cases."""
    bench = CompilingBench(lambda case: None, most_cases=400).run()
    keys = [format_key(format_of(case)) for case in bench.judged]
    fourth = sorted(keys.index(key) for key in set(keys))[3]
    assert 32 < fourth < 250, fourth


def test_formats_that_others_have_compiled_are_drawn_from() -> None:
    """What one worker has waited for, the others have for nothing."""
    theirs = Format(dtype="float16", head_size=32, num_q_heads=7, num_kv_heads=7)
    mail: list[ToWorker] = [FormatCompiled(kernel=KERNEL.target, format=theirs)]
    bench = FormatsBench(lambda case: None, most_cases=400, mail=mail).run()
    assert theirs in [format_of(case) for case in bench.judged]
    assert theirs not in [message.format for message in bench.of(FormatCompiled)]


def test_a_format_that_kills_is_not_published() -> None:
    """Every worker would lose an executor to it."""

    def deadly(case: DenseDecodeCase) -> Failure | None:
        return CRASH if case.num_q_heads == bench.setup_formats[1].num_q_heads else None

    bench = FormatsBench(deadly, enough=after(FormatCompiled, 3))
    bench.run()
    published = [message.format for message in bench.of(FormatCompiled)]
    assert bench.setup_formats[1] not in published
    assert bench.setup_formats[2] in published


def test_what_is_known_is_passed_over_in_batches() -> None:
    """A known bug that ended every round would leave nothing but rounds of one case."""
    known = Bug(kernel=KERNEL.target, oracle="accuracy", kind="out:value", features=named("gqa_ratio>1"))
    bench = BatchBench(grouped, most_cases=400, mail=[known]).run()
    assert bench.of(Found) == []
    assert sum(progress.known for progress in bench.of(WorkerProgress)) > 0
    assert 16 < max(len(batch) for batch in bench.batches) <= 64


FAULT = Failure(oracle="guard_page", kind="read past k", message="the kernel read past k")


@dataclass
class FaultyBench(BatchBench):
    """Each case draws the oracle guard_page, unless it is left out; ``spared`` are those that it was left out for."""

    spared: list[Case] = field(default_factory=list)
    deaths: int = 0

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        verdict = super().judge(declaration, case, **how)
        if isinstance(how["relations"], Drawn):
            assert how["relations"].without == ("guard_page",)
            self.spared.append(case)
            return Verdict(error_ratio=0.5)
        self.deaths += verdict.failure is not None
        return verdict


def reaches_in_groups(case: DenseDecodeCase) -> Failure | None:
    return FAULT if case.gqa_ratio == 3 else None


def test_cases_that_reach_outside_are_searched_without_guarded_memory() -> None:
    """Each of them would cost a process, or none of them would be judged by any other oracle."""
    bench = FaultyBench(reaches_in_groups, most_cases=800).run()
    (found,), (minimised,) = bench.of(Found), bench.of(Minimised)
    assert found.failure == FAULT
    assert minimised.complete
    assert len(bench.spared) > 20
    assert bench.deaths < 40  # confirming and shrinking take some
    assert sum(progress.skipped for progress in bench.of(WorkerProgress)) == 0
    assert bench.lost < 5
    assert len(bench.spared) < bench.count() / 2  # others are judged as ever


@dataclass
class HangingBench(Bench):
    """Here ``bug`` says which cases take ``takes_s``."""

    takes_s: float = 1e9
    limits: list[float] = field(default_factory=list)

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        slow = super().judge(declaration, case, **how).failure is not None
        self.limits.append(how["timeout_s"])
        return Verdict(failure=HANG if slow and self.takes_s > how["timeout_s"] else None)


def test_a_hang_is_shrunk_with_short_waits_and_confirmed_with_the_longest() -> None:
    """With ten seconds for each of a dozen hanging cases, a minute is over before anything has shrunk."""
    bench = HangingBench(grouped, enough=after(Minimised)).run()
    assert bench.of(Minimised)[0].features == named("gqa_ratio>1", "gqa_ratio not pow2", "several query heads")
    assert bench.of(Confirmed)[0].runs == 1
    assert bench.limits[-1] == 10.0
    assert 0.5 in bench.limits


def test_a_slow_case_is_not_a_hang() -> None:
    """What ends within the longest time has not hung, however slow it is compared with others."""
    bench = HangingBench(grouped, takes_s=5.0, enough=after(Unconfirmed)).run()
    assert bench.of(Confirmed) == []
    assert len(bench.of(Unconfirmed)) == 1


def test_a_case_shrunk_to_one_that_is_only_slow_is_given_up_for_the_first() -> None:
    """The short limits of shrinking can mistake a slow case for a hang; what is saved must hang."""

    class SlowWhenShort(HangingBench):
        def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
            assert isinstance(case, DenseDecodeCase)
            self.takes_s = 1e9 if max(case.seq_lens) > 8 else 5.0
            return super().judge(declaration, case, **how)

    bench = SlowWhenShort(lambda case: WRONG if max(case.seq_lens) > 4 else None, enough=after(Minimised)).run()
    (confirmed,) = bench.of(Confirmed)
    (found,) = (message for message in bench.of(Found) if message.finding == confirmed.finding)
    smaller = [bytes(message.case) for message in bench.of(Smaller)]
    assert smaller[-1] == bytes(found.case)
    assert smaller[-2] != bytes(found.case)
