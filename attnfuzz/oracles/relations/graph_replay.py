"""A call captured once into a CUDA graph and replayed on other contents: what an eager call gives on them.

`Supports(graph_replay=True)` says so. A graph repeats launches with the arguments that they had, so whatever the host
worked out from the lengths is frozen: the grid, the number of splits, a copy of the table, a counter set back by the
host. Servers capture with one batch and replay with all others, shorter, longer and padded with empty rows. So what the
tensors of the call hold in turn are cases with the shapes, strides and host-side arguments of the one captured.

The replays come one after another, with no other call in between that could put things right, then the eager calls,
then one more replay: what they made a kernel allocate anew is gone from under the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial, singledispatch
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.oracles.relations.relation import Relation, unequal_bits
from attnfuzz.problems.allocation import allocate
from attnfuzz.problems.block_table import num_blocks, physical_pages, used_blocks
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedDecodeCase,
    VarlenCase,
    has_query_lens,
)
from attnfuzz.problems.choices import lse_kinds_of
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.registry import problem_of
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.wording import element, number, ratio
from attnfuzz.trials.comparison import Comparison, Reference, compare, extent, first_index
from attnfuzz.trials.observation import (
    KernelRaised,
    Observation,
    call,
    call_options,
    results_of_call,
)
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Failure

__all__ = ["GRAPH_REPLAY", "MOST_BYTES", "CapturedCall", "Content", "captured_call", "contents_of", "with_room"]

_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. They are never freed: torch's allocator still counts their captures as under way (up to
2.12, pytorch#180395), and may end the process when it is told to forget them."""


Plan = Callable[[], Callable[[], Any] | None]


class CapturedCall:
    """`results`, by name, are written anew by each replay.

    What an engine plans for a batch lies outside of the graph: ``plan`` is called before each replay, as servers do it.
    It writes where the graph reads, or the graph is wrong.
    """

    def __init__(self, graph: Any, results: dict[str, Tensor], plan: Plan) -> None:
        """`graph`: a `torch.cuda.CUDAGraph`, or what is replayed as one is."""
        self.results = results
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
def captured_call(kernel: Kernel, case: Case, inputs: Any) -> Iterator[CapturedCall]:
    """The call of `kernel` on `inputs`, with the options of `case`. Its memory is given back at the end.

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
    results = _capture(graph, kernel, case, inputs, run)
    captured = CapturedCall(graph, results, again if planned else _nothing)
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


def _nothing() -> None:
    """The plan of a kernel that has none."""


def _capture(
    graph: torch.cuda.CUDAGraph, kernel: Kernel, case: Case, inputs: Any, run: Callable[[], Any]
) -> dict[str, Tensor]:
    first: BaseException | None = None
    side = _side_stream()
    try:
        # The outer context gives the stream back: the inner one does not if the capture cannot be ended.
        with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
            try:
                returned = run()
            except BaseException as error:
                first = error  # ending a capture that is invalid raises another one
                raise
        return results_of_call(kernel, case, inputs, returned)
    except BaseException as error:  # as above
        _ABANDONED.append(graph)
        raise KernelRaised(first or error, "nan", "cannot be captured", fatal=True) from error


A = TypeVar("A", bound=AttentionCase)

MOST_BYTES = 4 << 20
"""Of a case's tensors. What a graph freezes shows in small ones."""

_LEAST_MORE, _MOST_MORE = 64, 512
"""Tokens by which a sequence grows: past the ends of pages, tiles and splits."""

_MOST_SPARE, _MOST_COLUMNS = 1 << 20, 1 << 16
_SHOWN_LENGTHS = 8
_OTHER_SEEDS = (0x11, 0x22, 0x33, 0x44)


class Content(NamedTuple):
    """`words` end the sentence "out is x when the graph is replayed ..."."""

    case: Case
    words: str


def with_room(declaration: Declaration, case: Case) -> Case:
    """`case` in tensors that have room for longer sequences, as those have that a server captures a graph with.

    As it is if that takes too much memory.
    """
    roomy = _with_room(case, declaration)
    return roomy if tensor_nbytes(roomy) <= MOST_BYTES else case


def contents_of(declaration: Declaration, captured: Case) -> list[Content]:
    """What a call captured on `captured` is replayed on: that first, then other lengths, pages and numbers."""
    return [Content(captured, "with what it was captured with"), *_others(captured, declaration)]


@singledispatch
def _others(captured: Case, declaration: Declaration) -> list[Content]:
    raise TypeError(f"no other contents are known for a case of {captured.problem} in {declaration.target}")


@_others.register
def _(captured: AttentionCase, declaration: Declaration) -> list[Content]:
    return [*_lengths(declaration, captured)]


@_others.register
def _(captured: PagedDecodeCase, declaration: Declaration) -> list[Content]:
    return [*_lengths(declaration, captured), *_pages(captured)]


@_others.register
def _(captured: VarlenCase, declaration: Declaration) -> list[Content]:
    return [*_lengths(declaration, captured), *_queries(declaration, captured), *_pages(captured)]


@_others.register
def _(captured: MergeStatesCase, declaration: Declaration) -> list[Content]:
    swapped = tuple((suffix, prefix) for prefix, suffix in captured.lse_pairs)
    seed = captured.seed ^ _OTHER_SEEDS[0]
    others = [Content(msgspec.structs.replace(captured, lse_pairs=swapped, seed=seed), "with other states")]
    if "-inf" in lse_kinds_of(declaration.supports):
        empty = msgspec.structs.replace(captured, lse_pairs=(("-inf", "-inf"),), seed=captured.seed ^ _OTHER_SEEDS[1])
        others.append(Content(empty, "with both states of every row empty"))
    return others


def _longer(declaration: Declaration, case: AttentionCase) -> tuple[int, ...]:
    """Each sequence longer, empty ones included; no longer than the kernel takes."""
    most = declaration.supports.max_seq_len
    grown = (length + min(_LEAST_MORE + length, _MOST_MORE) for length in case.seq_lens)
    return tuple(grown if most is None else (min(length, most) for length in grown))


@singledispatch
def _with_room(case: Any, declaration: Declaration) -> Any:
    del declaration
    return case


@_with_room.register
def _(case: DenseDecodeCase, declaration: Declaration) -> DenseDecodeCase:
    rows = max(case.max_seq_len, *_longer(declaration, case)) - max(case.seq_lens)
    return msgspec.structs.replace(case, extra_rows=rows)


@_with_room.register
def _(case: VarlenCase, declaration: Declaration) -> VarlenCase:
    roomy: VarlenCase = _with_room.dispatch(PagedDecodeCase)(case, declaration)
    longest = max(roomy.max_seq_len, *_longer(declaration, case))
    return msgspec.structs.replace(roomy, seq_slack=longest - max(roomy.seq_lens))


@_with_room.register
def _(case: PagedDecodeCase, declaration: Declaration) -> PagedDecodeCase:
    longer = _bare(case, _longer(declaration, case))
    columns = max(case.max_blocks_per_seq, *map(longer.blocks_of, range(case.num_seqs)))
    blocks = max(num_blocks(case), used_blocks(longer)) + 1  # one that is free lets all pages move
    pages = msgspec.structs.replace(
        case.pages,
        extra_columns=min(columns - max(map(case.blocks_of, range(case.num_seqs))), _MOST_COLUMNS),
        spare_blocks=min(blocks - used_blocks(case), _MOST_SPARE),
    )
    return msgspec.structs.replace(case, pages=pages)


def _lengths(declaration: Declaration, captured: AttentionCase) -> Iterator[Content]:
    supports, old = declaration.supports, captured.seq_lens
    least = 0 if supports.empty_sequences else 1
    changes = {
        "shortened": tuple(max(min(length, least), length // 2) for length in old),
        "grown": _longer(declaration, captured),
    }
    if has_query_lens(captured.problem):  # as many query tokens as before, which q has rows for
        changes = {how: tuple(map(max, lens, captured.query_counts)) for how, lens in changes.items()}
    elif supports.empty_sequences:  # rows past the end of a batch that is smaller than the one captured
        changes["padded"] = (*old[: len(old) // 2], *(0 for _ in old[len(old) // 2 :]))
    for (how, seq_lens), seed in zip(changes.items(), _OTHER_SEEDS, strict=False):
        case = _holding(captured, seq_lens, seed)
        if case is not None and seq_lens != old:
            yield Content(case, f"with seq_lens {how} from {_shown(old)} to {_shown(seq_lens)}")


def _queries(declaration: Declaration, captured: VarlenCase) -> Iterator[Content]:
    """The same query tokens in all, as the last of other sequences; and fewer, the others as padding."""
    query_lens = captured.query_lens[::-1]
    seq_lens = tuple(map(max, captured.seq_lens, query_lens))
    case = _holding(captured, seq_lens, _OTHER_SEEDS[0], query_lens)
    if case is not None and query_lens != captured.query_lens:
        yield Content(case, f"with query_lens changed from {_shown(captured.query_lens)} to {_shown(query_lens)}")
    fewer = tuple(map(min, captured.query_lens, itertools.repeat(1)))
    if declaration.supports.padding_tokens and fewer != captured.query_lens:
        case = _holding(captured, captured.seq_lens, _OTHER_SEEDS[1], fewer)
        if case is not None:
            yield Content(case, f"with query_lens shortened from {_shown(captured.query_lens)} to {_shown(fewer)}")


def _pages(captured: PagedDecodeCase) -> list[Content]:
    """The same lengths, pages at other places: the first order tried that moves one."""
    for seed in _OTHER_SEEDS:
        pages = msgspec.structs.replace(captured.pages, order="shuffled", seed=captured.pages.seed ^ seed)
        case = _holding(msgspec.structs.replace(captured, pages=pages), captured.seq_lens, _OTHER_SEEDS[-1])
        if case is not None and physical_pages(case) != physical_pages(captured):
            return [Content(case, f"with seq_lens={_shown(captured.seq_lens)} on other pages")]
    return []


def _holding(captured: A, seq_lens: tuple[int, ...], seed: int, query_lens: tuple[int, ...] | None = None) -> A | None:
    """Other lengths and numbers in tensors of the same shapes; None if there is no room."""
    values = msgspec.structs.replace(captured.values, needles=(), seed=captured.values.seed ^ seed)
    renewed: Any = msgspec.structs.replace(captured, values=values)
    if not renewed.page_size:
        rows = renewed.max_seq_len - max(seq_lens)
        return msgspec.structs.replace(renewed, seq_lens=seq_lens, extra_rows=rows) if rows >= 0 else None
    has_bounds = has_query_lens(renewed.problem)
    if has_bounds and max(seq_lens) > renewed.max_seq_len:
        return None
    bare: Any = _bare(renewed, seq_lens, query_lens)
    columns = renewed.max_blocks_per_seq - max(map(bare.blocks_of, range(bare.num_seqs)))
    spare = num_blocks(renewed) - used_blocks(bare)
    if columns < 0 or spare < 0:
        return None
    changes: dict[str, Any] = {"pages": msgspec.structs.replace(bare.pages, extra_columns=columns, spare_blocks=spare)}
    if has_bounds:  # which are frozen
        changes["seq_slack"] = renewed.max_seq_len - max(bare.seq_lens)
        changes["query_slack"] = renewed.max_query_len - max(bare.query_lens)
        changes["padding_tokens"] = renewed.num_query_slots - bare.num_rows
    held: A = msgspec.structs.replace(bare, **changes)
    return held


def _bare(
    case: PagedDecodeCase, seq_lens: tuple[int, ...], query_lens: tuple[int, ...] | None = None
) -> PagedDecodeCase:
    """With other lengths, and no column nor page beyond what they need."""
    pages = msgspec.structs.replace(case.pages, extra_columns=0, spare_blocks=0)
    values = msgspec.structs.replace(case.values, needles=())
    lengths = {"seq_lens": seq_lens, "query_lens": query_lens} if query_lens else {"seq_lens": seq_lens}
    return msgspec.structs.replace(case, **lengths, pages=pages, values=values)


def _shown(seq_lens: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, seq_lens[:_SHOWN_LENGTHS]))
    return f"[{shown}, ...]" if len(seq_lens) > _SHOWN_LENGTHS else f"[{shown}]"


_REASONS = (
    "look for what is frozen when the graph is captured: a grid or a number of splits computed on the host, a copy of "
    "the block table or the lengths, a workspace that only the host clears or that has been allocated anew since"
)

_ROOM_PER_TENSOR = 1 << 18
"""Bytes: more than alignment and both red zones take, so that one chunk holds all tensors of a case."""

Tensors = dict[str, Tensor]
Memory = UInt8[Tensor, " nbytes"]


def _applies(declaration: Declaration, case: Case) -> bool:
    return declaration.supports.graph_replay and tensor_nbytes(case) <= MOST_BYTES


def _check(trial: Trial) -> Failure | None:
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
        again = Content(first.case, f"{first.words}, after calls on other contents")
        if (failure := _objection(trial, again, eager[0], held.replayed(graph, again, image))) is not None:
            return failure
    stale = (_stale(held, *content, found) for content, found in zip(contents[1:], eager[1:], strict=True))
    return next(filter(None, stale), None)


@dataclass(frozen=True, slots=True)
class _HeldTensors:
    """The tensors that a call is captured with, and what goes into them."""

    trial: Trial
    captured: Case
    memory: Memory
    inputs: Any
    contents: Sequence[Content]

    @classmethod
    def of(cls, trial: Trial) -> _HeldTensors:
        declaration = trial.kernel.declaration
        captured = with_room(declaration, trial.case)
        tensors, memory = _allocated(captured, trial.device)
        inputs = problem_of(captured).inputs(captured, tensors)
        return cls(trial, captured, memory, inputs, contents_of(declaration, captured))

    def load(self, image: Memory) -> None:
        """Overwrite everything: dead elements and outputs with NaN."""
        self.memory.copy_(image)

    def replayed(self, graph: CapturedCall, content: Content, image: Memory) -> Tensors:
        self.load(image)
        for result in graph.results.values():
            result.fill_(float("nan"))
        graph.replay(f"replayed {content.words}")
        return problem_of(content.case).owned(
            content.case, {name: result.clone() for name, result in graph.results.items()}
        )

    def eager(self, kernel: Kernel, content: Content, image: Memory) -> Tensors:
        self.load(image)
        allocations = TrackedAllocations(self.trial.device, poison="nan", prefill="nan")
        try:
            results = call(kernel, self.captured, self.inputs, allocations, wait=True)
        except KernelRaised as raised:
            raise KernelRaised(raised.error, raised.poison, f"called {content.words}") from raised.error
        return problem_of(content.case).owned(content.case, {name: result.clone() for name, result in results.items()})


def _image(trial: Trial, content: Content) -> Memory:
    """What the memory of a case holds, made on the host: one copy brings it to the device."""
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


def _objection(trial: Trial, content: Content, eager: Tensors, replayed: Tensors) -> Failure | None:
    words = f"when the graph is replayed {content.words}"
    if not trial.kernel.declaration.supports.deterministic:
        return _beyond_bounds(trial, content.case, eager, replayed, words)
    right, found = ({name: result.cpu() for name, result in results.items()} for results in (eager, replayed))
    return unequal_bits(
        registry.GRAPH_REPLAY, content.case, right, found, words, details=(_REASONS,), as_it_was="in an eager call"
    )


def _beyond_bounds(trial: Trial, case: Case, eager: Tensors, replayed: Tensors, words: str) -> Failure | None:
    """An objection to what is outside its bound in the replay, and inside in the eager call."""
    rights, founds = (_compared(trial, case, results) for results in (eager, replayed))
    for right, found in zip(rights, founds, strict=True):
        mask = (found.ratio > 1) & (right.ratio <= 1)
        if mask.any():
            return _outside(found, mask, f"is {_at(right, mask)} in an eager call, but {_at(found, mask)} {words}")
    return None


def _stale(held: _HeldTensors, content: Content, image: Memory, eager: Tensors) -> Failure | None:
    """An objection to what replays and eager calls agree on, if it is right before any other call.

    Such a kernel has kept for the eager calls, too, what it worked out when it was first called with these shapes.
    """
    trial = held.trial
    found = next((one for one in _compared(trial, content.case, eager) if bool((one.ratio > 1).any())), None)
    fresh = None if found is None else fresh_copy(trial.kernel)
    if found is None or fresh is None:
        return None
    anew = _compared(trial, content.case, held.eager(fresh, content, image))
    if any(bool((one.ratio > 1).any()) for one in anew):
        return None  # it is wrong by itself
    mask = found.ratio > 1
    right = next(one for one in anew if one.name == found.name)
    said = f"is {_at(right, mask)} before any other call, but {_at(found, mask)} when the graph is replayed"
    return _outside(found, mask, f"{said} {content.words}, and in an eager call after that")


def _compared(trial: Trial, case: Case, results: Tensors) -> list[Comparison]:
    reference = Reference(trial.kernel.declaration, case, device=trial.device, tolerance=trial.reference.tolerance)
    return compare(reference, _seen(trial, results))


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


def _seen(trial: Trial, results: Tensors) -> Observation:
    nothing = Arena(trial.device, poison="nan", prefill="nan")
    return Observation("nan", "nan", None, given=nothing, allocated=nothing, results=results)


GRAPH_REPLAY = Relation(registry.GRAPH_REPLAY, _applies, _check, costly_on=("cuda",), under_a_mask=False)
