"""Kernels that reach outside of a tensor by one element, or as bugs of the past did; executors load them from here."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz
from attnfuzz.inputs.layouts import token_views
from attnfuzz.memory.arena import span

REACH = {"access": ("read", "write"), "side": ("past", "before")}
PAGED = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "out", "lse", "workspace")
QUERIES = (*PAGED, "cu_seqlens_q")
DENSE = ("q", "k", "v", "seq_lens", "out", "lse", "workspace")
SPLIT = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "partial_out", "partial_lse", "workspace")
MERGE = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output", "output_lse", "workspace")


@triton.jit
def touch(pointer, offset, WRITE: tl.constexpr):
    if WRITE:
        tl.store(pointer + offset, 0)
    else:
        # A compiler leaves other loads out, whose value nobody needs.
        tl.load(pointer + offset, volatile=True)


def reach(inputs: Any, tensor: str, access: str, side: str) -> None:
    """One element beyond an edge of the tensor of that name, or of a workspace."""
    device = next(getattr(inputs, name).device for name in ("out", "partial_out", "output") if hasattr(inputs, name))
    reached: Tensor = torch.empty(4, 5, device=device) if tensor == "workspace" else getattr(inputs, tensor)
    offset = -1 if side == "before" else span(tuple(reached.shape), reached.stride())
    touch[(1,)](reached, offset, WRITE=access == "write")


@attnfuzz.kernel("paged_decode", options={"tensor": PAGED, **REACH})
def paged(inputs: Any, *, tensor: str, access: str, side: str) -> None:
    reach(inputs, tensor, access, side)


@attnfuzz.kernel("paged_attention", options={"tensor": QUERIES, **REACH})
def queries(inputs: Any, *, tensor: str, access: str, side: str) -> None:
    reach(inputs, tensor, access, side)


@attnfuzz.kernel("dense_decode", options={"tensor": DENSE, **REACH})
def dense(inputs: Any, *, tensor: str, access: str, side: str) -> None:
    reach(inputs, tensor, access, side)


@attnfuzz.kernel("split_decode", options={"tensor": SPLIT, **REACH})
def split(inputs: Any, *, tensor: str, access: str, side: str) -> None:
    reach(inputs, tensor, access, side)


@attnfuzz.kernel("merge_states", options={"tensor": MERGE, **REACH})
def merge(inputs: Any, *, tensor: str, access: str, side: str) -> None:
    reach(inputs, tensor, access, side)


@attnfuzz.kernel("paged_decode")
def edges_only(inputs: Any) -> None:
    """Touches the first and the last element of everything, which is its right."""
    for name in PAGED[:-1]:
        tensor = getattr(inputs, name)
        for offset in (0, span(tuple(tensor.shape), tensor.stride()) - 1):
            touch[(1,)](tensor, offset, WRITE=name in ("out", "lse"))


@attnfuzz.kernel("paged_decode")
def wants_aligned_pointers(inputs: Any) -> None:
    if inputs.q.data_ptr() % 16:
        raise ValueError("q must be aligned to 16 bytes")


kept: list[Tensor] = []


@attnfuzz.kernel("paged_decode")
def keeps_its_workspace(inputs: Any) -> None:
    """Allocates at the first call only, and writes to all of it at each."""
    if not kept:
        kept.append(torch.empty(1000, 3))
    kept[0].add_(1)


@triton.jit
def attend(
    q, k_cache, v_cache, block_table, seq_lens, out, lse, scale,
    k_page, k_slot, k_head, table_row, num_q_heads, gqa_ratio, num_seqs,
    D: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + seq)
    if BUG == "next length":
        length += 0 * tl.load(seq_lens + seq + 1)
    dim = tl.arange(0, PADDED)
    row = (seq * num_q_heads + head) * D
    query = tl.load(q + row + dim, mask=dim < D, other=0.0).to(tl.float32)
    largest, total, average = float("-inf"), 0.0, tl.zeros([PADDED], tl.float32)
    for first in range(0, length, TILE):
        token = first + tl.arange(0, TILE)
        is_live = token < length
        entry = block_table + seq * table_row + token // PAGE
        page = tl.load(entry) if BUG == "table" else tl.load(entry, mask=is_live, other=0)
        place = page.to(tl.int64) * k_page + token % PAGE * k_slot + head // gqa_ratio * k_head
        place = place[:, None] + dim[None, :]
        inside = is_live[:, None] & (dim < D)[None, :]
        k = tl.load(k_cache + place, mask=is_live[:, None] if BUG == "columns" else inside, other=0.0).to(tl.float32)
        k = tl.where(inside, k, 0.0)
        scores = tl.where(is_live, tl.sum(k * query[None, :], 1) * scale, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp(scores - highest)
        v = tl.load(v_cache + place, mask=inside, other=0.0).to(tl.float32)
        average = average * tl.exp(largest - highest) + tl.sum(weights[:, None] * v, 0)
        total = total * tl.exp(largest - highest) + tl.sum(weights, 0)
        largest = highest
    average = average / tl.where(length > 0, total, 1.0)
    tl.store(out + row + dim, average.to(out.dtype.element_ty), mask=dim < D)
    tl.store(lse + seq * num_q_heads + head, tl.where(length > 0, largest + tl.log(total), float("-inf")))


SUPPORTS = attnfuzz.Supports(layouts=("NHD",), strides="contiguous", head_sizes=(16, 24), block_sizes=(1, 4, 16))


def launch(inputs: Any, bug: str) -> None:
    num_seqs, num_q_heads, head_size = inputs.q.shape
    k_cache, v_cache = token_views(inputs.k_cache, inputs.v_cache, inputs.layout)
    attend[(num_seqs, num_q_heads)](
        inputs.q, k_cache, v_cache, inputs.block_table, inputs.seq_lens, inputs.out, inputs.lse, inputs.scale,
        *k_cache.stride()[:3], inputs.block_table.stride(0), num_q_heads, num_q_heads // k_cache.shape[2], num_seqs,
        D=head_size, PADDED=triton.next_power_of_2(head_size), PAGE=inputs.block_size, TILE=16, BUG=bug,
    )  # fmt: skip


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def masked(inputs: Any) -> None:
    launch(inputs, "none")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def reads_table_past_the_last_tile(inputs: Any) -> None:
    """As flashinfer did before pull request 4365: entries of the last, partial tile are read without a mask."""
    launch(inputs, "table")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def reads_padded_columns(inputs: Any) -> None:
    """K is loaded up to the next power of two of the head size; what is too much is masked out later."""
    launch(inputs, "columns")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def reads_next_length(inputs: Any) -> None:
    """Lengths are read as differences of neighbours would be: that of the last sequence has none."""
    launch(inputs, "next length")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def wrong_and_reaching(inputs: Any) -> None:
    launch(inputs, "next length")
    inputs.out.add_(1)


_CALLS = itertools.count(1)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def restless(inputs: Any) -> None:
    launch(inputs, "none")
    inputs.out.mul_(1 + 2.0**-9 * next(_CALLS))


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def restless_and_reaching(inputs: Any) -> None:
    """What lies outside is another number each time, for which the count stands."""
    launch(inputs, "next length")
    inputs.out.mul_(1 + 2.0**-9 * next(_CALLS))


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def aligned_only(inputs: Any) -> None:
    if inputs.seq_lens.data_ptr() % 16:
        raise ValueError("seq_lens must be aligned to 16 bytes")
    launch(inputs, "none")
