"""dense_decode: K and V of each sequence lie in one padded dense tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from attnfuzz.problems.allocation import Allocator, allocate
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.reference import Expected, attention_reference
from attnfuzz.problems.supports import Supports
from attnfuzz.values.attention import LogicalAttention, attention_values, token_index

__all__ = ["DenseDecodeInputs", "build", "reference"]


@dataclass(slots=True)
class DenseDecodeInputs:
    """What a dense_decode kernel gets. Rows of ``k`` and ``v`` at or past a sequence's length are dead memory."""

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    k: Float[Tensor, "num_seqs max_seq_len num_kv_heads head_size"]
    v: Float[Tensor, "num_seqs max_seq_len num_kv_heads head_size"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    max_seq_len: int
    out: Float[Tensor, "num_seqs num_q_heads head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]


def build(
    case: DenseDecodeCase, allocator: Allocator, supports: Supports, values: LogicalAttention | None = None
) -> DenseDecodeInputs:
    """Inputs of ``case`` in memory of ``allocator``; ``values`` saves drawing the numbers again."""
    del supports  # what a kernel supports shapes the cases, not their tensors
    values = values or attention_values(case, allocator.device)
    tensors = allocate(case, allocator)
    tensors["q"].copy_(values.q)
    tensors["seq_lens"].copy_(torch.tensor(case.seq_lens))
    tokens = token_index(case, allocator.device)
    tensors["k"][tokens.seq, tokens.position] = values.k
    tensors["v"][tokens.seq, tokens.position] = values.v
    return DenseDecodeInputs(scale=case.scale, max_seq_len=case.max_seq_len, **tensors)


def reference(case: DenseDecodeCase, values: LogicalAttention) -> Expected:
    """``out [num_seqs num_q_heads head_size]`` and natural ``lse [num_seqs num_q_heads]`` in float64."""
    return attention_reference(case, values)
