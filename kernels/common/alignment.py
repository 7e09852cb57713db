"""Divisors of strides, by which a compiler can prove that 16 bytes may be read at once.

A kernel that gets strides in units of several elements, and multiplies them by that constant itself, lets the compiler
see that rows begin at multiples of it. Triton looks for multiples of 16 elements only, and a hint in its place may be
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

_BYTES_PER_LOAD = 16


def common_alignment(*tensors: Tensor) -> int:
    """The most elements, up to those in 16 bytes, that every stride but the last is a multiple of."""
    strides = (stride for tensor in tensors for stride in tensor.stride()[:-1])
    return math.gcd(_BYTES_PER_LOAD // tensors[0].element_size(), *strides)


def in_units(strides: Sequence[int], alignment: int) -> tuple[int, ...]:
    """``strides``, all but the last in units of ``alignment`` elements."""
    *rows, last = strides
    return (*(stride // alignment for stride in rows), last)
