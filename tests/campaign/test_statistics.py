"""What a campaign counts, and the coverage that follows."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest

from attnfuzz.campaign.statistics import (
    EXACT,
    LEAST,
    MOST,
    NOT_FINITE,
    KernelStatistics,
    ProgressMeter,
    Throughput,
    WorkerProgress,
    above,
    by_axis,
    coverage_of,
    pairs_of,
    ratio_bin,
)
from attnfuzz.cases.features import InputSpace, pair_number
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Failure, Timing, Verdict

KERNEL = Declaration(name="k", problem="dense_decode", target="k")


CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)


def failed(oracle: OracleName, ratio: float = 0.0) -> Verdict:
    return Verdict(failure=Failure(oracle=oracle, kind="kind", message="wrong"), error_ratio=ratio)


def test_reports_add_up() -> None:
    """The final table is the sum of these reports; a case lost between two of them is a wrong number."""
    sent: list[WorkerProgress] = []
    now = [0.0]
    meter = ProgressMeter(sent.append, clock=lambda: now[0])
    timing = Timing(build_s=0.01, compile_s=0.02, kernel_s=0.03, reference_s=0.04)
    for _ in range(10):
        now[0] += 0.1
        meter.judged(KERNEL, CASE, 0.1, Verdict(error_ratio=0.25, timing=timing))
    meter.flush()
    meter.flush()
    assert 1 < len(sent) < 10
    assert sum(progress.cases for progress in sent) == meter.cases("k") == 10
    for name, total in {"seconds": 1.0, "build_s": 0.1, "compile_s": 0.2, "kernel_s": 0.3, "reference_s": 0.4}.items():
        assert math.isclose(sum(getattr(progress, name) for progress in sent), total)
    assert max(progress.max_error_ratio for progress in sent) == 0.25
    assert sum(progress.ratios["float16"][ratio_bin(0.25)] for progress in sent) == 10


def test_what_cannot_run_here_is_counted_by_itself() -> None:
    """A kernel that nothing is known of would be said to have been judged on thousands of cases."""
    sent: list[WorkerProgress] = []
    meter = ProgressMeter(sent.append)
    for verdict in (Verdict(not_runnable="no asm"), Verdict(), Verdict(not_runnable="no asm")):
        meter.judged(KERNEL, CASE, 0.1, verdict)
    meter.flush()
    (progress,) = sent
    assert (progress.cases, progress.not_runnable) == (1, {"no asm": 2})
    statistics = KernelStatistics(declaration=KERNEL)
    for _ in range(2):
        statistics.add(progress)
    assert (statistics.cases, statistics.not_runnable) == (2, {"no asm": 4})
    assert sum(statistics.ratios["float16"].values()) == 2


def test_what_is_no_measure_of_accuracy_is_told_apart() -> None:
    """JSON has no infinity, and a wrong NaN is a finding; a kernel that only ever crashes would look exact."""
    sent: list[WorkerProgress] = []
    meter = ProgressMeter(sent.append)
    meter.judged(KERNEL, CASE, 0.1, failed("accuracy", math.inf))
    for oracle in ("crash", "hang", "exception", "red_zone"):
        meter.judged(KERNEL, CASE, 0.1, failed(oracle))
    meter.flush()
    assert (sent[0].cases, sent[0].max_error_ratio) == (5, 0.0)
    assert sent[0].ratios == {"float16": {NOT_FINITE: 1, EXACT: 1}}


def test_executors_lost_to_a_case_are_counted() -> None:
    """What crashes cost would not be seen."""
    sent: list[WorkerProgress] = []
    meter = ProgressMeter(sent.append, device="GPU-1")
    for verdict in (Verdict(), failed("crash"), failed("hang"), Verdict(fatal=True), failed("accuracy")):
        meter.judged(KERNEL, CASE, 0.1, verdict)
    meter.flush()
    assert (sent[0].restarts, sent[0].device) == (3, "GPU-1")


def test_where_cases_lie_travels_with_the_report() -> None:
    """Coverage is added up from these counts, which must survive the way through JSON."""
    sent: list[WorkerProgress] = []
    meter = ProgressMeter(sent.append)
    for _ in range(3):
        meter.judged(KERNEL, CASE, 0.1, Verdict())
    meter.flush()
    (progress,) = [msgspec.json.decode(msgspec.json.encode(one), type=WorkerProgress) for one in sent]
    numbers = InputSpace("dense_decode", KERNEL.supports, {}).numbers
    dtype, length = numbers[Feature("dtype", "=float16")], numbers[Feature("length", "=1")]
    assert progress.coverage[pair_number(dtype, length)] == 3
    assert progress.coverage[pair_number(length, length)] == 3
    assert set(progress.coverage.values()) == {3}


def test_the_share_of_known_deaths_is_measured_in_time() -> None:
    """It decides when cases that would crash again are skipped."""
    meter = ProgressMeter(lambda progress: None)
    assert meter.share_of_known_deaths("k") == 0.0
    for _ in range(4):
        meter.judged(KERNEL, CASE, 1.0, Verdict())
    meter.known("k", 1.0)
    meter.skipped("k", 1)
    assert meter.share_of_known_deaths("k") == 0.25


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.0, EXACT),
        (1e-300, LEAST),
        (0.5, -2),
        (0.5001, -1),
        (1.0, 0),
        (math.nextafter(1.0, 2), 1),
        (1e300, MOST),
        (math.inf, NOT_FINITE),
        (math.nan, NOT_FINITE),
    ],
)
def test_ratios_fall_into_their_bins(ratio: float, expected: int) -> None:
    """A case exactly at its bound has passed, and would be drawn among the failures."""
    assert ratio_bin(ratio) == expected


def test_edges_belong_to_the_bin_below() -> None:
    """What is drawn beyond the edge of the bound would be less than it."""
    for number in range(LEAST, MOST):
        assert ratio_bin(above(number) * (1 - 1e-9)) == number
        assert ratio_bin(above(number) * (1 + 1e-9)) == number + 1


def test_cases_stay_where_they_were_when_intervals_double() -> None:
    """The area under the curve is the number of cases, after a day too, and a pause must still be seen where it was."""
    throughput = Throughput()
    throughput.add("", 59.0, 1_000_000)
    for at_s in range(100, 90_000, 10):
        throughput.add("0", at_s + 0.5, 7)
        throughput.add("1", at_s + 0.5, 3)
    assert {device: sum(counts) for device, counts in throughput.counts.items()} == {
        "": 1_000_000, "0": 62_930, "1": 26_970,
    }  # fmt: skip
    assert all(len(counts) <= 240 for counts in throughput.counts.values())
    assert throughput.counts[""] == [1_000_000]
    assert 90_000 / 240 <= throughput.interval_s < 2 * 90_000 / 240


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    """A GPU that has stopped would go on at the average of its better days."""
    throughput = Throughput()
    for at_s in range(100):
        throughput.add("0", float(at_s), 50)
        if at_s < 50:
            throughput.add("1", float(at_s), 50)
    rates = throughput.rates(99.0)
    assert math.isclose(rates["0"], 55.0, rel_tol=0.1)
    assert rates["1"] == 0.0
    young = Throughput()
    young.add("", 2.0, 40)
    assert math.isclose(young.rates(4.0)[""], 10.0)


def test_a_later_campaign_is_counted_when_it_ran() -> None:
    """The page of two campaigns would show the cases of both in the first minute."""
    first, later = Throughput(), Throughput()
    first.add("", 1.0, 5)
    later.add("", 2.0, 7)
    first.add_later(later, 10.0)
    assert (first.counts[""][1], first.counts[""][12]) == (5, 7)


LIMITED = Declaration(
    name="k",
    problem="paged_decode",
    target="k",
    supports=Supports(dtypes=("float16", "float32"), head_sizes=(16, 64), layouts=("NHD",), strides="contiguous"),
)
RAGGED = PagedDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, scale=0.25, block_size=4, seq_lens=(5, 0))


def on(axis: str, level: str) -> Feature:
    return Feature(axis, f"={level}")


def counts_of(case: PagedDecodeCase) -> dict[int, int]:
    space = InputSpace(LIMITED.problem, LIMITED.supports, LIMITED.options)
    return Counter(pairs_of(space.place(case)))


def test_two_sequences_do_not_make_one_that_has_both() -> None:
    """A batch with an empty sequence and one that ends a page has no sequence that does both."""
    coverage = coverage_of(LIMITED, counts_of(RAGGED))
    assert coverage.cases(on("length", "2 to 15"), on("last page", "1 token")) == 1
    assert coverage.cases(on("length", "1"), on("last page", "full")) == 0
    assert coverage.cases(on("length", "0"), on("last page", "1 token")) == 0
    assert coverage.cases(on("dtype", "float16"), on("length", "0")) == 1
    assert coverage.cases_on(on("length", "0")) == 1


def test_what_was_met_and_what_never_was_are_told() -> None:
    """They are what a maintainer looks for in the report."""
    counts = counts_of(RAGGED)
    coverage = coverage_of(LIMITED, counts)
    assert by_axis(coverage.levels)["dtype"] == (on("dtype", "float16"),)
    assert by_axis(coverage.levels)["length"] == (on("length", "0"), on("length", "2 to 15"))
    assert on("dtype", "float32") in coverage.unmet
    assert 0 < coverage.met == len(counts) - len(coverage.levels)


def test_options_that_are_equal_in_python_are_told_apart() -> None:
    """1 == True, so that what was found out for one kernel would be taken for another's."""
    for choices, names in (((1, 2), ("1", "2")), ((True, 2), ("True", "2"))):
        declaration = Declaration(name="k", problem="dense_decode", options={"mode": choices})
        assert by_axis(coverage_of(declaration, {}).unmet)["option mode"] == tuple(
            on("option mode", name) for name in names
        )
