"""attnfuzz.campaign.worker: what takes long is shrunk with short waits and confirmed with the longest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnfuzz.campaign.messages import Confirmed, Found, Minimised, Smaller, Unconfirmed
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.verdict import Verdict
from tests.unit.named_features import named
from tests.unit.search_bench import HANG, WRONG, Bench, after, grouped


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
