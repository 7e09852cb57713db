"""A kernel's call captured into a CUDA graph, as servers do it: a call to warm up, the capture, replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.judging.observation import KernelRaised, call_options, results_of_call
from attnfuzz.problems.cases import Case

__all__ = ["CapturedCall", "captured_call"]

_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. They are never freed: torch's allocator still counts their captures as under way (up to
2.12, pytorch#180395), and may end the process when it is told to forget them."""


Plan = Callable[[], Callable[[], Any] | None]


class CapturedCall:
    """`results`, by name, are written anew by each replay.

    What an engine plans for a batch lies outside of the graph: ``plan`` is called before each replay, as servers do it.
    It writes where the graph reads, or the graph is wrong.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, results: dict[str, Tensor], plan: Plan) -> None:
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
