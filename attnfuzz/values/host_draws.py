"""`attnfuzz.values.draws` on the host, in 32-bit words: the same integers in a third of the time.

The hash is made of operations on 32-bit words. Unsigned integers, which torch has on paper only, need no masks and
half the memory; NumPy defines what happens when they overflow.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Int64
from numpy.typing import NDArray
from torch import Tensor

from attnfuzz.problems.supports import MAX_HEAD_SIZE
from attnfuzz.values.draws import DrawnRecipe, exact, fine_bits

__all__ = ["HashedRecipe", "draw_on_host", "exact_on_host"]

HashedRecipe = DrawnRecipe | Literal["signed"]

_Words = NDArray[np.uint32]


def draw_on_host(
    states: Int64[Tensor, " rows"],
    recipe: HashedRecipe,
    num_heads: int,
    head_size: int,
    signs: Int32[Tensor, "rows head_size"] | None = None,
) -> Int32[Tensor, "rows num_heads head_size"]:
    """The integers that ``draw`` makes of ``element_words``; for "signed", 1 to 4 times ``signs``."""
    rows = states.numpy().astype(np.uint32)
    words = _mix(rows[:, None, None] ^ _columns(num_heads, head_size))
    if recipe == "signed" and signs is not None:
        words &= np.uint32(3)
        words += np.uint32(1)
        drawn: Any = words.view(np.int32)
        drawn *= signs.numpy()[:, None]
    else:
        drawn = _draw(words, recipe)
    return torch.from_numpy(drawn)


def exact_on_host(integers: Int[Tensor, "*shape"], dtype: torch.dtype, exponent: int = 0) -> Float[Tensor, "*shape"]:
    """As `attnfuzz.values.draws.exact`; float16, whose arithmetic is emulated, in half the time."""
    if dtype is not torch.float16:
        return exact(integers, dtype, exponent)
    return exact(integers, torch.float32, exponent).half()


def _draw(words: _Words, recipe: HashedRecipe) -> NDArray[np.int32]:
    """In place."""
    if (bits := fine_bits(recipe)) is not None:
        words &= np.uint32((1 << bits) - 1)
        words -= np.uint32(1 << (bits - 1))  # as below, this may wrap around
    elif recipe == "integers":
        words -= words // np.uint32(5) * np.uint32(5)
        words -= np.uint32(2)  # below 0 it wraps around to what the same bits mean with a sign
    elif recipe == "large":
        signs = words & np.uint32(128)
        signs >>= np.uint32(6)
        np.subtract(np.uint32(1), signs, out=signs)  # 1, or -1 modulo 2^32
        words &= np.uint32(127)
        words += np.uint32(128)
        words *= np.uint32(4)
        words *= signs
    elif recipe == "small":
        signs = words & np.uint32(2048)
        signs >>= np.uint32(10)
        np.subtract(np.uint32(1), signs, out=signs)
        shifts = words >> np.uint32(7)
        shifts &= np.uint32(15)
        words &= np.uint32(127)
        words <<= shifts
        words *= signs
    else:
        pairs = words >> np.uint32(6)
        pairs &= np.uint32(0x3F03F)
        words &= np.uint32(0x3F03F)
        pairs += words  # two sums of two, 12 bits apart
        words = pairs >> np.uint32(12)
        pairs &= np.uint32(127)
        words += pairs
        words -= np.uint32(126)
    return words.view(np.int32)


def _mix(x: _Words) -> _Words:
    """``attnfuzz.problems.hashing.mix``, in place."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


@functools.lru_cache(maxsize=64)
def _columns(num_heads: int, head_size: int) -> _Words:
    """What is hashed into a row's state for each of its elements."""
    heads = np.arange(num_heads, dtype=np.uint32) * np.uint32(MAX_HEAD_SIZE)
    columns: _Words = np.add(heads[:, None], np.arange(head_size, dtype=np.uint32), dtype=np.uint32)
    return columns
