"""The shapes that ``attnfuzz bench kernels`` has names for. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from attnfuzz.bench.kernels.shapes import Shape

__all__ = ["DECODE_POINTS", "SUITES", "smoke_suite"]

DECODE_POINTS = ((1, 4096), (1, 32768), (8, 4096), (8, 32768), (64, 512), (64, 4096))
"""Batch and length."""

_PAGES = (16, 1, 24, 272)
_GRAPH_LENGTHS = (1, 16, 128, 1024, 4096, 16384, 32768)


def _decode() -> list[Shape]:
    """Llama-3.1-8B's heads, over page sizes of servers, of one token, and of hybrid models."""
    return [
        _attention(f"{batch}x{length} page {page}", 32, 8, (length,) * batch, block_size=page)
        for page in _PAGES
        for batch, length in DECODE_POINTS
    ]


def _seeds() -> list[Shape]:
    """Qwen2.5's heads: 12 on 2, whose time over the length shows what splitting is for, and 28 on 4."""
    heads_12 = [_attention(f"12/2 {n}", 12, 2, (n,)) for n in (128, 256, 512, 1024, 2048, 4096)]
    heads_28 = [
        _attention(f"28/4 {batch}x{n}", 28, 4, (n,) * batch)
        for batch, lengths in ((1, (128, 512, 1024, 2048, 4096)), (8, (128, 512, 1024, 2048)))
        for n in lengths
    ]
    return heads_12 + heads_28


def _merge() -> list[Shape]:
    return [
        Shape(label=f"{tokens} tokens, head {size}", num_q_heads=32, head_size=size, num_tokens=tokens)
        for size in (128, 64, 256)
        for tokens in (256, 1024, 4096, 8192, 32768)
    ]


def _mixed() -> list[Shape]:
    """Half of the sequences are prompts, as long as they are so far; the others go on by a token."""
    prompts, contexts = (512, 1024, 1536, 2048), (1024, 2048, 4096, 8192)
    return [
        _attention(
            f"{2 * n} sequences",
            32,
            8,
            tuple((prompts * n)[:n] + (contexts * n)[:n]),
            query_lens=tuple((prompts * n)[:n]) + (1,) * n,
        )
        for n in (1, 4, 16)
    ]


def _graph() -> list[Shape]:
    """Each length twice: with a table and a graph for 32,768 tokens, and with those made for the length."""
    return [
        _attention(f"{batch}x{length} {'of 32768' if room else 'exact'}", 32, 8, (length,) * batch, room=room)
        for batch in (1, 8)
        for length in _GRAPH_LENGTHS
        for room in (32768, 0)
    ]


def smoke_suite() -> list[Shape]:
    """What Triton's interpreter gets through: it shows that everything runs, and nothing else."""
    return [
        _attention("smoke 2x40", 4, 2, (40, 40), head_size=32),
        _attention("smoke mixed", 4, 2, (20, 33), head_size=32, query_lens=(20, 1)),
        Shape(label="smoke merge", num_q_heads=2, head_size=32, num_tokens=8),
    ]


def _attention(
    label: str,
    num_q_heads: int,
    num_kv_heads: int,
    seq_lens: tuple[int, ...],
    *,
    head_size: int = 128,
    block_size: int = 16,
    query_lens: tuple[int, ...] = (),
    room: int = 0,
) -> Shape:
    return Shape(
        label=label,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        seq_lens=seq_lens,
        query_lens=query_lens,
        block_size=block_size,
        room=room,
    )


SUITES: dict[str, Callable[[], list[Shape]]] = {
    "decode": _decode,
    "seeds": _seeds,
    "merge": _merge,
    "mixed": _mixed,
    "graph": _graph,
}
