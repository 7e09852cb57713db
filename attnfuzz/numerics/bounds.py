"""Error bounds of decode attention, out = softmax(scale q.k) V with its natural log-sum-exp, and of merging two states.

A merge is attention over two tokens, with the LSEs as scores. Error over bound, above 1, is a bug.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import FLOAT32_ROUNDOFF, attention_arithmetic, merge_arithmetic, side_by_side
from attnfuzz.numerics.row_units import RowUnits, attention_units, merge_units, variant_units
from attnfuzz.numerics.rows import RowResult, bound_rows, bound_scored_rows
from attnfuzz.numerics.scores import VariantRows, variant_scores
from attnfuzz.problems.declared_numerics import Numerics


@dataclass(frozen=True)
class Bound:
    """Largest error a correct kernel can make, for each element: `|got - expected| <= bound`.

    `out`: in units of the values; `lse`: in natural logarithms. An empty result must be exact: its bound is 0.
    """

    out: Float64[Tensor, "*rows v_head_size"]
    lse: Float64[Tensor, "*rows"]


def error_ratio(
    got: Float[Tensor, "*shape"], expected: Float64[Tensor, "*shape"], bound: Float64[Tensor, "*shape"]
) -> Float64[Tensor, "*shape"]:
    """`|got - expected| / bound`, elementwise, never NaN.

    0 where both are equal (the same infinity included), and where NaN is expected: of such an element nothing is
    promised. Else infinite where `got` is NaN, where only one is infinite or their signs differ, where a bound of 0 is
    exceeded, and where the bound itself is NaN.
    """
    exact = got.to(torch.float64)
    ratio = (exact - expected).abs() / bound
    ratio = torch.where(torch.isnan(ratio), torch.inf, ratio)
    return torch.where((exact == expected) | expected.isnan(), 0.0, ratio)


_LARGEST_CHUNK = 2**19
"""Numbers in an intermediate result of shape [rows, group, num_tokens, v_head_size] on a CPU: 4 MiB."""

_LARGER_ON_A_GPU = 32
"""There small operations cost as much as large ones."""


def attention_bound(
    q: Float64[Tensor, "num_q_heads head_size"],
    k: Float64[Tensor, "seq_len num_kv_heads head_size"],
    v: Float64[Tensor, "seq_len num_kv_heads v_head_size"],
    scale: float | int,
    *,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    numerics: Numerics,
    num_partials: int = 1,
    partial_merge: bool = False,
    one_copy: bool = False,
    soft_cap: float | None = None,
    alibi_slopes: Float64[Tensor, " num_q_heads"] | None = None,
    sinks: Float64[Tensor, " num_q_heads"] | None = None,
    reach: int | None = None,
    smallest_kv: tuple[float, float] | None = None,
) -> Bound:
    """Largest error of `out` and `lse` that a correct kernel with these numerics can make, for one sequence.

    `q`, `k`, `v` hold the exact inputs of one sequence in token order; query head h reads KV head
    h // (num_q_heads / num_kv_heads). `in_dtype` is their dtype before widening, `out_dtype` that of the result.
    `num_partials`: at most how many partial results a split kernel combines in one step; 1 for none.
    `partial_merge`: the kernel's results are the partials themselves, stored in `out_dtype` with a float32 LSE each and
    combined by the caller in float64: every partial is rounded, the combination is not. The split ranges need not
    be known, since sum_s w_s |o_s| <= sum_i p_i |v_i|.
    `one_copy`: each score is kept once, as on a CPU; threads of a GPU may each have their own (`score_copies_error`).
    `soft_cap`, `alibi_slopes`, `sinks`: as in `attnfuzz.problems.variants`. Of a window, pass the keys that the query
    sees, and as `reach` how many tokens the sequence has before the query; without a window these are the others.

    `smallest_kv`: of an 8-bit cache, of which `k` and `v` are the numbers times their scales, the smallest magnitudes
    other than 0 that these products can have; None without.

    Where scores are declared to be stored in float16, which holds none above 65504, rows with larger ones have an
    infinite bound: such a kernel makes NaN of them (`RowResult` says so).

    Assumes that no intermediate overflows float32: head_size * max|q k| * |scale| and seq_len * max|v| below 3e38.
    Returns a `Bound` with `out [num_q_heads, v_head_size]` and `lse [num_q_heads]`, both zero when `seq_len` is 0.
    Raises `ValueError` for `num_partials` < 1, for head counts that do not divide and for an unknown dtype.
    """
    found = ragged_rows(
        q[None],
        [k],
        [v],
        scale,
        in_dtype=in_dtype,
        out_dtype=out_dtype,
        numerics=numerics,
        num_partials=num_partials,
        partial_merge=partial_merge,
        one_copy=one_copy,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        reach=reach,
        smallest_kv=smallest_kv,
    )
    return Bound(out=found.out_error[0], lse=found.lse_error[0])


def ragged_rows(
    q: Float64[Tensor, "num_queries num_q_heads head_size"],
    k: Sequence[Float64[Tensor, "_ num_kv_heads head_size"]],
    v: Sequence[Float64[Tensor, "_ num_kv_heads v_head_size"]],
    scale: float | int,
    *,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    numerics: Numerics,
    num_partials: int = 1,
    partial_merge: bool = False,
    one_copy: bool = False,
    soft_cap: float | None = None,
    alibi_slopes: Float64[Tensor, " num_q_heads"] | None = None,
    sinks: Float64[Tensor, " num_q_heads"] | None = None,
    reach: int | None = None,
    smallest_kv: tuple[float, float] | None = None,
) -> RowResult:
    """Results and bounds of many queries, each of the keys that it sees; arguments as those of `attention_bound`.

    Query i attends to `k[i]` and `v[i]`. `out [num_queries num_q_heads v_head_size]`, `lse [num_queries num_q_heads]`,
    and both errors in these shapes. Without keys they are 0 and -inf, with errors of 0.
    """
    num_queries, num_q_heads, head_size = q.shape
    num_kv_heads, v_head_size = v[0].shape[1:] if num_queries else (1, head_size)
    _check(num_q_heads, num_kv_heads, num_partials)
    arithmetic = attention_arithmetic(
        numerics,
        in_dtype=in_dtype,
        out_dtype=out_dtype,
        is_split=num_partials > 1 or sinks is not None,
        partial_merge=partial_merge,
        one_copy=one_copy,
        num_partials=num_partials,
        smallest_kv=smallest_kv,
    )
    out, lse = q.new_zeros(num_queries, num_q_heads, v_head_size), q.new_full((num_queries, num_q_heads), -torch.inf)
    result = RowResult(out=out, lse=lse, out_error=torch.zeros_like(out), lse_error=torch.zeros_like(lse))
    lengths = [len(keys) for keys in k]
    for together in _of_similar_length(lengths, at_least=0 if sinks is not None else 1):
        own, has_sink = [lengths[i] for i in together], sinks is not None
        counted = [num_keys + has_sink for num_keys in own]
        num_tokens, alike = max(counted), len(own)
        columns: dict[str, Sequence[float]] = {
            "scale": [scale] * alike,
            "head_size": [head_size] * alike,
            "num_tokens": counted,
        }
        variant = None
        if soft_cap is None and alibi_slopes is None and sinks is None:
            units = attention_units(side_by_side([arithmetic]), **_columns(columns))
        else:
            reaches = [max(0, num_keys - 1) if reach is None else reach for num_keys in own]
            columns |= {"soft_cap": [soft_cap or 0.0] * alike, "is_biased": [alibi_slopes is not None] * alike}
            columns |= {"reach": reaches, "has_sink": [has_sink] * alike}
            units = variant_units(side_by_side([arithmetic]), **_columns(columns))
            variant = VariantRows.of_heads(alibi_slopes, sinks, num_kv_heads, num_q_heads, own, num_tokens, q.device)
        present = torch.arange(num_tokens, device=q.device) < q.new_tensor(counted)[:, None]
        rows = attention_rows(
            q[together].view(alike * num_kv_heads, -1, head_size),
            _padded([k[i] for i in together], num_tokens, repeats=not has_sink),
            _padded([v[i] for i in together], num_tokens, repeats=not has_sink),
            present.double().repeat_interleave(num_kv_heads, dim=0)[:, None],
            RowUnits.of_columns(units.repeat_interleave(num_kv_heads, dim=1).to(q.device)),
            variant,
        )
        shape = (alike, num_q_heads)
        result.out[together], result.lse[together] = rows.out.reshape(*shape, -1), rows.lse.reshape(shape)
        result.out_error[together] = rows.out_error.reshape(*shape, -1)
        result.lse_error[together] = rows.lse_error.reshape(shape)
    return result


def _of_similar_length(lengths: Sequence[int], at_least: int) -> Iterator[list[int]]:
    """Which of ``lengths`` are padded to one: those between the same powers of two, and none below ``at_least``."""
    found: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if length >= at_least:
            found.setdefault(length.bit_length(), []).append(i)
    yield from found.values()


def _padded(
    parts: Sequence[Float64[Tensor, "_ num_kv_heads size"]], num_tokens: int, *, repeats: bool
) -> Float64[Tensor, "rows num_tokens size"]:
    """``parts`` by KV head, behind their ends with their last token again, or with 0."""
    whole = parts[0].new_zeros(len(parts), num_tokens, *parts[0].shape[1:])
    for row, part in zip(whole, parts, strict=True):
        row[: len(part)] = part
        if repeats:
            row[len(part) :] = part[-1]
    return whole.transpose(1, 2).flatten(0, 1)


def attention_rows(
    q: Float64[Tensor, "rows group head_size"],
    k: Float64[Tensor, "rows num_tokens head_size"],
    v: Float64[Tensor, "rows num_tokens v_head_size"],
    present: Float64[Tensor, "rows 1 num_tokens"],
    units: RowUnits,
    variant: VariantRows | None = None,
) -> RowResult:
    """Result and bound of each row; see `attnfuzz.numerics.rows` for how they are padded.

    At most `largest_chunk` numbers at a time, but at least one query head. `variant`: where `units` has one.
    """
    num_rows, group, _ = q.shape
    token_elements = k.shape[1] * v.shape[2]
    most = largest_chunk(q.device)
    rows_at_once = max(1, most // (group * token_elements))
    heads_at_once = max(1, most // (rows_at_once * token_elements))
    if rows_at_once >= num_rows and heads_at_once >= group:
        return _attention_rows(q, k, v, present, units, variant)
    parts = []
    for first in range(0, num_rows, rows_at_once):
        rows = slice(first, first + rows_at_once)
        some = []
        for start in range(0, group, heads_at_once):
            heads = slice(start, start + heads_at_once)
            of_variant = variant.part(rows, heads) if variant is not None else None
            some.append(_attention_rows(q[rows, heads], k[rows], v[rows], present[rows], units[rows], of_variant))
        parts.append(_joined(some, dim=1))
    return _joined(parts, dim=0)


def largest_chunk(device: torch.device) -> int:
    """How many numbers an intermediate result may have."""
    return _LARGEST_CHUNK * (_LARGER_ON_A_GPU if device.type == "cuda" else 1)


def _attention_rows(
    q: Tensor, k: Tensor, v: Tensor, present: Tensor, units: RowUnits, variant: VariantRows | None
) -> RowResult:
    dots = q @ k.mT
    scores = units.scale * dots
    magnitudes = q.abs()
    products = magnitudes.add(units.query_floor).where(magnitudes > 0, 0.0) @ k.abs().add_(units.key_floor).mT
    if variant is None or units.variant is None:
        rows = bound_rows(scores, products, v, present, units, rescales=True)
        return _where_stored(rows, dots, products, magnitudes, units)
    dot_errors = units.score_product * products
    found = variant_scores(scores, dot_errors, variant, units.variant, units.per_score, units.score_constant)
    rows = bound_scored_rows(found.scores, found.errors, v, present, units, rescales=True, shift=found.shift)
    return _where_stored(rows, dots, products, magnitudes, units)


def _where_stored(rows: RowResult, dots: Tensor, products: Tensor, queries: Tensor, units: RowUnits) -> RowResult:
    """NaN is expected where a score may be stored as infinity, before the scale or after it, its error included; and
    where a query's number, of ``queries`` without signs, is too large to be stored."""
    limits = torch.minimum(units.score_limit, units.query_limit)
    if not limits.is_cuda and not bool(limits.isfinite().any()):  # a GPU would be waited for
        return rows
    stored = torch.addcmul(dots.abs(), products, units.score_product[0] / units.scale.abs())
    largest = (stored * units.scale.abs().clamp(min=1.0)).amax(-1)
    is_lost = largest * (1 + units.per_score[0, :, 0]) >= units.score_limit[:, 0]
    is_lost |= queries.amax(-1) > units.query_limit[:, 0]
    return RowResult(
        out=rows.out.masked_fill(is_lost.unsqueeze(-1), torch.nan),
        lse=rows.lse.masked_fill(is_lost, torch.nan),
        out_error=rows.out_error.masked_fill(is_lost.unsqueeze(-1), torch.inf),
        lse_error=rows.lse_error.masked_fill(is_lost, torch.inf),
    )


def _joined(parts: list[RowResult], dim: int) -> RowResult:
    return RowResult(
        out=torch.cat([part.out for part in parts], dim),
        lse=torch.cat([part.lse for part in parts], dim),
        out_error=torch.cat([part.out_error for part in parts], dim),
        lse_error=torch.cat([part.lse_error for part in parts], dim),
    )


def _columns(numbers: Mapping[str, Sequence[float]]) -> dict[str, Float64[Tensor, " rows"]]:
    return {name: torch.tensor(each, dtype=torch.float64, device="cpu") for name, each in numbers.items()}


def _check(num_q_heads: int, num_kv_heads: int, num_partials: int) -> None:
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads={num_q_heads!r} must be a multiple of num_kv_heads={num_kv_heads!r}; "
            "give every KV head the same number of query heads"
        )
    if num_partials < 1:
        raise ValueError(f"num_partials={num_partials!r} must be at least 1; use 1 for a kernel that does not split")


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

    A weight may be what the other leaves of 1, and the result a - w (a - b) with w = sigmoid(lse_b - lse_a), as
    implementations of ring attention have it: w near 1 is off by two roundings, and a - b and its product with w by one
    each, however little of a is left. That is 4 u times the largest of |a|, |b| and |a - b|, beside the last sum.
    """
    is_empty = lse.isinf()
    both_empty = is_empty.all(-1, keepdim=True)
    scores = units.scale * lse.masked_fill(is_empty, -torch.inf).unsqueeze(1)
    largest = scores.amax(-1, keepdim=True)
    scores = torch.where(is_empty.unsqueeze(1), largest, scores).masked_fill_(both_empty.unsqueeze(1), 0.0)
    present = (both_empty | ~is_empty).to(torch.float64).unsqueeze(1)
    values = outputs.masked_fill(is_empty.unsqueeze(-1), 0.0)
    rows = bound_rows(scores, torch.zeros_like(scores), values, present, units, rescales=False)
    one, other = values.unbind(-2)
    apart = torch.maximum(one.abs(), other.abs()).maximum((one - other).abs())
    of_the_rest = (4 * FLOAT32_ROUNDOFF * apart).masked_fill(is_empty.any(-1, keepdim=True), 0.0).unsqueeze(1)
    return RowResult(
        out=rows.out,
        lse=rows.lse.masked_fill(both_empty, -torch.inf),
        out_error=(rows.out_error + of_the_rest).masked_fill(both_empty.unsqueeze(-1), 0.0),
        lse_error=rows.lse_error.masked_fill(both_empty, 0.0),
    )
