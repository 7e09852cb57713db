"""Times and tolerances on pages of docs/: those that were measured."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from attnfuzz.bench.kernels.run import KernelBench, measure_kernels
from attnfuzz.bench.kernels.shapes import SUITES, MeasureReply, MeasureRequest, Report, Shape
from attnfuzz.testing.tolerances import DESIGNS, Design, Setting, Suite, weigh
from tests.common.in_process import attnfuzz
from tests.common.timing_stand_ins import Pretended, declared, times
from tests.quality import times as kept

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


PAGE = (Path(__file__).parents[2] / "docs" / "tolerances.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("design", DESIGNS)
def test_the_derived_bound_takes_right_kernels_and_no_zeros(design: Design, dtype: str) -> None:
    """The page would accuse kernels that round as their design does, or call a bound good that takes anything."""
    told = weigh(Setting(seq_len=70, head_size=64, dtype=dtype, design=design, draws=8), ())
    (bound,) = told.weighed
    assert (bound.name, bound.right_fails, bound.passes["zeros"]) == ("derived bound", 0, 0)
    assert told.error < told.bound * 10


def test_a_tolerance_is_told_for_what_it_takes_and_what_it_fails() -> None:
    """A tolerance that takes everything, or nothing, would look like any other."""
    _, loose, tight = weigh(Setting(seq_len=70, draws=4), (Suite("loose", 10.0), Suite("tight", 0.0, 1e-9))).weighed
    assert (loose.right_fails, set(loose.passes.values())) == (0, {4})
    assert (tight.right_fails, set(tight.passes.values())) == (4, {0})


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    """The tables of the page would be those of another program."""
    printed = attnfuzz("tolerances", "--seq-len", "512", cwd=tmp_path)
    assert printed.returncode == 0
    told, _, table = printed.stdout.strip().partition("\n\n")
    assert f"`attnfuzz tolerances --seq-len 512`: {told}.\n\n{table}\n" in PAGE


@pytest.mark.parametrize("given", [("--tolerance", "1e-3"), ("--heads", "3")])
def test_what_cannot_be_weighed_is_refused_in_a_sentence(given: tuple[str, str], tmp_path: Path) -> None:
    """A typing error would end in a traceback."""
    refused = attnfuzz("tolerances", *given, cwd=tmp_path)
    assert refused.returncode == 2
    assert "must be" in refused.stderr
