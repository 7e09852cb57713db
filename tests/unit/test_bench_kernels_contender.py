"""One contender: the tensors that it is timed on, what is checked, and what gets a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from attnfuzz.bench.kernels import contender
from attnfuzz.bench.kernels.contender import (
    AttentionTensors,
    Contender,
    draw_tensors,
    in_layout,
    measure,
    prepare_kernel,
    sets_for_cold_l2,
)
from attnfuzz.bench.kernels.shapes import MeasureReply, MeasureRequest, Shape
from attnfuzz.bench.kernels.timing import HostStopwatch
from attnfuzz.inputs.layouts import split_interleaved, token_views
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
    monkeypatch.setattr(contender, "GraphOfCalls", graph)
    request = MeasureRequest(contender="right", shape=SHAPE, seconds=1e-4)
    judged = Contender(
        lambda tensors: prepare_kernel(right, tensors, {"num_splits": 1}), Numerics(), num_partials=2, in_graph=in_graph
    )
    sets = [draw_tensors(SHAPE, "cpu", seed) for seed in range(3)]
    return measure(judged, sets, request, HostStopwatch(), on_gpu=True)


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


RAGGED = Shape(
    label="ragged",
    num_q_heads=4,
    num_kv_heads=2,
    head_size=16,
    seq_lens=(33, 1, 16),
    block_size=8,
    query_lens=(5, 1, 2),
)


def ragged() -> AttentionTensors:
    tensors = draw_tensors(RAGGED, "cpu", 3)
    assert isinstance(tensors, AttentionTensors)
    return tensors


def test_each_page_belongs_to_one_sequence() -> None:
    """Sequences would share pages, which then come from the cache and not from memory."""
    tensors = ragged()
    owned = [tensors.block_table[seq, :count] for seq, count in enumerate((5, 1, 2))]
    assert sorted(torch.cat(owned).tolist()) == list(range(8))
    assert tensors.block_table.max() < len(tensors.k_cache)


def test_dense_and_packed_hold_the_tokens_of_the_pages() -> None:
    """A provider on dense tensors would compute something else than the paged kernels."""
    tensors = ragged()
    starts = (0, 33, 34)
    for seq, length in enumerate(RAGGED.seq_lens):
        for form, packed, part in zip(tensors.dense, tensors.packed, tensors.sequence(seq, length), strict=True):
            assert torch.equal(form[seq, :length], part)
            assert torch.equal(packed[starts[seq] : starts[seq] + length], part)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
def test_a_layout_holds_the_same_tokens(layout: str) -> None:
    """A kernel that takes only this layout would be called wrong."""
    tensors = ragged()
    given = in_layout(tensors.k_cache, tensors.v_cache, layout)  # type: ignore[arg-type]  # parametrized
    k, v = split_interleaved(given["kv_cache"][None]) if layout == "interleaved" else given.values()
    caches = (k, v) if layout == "interleaved" else (k[None], v[None])
    k_slots, v_slots = token_views(*caches, layout)  # type: ignore[arg-type]  # as above
    shape = tensors.k_cache.shape
    assert torch.equal(k_slots[0].reshape(shape), tensors.k_cache)
    assert torch.equal(v_slots[0].reshape(shape), tensors.v_cache)


def test_a_table_with_room_names_pages_that_exist() -> None:
    """A graph that is captured with long sequences would read outside of the cache."""
    shape = Shape(label="", num_q_heads=2, num_kv_heads=1, head_size=8, seq_lens=(3,), block_size=4, room=64)
    tensors = draw_tensors(shape, "cpu", 0)
    assert isinstance(tensors, AttentionTensors)
    assert tensors.block_table.shape == (1, 16)
    assert tensors.block_table.max() < len(tensors.k_cache)
    assert tensors.dense[0].shape[1] == 64


def test_sets_exceed_the_cache_several_times() -> None:
    """Times that are called cold would be those of the L2 cache."""
    small = Shape(label="", num_q_heads=32, num_kv_heads=8, head_size=128, seq_lens=(4096,))
    assert sets_for_cold_l2(small, 50 << 20) == 13
    assert (
        sets_for_cold_l2(Shape(label="", num_q_heads=1, num_kv_heads=1, head_size=8, seq_lens=(1,)), 50 << 20) is None
    )
    assert sets_for_cold_l2(small, 0) == 1
