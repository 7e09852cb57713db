"""The tensors of a shape, drawn at random on the device, in as many sets as the L2 cache cannot hold together."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from attnfuzz.bench.kernels.shapes import Shape, bytes_to_move
from attnfuzz.problems.supports import Layout, LseLayout

__all__ = ["AttentionTensors", "MergeTensors", "draw_tensors", "in_layout", "sets_for_cold_l2"]

_TIMES_L2 = 4
"""Of the L2 cache's size all sets together should have: its replacement does not simply drop the oldest."""

_MOST_SETS = 2048
_BYTES_OF_A_VECTOR = 16


@dataclass
class AttentionTensors:
    """A batch over a paged cache in the NHD layout, whose pages lie in random order."""

    shape: Shape
    q: Float[Tensor, "num_tokens num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks block_size num_kv_heads head_size"]
    v_cache: Float[Tensor, "num_blocks block_size num_kv_heads head_size"]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    cu_seqlens_q: Int32[Tensor, " num_seqs_plus_1"]

    @cached_property
    def dense(
        self,
    ) -> tuple[
        Float[Tensor, "num_seqs max_seq_len num_kv_heads head_size"],
        Float[Tensor, "num_seqs max_seq_len num_kv_heads head_size"],
    ]:
        """K and V of each sequence in one piece, as wide as ``room`` says; beyond a length there is whatever."""
        width = max(self.shape.longest, self.shape.room)
        return self._gather(self.k_cache, width), self._gather(self.v_cache, width)

    @cached_property
    def packed(
        self,
    ) -> tuple[
        Float[Tensor, "total_tokens num_kv_heads head_size"], Float[Tensor, "total_tokens num_kv_heads head_size"]
    ]:
        """K and V of all tokens, one sequence after another."""
        k, v = (self._gather(cache, self.shape.longest) for cache in (self.k_cache, self.v_cache))
        kept = torch.arange(self.shape.longest, device=self.q.device) < self.seq_lens[:, None]
        return k[kept], v[kept]

    def sequence(
        self, seq: int, num_tokens: int
    ) -> tuple[Float[Tensor, "num_tokens num_kv_heads head_size"], Float[Tensor, "num_tokens num_kv_heads head_size"]]:
        """K and V of the first tokens of one sequence."""
        pages = self.block_table[seq, : -(-num_tokens // self.shape.block_size)].long()
        return self.k_cache[pages].flatten(0, 1)[:num_tokens], self.v_cache[pages].flatten(0, 1)[:num_tokens]

    def _gather(self, cache: Tensor, width: int) -> Tensor:
        pages = self.block_table[:, : -(-width // self.shape.block_size)].long()
        return cache[pages].flatten(1, 2)[:, :width].contiguous()


@dataclass
class MergeTensors:
    """Two states of each token and head; LSEs are natural logarithms, tokens first."""

    shape: Shape
    prefix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    suffix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    prefix_lse: Float32[Tensor, "num_tokens num_q_heads"]
    suffix_lse: Float32[Tensor, "num_tokens num_q_heads"]

    def lses(
        self, layout: LseLayout
    ) -> tuple[Float32[Tensor, "lse_rows lse_columns"], Float32[Tensor, "lse_rows lse_columns"]]:
        """Both, contiguous in ``layout``."""
        both = (self.prefix_lse, self.suffix_lse)
        return both if layout == "TH" else (both[0].T.contiguous(), both[1].T.contiguous())


def sets_for_cold_l2(shape: Shape, l2_bytes: int) -> int | None:
    """How many sets make each be read from memory when its turn comes; None if too many would be needed."""
    sets = max(1, math.ceil(_TIMES_L2 * l2_bytes / bytes_to_move(shape)))
    return sets if sets <= _MOST_SETS else None


def draw_tensors(shape: Shape, device: str, seed: int) -> AttentionTensors | MergeTensors:
    """One set. About normal numbers, never zeros, on which hardware is faster than on data."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, dtype: str = shape.dtype) -> Tensor:
        return torch.randn(size, dtype=getattr(torch, dtype), device=device, generator=generator)

    if shape.kind == "merge":
        size = (shape.num_tokens, shape.num_q_heads)
        outputs = normal(*size, shape.head_size), normal(*size, shape.head_size)
        return MergeTensors(shape, *outputs, normal(*size, dtype="float32"), normal(*size, dtype="float32"))
    pages = [-(-length // shape.block_size) for length in shape.seq_lens]
    cache = (max(1, sum(pages)), shape.block_size, shape.num_kv_heads, shape.head_size)
    return AttentionTensors(
        shape=shape,
        q=normal(sum(shape.queries), shape.num_q_heads, shape.head_size),
        k_cache=normal(*cache),
        v_cache=normal(*cache),
        block_table=_block_table(shape, pages, seed).to(device),
        seq_lens=torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *itertools.accumulate(shape.queries)], dtype=torch.int32, device=device),
    )


def in_layout(k_cache: Tensor, v_cache: Tensor, layout: Layout) -> dict[str, Tensor]:
    """NHD caches as the tensors of another layout (see ``attnfuzz.kernels.common.layouts``), by name."""
    if layout == "interleaved":
        return {"kv_cache": torch.stack((k_cache, v_cache), dim=1)}
    if layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    elif layout == "packed":
        x = _BYTES_OF_A_VECTOR // k_cache.element_size()
        k_cache = k_cache.view(*k_cache.shape[:-1], -1, x).permute(0, 2, 3, 1, 4)
        v_cache = v_cache.permute(0, 2, 3, 1)
    return {"k_cache": k_cache.contiguous(), "v_cache": v_cache.contiguous()}


def _block_table(shape: Shape, pages: list[int], seed: int) -> Int32[Tensor, "num_seqs max_blocks_per_seq"]:
    """Physical pages in random order; what no sequence needs names some page, too."""
    total = max(1, sum(pages))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu").int()
    width = max(1, -(-max(shape.longest, shape.room) // shape.block_size))
    table = order[torch.arange(len(pages) * width, device="cpu") % total].view(len(pages), width)
    starts = [0, *itertools.accumulate(pages)]
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        table[row, : end - start] = order[start:end]
    return table
