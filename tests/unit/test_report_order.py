"""attnfuzz.report.order: what to repair first is told first."""

from __future__ import annotations

from attnfuzz.report.order import heading_of, in_order
from tests.unit.test_campaign_undeclared import finding, paged

BUG = finding(paged(num_q_heads=2), "gqa_ratio>1")
UNDECLARED = finding(paged(strides={"q": "every_other"}), "strides:q=every_other")
FLAKY = finding(paged(), failed=1)


def test_what_no_declaration_ends_comes_first() -> None:
    """A wrong head map would be told after ten ways in which a kernel for contiguous tensors fails on others."""
    assert in_order([FLAKY, UNDECLARED, BUG]) == [BUG, UNDECLARED, FLAKY]


def test_findings_of_one_kind_stay_in_the_order_in_which_they_were_seen() -> None:
    """Their numbers would not follow the time line of the report."""
    other = finding(paged(num_q_heads=3), "gqa_ratio>1")
    assert in_order([other, UNDECLARED, BUG]) == [other, BUG, UNDECLARED]


def test_each_kind_says_what_it_is() -> None:
    """A reader would take what a declaration ends for one more bug, or a flaky failure for a certain one."""
    headings = [heading_of(one) for one in (BUG, UNDECLARED, FLAKY)]
    assert headings[0] == ""
    assert headings[1].startswith("undeclared: ")
    assert headings[2].startswith("flaky: ")
