"""Times under CUDA graphs, with a graph that the test pretends: calls again, or what was captured and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from attnfuzz.bench.kernels import contender as measuring
from attnfuzz.bench.kernels.contender import Contender, draw_tensors, measure, prepare_kernel
from attnfuzz.bench.kernels.measurements import MeasureReply, MeasureRequest
from attnfuzz.bench.kernels.shapes import Shape
from attnfuzz.bench.kernels.timing import HostStopwatch
from attnfuzz.problems.declared_numerics import Numerics
from tests.unit.timed_kernels import right

SHAPE = Shape(label="", num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(9, 9), block_size=8, room=24)


class Graph:
    """Makes all calls anew at each replay."""

    replays = True

    def __init__(self, calls: Sequence[Callable[[], object]], count: int) -> None:
        self._calls = [calls[i % len(calls)] for i in range(count)]
        self.results = [call() for call in calls]

    def replay(self) -> None:
        if self.replays:
            self.results = [call() for call in self._calls]

    def close(self) -> None:
        self.results = []


class FrozenGraph(Graph):
    """Keeps what it had worked out when it was captured."""

    replays = False


def measured(monkeypatch: pytest.MonkeyPatch, graph: type[Graph], *, in_graph: bool = True) -> MeasureReply:
    monkeypatch.setattr(measuring, "GraphOfCalls", graph)
    request = MeasureRequest(contender="right", shape=SHAPE, seconds=1e-4)
    contender = Contender(
        lambda tensors: prepare_kernel(right, tensors, {"num_splits": 1}), Numerics(), num_partials=2, in_graph=in_graph
    )
    sets = [draw_tensors(SHAPE, "cpu", seed) for seed in range(3)]
    return measure(contender, sets, request, HostStopwatch(), on_gpu=True)


def test_all_four_times_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of the table would be empty, or hold the numbers of another one."""
    reply = measured(monkeypatch, Graph)
    assert reply.status == "ok", reply.note
    assert [(one.mode, one.l2) for one in reply.times] == [
        ("eager", "cold"), ("eager", "warm"), ("graph", "cold"), ("graph", "warm"),
    ]  # fmt: skip
    cold = next(one for one in reply.times if (one.mode, one.l2) == ("graph", "cold"))
    assert cold.calls % 3 == 0  # each set as often as any other


def test_a_graph_that_holds_other_lengths_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that freezes its lengths at capture would be the fastest of all."""
    reply = measured(monkeypatch, FrozenGraph)
    assert reply.status == "wrong"
    assert reply.times == ()
    assert "when its graph is replayed" in reply.note


def test_who_promises_no_replay_is_timed_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails would cost the process, for a kernel that never said that it can be captured."""
    reply = measured(monkeypatch, FrozenGraph, in_graph=False)
    assert (reply.status, reply.note) == ("ok", "declares no graph_replay")
    assert {one.mode for one in reply.times} == {"eager"}
