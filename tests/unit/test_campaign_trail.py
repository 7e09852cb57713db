"""campaign.triage.pursuit: what a failing case has come down to. How it gets there is in test_campaign_pursuit.py."""

from __future__ import annotations

import msgspec

from attnfuzz.campaign.identity.signature import KnownFindings
from attnfuzz.campaign.messages import Duplicate, Minimised, Smaller
from attnfuzz.campaign.triage.failing import FailingCase
from attnfuzz.campaign.triage.investigation import Trail
from attnfuzz.campaign.triage.known_deaths import KnownDeaths
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.oracles.verdict import Failure
from tests.unit.pretended_process import KERNEL, WRONG, a_case

LARGE = FailingCase(KERNEL, a_case(9, head_size=32), WRONG)
SMALL = FailingCase(KERNEL, a_case(), WRONG)
BITS = SMALL.as_(SMALL.case, Failure(oracle="determinism", kind="out", message="bits differ"))


def test_each_step_leaves_less_that_is_needed_unless_it_is_taken_back() -> None:
    """A finding would name what its smallest case lacks, or lack what the case that is saved has."""
    sent: list[msgspec.Struct] = []
    trail = Trail("0-1", LARGE, sent.append)
    trail.step_to(SMALL)
    assert trail.now is SMALL
    assert trail.needed < LARGE.features
    trail.step_back(LARGE)
    assert trail.now is LARGE
    assert trail.needed == LARGE.features
    assert [type(message) for message in sent] == [Smaller, Smaller]


def test_all_symptoms_that_a_bug_has_shown_are_known_afterwards() -> None:
    """Whichever of them another worker meets next would be a second finding."""
    sent: list[msgspec.Struct] = []
    known = KnownFindings()
    trail = Trail("0-1", SMALL, sent.append)
    trail.step_to(BITS)
    trail.close_as_known(known, KnownDeaths())
    assert known.explains(SMALL.symptom, SMALL.features)
    assert known.explains(BITS.symptom, BITS.features)
    (closed,) = [message for message in sent if isinstance(message, Duplicate)]
    assert closed.shown_as == (("accuracy", "out:value"), ("determinism", "out"))


def test_another_bug_does_not_answer_for_the_first_symptom() -> None:
    """A bug that was met on the way would hide the one that the pursuit began with."""
    sent: list[msgspec.Struct] = []
    known = KnownFindings()
    trail = Trail("0-1", BITS, sent.append)
    trail.start_again(LARGE)
    trail.close_as_new(
        known, KnownDeaths(), explain=lambda suspect: Explanation(lines=(suspect.failure.message,)), is_complete=True
    )
    assert not known.explains(BITS.symptom, LARGE.features)
    (closed,) = [message for message in sent if isinstance(message, Minimised)]
    assert (closed.shown_as, closed.features) == ((("accuracy", "out:value"),), LARGE.features)
    assert closed.explanation == (WRONG.message,)
