"""Where the suites run, and how much of their grids: all of it on a GPU, the named part under Triton's interpreter.

``TRITON_INTERPRET`` decides, as for Triton itself: `tests/conftest.py` sets it to 1 unless it is set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from attnfuzz.triton_compat.interpreter import set_up_interpreter

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

set_up_interpreter()

T = TypeVar("T")


def grid(full: Sequence[T], interpreted: Sequence[T]) -> Sequence[T]:
    """The values of one parameter: the suite's own, or those that an interpreter gets through in seconds."""
    return full if DEVICE == "cuda" else interpreted


def ragged(lens: Sequence[int]) -> Tensor:
    return torch.tensor(lens, dtype=torch.int32, device=DEVICE)


def table_with_replacement(num_seqs: int, width: int, num_blocks: int) -> Tensor:
    """A block table as vLLM draws it: pages may occur twice, and unused entries are valid ids."""
    return torch.randint(0, num_blocks, (num_seqs, width), dtype=torch.int32, device=DEVICE)


def interleaved_cache(num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """K and V of every page next to each other, ``[num_pages, 2, page_size, num_kv_heads, head_size]``."""
    return torch.randn(num_pages, 2, page_size, num_kv_heads, head_size, dtype=dtype, device=DEVICE)
