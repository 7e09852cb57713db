"""attnfuzz.families.turbo: rows of bytes that hold K and V, those that read and those that write them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnfuzz
from attnfuzz.declaration import Kernel
from attnfuzz.explaining.own_pages import misread
from attnfuzz.families import turbo_kernels as bundled
from attnfuzz.families.turbo import codes_of, packed_codes
from tests.families import turbo_kernels
from tests.families.searched import smallest_cases


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_lie_in_bytes_lowest_bit_first(bits: int) -> None:
    """Codes of 3 bits would be read of one byte, though every third lies in two."""
    numbers = [random.Random(bits).randrange(1 << bits) for _ in range(16)]
    whole = sum(number << bits * i for i, number in enumerate(numbers))
    packed = packed_codes(torch.tensor(numbers), bits)
    assert packed.tolist() == list(whole.to_bytes(2 * bits, "little"))
    assert codes_of(packed, bits, 16).tolist() == numbers


@pytest.mark.parametrize("name", turbo_kernels.PLANTED)
@pytest.mark.by_day("decode_bits_of_one_byte", "decode_never_corrected", "write_whole_rows", "write_not_turned")
def test_planted_bugs_are_found_and_shrunk(name: str) -> None:
    """A kernel that reads or writes a part of a row by another rule would pass, or be shown on a large case."""
    most = {"decode_length_of_head_0": (2, 4), "decode_unpadded": (3, 20)}.get(name, (1, 4))  # heads and tokens
    for case in smallest_cases(getattr(turbo_kernels, name)):
        assert case.head_size == 32
        tokens = sum(case.lengths) if name.startswith("decode") else case.num_tokens
        assert case.num_kv_heads <= most[0]
        assert tokens <= most[1]


def test_rows_of_k_and_v_are_not_laid_out_as_two_caches() -> None:
    """The explanation of a planted bug ended in a KeyError, since there is no `k_cache` in its pages."""
    problem: Any = bundled.turbo_decode_eager.declaration.problem
    asked: Any = SimpleNamespace(case=problem.case_type(lengths=(1,)))
    assert list(misread(asked)) == []


@pytest.mark.parametrize("name", [name for name, value in vars(bundled).items() if isinstance(value, Kernel)])
def test_right_kernels_are_silent(name: str) -> None:
    """Codes that may be rounded either way, rows of one number or empty sequences would be called bugs."""
    attnfuzz.fuzz(getattr(bundled, name), max_examples=60, device="cpu")(lambda: None)()
