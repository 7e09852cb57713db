"""Features of a case, by which bugs are told apart: made by its facets. Torch-free."""

from __future__ import annotations

from attnfuzz.cases.facets import Domain, facets_of
from attnfuzz.cases.facets.contents import FREED_PAGES
from attnfuzz.cases.facets.facet import Options
from attnfuzz.cases.facets.heads import SEVERAL_HEADS
from attnfuzz.cases.facets.storage import CACHE_STRIDES, DEAD_ROWS, KV_STRIDES_DIFFER, SHARED_PAGES
from attnfuzz.problems.cases import Case
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.supports import Supports

__all__ = [
    "CACHE_STRIDES",
    "DEAD_ROWS",
    "FREED_PAGES",
    "KV_STRIDES_DIFFER",
    "SEVERAL_HEADS",
    "SHARED_PAGES",
    "features",
    "general_features",
    "traits",
    "unusual_values",
]


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
