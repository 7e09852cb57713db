"""attnfuzz.campaign.coordinator: failures of lost workers are taken up once, and not for ever."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from attnfuzz.campaign.coordinator import UnclaimedFailures
from attnfuzz.campaign.finding_book import FindingBook
from attnfuzz.campaign.messages import Confirmed, Found, Unfinished
from attnfuzz.campaign.result import Reporter
from attnfuzz.campaign.saved.saving import SaveFolder
from attnfuzz.problems.cases import encode_case
from attnfuzz.verdict import Failure
from tests.campaign.pretended_process import a_case
from tests.common.search_bench import KERNEL

FAILURE = Failure(oracle="accuracy", kind="out:value", message="wrong")
UNFINISHED = Unfinished(kernel="k", case=msgspec.Raw(b"{}"), failure=FAILURE)


def test_a_failure_waits_until_somebody_takes_it_up() -> None:
    """Sent to a worker that is killed before it reads its mail, it must not be forgotten."""
    unclaimed = UnclaimedFailures()
    unclaimed.add(UNFINISHED)
    (unfinished,) = unclaimed.take()
    assert unclaimed.take() == []
    assert unclaimed.left() == [unfinished]
    unclaimed.taken_up(Found(finding="0-1", kernel="k", case=msgspec.Raw(b"{}"), failure=FAILURE))
    assert unclaimed.left() == []


def test_what_takes_every_worker_along_is_left_alone_in_the_end() -> None:
    """A case that kills whoever looks into it would kill all workers, one after the other."""
    unclaimed = UnclaimedFailures()
    sent = 0
    for _ in range(5):
        unclaimed.add(UNFINISHED)
        sent += len(unclaimed.take())
    assert sent == 2
    assert len(unclaimed.left()) == 1


def test_what_ran_before_is_handed_on(tmp_path: Path) -> None:
    """A failure that needs other cases before it would pass in the next worker, and be forgotten."""
    unclaimed = UnclaimedFailures()
    book = FindingBook(
        {KERNEL.target: KERNEL},
        started=time.monotonic(),
        folder=SaveFolder(tmp_path, device="cpu", warn=lambda text: None),
        reporter=Reporter(),
    )
    raw = [msgspec.Raw(encode_case(a_case(length))) for length in (1, 2, 3)]
    found = Found(finding="0-1", kernel=KERNEL.target, case=raw[0], failure=FAILURE, preceding=tuple(raw[1:]))
    unclaimed.add(book.found(found).unfinished())
    (unfinished,) = unclaimed.take()
    assert [bytes(case) for case in unfinished.preceding] == [bytes(case) for case in raw[1:]]
    assert book.pending() == [unfinished]
    book.confirmed(Confirmed(finding="0-1", failed=2, runs=2))
    assert book.pending()[0].preceding == ()
