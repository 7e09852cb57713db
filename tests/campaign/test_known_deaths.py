"""attnfuzz.campaign.triage.known_deaths: cases that would crash as earlier ones did are skipped, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from attnfuzz.campaign.triage.known_deaths import KnownDeaths, KnownFaults
from attnfuzz.cases.features import features, traits
from attnfuzz.declaration import Declaration
from attnfuzz.identity import bug as known_bugs
from attnfuzz.identity.features import case_features
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import DenseDecodeCase, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.cases import cases
from attnfuzz.verdict import Drawn, Failure
from tests.common.named_features import named, words

KERNEL = Declaration(name="k", problem="paged_decode", target="k")


def a_bug(
    *features: str | Feature, kernel: str = "k", oracle: OracleName = "crash", kind: str = "SIGSEGV"
) -> known_bugs.Bug:
    return known_bugs.Bug(kernel=kernel, oracle=oracle, kind=kind, features=named(*map(str, features)))


CRASH = a_bug()


ENOUGH_PASSED = 100


"""Cases that passed, at least, when a condition is made."""


Bug = Callable[[PagedDecodeCase], bool]


def draw(number: int) -> list[PagedDecodeCase]:
    drawn: list[PagedDecodeCase] = []
    for round_ in range(-(-number // 100)):

        @seed(round_)
        @settings(
            max_examples=100,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(cases("paged_decode", supports=KERNEL.supports))
        def keep(case: PagedDecodeCase) -> None:
            drawn.append(case)

        keep()
    return drawn


@pytest.fixture(scope="module")
def drawn() -> list[PagedDecodeCase]:
    return draw(1500)


@dataclass
class Campaign:
    """Runs what is not forbidden, a case every 50 ms."""

    bug: Bug
    signature: known_bugs.Bug = CRASH
    now: float = 0.0
    share_spent: float = 1.0
    died: list[PagedDecodeCase] = field(default_factory=list)
    passed: list[PagedDecodeCase] = field(default_factory=list)
    skipped: list[PagedDecodeCase] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = KnownDeaths(lambda target: self.share_spent, clock=lambda: self.now)

    def run(self, drawn: list[PagedDecodeCase]) -> Self:
        self.share_spent = 0.1
        for case in drawn:
            self.now += 0.05
            if self.known.should_skip(KERNEL, case):
                self.skipped.append(case)
            elif self.bug(case):
                self.died.append(case)
                self.known.died(KERNEL, case)
                self.known.learn(self.signature)
            else:
                self.passed.append(case)
                self.known.passed(KERNEL, case)
        return self


def odd_at_80(case: PagedDecodeCase) -> bool:
    return case.head_size == 80 and any(length % 2 for length in case.seq_lens)


def needs_long_hnd(case: PagedDecodeCase) -> bool:
    return case.layout == "HND" and max(case.seq_lens) > 32


def either_of_two(case: PagedDecodeCase) -> bool:
    return case.head_size == 80 or case.gqa_ratio == 5


@pytest.mark.parametrize("bug", [odd_at_80, needs_long_hnd, either_of_two])
@pytest.mark.by_day("needs_long_hnd", "either_of_two")
def test_few_deaths_teach_what_to_skip(bug: Bug, drawn: list[PagedDecodeCase]) -> None:
    """A kernel that crashes on one case in twenty would be slowed down by as many new processes."""
    campaign = Campaign(bug).run(drawn)
    wrongly = [case for case in campaign.skipped if not bug(case)]
    assert len(wrongly) <= 3 / ENOUGH_PASSED * len(drawn)  # as the module promises
    deadly = sum(map(bug, drawn))
    assert len(campaign.died) <= 0.3 * len(campaign.skipped) + 15
    assert len(campaign.skipped) >= 0.5 * deadly


def test_what_no_trait_says_is_not_forbidden_for_long(drawn: list[PagedDecodeCase]) -> None:
    """Conditions made of chance would take half of the input space away."""
    campaign = Campaign(lambda case: sum(case.seq_lens) % 5 == 3).run(drawn[:700])
    wrongly = [case for case in campaign.skipped if not campaign.bug(case)]
    assert len(wrongly) <= 0.2 * 700


def test_a_kernel_that_always_dies_is_left_alone(drawn: list[PagedDecodeCase]) -> None:
    """Its other kernels have the processor to themselves then."""
    campaign = Campaign(lambda case: True).run(drawn[:300])
    assert len(campaign.died) < 40


def test_a_forbidden_case_is_tried_every_half_minute(drawn: list[PagedDecodeCase]) -> None:
    """Behind a crash another bug may hide, and the crash may be repaired by a reload of the kernel."""
    campaign = Campaign(odd_at_80).run(drawn)
    deadly = next(case for case in drawn if odd_at_80(case))
    campaign.now += 31.0
    assert not campaign.known.should_skip(KERNEL, deadly)
    assert campaign.known.expects_death(KERNEL, deadly)
    assert campaign.known.should_skip(KERNEL, deadly)
    campaign.now += 4.0
    assert campaign.known.should_skip(KERNEL, deadly)
    campaign.share_spent = 0.01
    assert not campaign.known.should_skip(KERNEL, deadly)


def test_a_condition_that_a_case_survives_is_given_up(drawn: list[PagedDecodeCase]) -> None:
    """A wrong condition would hide what it should_skip for good."""
    campaign = Campaign(odd_at_80).run(drawn)
    case = campaign.skipped[0]
    campaign.known.passed(KERNEL, case)
    assert not campaign.known.should_skip(KERNEL, case)


def test_what_another_worker_found_is_skipped_here(drawn: list[PagedDecodeCase]) -> None:
    """Of eight workers, each would have to crash by itself before it learns."""
    hnd = [case for case in drawn if case.layout == "HND"]
    wrong, right = KnownDeaths(lambda target: 0.1), KnownDeaths(lambda target: 0.1)
    for case in drawn:
        wrong.passed(KERNEL, case)
        if case not in hnd:
            right.passed(KERNEL, case)
    for known in (wrong, right):
        known.learn(a_bug("layout=HND"))
    assert all(right.should_skip(KERNEL, case) for case in hnd)
    assert not any(wrong.should_skip(KERNEL, case) for case in hnd)


def test_deaths_that_no_condition_foresees_are_limited_too(drawn: list[PagedDecodeCase]) -> None:
    """Where nothing can be learned, the finding's features are all there is to go by."""
    known = KnownDeaths(lambda target: 0.3)
    known.learn(a_bug("layout=HND"))
    assert known.should_skip(KERNEL, next(case for case in drawn if case.layout == "HND"))
    assert not known.should_skip(KERNEL, next(case for case in drawn if case.layout == "NHD"))


def test_only_crashes_and_hangs_of_the_kernel_matter(drawn: list[PagedDecodeCase]) -> None:
    """A wrong number costs nothing, and another kernel's crash says nothing."""
    known = KnownDeaths(lambda target: 1.0)
    known.learn(a_bug(oracle="accuracy", kind="out:value"))
    known.learn(a_bug(kernel="other"))
    assert not any(known.should_skip(KERNEL, case) for case in drawn[:20])


DENSE = Declaration(
    name="k", problem="dense_decode", supports=Supports(head_sizes=(16, 32)), target="kernels.py:reaches_at_32"
)


PLAIN = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1,), scale=1.0)


WIDE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=32, seq_lens=(1,), scale=1.0)


WITHOUT = Drawn(without=("guard_page",))


FAULT = a_bug(kernel=DENSE.target, oracle="guard_page", kind="read past k")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def at_32(clock: Clock) -> KnownFaults:
    faults = KnownFaults(clock=clock)
    faults.learn(msgspec.structs.replace(FAULT, features=case_features(DENSE, WIDE)))
    return faults


def test_only_what_a_finding_explains_goes_without() -> None:
    """Accesses outside of other cases would not be found any more, or known ones cost a process each time."""
    assert KnownFaults().relations_for(DENSE, WIDE) is None
    faults = at_32(Clock())
    assert faults.relations_for(DENSE, PLAIN) is None
    assert faults.relations_for(DENSE, WIDE) == WITHOUT
    assert faults.covers(DENSE, WIDE)
    assert not faults.covers(DENSE, PLAIN)


def test_each_relation_is_left_out_for_its_own_faults_only() -> None:
    """A page id that overflows would keep accesses outside from being found, and the other way round."""
    faults = at_32(Clock())
    mismatch = a_bug(*case_features(DENSE, WIDE), kernel=DENSE.target, oracle="page_relocation", kind="page ids")
    faults.learn(mismatch)
    assert faults.relations_for(DENSE, WIDE) == WITHOUT
    faults.learn(
        a_bug(*case_features(DENSE, WIDE), kernel=DENSE.target, oracle="page_relocation", kind="read before k")
    )
    assert faults.relations_for(DENSE, WIDE) == Drawn(without=("page_relocation", "guard_page"))


def test_now_and_then_such_a_case_is_tried() -> None:
    """A second access outside, which the same cases show, would never be seen once the first is repaired."""
    clock = Clock()
    faults = at_32(clock)
    clock.now = 11.0
    assert faults.relations_for(DENSE, WIDE) is None
    assert faults.relations_for(DENSE, WIDE) == WITHOUT


def test_crashes_are_not_learned_from_accesses_outside() -> None:
    """Cases that pass every ordinary run would be skipped."""
    deaths = KnownDeaths(clock=Clock())
    for _ in range(5):
        deaths.judged(DENSE, WIDE, Failure(oracle="guard_page", kind="read past k", message="outside"))
    deaths.learn(msgspec.structs.replace(FAULT, features=case_features(DENSE, WIDE)))
    assert not deaths.should_skip(DENSE, WIDE)
    assert deaths.faults.covers(DENSE, WIDE)
    deaths.learn(a_bug(*case_features(DENSE, PLAIN), kernel=DENSE.target))
    assert not deaths.faults.covers(DENSE, PLAIN)


CASE = PagedDecodeCase(
    num_q_heads=6, head_size=80, num_kv_heads=2, seq_lens=(17, 4), scale=0.125, block_size=16, options={"tile": 32}
)


def test_sizes_lengths_and_recipes_have_their_traits() -> None:
    """What no trait can say cannot be learned, and each such crash costs a process."""
    expected = {
        "head_size is 80",
        "head_size is a multiple of 16",
        "gqa_ratio is 3",
        "gqa_ratio is not a multiple of 2",
        "some length is not a multiple of 2",
        "longest length ends one past a step of 16",
        "every length is no longer than 32",
        "option tile is 32",
        "layout is NHD",
        "strides:k_cache is contiguous",
        "keys is equal",
    }
    assert expected <= words(traits(CASE))
    assert "every length is a multiple of 2" not in words(traits(CASE))


def test_features_are_traits() -> None:
    """What a finding is known to need would not be recognised in a condition."""
    assert features(CASE)
    assert features(CASE) <= traits(CASE)


def test_cases_that_differ_in_seeds_have_the_same_traits() -> None:
    """Seeds are different in each case: a condition on them would hold for no other."""
    other = msgspec.structs.replace(CASE, values=msgspec.structs.replace(CASE.values, seed=7))
    assert traits(other) == traits(CASE)


def test_every_problem_has_traits() -> None:
    """A kernel of a problem without traits would have all of its cases taken for one."""
    dense = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(0,), scale=0.25, extra_rows=2)
    merge = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=3, lse_pairs=(("finite", "-inf"),))
    assert {"extra_rows is 2", "some length is 0"} <= words(traits(dense))
    assert {"num_tokens is 3", "some suffix LSE -inf"} <= words(traits(merge))
