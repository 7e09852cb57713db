"""Decode kernels whose programs meet in memory, and that are right where programs run one after the other."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import copy
import functools
from typing import Any

import torch
import triton
import triton.language as tl

import attnfuzz

__all__ = [
    "added_by_atomics",
    "added_without_atomics",
    "cleared_by_other_programs",
    "copied_behind_the_caller",
    "counts_before_it_stores",
    "last_program_reads_partials",
    "last_to_arrive_reads_partials",
    "launched_on_the_default_stream",
    "stored_behind_a_barrier",
    "stored_by_one_program",
    "stored_through_block_pointers",
    "stored_without_a_barrier",
    "values_copied_on_a_stream",
    "waits_for_all_programs",
    "zeroed_by_the_first_program",
]

SPLITS = 4


@triton.jit
def _of_split(
    p_q, p_k, p_v, p_lens, stride_s, stride_t, scale, HEADS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Of every SPLITS-th token the numerator and the denominator, beside the row's maximum."""
    i_row, i_split, i_d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    q = tl.load(p_q + i_row * D + i_d).to(tl.float32)
    length = tl.load(p_lens + i_row // HEADS)
    start = (i_row // HEADS) * stride_s + (i_row % HEADS) * D + i_d
    most = float("-inf")
    for i in range(length):
        most = tl.maximum(most, tl.sum(q * tl.load(p_k + start + i * stride_t), 0) * scale)
    acc = tl.zeros([D], tl.float32)
    total = 0.0
    for i in range(i_split, length, SPLITS):
        weight = tl.exp(tl.sum(q * tl.load(p_k + start + i * stride_t), 0) * scale - most)
        acc += weight * tl.load(p_v + start + i * stride_t)
        total += weight
    return acc, total, tl.where(length > 0, most, 0.0)


@triton.jit
def _through_blocks(p_out, rows, D: tl.constexpr):
    """Half of each block lies behind the last of an odd number of rows."""
    block = tl.make_block_ptr(p_out, (rows, D), (D, 1), (2 * tl.program_id(0), 0), (2, D), (1, 0))
    tl.store(block, tl.load(block, boundary_check=(0,)), boundary_check=(0,))


@triton.jit
def _divided(p_out, p_lse, acc, total, most, D: tl.constexpr):
    i_row, i_d = tl.program_id(0), tl.arange(0, D)
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(p_out + i_row * D + i_d, acc / divisor)
    tl.store(p_lse + i_row, tl.where(total > 0, tl.log(divisor) + most, float("-inf")))


@triton.jit
def _add(
    p_q, p_k, p_v, p_lens, p_acc, p_total, p_most, stride_s, stride_t, scale,
    HEADS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, ATOMIC: tl.constexpr, ZEROED: tl.constexpr,
):  # fmt: skip
    i_row, i_split, i_d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    p_acc += i_row * D + i_d
    p_total += i_row
    if ZEROED and i_split == 0:
        tl.store(p_acc, tl.zeros([D], tl.float32))
        tl.store(p_total, 0.0)
    acc, total, most = _of_split(p_q, p_k, p_v, p_lens, stride_s, stride_t, scale, HEADS, SPLITS, D)
    tl.store(p_most + i_row, most)  # all of them the same
    if ATOMIC:
        tl.atomic_add(p_acc, acc)
        tl.atomic_add(p_total, total)
    else:
        tl.store(p_acc, tl.load(p_acc) + acc)
        tl.store(p_total, tl.load(p_total) + total)


@triton.jit
def _finish(p_acc, p_total, p_most, p_out, p_lse, D: tl.constexpr):
    i_row = tl.program_id(0)
    acc = tl.load(p_acc + i_row * D + tl.arange(0, D))
    _divided(p_out, p_lse, acc, tl.load(p_total + i_row), tl.load(p_most + i_row), D)


@triton.jit
def _merge(
    p_q, p_k, p_v, p_lens, p_acc, p_total, p_arrived, p_out, p_lse, stride_s, stride_t, scale,
    HEADS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    i_row, i_split, i_d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    acc, total, most = _of_split(p_q, p_k, p_v, p_lens, stride_s, stride_t, scale, HEADS, SPLITS, D)
    at = i_row * SPLITS + i_split
    merges = i_split == SPLITS - 1
    if HOW == "counts early":
        merges = tl.atomic_add(p_arrived + i_row, 1) == SPLITS - 1
    tl.store(p_acc + at * D + i_d, acc)
    tl.store(p_total + at, total)
    if HOW != "no barrier":
        tl.debug_barrier()
    if HOW == "counts" or HOW == "no barrier":
        merges = tl.atomic_add(p_arrived + i_row, 1) == SPLITS - 1
    if HOW == "waits":
        tl.atomic_add(p_arrived + i_row, 1)
        if merges:
            while tl.atomic_add(p_arrived + i_row, 0) < SPLITS:
                pass
    if merges:
        acc = tl.zeros([D], tl.float32)
        total = 0.0
        for i in range(SPLITS):
            acc += tl.load(p_acc + (i_row * SPLITS + i) * D + i_d)
            total += tl.load(p_total + i_row * SPLITS + i)
        _divided(p_out, p_lse, acc, total, most, D)


@triton.jit
def _clear(
    p_q, p_k, p_v, p_lens, p_out, p_lse, stride_s, stride_t, scale,
    HEADS: tl.constexpr, D: tl.constexpr, CLEARS: tl.constexpr,
):  # fmt: skip
    """Of two programs for a row, all the first of which begin first."""
    i_row, i_d = tl.program_id(0), tl.arange(0, D)
    if tl.program_id(2) == 1:
        acc, total, most = _of_split(p_q, p_k, p_v, p_lens, stride_s, stride_t, scale, HEADS, 1, D)
        _divided(p_out, p_lse, acc, total, most, D)
    elif CLEARS:
        tl.store(p_out + i_row * D + i_d, tl.zeros([D], tl.float32))


SUPPORTS: Any = {"dtypes": ("float32",), "head_sizes": (16,), "gqa_ratios": (1,), "strides": "contiguous"}


def _sums(i: Any, *, atomic: bool, zeroed: bool) -> None:
    seqs, heads, size = i.q.shape
    made = torch.empty if zeroed else torch.zeros
    rows, device = seqs * heads, i.q.device
    acc, total, most = made(rows, size, device=device), made(rows, device=device), torch.empty(rows, device=device)
    _add[(rows, SPLITS)](
        i.q, i.k, i.v, i.seq_lens, acc, total, most, i.k.stride(0), i.k.stride(1), float(i.scale),
        HEADS=heads, SPLITS=SPLITS, D=size, ATOMIC=atomic, ZEROED=zeroed,
    )  # fmt: skip
    _finish[(rows,)](acc, total, most, i.out, i.lse, D=size)


def _merged(i: Any, how: str) -> None:
    seqs, heads, size = i.q.shape
    rows, device = seqs * heads, i.q.device
    acc, total = torch.empty(rows, SPLITS, size, device=device), torch.empty(rows, SPLITS, device=device)
    arrived = torch.zeros(rows, dtype=torch.int32, device=device)
    _merge[(rows, SPLITS)](
        i.q, i.k, i.v, i.seq_lens, acc, total, arrived, i.out, i.lse, i.k.stride(0), i.k.stride(1), float(i.scale),
        HEADS=heads, SPLITS=SPLITS, D=size, HOW=how,
    )  # fmt: skip


def _cleared(i: Any, *, clears: bool) -> None:
    seqs, heads, size = i.q.shape
    _clear[(seqs * heads, 1, 2)](
        i.q, i.k, i.v, i.seq_lens, i.out, i.lse, i.k.stride(0), i.k.stride(1), float(i.scale),
        HEADS=heads, D=size, CLEARS=clears,
    )  # fmt: skip


@functools.cache
def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it


def _with_copied_values(i: Any, *, waits: bool) -> None:
    """V is copied on a stream of its own, for which the caller's waits; ``waits``: and it for the caller's."""
    if i.q.is_cuda:
        current, i = torch.cuda.current_stream(), copy.copy(i)
        if waits:
            _stream().wait_stream(current)
        with torch.cuda.stream(_stream()):
            i.v = i.v.clone()
        i.v.record_stream(current)
        current.wait_stream(_stream())
    _merged(i, "counts")


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def values_copied_on_a_stream(i):
    """On a GPU V is copied on a stream that does not wait for what the caller has given to do."""
    _with_copied_values(i, waits=False)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def copied_behind_the_caller(i):
    """The same as it has to be."""
    _with_copied_values(i, waits=True)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def added_without_atomics(i):
    """Programs of a sequence add to one sum, and what two add at a time is lost."""
    _sums(i, atomic=False, zeroed=False)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS, deterministic=False))
def added_by_atomics(i):
    """The same as it has to be."""
    _sums(i, atomic=True, zeroed=False)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS, deterministic=False))
def zeroed_by_the_first_program(i):
    """Sums begin when the first program of a sequence runs, which need not be the first."""
    _sums(i, atomic=True, zeroed=True)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def last_program_reads_partials(i):
    """The last split merges all of them, written or not."""
    _merged(i, "last")


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def counts_before_it_stores(i):
    """The last that counts itself merges all, of which others may not have stored theirs yet."""
    _merged(i, "counts early")


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def last_to_arrive_reads_partials(i):
    """The same as it has to be."""
    _merged(i, "counts")


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def waits_for_all_programs(i):
    """The last program waits until all have counted themselves: right, where all of them come to run."""
    _merged(i, "waits")


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS | {"head_sizes": (128,)}))
def stored_without_a_barrier(i):
    """The first warp of a program counts it while others may not have stored their part of what it adds."""
    _merged(i, "no barrier")


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS | {"head_sizes": (128,)}))
def stored_behind_a_barrier(i):
    """The same as it has to be."""
    _merged(i, "counts")


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def cleared_by_other_programs(i):
    """Programs that begin first clear the rows that others store."""
    _cleared(i, clears=True)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def stored_by_one_program(i):
    """The same as it has to be."""
    _cleared(i, clears=False)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def stored_through_block_pointers(i):
    """Each row is loaded and stored once more, by one program."""
    _cleared(i, clears=False)
    rows = i.out.shape[0] * i.out.shape[1]
    _through_blocks[(triton.cdiv(rows, 2),)](i.out, rows, D=i.out.shape[2])


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**SUPPORTS))
def launched_on_the_default_stream(i):
    """On a GPU what it launches runs there, whatever the caller's stream is."""
    with torch.cuda.stream(torch.cuda.default_stream() if i.q.is_cuda else None):
        _merged(i, "counts")
