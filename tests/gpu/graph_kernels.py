"""Kernels that promise to be replayed, and do not keep it; executors load them by this file's path."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz
from attnfuzz.kernels.dense import launch
from attnfuzz.kernels.paged import launch as launch_paged

PROMISED = attnfuzz.Supports(graph_replay=True)
PROMISED_ROUGHLY = attnfuzz.Supports(graph_replay=True, deterministic=False)
TOKENS_PER_SPLIT = 8

_LONGEST: dict[str, int] = {}
_GRIDS: dict[tuple[int, ...], int] = {}
_SPLITS: dict[str, int] = {}
_COUNTERS: list[Tensor] = []
_TABLES: dict[str, Tensor] = {}


@triton.jit
def add_ticket_kernel(p_out, p_ticket):
    ticket = tl.atomic_add(p_ticket, 1)
    tl.store(p_out, tl.load(p_out) + ticket)


def is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def decode(inputs: Any, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Over the first tokens of each sequence, as many as a grid of `most` programs for one token each covers."""
    seq_lens = inputs.seq_lens if most is None else inputs.seq_lens.clamp(max=most)
    return launch.dense_decode(inputs.q, inputs.k, inputs.v, seq_lens, inputs.scale, out=inputs.out, lse=inputs.lse)


def decode_pages(inputs: Any, block_table: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
    caches = (inputs.k_cache, inputs.v_cache, block_table)
    seq_lens = inputs.seq_lens if most is None else inputs.seq_lens.clamp(max=most)
    sizes = (inputs.scale, inputs.block_size, inputs.layout)
    return launch_paged.paged_decode(inputs.q, *caches, seq_lens, *sizes, out=inputs.out, lse=inputs.lse)


@attnfuzz.kernel("dense_decode", supports=PROMISED)
def keeps_its_promise(inputs: Any) -> Any:
    return decode(inputs)


@attnfuzz.kernel("paged_decode", supports=PROMISED_ROUGHLY)
def keeps_it_within_bounds(inputs: Any) -> Any:
    return decode_pages(inputs, inputs.block_table)


@attnfuzz.kernel("dense_decode", supports=PROMISED)
def grid_of_the_last_plan(inputs: Any) -> Any:
    """Each eager call plans its grid; a graph has that of the capture."""
    if not is_capturing():
        _LONGEST["dense"] = int(inputs.seq_lens.max())
    return decode(inputs, _LONGEST["dense"])


@attnfuzz.kernel("dense_decode", supports=PROMISED)
def grid_by_shape(inputs: Any) -> Any:
    """The first call with a shape decides for all others."""
    shape = tuple(inputs.k.shape)
    if shape not in _GRIDS:
        _GRIDS[shape] = int(inputs.seq_lens.max().item())
    return decode(inputs, _GRIDS[shape])


@attnfuzz.kernel("paged_decode", supports=PROMISED_ROUGHLY)
def splits_of_the_last_plan(inputs: Any) -> Any:
    """The number of splits follows lengths on the host, the tokens in each are constant."""
    if not is_capturing():
        _SPLITS["paged"] = -(-max(inputs.seq_lens.tolist()) // TOKENS_PER_SPLIT)
    return decode_pages(inputs, inputs.block_table, _SPLITS["paged"] * TOKENS_PER_SPLIT)


@attnfuzz.kernel("dense_decode", supports=PROMISED)
def counter_cleared_by_the_host(inputs: Any) -> Any:
    if not _COUNTERS:
        _COUNTERS.append(torch.zeros(1, dtype=torch.int32, device=inputs.q.device))
    if not is_capturing():
        _COUNTERS[0].zero_()
    out, lse = decode(inputs)
    add_ticket_kernel[(1,)](out, _COUNTERS[0])
    return out, lse


@attnfuzz.kernel("paged_decode", supports=PROMISED)
def table_copied_outside(inputs: Any) -> Any:
    """A contiguous copy of the table that no replay renews."""
    if not is_capturing():
        kept = _TABLES.get("paged")
        if kept is None or kept.shape != inputs.block_table.shape:
            kept = _TABLES["paged"] = torch.zeros_like(inputs.block_table, memory_format=torch.contiguous_format)
        kept.copy_(inputs.block_table)
    return decode_pages(inputs, _TABLES["paged"])


@attnfuzz.kernel("dense_decode")
def says_nothing_and_is_right(inputs: Any) -> Any:
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def says_nothing_and_freezes_its_grid(inputs: Any) -> Any:
    """As a server would have it that counts tokens while it plans, which no replay does."""
    if not is_capturing() and torch.cuda.get_sync_debug_mode() == 0:
        _LONGEST["silent"] = int(inputs.seq_lens.max())
    return decode(inputs, _LONGEST["silent"])


@attnfuzz.kernel("dense_decode")
def says_nothing_and_waits(inputs: Any) -> Any:
    return decode(inputs, int(inputs.seq_lens.max().item()))


_PARTIALS: dict[str, Tensor] = {}


@attnfuzz.kernel("dense_decode", supports=PROMISED)
def scratch_made_while_capturing(inputs: Any) -> Any:
    """Kept from one capture to the next: it lies in the pool of the first graph, which gives it to the second, too."""
    if is_capturing():
        scratch = torch.zeros_like(inputs.out)
        out, lse = decode(inputs)
        scratch.copy_(out)
        _PARTIALS["address"] = scratch[:0]
        return out.copy_(scratch), lse
    return decode(inputs)


@attnfuzz.kernel("dense_decode", supports=PROMISED)
def waits_for_the_lengths(inputs: Any) -> Any:
    return decode(inputs, int(inputs.seq_lens.max().item()))
