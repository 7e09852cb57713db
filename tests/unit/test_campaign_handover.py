"""attnfuzz.campaign.handover: failures of lost workers are taken up once, and not for ever."""

from __future__ import annotations

import msgspec

from attnfuzz.campaign.handover import Handover
from attnfuzz.campaign.messages import Found
from attnfuzz.oracles.verdict import Failure

FAILURE = Failure(oracle="accuracy", kind="out:value", message="wrong")


def test_a_failure_waits_until_somebody_takes_it_up() -> None:
    """Sent to a worker that is killed before it reads its mail, it must not be forgotten."""
    handover = Handover()
    handover.add_case("k", b"{}", FAILURE)
    (pursue,) = handover.take()
    assert handover.take() == []
    assert handover.left() == [pursue]
    handover.taken_up(Found(finding="0-1", kernel="k", case=msgspec.Raw(b"{}"), failure=FAILURE))
    assert handover.left() == []


def test_what_takes_every_worker_along_is_left_alone_in_the_end() -> None:
    """A case that kills whoever looks into it would kill all workers, one after the other."""
    handover = Handover()
    sent = 0
    for _ in range(5):
        handover.add_case("k", b"{}", FAILURE)
        sent += len(handover.take())
    assert sent == 2
    assert len(handover.left()) == 1
