"""Tables of kernel times."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from attnfuzz.bench.kernels.run import KernelBench, measure_kernels
from attnfuzz.bench.kernels.shapes import SUITES, MeasureReply, MeasureRequest, Report
from attnfuzz.report.bench import print_report
from tests.unit.timing_stand_ins import SDPA, Pretended, declared, times

FACTORS = {"paged_split_k": 1.05, "torch:sdpa": 1.0, "merge_states": 1.1, "<b>naive": 3.0}


def answer(request: MeasureRequest) -> MeasureReply:
    if request.contender == "<b>naive" and request.shape.block_size == 64:
        return MeasureReply(status="wrong", error_ratio=9.0, note="9 times the error bound")
    factor = FACTORS[request.contender] * (1.2 if request.shape.room else 1.0)
    return times(request, factor)


@pytest.fixture(scope="module")
def report() -> Report:
    kernels = [declared("paged_split_k"), declared("<b>naive"), declared("merge_states", "merge_states")]
    plan = KernelBench(suites={name: SUITES[name]() for name in ("decode", "qwen", "merge", "graph")}, options={})
    return measure_kernels(plan, Pretended(answer), kernels, [SDPA])


def printed(report: Report, *, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_report(console, report)
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    return lines


def test_options_that_no_row_shows_are_told() -> None:
    """A kernel timed with the first of its tiles would pass for one with the tile that its wrapper takes."""
    kernels = [declared("paged_split_k", tile=(16, 32), num_splits=(1, 8)), declared("<b>naive")]
    plan = KernelBench(suites={"decode": SUITES["decode"]()[:1]}, options={"num_splits": (2, 4)})
    report = measure_kernels(plan, Pretended(answer), kernels, [SDPA])
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
        return answer(request) if request.contender == SDPA.target else MeasureReply(status="failed", note="no " * 99)

    plan = KernelBench(suites={"decode": SUITES["decode"]()[:1]}, options={})
    failed = measure_kernels(plan, Pretended(fails), [declared("paged_split_k")], [SDPA])
    lines = printed(failed, width=120)
    assert any(re.match(r"(1x4096 page 16)? +torch:sdpa +\d+\.\d ", line) for line in lines)
