"""Cases beside a failing one, each of which differs in one respect: a run of it tells what the failure needs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

from attnfuzz.cases.facets import Changes, Domain, changed, facets_of, storage
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import FailingCase
from attnfuzz.identity.features import case_features
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.choices import dtypes_of
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.repeated import repeated


def simpler_in_one_respect(suspect: FailingCase) -> list[Case]:
    """The case with one facet as in the simplest case, for each in turn."""
    return _made(suspect.declaration, suspect.case, _simpler(suspect.declaration, suspect.case))


def with_other_numbers(suspect: FailingCase) -> list[Case]:
    """Cases by which the oracle "residuals" judges a case."""
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


def strides_swapped(declaration: Declaration, case: Case) -> list[Case]:
    """``case`` with the strides of K and V exchanged, if that changes anything."""
    return _made(declaration, case, [storage.strides_swapped(case)])


def crossed(declaration: Declaration, case: Case, other: Case) -> list[Case]:
    """``case`` with all that ``other`` has beyond the simplest, where ``case`` itself has the simplest; or none.

    Tensors of ``other`` lie as they do there, or as those of ``case`` do.
    """
    simplest = _domain(declaration).simplest
    plain = {name: getattr(simplest, name) for name in case.__struct_fields__}
    changes = {name: getattr(other, name) for name, value in plain.items() if getattr(case, name) == value}
    mine, its = (getattr(one, "strides", {}) for one in (case, other))
    if not isinstance(mine, dict):  # a field of a user's problem, which has its own way with it
        mine = its = {}
    ways = [its, *(dict.fromkeys(its, kind) for kind in sorted(set(mine.values())))] if its else [{}]
    return _made(declaration, case, [changes | ({"strides": way | mine} if way else {}) for way in ways])


def without(aspect: Feature, declaration: Declaration, case: Case) -> list[Case]:
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


def with_numbers_moved(declaration: Declaration, case: Case) -> list[Case]:
    """``case`` of a user's problem with some of one number added to another one instead.

    Where several numbers come to one length, a mistake that begins at some length may need more of any of them.
    """
    if not isinstance(case, OpenCase):
        return []
    fields = case.problem.fields
    ways = (
        {name: less, other: more}
        for name, kind in fields.items()
        for less, by in kind.lower(getattr(case, name))
        for other, its in fields.items()
        if other != name and (more := its.higher(getattr(case, other), by)) is not None
    )
    return _made(declaration, case, ways)


def simpler_beside(moved: FailingCase, case: Case) -> list[Case]:
    """The case ``moved`` with one facet as in the simplest case, of those that it has in common with ``case``."""
    other = [name for name in case.__struct_fields__ if getattr(moved.case, name) != getattr(case, name)]
    return [
        one
        for one in simpler_in_one_respect(moved)
        if all(getattr(one, name) == getattr(moved.case, name) for name in other)
        if not moved.features <= case_features(moved.declaration, one)
    ]


def in_other_formats(declaration: Declaration, case: Case) -> list[Case]:
    """``case`` in each other dtype."""
    has_one = hasattr(case, "dtype")
    return _made(declaration, case, ({"dtype": dtype} for dtype in dtypes_of(declaration.supports) if has_one))


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
