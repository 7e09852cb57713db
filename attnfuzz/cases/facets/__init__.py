"""Facets, which say all of a field of a case: what is generic goes through them and names no field. Torch-free.

A new field of a case is a facet in one of these modules, or a part of one, and its place in the list of its problem
(`attnfuzz.bundled`), whose order is that in which shrinking goes.
"""

from __future__ import annotations

from attnfuzz.cases.facets.facet import Axis as Axis
from attnfuzz.cases.facets.facet import Changes as Changes
from attnfuzz.cases.facets.facet import Domain as Domain
from attnfuzz.cases.facets.facet import Facet as Facet
from attnfuzz.cases.facets.facet import Levels as Levels
from attnfuzz.cases.facets.facet import SizeRank as SizeRank
from attnfuzz.cases.facets.facet import changed as changed
from attnfuzz.cases.facets.facet import facets_of as facets_of
