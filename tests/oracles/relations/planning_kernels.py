"""Kernels that plan once for what they take to be the same call; executors load them by this file's path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz

SUPPORTS = attnfuzz.Supports(
    dtypes=("float32", "bfloat16"), layouts=("NHD",), lse="none", empty_sequences=False, variants=("window",)
)
_plans: dict[Any, dict[str, Any]] = {}


def run(inputs: Any, left_out: str = "") -> Tensor:
    """Decode by a plan that is kept under the shapes and all that it was made of but for what is ``left_out``."""
    caches = inputs.k_cache, inputs.v_cache
    made_of = {
        "scale": inputs.scale,
        "window": inputs.window,
        "strides": tuple(part.stride() for part in (inputs.q, *caches)),
        "table": tuple(map(tuple, inputs.block_table.tolist())),
    }
    shapes = inputs.q.dtype, inputs.q.shape, inputs.k_cache.shape, inputs.block_table.shape
    plan = _plans.setdefault((*shapes, *(one for name, one in made_of.items() if name != left_out)), made_of)
    q, k, v = (
        torch.as_strided(part, part.shape, strides, part.storage_offset())
        for part, strides in zip((inputs.q, *caches), plan["strides"], strict=True)
    )
    out = torch.empty_like(inputs.out)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        pages = list(plan["table"][seq][: -(-length // inputs.block_size)])
        first = max(0, length - plan["window"]) if plan["window"] else 0
        rows = [cache[pages].flatten(0, 1)[first:length].float() for cache in (k, v)]
        keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in rows)
        weights = (torch.einsum("hd,thd->ht", q[seq].float(), keys) * plan["scale"]).softmax(-1)
        out[seq] = torch.einsum("ht,thd->hd", weights, values).to(out.dtype)
    return out


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def plan_without_scale(inputs: Any) -> Tensor:
    return run(inputs, "scale")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def plan_without_window(inputs: Any) -> Tensor:
    return run(inputs, "window")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def plan_without_strides(inputs: Any) -> Tensor:
    return run(inputs, "strides")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def plan_without_table(inputs: Any) -> Tensor:
    """Sound where a table is never changed in place; servers do."""
    return run(inputs, "table")


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def plan_with_all(inputs: Any) -> Tensor:
    return run(inputs)
