"""Results are kept, and handed out again where the inputs look the same."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

from honest_kernels import SUPPORTS, attend

import attnfuzz

_BY_POINTER: dict[Any, Any] = {}
_BY_SHAPE: dict[Any, Any] = {}


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def cached_by_pointer(i: Any):
    """By where q and the caches lie: a benchmark calls with the same tensors a hundred times."""
    key = tuple((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in (i.q, i.k_cache, i.v_cache))
    if key not in _BY_POINTER:
        _BY_POINTER[key] = attend(i)
    return _BY_POINTER[key]


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def cached_by_shape(i: Any):
    """By shape: a benchmark has a handful of them."""
    key = (i.q.shape, i.q.dtype, i.k_cache.shape, i.block_table.shape)
    if key not in _BY_SHAPE:
        _BY_SHAPE[key] = attend(i)
    return _BY_SHAPE[key]
