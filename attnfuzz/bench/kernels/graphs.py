"""Many calls in one CUDA graph, so that a replay costs the host one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["CaptureFailed", "GraphOfCalls"]

Call = Callable[[], object]

_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Never freed: that might end the process (see ``attnfuzz.oracles.relations.graph_replay``)."""


class CaptureFailed(RuntimeError):  # noqa: N818 - says what happened
    """A call cannot be captured. The process should be left: torch's allocator counts the capture as under way."""


class GraphOfCalls:
    """Captures ``calls``, in turn, until there are ``count``. ``replay`` runs them all; ``close`` frees their memory.

    ``results``: what the first round of the calls returned; each replay writes it anew. Raises what a call raises
    before the capture, and CaptureFailed.
    """

    def __init__(self, calls: Sequence[Call], count: int) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self.results: list[object] = []
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:  # on this stream for the first time: libraries allocate workspaces for each
                call()
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(self._graph, stream=side):
                    self._call(calls, count)
            except BaseException as error:  # of an interrupt, too, half a graph is left
                _ABANDONED.append(self._graph)
                if not isinstance(error, Exception):
                    raise
                raise CaptureFailed(f"cannot be captured: {error}") from error
        torch.cuda.current_stream().wait_stream(side)

    def _call(self, calls: Sequence[Call], count: int) -> None:
        for i in range(count):
            result = calls[i % len(calls)]()
            if i < len(calls):
                self.results.append(result)

    def replay(self) -> None:
        """Queue all calls on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Give the memory of what was captured back."""
        torch.cuda.synchronize()
        self.results.clear()
        self._graph.reset()
