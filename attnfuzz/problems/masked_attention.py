"""masked_attention: several query tokens per sequence, each of which sees the keys that a mask lets it see.

One problem for what engines give a mask to a kernel for: the trees of tokens that speculative decoding verifies at
once, attention that is not causal, as in encoders and in cross attention, and attention to some pages of a cache. What
masks there are, and how a case writes them down: `attnfuzz.problems.masks`. All else is as in paged_attention, of
whose cases these are, and the reference is that of attention without a mask to the keys that are seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Int32
from torch import Tensor

from attnfuzz.problems import paged_attention, paged_decode, told
from attnfuzz.problems.allocation import Allocator
from attnfuzz.problems.cases import MaskedAttentionCase
from attnfuzz.problems.masks import parents_of
from attnfuzz.problems.paged_attention import PagedAttentionInputs, reference
from attnfuzz.problems.placement import Placement
from attnfuzz.problems.supports import Supports
from attnfuzz.values.attention import LogicalAttention

__all__ = ["MaskedAttentionInputs", "build", "inputs_of", "keys_seen", "reference", "write"]


@dataclass(slots=True, kw_only=True)
class MaskedAttentionInputs(PagedAttentionInputs):
    """What a masked_attention kernel gets: what one of paged_attention does, which is not causal here, and a mask.

    ``mask`` holds the tables of all sequences one after another: that of sequence s, with n query tokens and length L,
    begins at ``mask_indptr[s]`` and has n rows of L entries, so that query token j sees key t where
    ``mask[mask_indptr[s] + j * L + t]`` is True. FlashInfer's ``custom_mask`` and SGLang's lie so. A query token that
    sees no key has ``out = 0`` and ``lse = -inf``, or that of its sink. Keys that a query does not see are live memory:
    they are finite numbers, and may be read.
    """

    mask: Bool[Tensor, " mask_size"]
    mask_indptr: Int32[Tensor, " num_seqs_plus_1"]


def build(
    case: MaskedAttentionCase, allocator: Allocator, supports: Supports, values: LogicalAttention | None = None
) -> MaskedAttentionInputs:
    """Inputs of ``case`` in memory of ``allocator``; ``values`` saves drawing the numbers again."""
    del supports  # what a kernel supports shapes the cases, not their tensors
    tensors = paged_decode.written(case, allocator, values)
    _write_mask(case, tensors)
    return inputs_of(case, tensors)


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
    return MaskedAttentionInputs(**paged_attention.arguments(case, as_bool))


def keys_seen(case: MaskedAttentionCase, row: int) -> list[str]:
    """Which keys the mask lets a row see, in words."""
    seq, query = case.row_seqs[row], told.query_of_row(case, row)
    seen = case.rows_seen[row]
    keys = told.ranges(t for t, is_seen in enumerate(seen) if is_seen)
    what = f"sees keys {keys} of {len(seen)}" if keys else f"sees none of {told.plural(len(seen), 'key')}"
    found = [f"token {row} of the batch is {query} and {what} (mask: {case.mask.kind})"]
    if case.mask.kind == "tree":
        number, query_len = row - case.rows_of(seq).start, case.query_lens[seq]
        parent = parents_of(case.mask.of(seq), query_len)[number]
        found += [f"in the tree, query {number} follows " + ("the context" if parent < 0 else f"query {parent}")]
    return found
