"""Right kernels of `attnfuzz.families.SparseDecode`: the bundled one in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families.sparse_decode import SparseDecode
from attnfuzz.kernels.latent import launch

__all__ = ["sparse_decode", "sparse_decode_eager"]


@attnfuzz.kernel(SparseDecode())
def sparse_decode(inputs: Any) -> None:
    """``launch.sparse_decode``."""
    launch.sparse_decode(
        inputs.q, inputs.kv_cache, inputs.indices, inputs.head_size**-0.5, inputs.out, getattr(inputs, "lse", None)
    )


@attnfuzz.kernel(SparseDecode())
def sparse_decode_eager(inputs: Any) -> None:
    """Token by token."""
    for token, row in enumerate(inputs.indices.long()):
        keys = inputs.kv_cache[row[(row >= 0) & (row < len(inputs.kv_cache))], 0].float()
        scores = inputs.q[token].float() @ keys.mT * inputs.head_size**-0.5
        inputs.lse[token] = scores.logsumexp(-1)
        weights = scores.softmax(-1) if len(keys) else torch.zeros_like(scores)
        inputs.out[token] = (weights @ keys[:, : inputs.out.shape[-1]]).to(inputs.out.dtype)
