"""The float64 reference of attention: the definition, row by row, on logical positions.

It knows no cache, no block table, no mask and no tile: a row's keys are simply all there is to attend to. Oracles
take their references from `attnfuzz.trials.expectations`, many cases at once, which is tested against this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase
from attnfuzz.values.attention import LogicalAttention
from attnfuzz.values.tokens import on_device


@dataclass(frozen=True, slots=True)
class ExactResult:
    """The exact result of a case. ``lse``: natural log-sum-exp of the scaled scores, whatever a kernel's base."""

    out: Float64[Tensor, "rows num_q_heads v_head_size"]
    lse: Float64[Tensor, "rows num_q_heads"]


def attention_reference(case: AttentionCase, values: LogicalAttention) -> ExactResult:
    """``out = softmax(scale · q Kᵀ) V`` and ``lse`` per row; without keys ``out = 0`` and ``lse = -inf``.

    Query head ``h`` reads KV head ``h // gqa_ratio``: the heads are grouped as ``[num_kv_heads, gqa_ratio]``. For what
    a case's variant changes see `attnfuzz.problems.variants`: a sink is one more key, with a value of 0.
    """
    case, values = unmasked(case, values)
    values = values.dequantised()
    out = values.q.new_zeros((*values.q.shape[:2], case.value_size), dtype=torch.float64)
    lse = torch.full(values.q.shape[:2], float("-inf"), dtype=torch.float64, device=values.q.device)
    q = values.q.double().view(case.num_rows, case.num_kv_heads, case.gqa_ratio, case.head_size)
    per_head = {
        name: torch.tensor(numbers, dtype=torch.float64, device=q.device).view(case.num_kv_heads, case.gqa_ratio, 1)
        for name, numbers in case.variant.per_head_numbers(case.num_q_heads, case.values.seed).items()
    }
    for row, (seq, length) in enumerate(zip(case.row_seqs, case.row_lens, strict=True)):
        if length == 0 and not case.variant.has_weighty_sinks:
            continue
        visible = slice(max(0, length - (case.variant.window or length)), length)
        k, v = (tokens[visible].double().transpose(0, 1) for tokens in values.sequence(seq))  # heads first
        scores = case.scale * (q[row] @ k.mT)  # [num_kv_heads, gqa_ratio, keys]
        if case.variant.soft_cap is not None:
            scores = case.variant.soft_cap * torch.tanh(scores / case.variant.soft_cap)
        if "alibi_slopes" in per_head:
            scores = scores + per_head["alibi_slopes"] * torch.arange(1 - k.shape[1], 1, device=q.device)
        if "sinks" in per_head:
            scores = torch.cat((scores, per_head["sinks"]), dim=-1)
            v = torch.cat((v, v.new_zeros(len(v), 1, case.value_size)), dim=1)
        out[row] = (torch.softmax(scores, dim=-1) @ v).flatten(0, 1)
        lse[row] = torch.logsumexp(scores, dim=-1).flatten()
    return ExactResult(out, lse)


def unmasked(case: AttentionCase, values: LogicalAttention) -> tuple[AttentionCase, LogicalAttention]:
    """This attention without a mask: each query token as the only one of a sequence of the keys that it sees."""
    seen = case.rows_seen
    if seen is None:
        return case, values
    starts = (0, *accumulate(row.count(1) for row in seen))
    keys = [values.starts[seq] + t for seq, row in zip(case.row_seqs, seen, strict=True) for t in _ones(row)]
    chosen = on_device(torch.tensor(keys, dtype=torch.int64, device="cpu"), values.k.device)
    alike = {name: getattr(case, name) for name in PagedDecodeCase.__struct_fields__ if name != "strides"}
    plain = msgspec.structs.replace(case.values, needles=())  # whose keys are among the values already
    rows = PagedDecodeCase(**{**alike, "seq_lens": tuple(row.count(1) for row in seen), "values": plain})
    return rows, replace(values, k=values.k[chosen], v=values.v[chosen], starts=starts)


def _ones(row: bytes) -> Iterator[int]:
    return (t for t, is_seen in enumerate(row) if is_seen)


def row_weights(
    case: AttentionCase, row: int, head: int, dots: Float64[Tensor, " length"]
) -> tuple[Float64[Tensor, " length"], Float64[Tensor, ""]]:
    """Weights and LSE of one query head, given ``dots = scale · q Kᵀ`` of a row's keys in order of position.

    A key that the query does not see has weight 0; with a sink the weights sum to less than 1.
    """
    scores, sink = _scores(case, row, head, dots)
    terms = torch.cat((scores, sink)) if len(sink) else scores
    return terms.softmax(0)[: len(dots)], terms.logsumexp(0)


def row_log_weights(
    case: AttentionCase, row: int, head: int, dots: Float64[Tensor, " length"]
) -> tuple[Float64[Tensor, " length"], Float64[Tensor, ""]]:
    """Logarithms of the weights before they are divided by their sum, and the logarithm of that: see `row_weights`."""
    scores, sink = _scores(case, row, head, dots)
    return scores, (torch.cat((scores, sink)) if len(sink) else scores).logsumexp(0)


def _scores(
    case: AttentionCase, row: int, head: int, dots: Float64[Tensor, " length"]
) -> tuple[Float64[Tensor, " length"], Float64[Tensor, " sinks"]]:
    """The scores with their variant applied, and the sink that stands beside them, if any."""
    variant, length = case.variant, len(dots)
    numbers = variant.per_head_numbers(case.num_q_heads, case.values.seed)
    scores = dots if variant.soft_cap is None else variant.soft_cap * torch.tanh(dots / variant.soft_cap)
    if "alibi_slopes" in numbers or variant.window is not None:
        distance = torch.arange(1 - length, 1, dtype=torch.float64, device=dots.device)
        if "alibi_slopes" in numbers:
            scores = scores + numbers["alibi_slopes"][head] * distance
        if variant.window is not None:
            scores = scores.masked_fill(distance <= -variant.window, float("-inf"))
    if (seen := case.seen(row)) is not None:
        is_seen = torch.tensor(list(seen[:length].ljust(length, b"\1")), dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~is_seen, float("-inf"))
    return scores, scores.new_tensor(numbers["sinks"][head : head + 1]) if "sinks" in numbers else scores[:0]


def merge_all(
    out: Float[Tensor, "*rows states head_size"], lse: Float[Tensor, "*rows states"]
) -> tuple[Float64[Tensor, "*rows head_size"], Float64[Tensor, "*rows"]]:
    """Merge the states of each row in float64. ``lse`` is natural; -inf is an empty state, whose output is not used.

    NaN anywhere else, and +inf, give NaN.
    """
    lse = lse.double()
    top = lse.amax(-1)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp(lse - top[..., None])
    total = weights.sum(-1)
    used = out.to(torch.float64, copy=True).masked_fill_((lse == float("-inf"))[..., None], 0.0)
    merged = (weights[..., None, :] @ used)[..., 0, :] / torch.where(total == 0, 1.0, total)[..., None]
    return merged, top + torch.log(total)
