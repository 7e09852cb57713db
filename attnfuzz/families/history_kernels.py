"""Right backends of `attnfuzz.families.History`: bundled kernels in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families.history import History, steps_of
from attnfuzz.kernels.cache import launch
from attnfuzz.kernels.paged.launch_attention import paged_attention


@attnfuzz.kernel(History())
def history(inputs: Any) -> None:
    """``launch.cache_write`` and ``paged_attention``, step after step."""
    for step in steps_of(inputs):
        launch.cache_write(step.k, inputs.k_cache, step.slots)
        launch.cache_write(step.v, inputs.v_cache, step.slots)
        paged_attention(
            step.q, inputs.k_cache, inputs.v_cache, step.table, step.lens, step.starts, inputs.head_size**-0.5,
            inputs.block_size, "NHD", out=step.out, max_query_len=int(step.starts.diff().max()),
            max_seq_len=int(step.lens.max()),
        )  # fmt: skip


@attnfuzz.kernel(History())
def history_eager(inputs: Any) -> None:
    """Token by token."""
    for step in steps_of(inputs):
        for name in ("k", "v"):
            getattr(inputs, f"{name}_cache").flatten(0, 1)[step.slots] = getattr(step, name)
        starts = step.starts.tolist()
        for seq, length in enumerate(step.lens.tolist()):
            at = torch.arange(length, device=step.q.device)
            slots = step.table[seq, at // inputs.block_size].long() * inputs.block_size + at % inputs.block_size
            k, v = (cache.flatten(0, 1)[slots].float() for cache in (inputs.k_cache, inputs.v_cache))
            k, v = (rows.repeat_interleave(inputs.gqa_ratio, 1) for rows in (k, v))
            count = starts[seq + 1] - starts[seq]
            for token in range(count):
                seen = slice(length - count + token + 1)
                row = starts[seq] + token
                scores = torch.einsum("hd,thd->ht", step.q[row].float(), k[seen]) * inputs.head_size**-0.5
                step.out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), v[seen]).to(step.out.dtype)
