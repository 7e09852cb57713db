"""attnfuzz.campaign.draw.drawing: no case twice, none later than asked, and the same ones for the same seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import cycle

from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.draw.drawing import CaseSource, WorkingSets
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.formats import Format, format_of
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


def test_no_case_is_drawn_twice() -> None:
    """Every round begins with the simplest case, which says nothing new the second time."""
    drawing = CaseSource(strategy_for, seeds=(1,))
    cases = [case for _ in range(4) for case in a_round(drawing)]
    assert len(set(cases)) == len(cases) > 700
    assert set(a_round(drawing, OTHER)) & set(cases)  # a case that passed on one kernel says nothing of another


def test_the_seeds_decide_what_is_drawn() -> None:
    """--seed must repeat a search, and two workers must not do the same work."""
    assert a_round(CaseSource(strategy_for, seeds=(1, 0))) == a_round(CaseSource(strategy_for, seeds=(1, 0)))
    assert (
        len({*a_round(CaseSource(strategy_for, seeds=(1, 0))), *a_round(CaseSource(strategy_for, seeds=(1, 1)))}) > 350
    )


def test_the_place_of_a_kernel_does_not_decide_what_is_drawn() -> None:
    """--seed would repeat a search on no other machine, and each clone of a project see other cases in its CI."""
    here, there = (Declaration(name="k", problem="dense_decode", target=f"/{place}/my.py:k") for place in "ab")
    assert a_round(CaseSource(strategy_for, seeds=(1,)), here) == a_round(CaseSource(strategy_for, seeds=(1,)), there)


def test_a_round_ends_in_the_middle_of_a_list() -> None:
    """After a failing case nothing more may be judged, and what was drawn with it may be drawn again."""
    drawing = CaseSource(strategy_for, seeds=(1,))
    assert len(a_round(drawing, most=5)) == 5
    seen: list[Case] = []

    def slow(case: Case) -> bool:
        seen.append(case)
        time.sleep(0.03)
        return True

    drawing.round(KERNEL, slow, until=time.monotonic() + 0.1)
    assert 1 <= len(seen) <= 4


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


def test_without_formats_nothing_is_scouted() -> None:
    """On a CPU nothing is compiled: time for it would be wasted."""
    assert CaseSource(strategy_for, seeds=(1,)).scout(KERNEL) == []
