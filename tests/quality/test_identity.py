"""tests.quality.identity: what rules that tell bugs apart are worth."""

from __future__ import annotations

from attnfuzz.problems.cases import MergeStatesCase
from tests.quality.identity import KERNELS, Outcome, both_empty, campaign, low_states, rules


def test_every_rule_can_be_switched_off() -> None:
    """The table of the night would end in the middle once a rule has another name."""
    for rule in rules():
        with rule.off():
            assert getattr(rule.owner, rule.attribute) is rule.instead
        assert getattr(rule.owner, rule.attribute) is not rule.instead


def test_told_and_missed_are_counted() -> None:
    """A rule that loses bugs would look like one that tells them once."""
    declaration, _ = KERNELS[MergeStatesCase]
    assert campaign(declaration, (low_states,), 300) == Outcome(bugs=1, told=1, missed=0)
    assert campaign(declaration, (low_states, both_empty), 1).missed == 0
