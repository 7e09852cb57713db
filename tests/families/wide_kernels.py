"""A writer and a sparse kernel in Triton, with offsets of 64 bits and with others, which are wrong in large tensors."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

import attnfuzz
from attnfuzz.families import CacheWrite, SparseDecode

_WRITE = CacheWrite(layout=attnfuzz.Choice(("NHD",)), cache=attnfuzz.Choice(("same",)))
_ATTEND = SparseDecode(
    has_lengths=attnfuzz.Choice((False,)),
    cache=attnfuzz.Choice(("same",)),
    head_size=attnfuzz.Choice((32, 96)),
    v_head_size=attnfuzz.Choice((32,)),
    num_heads=attnfuzz.Choice((1, 3)),
)
_TILE = 16


@triton.jit
def _write_kernel(
    new, new_token, new_head, cache, cache_page, cache_place, cache_head, slots, block_size, head_size,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        dims = tl.arange(0, BLOCK)
        row = tl.load(new + token * new_token + head * new_head + dims, mask=dims < head_size)
        of_kind = slot.to(KIND)
        at = of_kind // block_size * cache_page + of_kind % block_size * cache_place + head * cache_head
        tl.store(cache + at + dims, row, mask=dims < head_size)


@triton.jit
def _attend_kernel(
    q, q_token, kv, indices, out, lse, num_slots, num_heads, scale,
    TOPK: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    dims, first_dims = tl.arange(0, BLOCK), tl.arange(0, VALUES)
    query = tl.load(q + token * q_token + head * HEAD + dims, mask=dims < HEAD, other=0.0).to(tl.float32) * scale
    top, total, acc = -float("inf"), 0.0, tl.zeros([VALUES], tl.float32)
    for start in range(0, TOPK, TILE):
        named = tl.load(indices + token * TOPK + start + tl.arange(0, TILE))
        seen = (named >= 0) & (named < num_slots)
        at = (named.to(KIND) * HEAD).to(tl.int64)
        of_keys = seen[:, None] & (dims < HEAD)[None, :]
        keys = tl.load(kv + at[:, None] + dims[None, :], mask=of_keys, other=0.0).to(tl.float32)
        values = tl.load(kv + at[:, None] + first_dims[None, :], mask=seen[:, None], other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(keys * query[None, :], 1), -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        weights, factor = tl.exp(scores - safe), tl.exp(top - safe)
        total = total * factor + tl.sum(weights, 0)
        acc = acc * factor + tl.sum(weights[:, None] * values, 0)
        top = higher
    row = token * num_heads + head
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * VALUES + first_dims, result.to(out.dtype.element_ty))
    tl.store(lse + row, top + tl.log(tl.where(total == 0.0, 1.0, total)))


def _write(inputs: Any, kind: Any) -> None:
    for new, cache in ((inputs.key, inputs.k_cache), (inputs.value, inputs.v_cache)):
        num_tokens, num_heads, head_size = new.shape
        _write_kernel[(num_tokens, num_heads)](
            new, *new.stride()[:2], cache, *cache.stride()[:3], inputs.slot_mapping, cache.shape[1], head_size,
            BLOCK=triton.next_power_of_2(head_size), KIND=kind,
        )  # fmt: skip


def _attend(inputs: Any, kind: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_size = inputs.q.shape
    _attend_kernel[(num_tokens, num_heads)](
        inputs.q, inputs.q.stride(0), inputs.kv_cache, inputs.indices, inputs.out, inputs.lse,
        len(inputs.kv_cache), num_heads, head_size**-0.5,
        TOPK=inputs.indices.shape[1], HEAD=head_size, BLOCK=triton.next_power_of_2(head_size),
        VALUES=inputs.out.shape[2], TILE=_TILE, KIND=kind,
    )  # fmt: skip
    return inputs.out, inputs.lse


@attnfuzz.kernel(_WRITE)
def write_wide(inputs: Any) -> None:
    """Slots have the 64 bits of the mapping."""
    _write(inputs, tl.int64)


@attnfuzz.kernel(_WRITE)
def write_narrow(inputs: Any) -> None:
    """Slots are cut to 32 bits before they are multiplied with a stride."""
    _write(inputs, tl.int32)


@attnfuzz.kernel(_ATTEND)
def attend_wide(inputs: Any) -> tuple[Tensor, Tensor]:
    """Indices are widened before they are multiplied with the size of a row."""
    return _attend(inputs, tl.int64)


@attnfuzz.kernel(_ATTEND)
def attend_narrow(inputs: Any) -> tuple[Tensor, Tensor]:
    """They are multiplied as they are, in 32 bits."""
    return _attend(inputs, tl.int32)


@attnfuzz.kernel(_ATTEND)
def attend_in_float(inputs: Any) -> tuple[Tensor, Tensor]:
    """They are multiplied in float32, which has no odd number beyond 2^24."""
    return _attend(inputs, tl.float32)
