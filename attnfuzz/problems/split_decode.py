"""split_decode: paged_decode whose result is left as one partial state per split of the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Float32, Float64, Int32
from torch import Tensor

from attnfuzz.problems.cases import SplitDecodeCase
from attnfuzz.problems.paged_decode import with_both_caches
from attnfuzz.problems.reference import merge_all
from attnfuzz.problems.supports import Layout

__all__ = ["SplitDecodeInputs", "inputs_of", "merge_partials"]


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


def merge_partials(
    partial_out: Float[Tensor, "num_seqs num_q_heads num_splits v_head_size"],
    partial_lse: Float[Tensor, "num_seqs num_q_heads num_splits"],
) -> tuple[Float64[Tensor, "num_seqs num_q_heads v_head_size"], Float64[Tensor, "num_seqs num_q_heads"]]:
    """Merge in float64. ``partial_lse`` is natural; -inf marks an empty split, whose partial output is not used.

    NaN and +inf that a kernel left in a split stay visible as NaN.
    """
    return merge_all(partial_out, partial_lse)
