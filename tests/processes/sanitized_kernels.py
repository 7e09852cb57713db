"""Kernels that are run under a stand-in for compute-sanitizer."""

from __future__ import annotations

from typing import Any

import attnfuzz
from attnfuzz.kernels import eager


@attnfuzz.kernel("dense_decode")
def right(inputs: Any) -> Any:
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)


@attnfuzz.kernel("dense_decode")
def raises(inputs: Any) -> Any:
    raise ValueError("not today")
