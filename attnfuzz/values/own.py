"""Numbers for the tensors of a user's problem: the same bits on every machine."""

from __future__ import annotations

import math
import zlib

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.problems.hashing import fold, stream_key
from attnfuzz.problems.recipes import NORMAL_EXPONENT
from attnfuzz.values.draws import draw

__all__ = ["numbers"]


def numbers(shape: tuple[int, ...], *, seed: int, name: str) -> Float64[Tensor, "..."]:
    """Numbers of ``shape`` on the CPU, in float64, of mean 0 and standard deviation 1.15, none above 4.

    They are whole multiples of 1/32, which every floating-point dtype of 16 bits holds. ``seed`` is a case's, and
    ``name`` tells its tensors apart: the same name gives the same numbers.
    """
    positions = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu") & 0xFFFFFFFF
    words = fold(stream_key(seed, zlib.crc32(name.encode())), positions)
    return draw(words, "normal").double().mul(2.0**NORMAL_EXPONENT).view(shape)
