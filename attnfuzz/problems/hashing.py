"""The counter-based hash behind every drawn number: the same bits in pure Python and in torch, on CPU and GPU.

``mix`` is the 32-bit finaliser "lowbias32" of C. Wellons' hash-prospector. It runs on non-negative integers below 2^32,
as a Python int or as an int64 tensor. A factor above 2^31 is written as its negative remainder modulo 2^32, so that
no product leaves 64 bits: nothing depends on how a device overflows. Torch-free.

Saved cases rebuild their tensors from these functions (recipe version 1). Changing them changes the meaning of every
regression file: a better recipe is a new function under a new name, chosen by a new field of the case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    Word = TypeVar("Word", int, Tensor)
else:
    Word = TypeVar("Word")

_MASK = 0xFFFFFFFF
_FACTOR_1 = 0x7FEB352D
_FACTOR_2 = 0x846CA68B - (1 << 32)


def mix(word: Word) -> Word:
    """A bijection of 32-bit words in which every output bit depends on every input bit."""
    x = word ^ (word >> 16)  # a fresh tensor; from here on in place
    x *= _FACTOR_1
    x &= _MASK
    x ^= x >> 15
    x *= _FACTOR_2
    x &= _MASK
    x ^= x >> 16
    return x


def fold(state: Any, word: Any) -> Any:
    """Hash one more 32-bit ``word`` into ``state``; ints and int64 tensors mix and broadcast."""
    return mix(state ^ word)


def stream_key(seed: int, stream: int) -> int:
    """The state that starts stream ``stream`` of ``seed``, a 32-bit int."""
    return mix(mix(seed ^ 0x5BD1E995) ^ stream)
