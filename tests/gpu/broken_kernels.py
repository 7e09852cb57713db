"""Correct decode kernels, and what must not happen on a GPU beside them; executors load them by this file's path."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz
from attnfuzz.kernels.dense import launch
from attnfuzz.kernels.paged import launch as launch_paged

FAR = 1 << 44  # elements: further away than any memory of the process
SPIN_S = 60  # a hang that outlives its test ends by itself
TILE_BYTES = 32 << 20

_KEPT_ADDRESSES: list[int] = []
_TICKETS: list[Tensor] = []


@triton.jit
def store_kernel(p, value, OFFSET: tl.constexpr):
    tl.store(p + OFFSET, value)


@triton.jit
def copy_kernel(p_to, p_from, OFFSET: tl.constexpr):
    tl.store(p_to, tl.load(p_from + OFFSET))


@triton.jit
def read_misaligned_kernel(p_to):
    p = (p_to.to(tl.int64) + 1).to(tl.pointer_type(tl.float32))
    tl.store(p_to, tl.load(p).to(p_to.dtype.element_ty))


@triton.jit(debug=True)
def assert_kernel(p_seq_lens):
    tl.device_assert(tl.load(p_seq_lens) < 0, "lengths are negative here")


@triton.jit
def spin_kernel(p, LIMIT_NS: tl.constexpr):
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < LIMIT_NS:
        now = tl.extra.cuda.globaltimer()
    tl.store(p, 0.0)


@triton.jit
def add_zero_times_kernel(p_out, p_x):
    tl.store(p_out, tl.load(p_out) + 0.0 * tl.load(p_x).to(tl.float32))


@triton.jit
def add_zero_times_slot_kernel(p_out, p_v, p_table, stride_block, stride_slot, SLOT: tl.constexpr):
    x = tl.load(p_v + tl.load(p_table).to(tl.int64) * stride_block + SLOT * stride_slot)
    tl.store(p_out, tl.load(p_out) + 0.0 * x.to(tl.float32))


@triton.jit
def add_ticket_kernel(p_out, p_ticket):
    ticket = tl.atomic_add(p_ticket, 1)
    tl.store(p_out, tl.load(p_out) + ticket)


def decode(inputs: Any) -> tuple[Tensor, Tensor]:
    return launch.dense_decode(
        inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale, out=inputs.out, lse=inputs.lse
    )


def decode_pages(inputs: Any) -> tuple[Tensor, Tensor]:
    caches = (inputs.k_cache, inputs.v_cache, inputs.block_table)
    sizes = (inputs.scale, inputs.block_size, inputs.layout)
    return launch_paged.paged_decode(inputs.q, *caches, inputs.seq_lens, *sizes, out=inputs.out, lse=inputs.lse)


@attnfuzz.kernel("dense_decode")
def correct(inputs: Any) -> Any:
    return decode(inputs)


@attnfuzz.kernel("paged_decode")
def correct_on_pages(inputs: Any) -> Any:
    return decode_pages(inputs)


# What takes the process or its CUDA context down.


@attnfuzz.kernel("dense_decode")
def writes_far_away(inputs: Any) -> Any:
    store_kernel[(1,)](inputs.out, 0.0, OFFSET=FAR)
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def reads_far_away(inputs: Any) -> Any:
    copy_kernel[(1,)](inputs.out, inputs.k, OFFSET=FAR)
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def reads_misaligned(inputs: Any) -> Any:
    read_misaligned_kernel[(1,)](inputs.out)
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def asserts(inputs: Any) -> Any:
    assert_kernel[(1,)](inputs.seq_lens)
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def indexes_out_of_range(inputs: Any) -> Any:
    rows = torch.full((1,), 1 << 20, device=inputs.q.device)
    return inputs.q[rows], inputs.lse


@attnfuzz.kernel("dense_decode")
def wraps_the_error(inputs: Any) -> Any:
    store_kernel[(1,)](inputs.out, 0.0, OFFSET=FAR)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise ValueError("something went wrong") from error


@attnfuzz.kernel("dense_decode")
def raises_too_early(inputs: Any) -> Any:
    store_kernel[(1,)](inputs.out, 0.0, OFFSET=FAR)
    raise ValueError("raised while a faulty launch is under way")


@attnfuzz.kernel("dense_decode")
def never_returns(inputs: Any) -> Any:
    spin_kernel[(1,)](inputs.out, LIMIT_NS=SPIN_S * 10**9)
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def segfaults(inputs: Any) -> Any:
    decode(inputs)
    ctypes.string_at(0)


@attnfuzz.kernel("dense_decode")
def exits(inputs: Any) -> Any:
    decode(inputs)
    os._exit(3)


# What the process survives.


@attnfuzz.kernel("dense_decode")
def launches_too_large_a_grid(inputs: Any) -> Any:
    store_kernel[(1, 1 << 20)](inputs.out, 0.0, OFFSET=0)
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def allocates_without_end(inputs: Any) -> Any:
    hoard = []
    while True:
        hoard.append(torch.empty(1 << 30, dtype=torch.uint8, device=inputs.q.device))


@attnfuzz.kernel("dense_decode")
def keeps_memory(inputs: Any) -> Any:
    """Takes all memory there is and gives back one tile."""
    try:
        while True:
            _KEPT_ADDRESSES.append(torch.cuda.caching_allocator_alloc(TILE_BYTES))
    except torch.OutOfMemoryError:
        torch.cuda.caching_allocator_delete(_KEPT_ADDRESSES.pop())  # type: ignore[no-untyped-call]  # torch does not annotate it
    return decode(inputs)


# What only the oracles notice.


@attnfuzz.kernel("dense_decode")
def writes_after_out(inputs: Any) -> Any:
    store_kernel[(1,)](inputs.out, 1.0, OFFSET=inputs.out.numel())
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def writes_before_lse(inputs: Any) -> Any:
    store_kernel[(1,)](inputs.lse, 1.0, OFFSET=-1)
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def writes_after_workspace(inputs: Any) -> Any:
    workspace = torch.empty(16, device=inputs.q.device)
    store_kernel[(1,)](workspace, 1.0, OFFSET=16)
    return decode(inputs)


@attnfuzz.kernel("dense_decode")
def modifies_query(inputs: Any) -> Any:
    result = decode(inputs)
    store_kernel[(1,)](inputs.q, 7.5, OFFSET=0)
    return result


@attnfuzz.kernel("dense_decode")
def reads_past_the_length(inputs: Any) -> Any:
    result = decode(inputs)
    add_zero_times_kernel[(1,)](inputs.out, inputs.v[0, -1])
    return result


@attnfuzz.kernel("paged_decode")
def reads_page_tail(inputs: Any) -> Any:
    result = decode_pages(inputs)
    strides = inputs.v_cache.stride()[:2]
    slot = inputs.block_size - 1
    add_zero_times_slot_kernel[(1,)](inputs.out, inputs.v_cache, inputs.block_table, *strides, SLOT=slot)
    return result


@attnfuzz.kernel("dense_decode")
def leaves_last_row(inputs: Any) -> Any:
    out, lse = decode(inputs)
    partial = torch.empty_like(out)
    partial[:-1] = out[:-1]
    return partial, lse


@attnfuzz.kernel("dense_decode")
def reads_workspace_early(inputs: Any) -> Any:
    result = decode(inputs)
    add_zero_times_kernel[(1,)](inputs.out, torch.empty(1, device=inputs.q.device))
    return result


@attnfuzz.kernel("dense_decode")
def counts_its_calls(inputs: Any) -> Any:
    """A semaphore that is not set back."""
    if not _TICKETS:
        _TICKETS.append(torch.zeros(1, dtype=torch.int32, device=inputs.q.device))
    out, lse = decode(inputs)
    add_ticket_kernel[(1,)](out, _TICKETS[0])
    return out, lse


@attnfuzz.kernel("dense_decode")
def returns_on_the_host(inputs: Any) -> Any:
    out, lse = decode(inputs)
    return out.cpu(), lse
