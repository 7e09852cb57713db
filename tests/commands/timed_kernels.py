"""Kernels that ``attnfuzz bench kernels`` times, or finds wrong, failing or deadly; executors load them by path."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import families
from attnfuzz.families.sparse_decode_kernels import sparse_decode_eager
from attnfuzz.inputs.layouts import token_views
from attnfuzz.kernels import eager

_GRAPH = attnfuzz.Supports(graph_replay=True)


def attend(inputs: Any, *, drop: int = 0, query_of: Any = None) -> tuple[Tensor, Tensor]:
    """Attention over all but the last ``drop`` keys; ``query_of``: the sequence of each query and the keys it sees."""
    k_slots, v_slots = token_views(inputs.k_cache[None], inputs.v_cache[None], inputs.layout)
    out, lse = torch.zeros_like(inputs.q), torch.zeros(inputs.q.shape[:2])
    lens = inputs.seq_lens.tolist()
    for row, (seq, visible) in enumerate(query_of or list(enumerate(lens))):
        pages = inputs.block_table[seq, : -(-lens[seq] // inputs.block_size)].long()
        k = k_slots[0][pages].reshape(-1, *inputs.k_cache.shape[-2:])[: visible - drop].float()
        v = v_slots[0][pages].reshape(-1, *inputs.v_cache.shape[-2:])[: visible - drop].float()
        q = inputs.q[row].float().view(k.shape[1], -1, k.shape[2])
        scores = inputs.scale * (q @ k.permute(1, 2, 0))
        out[row] = (scores.softmax(-1) @ v.transpose(0, 1)).flatten(0, 1)
        lse[row] = scores.logsumexp(-1).flatten()
    return out, lse


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(layouts=("NHD",)), options={"num_splits": (1, 2)})
def right(inputs: Any, *, num_splits: int) -> tuple[Tensor, Tensor]:
    """Right, and only on an NHD cache."""
    del num_splits
    return attend(inputs)


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(layouts=("NHD",)))
def drops_the_last_key(inputs: Any) -> tuple[Tensor, Tensor]:
    """Wrong by one token of forty, which is little."""
    return attend(inputs, drop=1)


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(layouts=("NHD",)))
def asks_another_question(inputs: Any) -> tuple[Tensor, Tensor]:
    """Right of the queries that it leaves behind."""
    inputs.q.zero_()
    return attend(inputs)


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(layouts=("NHD",)), options={"writes": (True, False)})
def writes_only_if_told(inputs: Any, *, writes: bool) -> None:
    """Leaves what its results hold as it is, or right ones."""
    if writes:
        out, lse = attend(inputs)
        inputs.out.copy_(out)
        inputs.lse.copy_(lse)


@attnfuzz.kernel("paged_decode", supports=_GRAPH)
def raises(inputs: Any) -> Tensor:
    """Cannot be called."""
    raise RuntimeError(f"no room for {inputs.block_size}\nand more")


@attnfuzz.kernel("paged_decode", supports=_GRAPH)
def dies(inputs: Any) -> Tensor:
    """Takes its process down."""
    del inputs
    os._exit(7)


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(block_sizes=(1, 2)))
def only_small_pages(inputs: Any) -> tuple[Tensor, Tensor]:
    """Right where it may be called."""
    return attend(inputs)


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(layouts=("NHD",), variants=("window",)))
def ignores_the_window(inputs: Any) -> tuple[Tensor, Tensor]:
    """Sees all keys, whatever is asked for."""
    return attend(inputs)


@attnfuzz.kernel("latent_decode", supports=attnfuzz.Supports(head_sizes=(24,), v_head_sizes=(16,)))
def latent_values_with_positions(inputs: Any) -> tuple[Tensor, Tensor]:
    """Takes the last numbers of each key for its value, in place of the first."""
    k_cache = inputs.kv_cache[:, :, None]
    return eager.paged_decode(
        inputs.q, k_cache, k_cache[..., -inputs.v_head_size :], inputs.block_table, inputs.seq_lens, inputs.scale,
        inputs.block_size, "NHD",
    )  # fmt: skip


@attnfuzz.kernel(families.SparseDecode())
def list_without_its_end(inputs: Any) -> None:
    """Leaves out the last slot of each list."""
    inputs.indices = inputs.indices.clone()
    inputs.indices[:, -1] = -1
    sparse_decode_eager.function(inputs)


class SparseDecode(attnfuzz.Problem):
    """Called as attnfuzz's own problem is, and another one."""

    topk = attnfuzz.Integer(1, 4)


@attnfuzz.kernel(SparseDecode())
def another_sparse_decode(inputs: Any) -> None:
    """Never called."""
    raise RuntimeError(inputs)
