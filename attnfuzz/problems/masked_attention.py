"""masked_attention: several query tokens per sequence, each of which sees the keys that a mask lets it see.

One problem for what engines give a mask to a kernel for: the trees of tokens that speculative decoding verifies at
once, attention that is not causal, as in encoders and in cross attention, and attention to some pages of a cache. What
masks there are, and how a case writes them down: `attnfuzz.problems.masks`. All else is as in
paged_attention, and the reference is that of attention without a mask to the keys that are seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor

from attnfuzz.problems import paged_decode, wording
from attnfuzz.problems.cases import MaskedAttentionCase
from attnfuzz.problems.masks import parents_of
from attnfuzz.problems.paged_attention import varlen_arguments
from attnfuzz.problems.placement import Placement
from attnfuzz.problems.supports import Layout
from attnfuzz.values.attention import LogicalAttention

__all__ = ["MaskedAttentionInputs", "inputs_of", "keys_seen", "write"]


@dataclass(slots=True)
class MaskedAttentionInputs:
    """What a masked_attention kernel gets: the batch as in paged_attention, and a mask.

    ``mask`` holds the tables of all sequences one after another: that of sequence s, with n query tokens and length L,
    begins at ``mask_indptr[s]`` and has n rows of L entries, so that query token j sees key t where
    ``mask[mask_indptr[s] + j * L + t]`` is True. FlashInfer's ``custom_mask`` and SGLang's lie so. A query token that
    sees no key has ``out = 0`` and ``lse = -inf``, or that of its sink. Keys that a query does not see are live memory:
    they are finite numbers, and may be read. The last four are None unless the case asks for them.
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


def write(
    case: MaskedAttentionCase, tensors: dict[str, Tensor], values: LogicalAttention, placement: Placement
) -> None:
    """As `attnfuzz.problems.paged_decode.write`."""
    paged_decode.write(case, tensors, values, placement)
    _write_mask(case, tensors)


def _write_mask(case: MaskedAttentionCase, tensors: dict[str, Tensor]) -> None:
    table = bytearray(b"".join(case.rows_seen))
    if table:
        tensors["mask"].copy_(torch.frombuffer(table, dtype=torch.uint8))
    sizes = (queries * keys for queries, keys in zip(case.query_lens, case.seq_lens, strict=True))
    tensors["mask_indptr"].copy_(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device="cpu"))


def inputs_of(case: MaskedAttentionCase, tensors: dict[str, Tensor]) -> MaskedAttentionInputs:
    """What the kernel gets, of ``tensors`` by the names that ``tensor_specs`` gives them."""
    as_bool = tensors | {"mask": tensors["mask"].view(torch.bool)}
    return MaskedAttentionInputs(**varlen_arguments(case, as_bool))


def keys_seen(case: MaskedAttentionCase, row: int) -> list[str]:
    """Which keys the mask lets a row see, in words."""
    seq, query = case.row_seqs[row], wording.query_of_row(case, row)
    seen = case.rows_seen[row]
    keys = wording.ranges(t for t, is_seen in enumerate(seen) if is_seen)
    what = f"sees keys {keys} of {len(seen)}" if keys else f"sees none of {wording.plural(len(seen), 'key')}"
    found = [f"token {row} of the batch is {query} and {what} (mask: {case.mask.kind})"]
    if case.mask.kind == "tree":
        number, query_len = row - case.rows_of(seq).start, case.query_lens[seq]
        parent = parents_of(case.mask.of(seq), query_len)[number]
        found += [f"in the tree, query {number} follows " + ("the context" if parent < 0 else f"query {parent}")]
    return found
