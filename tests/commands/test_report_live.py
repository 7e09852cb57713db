"""attnfuzz.report.progress and panel: what is drawn on a terminal fits it and tells what is going on."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import Statistics
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.cases.features import pair_number
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.report.progress import LiveReporter, panel
from attnfuzz.verdict import Failure
from tests.common.report_results import statistics_of

KERNELS = [Declaration(name=f"kernel_{i}", problem="dense_decode", target=f"kernels.py:kernel_{i}") for i in range(11)]
CASE = DenseDecodeCase(num_q_heads=8, head_size=128, num_kv_heads=1, seq_lens=(1, 2000, 17), scale=0.25)
FAILURE = Failure(oracle="accuracy", kind="out:value", message="out[seq 0, head 0, dim 0] = 2.0, expected 1.0")


def statistics(*, devices: tuple[str, ...] = ("",), kernels: int = 11) -> Statistics:
    made = statistics_of(KERNELS[:kernels], seconds=20, left=40)
    coverage = {pair_number(first, second): 1 for first in range(40) for second in range(first, 40)}
    for i, declaration in enumerate(KERNELS[:kernels]):
        for device in devices:
            made.add(
                WorkerProgress(
                    kernel=declaration.target,
                    cases=100,
                    seconds=2.0,
                    compile_s=0.5,
                    max_error_ratio=i / 20,
                    restarts=i == 0,
                    device=device,
                    coverage=coverage,
                )
            )
    return made


def a_finding(**fields: object) -> Finding:
    return Finding("0-1", KERNELS[3], CASE, FAILURE, first_seen_s=1.0, **fields)  # type: ignore[arg-type]  # by test


def drawn(made: Statistics, *findings: Finding, width: int, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(panel(made, shrinking=findings, width=width, height=height))
    return capture.get().splitlines()


def test_the_panel_tells_all_there_is_to_know() -> None:
    """Whether it runs, how fast, what it costs and what it has looked at is what one looks at it for."""
    text = "\n".join(drawn(statistics(devices=("0", "1")), width=120))
    for words in (
        "20s",
        "40s left",
        "2,200 cases",
        "GPU 0",
        "GPU 1",
        "cases/s",
        "kernel processes restarted 2 times",
        "25% compiling",
    ):
        assert words in text
    for words in ("0 findings", "largest error/bound 0.5", "8,580 feature pairs", "kernel_10"):
        assert words in text


@pytest.mark.parametrize("width", [60, 72, 80, 90, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """A wrapped line shifts everything below it, and the panel is no longer redrawn where it was."""
    lines = drawn(statistics(devices=("0", "1")), a_finding(runs=3, steps=12), width=width)
    assert max(len(line.rstrip()) for line in lines) <= width
    rows = [line for line in lines if "kernel_" in line and "accuracy" not in line]
    assert len(rows) == 11
    assert all(line.split()[0].startswith("kernel_") and line.split()[-1] == "0" for line in rows)


def test_the_panel_is_redrawn_in_place_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it must not stay behind when it ends, nor be drawn a hundred times a second."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    reporter = LiveReporter(console)
    reporter.started(statistics())
    for _ in range(50):
        reporter.progress(statistics(kernels=1))
    finding = a_finding()
    reporter.finding("found", finding)
    reporter.finding("confirmed", finding)
    reporter.finding("smaller", finding)
    reporter.finding("shrunk", finding)
    reporter.finished()
    text = file.getvalue()
    assert 1 <= text.count("40s left") <= 6  # it is drawn again below every event
    assert "seq_lens 1, 2000, 17" in text
    assert text.endswith("\x1b[2K")
