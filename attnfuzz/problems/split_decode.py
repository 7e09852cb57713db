"""split_decode: paged_decode whose result is left as one partial state per split of the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Float32, Float64, Int32
from torch import Tensor

from attnfuzz.problems.allocation import Allocator
from attnfuzz.problems.cases import SplitDecodeCase
from attnfuzz.problems.paged_decode import with_both_caches, written
from attnfuzz.problems.reference import Expected, attention_reference, merge_all
from attnfuzz.problems.supports import Layout, Supports
from attnfuzz.values.attention import LogicalAttention

__all__ = ["SplitDecodeInputs", "build", "inputs_of", "merge_partials", "reference"]


@dataclass(slots=True)
class SplitDecodeInputs:
    """What a split_decode kernel gets: as for paged_decode, with ``num_splits`` and room for the partial states."""

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    block_size: int
    layout: Layout
    num_splits: int
    partial_out: Float[Tensor, "num_seqs num_q_heads num_splits v_head_size"]
    partial_lse: Float32[Tensor, "num_seqs num_q_heads num_splits"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None


def build(
    case: SplitDecodeCase, allocator: Allocator, supports: Supports, values: LogicalAttention | None = None
) -> SplitDecodeInputs:
    """Inputs of ``case`` in memory of ``allocator``; ``values`` saves drawing the numbers again."""
    del supports  # what a kernel supports shapes the cases, not their tensors
    return inputs_of(case, written(case, allocator, values))


def inputs_of(case: SplitDecodeCase, tensors: dict[str, Tensor]) -> SplitDecodeInputs:
    """What the kernel gets, of ``tensors`` by the names that ``tensor_specs`` gives them."""
    tensors = with_both_caches(case, tensors)
    return SplitDecodeInputs(
        scale=case.scale,
        block_size=case.block_size,
        layout=case.layout,
        num_splits=case.num_splits,
        window=case.variant.window,
        soft_cap=case.variant.soft_cap,
        **tensors,
    )


def reference(case: SplitDecodeCase, values: LogicalAttention) -> Expected:
    """What the partial states must merge to: where a kernel cuts a sequence is its own business."""
    return attention_reference(case, values)


def merge_partials(
    partial_out: Float[Tensor, "num_seqs num_q_heads num_splits v_head_size"],
    partial_lse: Float[Tensor, "num_seqs num_q_heads num_splits"],
) -> tuple[Float64[Tensor, "num_seqs num_q_heads v_head_size"], Float64[Tensor, "num_seqs num_q_heads"]]:
    """Merge in float64. ``partial_lse`` is natural; -inf marks an empty split, whose partial output is not used.

    NaN and +inf that a kernel left in a split stay visible as NaN.
    """
    return merge_all(partial_out, partial_lse)
