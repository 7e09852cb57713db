"""The designs of `tests.quality.designs` as kernels that declare none of it, but no empty sequences."""

from __future__ import annotations

from typing import Any

import attnfuzz
from attnfuzz import Supports
from tests.quality.designs import DESIGNS, Design, Result

__all__ = [
    "cubic_exp",
    "exact_products",
    "rounded_products",
    "scaled_both",
    "scaled_query",
    "scaled_query_in_base_2",
    "short_exp",
    "short_weights",
    "sum_of_rounded_weights",
]

_HALVES = Supports(dtypes=("float16", "bfloat16"), empty_sequences=False)
_BY_NAME = {design.name: design for design in DESIGNS}


def _run(inputs: Any, design: Design) -> Result:
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for i, length in enumerate(inputs.seq_lens.tolist()):
        k, v = (
            part[i, :length].repeat_interleave(group, 1).transpose(0, 1).contiguous() for part in (inputs.k, inputs.v)
        )
        inputs.out[i], inputs.lse[i] = design.run(inputs.q[i], k, v, inputs.scale, tile=64)
    return inputs.out, inputs.lse


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def exact_products(inputs: Any) -> Result:
    return _run(inputs, _BY_NAME["weights rounded, summed before"])


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def sum_of_rounded_weights(inputs: Any) -> Result:
    return _run(inputs, _BY_NAME["sum of rounded weights"])


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def scaled_query(inputs: Any) -> Result:
    return _run(inputs, _BY_NAME["q x scale rounded"])


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def scaled_query_in_base_2(inputs: Any) -> Result:
    return _run(inputs, _BY_NAME["q x scale x log2(e) rounded"])


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def scaled_both(inputs: Any) -> Result:
    return _run(inputs, _BY_NAME["root of the scale on q and k"])


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def cubic_exp(inputs: Any) -> Result:
    return _run(inputs, _BY_NAME["cubic exp2"])


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def short_exp(inputs: Any) -> Result:
    return _run(inputs, _BY_NAME["16-bit exp2"])


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def short_weights(inputs: Any) -> Result:
    return _run(inputs, _BY_NAME["weights in e4m3"])


@attnfuzz.kernel("dense_decode", supports=_HALVES)
def rounded_products(inputs: Any) -> Result:
    """No design: SGLang's `(q * k).to(float32)`."""
    scores = lambda q, k, scale: (q[:, None] * k).float().sum(-1) * scale  # noqa: E731
    return _run(inputs, Design("products rounded", "", scores=scores))
