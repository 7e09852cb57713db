"""Device functions for scores beyond ``scale · q Kᵀ``: a soft cap, and a logit that takes weight and has no value.

**Soft cap** (Gemma 2, arXiv 2408.00118): ``s`` becomes ``c · tanh(s / c)``. Triton has no tanh of every backend.
With ``e = exp(-2|y|)``, which is at most 1 and cannot overflow,

    tanh |y| = (1 - e) / (1 + e)        tanh(-y) = -tanh y

**Sinks** (gpt-oss, arXiv 2508.10925): the denominator of the softmax has one more term, ``exp(sink)``. In the state of
an online softmax (``softmax_state``) that is one more key with a value of 0, so it takes part in the running maximum:
``exp(sink - row_max)`` with another maximum than ``max(row_max, sink)`` overflows. It is added once for a row: in split
decode by the reduction.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

__all__ = ["add_sink", "cap_scores"]


@triton.jit
def cap_scores(b_s, soft_cap):
    """Scores of any shape, in float32; ``soft_cap`` above 0."""
    b_y = b_s / soft_cap
    b_e = tl.exp(-2.0 * tl.abs(b_y))
    b_tanh = (1.0 - b_e) / (1.0 + b_e)
    return soft_cap * tl.where(b_y < 0.0, -b_tanh, b_tanh)


@triton.jit
def add_sink(row_max, exp_sum, acc, sink):
    """The state with one more key of score ``sink`` and value 0; -inf changes nothing."""
    new_max = tl.maximum(row_max, sink)
    ref = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = tl.exp(row_max - ref)
    return new_max, exp_sum * alpha + tl.exp(sink - ref), acc * alpha
