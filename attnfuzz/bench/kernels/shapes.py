"""What a kernel is timed on: lengths, heads and pages of one batch, and the bytes that any kernel must move for it.

Torch-free, so that the driver can plan with them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.problems.shapes import ITEMSIZE
from attnfuzz.problems.supports import Dtype

__all__ = ["PROBLEMS_OF", "Kind", "Shape", "bytes_to_move"]

Kind = Literal["decode", "mixed", "merge"]

PROBLEMS_OF: dict[Kind, tuple[str, ...]] = {
    "decode": ("paged_decode", "dense_decode", "paged_attention"),
    "mixed": ("paged_attention",),
    "merge": ("merge_states",),
}
"""The problems whose kernels can be timed on a shape of each kind."""

_FLOAT32 = 4


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One batch. Lengths are in tokens.

    Attention has ``seq_lens`` (keys of each sequence). ``query_lens`` are the last tokens of each, whose attention is
    causal; left out, it is one a sequence. A merge has ``num_tokens`` of ``num_q_heads`` heads.

    ``room``: what a sequence may grow to. Then the block table is wide enough for that, and a CUDA graph is captured
    with sequences of that length before it is replayed with ``seq_lens``. 0: the table is as wide as ``seq_lens`` need.
    """

    label: str
    num_q_heads: int
    head_size: int
    num_kv_heads: int = 0
    seq_lens: tuple[int, ...] = ()
    query_lens: tuple[int, ...] = ()
    num_tokens: int = 0
    block_size: int = 16
    dtype: Dtype = "float16"
    room: int = 0

    @property
    def kind(self) -> Kind:
        """What is to be computed."""
        if self.num_tokens:
            return "merge"
        return "mixed" if any(length != 1 for length in self.query_lens) else "decode"

    @property
    def queries(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
        return self.query_lens or (1,) * len(self.seq_lens)

    @property
    def scale(self) -> float:
        """That of the scores."""
        return float(self.head_size**-0.5)

    @property
    def is_even(self) -> bool:
        """Whether all sequences are equally long, so that dense K and V hold nothing but them."""
        return len(set(self.seq_lens)) <= 1

    @property
    def longest(self) -> int:
        """Keys of the longest sequence; of a merge, its tokens."""
        return max(self.seq_lens, default=self.num_tokens)

    def in_pages_of(self, block_size: int) -> Shape:
        """The same in other pages, which make no difference to a kernel on dense K and V."""
        return msgspec.structs.replace(self, block_size=block_size)


def bytes_to_move(shape: Shape) -> int:
    """Each input read once and each result written once: keys, values, queries, output and LSE. No block table."""
    itemsize = ITEMSIZE[shape.dtype]
    if shape.kind == "merge":
        states = shape.num_tokens * shape.num_q_heads
        return 3 * states * (shape.head_size * itemsize + _FLOAT32)
    cache = 2 * sum(shape.seq_lens) * shape.num_kv_heads * shape.head_size * itemsize
    rows = sum(shape.queries) * shape.num_q_heads
    return cache + rows * (2 * shape.head_size * itemsize + _FLOAT32)
