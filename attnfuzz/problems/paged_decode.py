"""paged_decode: K and V lie in pages of a cache that all sequences share, found through a block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from attnfuzz.problems.allocation import Allocator, allocate
from attnfuzz.problems.block_table import block_table_rows
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.layouts import split_interleaved, token_views
from attnfuzz.problems.reference import Expected, attention_reference
from attnfuzz.problems.supports import Layout, Supports
from attnfuzz.values.attention import LogicalAttention, attention_values, token_index

__all__ = ["PagedDecodeInputs", "build", "paged_tensors", "reference"]


@dataclass(slots=True)
class PagedDecodeInputs:
    """What a paged_decode kernel gets. The caches have the shapes of ``layout``.

    Dead memory: slots past a sequence's last token, pages that no sequence owns.
    """

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    block_size: int
    layout: Layout
    out: Float[Tensor, "num_seqs num_q_heads head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]


def build(
    case: PagedDecodeCase, allocator: Allocator, supports: Supports, values: LogicalAttention | None = None
) -> PagedDecodeInputs:
    """Inputs of ``case`` in memory of ``allocator``; ``values`` saves drawing the numbers again."""
    del supports  # what a kernel supports shapes the cases, not their tensors
    tensors = paged_tensors(case, allocator, values or attention_values(case, allocator.device))
    return PagedDecodeInputs(scale=case.scale, block_size=case.block_size, layout=case.layout, **tensors)


def paged_tensors(case: PagedDecodeCase, allocator: Allocator, values: LogicalAttention) -> dict[str, Tensor]:
    """All tensors of ``case`` by field name, live elements written; split_decode shares them."""
    tensors = allocate(case, allocator)
    if case.layout == "interleaved":
        tensors["k_cache"], tensors["v_cache"] = split_interleaved(tensors.pop("kv_cache"))
    table = torch.tensor(block_table_rows(case), device=allocator.device)
    tensors["block_table"].copy_(table)
    tensors["seq_lens"].copy_(torch.tensor(case.seq_lens))
    tensors["q"].copy_(values.q)
    tokens = token_index(case, allocator.device)
    pages = table[tokens.seq, tokens.position // case.block_size]
    offsets = tokens.position % case.block_size
    k_slots, v_slots = token_views(tensors["k_cache"], tensors["v_cache"], case.layout)
    k_slots[pages, offsets] = values.k.view(len(values.k), *k_slots.shape[2:])
    v_slots[pages, offsets] = values.v
    return tensors


def reference(case: PagedDecodeCase, values: LogicalAttention) -> Expected:
    """``out [num_seqs num_q_heads head_size]`` and natural ``lse [num_seqs num_q_heads]`` in float64."""
    return attention_reference(case, values)
