"""Error bound of merging two attention states: attention over two tokens, with the LSEs as scores."""

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.bound import Bound, after_rounding
from attnfuzz.numerics.log_sum_exp_error import log_sum_exp_error
from attnfuzz.numerics.perturbed_softmax import perturbed_softmax
from attnfuzz.numerics.score_error import ExponentRoundings, exponent_error
from attnfuzz.numerics.units import FLOAT32_ROUNDOFF
from attnfuzz.numerics.weighted_average import AverageRoundings, denominator_error, weighted_average_error

__all__ = ["merge_bound"]

# The LSEs are exact. In base 2: the constant log2(e) acts on the difference, its product on each; the subtraction.
_OUT_ROUNDINGS = ExponentRoundings(of_score=1, of_difference=3)
_LSE_ROUNDINGS = ExponentRoundings(of_score=2, of_difference=3)


def merge_bound(
    prefix_output: Float64[Tensor, "num_tokens num_q_heads head_size"],
    suffix_output: Float64[Tensor, "num_tokens num_q_heads head_size"],
    prefix_lse: Float64[Tensor, "num_tokens num_q_heads"],
    suffix_lse: Float64[Tensor, "num_tokens num_q_heads"],
    *,
    out_dtype: torch.dtype,
    truncates_bfloat16: bool = False,
) -> Bound:
    """Largest error of `output` and `output_lse` that a correct merge in float32 can make.

    The arguments hold the exact inputs; LSEs in natural logarithms, -inf for an empty side (+inf already replaced). An
    empty side contributes nothing, whatever its output holds, NaN included. Both weights are float32 and are not
    rounded before they multiply the outputs. `truncates_bfloat16` as in `attention_bound`.

    Returns a `Bound` with `out [num_tokens, num_q_heads, head_size]` and `lse [num_tokens, num_q_heads]`, both 0 where
    both sides are empty. Raises `ValueError` for an unknown dtype, and for an LSE that is +inf or NaN.
    """
    lse = torch.stack([prefix_lse, suffix_lse], dim=-1)
    if bool((lse.isnan() | lse.isposinf()).any()):
        raise ValueError("an LSE of +inf or NaN has no merge; replace +inf by -inf first, and never pass NaN")
    is_empty = lse.isneginf()
    both_empty = is_empty.all(-1)
    scores = lse.masked_fill(both_empty.unsqueeze(-1), 0.0).flatten(0, -2)
    values = torch.stack([prefix_output, suffix_output], dim=-2).masked_fill(is_empty.unsqueeze(-1), 0.0)
    out, lse_error = _errors(scores, values.flatten(0, -3), out_dtype, truncates_bfloat16)
    return Bound(
        out=out.view(prefix_output.shape).masked_fill(both_empty.unsqueeze(-1), 0.0),
        lse=lse_error.view(prefix_lse.shape).masked_fill(both_empty, 0.0),
    )


def _errors(
    scores: Float64[Tensor, "rows 2"],
    values: Float64[Tensor, "rows 2 head_size"],
    out_dtype: torch.dtype,
    truncates_bfloat16: bool,
) -> tuple[Float64[Tensor, "rows head_size"], Float64[Tensor, " rows"]]:
    softmax = perturbed_softmax(scores, exponent_error(scores, _OUT_ROUNDINGS))
    average = torch.einsum("rn,rnd->rd", softmax.p, values)
    no_rescales = torch.zeros_like(scores)
    roundings = AverageRoundings(sum_roundoff=FLOAT32_ROUNDOFF)
    error = weighted_average_error(softmax, values, average, no_rescales, roundings)
    truncates = truncates_bfloat16 and out_dtype == torch.bfloat16
    sum_error = denominator_error(softmax, no_rescales, FLOAT32_ROUNDOFF)
    lse_error = log_sum_exp_error(scores, exponent_error(scores, _LSE_ROUNDINGS), sum_error, num_stages=1)
    return after_rounding(error, average, out_dtype, truncates=truncates), lse_error
