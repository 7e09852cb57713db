"""One contender on one shape: its case, tensors and call, whether the result is right, and how long it takes.

Cases, what a kernel takes of them, the shapes of tensors, references and bounds are those of a search. Only the numbers
are drawn in another way, since there are a thousand times as many, and only some rows of the result are looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from jaxtyping import Int32
from torch import Tensor

from attnfuzz.bench.kernels.shapes import PROBLEMS_OF, L2State, MeasureReply, MeasureRequest, Shape, Timed
from attnfuzz.bench.kernels.timing import (
    PROBES,
    GraphOfCalls,
    Stopwatch,
    calls_in_graph,
    calls_per_sample,
    time_samples,
)
from attnfuzz.cases.supported import why_unsupported
from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.families.sparse_decode import SparseDecode
from attnfuzz.inputs.layouts import token_views, tokens_first
from attnfuzz.inputs.registry import problem_of
from attnfuzz.numerics import error_ratio
from attnfuzz.problems.cases import MergeStatesCase, PagedDecodeCase, case_from_builtins, case_type_of
from attnfuzz.problems.choices import layouts_of, paddings_of
from attnfuzz.problems.fields import Choice
from attnfuzz.problems.open_cases import OpenProblem, implementation_of
from attnfuzz.problems.quantised_kv import KV_SCALE_TENSORS, QuantisedKv
from attnfuzz.problems.shapes import Specs, TensorSpec, tensor_specs
from attnfuzz.problems.supports import OptionValue
from attnfuzz.trials.comparison import natural_lse
from attnfuzz.trials.expectations import Expectation, expectations
from attnfuzz.trials.observation import named_results
from attnfuzz.values import LogicalAttention, LogicalStates


class Unsupported(Exception):  # noqa: N818 - says what the shape is, not that anything went wrong
    """A contender does not take a shape; the message says why."""


class NotMeasured(Exception):  # noqa: N818 - says what happened to the measurement
    """Attnfuzz itself failed before or after a contender's call: nothing is known of the contender."""


@contextmanager
def as_not_measured() -> Iterator[None]:
    """Turn an exception within, which is not the contender's doing, into a NotMeasured with its cause."""
    try:
        yield
    except Exception as error:
        raise NotMeasured(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error


def case_of(shape: Shape, declaration: Declaration, options: Mapping[str, OptionValue]) -> Any:
    """``shape`` as a case of the kernel's problem, in the first layout that the kernel takes it in.

    Of sparse decode it is the fields of a case alone: there are more than is drawn. Raises Unsupported.
    """
    problem, supports = declaration.problem, declaration.supports
    if str(problem) not in PROBLEMS_OF[shape.kind]:
        raise Unsupported(f"computes {problem}")
    if isinstance(problem, OpenProblem):
        return _sparse_case(problem, shape)
    if shape.room and declaration.versions and not supports.graph_replay:  # what it plans may hold the lengths
        raise Unsupported("promises no graph for other lengths")
    if supports.max_seq_len is not None and shape.room > supports.max_seq_len:
        raise Unsupported(f"max_seq_len is {supports.max_seq_len}")
    slack = max(0, shape.room - shape.longest)
    columns, needed = (-(-length // shape.block_size) for length in (max(shape.room, shape.longest), shape.longest))
    known = {
        **msgspec.structs.asdict(shape),
        "scale": shape.scale,
        "v_head_size": shape.value_size,
        "query_lens": shape.queries,
        "extra_rows": slack,
        "seq_slack": slack,
        "pages": {"extra_columns": columns - needed, "padding": paddings_of(supports)[0]},
        "lse_layout": supports.lse_layout,
        "options": options,
        "variant": {"window": shape.window or None},
        "kv": shape.kv_dtype and {"dtype": shape.kv_dtype},
    }
    names = case_type_of(problem).__struct_fields__
    objections = []
    for layout in layouts_of(supports):
        fields = {name: value for name, value in (known | {"layout": layout}).items() if name in names}
        try:
            case = case_from_builtins(problem, fields)
            why = why_unsupported(supports, {name: (value,) for name, value in options.items()}, case)
        except ValueError as error:
            why = str(error)
        if why is None:
            return case
        objections.append(why)
    raise Unsupported(objections[0])


def _sparse_case(problem: OpenProblem, shape: Shape) -> SimpleNamespace:
    """A list names each slot once, and none is left out; the cache has q's dtype."""
    if not isinstance(implementation_of(problem), SparseDecode):
        raise Unsupported(f"computes another {problem}")
    asked = {"cache": "same", "has_lengths": False, "repeats": False, "dtype": shape.dtype}
    for name, value in asked.items():
        if isinstance(known := problem.fields[name], Choice) and value not in known.values:
            raise Unsupported(f"{name} is not {value}")
    sizes = {"num_heads": shape.num_q_heads, "head_size": shape.head_size, "v_head_size": shape.rank}
    lists = {"named": shape.seq_lens, "topk": shape.longest, "spare_slots": sum(shape.seq_lens) - shape.longest}
    return SimpleNamespace(**{name: one.simplest for name, one in problem.fields.items()} | asked | sizes | lists)


class Contender:
    """A kernel on a shape with options. Raises Unsupported.

    ``specs``: its tensors. ``in_graph``: whether a CUDA graph may hold its call, as engines' servers capture theirs.
    """

    def __init__(self, kernel: Kernel, shape: Shape, options: Mapping[str, OptionValue]) -> None:
        self.kernel, self.shape, self.options = kernel, shape, dict(options)
        self.declaration = kernel.declaration
        self.case = case_of(shape, self.declaration, self.options)
        problem = self.declaration.problem
        own = implementation_of(problem) if isinstance(problem, OpenProblem) else None
        self.specs: Specs = own.tensors(self.case) if own else tensor_specs(self.case)
        names = tuple(name for name, spec in self.specs.items() if spec.role == "output")
        self.returns = names, names if self.declaration.supports.lse != "none" else names[:1]
        self.in_graph = bool(self.declaration.supports.graph_replay or self.declaration.versions)

    def draw(self, device: str, seed: int) -> Any:
        """Inputs: about normal numbers, never zeros, on which hardware is faster than on data."""
        generator = torch.Generator(device=device).manual_seed(seed)
        tensors = {name: _filled(name, spec, self.shape, generator) for name, spec in self.specs.items()}
        if isinstance(self.case, SimpleNamespace):
            return SimpleNamespace(**vars(self.case) | tensors)
        return problem_of(self.case).inputs(self.case, tensors)

    def right_rows(self, inputs: Any, *, one_copy: bool) -> list[tuple[slice, Expectation]]:
        """Some rows of the results, and what is right there. ``one_copy``: as for `attention_bound`."""
        is_merge = isinstance(self.case, MergeStatesCase)
        requests = [_states(self.declaration, self.case, inputs)] if is_merge else self._rows(inputs)
        found = []
        for rows, case, values in requests:  # one by one: of long sequences each needs much memory
            (is_right,) = expectations([(self.declaration, case, values)], tolerance="bound", one_copy=one_copy)
            found.append((rows, is_right))
        return found

    def _rows(self, inputs: Any) -> Iterator[tuple[slice, PagedDecodeCase, LogicalAttention]]:
        """The first and the last query of sequences from the first to the last, each as all there is."""
        shape = self.shape
        sizes = {name: getattr(shape, name) for name in ("num_q_heads", "num_kv_heads", "head_size", "dtype", "scale")}
        kv = QuantisedKv(dtype=shape.kv_dtype) if shape.kv_dtype else None
        plain = PagedDecodeCase(
            **sizes, v_head_size=shape.value_size, kv=kv, options=self.options, seq_lens=(1,), block_size=1
        )
        scales = torch.ones((2, shape.num_kv_heads), dtype=torch.float64, device=inputs.q.device)
        last = len(shape.seq_lens) - 1
        for seq in sorted({*range(0, last, max(1, last // 3)), last}):
            queries = shape.queries[seq]
            for query in sorted({0, queries - 1} if queries else ()):
                row, visible = sum(shape.queries[:seq]) + query, shape.seq_lens[seq] - queries + query + 1
                k, v = _keys_and_values(shape, inputs, seq, slice(shape.first_seen(visible - 1), visible))
                case = msgspec.structs.replace(plain, seq_lens=(len(k),))
                values = LogicalAttention(inputs.q[row, None], k, v, (0, len(k)), scales if kv else None)
                yield slice(row, row + 1), case, values


def _keys_and_values(shape: Shape, inputs: Any, seq: int, keys: slice) -> tuple[Tensor, Tensor]:
    """K and V ``[tokens num_kv_heads size]`` of one sequence, from wherever they lie."""
    if hasattr(inputs, "k"):
        return inputs.k[seq, keys], inputs.v[seq, keys]
    if hasattr(inputs, "indices"):
        rows = inputs.kv_cache[inputs.indices[seq, keys].long()]
        return rows, rows[..., : shape.rank]
    pages = inputs.block_table[seq, : -(-keys.stop // shape.block_size)].long()
    k, v = (
        _pages_of(cache, pages).flatten(0, 1)[keys]
        for cache in token_views(inputs.k_cache, inputs.v_cache, inputs.layout)
    )
    return k.flatten(2), v


def _pages_of(cache: Tensor, pages: Tensor) -> Tensor:
    """Also of 8-bit floats, which torch does not index everywhere."""
    return cache.view(torch.uint8)[pages].view(cache.dtype) if cache.element_size() == 1 else cache[pages]


_MOST_MERGED = 512


def _states(
    declaration: Declaration, case: MergeStatesCase, inputs: Any
) -> tuple[slice, MergeStatesCase, LogicalStates]:
    rows = slice(None, None, max(1, case.num_tokens // _MOST_MERGED))
    values = LogicalStates(
        inputs.prefix_output[rows],
        inputs.suffix_output[rows],
        tokens_first(inputs.prefix_lse, inputs.lse_layout)[rows],
        tokens_first(inputs.suffix_lse, inputs.lse_layout)[rows],
        lse_base2=declaration.supports.lse == "base2",
    )
    return rows, msgspec.structs.replace(case, num_tokens=len(values.prefix_output)), values


def _filled(name: str, spec: TensorSpec, shape: Shape, generator: torch.Generator) -> Tensor:
    device, dtype = generator.device, getattr(torch, spec.dtype)
    if name in ("block_table", "indices"):
        return _block_table(shape, spec.shape[1]).to(device)
    if name in ("seq_lens", "cu_seqlens_q"):
        numbers = shape.seq_lens if name == "seq_lens" else (0, *itertools.accumulate(shape.queries))
        return torch.tensor(numbers, dtype=dtype, device=device)
    if name in KV_SCALE_TENSORS:
        return torch.ones(spec.shape, dtype=dtype, device=device)
    if spec.role == "output":
        return torch.empty(spec.shape, dtype=dtype, device=device)
    drawn = dtype if dtype.itemsize > 1 else getattr(torch, shape.dtype)
    return torch.randn(spec.shape, dtype=drawn, device=device, generator=generator).to(dtype)


def _block_table(shape: Shape, width: int) -> Int32[Tensor, "num_seqs max_blocks_per_seq"]:
    """Physical pages in random order; what no sequence needs names some page, too.

    The same in all sets: FlashInfer's wrappers for graphs keep one for all batches of a shape.
    """
    pages = [-(-length // shape.block_size) for length in shape.seq_lens]
    total = max(1, sum(pages))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0), device="cpu").int()
    table = order[torch.arange(len(pages) * width, device="cpu") % total].view(len(pages), width)
    for row, (start, end) in enumerate(itertools.pairwise((0, *itertools.accumulate(pages)))):
        table[row, : end - start] = order[start:end]
    return table


class Prepared:
    """A contender's ``call`` on one set of tensors, which is what is timed, and what it leaves."""

    def __init__(self, contender: Contender, inputs: Any) -> None:
        self._contender, self._inputs = contender, inputs
        self.call: Callable[[], object] = contender.kernel.planned(inputs, **contender.options)

    def forget(self, returned: object = None) -> None:
        """Overwrite the results: a call that writes none would leave an earlier one's."""
        for result in self._results(returned):
            result.fill_(float("nan"))

    def error_ratio(self, right: Sequence[tuple[slice, Expectation]], returned: object) -> float:
        """The largest error over its bound, above 1 if a result is wrong; without an LSE only the output counts."""
        out, *lse = self._results(returned)
        with as_not_measured():
            got = [out, *(natural_lse(self._contender.declaration, one) for one in lse)]
            if isinstance(case := self._contender.case, MergeStatesCase):
                got[1:] = [tokens_first(one, case.lse_layout) for one in got[1:]]
            ratios = [
                error_ratio(one[rows], getattr(is_right.expected, name), getattr(is_right.bound, name)).max()
                for rows, is_right in right
                for name, one in zip(("out", "lse"), got, strict=False)
            ]
            return max(map(float, ratios), default=0.0)

    def set_lengths(self, room: int) -> None:
        """Let all sequences have ``room`` tokens on the device, or 0: their own, and plan anew, as servers do."""
        shape = self._contender.shape
        if hasattr(self._inputs, "seq_lens") and shape.kind != "mixed":
            lengths = [room] * len(shape.seq_lens) if room else shape.seq_lens
            self._inputs.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32, device="cpu"))
            self._contender.kernel.plan(self._inputs, **self._contender.options)

    def _results(self, returned: object) -> list[Tensor]:
        return list(named_results(returned, self._inputs, *self._contender.returns).values())


def measure(
    contender: Contender, sets: Sequence[Any], request: MeasureRequest, stopwatch: Stopwatch, *, on_gpu: bool
) -> MeasureReply:
    """``sets`` of inputs: one for warm times; as many as the L2 cache cannot hold together for cold ones.

    Where no ``modes`` are asked for, the contender is called and nothing else: what it compiles is compiled then.

    Raises NotMeasured, and whatever the contender raises.
    """
    prepared = [Prepared(contender, inputs) for inputs in sets]
    if not request.modes:
        prepared[0].call()
        return MeasureReply(status="ok")
    with as_not_measured():
        right = contender.right_rows(sets[0], one_copy=not on_gpu)
        prepared[0].forget()
    ratio, when, note = prepared[0].error_ratio(right, prepared[0].call()), "", ""
    times: list[Timed] = []
    states = {l2: prepared if l2 == "cold" else prepared[:1] for l2 in request.l2}
    if ratio <= 1 and "eager" in request.modes:
        times += [_eager(calls, request, stopwatch, l2) for l2, calls in states.items()]
    if "graph" in request.modes and on_gpu and not contender.in_graph:
        note = "declares no graph_replay"
    elif "graph" in request.modes and on_gpu:
        for l2, calls in states.items():
            if ratio <= 1:
                timed, in_graph = _in_graph(right, calls, request, stopwatch, l2)
                ratio, when = max(ratio, in_graph), " when its graph is replayed"
                times.append(timed)
    if ratio > 1:
        finite = min(ratio, 1e300)  # JSON has no infinity
        return MeasureReply(status="wrong", error_ratio=finite, note=f"{ratio:.3g} times the error bound{when}")
    return MeasureReply(status="ok", times=tuple(times), error_ratio=ratio, note=note)


def _eager(prepared: Sequence[Prepared], request: MeasureRequest, stopwatch: Stopwatch, l2: L2State) -> Timed:
    turns = itertools.cycle([one.call for one in prepared])  # a sample begins with the set after the last one
    count = calls_per_sample(min(stopwatch(lambda: next(turns)(), PROBES)))

    def sample() -> None:
        for call in itertools.islice(turns, count):
            call()

    return time_samples(sample, stopwatch, calls=count, seconds=request.seconds, l2=l2, mode="eager")


def _in_graph(
    right: Sequence[tuple[slice, Expectation]],
    prepared: Sequence[Prepared],
    request: MeasureRequest,
    stopwatch: Stopwatch,
    l2: L2State,
) -> tuple[Timed, float]:
    """The time, and the error ratio of what the replays left. A graph for ``room`` is captured at that length."""
    calls = [one.call for one in prepared]
    count = calls_in_graph(calls, stopwatch)
    for one in prepared if request.shape.room else ():
        one.set_lengths(request.shape.room)
    with closing(GraphOfCalls(calls, count)) as graph:
        for one in prepared if request.shape.room else ():
            one.set_lengths(0)
        prepared[0].forget(graph.results[0])
        timed = time_samples(graph.replay, stopwatch, calls=count, seconds=request.seconds, l2=l2, mode="graph")
        return timed, prepared[0].error_ratio(right, graph.results[0])
