"""One contender on one shape: its tensors and its call, whether the result is right, and how long it takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int32
from torch import Tensor

from attnfuzz.bench.kernels.shapes import (
    PROBLEMS_OF,
    L2State,
    MeasureReply,
    MeasureRequest,
    Shape,
    Timed,
    bytes_to_move,
)
from attnfuzz.bench.kernels.timing import GraphOfCalls, Stopwatch, calls_per_sample, time_samples
from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.families.sparse_decode import SparseDecode
from attnfuzz.inputs.reference import merge_all
from attnfuzz.inputs.registry import problem_of
from attnfuzz.numerics import Bound, attention_bound, error_ratio, merge_bound
from attnfuzz.problems.cases import Case, case_from_builtins
from attnfuzz.problems.choices import layouts_of
from attnfuzz.problems.combinations import with_values
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.fields import Choice
from attnfuzz.problems.open_cases import OpenProblem, implementation_of
from attnfuzz.problems.quantised_kv import SMALLEST
from attnfuzz.problems.supports import Layout, LseLayout, OptionValue, Supports
from attnfuzz.trials.observation import named_results

_TIMES_L2 = 4
"""Size of all sets together, in L2 caches: the cache's replacement does not simply drop the oldest."""

_MOST_SETS = 2048
_BYTES_OF_A_VECTOR = 16


@dataclass
class AttentionTensors:
    """A batch over a paged cache in the NHD layout, whose pages lie in random order. Latent values are part of keys."""

    shape: Shape
    q: Float[Tensor, "num_tokens num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks block_size num_kv_heads head_size"]
    v_cache: Float[Tensor, "num_blocks block_size num_kv_heads value_size"]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    cu_seqlens_q: Int32[Tensor, " num_seqs_plus_1"]

    @cached_property
    def dense(
        self,
    ) -> tuple[
        Float[Tensor, "num_seqs max_seq_len num_kv_heads head_size"],
        Float[Tensor, "num_seqs max_seq_len num_kv_heads value_size"],
    ]:
        """K and V of each sequence in one piece, as wide as ``room`` says; beyond a length there is whatever."""
        width = max(self.shape.longest, self.shape.room)
        return self._gather(self.k_cache, width), self._gather(self.v_cache, width)

    @cached_property
    def packed(
        self,
    ) -> tuple[
        Float[Tensor, "total_tokens num_kv_heads head_size"], Float[Tensor, "total_tokens num_kv_heads value_size"]
    ]:
        """K and V of all tokens, one sequence after another."""
        k, v = (self._gather(cache, self.shape.longest) for cache in (self.k_cache, self.v_cache))
        kept = torch.arange(self.shape.longest, device=self.q.device) < self.seq_lens[:, None]
        return k[kept], v[kept]

    def sequence(
        self, seq: int, num_tokens: int
    ) -> tuple[Float[Tensor, "num_tokens num_kv_heads head_size"], Float[Tensor, "num_tokens num_kv_heads value_size"]]:
        """K and V of the first tokens of one sequence."""
        pages = self.block_table[seq, : -(-num_tokens // self.shape.block_size)].long()
        k, v = (_pages_of(cache, pages).flatten(0, 1)[:num_tokens] for cache in (self.k_cache, self.v_cache))
        return k, v

    def _gather(self, cache: Tensor, width: int) -> Tensor:
        pages = self.block_table[:, : -(-width // self.shape.block_size)].long()
        return _pages_of(cache, pages).flatten(1, 2)[:, :width].contiguous()


@dataclass
class MergeTensors:
    """Two states of each token and head; LSEs are natural logarithms, tokens first."""

    shape: Shape
    prefix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    suffix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    prefix_lse: Float32[Tensor, "num_tokens num_q_heads"]
    suffix_lse: Float32[Tensor, "num_tokens num_q_heads"]

    def lses(
        self, layout: LseLayout
    ) -> tuple[Float32[Tensor, "lse_rows lse_columns"], Float32[Tensor, "lse_rows lse_columns"]]:
        """Both, contiguous in ``layout``."""
        both = (self.prefix_lse, self.suffix_lse)
        return both if layout == "TH" else (both[0].T.contiguous(), both[1].T.contiguous())


def _pages_of(cache: Tensor, pages: Tensor) -> Tensor:
    """Also of 8-bit floats, which torch does not index everywhere."""
    return cache.view(torch.uint8)[pages].view(cache.dtype) if cache.element_size() == 1 else cache[pages]


def sets_for_cold_l2(shape: Shape, l2_bytes: int) -> int | None:
    """How many sets make each be read from memory when its turn comes; None if too many would be needed."""
    sets = max(1, math.ceil(_TIMES_L2 * l2_bytes / bytes_to_move(shape)))
    return sets if sets <= _MOST_SETS else None


def draw_tensors(shape: Shape, device: str, seed: int) -> AttentionTensors | MergeTensors:
    """One set. About normal numbers, never zeros, on which hardware is faster than on data."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, dtype: str = shape.dtype) -> Tensor:
        return torch.randn(size, dtype=getattr(torch, dtype), device=device, generator=generator)

    if shape.kind == "merge":
        size = (shape.num_tokens, shape.num_q_heads)
        outputs = normal(*size, shape.head_size), normal(*size, shape.head_size)
        return MergeTensors(shape, *outputs, normal(*size, dtype="float32"), normal(*size, dtype="float32"))
    pages = [-(-length // shape.block_size) for length in shape.seq_lens]
    cache = (max(1, sum(pages)), shape.block_size, shape.num_kv_heads, shape.head_size)
    kv_dtype = getattr(torch, shape.kv_dtype or shape.dtype)
    q, k_cache = normal(sum(shape.queries), shape.num_q_heads, shape.head_size), normal(*cache).to(kv_dtype)
    return AttentionTensors(
        shape=shape,
        q=q,
        k_cache=k_cache,
        v_cache=k_cache[..., : shape.rank] if shape.rank else normal(*cache).to(kv_dtype),
        block_table=_block_table(shape, pages).to(device),
        seq_lens=torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *itertools.accumulate(shape.queries)], dtype=torch.int32, device=device),
    )


def in_layout(k_cache: Tensor, v_cache: Tensor, layout: Layout) -> dict[str, Tensor]:
    """NHD caches as the tensors of another layout (see ``attnfuzz.kernels.common.layouts``), by name."""
    if layout == "interleaved":
        return {"kv_cache": torch.stack((k_cache, v_cache), dim=1)}
    if layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    elif layout == "packed":
        x = _BYTES_OF_A_VECTOR // k_cache.element_size()
        k_cache = k_cache.view(*k_cache.shape[:-1], -1, x).permute(0, 2, 3, 1, 4)
        v_cache = v_cache.permute(0, 2, 3, 1)
    return {"k_cache": k_cache.contiguous(), "v_cache": v_cache.contiguous()}


def _block_table(shape: Shape, pages: list[int]) -> Int32[Tensor, "num_seqs max_blocks_per_seq"]:
    """Physical pages in random order; what no sequence needs names some page, too.

    The same in all sets: FlashInfer's wrappers for graphs keep one for all batches of a shape.
    """
    total = max(1, sum(pages))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0), device="cpu").int()
    width = max(1, -(-max(shape.longest, shape.room) // shape.block_size))
    table = order[torch.arange(len(pages) * width, device="cpu") % total].view(len(pages), width)
    starts = [0, *itertools.accumulate(pages)]
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        table[row, : end - start] = order[start:end]
    return table


Tensors = AttentionTensors | MergeTensors
Result = tuple[Float[Tensor, "num_tokens num_q_heads head_size"], Float32[Tensor, "num_tokens num_q_heads"] | None]


class Unsupported(Exception):  # noqa: N818 - says what the shape is, not that anything went wrong
    """A contender does not take a shape; the message says why in a few words."""


class NotMeasured(Exception):  # noqa: N818 - says what happened to the measurement
    """Attnfuzz itself failed before or after a contender's call: nothing is known of the contender."""


@contextmanager
def as_not_measured() -> Iterator[None]:
    """Turn an exception within, which is not the contender's doing, into a NotMeasured with its cause."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        raise NotMeasured(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """``call`` is what is timed; ``read`` makes output and natural LSE (None if there is none) of what it returned.

    ``set_lengths`` overwrites the lengths that the call reads on the device; None where it does not read any.
    """

    call: Callable[[], object]
    read: Callable[[object], Result]
    set_lengths: Callable[[Tensor], object] | None = None


def objection(declaration: Declaration, shape: Shape, options: dict[str, OptionValue]) -> str | None:
    """Why a kernel cannot be timed on ``shape`` with ``options``, in a few words; None if it can."""
    supports = declaration.supports
    if str(declaration.problem) not in PROBLEMS_OF[shape.kind]:
        return f"computes {declaration.problem}"
    if isinstance(declaration.problem, OpenProblem):
        return _sparse_objection(declaration.problem, shape)
    if shape.room and declaration.versions and not supports.graph_replay:  # what it plans may hold the lengths
        return "promises no graph for other lengths"
    if shape.dtype not in supports.dtypes:
        return f"does not take {shape.dtype}"
    if shape.kv_dtype and (shape.kv_dtype not in supports.kv_dtypes or "tensor" not in supports.kv_scales):
        return f"takes no cache of {shape.kv_dtype}"
    if shape.window and "window" not in supports.variants:
        return "takes no window"
    limits = [("head_sizes", shape.head_size)]
    if shape.kind != "merge":
        limits.append(("gqa_ratios", shape.num_q_heads // shape.num_kv_heads))
    if shape.kind != "merge" and declaration.problem != "dense_decode":
        limits.append(("block_sizes", shape.block_size))
    if isinstance(supports.v_head_sizes, tuple):
        limits.append(("v_head_sizes", shape.value_size))
    for name, value in limits:
        choices = getattr(supports, name)
        if choices is not None and value not in choices:
            return f"{name} has no {value}"
    if _together(declaration, shape, options) is None:
        return "where has no such combination"
    if supports.max_seq_len is not None and max(shape.longest, shape.room) > supports.max_seq_len:
        return f"max_seq_len is {supports.max_seq_len}"
    if supports.max_query_len is not None and max(shape.queries, default=0) > supports.max_query_len:
        return f"max_query_len is {supports.max_query_len}"
    return None


def _sparse_objection(problem: OpenProblem, shape: Shape) -> str | None:
    """Why sparse decode is not timed: a list names each slot once and none is left out; the cache has q's dtype."""
    if not isinstance(implementation_of(problem), SparseDecode):
        return f"computes another {problem}"
    asked = {"cache": "same", "has_lengths": False, "repeats": False, "dtype": shape.dtype}
    known = {name: one.values for name, one in problem.fields.items() if isinstance(one, Choice)}
    return next((f"{name} is not {value}" for name, value in asked.items() if value not in known[name]), None)


def prepare_kernel(kernel: Kernel, tensors: Tensors, options: dict[str, OptionValue]) -> Prepared:
    """The call of ``kernel`` on one set of tensors, with results of its own. Raises Unsupported, NotMeasured."""
    declaration, shape = kernel.declaration, tensors.shape
    if (why := objection(declaration, shape, options)) is not None:
        raise Unsupported(why)
    with as_not_measured():
        inputs, names = _inputs(declaration, tensors, options)

    def read(returned: object) -> Result:
        out, *rest = named_results(
            returned, inputs, names, names if declaration.supports.lse != "none" else names[:1]
        ).values()
        return out, _natural(declaration, rest[0]) if rest else None

    has_lengths = hasattr(inputs, "seq_lens") and shape.kind != "mixed"

    def set_lengths(others: Tensor) -> None:
        inputs.seq_lens.copy_(others)
        kernel.plan(inputs, **options)  # outside of the graph, as servers do

    return Prepared(kernel.planned(inputs, **options), read, set_lengths if has_lengths else None)


def _natural(declaration: Declaration, lse: Tensor) -> Tensor:
    lse = lse * math.log(2) if declaration.supports.lse == "base2" else lse
    is_turned = declaration.problem == "merge_states" and declaration.supports.lse_layout == "HT"
    return lse.mT if is_turned else lse


def _together(declaration: Declaration, shape: Shape, options: dict[str, OptionValue]) -> Supports | None:
    """The declared layouts that go with all else here; None if none does."""
    known: dict[str, OptionValue] = {
        "dtype": shape.dtype,
        "head_size": shape.head_size,
        "num_q_heads": shape.num_q_heads,
    }
    if shape.kind != "merge":
        known |= {"num_kv_heads": shape.num_kv_heads, "gqa_ratio": shape.num_q_heads // shape.num_kv_heads}
        known |= {
            "block_size": shape.block_size,
            "kv_dtype": shape.kv_dtype or shape.dtype,
            "v_head_size": shape.value_size,
        }
    return with_values(declaration.supports, {**known, **options})


def _inputs(declaration: Declaration, tensors: Tensors, options: dict[str, OptionValue]) -> tuple[Any, tuple[str, ...]]:
    """The kernel's inputs, and the names of its results: the output, and its LSE unless there is none."""
    shape = tensors.shape
    if isinstance(tensors, MergeTensors):
        return _merge_inputs(declaration, tensors)
    device = tensors.q.device
    given = {
        "q": tensors.q,
        "seq_lens": tensors.seq_lens.clone(),
        "out": tensors.q.new_empty(*tensors.q.shape[:2], shape.value_size),
        "lse": torch.empty(tensors.q.shape[:2], dtype=torch.float32, device=device),
    }
    common: dict[str, object] = {
        "num_q_heads": shape.num_q_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "dtype": shape.dtype,
        "seq_lens": shape.seq_lens,
        "scale": shape.scale,
    }
    if declaration.problem == "dense_decode":
        given["k"], given["v"] = tensors.dense
        case = case_from_builtins("dense_decode", common | {"extra_rows": max(0, shape.room - shape.longest)})
        return _of_case(case, given)
    if isinstance(declaration.problem, OpenProblem):
        fields: dict[str, Any] = {name: field.simplest for name, field in declaration.problem.fields.items()}
        names = ("out", "lse") if fields["lse"] else ("out",)
        fields |= common | {"num_heads": shape.num_q_heads, "v_head_size": shape.rank, "topk": shape.longest}
        given |= {"kv_cache": tensors.k_cache[:, 0], "indices": tensors.block_table}
        return SimpleNamespace(**fields | {"named": shape.seq_lens} | given), names
    if shape.rank:
        given |= {"kv_cache": tensors.k_cache[:, :, 0], "block_table": tensors.block_table}
        common |= {"block_size": shape.block_size, "v_head_size": shape.rank}
        return _of_case(case_from_builtins("latent_decode", common), given)
    layout = layouts_of(_together(declaration, shape, options) or declaration.supports)[0]
    given |= in_layout(tensors.k_cache, tensors.v_cache, layout)
    given["block_table"] = tensors.block_table
    common |= {"block_size": shape.block_size, "layout": layout}
    if shape.window:
        common["variant"] = {"window": shape.window}
    if shape.kv_dtype:
        common["kv"] = {"dtype": shape.kv_dtype}
        one = torch.ones(1, dtype=torch.float32, device=device)
        given |= {"k_scale": one, "v_scale": one.clone()}
    if declaration.problem == "paged_attention":
        given["cu_seqlens_q"] = tensors.cu_seqlens_q
        common |= {"query_lens": shape.queries, "seq_slack": max(0, shape.room - shape.longest)}
    return _of_case(case_from_builtins(declaration.problem, common), given)


def _of_case(case: Case, given: dict[str, Tensor]) -> tuple[Any, tuple[str, ...]]:
    problem = problem_of(case)
    return problem.inputs(case, given), problem.results


def _merge_inputs(declaration: Declaration, tensors: MergeTensors) -> tuple[Any, tuple[str, ...]]:
    shape = tensors.shape
    layout = declaration.supports.lse_layout
    unit = 1 / math.log(2) if declaration.supports.lse == "base2" else 1.0
    prefix_lse, suffix_lse = (lse * unit for lse in tensors.lses(layout))
    sizes = {"num_q_heads": shape.num_q_heads, "head_size": shape.head_size, "num_tokens": shape.num_tokens}
    case = case_from_builtins("merge_states", {**sizes, "dtype": shape.dtype, "lse_layout": layout})
    given = {
        "prefix_output": tensors.prefix_output,
        "suffix_output": tensors.suffix_output,
        "prefix_lse": prefix_lse,
        "suffix_lse": suffix_lse,
        "output": torch.empty_like(tensors.prefix_output),
        "output_lse": torch.empty_like(prefix_lse),
    }
    return _of_case(case, given)


_MOST_ROWS = 6
_MOST_MERGED = 512


@dataclass(frozen=True, slots=True)
class RightRows:
    """The numbers that rows of the results are to hold, by their ``place``; without an LSE only the output counts."""

    place: int | slice
    out: Float64[Tensor, "..."]
    lse: Float64[Tensor, "..."]
    bound: Bound

    def error_ratio(self, out: Tensor, lse: Tensor | None) -> float:
        """The largest error over its bound; above 1 a result is wrong."""
        worst = float(error_ratio(out[self.place], self.out, self.bound.out).max())
        if lse is None:
            return worst
        return max(worst, float(error_ratio(lse[self.place], self.lse, self.bound.lse).max()))


def right_rows(
    tensors: AttentionTensors | MergeTensors, *, numerics: Numerics, num_partials: int, one_copy: bool
) -> list[RightRows]:
    """The rows that are looked at, and what is right there.

    ``num_partials``: into how many parts the kernel may have cut a sequence. ``one_copy``: as for `attention_bound`.
    """
    if isinstance(tensors, MergeTensors):
        return [_merged_rows(tensors)]
    found = []
    scale, dtype = tensors.shape.scale, tensors.q.dtype
    smallest = None if tensors.shape.kv_dtype is None else (SMALLEST[tensors.shape.kv_dtype],) * 2
    for seq, token, visible in _rows(tensors):
        seen = slice(tensors.shape.first_seen(visible - 1), visible)
        k, v = (part[seen].double() for part in tensors.sequence(seq, visible))
        q = tensors.q[token].double()
        bound = attention_bound(
            q, k, v, scale, in_dtype=dtype, out_dtype=dtype,
            numerics=numerics, num_partials=num_partials, one_copy=one_copy, smallest_kv=smallest,
        )  # fmt: skip
        found.append(RightRows(token, *_attention(q, k, v, scale), bound))
    return found


def _rows(tensors: AttentionTensors) -> list[tuple[int, int, int]]:
    """Some queries: their sequence, their place among all queries, and how many keys they see.

    The first and the last query of sequences from the first to the last.
    """
    shape = tensors.shape
    num_seqs = len(shape.seq_lens)
    step = max(1, (num_seqs - 1) // (_MOST_ROWS // 2))
    rows = []
    for seq in sorted({*range(0, num_seqs, step), num_seqs - 1}):
        queries, start = shape.queries[seq], sum(shape.queries[:seq])
        for query in sorted({0, queries - 1} if queries else ()):
            rows.append((seq, start + query, shape.seq_lens[seq] - queries + query + 1))
    return rows


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    grouped = q.view(k.shape[1], -1, q.shape[-1])
    scores = scale * (grouped @ k.permute(1, 2, 0))  # [num_kv_heads, group, num_tokens]
    return (scores.softmax(-1) @ v.transpose(0, 1)).flatten(0, 1), scores.logsumexp(-1).flatten()


def _merged_rows(tensors: MergeTensors) -> RightRows:
    step = max(1, tensors.shape.num_tokens // _MOST_MERGED)
    outputs = [part[::step].double() for part in (tensors.prefix_output, tensors.suffix_output)]
    lses = [part[::step].double() for part in (tensors.prefix_lse, tensors.suffix_lse)]
    bound = merge_bound(*outputs, *lses, out_dtype=tensors.prefix_output.dtype)
    return RightRows(slice(None, None, step), *merge_all(torch.stack(outputs, -2), torch.stack(lses, -1)), bound)


_PROBES = 5
"""Calls that tell how many make a sample."""


@dataclass(frozen=True, slots=True)
class Contender:
    """How to prepare a call on a set of tensors, what arithmetic it may use, and whether a graph may hold it."""

    prepare: Callable[[Tensors], Prepared]
    numerics: Numerics
    num_partials: int
    in_graph: bool


def measure(
    contender: Contender,
    sets: Sequence[Tensors],
    request: MeasureRequest,
    stopwatch: Stopwatch,
    *,
    on_gpu: bool,
) -> MeasureReply:
    """``sets``: one for warm times; as many as the L2 cache cannot hold together, or none beside it, for cold ones.

    Where no ``modes`` are asked for, the contender is called and nothing else: what it compiles is compiled then.

    Raises NotMeasured, and whatever the contender raises.
    """
    try:
        prepared = [contender.prepare(tensors) for tensors in sets]
    except Unsupported as why:
        return MeasureReply(status="unsupported", note=str(why))
    if not request.modes:
        prepared[0].call()
        return MeasureReply(status="ok")
    with as_not_measured():
        right = right_rows(
            sets[0], numerics=contender.numerics, num_partials=contender.num_partials, one_copy=not on_gpu
        )
    ratio = _error_ratio(right, sets[0], prepared[0], prepared[0].call())
    if ratio > 1:
        return MeasureReply(status="wrong", error_ratio=_finite(ratio), note=f"{ratio:.3g} times the error bound")
    times: list[Timed] = []
    states = {l2: prepared if l2 == "cold" else prepared[:1] for l2 in request.l2}
    if "eager" in request.modes:
        times += [_eager(calls, request, stopwatch, l2) for l2, calls in states.items()]
    if "graph" not in request.modes or not on_gpu:
        return MeasureReply(status="ok", times=tuple(times), error_ratio=ratio)
    if not contender.in_graph:
        return MeasureReply(status="ok", times=tuple(times), error_ratio=ratio, note="declares no graph_replay")
    for l2, calls in states.items():
        timed, in_graph = _in_graph(right, sets, calls, request, stopwatch, l2)
        ratio = max(ratio, in_graph)
        if ratio > 1:
            note = f"{ratio:.3g} times the error bound when its graph is replayed"
            return MeasureReply(status="wrong", error_ratio=_finite(ratio), note=note)
        times.append(timed)
    return MeasureReply(status="ok", times=tuple(times), error_ratio=ratio)


def _eager(calls: Sequence[Prepared], request: MeasureRequest, stopwatch: Stopwatch, l2: L2State) -> Timed:
    turns = itertools.cycle([one.call for one in calls])  # a sample begins with the set after the last one
    count = calls_per_sample(min(stopwatch(lambda: next(turns)(), _PROBES)))
    return time_samples(
        partial(_take, turns, count), stopwatch, calls=count, seconds=request.seconds, l2=l2, mode="eager"
    )


def _in_graph(
    right: Sequence[RightRows],
    sets: Sequence[Tensors],
    calls: Sequence[Prepared],
    request: MeasureRequest,
    stopwatch: Stopwatch,
    l2: L2State,
) -> tuple[Timed, float]:
    """The time, and the error ratio of what the replays left. A graph for ``room`` is captured at that length."""
    run_once = [one.call for one in calls]
    few = run_once[:_PROBES]
    probe = GraphOfCalls(few, len(few))
    count = calls_per_sample(min(stopwatch(probe.replay, _PROBES)) / len(few), len(calls))
    probe.close()
    _set_lengths(calls, sets, request.shape.room)
    graph = GraphOfCalls(run_once, count)
    _set_lengths(calls, sets, 0)
    try:
        timed = time_samples(graph.replay, stopwatch, calls=count, seconds=request.seconds, l2=l2, mode="graph")
        return timed, _error_ratio(right, sets[0], calls[0], graph.results[0])
    finally:
        graph.close()


def _set_lengths(calls: Sequence[Prepared], sets: Sequence[Tensors], room: int) -> None:
    """Set the lengths on the device: ``room`` for all sequences, or those of the shape if that is 0."""
    for one, tensors in zip(calls, sets, strict=False):
        if one.set_lengths is not None and isinstance(tensors, AttentionTensors):
            lens = tensors.seq_lens
            one.set_lengths(torch.full_like(lens, room) if room else lens)


def _take(turns: Iterator[Callable[[], object]], count: int) -> None:
    for call in itertools.islice(turns, count):
        call()


def _error_ratio(right: Sequence[RightRows], tensors: Tensors, prepared: Prepared, returned: object) -> float:
    out, lse = prepared.read(returned)
    _check_shape(tensors, out)
    with as_not_measured():
        return max((rows.error_ratio(out, lse) for rows in right), default=0.0)


def _check_shape(tensors: Tensors, out: Tensor) -> None:
    like = tensors.q if isinstance(tensors, AttentionTensors) else tensors.prefix_output
    wanted = (*like.shape[:2], tensors.shape.value_size)
    if out.shape != wanted:
        raise ValueError(f"the result has shape {tuple(out.shape)}; it must have {wanted}")


def _finite(ratio: float) -> float:
    """JSON has no infinity."""
    return min(ratio, 1e300)
