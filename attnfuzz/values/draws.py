"""Integer draws from hash words, their exact conversion to floating point, and tensors filled with them.

On the host the hash, which is made of operations on 32-bit words, runs on unsigned integers of that size, in a third of
the time: torch has them on paper only, and NumPy defines what happens when they overflow. Tensors of many cases that
are made alike are filled together.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int32, Int64
from numpy.typing import NDArray
from torch import Tensor

from attnfuzz.problems.hashing import fold, stream_key
from attnfuzz.problems.limits import HASH_CHUNK_ELEMENTS
from attnfuzz.problems.recipes import NORMAL_EXPONENT, KeyRecipe, ValueRecipe
from attnfuzz.problems.supports import MAX_HEAD_SIZE

DrawnRecipe = Literal["integers", "normal", "large", "small", "fine8", "fine11", "fine24"]
"""Recipes that draw every element on its own; "fine" with so many bits."""

_SUBNORMAL_EXPONENT = {torch.float16: -24, torch.bfloat16: -133}
"""Exponent of the smallest number above 0; for float32, of the smallest normal one."""

_FINE_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of the significand of each dtype (IEEE 754; bfloat16 is the upper half of float32)."""


class Stream(IntEnum):
    """Hash streams of one seed. Numbers are part of saved cases: never reuse or renumber.

    10 and 11 are taken by `attnfuzz.problems.variants`, 12 and 13 by `attnfuzz.problems.quantised_kv`: neither may load
    torch.
    """

    Q = 1
    K = 2
    V = 3
    SIGN = 4
    PREFIX_OUTPUT = 5
    SUFFIX_OUTPUT = 6
    PREFIX_LSE = 7
    SUFFIX_LSE = 8
    COMMON_LSE = 9


def element_words(
    states: Int64[Tensor, " rows"], num_heads: int, head_size: int
) -> Int64[Tensor, "rows num_heads head_size"]:
    """One hash word per element of every row's ``[num_heads, head_size]`` vectors."""
    heads = torch.arange(num_heads, device=states.device) * MAX_HEAD_SIZE
    dims = torch.arange(head_size, device=states.device)
    words: Tensor = fold(states[:, None, None], heads[:, None] + dims)
    return words


def drawn_as(recipe: KeyRecipe | ValueRecipe, dtype: torch.dtype) -> tuple[DrawnRecipe, int]:
    """The kind of draw for ``recipe``, and the power of 2 to multiply it with."""
    if recipe == "fine":
        bits = _FINE_BITS[dtype]
        return cast(DrawnRecipe, f"fine{bits}"), 2 - bits
    if recipe == "small":
        exponent = _SUBNORMAL_EXPONENT.get(dtype, _SUBNORMAL_EXPONENT[torch.bfloat16])
        return "fine11" if dtype == torch.float16 else "small", exponent
    return cast(DrawnRecipe, recipe), NORMAL_EXPONENT if recipe == "normal" else 0


def fine_bits(recipe: str) -> int | None:
    """How many bits the numbers of a "fine" recipe have; None for another one."""
    return int(recipe.removeprefix("fine")) if recipe.startswith("fine") else None


def draw(words: Int64[Tensor, "*shape"], recipe: DrawnRecipe) -> Int64[Tensor, "*shape"]:
    """Integers for the recipes that draw every element on its own.

    "normal" is the sum of four uniform 6-bit integers, centred (Irwin-Hall): -126 to 126. "large" has magnitudes
    512, 516, ... 1020, which bfloat16 holds; "small" up to 127 times a power of two up to 2^15. "fine" ones use all
    bits of a significand, the sign included: uniform.
    """
    if (bits := fine_bits(recipe)) is not None:
        return (words & ((1 << bits) - 1)) - (1 << (bits - 1))
    if recipe == "integers":
        return words % 5 - 2
    if recipe == "large":
        magnitudes = ((words & 127) + 128) * 4
        return torch.where(words & 128 == 0, magnitudes, -magnitudes)
    if recipe == "small":
        magnitudes = (words & 127) << (words >> 7 & 15)
        return torch.where(words & 2048 == 0, magnitudes, -magnitudes)
    pairs = (words & 0x3F03F) + (words >> 6 & 0x3F03F)  # two sums of two, 12 bits apart
    return (pairs & 127) + (pairs >> 12) - 126


def exact(integers: Int[Tensor, "*shape"], dtype: torch.dtype, exponent: int = 0) -> Float[Tensor, "*shape"]:
    """``integers * 2**exponent`` in ``dtype``; the recipes only pass what ``dtype`` holds exactly."""
    floats = integers.to(dtype)
    return floats if exponent == 0 else floats.mul_(2.0**exponent)


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
    """The numbers that are hashed into a row's state, one for each of its elements."""
    heads = np.arange(num_heads, dtype=np.uint32) * np.uint32(MAX_HEAD_SIZE)
    columns: _Words = np.add(heads[:, None], np.arange(head_size, dtype=np.uint32), dtype=np.uint32)
    return columns


Recipe = DrawnRecipe | Literal["signed", "level", "code"]

_HOST_CHUNK_ELEMENTS = 1 << 16
"""On a CPU hash words should stay in its cache."""


class _Kind(NamedTuple):
    """The properties that fillings must share to be filled together."""

    recipe: Recipe
    num_heads: int
    head_size: int
    dtype_name: str
    exponent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """A tensor ``[rows, num_heads, head_size]`` to fill with integers times ``2**exponent``.

    ``rows`` holds a number for each row: the hash state that its elements go on from (those that
    `draw` makes integers for; ``signed``: 1 to 4 times the sign of the dimension), its factor of the sign
    pattern (``level``), or three numbers of 7 bits, a byte for each and one for the head (``code``). ``signs`` is the
    pattern.
    """

    rows: Int64[Tensor, " rows"]
    signs: Int32[Tensor, " head_size"] | None = None
    recipe: Recipe
    num_heads: int
    head_size: int
    dtype: torch.dtype
    exponent: int = 0

    @property
    def kind(self) -> _Kind:
        """The properties that decide what it can be filled together with."""
        return _Kind(self.recipe, self.num_heads, self.head_size, str(self.dtype), self.exponent)


def fill_all(fillings: Sequence[Filling]) -> list[Float[Tensor, "_rows _heads _head_size"]]:
    """The tensors of ``fillings``, on the device of their rows. Those of one kind cost as many operations as one."""
    found: dict[int, Tensor] = {}
    order = sorted(range(len(fillings)), key=lambda i: fillings[i].kind)
    for _, group in itertools.groupby(order, key=lambda i: fillings[i].kind):
        alike = list(group)
        filled = _fill_alike([fillings[i] for i in alike])
        found |= zip(alike, torch.split(filled, [len(fillings[i].rows) for i in alike]), strict=True)
    return [found[i] for i in range(len(fillings))]


def _fill_alike(fillings: Sequence[Filling]) -> Float[Tensor, "rows num_heads head_size"]:
    """The tensors of fillings of one kind, one after another."""
    first = fillings[0]
    rows = torch.cat([filling.rows for filling in fillings]) if len(fillings) > 1 else first.rows
    if not len(rows):
        return rows.new_empty((0, first.num_heads, first.head_size), dtype=first.dtype)
    if first.recipe == "code":
        codes = _exact(_decode(rows, first.num_heads), first)
        return codes.repeat(1, 1, -(-first.head_size // 4))[..., : first.head_size].contiguous()
    signs = _signs_of_rows(fillings) if first.recipe in ("signed", "level") else None
    if first.recipe == "level" and signs is not None:
        levels = _exact(rows.int()[:, None] * signs, first)
        return levels[:, None, :].expand(-1, first.num_heads, -1).contiguous()
    at_once = HASH_CHUNK_ELEMENTS if rows.is_cuda else _HOST_CHUNK_ELEMENTS
    chunk = max(1, at_once // (first.num_heads * first.head_size))
    if len(rows) <= chunk:
        return _drawn(first, rows, signs)
    out = rows.new_empty((len(rows), first.num_heads, first.head_size), dtype=first.dtype)
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        out[part] = _drawn(first, rows[part], None if signs is None else signs[part])
    return out


def _drawn(
    kind: Filling, rows: Int64[Tensor, " rows"], signs: Int32[Tensor, "rows head_size"] | None
) -> Float[Tensor, "rows num_heads head_size"]:
    if not rows.is_cuda:
        recipe = cast(HashedRecipe, kind.recipe)
        return _exact(draw_on_host(rows, recipe, kind.num_heads, kind.head_size, signs), kind)
    words = element_words(rows, kind.num_heads, kind.head_size)
    if signs is not None:
        return _exact(((words & 3) + 1) * signs[:, None], kind)
    return _exact(draw(words, cast(DrawnRecipe, kind.recipe)), kind)


def _exact(integers: Int[Tensor, "*shape"], kind: Filling) -> Float[Tensor, "*shape"]:
    return (exact if integers.is_cuda else exact_on_host)(integers, kind.dtype, kind.exponent)


def _signs_of_rows(fillings: Sequence[Filling]) -> Int32[Tensor, "rows head_size"]:
    """The sign pattern for each row."""
    rows = sum(len(filling.rows) for filling in fillings)
    if all(filling.signs is fillings[0].signs for filling in fillings):
        signs = cast(Tensor, fillings[0].signs)
        return signs.expand(rows, len(signs))
    return torch.cat([cast(Tensor, filling.signs).expand(len(filling.rows), -1) for filling in fillings])


def _decode(packed: Int64[Tensor, " rows"], num_heads: int) -> Int32[Tensor, "rows num_heads 4"]:
    """The four numbers of each row and head: 1 to 128, the third for the head."""
    heads = (torch.arange(num_heads, device=packed.device, dtype=torch.int32) & 127) << 16
    shifts = torch.arange(0, 32, 8, device=packed.device, dtype=torch.int32)
    return ((packed.int()[:, None] | heads)[..., None] >> shifts & 127) + 1


def numbers(shape: tuple[int, ...], *, seed: int, name: str) -> Float64[Tensor, "..."]:
    """Numbers of ``shape`` on the CPU, in float64, of mean 0 and standard deviation 1.15, none above 4.

    They are whole multiples of 1/32, which every floating-point dtype of 16 bits holds. ``seed`` is a case's, and
    ``name`` tells its tensors apart: the same name gives the same numbers.
    """
    positions = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu") & 0xFFFFFFFF
    words = fold(stream_key(seed, zlib.crc32(name.encode())), positions)
    return draw(words, "normal").double().mul(2.0**NORMAL_EXPONENT).view(shape)
