"""One contender on one shape: is it right, and how long does it take, eager and in a graph, from memory and from L2."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnfuzz.bench.kernels.accuracy import largest_error_ratio
from attnfuzz.bench.kernels.calls import Prepared, Unsupported, ours
from attnfuzz.bench.kernels.graphs import GraphOfCalls
from attnfuzz.bench.kernels.messages import L2State, MeasureReply, MeasureRequest, Timed
from attnfuzz.bench.kernels.tensors import AttentionTensors, MergeTensors
from attnfuzz.bench.kernels.timing import Stopwatch, calls_per_sample, time_samples
from attnfuzz.problems.declared_numerics import Numerics

__all__ = ["Contender", "measure"]

Tensors = AttentionTensors | MergeTensors

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
    contender: Contender, sets: Sequence[Tensors], request: MeasureRequest, stopwatch: Stopwatch, *, on_gpu: bool
) -> MeasureReply:
    """``sets``: one for warm times; as many as the L2 cache cannot hold together, or none beside it, for cold ones.

    Raises NotMeasured, and whatever the contender raises.
    """
    try:
        prepared = [contender.prepare(tensors) for tensors in sets]
    except Unsupported as why:
        return MeasureReply(status="unsupported", note=str(why))
    ratio = _error_ratio(contender, sets[0], prepared[0], prepared[0].call(), on_gpu=on_gpu)
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
        timed, in_graph = _in_graph(contender, sets, calls, request, stopwatch, l2)
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
    contender: Contender,
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
        return timed, _error_ratio(contender, sets[0], calls[0], graph.results[0], on_gpu=True)
    finally:
        graph.close()


def _set_lengths(calls: Sequence[Prepared], sets: Sequence[Tensors], room: int) -> None:
    """What the lengths on the device say: ``room`` for all sequences, or those of the shape if that is 0."""
    for one, tensors in zip(calls, sets, strict=False):
        if one.set_lengths is not None and isinstance(tensors, AttentionTensors):
            lens = tensors.seq_lens
            one.set_lengths(torch.full_like(lens, room) if room else lens)


def _take(turns: Iterator[Callable[[], object]], count: int) -> None:
    for call in itertools.islice(turns, count):
        call()


def _error_ratio(
    contender: Contender, tensors: Tensors, prepared: Prepared, returned: object, *, on_gpu: bool
) -> float:
    out, lse = prepared.read(returned)
    _check_shape(tensors, out)
    with ours():
        return largest_error_ratio(
            tensors,
            out,
            lse,
            numerics=contender.numerics,
            num_partials=contender.num_partials,
            one_copy=not on_gpu,
        )


def _check_shape(tensors: Tensors, out: Tensor) -> None:
    like = tensors.q if isinstance(tensors, AttentionTensors) else tensors.prefix_output
    if out.shape != like.shape:
        raise ValueError(f"the result has shape {tuple(out.shape)}; it must have {tuple(like.shape)}")


def _finite(ratio: float) -> float:
    """JSON has no infinity."""
    return min(ratio, 1e300)
