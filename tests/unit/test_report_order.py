"""attnfuzz.report.order: what to repair first is told first."""

from __future__ import annotations

from typing import Any

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.report.order import heading_of, in_order
from tests.unit.test_campaign_undeclared import finding, paged

BUG = finding(paged(num_q_heads=2), "gqa_ratio>1")
UNDECLARED = finding(paged(strides={"q": "every_other"}), "strides:q=every_other")
FLAKY = finding(paged(), failed=1)


def with_failure(**fields: Any) -> Finding:
    one = finding(paged())
    one.failure = msgspec.structs.replace(one.failure, **fields)
    return one


CRASH = with_failure(oracle="crash", kind="SIGSEGV")
DEAD = with_failure(oracle="dead_memory", kind="out")
NEAR = with_failure(oracle="accuracy", kind="out:value", error_ratio=1.3)


def test_the_worst_comes_first() -> None:
    """A wrong head map would be told after ten ways in which a kernel for contiguous tensors fails on others."""
    assert in_order([FLAKY, NEAR, UNDECLARED, DEAD, BUG, CRASH]) == [CRASH, BUG, DEAD, UNDECLARED, NEAR, FLAKY]


def test_findings_of_one_kernel_stand_together() -> None:
    """Who maintains one of them would look for its bugs among those of all others."""
    other = finding(paged())
    other.declaration = msgspec.structs.replace(other.declaration, target="other")
    assert in_order([FLAKY, other, CRASH]) == [CRASH, FLAKY, other]


def test_findings_of_one_kind_stay_in_the_order_in_which_they_were_seen() -> None:
    """Their numbers would not follow the time line of the report."""
    other = finding(paged(num_q_heads=3), "gqa_ratio>1")
    assert in_order([other, UNDECLARED, BUG]) == [other, BUG, UNDECLARED]


def test_each_kind_says_what_it_is() -> None:
    """A reader would take what a declaration ends for one more bug, or a flaky failure for a certain one."""
    headings = [heading_of(one) for one in (BUG, UNDECLARED, FLAKY)]
    assert headings[0] == ""
    assert headings[1].startswith("Possibly out of contract: ")
    assert headings[2].startswith("Flaky: ")
