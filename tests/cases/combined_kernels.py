"""Correct kernels, and one with a bug, that take combinations of head size, page size and dtype, and raise for others.

So many real ones do: each combination is a program that somebody has compiled.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz

PRODUCTS: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"), "layouts": ("NHD",), "strides": "contiguous", "lse": "none"
}  # fmt: skip
TABLE = (
    {"head_size": (64, 128), "block_size": 16},
    {"head_size": 256, "block_size": (32, 64), "dtype": "bfloat16"},
)


def is_compiled(case: Any) -> bool:
    if case.head_size in (64, 128):
        return bool(case.block_size == 16)
    return bool(case.head_size == 256 and case.block_size in (32, 64) and case.dtype == "bfloat16")


def decode(inputs: Any, *, drops_a_token: bool = False) -> Tensor:
    q, size, head_size = inputs.q, inputs.block_size, inputs.q.shape[2]
    is_large = head_size == 256 and size in (32, 64) and q.dtype is torch.bfloat16
    if not is_large and not (head_size in (64, 128) and size == 16):
        raise NotImplementedError(f"nothing is compiled for {head_size}, {size} and {q.dtype}")
    num_kv_heads = inputs.k_cache.shape[2]
    group, out = q.shape[1] // num_kv_heads, torch.zeros_like(q)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        pages = inputs.block_table[seq, : (length + size - 1) // size]
        k, v = (
            cache[pages].reshape(-1, num_kv_heads, head_size)[:length].float().repeat_interleave(group, dim=1)
            for cache in (inputs.k_cache, inputs.v_cache)
        )
        if drops_a_token and is_large and length > 1:
            k, v = k[:-1], v[:-1]
        if length:
            weights = (inputs.scale * torch.einsum("hd,nhd->hn", q[seq].float(), k)).softmax(1)
            out[seq] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
    return out


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(where=TABLE, **PRODUCTS))
def by_a_table(inputs):
    return decode(inputs)


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(where=is_compiled, **PRODUCTS))
def by_a_function(inputs):
    return decode(inputs)


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(where=TABLE, **PRODUCTS))
def drops_a_token(inputs):
    return decode(inputs, drops_a_token=True)


class Doubled(attnfuzz.Problem):
    """Twice each number."""

    size = attnfuzz.Integer(1, 8)
    parts = attnfuzz.Integers(1, 4, least=0, most=3, total=6)
    dtype = attnfuzz.Choice(("float16", "float32"))
    head_size = attnfuzz.Choice((8, 16, 32))

    def tensors(self, case):
        roles: dict[str, Any] = {"x": "input", "y": "output"}
        return {name: attnfuzz.TensorSpec((case.size,), case.dtype, role) for name, role in roles.items()}

    def write(self, case, tensors):
        tensors["x"].copy_(attnfuzz.numbers((case.size,), seed=1, name="x"))

    def reference(self, case, tensors):
        return {"y": 2 * tensors["x"].double()}


def small_or_single_precision(case: Any) -> bool:
    return bool(case.size < 4 or case.dtype == "float32")


def doubled(inputs: Any, factor: float = 2.0) -> Any:
    if inputs.size >= 4 and inputs.dtype != "float32":
        raise NotImplementedError("so many numbers are doubled in single precision only")
    return inputs.x * (factor if inputs.size >= 4 else 2)


@attnfuzz.kernel(Doubled(), supports=attnfuzz.Supports(where=small_or_single_precision))
def small_or_single(inputs):
    return doubled(inputs)


@attnfuzz.kernel(Doubled(), supports=attnfuzz.Supports(where=small_or_single_precision))
def small_or_single_wrong(inputs):
    return doubled(inputs, factor=3.0)
