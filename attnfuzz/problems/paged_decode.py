"""paged_decode: K and V lie in pages of a cache that all sequences share, found through a block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.freed import freed_tokens
from attnfuzz.problems.layouts import split_interleaved, token_views
from attnfuzz.problems.placement import Placement
from attnfuzz.problems.quantised_kv import KV_SCALE_TENSORS
from attnfuzz.problems.supports import Layout
from attnfuzz.values.attention import LogicalAttention
from attnfuzz.values.tokens import on_device

__all__ = ["PagedDecodeInputs", "inputs_of", "with_both_caches", "write"]


@dataclass(slots=True)
class PagedDecodeInputs:
    """What a paged_decode kernel gets. The caches have the shapes of ``layout``.

    Dead memory: slots past a sequence's last token, pages that no sequence owns or that were freed behind its window
    (`attnfuzz.problems.freed`). The last six are None unless the case asks for that variant
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


def inputs_of(case: PagedDecodeCase, tensors: dict[str, Tensor]) -> PagedDecodeInputs:
    """What the kernel gets, of ``tensors`` by the names that ``tensor_specs`` gives them."""
    tensors = with_both_caches(case, tensors)
    return PagedDecodeInputs(
        scale=case.scale,
        block_size=case.block_size,
        layout=case.layout,
        window=case.variant.window,
        soft_cap=case.variant.soft_cap,
        **tensors,
    )


def write(case: PagedDecodeCase, tensors: dict[str, Tensor], values: LogicalAttention, placement: Placement) -> None:
    """Write the live elements to each run's tensors; each tensor has the runs as an additional first dimension."""
    tensors = with_both_caches(case, tensors)
    if placement.block_table is not None:
        tensors["block_table"].copy_(placement.block_table)
    if placement.cu_seqlens_q is not None:
        tensors["cu_seqlens_q"].copy_(placement.cu_seqlens_q)
    tensors["seq_lens"].copy_(placement.seq_lens)
    for name, numbers in case.variant.per_head_numbers(case.num_q_heads, case.values.seed).items():
        tensors[name].copy_(torch.tensor(numbers, dtype=torch.float32, device="cpu"))
    if values.kv_scales is not None:
        for name, scales in zip(KV_SCALE_TENSORS, values.kv_scales, strict=True):
            tensors[name].copy_(scales[: tensors[name].shape[-1]])
    tensors["q"][:, : case.num_rows].copy_(values.q)
    k_slots, v_slots = token_views(tensors["k_cache"], tensors["v_cache"], case.layout)
    (pages, offsets), k, v = placement.slots, values.k, values.v
    if (kept := _kept_tokens(case, values)) is not None:
        pages, offsets, k, v = pages[kept], offsets[kept], k[kept], v[kept]
    k = k.view(len(k), *k_slots.shape[3:])
    if case.kv is None:
        k_slots[:, pages, offsets] = k
        v_slots[:, pages, offsets] = v
    else:  # as bytes: not all of torch's versions can index float8
        k_slots.view(torch.uint8)[:, pages, offsets] = k.to(k_slots.dtype).view(torch.uint8)
        v_slots.view(torch.uint8)[:, pages, offsets] = v.to(v_slots.dtype).view(torch.uint8)


def _kept_tokens(case: PagedDecodeCase, values: LogicalAttention) -> Int64[Tensor, " kept"] | None:
    """Those whose pages have not been freed; None for all of them. A page that another sequence keeps is written."""
    freed = freed_tokens(case)
    if not any(freed):
        return None
    kept = [
        torch.arange(start + first, start + length, device="cpu")
        for start, first, length in zip(values.starts[:-1], freed, case.seq_lens, strict=True)
    ]
    return on_device(torch.cat(kept), values.k.device)


def with_both_caches(case: PagedDecodeCase, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with K and V in place of the one cache of the interleaved layout, or beside that of latent_decode."""
    if case.values_in_keys:
        k_cache = tensors["kv_cache"].unsqueeze(-2)
        return tensors | {"k_cache": k_cache, "v_cache": k_cache[..., : case.value_size]}
    if case.layout != "interleaved":
        return tensors
    k_cache, v_cache = split_interleaved(tensors["kv_cache"])
    others = {name: tensor for name, tensor in tensors.items() if name != "kv_cache"}
    return others | {"k_cache": k_cache, "v_cache": v_cache}
