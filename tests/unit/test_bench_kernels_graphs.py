"""attnfuzz.bench.kernels.timing without a GPU: what a call raises during the capture."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnfuzz.bench.kernels import timing as graphs


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that are never freed, of a GPU that does nothing."""
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    found: list[Any] = []
    monkeypatch.setattr(graphs, "_ABANDONED", found)
    return found


@pytest.mark.parametrize(
    ("raised", "expected"), [(ValueError("no"), graphs.CaptureFailed), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_what_a_call_raises_while_it_is_captured(
    raised: BaseException, expected: type[BaseException], abandoned: list[Any]
) -> None:
    """Whoever interrupts a benchmark would read that a kernel cannot be captured, or the process end in torch."""
    calls = iter([None, raised])

    def call() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(expected):
        graphs.GraphOfCalls([call], count=2)
    assert len(abandoned) == 1
