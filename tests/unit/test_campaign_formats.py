"""attnfuzz.campaign.draw.drawing: a working set that is refreshed, for a bounded part of the time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import msgspec

from attnfuzz.campaign.draw.drawing import WorkingSets
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case
from attnfuzz.problems.formats import Format, format_of
from attnfuzz.problems.simplest import simplest_case

KERNEL = Declaration(name="k", problem="dense_decode", target="k")
OTHER = Declaration(name="other", problem="dense_decode", target="other")
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
    return [one for one in published if one is not None]


def test_a_kernel_without_formats_is_scouted_first() -> None:
    """There is nothing to draw from before; and while four are compiled, no kernel has had a case."""
    sets = WorkingSets(endless)
    assert not sets.any_for(KERNEL)
    assert scouted(sets) == [format_number(1)]
    assert sets.to_draw_from(KERNEL) == [format_number(1)]
    assert sets.to_scout(KERNEL) == []
    assert len(scouted(sets, OTHER)) == 1


def test_half_of_the_time_goes_into_scouting_while_there_are_few_formats() -> None:
    """In its first minute a search would run thousands of cases of four formats and miss what the fifth shows."""
    sets = WorkingSets(endless)
    total = scouting = 0.0
    while len(sets.to_draw_from(KERNEL)) < 16:
        new = len(scouted(sets))
        scouting += new * COMPILED_S
        for _ in range(20):
            sets.judged(KERNEL, case_in(1), WARM_S)
        total += new * COMPILED_S + 20 * WARM_S
        assert scouting <= 0.5 * total + 4 * COMPILED_S
    assert 0.4 < scouting / total < 0.65


def test_scouting_takes_its_share_of_the_time_and_no_more() -> None:
    """Without it, a bug that needs another head size is never met; too much of it, and hardly any case is run."""
    sets = WorkingSets(endless)
    total = scouting = 0.0
    for turn in range(5000):
        new = len(scouted(sets))
        scouting += new * COMPILED_S
        for _ in range(20):
            assert sets.judged(KERNEL, case_in(1), WARM_S) is None
        total += new * COMPILED_S + 20 * WARM_S
        if turn == 1000:
            assert 16 * COMPILED_S <= scouting < 20 * COMPILED_S
    assert 0.08 < scouting / total < 0.12


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


def test_what_others_have_compiled_is_not_scouted_or_published_again() -> None:
    """Eight workers that compile the same formats have the variety of one."""
    sets = WorkingSets(endless)
    for number in range(1, 5):
        sets.offer(KERNEL, format_number(number))
    assert sets.any_for(KERNEL)
    assert [one.num_q_heads for one in sets.to_draw_from(KERNEL)] == [4, 3, 2, 1]
    assert sets.judged(KERNEL, case_in(1), COMPILED_S) is None
    sets.judged(KERNEL, case_in(1), 1.0)
    assert [one.num_q_heads for one in scouted(sets)] == [5, 6, 7, 8]


def test_a_kernel_whose_formats_are_all_known_is_left_alone() -> None:
    """Looking for another one must end."""
    few = [format_number(1), format_number(2)]
    sets = WorkingSets(lambda declaration: chain(few, repeat(few[0])))
    assert scouted(sets) == few[:1]
    sets.judged(KERNEL, case_in(1), 100.0)
    assert scouted(sets) == few[1:]
    sets.judged(KERNEL, case_in(1), 100.0)
    assert sets.to_scout(KERNEL) == []
