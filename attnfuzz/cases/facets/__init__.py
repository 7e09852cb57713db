"""The facets of each type of case: what is generic goes through them and names no field. Torch-free.

Most fields of the bundled cases are not facets yet; what is said of those stands in the modules that loop over these.
"""

from __future__ import annotations

from typing import Any

from attnfuzz.cases.facets.facet import Changes as Changes
from attnfuzz.cases.facets.facet import Facet as Facet
from attnfuzz.cases.facets.mask import MaskFacet
from attnfuzz.cases.facets.v_head_size import VHeadSize
from attnfuzz.problems.cases import AttentionCase, MaskedAttentionCase

__all__ = ["Changes", "Facet", "facets_of"]

_V_HEAD_SIZE = VHeadSize()
_FACETS: dict[type, tuple[Facet[Any], ...]] = {
    AttentionCase: (_V_HEAD_SIZE,),
    MaskedAttentionCase: (_V_HEAD_SIZE, MaskFacet()),
}


def facets_of(case_type: type) -> tuple[Facet[Any], ...]:
    """Those of the nearest type that ``case_type`` derives from; none of a type that lists none."""
    return next((_FACETS[base] for base in case_type.__mro__ if base in _FACETS), ())
