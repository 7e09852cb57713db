"""campaign.triage.investigation: a wrong number that large values hide is one bug with what shows in its bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from attnfuzz.campaign.messages import Duplicate, Minimised
from attnfuzz.identity.bug import Bug as KnownBug
from attnfuzz.identity.bug import KnownBugs
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.recipes import Values
from attnfuzz.verdict import Failure
from tests.campaign.pretended_process import PretendedProcess, a_case, looked_into
from tests.common.named_features import named, words
from tests.common.search_bench import KERNEL, WRONG

BITS = Failure(oracle="value_affinity", kind="bits", message="the bits must be equal")
LARGE = msgspec.structs.replace(a_case(5), values=Values(values="large"))
Bug = Callable[[DenseDecodeCase, Sequence[Case]], Failure | None]


def adds_one_to_long_ones(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
    """Wrong from the second token on; beside large values the error is within the bound."""
    del earlier
    if max(case.seq_lens) < 2:
        return None
    return BITS if case.values.values == "large" else WRONG


def adds_an_epsilon(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
    """Never wrong by more than the bound."""
    del case, earlier
    return BITS


def both(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
    return adds_one_to_long_ones(case, earlier) or adds_an_epsilon(case, earlier)


def investigated(bug: Bug, *signatures: KnownBug) -> tuple[KnownBugs, list[msgspec.Struct]]:
    """What is known afterwards, and what the coordinator is told, of `LARGE` when its bits differ."""
    process, known = PretendedProcess(bug), KnownBugs()
    for signature in signatures:
        known.add(signature)
    is_bug, sent = looked_into(process.suspect(LARGE, failure=BITS), process.timed(), known)
    assert is_bug
    return known, sent


def wrong(*needs: str) -> KnownBug:
    return KnownBug.shown_by(KERNEL.target, WRONG, named(*needs))


def test_a_wrong_number_that_large_values_hide_is_told_as_such() -> None:
    """The finding would be of bits, for any case, and the wrong number be reported again as a second bug."""
    _, sent = investigated(adds_one_to_long_ones)
    (closed,) = [message for message in sent if isinstance(message, Minimised)]
    assert closed.bugs[-1].symptom.kind == "out:value"
    assert "seq_len>1" in words(closed.features)


def test_bits_that_only_differ_where_a_known_bug_is_at_work_are_that_bug() -> None:
    """One mistake would be two findings: its wrong numbers, and the last digits of larger ones."""
    known, sent = investigated(adds_one_to_long_ones, wrong("seq_len>1"))
    assert isinstance(sent[-1], Duplicate)
    suspect = PretendedProcess(both).suspect(LARGE, failure=BITS)
    assert known.predicting(suspect)


@pytest.mark.parametrize("known", [(), (wrong("seq_len>1"),)], ids=["alone", "beside a known bug"])
def test_a_mistake_of_rounding_stays_one(known: tuple[KnownBug, ...]) -> None:
    """A kernel that adds an epsilon would be cleared by another bug of the same kernel."""
    bug = both if known else adds_an_epsilon
    _, sent = investigated(bug, *known)
    (closed,) = [message for message in sent if isinstance(message, Minimised)]
    assert [bug.kind for bug in closed.bugs] == ["bits"]


STATISTICS = Failure(oracle="residuals", kind="out:size", message="together the errors are too large")


def shows_in_statistics(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
    found = adds_one_to_long_ones(case, earlier)
    return STATISTICS if found == BITS else found


def rounds_too_often(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
    del case, earlier
    return STATISTICS


@pytest.mark.parametrize(
    ("bug", "known", "is_new"),
    [
        (shows_in_statistics, (wrong("seq_len>1"),), False),
        (rounds_too_often, (wrong("seq_len>1"),), True),
        (rounds_too_often, (), True),
    ],
    ids=["a known bug", "beside a known bug", "alone"],
)
def test_statistics_of_a_wrong_number_are_the_bug_that_makes_it(
    bug: Bug, known: tuple[KnownBug, ...], is_new: bool
) -> None:
    """A dropped token would be told a second time, and called a rounding; or a rounding go untold."""
    process, findings = PretendedProcess(bug), KnownBugs()
    for signature in known:
        findings.add(signature)
    is_bug, sent = looked_into(process.suspect(LARGE, failure=STATISTICS), process.timed(), findings)
    assert is_bug
    assert isinstance(sent[-1], Minimised if is_new else Duplicate)
