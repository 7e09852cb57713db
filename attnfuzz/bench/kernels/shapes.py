"""Shapes that kernels are timed on: lengths, heads and pages of one batch, and suites with names.

And what is measured on them. Torch-free.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from attnfuzz.problems.quantised_kv import KvDtype
from attnfuzz.problems.shapes import ITEMSIZE
from attnfuzz.problems.supports import Dtype, OptionValue

Kind = Literal["decode", "mixed", "latent", "sparse", "merge"]

PROBLEMS_OF: dict[Kind, tuple[str, ...]] = {
    "decode": ("paged_decode", "dense_decode", "paged_attention"),
    "mixed": ("paged_attention",),
    "latent": ("latent_decode",),
    "sparse": ("latent_decode", "SparseDecode"),
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

    ``window``: keys that a query sees, its own included; 0: all. ``kv_dtype``: of an 8-bit cache, whose scales are 1.

    ``rank``: of latent attention, how many of a key's numbers are its value; 0: keys and values are two caches. With
    pages of one token, a row of the block table is what a sparse kernel calls a list of slots.
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
    window: int = 0
    kv_dtype: KvDtype | None = None
    rank: int = 0

    @property
    def kind(self) -> Kind:
        """The kind of computation."""
        if self.num_tokens:
            return "merge"
        if self.rank:
            return "sparse" if self.block_size == 1 else "latent"
        return "mixed" if any(length != 1 for length in self.query_lens) else "decode"

    @property
    def queries(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
        return self.query_lens or (1,) * len(self.seq_lens)

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(self.head_size**-0.5)

    @property
    def value_size(self) -> int:
        """The size of heads of values, and of the output."""
        return self.rank or self.head_size

    @property
    def longest(self) -> int:
        """Keys of the longest sequence; of a merge, its tokens."""
        return max(self.seq_lens, default=self.num_tokens)

    def first_seen(self, position: int) -> int:
        """The first key that the query at ``position`` of its sequence sees."""
        return max(0, position + 1 - self.window) if self.window else 0


def bytes_to_move(shape: Shape) -> int:
    """Each input read once and each result written once: keys, values, queries, output and LSE. No block table."""
    itemsize = ITEMSIZE[shape.dtype]
    if shape.kind == "merge":
        states = shape.num_tokens * shape.num_q_heads
        return 3 * states * (shape.head_size * itemsize + _FLOAT32)
    keys = sum(length - shape.first_seen(length - n) for length, n in zip(shape.seq_lens, shape.queries, strict=True))
    row = shape.head_size if shape.rank else 2 * shape.head_size
    cache = keys * shape.num_kv_heads * row * ITEMSIZE[shape.kv_dtype or shape.dtype]
    rows = sum(shape.queries) * shape.num_q_heads
    return cache + rows * ((shape.head_size + shape.value_size) * itemsize + _FLOAT32)


DECODE_POINTS = ((1, 512), (1, 4096), (1, 32768), (8, 4096), (8, 32768), (64, 512), (64, 4096))
"""Batch and length."""


def attention(label: str, num_q_heads: int, num_kv_heads: int, seq_lens: tuple[int, ...], **others: Any) -> Shape:
    """A batch with heads of 128 numbers, unless the ``others`` of its fields say so."""
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_size": 128}
    return Shape(label=label, seq_lens=seq_lens, **heads | others)


def _decode() -> list[Shape]:
    """Llama-3.1-8B's heads, over page sizes of servers, and of one token."""
    return [
        attention(f"{batch}x{length} page {page}", 32, 8, (length,) * batch, block_size=page)
        for page in (16, 1, 64)
        for batch, length in DECODE_POINTS
    ]


def _qwen() -> list[Shape]:
    """Qwen2.5's heads: 12 on 2, whose time over the length shows what splitting is for, and 28 on 4."""
    heads_12 = [attention(f"12/2 {n}", 12, 2, (n,)) for n in (128, 256, 512, 1024, 2048, 4096)]
    heads_28 = [
        attention(f"28/4 {batch}x{n}", 28, 4, (n,) * batch)
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


def _latent() -> list[Shape]:
    """DeepSeek's latent vectors, for all of its 128 heads and for those of a GPU of two and of eight."""
    points = [(batch, n, 64) for batch in (1, 8, 64) for n in (512, 4096, 32768)]
    return [
        _latents(f"{heads} heads {batch}x{n} page {page}", heads, (n,) * batch, block_size=page)
        for heads in (16, 64, 128)
        for batch, n, page in (*points, (64, 4096, 16))
    ]


def _sparse() -> list[Shape]:
    """Latent decode over lists of 2,048 slots, as many as DeepSeek's indexer chooses."""
    return [
        _latents(f"{heads} heads {batch}x2048", heads, (2048,) * batch, block_size=1)
        for heads in (16, 128)
        for batch in (1, 8, 64)
    ]


def _latents(label: str, heads: int, seq_lens: tuple[int, ...], **others: Any) -> Shape:
    usual = {"head_size": 576, "rank": 512, "block_size": 64, "dtype": "bfloat16"}
    return attention(label, heads, 1, seq_lens, **usual | others)


def _graph() -> list[Shape]:
    """Each length twice: with a table and a graph for 32,768 tokens, and with those made for the length."""
    return [
        attention(f"{batch}x{length} {'of 32768' if room else 'exact'}", 32, 8, (length,) * batch, room=room)
        for batch in (1, 8)
        for length in (1, 16, 128, 1024, 4096, 16384, 32768)
        for room in (32768, 0)
    ]


_SPREAD = 0.6
"""Spread of the logarithm of lengths: the longest of 64 sequences is about four times the median."""


def ragged_lengths(rng: random.Random, batch: int, median: int) -> list[int]:
    """Log-normal; a batch of one has the median itself, or tells little about the length that it is named for."""
    if batch == 1:
        return [median]
    return [max(1, round(median * math.exp(rng.gauss(0, _SPREAD)))) for _ in range(batch)]


def _prompts() -> list[Shape]:
    """Prompts of one length, and ragged ones."""
    points = ((1, 512), (16, 512), (1, 2048), (8, 2048), (1, 8192), (4, 8192))
    even = [attention(f"{batch}x{n}", 32, 8, (n,) * batch, query_lens=(n,) * batch) for batch, n in points]
    return even + _steps(0)


def _steps(share: int) -> list[Shape]:
    """Ragged batches, of whose sequences ``share`` percent go on by a token, first, and the others are prompts."""
    shapes = []
    for batch in (2 if share == 50 else 1, 8, 32, 128):
        rng = random.Random(batch)
        contexts = ragged_lengths(rng, batch * share // 100, 2048)
        prompts = ragged_lengths(rng, batch - len(contexts), 384)
        queries = () if share == 100 else (*[1] * len(contexts), *prompts)
        shapes.append(attention(f"batch {batch}", 32, 8, (*contexts, *prompts), query_lens=queries))
    return shapes


def _output() -> list[Shape]:
    """A prompt of 500 tokens and up to 12,800 that are made after it, all with one graph and table for 16,384."""
    return [attention(f"{n} tokens", 32, 8, (n,), room=16384) for n in (500, 1000, 2000, 4000, 8000, 13300)]


def _padded() -> list[Shape]:
    """Batches as they are, and with sequences of a token up to the power of two that a server has a graph for."""
    shapes = []
    for batch, whole in ((3, 4), (5, 8), (17, 32), (65, 128)):
        lengths = tuple(min(8192, length) for length in ragged_lengths(random.Random(batch), batch, 1024))
        padded = lengths + (1,) * (whole - batch)
        shapes.append(attention(f"batch {batch}", 32, 8, lengths))
        shapes.append(attention(f"{batch} padded to {whole}", 32, 8, padded, room=8192))
    return shapes


def _variety() -> list[Shape]:
    """Shapes that servers run beside `_decode`: other dtypes, caches and heads, windows, one long sequence among
    short."""
    even = {(batch, n): attention(f"{batch}x{n}", 32, 8, (n,) * batch) for batch, n in DECODE_POINTS}
    usual, small, large = even[8, 4096], even[64, 512], even[64, 4096]
    return [
        *(replace(usual, label=f"{usual.label} page {size}", block_size=size) for size in (24, 272)),
        attention("32768 among 63 of 512", 32, 8, (32768, *[512] * 63)),
        attention("32768 after 63 of 512", 32, 8, (*[512] * 63, 32768)),
        attention("32768 among 7 of 512", 32, 8, (32768, *[512] * 7)),
        *(replace(one, label=f"{one.label} bfloat16", dtype="bfloat16") for one in (usual, large)),
        *(replace(one, label=f"{one.label} fp8 cache", kv_dtype="float8_e4m3fn") for one in (usual, small, large)),
        *(
            replace(one, label=f"{one.label} head {n}", head_size=n)
            for one, n in ((usual, 64), (large, 64), (usual, 256))
        ),
        *(attention(f"{batch}x{n} 12/2", 12, 2, (n,) * batch) for batch, n in ((8, 4096), (64, 512))),
        *(attention(f"{batch}x{n} 64/8", 64, 8, (n,) * batch) for batch, n in ((8, 4096), (64, 4096))),
        *(replace(attention(f"8x{n} window 1024", 32, 8, (n,) * 8), window=1024) for n in (1024, 4096, 32768)),
    ]


def smoke_suite() -> list[Shape]:
    """Shapes that Triton's interpreter gets through: they show that everything runs, and nothing else."""
    return [
        attention("smoke 2x40", 4, 2, (40, 40), head_size=32),
        attention("smoke mixed", 4, 2, (20, 33), head_size=32, query_lens=(20, 1)),
        _latents("smoke latent", 16, (40, 33), head_size=96, rank=64, block_size=16),
        _latents("smoke sparse", 16, (40, 40), head_size=96, rank=64, block_size=1),
        Shape(label="smoke merge", num_q_heads=2, head_size=32, num_tokens=8),
    ]


SUITES: dict[str, Callable[[], list[Shape]]] = {
    "decode": _decode,
    "variety": _variety,
    "ragged": partial(_steps, 100),
    "latent": _latent,
    "sparse": _sparse,
    "prompts": _prompts,
    "half": partial(_steps, 50),
    "merge": _merge,
    "qwen": _qwen,
    "graph": _graph,
    "output": _output,
    "padded": _padded,
}


L2State = Literal["cold", "warm"]
Mode = Literal["eager", "graph"]
Status = Literal["ok", "wrong", "failed", "unmeasured", "unsupported"]
"""``failed``: the contender raised. ``unmeasured``: attnfuzz did, before or after the contender's call."""


class MachineReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device and what runs on it. ``l2_bytes``: 0 where there is none to speak of. ``capability``: a GPU's."""

    device: str
    name: str
    l2_bytes: int = 0
    processors: int = 0
    capability: tuple[int, int] | None = None
    versions: dict[str, str] = {}


class Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Microseconds of one call: quantiles over ``samples``, each the mean of ``calls`` calls in a row."""

    l2: L2State
    mode: Mode
    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    calls: int


class CopyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copy within the device, so that ``nbytes`` are read and written in all."""

    nbytes: int
    seconds: float


class MeasureRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Check, then time, one contender: the ``target`` of a kernel.

    ``seconds``: of each of the up to four measurements (``l2`` and ``modes``).
    """

    contender: str
    shape: Shape
    options: dict[str, OptionValue] = {}
    l2: tuple[L2State, ...] = ("cold", "warm")
    modes: tuple[Mode, ...] = ("eager", "graph")
    seconds: float = 0.05


class MeasureReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``error_ratio``: the largest error over its bound, above 1 if ``status`` is "wrong"; there are no times then.

    ``note``: why there are no times, or none under CUDA graphs.
    """

    status: Status
    times: tuple[Timed, ...] = ()
    error_ratio: float | None = None
    note: str = ""


State = tuple[Mode, L2State]
STATES: tuple[State, ...] = (("graph", "cold"), ("graph", "warm"), ("eager", "cold"), ("eager", "warm"))
"""Launch and cache, what matters most to a server first."""

RowStatus = Literal["ok", "wrong", "crashed", "failed", "unmeasured", "unsupported"]
"""A `Status`, or that the process died; the better first."""


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One contender on one shape, with one choice of its options.

    ``is_reference``: it is there to be compared with. ``nbytes``: what any kernel must move; ``copy_us``: a copy that
    moves as many. ``chosen``: of the contender's choices of options, the fastest.
    """

    suite: str
    shape: Shape
    contender: str
    is_reference: bool = False
    status: RowStatus
    nbytes: int
    options: dict[str, OptionValue] = {}
    times: tuple[Timed, ...] = ()
    copy_us: float | None = None
    error_ratio: float | None = None
    note: str = ""
    chosen: bool = False

    def time(self, mode: Mode, l2: L2State) -> Timed | None:
        """The time of one of the measurements; None if it was not made."""
        return next((one for one in self.times if one.mode == mode and one.l2 == l2), None)

    def share_of_copy(self, mode: Mode, l2: L2State) -> float | None:
        """The time of a copy that moves as many bytes, from memory, over the median. Above 1 where the cache helps."""
        timed = self.time(mode, l2)
        return self.copy_us / timed.median_us if timed and self.copy_us and timed.median_us > 0 else None


class Report(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """All of them. ``peak_gb_s``: bytes that a large copy reads and writes, per nanosecond. ``unreached``: left out
    since the budget was spent. ``references``: kernels of engines by their names, with the versions of these."""

    format: Literal["attnfuzz.bench-kernels/2"] = "attnfuzz.bench-kernels/2"
    started: str
    machine: MachineReply
    peak_gb_s: float
    suites: tuple[str, ...]
    references: dict[str, str] = {}
    results: list[Result]
    unreached: int = 0
    elapsed_s: float = 0.0

    def chosen(self, suite: str) -> list[Result]:
        """The results of a suite, the fastest choice of options for each contender and shape, in order."""
        return [result for result in self.results if result.suite == suite and result.chosen]


def encode_report(report: Report) -> bytes:
    """As JSON for people and programs."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
