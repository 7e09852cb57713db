"""Reading decisions from one byte string."""

from __future__ import annotations

import itertools
from collections import Counter

from attnfuzz.problems.cases import encode_case
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.decisions import Decisions, decided
from tests.unit.drawing import drawn_from


def test_zero_bytes_and_missing_bytes_are_the_simplest_option() -> None:
    """Shrinking, which lowers bytes, would not lead to the simplest option."""
    decisions = Decisions(bytes(1))
    assert [decisions.pick("abc"), decisions.pick("abc")] == ["a", "a"]


def test_every_option_is_as_likely_as_another() -> None:
    """Some options would hardly ever be drawn."""
    counts = Counter(Decisions(bytes([byte])).pick(range(5)) for byte in range(256))
    assert set(counts) == set(range(5))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_smaller_byte_is_never_a_less_simple_option() -> None:
    """The shrinker would have to guess which bytes to try."""
    picks = [Decisions(bytes([byte])).pick(range(7)) for byte in range(256)]
    assert picks == sorted(picks)


def test_more_than_256_options_are_no_error() -> None:
    """A kernel that lists 300 head sizes could not be tested."""
    assert Decisions(b"\xff").pick(range(300)) == 298


def test_parts_do_not_shift_each_other() -> None:
    """Shrinking one part of a case would change all that follow."""
    decisions = Decisions(bytes([255, 0, 255, 0, 255]))
    first, second = decisions.part(2), decisions.part(2)
    first.pick("ab")
    assert (second.pick("ab"), second.pick("ab"), second.pick("ab")) == ("b", "a", "a")
    assert decisions.pick("ab") == "b"


def test_decided_reads_the_whole_string() -> None:
    """The last decisions of a value would always be the simplest."""
    three = decided(lambda decisions: tuple(decisions.pick([False, True]) for _ in range(3)), size=3)
    assert len({*drawn_from(three, 50)}) == 8


def test_generated_cases_are_not_variations_of_each_other() -> None:
    """Five of six cases would share most fields with the one before, and hard combinations come up that much later."""
    drawn = drawn_from(cases("paged_decode"), 200)
    assert len({encode_case(case) for case in drawn}) == len(drawn)
    repeated = sum(one.num_seqs > 1 and one.seq_lens == other.seq_lens for one, other in itertools.pairwise(drawn))
    assert repeated < len(drawn) // 20
