"""A kernel that remembers what it worked out from the lengths when it was first called with a shape."""

from __future__ import annotations

from typing import Any

import attnfuzz
from attnfuzz.kernels import eager

_LONGEST: dict[tuple[int, ...], int] = {}


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(graph_replay=True))
def grid_by_shape(inputs: Any) -> Any:
    longest = _LONGEST.setdefault(tuple(inputs.k.shape), int(inputs.seq_lens.max()))
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens.clamp(max=longest), inputs.scale)
