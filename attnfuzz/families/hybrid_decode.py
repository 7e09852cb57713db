"""Decode over pages that layers of several kinds share, with or without chunked local attention.

A manager's page has the bytes that the largest layer needs, so that others leave a gap at its end, V's unlike K's, and
is divided into the blocks that a kernel reads. With ``chunk`` the last token sees its own chunk up to itself, as
Llama 4's local layers have it; the first chunk begins with the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, TensorSpec


class HybridDecode(attnfuzz.PagedProblem):
    """``chunk``: tokens of a chunk; 0 for none. ``block_size``: tokens of a page, which the table names."""

    chunk = Integer(0, 64, likely=(0, 1, 2, 15, 16, 17, 32, 48, 64))
    block_size = Choice((4, 16, 64))
    kernel_blocks = Choice((1, 2, 4))
    layout = Choice(("NHD",))
    v_cache_strides = Choice(("", "contiguous", "outer_gap"))

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """Caches ``[pages, blocks, tokens of a block, num_kv_heads, head_size]``."""
        heads = (len(case.lengths), case.num_kv_heads * case.gqa_ratio, case.head_size)
        q, out = (TensorSpec(heads, case.dtype, role, axes=("seq", "head", "dim")) for role in ("input", "output"))
        return {"q": q, **self.cache(case), "out": out}

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Numbers near 1."""
        tensors["q"].copy_(attnfuzz.numbers(tuple(tensors["q"].shape), seed=case.seed, name="q"))
        self.write_cache(case, tensors)

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """An empty sequence gives 0."""
        firsts = getattr(case, "firsts", self._firsts(case))
        k, v = (
            [keys[first:] for keys, first in zip(of_seqs, firsts, strict=True)]
            for of_seqs in self.cached(case, tensors)
        )
        found = attnfuzz.attention(tensors["q"], k, v, scale=case.head_size**-0.5, dtype=case.dtype)
        return {"out": found["out"]}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Chunks that begin elsewhere, entries of the table that stand for a kernel's blocks, and places in these."""
        size, chunk, lengths = case.block_size, case.chunk, case.lengths
        flat = {name: tensors[f"{name}_cache"].flatten(0, 1) for name in ("k", "v")}
        pages, blocks = tensors["k_cache"].shape[:2]
        entries = torch.arange(pages, device="cpu")[:, None] + torch.arange(blocks, device="cpu")
        block = size // blocks
        offsets = torch.arange(size, device="cpu")
        places = offsets // block * block + offsets % max(1, block - 1)
        found: dict[str, dict[str, Any]] = {
            "the last place of a kernel's block is never read: places go by one fewer": {
                f"{name}_cache": tensors[f"{name}_cache"].flatten(1, 2)[:, places].view_as(tensors[f"{name}_cache"])
                for name in ("k", "v")
            },
            "an entry of the table is taken for a block of the kernel, not for a page": {
                f"{name}_cache": one[entries % len(one)] for name, one in flat.items()
            },
        }
        if chunk:
            found |= {
                "a chunk is taken for a sliding window": {"firsts": [max(0, length - chunk) for length in lengths]},
                "the last token of a chunk is taken for one of the next": {
                    "firsts": [
                        length - 1 if length and length % chunk == 0 else first
                        for length, first in zip(lengths, self._firsts(case), strict=True)
                    ]
                },
                "no token is seen where a chunk ends with the last one": {
                    "firsts": [
                        length if length % chunk == 0 else first
                        for length, first in zip(lengths, self._firsts(case), strict=True)
                    ]
                },
                "a chunk begins with the page of its first token": {
                    "firsts": [first // size * size for first in self._firsts(case)]
                },
                "chunks are ignored": {"firsts": [0] * len(lengths)},
                "the chunk before the last token's is seen too": {
                    "firsts": [max(0, first - chunk) for first in self._firsts(case)]
                },
            }
        return found

    @staticmethod
    def _firsts(case: Any) -> list[int]:
        """The first token that each sequence's query sees."""
        return [(n - 1) // case.chunk * case.chunk if case.chunk and n else 0 for n in case.lengths]
