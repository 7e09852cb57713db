"""Right kernels of `attnfuzz.families.SparseDecode`: the bundled ones in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families.formats import latent_rows, parts_of_latents
from attnfuzz.families.sparse_decode import SparseDecode
from attnfuzz.kernels.latent import launch

_OPTIONS = {"num_splits": (3, 1, 2, 5), "tile": (32, 16)}


@attnfuzz.kernel(SparseDecode(), supports=attnfuzz.Supports(graph_replay=True), options=_OPTIONS)
def sparse_decode(inputs: Any, **options: Any) -> None:
    """``launch.sparse_decode``: splits of each list in parallel, then their combination."""
    rank, scales = inputs.out.shape[-1], None
    latents, ropes = inputs.kv_cache[..., :rank], inputs.kv_cache[..., rank:]
    if inputs.cache == "fp8":
        latents, scales, ropes = parts_of_latents(inputs.kv_cache, rank, inputs.q.dtype)
    launch.sparse_decode(
        inputs.q, latents, ropes, inputs.indices, inputs.head_size**-0.5, inputs.out, getattr(inputs, "lse", None),
        scales=scales, topk_length=getattr(inputs, "topk_length", None), **options,
    )  # fmt: skip


@attnfuzz.kernel(SparseDecode(), supports=attnfuzz.Supports(graph_replay=True))
def sparse_decode_auto(inputs: Any) -> None:
    """Sparse decode as the wrapper plans it, by the size of the batch and of the GPU."""
    sparse_decode.function(inputs)


@attnfuzz.kernel(SparseDecode())
def sparse_decode_eager(inputs: Any) -> None:
    """Token by token."""
    rank = inputs.out.shape[-1]
    lengths = inputs.topk_length.tolist() if inputs.has_lengths else [inputs.topk] * len(inputs.q)
    for token, length in enumerate(lengths):
        row = inputs.indices[token, :length].long()
        rows = inputs.kv_cache[row[(row >= 0) & (row < len(inputs.kv_cache))], 0]
        if inputs.cache == "fp8":
            rows = latent_rows(*parts_of_latents(rows, rank, inputs.q.dtype))
        keys = rows.float()
        scores = inputs.q[token].float() @ keys.mT * inputs.head_size**-0.5
        inputs.lse[token] = scores.logsumexp(-1)
        weights = scores.softmax(-1) if len(keys) else torch.zeros_like(scores)
        inputs.out[token] = (weights @ keys[:, :rank]).to(inputs.out.dtype)
