"""dense_decode: K and V of each sequence lie in one padded dense tensor."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Float32, Int32
from torch import Tensor

from attnfuzz.problems.allocation import Allocator, allocate
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.placement import Placement, placements
from attnfuzz.problems.reference import Expected, attention_reference
from attnfuzz.problems.supports import Supports
from attnfuzz.values.attention import LogicalAttention, attention_values
from attnfuzz.values.tokens import token_table

__all__ = ["DenseDecodeInputs", "build", "inputs_of", "reference", "write"]


@dataclass(slots=True)
class DenseDecodeInputs:
    """What a dense_decode kernel gets. Rows of ``k`` and ``v`` at or past a sequence's length are dead memory."""

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    k: Float[Tensor, "num_seqs max_seq_len num_kv_heads head_size"]
    v: Float[Tensor, "num_seqs max_seq_len num_kv_heads v_head_size"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    max_seq_len: int
    out: Float[Tensor, "num_seqs num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]


def build(
    case: DenseDecodeCase, allocator: Allocator, supports: Supports, values: LogicalAttention | None = None
) -> DenseDecodeInputs:
    """Inputs of ``case`` in memory of ``allocator``; ``values`` saves drawing the numbers again."""
    del supports  # what a kernel supports shapes the cases, not their tensors
    tensors = allocate(case, allocator)
    (placement,) = placements([case], token_table([case], allocator.device))
    one_run = {name: tensor[None] for name, tensor in tensors.items()}
    write(case, one_run, values or attention_values(case, allocator.device), placement)
    return inputs_of(case, tensors)


def inputs_of(case: DenseDecodeCase, tensors: dict[str, Tensor]) -> DenseDecodeInputs:
    """What the kernel gets, of ``tensors`` by the names that ``tensor_specs`` gives them."""
    return DenseDecodeInputs(scale=case.scale, max_seq_len=case.max_seq_len, **tensors)


def write(case: DenseDecodeCase, tensors: dict[str, Tensor], values: LogicalAttention, placement: Placement) -> None:
    """Write the live elements to each run's tensors; each tensor has the runs as an additional first dimension."""
    del case
    tensors["q"].copy_(values.q)
    tensors["seq_lens"].copy_(placement.seq_lens)
    seqs, rows = placement.slots
    tensors["k"][:, seqs, rows] = values.k
    tensors["v"][:, seqs, rows] = values.v


def reference(case: DenseDecodeCase, values: LogicalAttention) -> Expected:
    """``out [num_seqs num_q_heads v_head_size]`` and natural ``lse [num_seqs num_q_heads]`` in float64."""
    return attention_reference(case, values)
