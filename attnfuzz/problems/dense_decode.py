"""dense_decode: K and V of each sequence lie in one padded dense tensor."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Float32, Int32
from torch import Tensor

from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.placement import Placement
from attnfuzz.values.attention import LogicalAttention

__all__ = ["DenseDecodeInputs", "inputs_of", "write"]


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
