"""The table of times in docs/kernels.md, and what is kept of a run for it."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from msgspec.structs import replace

from attnfuzz.bench.kernels.run import KernelBench, measure_kernels
from attnfuzz.bench.kernels.shapes import SUITES, MeasureReply, MeasureRequest, Report, Shape
from tests.quality import times as kept
from tests.unit.timing_stand_ins import Pretended, declared, times

PLAIN = Shape(label="plain", num_q_heads=4, num_kv_heads=2, head_size=64, seq_lens=(65536,))
SHAPES = [
    PLAIN,
    replace(PLAIN, label="8 bits", kv_dtype="float8_e4m3fn"),
    replace(PLAIN, label="prompt", query_lens=(9,)),
]
FACTORS = {"mine": 2.0, "other": 1.0, "engine:slow": 4.0, "engine:fast": 1.5}


def answer(request: MeasureRequest) -> MeasureReply:
    if request.contender == "mine" and request.shape.query_lens:
        return MeasureReply(status="wrong", error_ratio=3.0)
    if request.contender.startswith("engine:") and request.shape.kv_dtype:
        return MeasureReply(status="unsupported")
    return times(request, FACTORS[request.contender])


def report() -> Report:
    mine, other, slow, fast = (declared(name, "paged_attention") for name in FACTORS)
    plan = KernelBench(suites={"decode": SHAPES}, options={}, l2=("cold",), modes=("graph",))
    return measure_kernels(plan, Pretended(answer), [mine, other], [slow, fast])


def test_the_page_holds_what_is_kept() -> None:
    """A reader would be told times that nobody measured, or that another kernel had."""
    before, _, rest = kept.PAGE.read_text(encoding="utf-8").partition(kept.MARKS[0])
    assert before.endswith("\n")
    assert rest.partition(kept.MARKS[1])[0].strip().splitlines() == kept.page(kept.known())


@pytest.mark.parametrize("of_gpu", kept.known(), ids=lambda one: str(one.short))
def test_all_that_is_kept_is_on_the_page(of_gpu: kept.Times) -> None:
    """A suite whose shapes have other labels would lose its times without a word."""
    assert sum(line.startswith("| ") for line in kept.page([of_gpu])) == 1 + len(of_gpu.rows)
    assert msgspec.json.decode(kept.encoded(of_gpu), type=kept.Times) == of_gpu


def test_of_a_run_the_first_right_kernel_and_the_fastest_beside_it_are_kept() -> None:
    """A wrong kernel would have a time, a slow engine be what ours is compared with, or 8 bits with nothing."""
    found = kept.condensed([replace(report(), machine=replace(report().machine, name="NVIDIA H1 PCIe"))])
    assert [(row.shape, row.kernel, row.beside) for row in found.rows] == [
        ("plain", "mine", "engine:fast"), ("8 bits", "mine", "mine"), ("prompt", "other", "engine:fast")
    ]  # fmt: skip
    plain, eight_bits, prompt = found.rows
    assert eight_bits.beside_us == plain.us
    assert prompt.copy_us is None  # no copy is a limit to it
    *_, row, second, third = (
        line.split(" | ")[-3:] for line in kept.page([replace(found, rows=as_decode(found.rows))])
    )
    assert row == [f"{plain.us:.1f}", "0.50", "1.33 |"]
    assert second[2] == f"{eight_bits.us / plain.us:.2f} |"
    assert third[1] == ""


def as_decode(rows: list[kept.Row]) -> list[kept.Row]:
    """With labels of shapes that the suite has."""
    labels = (shape.label for shape in SUITES["decode"]())
    return [replace(row, shape=label) for row, label in zip(rows, itertools.islice(labels, 3), strict=True)]


def test_two_gpus_are_not_mixed() -> None:
    """Times of one GPU would stand in the column of another."""
    one = report()
    with pytest.raises(ValueError, match="one GPU"):
        kept.condensed([one, replace(one, machine=replace(one.machine, name="NVIDIA H2"))])
