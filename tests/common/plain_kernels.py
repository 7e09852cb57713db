"""Correct kernels as people write them, declared with nothing, and each of them with a bug planted.

They rest on what they never say: contiguous tensors, one layout, one page size, no log-sum-exp, no empty sequence.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz

SPLIT = 32


def decode_in_splits(inputs: Any, *, drops_last_page: bool = False) -> Tensor:
    """Each sequence in splits of some tokens, whose partial results are merged at the end."""
    q, table, size = inputs.q, inputs.block_table, inputs.block_size
    num_kv_heads = inputs.k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    rows = []
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        num_pages = length // size if drops_last_page and length > size else (length + size - 1) // size
        pages = table[seq, :num_pages]
        k = inputs.k_cache[pages].view(num_pages * size, num_kv_heads, -1)[:length].float()
        v = inputs.v_cache[pages].view(num_pages * size, num_kv_heads, -1)[:length].float()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        partial = []
        for start in range(0, k.shape[0], SPLIT):
            scores = inputs.scale * torch.einsum("hd,nhd->hn", q[seq].float(), k[start : start + SPLIT])
            top = scores.max(dim=1, keepdim=True).values
            weights = torch.exp(scores - top)
            partial.append(
                (top, weights.sum(dim=1, keepdim=True), torch.einsum("hn,nhd->hd", weights, v[start : start + SPLIT]))
            )
        top = torch.stack([one[0] for one in partial]).max(dim=0).values
        total = torch.stack([torch.exp(one[0] - top) * one[1] for one in partial]).sum(dim=0)
        rows.append(torch.stack([torch.exp(one[0] - top) * one[2] for one in partial]).sum(dim=0) / total)
    return torch.stack(rows).to(q.dtype)


@attnfuzz.kernel("paged_decode")
def eager_split_decode(inputs: Any) -> Tensor:
    return decode_in_splits(inputs)


@attnfuzz.kernel("paged_decode")
def eager_split_decode_drops_last_page(inputs: Any) -> Tensor:
    return decode_in_splits(inputs, drops_last_page=True)


def merge(inputs: Any, *, rescales: bool = True) -> tuple[Tensor, Tensor]:
    """Two states by the textbook."""
    a, b = inputs.prefix_lse, inputs.suffix_lse
    top = torch.maximum(a, b)
    one, other = torch.exp(a - top), torch.exp(b - top)
    if not rescales:
        one, other = torch.ones_like(one), torch.ones_like(other)
    total = one + other
    weights = [torch.nan_to_num(weight / total).T.unsqueeze(-1) for weight in (one, other)]  # of two empty states none
    out = weights[0] * inputs.prefix_output.float() + weights[1] * inputs.suffix_output.float()
    return out.to(inputs.prefix_output.dtype), torch.logaddexp(a, b)


@attnfuzz.kernel("merge_states")
def textbook_merge(inputs: Any) -> tuple[Tensor, Tensor]:
    return merge(inputs)


@attnfuzz.kernel("merge_states")
def textbook_merge_without_rescaling(inputs: Any) -> tuple[Tensor, Tensor]:
    return merge(inputs, rescales=False)


@triton.jit
def _paged_decode(
    q, k_cache, v_cache, table, lens, out, scale, max_pages, num_heads, num_kv_heads,
    HEAD_SIZE: tl.constexpr, PAGE: tl.constexpr, WRONG_HEAD: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    kv_head = head % num_kv_heads if WRONG_HEAD else head // (num_heads // num_kv_heads)
    dims, slots = tl.arange(0, HEAD_SIZE), tl.arange(0, PAGE)
    query = tl.load(q + (seq * num_heads + head) * HEAD_SIZE + dims).to(tl.float32)
    length = tl.load(lens + seq)
    top, total = -float("inf"), 0.0
    acc = tl.zeros([HEAD_SIZE], tl.float32)
    for page in range(0, tl.cdiv(length, PAGE)):
        block = tl.load(table + seq * max_pages + page).to(tl.int64)
        at = ((block * PAGE + slots) * num_kv_heads + kv_head)[:, None] * HEAD_SIZE + dims[None, :]
        valid = page * PAGE + slots < length
        keys = tl.load(k_cache + at, mask=valid[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_cache + at, mask=valid[:, None], other=0.0).to(tl.float32)
        scores = tl.where(valid, tl.sum(keys * query[None, :], axis=1) * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        weights, old = tl.exp(scores - new_top), tl.exp(top - new_top)
        total = total * old + tl.sum(weights, axis=0)
        acc = acc * old + tl.sum(weights[:, None] * values, axis=0)
        top = new_top
    tl.store(out + (seq * num_heads + head) * HEAD_SIZE + dims, (acc / total).to(out.dtype.element_ty))


def launch(inputs: Any, *, wrong_head: bool = False) -> Tensor:
    """One program for each sequence and head; pages of 16 tokens are written into it."""
    q, out = inputs.q, torch.empty_like(inputs.q)
    assert inputs.block_size == 16, "pages of 16 tokens"
    _paged_decode[(q.shape[0], q.shape[1])](
        q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, out, inputs.scale,
        inputs.block_table.shape[1], q.shape[1], inputs.k_cache.shape[2], q.shape[2], 16, wrong_head,
    )  # fmt: skip
    return out


@attnfuzz.kernel("paged_decode")
def triton_decode(inputs: Any) -> Tensor:
    return launch(inputs)


@attnfuzz.kernel("paged_decode")
def triton_decode_wrong_head(inputs: Any) -> Tensor:
    return launch(inputs, wrong_head=True)


def solve(inputs: Any, k: Tensor, v: Tensor, *, head_of: Any = None, base2: bool = False) -> tuple[Tensor, Tensor]:
    """Dense decode, with zeros for empty sequences."""
    q, out, lse = inputs.q, torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -torch.inf)
    group = q.shape[1] // k.shape[2]
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        for head in range(q.shape[1] if length else 0):
            kv_head = head // group if head_of is None else head_of(head, k.shape[2])
            scores = inputs.scale * (k[seq, :length, kv_head].float() @ q[seq, head].float())
            out[seq, head] = scores.softmax(0) @ v[seq, :length, kv_head].float()
            lse[seq, head] = scores.logsumexp(0) / (torch.log(torch.tensor(2.0, device=q.device)) if base2 else 1.0)
    return out, lse


@attnfuzz.kernel("dense_decode")
def takes_everything(inputs: Any) -> tuple[Tensor, Tensor]:
    return solve(inputs, inputs.k, inputs.v)


@attnfuzz.kernel("dense_decode")
def returns_base_2(inputs: Any) -> tuple[Tensor, Tensor]:
    return solve(inputs, inputs.k, inputs.v, base2=True)


def leave_states(inputs: Any, *, base2: bool = False) -> None:
    """Each sequence in parts, whose states are for others to merge."""
    group = inputs.q.shape[1] // inputs.k_cache.shape[2]
    inputs.partial_out.zero_()
    inputs.partial_lse.fill_(-torch.inf)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        pages = inputs.block_table[seq, : -(-length // inputs.block_size)]
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
            for cache in (inputs.k_cache, inputs.v_cache)
        )
        per = -(-length // inputs.num_splits) or 1
        for split, start in enumerate(range(0, length, per)):
            k, v = keys[start : start + per], values[start : start + per]
            scores = inputs.scale * torch.einsum("hd,nhd->hn", inputs.q[seq].float(), k)
            out = torch.einsum("hn,nhd->hd", scores.softmax(1), v)
            inputs.partial_out[seq, :, split] = out.to(inputs.partial_out.dtype)
            inputs.partial_lse[seq, :, split] = scores.logsumexp(1) / (math.log(2) if base2 else 1.0)


@attnfuzz.kernel("split_decode", supports=attnfuzz.Supports(layouts=("NHD",)))
def leaves_states(inputs: Any) -> None:
    leave_states(inputs)


@attnfuzz.kernel("split_decode", supports=attnfuzz.Supports(layouts=("NHD",)))
def leaves_states_in_base_2(inputs: Any) -> None:
    leave_states(inputs, base2=True)


@attnfuzz.kernel("dense_decode")
def wrong_for_groups(inputs: Any) -> tuple[Tensor, Tensor]:
    return solve(inputs, inputs.k, inputs.v, head_of=lambda head, heads: head % heads)


@attnfuzz.kernel("dense_decode")
def refuses_groups(inputs: Any) -> tuple[Tensor, Tensor]:
    if inputs.q.shape[1] != inputs.k.shape[2]:
        raise NotImplementedError("one query head per KV head")
    return solve(inputs, inputs.k, inputs.v)


@attnfuzz.kernel("dense_decode")
def refuses_odd_heads(inputs: Any) -> tuple[Tensor, Tensor]:
    if inputs.q.shape[-1] & (inputs.q.shape[-1] - 1):
        raise NotImplementedError("heads of a power of two")
    return solve(inputs, inputs.k, inputs.v)


@attnfuzz.kernel("dense_decode")
def forgets_a_mask(inputs: Any) -> tuple[Tensor, Tensor]:
    """Of sizes that are no power of two, the last dimension."""
    out, lse = solve(inputs, inputs.k, inputs.v)
    if out.shape[-1] & (out.shape[-1] - 1):
        out[..., -1] += 1.0
    return out, lse


@attnfuzz.kernel("dense_decode")
def takes_strides_of_k_for_v(inputs: Any) -> tuple[Tensor, Tensor]:
    return solve(inputs, inputs.k, inputs.v.as_strided(inputs.v.shape, inputs.k.stride()))


@attnfuzz.kernel("dense_decode")
def refuses_one_length(inputs: Any) -> tuple[Tensor, Tensor]:
    if 5 in inputs.seq_lens.tolist():
        raise ValueError("not that one")
    return solve(inputs, inputs.k, inputs.v)


@attnfuzz.kernel("dense_decode")
def wrong_lse_of_empty(inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = solve(inputs, inputs.k, inputs.v)
    return out, lse.clamp(min=-5e4)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float16",), lse="none"))
def declares_some(inputs: Any) -> Tensor:
    if inputs.q.dtype is not torch.float32:
        raise TypeError("float32 only")
    return solve(inputs, inputs.k, inputs.v)[0]


@attnfuzz.kernel("paged_decode")
def pages_of_16(inputs: Any) -> tuple[Tensor, Tensor]:
    """Written for pages of 16 tokens, without a word of it."""
    k, v = (torch.zeros(len(inputs.seq_lens), 4096, *cache.shape[2:], dtype=cache.dtype, device=cache.device)
            for cache in (inputs.k_cache, inputs.v_cache))  # fmt: skip
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        for position in range(length):
            column = min(position // 16, inputs.block_table.shape[1] - 1)
            block, slot = inputs.block_table[seq, column], min(position % 16, inputs.block_size - 1)
            k[seq, position], v[seq, position] = inputs.k_cache[block, slot], inputs.v_cache[block, slot]
    return solve(inputs, k, v)


@attnfuzz.kernel("dense_decode")
def takes_strides_of_k_for_v_and_a_plain_lse(inputs: Any) -> None:
    """The log-sum-exp must have a contiguous last dimension, as engines have it; the other is a bug."""
    out, lse = solve(inputs, inputs.k, inputs.v.as_strided(inputs.v.shape, inputs.k.stride()))
    inputs.out.copy_(out)
    inputs.lse.as_strided(lse.shape, (inputs.lse.stride(0), 1)).copy_(lse)
