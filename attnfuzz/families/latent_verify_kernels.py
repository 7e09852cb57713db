"""Right kernels of `attnfuzz.families.LatentVerify`: the bundled one in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families.formats import latent_rows, parts_of_latents
from attnfuzz.families.latent_verify import LatentVerify
from attnfuzz.kernels.latent import launch


@attnfuzz.kernel(LatentVerify())
def latent_verify(inputs: Any) -> None:
    """``launch.latent_verify``."""
    scales = None
    if inputs.latents == "same":
        latents, ropes = inputs.kv_cache[..., : inputs.rank], inputs.kv_cache[..., inputs.rank :]
    elif inputs.latents == "fp8_rows":
        latents, scales, ropes = parts_of_latents(inputs.kv_cache, inputs.rank, inputs.q.dtype)
    else:
        latents, scales, ropes = inputs.latent_cache, inputs.latent_scales, inputs.rope_cache
    launch.latent_verify(
        inputs.q, latents, ropes, inputs.block_table, inputs.seq_lens, inputs.cu_seqlens_q, inputs.query_len,
        inputs.block_size, inputs.out, getattr(inputs, "lse", None), scales=scales,
        scale=inputs.q.shape[-1] ** -0.5, causal=inputs.causal,
    )  # fmt: skip


@attnfuzz.kernel(LatentVerify())
def latent_verify_eager(inputs: Any) -> None:
    """Sequence by sequence."""
    size = inputs.block_size
    starts = inputs.cu_seqlens_q.tolist()
    for i, length in enumerate(inputs.seq_lens.tolist()):
        positions = torch.arange(length, device=inputs.q.device)
        slots = inputs.block_table[i].long()[positions // size] * size + positions % size
        if inputs.latents == "fp8":
            latents = inputs.latent_cache.view(torch.uint8)[slots, 0].view(torch.float8_e4m3fn)
            rows = latent_rows(latents, inputs.latent_scales[slots], inputs.rope_cache[slots, 0])
        else:
            rows = inputs.kv_cache[slots, 0]
        if inputs.latents == "fp8_rows":
            rows = latent_rows(*parts_of_latents(rows, inputs.rank, inputs.q.dtype))
        rows = rows.float()
        q = inputs.q[starts[i] : starts[i + 1]].float()
        scores = torch.einsum("qhd,td->hqt", q, rows) * q.shape[-1] ** -0.5
        if inputs.causal:
            last = positions[length - len(q) :]
            scores = scores.masked_fill(positions > last[:, None], -torch.inf)
        inputs.out[starts[i] : starts[i + 1]] = torch.einsum("hqt,td->qhd", scores.softmax(-1), rows[:, : inputs.rank])
        inputs.lse[starts[i] : starts[i + 1]] = scores.logsumexp(-1).T
