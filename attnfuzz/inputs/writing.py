"""The live elements of a case, written into its tensors: dead memory stays as it was allocated.

Each tensor has the runs that it is written for as an additional first dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from attnfuzz.inputs.layouts import token_views, with_both_caches
from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase
from attnfuzz.problems.block_table import block_table_rows, freed_tokens
from attnfuzz.problems.quantised_kv import KV_SCALE_TENSORS
from attnfuzz.values.attention import LogicalAttention
from attnfuzz.values.tokens import TokenTable, on_device


@dataclass(frozen=True, slots=True)
class Placement:
    """The contents of a case's tensors beside drawn numbers.

    ``slots``: for each token its place in the first two dimensions of K and V: page and offset, or sequence and row.
    """

    seq_lens: Int64[Tensor, " num_seqs"]
    slots: tuple[Int64[Tensor, " total_tokens"], Int64[Tensor, " total_tokens"]]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"] | None = None
    cu_seqlens_q: Int32[Tensor, " num_seqs_plus_1"] | None = None


def placements(cases: Sequence[AttentionCase], tokens: TokenTable) -> list[Placement]:
    """The placement of each of ``cases``, all of one problem, on the device of ``tokens``, their table."""
    paged = cast("Sequence[PagedDecodeCase]", cases)
    tables: list[Tensor] | None = None
    if cases[0].page_size:
        tables, slots = _paged(paged, tokens)
    else:
        slots = (tokens.local_seq[tokens.seq], tokens.position)
    starts = _query_starts(cases, tokens.seq.device) if "cu_seqlens_q" in cases[0].tensor_names else None
    parts = (tokens.tokens_of(i) for i in range(len(cases)))
    return [
        Placement(
            tokens.seq_len[tokens.seqs_of(i)],
            (slots[0][part], slots[1][part]),
            tables[i] if tables else None,
            starts[i] if starts else None,
        )
        for i, part in enumerate(parts)
    ]


def _query_starts(cases: Sequence[Any], device: torch.device) -> list[Tensor]:
    """``cu_seqlens_q`` of each case, in one copy to the device."""
    starts = [case.cu_seqlens_q for case in cases]
    of_all = torch.tensor([start for of_case in starts for start in of_case], dtype=torch.int32, device="cpu")
    flat = on_device(of_all, device)
    return list(torch.split(flat, [len(of_case) for of_case in starts]))


def _paged(cases: Sequence[PagedDecodeCase], tokens: TokenTable) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Block tables, and page and offset of each token."""
    device = tokens.seq.device
    widths = [width for case in cases for width in [case.max_blocks_per_seq] * case.num_seqs]
    sizes = [case.block_size for case in cases for _ in case.seq_lens]
    entries = [entry for case in cases for row in block_table_rows(case) for entry in row]
    flat = on_device(torch.tensor(entries, dtype=torch.int32, device="cpu"), device)
    starts = list(itertools.accumulate(widths, initial=0))
    of_seq = on_device(torch.tensor([starts[:-1], sizes], dtype=torch.int64, device="cpu"), device)
    first_column, block_size = of_seq[:, tokens.seq].unbind()
    block = tokens.position // block_size
    page = flat[first_column + block].long()
    bounds = [starts[first] for first in tokens.first_seq]
    tables = [
        flat[start:end].view(case.num_seqs, -1)
        for case, (start, end) in zip(cases, itertools.pairwise(bounds), strict=True)
    ]
    return tables, (page, tokens.position - block * block_size)


def write_pages(
    case: PagedDecodeCase, tensors: dict[str, Tensor], values: LogicalAttention, placement: Placement
) -> None:
    """K and V in pages, and what finds them: block table, lengths, variants' numbers, scales and mask."""
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
    """The tokens whose pages have not been freed; None for all of them. A page that another sequence keeps is
    written."""
    freed = freed_tokens(case)
    if not any(freed):
        return None
    kept = [
        torch.arange(start + first, start + length, device="cpu")
        for start, first, length in zip(values.starts[:-1], freed, case.seq_lens, strict=True)
    ]
    return on_device(torch.cat(kept), values.k.device)
