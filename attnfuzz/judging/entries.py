"""What a batch runs: its cases, and what relations make of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnfuzz.declaration import Declaration
from attnfuzz.memory.image import Plan, plan_of
from attnfuzz.oracles.relations.relation import FurtherRuns, Relation
from attnfuzz.oracles.relations.transformed import Changed
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.placement import placements
from attnfuzz.problems.registry import Contents, problem_of
from attnfuzz.values.token_table import token_table

__all__ = ["Asked", "Entry", "asked_of", "entries_of"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A case to be run so many times. `is_drawn`: its numbers are its own, and so accuracy has a word on it."""

    case: Case
    plan: Plan
    contents: Contents
    runs: int
    words: str = ""
    is_drawn: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """A relation that has a word on a case, and the entries that it wants to see; None to be asked by itself."""

    relation: Relation
    further: FurtherRuns | None
    entries: range


def asked_of(
    declaration: Declaration,
    cases: Sequence[Case],
    contents: Sequence[Contents],
    relations: Sequence[Sequence[Relation]],
) -> list[list[Asked]]:
    """For each of `cases` what its `relations` want run; those entries are numbered from the number of cases on."""
    asked: list[list[Asked]] = [[] for _ in cases]
    number = len(cases)
    for of_case, case, in_it, chosen in zip(asked, cases, contents, relations, strict=True):
        for relation in chosen:
            if relation.further is None:
                of_case.append(Asked(relation, None, range(0)))
                continue
            further = relation.further(declaration, case, in_it)
            if further is not None:
                entries = range(number, number + len(further.runs))
                of_case.append(Asked(relation, further, entries))
                number = entries.stop
    return asked


def entries_of(declaration: Declaration, asked: Sequence[Sequence[Asked]]) -> list[Entry]:
    """The entries that `asked` want, in the order of their numbers; on the host."""
    wanted = (one.further for of_case in asked for one in of_case)
    runs = [changed for further in wanted if further is not None for changed in further.runs]
    drawn = [changed for changed in runs if changed.values is None]
    their_own = iter(_drawn_contents(declaration, drawn))
    placed = iter(_placed([changed for changed in runs if changed.values is not None]))
    return [
        Entry(
            changed.case,
            plan_of(changed.case),
            contents=next(placed if changed.values is not None else their_own),
            runs=1,
            words=changed.words,
            is_drawn=changed.values is None,
        )
        for changed in runs
    ]


def _drawn_contents(declaration: Declaration, drawn: Sequence[Changed]) -> list[Contents]:
    if not drawn:
        return []
    cases = [changed.case for changed in drawn]
    return problem_of(cases[0]).contents(cases, "cpu", declaration.supports)


def _placed(runs: Sequence[Changed]) -> list[Contents]:
    """Values with their places, where the case says but for those that are given others."""
    contents = [Contents(changed.values, changed.placement) for changed in runs]
    unplaced = {
        i: changed.case
        for i, changed in enumerate(runs)
        if changed.placement is None and isinstance(changed.case, AttentionCase)
    }
    if unplaced:
        cases = list(unplaced.values())
        for i, placement in zip(unplaced, placements(cases, token_table(cases, "cpu")), strict=True):
            contents[i] = replace(contents[i], placement=placement)
    return contents
