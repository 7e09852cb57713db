"""A run of bench kernels: what is timed, how a contender is prepared, and the table."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from rich.console import Console

from attnfuzz.bench.kernels import contender, timing
from attnfuzz.bench.kernels.contender import Contender, measure
from attnfuzz.bench.kernels.run import (
    Crashed,
    KernelBench,
    TimingProcess,
    choose_kernels,
    choose_shapes,
    measure_kernels,
)
from attnfuzz.bench.kernels.shapes import (
    SUITES,
    MeasureReply,
    MeasureRequest,
    Report,
    Shape,
    bytes_to_move,
    encode_report,
    smoke_suite,
)
from attnfuzz.bench.kernels.timing import MOST_SETS, host_stopwatch, sets_beyond
from attnfuzz.declaration import KernelLoadError
from attnfuzz.kernels import bundled
from attnfuzz.problems.attention import MAX_SEQ_LEN
from attnfuzz.problems.supports import Layout, OptionValue
from attnfuzz.report.bench import print_report
from tests.commands.timed_kernels import right
from tests.common.timing_stand_ins import SDPA, Pretended, declared, times

SHAPES = [
    Shape(label=f"page {page}", num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(4000,), block_size=page)
    for page in (16, 24)
]
SPLIT = declared("split", num_splits=(1, 2, 4))


def answer(request: MeasureRequest) -> MeasureReply:
    if request.contender == "wrong":
        return MeasureReply(status="wrong", error_ratio=3.0, note="3 times the error bound")
    if request.contender == "deadly":
        raise Crashed("the kernel's process ended by signal SIGSEGV")
    return times(request, 8 / int(request.options.get("num_splits", 4)))


def run(process: Pretended, *kernels: str, budget_s: float = float("inf"), **options: tuple[int, ...]) -> Report:
    declarations = [SPLIT if name == "split" else declared(name) for name in kernels]
    plan = KernelBench(suites={"decode": SHAPES}, options=dict(options), budget_s=budget_s)
    clock = itertools.count().__next__
    return measure_kernels(plan, process, declarations, [SDPA], clock=lambda: float(clock()))


def test_the_fastest_choice_is_chosen_and_without_choices_the_first_declared_is_taken() -> None:
    """The table would show a kernel with options that nobody would use, or a run take hours."""
    report = run(Pretended(answer), "split", num_splits=(2, 8, 4))
    of_split = [one for one in report.results if one.contender == "split" and one.shape == SHAPES[0]]
    assert [(one.options["num_splits"], one.chosen) for one in of_split] == [(2, False), (8, True), (4, False)]
    report = run(Pretended(answer), "split")
    assert {one.options["num_splits"] for one in report.results if one.contender == "split"} == {1}


def test_what_sees_no_pages_is_timed_once_and_shown_for_each_size() -> None:
    """A comparison with dense tensors would be missing for other page sizes, or take as many times as long."""
    process = Pretended(answer)
    report = run(process, "split")
    assert len([one for one in process.asked if one.contender == "torch:sdpa"]) == 2  # its two backends
    assert [one.shape for one in report.chosen("decode") if one.contender == "torch:sdpa"] == SHAPES


def test_wrong_and_deadly_kernels_have_a_mark_and_no_time() -> None:
    """The fastest kernel would be one that computes nothing."""
    report = run(Pretended(answer), "wrong", "deadly")
    found = {one.contender: one for one in report.chosen("decode")}
    assert (found["wrong"].status, found["wrong"].times) == ("wrong", ())
    assert (found["deadly"].status, found["deadly"].times) == ("crashed", ())
    assert "SIGSEGV" in found["deadly"].note


def test_no_measurement_begins_after_the_budget() -> None:
    """A run would take as long as it likes, or leave out without a word."""
    process = Pretended(answer)
    report = run(process, "split", "other", budget_s=2.5)
    assert [one.contender for one in report.results] == ["split", "other"]
    assert report.unreached == 4


def test_a_report_is_the_same_after_json() -> None:
    """What was measured could not be looked at again."""
    report = run(Pretended(answer), "split", "wrong")
    again = msgspec.json.decode(encode_report(report), type=Report)
    assert again == report


def test_eager_kernels_are_timed_only_if_they_are_named() -> None:
    """Loops over sequences in Python would take most of the time of every run."""
    eager = declared("eager")
    eager = type(eager)(name="eager", target="eager", problem="paged_decode")
    assert [one.name for one in choose_kernels([SPLIT, eager], named=False)] == ["split"]
    assert [one.name for one in choose_kernels([SPLIT, eager], named=True)] == ["split", "eager"]
    with pytest.raises(KernelLoadError, match="partials none can be timed"):
        choose_kernels([declared("partials", "split_decode")], named=True)


def test_wrong_names_are_told_with_the_right_ones() -> None:
    """A typo would look as if all shapes had been measured."""
    with pytest.raises(KernelLoadError, match="no shape has such a label"):
        choose_shapes(("merge",), ("8x*",))
    assert [shape.label for shape in choose_shapes(("decode",), ("8x4096 page *6",))["decode"]] == ["8x4096 page 16"]


DECODE = Shape(label="", num_q_heads=32, num_kv_heads=8, head_size=128, seq_lens=(4096,))


ROWS = 32 * (2 * 128 * 2 + 4)


@pytest.mark.parametrize(
    ("shape", "moved"),
    [
        (DECODE, 2 * 4096 * 8 * 128 * 2 + ROWS),  # keys and values, then queries and results
        (replace(DECODE, window=128, query_lens=(2,), kv_dtype="float8_e4m3fn"), 2 * 129 * 8 * 128 + 2 * ROWS),
        (  # a latent vector is key and value
            Shape(label="", num_q_heads=16, num_kv_heads=1, head_size=576, rank=512, seq_lens=(100, 20)),
            120 * 576 * 2 + 2 * 16 * ((576 + 512) * 2 + 4),
        ),
        (Shape(label="", num_q_heads=32, head_size=128, num_tokens=4096), 3 * 4096 * 32 * (128 * 2 + 4)),  # a merge
    ],
    ids=["decode", "what a window shows", "latent", "three states"],
)
def test_bytes_to_move(shape: Shape, moved: int) -> None:
    """The bandwidth of every kernel would be wrong by the same factor, or exceed a copy's, and none would look odd."""
    assert bytes_to_move(shape) == moved


def test_all_is_compiled_before_the_first_time_is_taken() -> None:
    """Kernels would be compiled one after the other, between times, and a run take minutes of a GPU."""
    process = Pretended(answer)
    run(process, "split", num_splits=(2, 4))
    assert process.compiled == process.asked != []


@pytest.mark.parametrize(
    ("suite", "kind"),
    [("decode", "decode"), ("merge", "merge"), ("half", "mixed"), ("latent", "latent"), ("sparse", "sparse")],
)
def test_suites_hold_shapes_of_their_kind(suite: str, kind: str) -> None:
    """A suite would time kernels of another problem, or none."""
    assert {shape.kind for shape in SUITES[suite]()} == {kind}


@pytest.mark.parametrize("suite", [*SUITES, "smoke"])
def test_shapes_of_a_suite_are_told_apart_and_within_limits(suite: str) -> None:
    """--shape would choose two rows of a table, or a query come before the first key of its sequence."""
    shapes = SUITES[suite]() if suite in SUITES else smoke_suite()
    assert len({shape.label for shape in shapes}) == len(shapes)
    for shape in shapes:
        assert shape.longest <= MAX_SEQ_LEN
        counts = zip(shape.queries, shape.seq_lens, strict=bool(shape.seq_lens))
        assert all(queries <= length for queries, length in counts)


KERNELS = str(Path(__file__).parent / "timed_kernels.py")
SHAPE = Shape(label="", num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(40, 40), block_size=8)


@pytest.mark.night
def test_a_kernel_that_dies_costs_only_its_own_times() -> None:
    """One crash would end a run of many minutes, or be taken for a time."""
    with TimingProcess("cpu") as process:
        with pytest.raises(KernelLoadError, match="no kernel 'nothing'"):
            process.declarations([f"{KERNELS}:nothing"])
        choices: list[tuple[str, dict[str, OptionValue]]] = [("dies", {}), ("right", {"num_splits": 1})]
        deadly, right = (
            MeasureRequest(contender=f"{KERNELS}:{name}", shape=SHAPE, options=options, l2=("warm",))
            for name, options in choices
        )
        process.compile_ahead([deadly, right, deadly], seconds=60)
        with pytest.raises(Crashed, match="7"):
            process.measure(deadly)
        assert process.measure(right).status == "ok"
        assert process.copy(1 << 12, 1e-3).median_us > 0


ROOMY = Shape(label="", num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(9, 9), block_size=8, room=24)


class Graph:
    """Makes all calls anew at each replay."""

    def __init__(self, calls: Sequence[Callable[[], object]], count: int) -> None:
        self._calls = [calls[i % len(calls)] for i in range(count)]
        self.results: list[Any] = [call() for call in calls]

    def replay(self) -> None:
        self.results = [call() for call in self._calls]

    def close(self) -> None:
        self.results = []


class FrozenGraph(Graph):
    """Gives again what it had worked out when it was captured."""

    def __init__(self, calls: Sequence[Callable[[], object]], count: int) -> None:
        super().__init__(calls, count)
        self._first = [[part.clone() for part in returned] for returned in self.results]

    def replay(self) -> None:
        self.results = self._first


def measured(monkeypatch: pytest.MonkeyPatch, graph: type[Graph], *, in_graph: bool = True) -> MeasureReply:
    for module in (contender, timing):
        monkeypatch.setattr(module, "GraphOfCalls", graph)
    request = MeasureRequest(contender="right", shape=ROOMY, seconds=1e-4)
    judged = Contender(right, ROOMY, {"num_splits": 1})
    judged.in_graph = in_graph
    sets = [judged.draw("cpu", seed) for seed in range(3)]
    return measure(judged, sets, request, host_stopwatch, on_gpu=True)


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


def test_a_graph_that_writes_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of the calls before would pass for those of the replays."""

    class IdleGraph(Graph):
        def replay(self) -> None:
            pass

    reply = measured(monkeypatch, IdleGraph)
    assert (reply.status, reply.times) == ("wrong", ())


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


def test_each_page_belongs_to_one_sequence() -> None:
    """Sequences would share pages, which then come from the cache and not from memory."""
    inputs = Contender(bundled.paged_attention_eager, RAGGED, {}).draw("cpu", 3)
    owned = [inputs.block_table[seq, :count] for seq, count in enumerate((5, 1, 2))]
    assert sorted(torch.cat(owned).tolist()) == list(range(8))
    assert inputs.block_table.max() < len(inputs.k_cache)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
def test_a_kernel_of_one_layout_is_right_in_it(layout: Layout) -> None:
    """A kernel that takes only this layout would be called wrong, or be judged by what lies elsewhere."""
    kernel = bundled.paged_attention_eager
    only = kernel.declared(supports=replace(kernel.declaration.supports, layouts=(layout,)))
    judged = Contender(only, RAGGED, {})
    inputs = judged.draw("cpu", 3)
    assert inputs.layout == layout
    request = MeasureRequest(contender="", shape=RAGGED, l2=("warm",), seconds=1e-4)
    assert measure(judged, [inputs], request, host_stopwatch, on_gpu=False).status == "ok"
    right_rows = judged.right_rows(inputs, one_copy=True)
    assert [rows.start for rows, _ in right_rows] == [0, 4, 5, 6, 7]  # first and last query of each sequence
    inputs.v_cache.neg_()
    returned = kernel(inputs)
    assert contender.Prepared(judged, inputs).error_ratio(right_rows, returned) > 1


def test_a_table_with_room_names_pages_that_exist() -> None:
    """A graph that is captured with long sequences would read outside of the cache."""
    shape = Shape(label="", num_q_heads=2, num_kv_heads=1, head_size=8, seq_lens=(3,), block_size=4, room=64)
    inputs = Contender(bundled.paged_eager, shape, {}).draw("cpu", 0)
    assert inputs.block_table.shape == (1, 16)
    assert inputs.block_table.max() < len(inputs.k_cache)
    assert Contender(bundled.dense_eager, shape, {}).draw("cpu", 0).k.shape[1] == 64
    assert Contender(bundled.paged_attention_eager, shape, {}).draw("cpu", 0).max_seq_len == 64


def test_sets_exceed_the_cache_several_times() -> None:
    """Times that are called cold would be those of the L2 cache."""
    small = Shape(label="", num_q_heads=32, num_kv_heads=8, head_size=128, seq_lens=(4096,))
    assert sets_beyond(50 << 20, bytes_to_move(small)) == 13
    tiny = Shape(label="", num_q_heads=1, num_kv_heads=1, head_size=8, seq_lens=(1,))
    assert sets_beyond(50 << 20, bytes_to_move(tiny)) > MOST_SETS
    assert sets_beyond(0, bytes_to_move(small)) == 1


FACTORS = {"paged_split_k": 1.05, "torch:sdpa": 1.0, "merge_states": 1.1, "<b>naive": 3.0}


def answered(request: MeasureRequest) -> MeasureReply:
    if request.contender == "<b>naive" and request.shape.block_size == 64:
        return MeasureReply(status="wrong", error_ratio=9.0, note="9 times the error bound")
    factor = FACTORS[request.contender] * (1.2 if request.shape.room else 1.0)
    return times(request, factor)


@pytest.fixture(scope="module")
def report() -> Report:
    kernels = [declared("paged_split_k"), declared("<b>naive"), declared("merge_states", "merge_states")]
    plan = KernelBench(suites={name: SUITES[name]() for name in ("decode", "qwen", "merge", "graph")}, options={})
    return measure_kernels(plan, Pretended(answered), kernels, [SDPA])


def printed(report: Report, *, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_report(console, report)
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    return lines


def test_options_that_no_row_shows_are_told() -> None:
    """A kernel timed with the first of its tiles would pass for one with the tile that its wrapper takes."""
    kernels = [declared("paged_split_k", tile=(16, 32), num_splits=(1, 8)), declared("<b>naive")]
    plan = KernelBench(suites={"decode": SUITES["decode"]()[:1]}, options={"num_splits": (2, 4)})
    report = measure_kernels(plan, Pretended(answered), kernels, [SDPA])
    told = [line for line in printed(report, width=200) if "timed with" in line]
    assert told == ["paged_split_k: timed with tile=16; --option tries others"]


def test_a_table_has_ratios_and_marks(report: Report) -> None:
    """A wrong kernel would be a row like any other."""
    lines = printed(report, width=200)
    (split,) = (line for line in lines if line.startswith("1x4096 page 16"))
    assert re.search(r"paged_split_k .* 95 +1\.05", split)
    assert any("WRONG: 9 times the error bound" in line for line in lines)


def test_a_long_remark_leaves_room_for_the_numbers() -> None:
    """One contender that fails would make the table of all others unreadable."""

    def fails(request: MeasureRequest) -> MeasureReply:
        return answered(request) if request.contender == SDPA.target else MeasureReply(status="failed", note="no " * 99)

    plan = KernelBench(suites={"decode": SUITES["decode"]()[:1]}, options={})
    failed = measure_kernels(plan, Pretended(fails), [declared("paged_split_k")], [SDPA])
    lines = printed(failed, width=120)
    assert any(re.match(r"(1x4096 page 16)? +torch:sdpa +\d+\.\d ", line) for line in lines)
