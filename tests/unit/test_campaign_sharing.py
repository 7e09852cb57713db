"""attnfuzz.campaign.sharing: what is closed here is told, what others found is learnt and noted once."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.campaign.elsewhere import FoundElsewhere
from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.messages import Duplicate, Known, Minimised
from attnfuzz.campaign.sharing import Sharing
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure
from tests.unit.saved_findings import TARGET, a_finding

KNOWN = Known(kernel=TARGET, oracle="accuracy", kind="out:value", features=frozenset({"seq_len>1"}))
SHOWN_AS = (("accuracy", "out:value"),)


class Others:
    """An exchange that is played by the test."""

    def __init__(self) -> None:
        self.told: list[FoundElsewhere] = []
        self.to_hear: list[FoundElsewhere] = []
        self.to_note: list[str] = []

    def tell(self, found: FoundElsewhere) -> None:
        self.told.append(found)

    def heard(self) -> list[FoundElsewhere]:
        heard, self.to_hear = self.to_hear, []
        return heard

    def notes(self) -> list[str]:
        notes, self.to_note = self.to_note, []
        return notes


class Campaign:
    """What Sharing says to a campaign."""

    def __init__(self, exchange: Others | None) -> None:
        self.learnt: list[Known] = []
        self.noted: list[str] = []
        self.sharing = Sharing(exchange, device="cpu", learn=self.learnt.append, note=self.noted.append)


def own(length: int, **fields: Any) -> Finding:
    return Finding(
        name="0-1",
        declaration=Declaration(name="mine", problem="dense_decode", target=TARGET),
        case=a_finding(length).case,
        failure=Failure(oracle="accuracy", kind="out:value", message="wrong"),
        first_seen_s=1.0,
        failed=3,
        runs=3,
        **fields,
    )


def test_a_finding_is_told_with_its_case_and_a_duplicate_without() -> None:
    """Another machine would report a bug twice, or without a case to look at."""
    others = Others()
    sharing = Campaign(others).sharing
    finding = own(2, features=KNOWN.features)
    minimised = Minimised(finding="0-1", features=KNOWN.features, shown_as=SHOWN_AS, complete=True)
    sharing.tell(finding, minimised, [KNOWN])
    sharing.tell(finding, Duplicate(finding="0-1", features=KNOWN.features, shown_as=SHOWN_AS), [KNOWN])
    sharing.tell(finding, minimised, [])
    with_case, without = others.told
    assert with_case.regression is not None
    assert (with_case.regression.case, with_case.known) == (finding.case, (KNOWN,))
    assert (without.regression, without.known) == (None, (KNOWN,))


def test_what_others_found_is_learnt_and_noted_once() -> None:
    """Workers would look into it; and the user would read of it every second."""
    others = Others()
    campaign = Campaign(others)
    for host in ("node1", "node2"):
        others.to_hear = [FoundElsewhere(host=host, known=(KNOWN,), regression=a_finding(2, "seq_len>1"))]
        others.to_note = [f"from {host}"]
        campaign.sharing.listen()
        campaign.sharing.listen()
    assert campaign.learnt == [KNOWN, KNOWN]
    assert [note for note in campaign.noted if note.startswith("known elsewhere")] == [
        "known elsewhere: mine.py:mine accuracy/out:value [seq_len>1], found on node1: wrong for 2 tokens"
    ]
    assert [note for note in campaign.noted if note.startswith("from")] == ["from node1", "from node2"]


@pytest.mark.parametrize(("features", "count"), [({"seq_len>1"}, 0), ({"strides:q"}, 1)])
def test_what_was_found_here_too_counts_as_found_here(features: set[str], count: int) -> None:
    """The finding with its file would be hidden behind somebody else's."""
    others = Others()
    others.to_hear = [FoundElsewhere(host="node1", known=(KNOWN,), regression=a_finding(2, "seq_len>1"))]
    sharing = Campaign(others).sharing
    sharing.listen()
    assert len(sharing.elsewhere([own(3, features=frozenset(features))])) == count


def test_alone_nothing_happens() -> None:
    """Most campaigns have nobody to share with."""
    campaign = Campaign(None)
    campaign.sharing.listen()
    campaign.sharing.tell(own(2), Duplicate(finding="0-1", features=frozenset(), shown_as=SHOWN_AS), [KNOWN])
    assert (campaign.learnt, campaign.noted, campaign.sharing.elsewhere([])) == ([], [], ())
