"""Graphs of calls, as far as they go without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnfuzz.oracles.relations.graph_replay import CapturedCall
from attnfuzz.trials.observation import KernelRaised


class Graph:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def replay(self) -> None:
        self.said.append("replayed")


def test_a_batch_is_planned_before_its_graph_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's graph would read the plan of the batch that it was captured with."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("waited"))
    graph: Any = Graph(said)
    CapturedCall(graph, {}, lambda: said.append("planned")).replay("replayed once")
    assert said == ["planned", "replayed", "waited"]


def test_a_plan_that_raises_is_the_kernels_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign would end with the error of an engine that refuses another batch."""

    def refuse() -> None:
        raise ValueError("the batch size should be fixed")

    graph: Any = Graph([])
    with pytest.raises(KernelRaised) as raised:
        CapturedCall(graph, {}, refuse).replay("replayed with another batch")
    assert isinstance(raised.value.error, ValueError)
