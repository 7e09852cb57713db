"""Kernels that say little of what they take: some rest on something, silently, and some only look as if they did."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz


def solve(inputs: Any, q: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Dense decode in float32, with zeros where there are no keys."""
    q = inputs.q if q is None else q
    group = q.shape[1] // inputs.k.shape[2]
    out, lse = torch.zeros_like(inputs.q), torch.full_like(inputs.lse, -math.inf)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        if length:
            k, v = (x[seq, :length].float().repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
            scores = inputs.scale * torch.einsum("hd,thd->ht", q[seq].float(), k)
            out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(out.dtype)
            lse[seq] = scores.logsumexp(-1)
    return out, lse


def as_if(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """What a kernel reads that takes the strides to be these."""
    return torch.as_strided(tensor, tensor.shape, strides)


@attnfuzz.kernel("dense_decode")
def ignores_strides_of_q(inputs: Any) -> Any:
    return solve(inputs, as_if(inputs.q, torch.empty(inputs.q.shape, device="meta").stride()))


_PLANS: dict[tuple[Any, ...], tuple[int, ...]] = {}


@attnfuzz.kernel("dense_decode")
def keeps_a_plan_without_strides(inputs: Any) -> Any:
    """As a graph that is kept under a key of shapes and dtypes."""
    strides = _PLANS.setdefault((inputs.q.shape, inputs.k.shape, inputs.q.dtype), inputs.q.stride())
    try:
        return solve(inputs, as_if(inputs.q, strides))
    except RuntimeError:  # of other strides there is less to read
        return torch.zeros_like(inputs.q), torch.zeros_like(inputs.lse)


@triton.jit
def _store(result, out, stride_seq, stride_head, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    i_s, i_h = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, WIDTH)
    row = i_s.to(tl.int64) * tl.num_programs(1) + i_h
    b_out = tl.load(result + row * SIZE + o_d, mask=o_d < SIZE)  # [WIDTH]
    tl.store(out + i_s.to(tl.int64) * stride_seq + i_h.to(tl.int64) * stride_head + o_d, b_out, mask=o_d < SIZE)


@attnfuzz.kernel("dense_decode")
def stores_with_strides_of_q(inputs: Any) -> Any:
    """Right where out lies as q does."""
    result, lse = solve(inputs)
    result = result.contiguous()
    size = result.shape[2]
    strides = inputs.q.stride()[:2]
    _store[result.shape[:2]](result, inputs.out, *strides, size, triton.next_power_of_2(size))
    return inputs.out, lse


@attnfuzz.kernel("dense_decode")
def no_lse_of_short_sequences(inputs: Any) -> None:
    """A fast path that combines nothing."""
    out, lse = solve(inputs)
    inputs.out.copy_(out)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        if length == 0 or length > 4:
            inputs.lse[seq] = lse[seq]


@attnfuzz.kernel("dense_decode")
def base_2_of_long_sequences(inputs: Any) -> Any:
    out, lse = solve(inputs)
    return out, torch.where((inputs.seq_lens > 1)[:, None], lse / math.log(2), lse)


@attnfuzz.kernel("dense_decode")
def base_2_of_full_rows(inputs: Any) -> Any:
    """Of the sequences that fill K: those of a batch of one, and the longest of others."""
    out, lse = solve(inputs)
    return out, torch.where((inputs.seq_lens == inputs.k.shape[1])[:, None], lse / math.log(2), lse)


@attnfuzz.kernel("dense_decode")
def no_lse_of_empty_sequences(inputs: Any) -> None:
    out, lse = solve(inputs)
    inputs.out.copy_(out)
    for seq in inputs.seq_lens.nonzero().flatten().tolist():
        inputs.lse[seq] = lse[seq]


@attnfuzz.kernel("dense_decode")
def divides_by_nothing(inputs: Any) -> Any:
    """0/0 where there are no keys, in all of the ways in which that occurs."""
    out, lse = solve(inputs)
    out[inputs.seq_lens == 0] = math.nan
    return out, lse


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(empty_sequences=True))
def divides_by_nothing_and_promises(inputs: Any) -> Any:
    out, lse = solve(inputs)
    out[inputs.seq_lens == 0] = math.nan
    return out, lse


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(strides="contiguous"))
def takes_any_cache_for_nhd_and_divides_by_nothing(inputs: Any) -> Any:
    """Two questions, neither of which is answered by a case that has both."""
    size, out, lse = inputs.block_size, torch.zeros_like(inputs.q), torch.full_like(inputs.lse, -math.inf)
    strides = torch.empty(inputs.k_cache.shape, device="meta").stride()
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        pages = inputs.block_table[seq, : -(-length // size)].long()
        caches = (as_if(cache, strides) for cache in (inputs.k_cache, inputs.v_cache))
        k, v = (cache[pages].flatten(0, 1)[:length].float() for cache in caches)
        k, v = (x.repeat_interleave(inputs.q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = inputs.scale * torch.einsum("hd,thd->ht", inputs.q[seq].float(), k)
        out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(out.dtype) if length else math.nan
        lse[seq] = scores.logsumexp(-1)
    return out, lse


@attnfuzz.kernel("dense_decode")
def returns_float32(inputs: Any) -> Any:
    out, lse = solve(inputs)
    return out.float(), lse


@attnfuzz.kernel("merge_states", supports=attnfuzz.Supports(empty_state_outputs="anything"))
def weighs_what_nobody_wrote(inputs: Any) -> Any:
    """0 x NaN, where the output of an empty state may hold anything."""
    lses = [torch.where(one == math.inf, -math.inf, one) for one in (inputs.prefix_lse, inputs.suffix_lse)]
    total = torch.logaddexp(*lses)
    safe = torch.where(total == -math.inf, 0.0, total)
    outputs = (inputs.prefix_output, inputs.suffix_output)
    parts = [(one - safe).exp().t()[..., None] * out.float() for one, out in zip(lses, outputs, strict=True)]
    return (parts[0] + parts[1]).to(inputs.prefix_output.dtype), total


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(lse="none", empty_sequences=False))
def weighs_an_idle_split_of_two_sequences(inputs: Any) -> Any:
    """0 x NaN, where the second split has no work."""
    partials = torch.empty(2, *inputs.q.shape)
    partials[0] = solve(inputs)[0]
    if len(inputs.seq_lens) != 2:
        partials[1] = 0.0
    return (partials[0] + 0.0 * partials[1]).to(inputs.q.dtype)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(lse="none"))
def takes_the_sum_for_the_mean(inputs: Any) -> Any:
    """Wrong wherever it computes."""
    return solve(inputs)[0] * inputs.seq_lens[:, None, None]
