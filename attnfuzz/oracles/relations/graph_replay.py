"""A call captured once into a CUDA graph and replayed on other contents: what an eager call gives on them.

`Supports(graph_replay=True)` says so; where a kernel says nothing of it, what fails is a question. A graph repeats
launches with the arguments that they had, so whatever the host worked out from the lengths is frozen: the grid, the
number of splits, a copy of the table, a counter set back by the host. Servers capture with one batch and replay with
all others, shorter, longer and padded with empty rows. So what the tensors of the call hold in turn are cases with the
shapes, strides and host-side arguments of the one captured.

The replays come one after another, with no other call in between that could put things right, then the eager calls,
then one more replay: what they made a kernel allocate anew is gone from under the graph. At last a smaller batch is
captured into a second graph over the same pool of memory, as servers capture one for each size, and both are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from attnfuzz.cases import same_shapes
from attnfuzz.cases.same_shapes import Twin, other_contents
from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.inputs.allocation import allocate
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.oracles.relations.relation import Relation, on_host, unequal_bits
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.wording import element, number, ratio
from attnfuzz.trials.comparison import Comparison, compare, extent, first_index
from attnfuzz.trials.observation import (
    KernelRaised,
    call,
    call_options,
    results_of_call,
)
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Failure

_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. They are never freed: torch's allocator still counts their captures as under way (up to
2.12, pytorch#180395), and may end the process when it is told to forget them."""


Plan = Callable[[], Callable[[], Any] | None]


class CapturedCall:
    """`results`, by name, are written anew by each replay.

    What an engine plans for a batch lies outside of the graph: ``plan`` is called before each replay, as servers do it.
    It writes where the graph reads, or the graph is wrong.
    """

    def __init__(self, graph: Any, results: dict[str, Tensor], plan: Plan, pool: Any = None) -> None:
        """`graph`: a `torch.cuda.CUDAGraph`, or what is replayed as one is. `pool`: see `captured_call`."""
        self.results = results
        self.pool = pool
        self._graph = graph
        self._plan = plan

    def replay(self, words: str) -> None:
        """Run it again on what its tensors hold now, and wait. Raises `KernelRaised`, changed as `words` say."""
        _planned(self._plan, words)
        try:
            self._graph.replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise KernelRaised(error, "nan", words) from error


@contextmanager
def captured_call(kernel: Kernel, case: Case, inputs: Any, *, pool: Any = None) -> Iterator[CapturedCall]:
    """The call of `kernel` on `inputs`, with the options of `case`. Its memory is given back at the end.

    `pool`: that of another graph, whose memory this one uses, too; they are not replayed at the same time.

    What the kernel allocates within comes from the graph's own pool and is not filled with anything: a fill would
    become part of the graph. Raises `KernelRaised`; if that is `fatal`, the capture failed.
    """
    side = _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _warm_up(kernel, case, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    again = partial(kernel.plan, inputs, **call_options(kernel, case))
    planned = _planned(again, "planned before it is captured")
    run = planned or partial(kernel, inputs, **call_options(kernel, case))
    results = _capture(graph, kernel, case, inputs, run, pool)
    captured = CapturedCall(graph, results, again if planned else lambda: None, graph.pool())
    try:
        yield captured  # what was planned is kept until the end: the graph reads it
    finally:
        captured.results.clear()  # tensors of the pool, which lives as long as they do
        with suppress(RuntimeError):  # of a context that a replay has lost, which is told already
            graph.reset()


@cache
def _side_stream() -> torch.cuda.Stream:
    """Always the same one: libraries keep workspaces for each."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it


def _warm_up(kernel: Kernel, case: Case, inputs: Any) -> None:
    """Compile, tune, and allocate what is allocated once."""
    try:
        kernel(inputs, **call_options(kernel, case))
        torch.cuda.synchronize()
    except BaseException as error:  # whatever a kernel raises is its verdict
        raise KernelRaised(error, "nan", "called to warm up, on a stream of its own") from error


def _planned(plan: Plan, words: str) -> Callable[[], Any] | None:
    try:
        return plan()
    except BaseException as error:  # as above
        raise KernelRaised(error, "nan", words) from error


def _capture(
    graph: torch.cuda.CUDAGraph, kernel: Kernel, case: Case, inputs: Any, run: Callable[[], Any], pool: Any
) -> dict[str, Tensor]:
    first: BaseException | None = None
    side = _side_stream()
    try:
        # The outer context gives the stream back: the inner one does not if the capture cannot be ended.
        with torch.cuda.stream(side), torch.cuda.graph(graph, pool=pool, stream=side):
            try:
                returned = run()
            except BaseException as error:
                first = error  # ending a capture that is invalid raises another one
                raise
        return results_of_call(kernel, case, inputs, returned)
    except BaseException as error:  # as above
        _ABANDONED.append(graph)
        raise KernelRaised(first or error, "nan", "cannot be captured", fatal=True) from error


def waits_for_the_device(kernel: Kernel, case: Case, inputs: Any) -> bool:
    """Whether a call waits for the GPU, as it may not while it is captured: asked without a capture that could fail.

    A capture that fails ends the process. Raises `KernelRaised`.
    """
    _warm_up(kernel, case, inputs)
    planned = _planned(partial(kernel.plan, inputs, **call_options(kernel, case)), "planned before it is captured")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (planned or partial(kernel, inputs, **call_options(kernel, case)))()
    except Exception:  # noqa: BLE001 - torch's, or what the kernel made of it
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


MOST_BYTES = 4 << 20
"""Most bytes of a case's tensors. Small ones show what a graph freezes."""


def with_room(declaration: Declaration, case: Case) -> Case:
    """`case` in tensors that have room for longer sequences, as those have that a server captures a graph with.

    As it is if that takes too much memory.
    """
    roomy: Case = same_shapes.with_room(case, declaration.supports)
    return roomy if tensor_nbytes(roomy) <= MOST_BYTES else case


def contents_of(declaration: Declaration, captured: Case) -> list[Twin]:
    """The contents that a captured call is replayed on: `captured`, then other lengths, pages and numbers."""
    return [Twin(captured, "with what it was captured with"), *other_contents(captured, declaration.supports)]


_REASONS = (
    "look for what is frozen when the graph is captured: a grid or a number of splits computed on the host, a copy of "
    "the block table or the lengths, a workspace that only the host clears or that has been allocated anew since"
)

_ROOM_PER_TENSOR = 1 << 18
"""Bytes: more than alignment and both red zones take, so that one chunk holds all tensors of a case."""

Tensors = dict[str, Tensor]
Memory = UInt8[Tensor, " nbytes"]


def _applies(declaration: Declaration, case: Case) -> bool:
    supports = declaration.supports
    is_asked = supports.leaves_open("graph_replay") and not isinstance(case, OpenCase)
    return bool(supports.graph_replay or is_asked) and tensor_nbytes(case) <= MOST_BYTES


_REMEDY: Mapping[str, Any] = {"graph_replay": False}


def _check(trial: Trial) -> Failure | None:
    """Check the case; where the kernel says nothing about graphs, an objection names the declaration for that."""
    if trial.kernel.declaration.supports.graph_replay:
        return _objection_to_replays(trial)
    held = _HeldTensors.of(trial)
    held.load(_image(trial, held.contents[0]))
    if waits_for_the_device(trial.kernel, held.captured, held.inputs):
        return None
    try:
        failure = _objection_to_replays(trial)
    except KernelRaised as raised:
        raised.remedy = dict(_REMEDY)
        raise
    return None if failure is None else msgspec.structs.replace(failure, remedy=dict(_REMEDY))


def _objection_to_replays(trial: Trial) -> Failure | None:
    held = _HeldTensors.of(trial)
    contents = [(content, _image(trial, content)) for content in held.contents]
    first, image = contents[0]
    held.load(image)
    with captured_call(trial.kernel, held.captured, held.inputs) as graph:
        replayed = [held.replayed(graph, *content) for content in contents]
        eager = [held.eager(trial.kernel, *content) for content in contents]
        for content, right, found in zip(held.contents, eager, replayed, strict=True):
            if (failure := _objection(trial, content, right, found)) is not None:
                return failure
        again = Twin(first.case, f"{first.words}, after calls on other contents")
        if (failure := _objection(trial, again, eager[0], held.replayed(graph, again, image))) is not None:
            return failure
        if (failure := _beside_another(held, graph, image, eager[0])) is not None:
            return failure
    stale = (_stale(held, *content, found) for content, found in zip(contents[1:], eager[1:], strict=True))
    return next(filter(None, stale), None)


def _beside_another(held: _HeldTensors, graph: CapturedCall, image: Memory, eager: Tensors) -> Failure | None:
    """An objection to one of two graphs that share a pool: what they are captured with, replayed by turns."""
    trial, case = held.trial, smaller(held.captured)
    other = _HeldTensors.holding(
        trial, case, [Twin(case, "with a smaller batch, as the second one over the same memory")]
    )
    (content,) = other.contents
    its_image = _image(trial, content)
    other.load(its_image)
    with captured_call(trial.kernel, case, other.inputs, pool=graph.pool) as second:
        found = other.replayed(second, content, its_image)
        once_more = Twin(held.captured, "with what it was captured with, after a second one over the same memory")
        failure = _objection(trial, once_more, eager, held.replayed(graph, once_more, image))
        if failure is not None:
            return failure
        right = other.eager(trial.kernel, content, its_image)
        return _objection(trial, content, right, found) or _objection(
            trial, content, right, other.replayed(second, content, its_image)
        )


def smaller(case: Case) -> Case:
    """Half the batch, if that has a query token; else the same."""
    if isinstance(case, MergeStatesCase):
        return msgspec.structs.replace(case, num_tokens=max(1, case.num_tokens // 2))
    if not isinstance(case, AttentionCase):
        return case
    fields = case.of_sequences(range(max(1, case.num_seqs // 2)))
    if not any(fields.get("query_lens", (1,))):
        return case
    return msgspec.structs.replace(case, **fields, values=msgspec.structs.replace(case.values, needles=()))


@dataclass(frozen=True, slots=True)
class _HeldTensors:
    """The tensors that a call is captured with, and what goes into them."""

    trial: Trial
    captured: Case
    memory: Memory
    inputs: Any
    contents: Sequence[Twin]

    @classmethod
    def of(cls, trial: Trial) -> _HeldTensors:
        declaration = trial.kernel.declaration
        captured = with_room(declaration, trial.case)
        return cls.holding(trial, captured, contents_of(declaration, captured))

    @classmethod
    def holding(cls, trial: Trial, captured: Case, contents: Sequence[Twin]) -> _HeldTensors:
        tensors, memory = _allocated(captured, trial.device)
        return cls(trial, captured, memory, problem_of(captured).inputs(captured, tensors), contents)

    def load(self, image: Memory) -> None:
        """Overwrite everything: dead elements and outputs with NaN."""
        self.memory.copy_(image)

    def replayed(self, graph: CapturedCall, content: Twin, image: Memory) -> Tensors:
        self.load(image)
        for result in graph.results.values():
            result.fill_(float("nan"))
        graph.replay(f"replayed {content.words}")
        return problem_of(content.case).owned(
            content.case, {name: result.clone() for name, result in graph.results.items()}
        )

    def eager(self, kernel: Kernel, content: Twin, image: Memory) -> Tensors:
        self.load(image)
        allocations = TrackedAllocations(self.trial.device, poison="nan", prefill="nan")
        try:
            results = call(kernel, self.captured, self.inputs, allocations, wait=True)
        except KernelRaised as raised:
            raise KernelRaised(raised.error, raised.poison, f"called {content.words}") from raised.error
        return problem_of(content.case).owned(content.case, {name: result.clone() for name, result in results.items()})


def _image(trial: Trial, content: Twin) -> Memory:
    """The memory of a case, made on the host: one copy brings it to the device."""
    problem = problem_of(content.case)
    (contents,) = problem.contents([content.case], "cpu", trial.kernel.declaration.supports)
    tensors, memory = _allocated(content.case, "cpu")
    one_run = {name: tensor[None] for name, tensor in tensors.items()}
    problem.write(content.case, one_run, contents.values, contents.placement)
    return memory


def _allocated(case: Case, device: str) -> tuple[Tensors, Memory]:
    """The tensors of `case`, and the stretch that all of them lie in: at the same places for cases of equal shapes."""
    capacity = tensor_nbytes(case) + _ROOM_PER_TENSOR * len(tensor_specs(case))
    arena = Arena(device, poison="nan", prefill="nan", capacity=capacity)
    tensors = allocate(case, arena)
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(next(iter(tensors.values())).untyped_storage())
    return tensors, whole[: max(region.end for region in arena.regions)]


def _objection(trial: Trial, content: Twin, eager: Tensors, replayed: Tensors) -> Failure | None:
    words = f"when the graph is replayed {content.words}"
    if not trial.kernel.declaration.supports.deterministic:
        return _beyond_bounds(trial, content.case, eager, replayed, words)
    right, found = map(on_host, (eager, replayed))
    return unequal_bits(
        registry.GRAPH_REPLAY, content.case, right, found, words, details=(_REASONS,), as_it_was="in an eager call"
    )


def _beyond_bounds(trial: Trial, case: Case, eager: Tensors, replayed: Tensors, words: str) -> Failure | None:
    """An objection to what is outside its bound in the replay, and inside in the eager call."""
    rights, founds = (compare(trial.reference_of(case), results) for results in (eager, replayed))
    for right, found in zip(rights, founds, strict=True):
        mask = (found.ratio > 1) & (right.ratio <= 1)
        if mask.any():
            return _outside(found, mask, f"is {_at(right, mask)} in an eager call, but {_at(found, mask)} {words}")
    return None


def _stale(held: _HeldTensors, content: Twin, image: Memory, eager: Tensors) -> Failure | None:
    """An objection to what replays and eager calls agree on, if it is right before any other call.

    Such a kernel has kept for the eager calls, too, what it worked out when it was first called with these shapes.
    """
    trial = held.trial
    found = next((one for one in compare(trial.reference_of(content.case), eager) if bool((one.ratio > 1).any())), None)
    fresh = None if found is None else fresh_copy(trial.kernel)
    if found is None or fresh is None:
        return None
    anew = compare(trial.reference_of(content.case), held.eager(fresh, content, image))
    if any(bool((one.ratio > 1).any()) for one in anew):
        return None  # it is wrong by itself
    mask = found.ratio > 1
    right = next(one for one in anew if one.name == found.name)
    said = f"is {_at(right, mask)} before any other call, but {_at(found, mask)} when the graph is replayed"
    return _outside(found, mask, f"{said} {content.words}, and in an eager call after that")


def _outside(found: Comparison, mask: Bool[Tensor, "..."], said: str) -> Failure:
    index = first_index(mask)
    worst = float(found.ratio[index])
    return Failure(
        oracle=registry.GRAPH_REPLAY.name,
        kind=found.name,
        message=f"{element(found.name, found.axes, index)} {said}: {ratio(worst)} times the error bound",
        details=(f"it changes {extent(found.name, found.axes, mask)}", _REASONS),
        error_ratio=worst,
        tensor=found.name,
    )


def _at(comparison: Comparison, mask: Bool[Tensor, "..."]) -> str:
    return number(float(comparison.got[first_index(mask)]))


GRAPH_REPLAY = Relation(registry.GRAPH_REPLAY, _applies, _check, under_a_mask=False, promise="graph_replay")
