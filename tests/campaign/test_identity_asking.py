"""attnfuzz.identity.asking: cases near a failing one tell which bug it is, and what that needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from attnfuzz.cases.facets import changed
from attnfuzz.declaration import Declaration
from attnfuzz.identity.asking import Unanswered, bug_behind, bug_of_one_index, needs_of
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs
from attnfuzz.identity.features import most_specific, unconditional
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import Case, DenseDecodeCase, encode_case
from attnfuzz.problems.fields import Choice, Integers
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Failure
from tests.common.named_features import named, words

KERNEL = Declaration(
    name="k", problem="dense_decode", target="k", supports=Supports(strides="any", dtypes=("float16", "bfloat16"))
)
WRONG = Failure(oracle="accuracy", kind="out:value", message="wrong")
DEAD = Failure(oracle="dead_memory", kind="out", message="dead")
PLAIN = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)
LONG = msgspec.structs.replace(PLAIN, seq_lens=(9, 4), dtype="bfloat16")
Fails = Callable[[Any], bool]


class Runs:
    """A kernel that shows ``failure`` where ``fails`` says so, and what was asked of it."""

    def __init__(self, fails: Fails, failure: Failure = WRONG, most: int = 1000, kernel: Declaration = KERNEL) -> None:
        self.kernel, self.fails, self.failure, self.most = kernel, fails, failure, most
        self.asked: list[Case] = []
        self.relations: set[OracleName] = set()

    def __call__(self, case: Case, relations: tuple[OracleName, ...]) -> FailingCase | None:
        if len(self.asked) == self.most:
            raise Unanswered
        self.asked.append(case)
        self.relations |= set(relations)
        return FailingCase(self.kernel, case, self.failure) if self.fails(case) else None


def known(*features: str, failure: Failure = DEAD, case: bytes = b"") -> KnownBugs:
    return KnownBugs([Bug.shown_by("k", failure, named(*features), finding="0a1b2c", case=case)])


def is_long(case: DenseDecodeCase) -> bool:
    return max(case.seq_lens) > 1


def test_what_passes_without_what_a_bug_needs_is_that_bug() -> None:
    """A mistake with lengths would be one finding in dead memory, and another where a token lies there."""
    found = bug_behind(FailingCase(KERNEL, LONG, WRONG), known("seq_len>1"), Runs(is_long))
    assert found is not None
    assert found.finding == "0a1b2c"


def test_what_fails_without_what_a_bug_needs_is_another() -> None:
    """The type that is read wrongly would be put down to a mistake with lengths, and not be told."""
    fails = Runs(lambda case: case.dtype == "bfloat16")
    assert bug_behind(FailingCase(KERNEL, LONG, WRONG), known("seq_len>1"), fails) is None


def test_a_relative_that_shows_the_known_bug_says_nothing() -> None:
    """Of two ways in which one bug shows, each would speak against the other."""
    bugs = known("seq_len>1")
    bugs.add(Bug.shown_by("k", WRONG, named("num_seqs>1")))
    assert bug_behind(FailingCase(KERNEL, LONG, DEAD), bugs, Runs(lambda case: case.num_seqs > 1)) is not None


def test_the_relation_that_saw_the_known_bug_judges_relatives_too() -> None:
    """What it alone sees would seem to pass."""
    seen = Failure(oracle="containment", kind="nan in K", message="no")
    runs = Runs(is_long)
    bug_behind(FailingCase(KERNEL, LONG, WRONG), known("seq_len>1", failure=seen), runs)
    assert runs.relations == {"containment"}


@pytest.mark.parametrize("are_compared", [True, False])
def test_what_is_cured_by_what_a_bug_needs_is_that_bug(are_compared: bool) -> None:
    """A kernel that stores the output with the strides of q is right where both lie alike."""
    of_q, of_out = (msgspec.structs.replace(PLAIN, strides={name: "outer_gap"}) for name in ("q", "out"))

    def fails(case: DenseDecodeCase) -> bool:
        q, out = (case.strides.get(name) for name in ("q", "out"))
        return q != out if are_compared else bool(q or out)

    bugs = known("strides:q", "strides:q=outer_gap", case=encode_case(of_q))
    found = bug_behind(FailingCase(KERNEL, of_out, WRONG), bugs, Runs(fails))
    assert (found is not None) is are_compared


OUT_OF_RANGE = Failure(oracle="exception", kind="IndexError in f", message="out of range")
WITH_ROOM = msgspec.structs.replace(PLAIN, seq_lens=(5,), extra_rows=1)


@pytest.mark.parametrize("raised_first", [True, False])
@pytest.mark.parametrize(
    ("wrong_from", "is_raised", "is_one"),
    [(5, True, True), (2, True, False), (5, False, False)],
    ids=["the same index", "wrong where no index is out of range", "right without room"],
)
def test_an_index_out_of_range_is_one_bug_with_what_lies_there(
    wrong_from: int, is_raised: bool, is_one: bool, raised_first: bool
) -> None:
    """Wrong pages beside an IndexError were two bugs; a second bug that needs the same room would be swallowed."""

    def run(case: Any, relations: tuple[OracleName, ...]) -> FailingCase | None:
        length = max(case.seq_lens)
        if length >= 5 and not case.extra_rows and is_raised:
            return FailingCase(KERNEL, case, OUT_OF_RANGE)
        return FailingCase(KERNEL, case, WRONG) if length >= wrong_from and case.extra_rows else None

    narrow = msgspec.structs.replace(WITH_ROOM, extra_rows=0)
    shown = [(narrow, OUT_OF_RANGE), (WITH_ROOM, WRONG)]
    (first, seen), (case, failure) = shown if raised_first else shown[::-1]
    bugs = known("seq_len>1", failure=seen, case=encode_case(first))
    assert (bug_of_one_index(FailingCase(KERNEL, case, failure), bugs, run) is not None) is is_one


def test_what_a_neighbour_has_not_is_not_needed() -> None:
    """The smallest case of a bug has whatever shrinking came by, and the next one would seem to be another bug."""
    case = msgspec.structs.replace(PLAIN, seq_lens=(5,), dtype="bfloat16")
    needed = named("seq_len>1", "dtype", "dtype=bfloat16")
    assert needs_of(FailingCase(KERNEL, case, WRONG), needed, KnownBugs(), Runs(is_long)) == named("seq_len>1")


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (lambda case: any(length % case.block_size == 0 for length in case.seq_lens), {"full last page"}),
        (lambda case: max(case.seq_lens) > 1, {"seq_len>1"}),
    ],
    ids=["where a page is full", "where there are several tokens"],
)
def test_a_length_that_fills_its_pages_is_told_as_that(fails: Fails, told: set[str]) -> None:
    """A maintainer would look at what goes wrong from two tokens on, where it is the last page that is full."""
    kernel = Declaration(name="k", problem="paged_decode", target="k", supports=Supports(block_sizes=(16,)))
    case = msgspec.structs.replace(simplest_case("paged_decode", kernel.supports, {}), seq_lens=(16,))
    found = FailingCase(kernel, case, WRONG)
    needed = needs_of(found, unconditional(found.features), KnownBugs(), Runs(fails, kernel=kernel))
    assert words(most_specific(needed)) == told


@pytest.mark.parametrize("matters", [False, True])
def test_a_head_size_that_only_hides_what_is_wrong_is_not_needed(matters: bool) -> None:
    """With larger scores a sink has no weight, and a maintainer would look at what the head size changes."""

    def fails(case: DenseDecodeCase) -> bool:
        return case.head_size < 64 or (not matters and case.values.keys == "normal")

    found = FailingCase(KERNEL, PLAIN, WRONG)
    needed = words(needs_of(found, frozenset(), KnownBugs(), Runs(fails)))
    assert ("head_size other than 128" in needed) is matters


@pytest.mark.parametrize("most", [3, 1000])
def test_a_question_takes_so_many_runs_and_no_more(most: int) -> None:
    """On a GPU each may be compiled; and by a clock a busy machine would tell other bugs than an idle one."""
    pairs = {name: "every_other" for name in ("q", "k", "v", "out")}
    case = msgspec.structs.replace(LONG, strides=pairs, num_q_heads=6, num_kv_heads=2, extra_rows=3)
    runs = Runs(lambda case: True, most=most)
    needed = FailingCase(KERNEL, case, WRONG).features
    assert needs_of(FailingCase(KERNEL, case, WRONG), needed, KnownBugs(), runs) < needed
    assert 0 < len(runs.asked) <= min(most, 24)


VERIFY = Declaration(
    name="k",
    problem=OpenProblem(
        place="k.py:P",
        fields={
            "contexts": Integers(0, 9),
            "query_len": Choice((1, 2, 3)),
            "ragged": Choice((False, True)),
            "num_heads": Choice((1, 2)),
        },
    ),
    target="k",
    supports=Supports(),
)


def _last_key(case: Any) -> int:
    """Of the first token of the last sequence, whose new tokens are one fewer where that is ``ragged``."""
    last: int = case.contexts[-1] + max(1, case.query_len - case.ragged) - 1
    return last


def _verify(**fields: Any) -> Case:
    """The simplest ragged case but for these fields."""
    simplest = simplest_case(VERIFY.problem, VERIFY.supports, {})
    case = None if simplest is None else changed(simplest, **{"ragged": True, **fields})
    assert case is not None
    return case


@pytest.mark.parametrize(
    ("smallest", "without"),
    [({"contexts": (1,), "query_len": 2}, "contexts"), ({"query_len": 3}, "query_len>2")],
)
def test_of_numbers_that_come_to_one_length_none_is_needed_by_itself(smallest: dict[str, Any], without: str) -> None:
    """An offset of ragged sequences would be one bug of those with a context, and one of those with two new tokens."""
    case = _verify(**smallest)
    found = FailingCase(VERIFY, case, WRONG)
    runs = Runs(lambda one: one.ragged and one.query_len > 1 and _last_key(one) > 0, kernel=VERIFY)
    assert runs.fails(case)
    assert any(without in one for one in words(found.features))
    needed = needs_of(found, unconditional(found.features), KnownBugs(), runs)
    assert words(most_specific(needed)) == {"query_len>1", "ragged=True"}


def test_what_fails_with_another_number_and_is_cured_by_nothing_in_common_is_another_bug() -> None:
    """A bug of ragged sequences with a context would lose what it needs to one of two heads, and hide that."""
    case = _verify(contexts=(1,))
    found = FailingCase(VERIFY, case, WRONG)
    runs = Runs(lambda one: (one.ragged and one.contexts != (0,)) or one.num_heads > 1, kernel=VERIFY)
    assert needs_of(found, unconditional(found.features), KnownBugs(), runs) == unconditional(found.features)
    alone = FailingCase(VERIFY, _verify(contexts=(1,), ragged=False), WRONG)
    runs = Runs(lambda one: one.contexts != (0,) or one.num_heads > 1, kernel=VERIFY)
    assert needs_of(alone, unconditional(alone.features), KnownBugs(), runs) == unconditional(alone.features)
