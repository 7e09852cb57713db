"""Error bound of merging two attention states: attention over two tokens, with the LSEs as scores."""

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import merge_arithmetic, side_by_side
from attnfuzz.numerics.bound import Bound
from attnfuzz.numerics.row_units import RowUnits, merge_units
from attnfuzz.numerics.rows import RowResult, bound_rows

__all__ = ["merge_bound", "merge_rows"]


def merge_bound(
    prefix_output: Float64[Tensor, "num_tokens num_q_heads head_size"],
    suffix_output: Float64[Tensor, "num_tokens num_q_heads head_size"],
    prefix_lse: Float64[Tensor, "num_tokens num_q_heads"],
    suffix_lse: Float64[Tensor, "num_tokens num_q_heads"],
    *,
    out_dtype: torch.dtype,
) -> Bound:
    """Largest error of `output` and `output_lse` that a correct merge in float32 can make.

    The arguments hold the exact inputs; LSEs in natural logarithms, -inf for an empty side (+inf already replaced). An
    empty side contributes nothing, whatever its output holds, NaN included. Both weights are float32 and are not
    rounded before they multiply the outputs.

    Returns a `Bound` with `out [num_tokens, num_q_heads, head_size]` and `lse [num_tokens, num_q_heads]`, both 0 where
    both sides are empty. Raises `ValueError` for an unknown dtype, and for an LSE that is +inf or NaN.
    """
    lse = torch.stack([prefix_lse, suffix_lse], dim=-1).flatten(0, -2)
    if bool((lse.isnan() | lse.isposinf()).any()):
        raise ValueError("an LSE of +inf or NaN has no merge; replace +inf by -inf first, and never pass NaN")
    outputs = torch.stack([prefix_output, suffix_output], dim=-2).flatten(0, -3)
    arithmetic = merge_arithmetic(out_dtype)
    columns = merge_units(side_by_side([arithmetic]), lse_unit=torch.ones(1, dtype=torch.float64, device="cpu"))
    units = RowUnits.of_columns(columns.expand(-1, len(lse)).to(lse.device))
    rows = merge_rows(lse, outputs, units)
    return Bound(out=rows.out_error.view(prefix_output.shape), lse=rows.lse_error.view(prefix_lse.shape))


def merge_rows(
    lse: Float64[Tensor, "rows 2"], outputs: Float64[Tensor, "rows 2 head_size"], units: RowUnits
) -> RowResult:
    """Result and bound of each pair of states: a group of one. `lse`: in units of `units.scale`; infinite where empty.

    A merge of two empty states is empty: 0 and -inf, with bounds of 0. For the arithmetic, the score of an empty state
    is the other's, and the scores of two are 0.
    """
    is_empty = lse.isinf()
    both_empty = is_empty.all(-1, keepdim=True)
    scores = units.scale * lse.masked_fill(is_empty, -torch.inf).unsqueeze(1)
    largest = scores.amax(-1, keepdim=True)
    scores = torch.where(is_empty.unsqueeze(1), largest, scores).masked_fill_(both_empty.unsqueeze(1), 0.0)
    present = (both_empty | ~is_empty).to(torch.float64).unsqueeze(1)
    values = outputs.masked_fill(is_empty.unsqueeze(-1), 0.0)
    rows = bound_rows(scores, torch.zeros_like(scores), values, present, units, rescales=False)
    return RowResult(
        out=rows.out,
        lse=rows.lse.masked_fill(both_empty, -torch.inf),
        out_error=rows.out_error.masked_fill(both_empty.unsqueeze(-1), 0.0),
        lse_error=rows.lse_error.masked_fill(both_empty, 0.0),
    )
