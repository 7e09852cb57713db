"""A plan that is run: shapes, contenders, the process that dies, and the budget."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

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
from attnfuzz.declaration import KernelLoadError
from attnfuzz.problems.attention import MAX_SEQ_LEN
from attnfuzz.problems.supports import OptionValue
from tests.unit.timing_stand_ins import SDPA, Pretended, declared, times

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


def test_the_fastest_choice_is_chosen_and_all_are_kept() -> None:
    """The table would show a kernel with options that nobody would use."""
    report = run(Pretended(answer), "split", num_splits=(2, 8, 4))
    of_split = [one for one in report.results if one.contender == "split" and one.shape == SHAPES[0]]
    assert [one.options["num_splits"] for one in of_split] == [2, 8, 4]
    assert [one.chosen for one in of_split] == [False, True, False]


def test_without_a_choice_the_first_declared_is_taken() -> None:
    """A run over all options of all kernels would take hours."""
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


def test_bytes_of_decode_are_keys_values_queries_and_results() -> None:
    """The bandwidth of every kernel would be wrong by the same factor, and none would look odd."""
    cache = 2 * 4096 * 8 * 128 * 2
    assert bytes_to_move(DECODE) == cache + 32 * (2 * 128 * 2 + 4)


def test_a_window_moves_what_is_seen() -> None:
    """A kernel that skips what nobody sees would exceed a copy's bandwidth."""
    seen, rows = 128 + 2 - 1, 2 * 32 * (2 * 128 * 2 + 4)
    windowed = replace(DECODE, window=128, query_lens=(2,), kv_dtype="float8_e4m3fn")
    assert bytes_to_move(windowed) == 2 * seen * 8 * 128 + rows


def test_bytes_of_a_latent_vector_are_moved_once() -> None:
    """It is key and value: a kernel would seem to move twice of what a copy can."""
    latents = Shape(label="", num_q_heads=16, num_kv_heads=1, head_size=576, rank=512, seq_lens=(100, 20))
    assert bytes_to_move(latents) == 120 * 576 * 2 + 2 * 16 * ((576 + 512) * 2 + 4)


def test_all_is_compiled_before_the_first_time_is_taken() -> None:
    """Kernels would be compiled one after the other, between times, and a run take minutes of a GPU."""
    process = Pretended(answer)
    run(process, "split", num_splits=(2, 4))
    compiled, asked = (
        [replace(one, shape=replace(one.shape, label="")) for one in some] for some in (process.compiled, process.asked)
    )
    assert compiled == asked != []


def test_bytes_of_a_merge_are_three_states() -> None:
    """The share of a copy's bandwidth would be wrong for merges."""
    merge = Shape(label="", num_q_heads=32, head_size=128, num_tokens=4096)
    assert bytes_to_move(merge) == 3 * 4096 * 32 * (128 * 2 + 4)


@pytest.mark.parametrize(
    ("suite", "kind"),
    [("decode", "decode"), ("merge", "merge"), ("half", "mixed"), ("latent", "latent"), ("sparse", "sparse")],
)
def test_suites_hold_shapes_of_their_kind(suite: str, kind: str) -> None:
    """A suite would time kernels of another problem, or none."""
    assert {shape.kind for shape in SUITES[suite]()} == {kind}


@pytest.mark.parametrize("suite", SUITES)
def test_shapes_of_a_suite_are_told_apart_by_label(suite: str) -> None:
    """Two rows of a table could not be told apart, and --shape would choose both."""
    shapes = SUITES[suite]()
    assert len({shape.label for shape in shapes}) == len(shapes)
    assert all(shape.longest <= MAX_SEQ_LEN for shape in shapes)


def test_queries_of_a_mixed_batch_are_no_more_than_its_keys() -> None:
    """A query would come before the first key of its sequence."""
    for shape in (*(one for suite in SUITES.values() for one in suite()), *smoke_suite()):
        assert all(
            queries <= length for queries, length in zip(shape.queries, shape.seq_lens, strict=bool(shape.seq_lens))
        )


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
