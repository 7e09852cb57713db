"""The facets of each type of case: what is generic goes through them and names no field. Torch-free.

A new field of a case is a facet in one of these modules, or a part of one, and its place in the lists below; their
order is that in which shrinking goes.
"""

from __future__ import annotations

from attnfuzz.cases.facets.contents import CacheFormat, Numbers, Scale, VariantFacet
from attnfuzz.cases.facets.facet import Axis as Axis
from attnfuzz.cases.facets.facet import Changes as Changes
from attnfuzz.cases.facets.facet import Domain as Domain
from attnfuzz.cases.facets.facet import Facet as Facet
from attnfuzz.cases.facets.facet import Levels as Levels
from attnfuzz.cases.facets.facet import Place as Place
from attnfuzz.cases.facets.facet import changed as changed
from attnfuzz.cases.facets.facet import facets_of as facets_of
from attnfuzz.cases.facets.facet import register
from attnfuzz.cases.facets.heads import Heads, HeadSize, VHeadSize
from attnfuzz.cases.facets.mask import MaskFacet
from attnfuzz.cases.facets.sequences import Causality, QueryBounds, QueryLens, QueryPadding, Sequences
from attnfuzz.cases.facets.states import LseLayout, LsePairs, StateHeads, StateNumbers, Tokens
from attnfuzz.cases.facets.storage import (
    BlockSize,
    CacheLayout,
    Dtype,
    ExtraRows,
    KernelOptions,
    PageMap,
    SplitCount,
    Splits,
    TensorStrides,
)
from attnfuzz.problems.cases import (
    DenseDecodeCase,
    MaskedAttentionCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.open_cases import OpenCase

__all__ = ["Axis", "Changes", "Domain", "Facet", "Levels", "Place", "changed", "facets_of"]

_DTYPE, _HEAD_SIZE, _OPTIONS, _STRIDES = Dtype(), HeadSize(), KernelOptions(), TensorStrides()
_SHAPE = (Heads(), Splits())
_SIZES = (VHeadSize(), _HEAD_SIZE, _DTYPE)
_CONTENTS = (_STRIDES, Numbers(), VariantFacet(), CacheFormat(), Scale())
_PAGED = (*_SHAPE, _OPTIONS, BlockSize(), *_SIZES, CacheLayout(), PageMap(), *_CONTENTS)
_SEQUENCES = Sequences()
_QUERIES = (QueryBounds(), QueryPadding(), QueryLens())

register(DenseDecodeCase, _SEQUENCES, *_SHAPE, _OPTIONS, *_SIZES, ExtraRows(), *_CONTENTS)
register(PagedDecodeCase, _SEQUENCES, *_PAGED)
register(SplitDecodeCase, _SEQUENCES, SplitCount(), *_PAGED)
register(PagedAttentionCase, _SEQUENCES, Causality(), *_QUERIES, *_PAGED)
register(MaskedAttentionCase, _SEQUENCES, MaskFacet(), *_QUERIES, *_PAGED)
_STATES = (Tokens(), StateHeads(), LsePairs(), _HEAD_SIZE, _DTYPE, _OPTIONS, LseLayout(), StateNumbers(), _STRIDES)
register(MergeStatesCase, *_STATES)
register(OpenCase, _OPTIONS)
