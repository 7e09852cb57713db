"""Which relations there are, and which of them judge a case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import attnfuzz
from attnfuzz.declaration import Declaration
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.oracles.registry import DEFAULT_ORACLES, KNOWN, ORACLES, oracle_of
from attnfuzz.oracles.relations import catalogue
from attnfuzz.oracles.relations.block_table_slack import BLOCK_TABLE_SLACK
from attnfuzz.oracles.relations.call_sequence import CALL_SEQUENCE
from attnfuzz.oracles.relations.catalogue import applicable, chosen, drawn
from attnfuzz.oracles.relations.page_relocation import PAGE_RELOCATION
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.problems.cases import Case, PagedDecodeCase
from attnfuzz.verdict import Drawn, Failure

INVARIANT = attnfuzz.Supports(batch_invariant=True)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Three relations that only count how often they judge; the last one is not asked for."""
    counts: Counter[str] = Counter()

    def relation(name: Any, weight: int) -> Relation:
        return Relation(oracle_of(name), lambda *_: True, lambda trial: counts.update([name]), weight)

    made = (relation("merge_laws", 1), relation("compose", 3), relation("layout", 1))
    monkeypatch.setattr(catalogue, "RELATIONS", made)
    return counts


ALL = (*(one.name for one in KNOWN.values() if not one.is_relation), "merge_laws", "compose")


def many(case: PagedDecodeCase, count: int) -> list[PagedDecodeCase]:
    return [msgspec.structs.replace(case, seq_lens=(i + 1,)) for i in range(count)]


def test_the_names_that_can_be_asked_for_are_those_of_the_catalogue() -> None:
    """A relation could not be asked for, or one that does not exist would judge nothing without a word."""
    known = [one for one in KNOWN.values() if one.is_relation]
    assert [relation.oracle for relation in catalogue.RELATIONS] == known
    assert {one.name for one in known} < set(ORACLES)


def test_the_same_case_draws_the_same_relation(plant: Any, paged: PagedDecodeCase) -> None:
    """A failure would not be seen again by whoever runs its case."""
    declaration = plant("paged_decode", supports=INVARIANT).declaration
    cases = many(paged, 400)
    first, second = ([drawn(declaration, case, DEFAULT_ORACLES) for case in cases] for _ in range(2))
    assert first == second
    assert {one.name for one in first if one} == {
        one.name for one in applicable(declaration, paged, DEFAULT_ORACLES)
    } - {
        "guard_page",  # has a word on each case on a CPU
    }


def test_weights_say_how_often(counted: Counter[str], plant: Any, paged: PagedDecodeCase) -> None:
    """One relation would be drawn for nearly every case, and the others hardly ever."""
    declaration = plant("paged_decode").declaration
    names = Counter(one.name for case in many(paged, 400) if (one := drawn(declaration, case, ALL)))
    assert set(names) == {"merge_laws", "compose"}
    assert 2 < names["compose"] / names["merge_laws"] < 4.5


def test_cases_that_tell_more_draw_a_relation_more_often(
    monkeypatch: pytest.MonkeyPatch, plant: Any, paged: PagedDecodeCase
) -> None:
    """What a relation can see in few cases only would be drawn for these as seldom as where it sees nothing."""

    def relation(name: Any, weight: Any) -> Relation:
        return Relation(oracle_of(name), lambda *_: True, lambda trial: None, weight=weight)

    made = (relation("merge_laws", 1), relation("compose", lambda _, case: 2 if case.seq_lens[0] > 400 else 1))
    monkeypatch.setattr(catalogue, "RELATIONS", made)
    declaration = plant("paged_decode").declaration
    found = many(paged, 800)
    usual, telling = (
        Counter(one.name for case in part if (one := drawn(declaration, case, ALL)))
        for part in (found[:400], found[400:])
    )
    assert 0.7 < usual["compose"] / usual["merge_laws"] < 1.4 < telling["compose"] / telling["merge_laws"] < 2.8


def weights(relation: Relation, declaration: Declaration, *cases: Case) -> list[int]:
    assert callable(relation.weight)
    return [relation.weight(declaration, case) for case in cases]


def test_relocation_is_drawn_more_often_with_three_sequences(plant: Any) -> None:
    """The index of a sequence overflows in no smaller batch, and in larger ones batch_invariance is drawn as well."""
    batches = [PagedDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=8, seq_lens=(1,) * n, scale=1.0, block_size=4)
               for n in (2, 3)]  # fmt: skip
    assert weights(PAGE_RELOCATION, plant("paged_decode").declaration, *batches) == [3, 6]


def test_wider_tables_are_drawn_more_often_where_splits_may_follow_them(plant: Any, paged: PagedDecodeCase) -> None:
    """A number of splits that follows the width of the table took hundreds of cases to show."""
    width = paged.max_blocks_per_seq
    split = [msgspec.structs.replace(paged, options={"num_splits": count}) for count in (width, width + 1)]
    invariant = plant("paged_decode", supports=INVARIANT).declaration
    assert weights(BLOCK_TABLE_SLACK, invariant, *split) == [1, 4]
    assert weights(BLOCK_TABLE_SLACK, plant("paged_decode").declaration, *split) == [1, 1]


def test_calls_before_are_drawn_more_often_where_they_may_plan_splits(plant: Any, paged: PagedDecodeCase) -> None:
    """A plan of an earlier call that is used again showed in one of 300 cases."""
    splits = [msgspec.structs.replace(paged, options={"num_splits": count}) for count in (1, 2)]
    long = [msgspec.structs.replace(one, **one.with_seq_lens((33,))) for one in splits]
    short = [msgspec.structs.replace(one, **one.with_seq_lens((32,))) for one in splits]
    assert weights(CALL_SEQUENCE, plant("paged_decode").declaration, *long, *short) == [1, 4, 1, 1]


def test_what_compares_by_bounds_judges_if_named(counted: Counter[str], plant: Any, paged: PagedDecodeCase) -> None:
    """Each bug that accuracy sees would be found once more under another name; or a saved finding never seen again."""
    declaration = plant("paged_decode").declaration
    assert "layout" not in {one.name for one in applicable(declaration, paged, ALL)}
    assert "layout" in {one.name for one in applicable(declaration, paged, (*ALL, "layout"))}
    assert [one.name for one in chosen(declaration, paged, ALL, ("layout",), device="cpu")] == ["layout"]


def test_on_a_gpu_few_cases_draw(counted: Counter[str], plant: Any, paged: PagedDecodeCase) -> None:
    """Runs of relations would take more of a GPU than the cases, and some of them wait for it by themselves."""
    declaration = plant("paged_decode").declaration
    drawing = sum(drawn(declaration, case, ALL, device="cuda") is not None for case in many(paged, 400))
    assert 20 < drawing < 90


def test_what_is_costly_on_a_device_is_drawn_rarely_there(
    monkeypatch: pytest.MonkeyPatch, plant: Any, paged: PagedDecodeCase
) -> None:
    """Most of a GPU's time would go to runs that take as long as a hundred cases; or they would never be made."""

    def relation(name: Any, costly_on: tuple[str, ...]) -> Relation:
        return Relation(replace(oracle_of(name), costly_on=costly_on), lambda *_: True, lambda trial: None)

    monkeypatch.setattr(catalogue, "RELATIONS", (relation("merge_laws", ()), relation("compose", ("cuda",))))
    declaration, cases = plant("paged_decode").declaration, many(paged, 6000)

    def names(device: str, oracles: Any) -> Counter[str]:
        found = (drawn(declaration, case, oracles, device=device) for case in cases)
        return Counter(one.name for one in found if one)

    on_gpu, on_cpu, alone = names("cuda", ALL), names("cpu", ALL), names("cuda", ("compose",))
    assert 2 < on_gpu["compose"] < on_gpu["merge_laws"] / 16
    assert 0.8 < on_cpu["compose"] / on_cpu["merge_laws"] < 1.25
    assert alone["compose"] == on_gpu.total()  # whoever asks for it alone gets it


def test_those_that_are_costly_have_turns(plant: Any, paged: PagedDecodeCase) -> None:
    """One of them would have all the time that a campaign gives them, or a case would draw what is cheap instead."""
    declaration = plant("paged_decode").declaration

    def names(*turns: int, **how: Any) -> list[str]:
        asked = (Drawn(turn=turn, **how) for turn in turns)
        found = (chosen(declaration, paged, DEFAULT_ORACLES, one, device="cuda") for one in asked)
        return [one.name for (one,) in found]

    costly = {one.name for one in applicable(declaration, paged, DEFAULT_ORACLES, device="cuda")} & {
        name for name in DEFAULT_ORACLES if "cuda" in oracle_of(name).costly_on
    }
    assert {"page_relocation", "guard_page"} <= costly
    assert sorted(names(*range(len(costly)))) == sorted(costly)
    assert names(0) == names(len(costly))
    assert "guard_page" not in names(*range(len(costly)), without=("guard_page",))
    assert chosen(declaration, paged, DEFAULT_ORACLES, Drawn(turn=0), device="cpu") == []


@pytest.mark.parametrize(("promised", "first"), [(True, "graph_replay"), (None, "delays")])
def test_what_a_kernel_promises_has_the_first_turn(
    plant: Any, paged: PagedDecodeCase, promised: bool | None, first: str
) -> None:
    """A kernel that is searched for seconds would not be asked for what it says of itself."""
    declaration = plant("paged_decode", supports=attnfuzz.Supports(graph_replay=promised)).declaration
    (one,) = chosen(declaration, paged, DEFAULT_ORACLES, Drawn(turn=0), device="cuda")
    assert one.name == first


def test_what_cannot_judge_on_a_device_is_not_drawn_there(plant: Any, paged: PagedDecodeCase) -> None:
    """Half of the cases that draw would draw a relation that says nothing."""
    declaration = plant("paged_decode").declaration
    cases = many(paged, 6000)
    on_gpu, on_cpu = (
        {one.name for case in cases if (one := drawn(declaration, case, DEFAULT_ORACLES, device=device))}
        for device in ("cuda", "cpu")
    )
    assert on_gpu >= {"guard_page", "page_relocation"}
    assert on_cpu
    assert "graph_replay" not in on_cpu


@pytest.mark.parametrize(
    ("relations", "judged"), [(None, 1), ("all", 2), ((), 0), (("layout",), 1), (("merge_laws", "compose"), 2)]
)
def test_what_is_asked_for_judges(
    relations: Any, judged: int, counted: Counter[str], plant: Any, paged: PagedDecodeCase
) -> None:
    """Shrinking would follow another relation than the one that objected, or a replay leave some out."""
    kernel = plant("paged_decode")
    case = next(case for case in many(paged, 60) if drawn(kernel.declaration, case, ALL))
    judge(kernel, case, device="cpu", oracles=ALL, relations=relations)
    assert counted.total() == judged
    judge_batch(kernel, [case] * 2, device="cpu", oracles=ALL, relations=relations)
    assert counted.total() == 3 * judged


def test_a_relation_has_no_say_on_a_case_that_failed(counted: Counter[str], plant: Any, paged: PagedDecodeCase) -> None:
    """What is wrong already would be run again and again, and be told in the words of a relation."""
    kernel = plant("paged_decode", average=lambda weights, v: weights @ v * 2)
    assert judge(kernel, paged, device="cpu", oracles=ALL, relations="all").failure is not None
    assert judge_batch(kernel, [paged], device="cpu", oracles=ALL, relations="all")[0].failure is not None
    assert not counted


def test_only_relations_asked_for_judge(counted: Counter[str], plant: Any, paged: PagedDecodeCase) -> None:
    """A user who asks for one oracle would be shown the findings of another."""
    judge(plant("paged_decode"), paged, device="cpu", oracles=("accuracy", "compose"), relations="all")
    assert counted == {"compose": 1}


def test_one_objection_is_enough(monkeypatch: pytest.MonkeyPatch, plant: Any, paged: PagedDecodeCase) -> None:
    """A case that two relations object to would have two verdicts."""

    def objecting(failure: Failure) -> Relation:
        return Relation(oracle_of(failure.oracle), lambda *_: True, lambda trial: failure)

    failures = [Failure(oracle=name, kind="out", message="no") for name in ("merge_laws", "compose")]
    made = tuple(map(objecting, failures))
    monkeypatch.setattr(catalogue, "RELATIONS", made)
    assert judge(plant("paged_decode"), paged, device="cpu", oracles=ALL, relations="all").failure == failures[0]
