"""Batches as servers have them: sizes from one to many, lengths from a wide distribution, most of them decode.

Always the same ones, so that two runs can be compared. Torch-free.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from attnfuzz.bench.kernels.shapes import Shape

__all__ = ["FEATURES", "features_of", "tuning_batches"]

FEATURES = ("batch", "max_seq_len", "heads_per_group", "head_size", "max_query_len", "total_tokens")
"""What a decision may depend on. All but the last are known to the host when a CUDA graph is captured."""

_HEADS = ((32, 8, 128), (12, 2, 128), (28, 4, 128), (32, 8, 64), (64, 8, 128))
"""Query heads, KV heads and head size, the most usual first."""

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_MEDIAN_LENGTHS = (128, 512, 2048, 8192, 32768)
_MOST_TOKENS = 1 << 19
"""In a batch: 2 GiB of keys and values with 8 KV heads of 128."""

_SPREAD = 0.6
"""Of the logarithm of lengths: the longest of 64 sequences is about four times the median."""

_PROMPTS = (64, 512, 2048)
_TOKENS_TO_MERGE = (64, 256, 1024, 4096, 16384)


def tuning_batches(problem: str, count: int, seed: int = 0) -> list[Shape]:
    """``count`` batches of different kinds, in an order in which the first few are as different as they can be.

    Raises ValueError for a problem that has none.
    """
    if problem == "merge_states":
        shapes = [
            Shape(label=f"merge {tokens}x{heads}x{size}", num_q_heads=heads, head_size=size, num_tokens=tokens)
            for heads, _, size in _HEADS
            for tokens in _TOKENS_TO_MERGE
        ]
    elif problem in ("paged_decode", "dense_decode"):
        shapes = _decode(seed)
    elif problem == "paged_attention":
        shapes = _decode(seed) + _mixed(seed)
    else:
        raise ValueError(f"problem={problem!r} is not tuned; name a kernel of paged_decode, dense_decode, "
                         "paged_attention or merge_states")  # fmt: skip
    return random.Random(seed).sample(shapes, min(count, len(shapes)))


def features_of(shape: Shape) -> dict[str, int]:
    """The numbers of ``FEATURES``; of a merge, its tokens are the batch."""
    if shape.kind == "merge":
        return dict(zip(FEATURES, (shape.num_tokens, 1, 1, shape.head_size, 1, shape.num_tokens), strict=True))
    numbers = (
        len(shape.seq_lens),
        shape.longest,
        shape.num_q_heads // shape.num_kv_heads,
        shape.head_size,
        max(shape.queries),
        sum(shape.seq_lens),
    )
    return dict(zip(FEATURES, numbers, strict=True))


def _decode(seed: int) -> list[Shape]:
    rng = random.Random(seed)
    shapes = []
    for heads in _HEADS:
        for batch in _BATCHES:
            for median in _MEDIAN_LENGTHS:
                lengths = _lengths(rng, batch, median)
                if sum(lengths) <= _MOST_TOKENS:
                    shapes.append(_shape("decode", heads, lengths, median))
    return shapes


def _mixed(seed: int) -> list[Shape]:
    """Prompts alone, and beside as many sequences that go on by a token."""
    rng = random.Random(seed + 1)
    shapes = []
    for heads in _HEADS:
        for batch in _BATCHES[:5]:
            for median in _PROMPTS:
                prompts = _lengths(rng, batch, median)
                going_on = _lengths(rng, batch, 4 * median)
                shapes.append(_shape("prompts", heads, prompts, median, prompts))
                queries = prompts + [1] * batch
                shapes.append(_shape("mixed", heads, prompts + going_on, median, queries))
    return shapes


def _shape(
    kind: str, heads: tuple[int, int, int], lengths: Sequence[int], median: int, queries: Sequence[int] = ()
) -> Shape:
    num_q_heads, num_kv_heads, head_size = heads
    return Shape(
        label=f"{kind} {num_q_heads}/{num_kv_heads}x{head_size} {len(lengths)}x~{median}",
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        seq_lens=tuple(lengths),
        query_lens=tuple(queries),
    )


def _lengths(rng: random.Random, batch: int, median: int) -> list[int]:
    """Log-normal; a batch of one has the median itself, or tells little about the length that it is named for."""
    if batch == 1:
        return [median]
    return [max(1, round(median * math.exp(rng.gauss(0, _SPREAD)))) for _ in range(batch)]
