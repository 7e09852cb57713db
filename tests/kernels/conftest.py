"""Tiny attention problems with known answers: built token by token, solved in float64 without looking at any kernel."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

SCALE = 0.4
GARBAGE_ID = 2**31 - 1
"""In table entries that must not be followed; on the interpreter, following one is a segmentation fault."""

UNIT_ROUNDOFF = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,  # Triton's interpreter drops bits; a GPU, and PyTorch, round to nearest: 2^-8
    torch.float32: 2.0**-24,
}

State = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """Where tensors are made: on the GPU if kernels are compiled, else on the CPU."""
    with torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda") as chosen:
        yield chosen


def solve(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> State:
    """``out`` and ``lse`` in float64, by the definition of attention, one query head at a time."""
    out = torch.zeros((*q.shape[:2], values[0].shape[2]), dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        for head in range(q.shape[1]) if len(k) else ():
            kv_head = head * k.shape[1] // q.shape[1]
            weights = torch.exp(k[:, kv_head].double() @ q[i, head].double() * SCALE)
            out[i, head] = weights @ v[:, kv_head].double() / weights.sum()
            lse[i, head] = weights.sum().log()
    return out, lse


def merge(states: Sequence[State]) -> State:
    """One float64 state from several over disjoint keys, weighted with exponentials as they are."""
    weights = torch.stack([lse.double().masked_fill(lse == math.inf, -math.inf).exp() for _, lse in states])
    outs = torch.stack([out.double() for out, _ in states])
    sums = torch.where(weights[..., None] > 0, weights[..., None] * outs, 0.0).sum(0)
    total = weights.sum(0)
    return sums / total.masked_fill(total == 0, 1.0)[..., None], total.log()


def check(got: State, expected: State) -> None:
    """``out`` within its dtype's rounding of the float64 answer, ``lse`` within that of float32."""
    out, lse = got
    torch.testing.assert_close(out.double(), expected[0], rtol=1.001 * UNIT_ROUNDOFF[out.dtype], atol=2e-6)
    torch.testing.assert_close(lse.double(), expected[1], rtol=2e-6, atol=2e-6)


def spread(tensor: Tensor) -> Tensor:
    """The same values with every stride doubled, in a buffer whose gaps hold poison."""
    poison = math.nan if tensor.is_floating_point() else GARBAGE_ID
    buffer = torch.full([2 * n for n in tensor.shape], poison, dtype=tensor.dtype)
    return buffer[(slice(None, None, 2),) * tensor.dim()].copy_(tensor)


@dataclass(frozen=True)
class Problem:
    """Tensors of a decode problem, in the order that kernels take them, and its answer."""

    args: tuple[Any, ...]
    expected: State
    q: Tensor
    keys: list[Tensor] = field(repr=False)
    values: list[Tensor] = field(repr=False)

    def spread(self) -> Problem:
        """With every stride of every tensor doubled."""
        args = tuple(spread(a) if isinstance(a, Tensor) else a for a in self.args)
        return Problem(args, self.expected, self.q, self.keys, self.values)


def _tokens(
    lens: Sequence[int], heads: tuple[int, int], head_size: int, v_head_size: int | None, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1234)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, keys = normal(len(lens), heads[0], head_size), [normal(n, heads[1], head_size) for n in lens]
    return q, keys, [normal(n, heads[1], v_head_size or head_size) for n in lens]


def dense_problem(
    lens: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 1),
    head_size: int = 8,
    v_head_size: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> Problem:
    """``args`` of dense_decode; rows past each sequence's end, and one spare row, hold NaN."""
    q, keys, values = _tokens(lens, heads, head_size, v_head_size, dtype)
    k = torch.full((len(lens), max(lens) + 1, heads[1], head_size), math.nan, dtype=dtype)
    v = k.new_full((*k.shape[:3], v_head_size or head_size), math.nan)
    for i, n in enumerate(lens):
        k[i, :n], v[i, :n] = keys[i], values[i]
    return Problem((q, k, v, torch.tensor(lens, dtype=torch.int32), SCALE), solve(q, keys, values), q, keys, values)


def paged_problem(
    lens: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 1),
    head_size: int = 8,
    v_head_size: int | None = None,
    block_size: int = 4,
    layout: str = "NHD",
    dtype: torch.dtype = torch.float16,
) -> Problem:
    """``args`` of paged_decode; pages lie in reverse order, with NaN in page tails and page 0, garbage in spare ids."""
    q, keys, values = _tokens(lens, heads, head_size, v_head_size, dtype)
    num_pages = [-(-n // block_size) for n in lens]
    k = torch.full((sum(num_pages) + 1, block_size, heads[1], head_size), math.nan, dtype=dtype)
    v = k.new_full((*k.shape[:3], v_head_size or head_size), math.nan)
    table = torch.full((len(lens), max(num_pages) + 1), GARBAGE_ID, dtype=torch.int32)
    page = len(k)
    for i, n in enumerate(lens):
        for t in range(n):
            if t % block_size == 0:
                page -= 1
                table[i, t // block_size] = page
            k[page, t % block_size], v[page, t % block_size] = keys[i][t], values[i][t]
    caches = store_as(layout, k, v)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    args = (q, *caches, table, seq_lens, SCALE, block_size, layout)
    return Problem(args, solve(q, keys, values), q, keys, values)


def store_as(layout: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Caches in NHD, stored in another layout."""
    if layout == "interleaved":
        both = torch.stack((k, v), dim=1)
        return both[:, 0], both[:, 1]
    if layout == "HND":
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    if layout == "packed":
        num_blocks, block_size, num_kv_heads, head_size = k.shape
        x = 16 // k.element_size()
        chunks = k.reshape(num_blocks, block_size, num_kv_heads, head_size // x, x)
        return chunks.permute(0, 2, 3, 1, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()
    return k, v


# Test modules cannot import this one (pytest's importlib mode), so its functions reach them as fixtures.


@pytest.fixture(name="check", scope="session")
def _check() -> Callable[..., None]:
    return check


@pytest.fixture(name="merge", scope="session")
def _merge() -> Callable[..., State]:
    return merge


@pytest.fixture(name="spread", scope="session")
def _spread() -> Callable[..., Tensor]:
    return spread


@pytest.fixture(name="dense_problem", scope="session")
def _dense_problem() -> Callable[..., Problem]:
    return dense_problem


@pytest.fixture(name="paged_problem", scope="session")
def _paged_problem() -> Callable[..., Problem]:
    return paged_problem
