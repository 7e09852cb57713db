"""attnfuzz.campaign.draw.sampling: rounds that can be repeated, within a working set that is refreshed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, repeat
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.draw import sampling
from attnfuzz.campaign.draw.sampling import CaseSource, WorkingSets, run_round
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.formats import Format, format_of
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.strategies.cases import case_lists

KERNEL = Declaration(name="k", problem="dense_decode", target="k")


OTHER = Declaration(name="other", problem="dense_decode", target="other")


FORMATS = [Format(dtype="float16", head_size=16, num_q_heads=heads, num_kv_heads=1) for heads in (1, 2, 3)]


def strategy_for(declaration: Declaration, formats: Sequence[Format], length: int) -> SearchStrategy[list[Case]]:
    return case_lists(declaration.problem, length=length, formats=formats)


def a_round(drawing: CaseSource, declaration: Declaration = KERNEL, *, most: int = 1000) -> list[bytes]:
    found: list[bytes] = []

    def visit(case: Case) -> bool:
        found.append(encode_case(case))
        return len(found) < most

    drawing.round(declaration, visit, until=math.inf)
    return found


def test_the_seeds_decide_what_is_drawn() -> None:
    """--seed must repeat a search, and two workers must not do the same work."""
    assert a_round(CaseSource(strategy_for, seeds=(1, 0))) == a_round(CaseSource(strategy_for, seeds=(1, 0)))
    assert (
        len({*a_round(CaseSource(strategy_for, seeds=(1, 0))), *a_round(CaseSource(strategy_for, seeds=(1, 1)))}) > 350
    )


class Clock:
    """That of the module, which stands still but for `wait`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(sampling, "time", SimpleNamespace(monotonic=lambda: self.now))

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return True


def test_the_place_of_a_kernel_does_not_decide_what_is_drawn() -> None:
    """--seed would repeat a search on no other machine, and each clone of a project see other cases in its CI."""
    here, there = (Declaration(name="k", problem="dense_decode", target=f"/{place}/my.py:k") for place in "ab")
    assert a_round(CaseSource(strategy_for, seeds=(1,)), here) == a_round(CaseSource(strategy_for, seeds=(1,)), there)


def source(declaration: Declaration) -> Iterator[Format]:
    return cycle(FORMATS)


def test_scouted_formats_are_each_in_a_case() -> None:
    """A format that is published must have been compiled."""
    sets = WorkingSets(source)
    drawing = CaseSource(strategy_for, seeds=(1,), formats=sets)
    scouted = []
    for _ in range(2):
        cases = drawing.scout(KERNEL)
        scouted += cases
        for case in cases:
            sets.judged(KERNEL, case, 0.1)
        sets.judged(KERNEL, cases[0], 10.0)
    assert [format_of(case) for case in scouted[::2]] == FORMATS
    assert len(scouted) == 6
    assert drawing.scout(KERNEL) == []


COMPILED_S, WARM_S = 0.4, 0.001


def case_in(number: int) -> Case:
    case = simplest_case("dense_decode", KERNEL.supports, {})
    return msgspec.structs.replace(case, num_q_heads=number, num_kv_heads=1)


def format_number(number: int) -> Format:
    return format_of(case_in(number))


def endless(declaration: Declaration) -> Iterator[Format]:
    return (format_number(number) for number in range(1, 1000))


def scouted(sets: WorkingSets, declaration: Declaration = KERNEL) -> list[Format]:
    """Have what is to be scouted judged; returns what was published."""
    cases = [case_in(one.num_q_heads) for one in sets.to_scout(declaration)]
    published = [sets.judged(declaration, case, COMPILED_S) for case in cases]
    return [one for one in published if isinstance(one, Format)]


def test_a_kernel_without_formats_is_scouted_first() -> None:
    """There is nothing to draw from before; and while four are compiled, no kernel has had a case."""
    sets = WorkingSets(endless)
    assert not sets.any_for(KERNEL)
    assert scouted(sets) == [format_number(1)]
    assert sets.to_draw_from(KERNEL) == [format_number(1)]
    assert sets.to_scout(KERNEL) == []
    assert len(scouted(sets, OTHER)) == 1


def test_a_round_makes_way_for_the_next_format_while_there_are_few() -> None:
    """A bug that any case of the second format shows waited for three seconds of cases of the first."""
    sets = WorkingSets(endless)
    for number in range(1, 8):
        assert scouted(sets) == [format_number(number)]
        rounds_s = 0.0
        while not sets.is_scouting_due(KERNEL):
            sets.judged(KERNEL, case_in(1), WARM_S)
            rounds_s += WARM_S
        assert 0.0 < rounds_s < (0.2 if number < 3 else 3.0) * COMPILED_S
    scouted(sets)
    sets.judged(KERNEL, case_in(1), 100.0)
    assert not sets.is_scouting_due(KERNEL)


def test_scouting_takes_its_share_of_the_time_and_no_more() -> None:
    """Without it, a bug that needs another head size is never met; too much of it, and hardly any case is run."""
    sets = WorkingSets(endless)
    total = scouting = 0.0
    for turn in range(1500):
        new = len(scouted(sets))
        scouting += new * COMPILED_S
        for _ in range(20):
            assert sets.judged(KERNEL, case_in(1), WARM_S) is None
        total += new * COMPILED_S + 20 * WARM_S
        if turn == 1000:
            assert 8 <= round(scouting / COMPILED_S) < 12
    assert 0.08 < scouting / total < 0.12


@pytest.mark.parametrize("moment_s", [0.5, 1.0])
def test_many_workers_keep_to_the_share_of_a_kernel_together(moment_s: float) -> None:
    """Each of them would compile a format as soon as it has had a moment with a kernel: half of the first minute."""
    workers = [WorkingSets(endless, turn=number / 16) for number in range(16)]
    for sets in workers:
        for number in range(1, 9):
            sets.offer(KERNEL, format_number(number), 10 * COMPILED_S)
        sets.judged(KERNEL, case_in(1), moment_s)
    compiling_s = sum(10 * COMPILED_S for sets in workers if sets.to_scout(KERNEL))
    assert 0 < compiling_s <= 0.1 * 16 * moment_s + 10 * COMPILED_S
    for sets in workers:
        sets.judged(KERNEL, case_in(1), 100 * COMPILED_S)
    assert all(sets.to_scout(KERNEL) for sets in workers)


def test_what_is_compiled_in_known_formats_counts_as_well() -> None:
    """Kernels that choose by lengths what to launch would be compiled for all of a search."""
    sets = WorkingSets(endless)
    scouted(sets)
    for _ in range(10):
        sets.judged(KERNEL, case_in(1), COMPILED_S + WARM_S, compile_s=COMPILED_S)
    assert sets.to_scout(KERNEL) == []
    sets.judged(KERNEL, case_in(1), 100.0)
    assert sets.to_scout(KERNEL) != []


def test_a_kernel_that_compiles_for_long_takes_its_own_time() -> None:
    """Those that compile in a moment would stay with their first format, or one that takes seconds get all time."""
    sets = WorkingSets(endless)
    sets.judged(KERNEL, case_in(1), 30.0)
    scouted(sets, OTHER)
    sets.judged(OTHER, case_in(1), 4 * COMPILED_S)
    assert sets.to_scout(KERNEL) == []
    assert [one.num_q_heads for one in scouted(sets, OTHER)] == [2, 3, 4]


def test_the_newest_formats_are_kept() -> None:
    """A set that only grows ends in a cache on the GPU that only grows."""
    sets = WorkingSets(endless)
    for number in range(1, 101):
        sets.judged(KERNEL, case_in(number), WARM_S)
    assert sets.to_draw_from(KERNEL) == [format_number(number) for number in range(69, 101)]


def test_what_others_have_compiled_joins_a_few_at_a_time() -> None:
    """It is on disk, but loading it takes time too: not all of a turn, and not all turns."""
    sets = WorkingSets(endless)
    sets.judged(KERNEL, case_in(900), WARM_S)
    for number in range(1, 21):
        sets.offer(KERNEL, format_number(number))
    sets.judged(KERNEL, case_in(900), 1.0)
    newest = [format_number(number) for number in (900, *range(20, 12, -1))]
    assert sets.to_draw_from(KERNEL) == newest
    for number in range(13, 21):
        assert sets.judged(KERNEL, case_in(number), 0.02) is None
    assert sets.to_draw_from(KERNEL) == newest
    sets.judged(KERNEL, case_in(900), 10.0)
    assert len(sets.to_draw_from(KERNEL)) == 17


def test_formats_are_made_anew_once_it_is_known_what_a_kernel_takes() -> None:
    """A kernel whose first formats all had one head passed 2,788 cases: compilers had had their share of the time."""
    sets = WorkingSets(endless)
    for _ in range(200):
        scouted(sets)
        sets.judged(KERNEL, case_in(1), WARM_S)
    assert sets.to_scout(KERNEL) == []
    sets.joins(KERNEL)
    sets.judged(KERNEL, case_in(1), COMPILED_S)
    assert scouted(sets) != []


def test_what_others_have_compiled_is_not_scouted_or_published_again() -> None:
    """Eight workers that compile the same formats have the variety of one."""
    sets = WorkingSets(endless)
    for number in range(1, 5):
        sets.offer(KERNEL, format_number(number))
    assert sets.any_for(KERNEL)
    assert [one.num_q_heads for one in sets.to_draw_from(KERNEL)] == [4, 3, 2, 1]
    assert sets.judged(KERNEL, case_in(1), COMPILED_S) is None
    sets.judged(KERNEL, case_in(1), 1.0)
    assert [one.num_q_heads for one in scouted(sets)] == [5]  # how long it takes has not been seen
    sets.judged(KERNEL, case_in(1), 100.0)
    assert [one.num_q_heads for one in scouted(sets)] == [6, 7, 8, 9]


def test_a_kernel_whose_formats_are_all_known_is_left_alone() -> None:
    """Looking for another one must end."""
    few = [format_number(1), format_number(2)]
    sets = WorkingSets(lambda declaration: chain(few, repeat(few[0])))
    assert scouted(sets) == few[:1]
    sets.judged(KERNEL, case_in(1), 100.0)
    assert scouted(sets) == few[1:]
    sets.judged(KERNEL, case_in(1), 100.0)
    assert sets.to_scout(KERNEL) == []
    sets.judged(KERNEL, case_in(1), 100.0)
    assert not sets.is_scouting_due(KERNEL)  # each round would be of one batch


def test_a_round_ends_when_visit_says_so_and_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failing case nothing more may be drawn, budgets would not be kept, and Hypothesis print an example."""
    drawing = CaseSource(strategy_for, seeds=(1,))
    assert len(a_round(drawing, most=5)) == 5  # in the middle of a list
    clock = Clock(monkeypatch)
    drawing.round(KERNEL, lambda _: clock.wait(1.0), until=3.5)
    assert clock.now == 4.0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), SystemExit(3)])
def test_what_visit_raises_comes_out_unchanged(error: BaseException) -> None:
    """An error of the framework must not be taken for a failing case, run again and called flaky."""
    calls = 0

    def visit(value: int) -> bool:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(type(error)) as caught:
        run_round(st.integers(), visit, seed_value=1, until=math.inf)
    assert caught.value is error
    assert calls == 1
