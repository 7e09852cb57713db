"""What the kernels of each bundled problem get: the tensors and numbers of a case, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor

from attnfuzz.inputs.layouts import with_both_caches
from attnfuzz.problems.cases import BundledCase, BundledProblem
from attnfuzz.problems.supports import Layout, LseLayout
from attnfuzz.problems.variants import PLAIN_VARIANT

__all__ = [
    "DenseDecodeInputs",
    "LatentDecodeInputs",
    "MaskedAttentionInputs",
    "MergeStatesInputs",
    "PagedAttentionInputs",
    "PagedDecodeInputs",
    "SplitDecodeInputs",
    "inputs_of",
]


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


@dataclass(slots=True)
class PagedDecodeInputs:
    """What a paged_decode kernel gets. The caches have the shapes of ``layout``.

    Dead memory: slots past a sequence's last token, pages that no sequence owns or that were freed behind its window
    (`attnfuzz.problems.block_table`). The last six are None unless the case asks for that variant
    (`attnfuzz.problems.variants`) or for an 8-bit cache (`attnfuzz.problems.quantised_kv`): then both caches have that
    format, and there is one scale, or one for each KV head.
    """

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    block_size: int
    layout: Layout
    out: Float[Tensor, "num_seqs num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None


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


@dataclass(slots=True)
class LatentDecodeInputs:
    """What a latent_decode kernel gets: one cache, and views of it that are K and V, as Triton kernels take them.

    ``v_head_size`` is the rank of the latent vectors. ``layout`` is that of the views. Dead memory is that of
    paged_decode. The last four are None unless the case asks for that variant (`attnfuzz.problems.variants`).
    """

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    kv_cache: Float[Tensor, "num_blocks block_size head_size"]
    k_cache: Float[Tensor, "num_blocks block_size 1 head_size"]
    v_cache: Float[Tensor, "num_blocks block_size 1 v_head_size"]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    block_size: int
    v_head_size: int
    layout: Layout
    out: Float[Tensor, "num_seqs num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None


@dataclass(slots=True)
class PagedAttentionInputs:
    """What a paged_attention kernel gets. The caches have the shapes of ``layout``; all queries' keys are in them.

    ``seq_lens`` counts context and new tokens. The query tokens of sequence s are the rows from ``cu_seqlens_q[s]`` to
    ``cu_seqlens_q[s + 1]`` of q; with n of them and length L, the j-th attends to positions 0 to L - n + j, or to all
    L unless ``causal``, as if it stood at the last position. n may be 0. ``max_query_len`` and ``max_seq_len`` are
    upper bounds, known on the host. Dead memory is that of paged_decode: keys behind a query are live, but not for this
    query. Six of the last are None unless the case asks for that variant or for an 8-bit cache, as in paged_decode.
    """

    q: Float[Tensor, "num_tokens num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    cu_seqlens_q: Int32[Tensor, " num_seqs_plus_1"]
    scale: float
    block_size: int
    layout: Layout
    max_query_len: int
    max_seq_len: int
    out: Float[Tensor, "num_tokens num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_tokens num_q_heads"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None
    causal: bool = True


@dataclass(slots=True)
class MaskedAttentionInputs:
    """What a masked_attention kernel gets: the batch as in paged_attention, and a mask.

    ``mask`` holds the tables of all sequences one after another: that of sequence s, with n query tokens and length L,
    begins at ``mask_indptr[s]`` and has n rows of L entries, so that query token j sees key t where
    ``mask[mask_indptr[s] + j * L + t]`` is True. FlashInfer's ``custom_mask`` and SGLang's lie so. In a large batch the
    last table may begin before entry 2^31 and reach beyond: then ``mask_indptr`` does not say where it ends. A query
    token that sees no key has ``out = 0`` and ``lse = -inf``, or that of its sink. Keys that a query does not see are
    live memory: they are finite numbers, and may be read. The last four are None unless the case asks for them.
    """

    q: Float[Tensor, "num_tokens num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    cu_seqlens_q: Int32[Tensor, " num_seqs_plus_1"]
    mask: Bool[Tensor, " mask_size"]
    mask_indptr: Int32[Tensor, " num_seqs_plus_1"]
    scale: float
    block_size: int
    layout: Layout
    max_query_len: int
    max_seq_len: int
    out: Float[Tensor, "num_tokens num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_tokens num_q_heads"]
    soft_cap: float | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None


@dataclass(slots=True)
class MergeStatesInputs:
    """What a merge_states kernel gets; LSE axes as ``lse_layout`` says.

    A state whose LSE is -inf or +inf is empty: its output rows are zeros, or dead memory where the kernel declares
    ``Supports(empty_state_outputs="anything")``.
    """

    prefix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    prefix_lse: Float32[Tensor, "lse_rows lse_columns"]
    suffix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    suffix_lse: Float32[Tensor, "lse_rows lse_columns"]
    lse_layout: LseLayout
    output: Float[Tensor, "num_tokens num_q_heads head_size"]
    output_lse: Float32[Tensor, "lse_rows lse_columns"]


_INPUTS: dict[BundledProblem, type] = {
    "dense_decode": DenseDecodeInputs,
    "paged_decode": PagedDecodeInputs,
    "split_decode": SplitDecodeInputs,
    "latent_decode": LatentDecodeInputs,
    "paged_attention": PagedAttentionInputs,
    "masked_attention": MaskedAttentionInputs,
    "merge_states": MergeStatesInputs,
}


def inputs_of(case: BundledCase, tensors: dict[str, Tensor]) -> Any:
    """What the kernel gets: ``tensors``, named as in ``tensor_specs``, and the case's own fields of the same names."""
    kind = _INPUTS[case.problem]
    variant = getattr(case, "variant", PLAIN_VARIANT)
    numbers = {"v_head_size": case.value_size, "window": variant.window, "soft_cap": variant.soft_cap}
    arguments: dict[str, Any] = dict(with_both_caches(case, tensors))
    if "mask" in tensors:
        arguments["mask"] = tensors["mask"].view(torch.bool)
    for name in kind.__annotations__:
        if name in numbers:
            arguments[name] = numbers[name]
        elif name not in arguments and hasattr(case, name):
            arguments[name] = getattr(case, name)
    return kind(**arguments)
