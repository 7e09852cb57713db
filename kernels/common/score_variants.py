"""Device functions for attention beyond ``scale · q Kᵀ``: soft cap, ALiBi, sliding window, sinks. All kernels use them.

**Soft cap** (Gemma 2, arXiv 2408.00118): ``s`` becomes ``c · tanh(s / c)``. Triton has no tanh of every backend.
With ``e = exp(-2|y|)``, which is at most 1 and cannot overflow,

    tanh |y| = (1 - e) / (1 + e)        tanh(-y) = -tanh y

**ALiBi** (Press et al., arXiv 2108.12409) adds ``slope · (key - query)`` to the scores of a head, by their positions.

**Sliding window** of w keys (Mistral, arXiv 2310.06825): the query at ``p`` sees those from ``p - w + 1`` on.

**Sinks** (gpt-oss, arXiv 2508.10925): the denominator of the softmax has one more term, ``exp(sink)``. In the state of
an online softmax (``softmax_state``) that is one more key with a value of 0, so it takes part in the running maximum:
``exp(sink - row_max)`` with another maximum than ``max(row_max, sink)`` overflows. It is added once for a row: where
several programs share one, by the reduction.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


@triton.jit
def cap_scores(b_s, soft_cap):
    """Scores of any shape, in float32; ``soft_cap`` above 0."""
    b_y = b_s / soft_cap
    b_e = tl.exp(-2.0 * tl.abs(b_y))
    b_tanh = (1.0 - b_e) / (1.0 + b_e)
    return soft_cap * tl.where(b_y < 0.0, -b_tanh, b_tanh)


@triton.jit
def vary_scores(b_s, i_key, i_query, slope, soft_cap):
    """``b_s``, scaled already, of keys and queries at these positions, with slope or cap unless that is None.

    All broadcast to ``b_s``.
    """
    if soft_cap is not None:
        b_s = cap_scores(b_s, soft_cap)
    if slope is not None:
        b_s += slope * (i_key - i_query).to(tl.float32)
    return b_s


@triton.jit
def window_begin(i_query, window):
    """The first position that the query at ``i_query`` sees, below 0 if the window reaches beyond the first key."""
    return i_query + 1 - window


@triton.jit
def count_sink(row_max, exp_sum, sink, BASE_2: tl.constexpr):
    """``row_max``, ``exp_sum`` with one more key of score ``sink``, and what ``acc`` is to be multiplied by.

    ``BASE_2``: maximum and sink are in base 2. A sink of -inf changes nothing.
    """
    new_max = tl.maximum(row_max, sink)
    ref = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = tl.exp2(row_max - ref) if BASE_2 else tl.exp(row_max - ref)
    weight = tl.exp2(sink - ref) if BASE_2 else tl.exp(sink - ref)
    return new_max, exp_sum * alpha + weight, alpha


@triton.jit
def add_sink(row_max, exp_sum, acc, sink):
    """The state of one row with one more key of score ``sink`` and value 0."""
    row_max, exp_sum, alpha = count_sink(row_max, exp_sum, sink, False)
    return row_max, exp_sum, acc * alpha
