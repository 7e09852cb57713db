"""The hash recipe is part of every saved case: it may never change and never depend on where it runs."""

from __future__ import annotations

import torch

from attnfuzz.problems.hashing import fold, mix, stream_key

MASK = 0xFFFFFFFF
WORDS = [0, 1, 2, 255, 65536, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF, *range(3, 4000, 37)]


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def test_mix_is_lowbias32() -> None:
    """The hash would no longer be the published one, and saved cases would rebuild other numbers."""
    assert [mix(word) for word in WORDS] == [lowbias32(word) for word in WORDS]


def test_golden_words() -> None:
    """A change of constants or of the folding order would silently change every saved case."""
    assert [mix(word) for word in (0, 1, 2, MASK, 0xDEADBEEF)] == [0, 1753845952, 3507691905, 1734902346, 3861431939]
    assert [stream_key(0, 1), stream_key(12345, 3)] == [2705548786, 2283828689]
    assert fold(stream_key(7, 2), 9) == 1007668853


def test_torch_and_python_agree() -> None:
    """Tensors would hold other numbers than the page map computed in Python expects."""
    words = torch.tensor(WORDS)
    assert mix(words).tolist() == [mix(word) for word in WORDS]
    assert words.tolist() == WORDS, "mix changed its argument"
    key = stream_key(3, 4)
    assert fold(key, words).tolist() == [fold(key, word) for word in WORDS]


def test_mix_has_no_collisions() -> None:
    """The shuffled page order relies on distinct pages having distinct hashes."""
    assert len(set(mix(torch.arange(1 << 16)).tolist())) == 1 << 16


def test_every_output_bit_depends_on_small_inputs() -> None:
    """Neighbouring counters would give visibly related numbers."""
    flipped = mix(torch.arange(4096)) ^ mix(torch.arange(4096) ^ 1)
    shares = torch.stack([(flipped >> bit & 1).double().mean() for bit in range(32)])
    assert shares.min() > 0.4
    assert shares.max() < 0.6
