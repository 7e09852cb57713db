"""Features of a case, by which bugs are told apart, and the input space of a kernel: made by the case's facets.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from attnfuzz.cases.facets import Axis, Domain, facets_of
from attnfuzz.cases.facets.facet import Options
from attnfuzz.problems.cases import Case
from attnfuzz.problems.combinations import narrowed
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.module import Problem, case_type_of
from attnfuzz.problems.supports import OptionValue, Supports


def features(case: Case, *, supports: Supports | None = None, options: Options | None = None) -> frozenset[Feature]:
    """Features in which ``case`` is more than the simplest case: a GQA ratio above 1, a partial last page.

    Given a kernel's ``supports`` and ``options``, features that even its simplest case has are left out.
    Seeds are no feature: they carry no meaning of their own.
    """
    found = frozenset(one for facet in facets_of(type(case)) for one in facet.features(case))
    if supports is None and options is None:
        return found
    return found - features(Domain(case.problem, supports or Supports(), options or {}).simplest)


def general_features(
    case: Case, *, supports: Supports | None = None, options: Options | None = None
) -> frozenset[Feature]:
    """Features that all cases of one mistake share, whichever of them is met first.

    That there is another dtype stands beside the one that it is, and so on for whatever has a value other than the
    simplest; that K has other strides also beside every layout that moves K in memory, and so on for each tensor;
    ``CACHE_STRIDES`` is any of this for K or V. As in ``features``, what even the kernel's simplest case has is left
    out.
    """
    domain = Domain(case.problem, supports or Supports(), options or {})
    particular = features(case, supports=domain.supports, options=domain.options)
    found = {general for one in particular if (general := one.general) is not None}
    return frozenset(found.union(*(facet.general(case, domain) for facet in facets_of(type(case)))))


def unusual_values(
    case: Case, *, supports: Supports | None = None, options: Options | None = None
) -> frozenset[Feature]:
    """Common values that ``case`` deviates from: a failure needs the deviation if one of them passes."""
    domain = Domain(case.problem, supports or Supports(), options or {})
    return frozenset(one for facet in facets_of(type(case)) for one in facet.unusual_values(case, domain))


def traits(case: Case) -> frozenset[Feature]:
    """A few hundred things to say of ``case``, its features among them. Seeds and positions of needles are left out.

    Features name what makes a case more than the simplest one. A crash may hang on anything else: one head size, odd
    lengths, a length that ends with a page, the *absence* of strides. So a trait is said for either side of each
    question.
    """
    return features(case).union(*(facet.traits(case) for facet in facets_of(type(case))))


_MAX_LEVELS = 1 << 12


def pair_number(first: int, second: int) -> int:
    """One number for a pair of levels, ``first <= second``."""
    return first * _MAX_LEVELS + second


def levels_of(pair: int) -> tuple[int, int]:
    """The two levels of a ``pair_number``."""
    return divmod(pair, _MAX_LEVELS)


class CaseLevels(NamedTuple):
    """The levels of a case: those of the whole, and those of each distinct kind of sequence in it."""

    case: tuple[int, ...]
    rows: frozenset[tuple[int, ...]]


class InputSpace:
    """Numbers the levels of all axes of a kernel, one axis after the other: a case on a level has that feature."""

    def __init__(self, problem: Problem, supports: Supports, options: Mapping[str, tuple[OptionValue, ...]]) -> None:
        domain = Domain(problem, narrowed(problem, supports), options)
        self._facets = facets_of(case_type_of(problem))
        case = [axis for facet in self._facets for axis in facet.axes(domain)]
        rows = [axis for facet in self._facets for axis in facet.row_axes(domain)]
        self.axes: tuple[Axis, ...] = (*case, *rows)
        self.levels: tuple[Feature, ...] = tuple(level for axis in self.axes for level in axis.features)
        self.num_levels = len(self.levels)
        self.numbers = dict(zip(self.levels, range(_MAX_LEVELS), strict=False))
        self._case, self._rows = ([(axis.of, self._numbers_on(axis)) for axis in some] for some in (case, rows))
        self._place_row = lru_cache(maxsize=1 << 14)(self._levels_of_row)

    def place(self, case: Case) -> CaseLevels:
        """Where ``case`` lies."""
        levels = [numbers[level] for of, numbers in self._case for level in of(case)]
        rows = (row for facet in self._facets for row in facet.rows(case))
        return CaseLevels(tuple(levels), frozenset(map(self._place_row, rows)))

    def _numbers_on(self, axis: Axis) -> dict[str, int]:
        return {level.level: self.numbers[level] for level in axis.features}

    def _levels_of_row(self, row: Any) -> tuple[int, ...]:
        return tuple(numbers[level] for of, numbers in self._rows for level in of(row))
