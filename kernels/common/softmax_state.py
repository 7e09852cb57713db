"""The state of an online softmax, and how it becomes a result.

A state is three float32 values for one query head and a set of keys with scores ``s_i`` and values ``v_i``:

    row_max = max s_i      exp_sum = Σ exp(s_i - row_max)      acc = Σ exp(s_i - row_max) · v_i

    out = acc / exp_sum    lse = row_max + log(exp_sum)

An empty set has ``row_max = -inf``, ``exp_sum = 0``, ``acc = 0``. Adding keys moves the maximum to ``new_max``, and
multiplying by ``alpha = exp(row_max - new_max)`` carries both sums over (Milakov and Gimelshein, arXiv 1805.02867).
While there is no key yet, or only keys of score -inf, ``row_max - new_max`` would be NaN: exponents are therefore taken
relative to ``ref``, which is ``new_max`` where that is finite and 0 otherwise. A large negative number instead of -inf
would not do: a row whose real scores lie below it would come out empty.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


@triton.jit
def store_state(p_out, p_lse, o_d, m_d, stride_od, row_max, exp_sum, acc):
    """Normalise the state; store ``out`` in the output's dtype and ``lse`` in float32, or 0 and -inf if it is empty.

    ``p_out`` and ``p_lse`` point at this head's vector and number. No ``lse`` is wanted where ``p_lse`` is None.
    """
    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)
    b_out = acc / divisor  # [BLOCK_D]
    tl.store(p_out + o_d * stride_od, b_out.to(p_out.dtype.element_ty), mask=m_d)  # [BLOCK_D]
    if p_lse is not None:
        tl.store(p_lse, row_max + tl.log(divisor))
