"""Cases beside a failing one: each differs from it in one respect, and a run of it tells what the failure needs.

One question is asked of them throughout: does the case still fail without what a known bug needs? If one of its
relatives does, another bug is at work; if none does, it is that bug, however it shows. Shrinking cannot tell: it only
ever goes to simpler cases. It takes a mistake with the strides of K for one that takes the strides of K for those of V,
since the smallest case of both has unusual strides in K alone; and of ten pairs of LSEs that a kernel fails for, it
tells the one that was met first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Set

from attnfuzz.campaign.identity.finding import FailingCase
from attnfuzz.campaign.identity.signature import Signature, aspects, case_features
from attnfuzz.cases.facets import Changes, Domain, changed, facets_of, storage
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.repeated import repeated
from attnfuzz.problems.supported import supports_case

__all__ = [
    "alternatives",
    "lacking",
    "nearest_permitted",
    "simpler_in_one_respect",
    "strides_swapped",
    "with_other_numbers",
    "with_simplest_values",
    "without",
]

_RECIPES = ("values", "outputs")  # of attention, and of states to merge


def lacking(known: Signature, suspect: FailingCase) -> list[Case]:
    """Relatives that lack what the bug ``known`` needs."""
    features = case_features(suspect.declaration, suspect.case)
    return [
        case
        for case in _relatives(suspect, known.features & features)
        if not known.features <= case_features(suspect.declaration, case)
    ]


def _relatives(suspect: FailingCase, needed: Set[str]) -> list[Case]:
    """First the case without what ``needed`` is about and with all the rest, so that nothing else is taken away."""
    about = sorted(aspects(frozenset(needed)))
    siblings = [sibling for aspect in about for sibling in without(aspect, suspect.declaration, suspect.case)]
    return [*siblings, *simpler_in_one_respect(suspect)]


def simpler_in_one_respect(suspect: FailingCase) -> list[Case]:
    """The case with one facet as in the simplest case, for each in turn."""
    return _made(suspect.declaration, suspect.case, _simpler(suspect.declaration, suspect.case))


def with_simplest_values(suspect: FailingCase) -> Case | None:
    """The case with the simplest recipe for its numbers; None if it has that already."""
    simplest = _domain(suspect.declaration).simplest
    recipes = {name: getattr(simplest, name) for name in _RECIPES if name in simplest.__struct_fields__}
    return next(iter(_made(suspect.declaration, suspect.case, [recipes])), None)


def with_other_numbers(suspect: FailingCase) -> list[Case]:
    """Those by which the oracle "residuals" judges a case."""
    case = suspect.case
    changed = repeated(case, "cpu") if isinstance(case, AttentionCase) else ()
    permits = functools.partial(supports_case, suspect.declaration.supports, suspect.declaration.options)
    return [one for one in changed if permits(one)]


def nearest_permitted(suspect: FailingCase) -> Case | None:
    """The case, changed as little as its kernel's declaration asks for; None if that is more than two facets."""
    declaration = suspect.declaration
    permits = functools.partial(supports_case, declaration.supports, declaration.options)

    def simpler(case: Case) -> Iterator[Case]:
        made = (changed(case, **changes) for changes in _simpler(declaration, case))
        yield from (one for one in made if one is not None and one != case)

    once = list(simpler(suspect.case))
    twice = itertools.chain.from_iterable(map(simpler, once))
    return next(filter(permits, itertools.chain([suspect.case], once, twice)), None)


def strides_swapped(declaration: Declaration, case: Case) -> Case | None:
    """``case`` with the strides of K and V exchanged; None if that changes nothing."""
    return next(iter(_made(declaration, case, [storage.strides_swapped(case)])), None)


def without(aspect: str, declaration: Declaration, case: Case) -> list[Case]:
    """``case`` without ``aspect`` and otherwise the same; several if there are several ways, none if there is none."""
    domain = _domain(declaration)
    ways = (facet.without(aspect, case, domain) for facet in facets_of(type(case)))
    return _made(declaration, case, itertools.chain.from_iterable(ways))


def alternatives(declaration: Declaration, case: Case) -> list[Case]:
    """``case`` with another value of a field that is not the simplest: what fails alike does not need that value.

    The simplest has been tried by shrinking. Of two states to merge an empty one stays empty and another does not.
    Tokens are put onto pages of other sizes, and rows that hold no token come about in the other way.
    """
    domain = _domain(declaration)
    ways = (facet.alternatives(case, domain) for facet in facets_of(type(case)))
    return _made(declaration, case, itertools.chain.from_iterable(ways))


def _simpler(declaration: Declaration, case: Case) -> Iterator[Changes]:
    domain = _domain(declaration)
    yield from (facet.simplest(case, domain) for facet in facets_of(type(case)))


def _made(declaration: Declaration, case: Case, ways: Iterable[Changes]) -> list[Case]:
    """The cases that ``ways`` make of ``case``, as far as the kernel supports them and they are others."""
    made = (changed(case, **changes) for changes in ways)
    permits = functools.partial(supports_case, declaration.supports, declaration.options)
    return [one for one in made if one is not None and one != case and permits(one)]


def _domain(declaration: Declaration) -> Domain:
    return Domain(declaration.problem, declaration.supports, declaration.options)
