"""attnfuzz.report.progress and panel: what is drawn on a terminal fits it and tells what is going on."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.messages import Progress
from attnfuzz.campaign.result import Statistics
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.input_space import InputSpace
from attnfuzz.report.progress import LiveReporter, panel
from attnfuzz.report.terminal import all_shares, kernel_table, next_share

KERNELS = [Declaration(name=f"kernel_{i}", problem="dense_decode", target=f"kernels.py:kernel_{i}") for i in range(11)]
CASE = DenseDecodeCase(num_q_heads=8, head_size=128, num_kv_heads=1, seq_lens=(1, 2000, 17), scale=0.25)
FAILURE = Failure(oracle="accuracy", kind="out:value", message="out[seq 0, head 0, dim 0] = 2.0, expected 1.0")


def statistics(*, devices: tuple[str, ...] = ("",), kernels: int = 11) -> Statistics:
    now = time.monotonic()
    made = Statistics(
        kernels=Statistics.of_kernels(KERNELS[:kernels]),
        started=now - 20,
        deadline=now + 40,
        device="cpu",
        device_name="a processor",
        workers=2,
        seed=7,
    )
    space = InputSpace("dense_decode", KERNELS[0].supports, {})
    coverage = dict.fromkeys(list(space.possible)[: len(space.possible) // 2], 1)
    for i, declaration in enumerate(KERNELS[:kernels]):
        for device in devices:
            made.add(
                Progress(
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
    shares = all_shares(made)
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(panel(made, shrinking=findings, shares=shares, width=width, height=height))
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
    for words in ("0 findings", "largest error/bound 0.5", "50% of feature pairs", "kernel_10"):
        assert words in text


@pytest.mark.parametrize("width", [60, 72, 80, 90, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """A wrapped line shifts everything below it, and the panel is no longer redrawn where it was."""
    lines = drawn(statistics(devices=("0", "1")), a_finding(runs=3, steps=12), width=width)
    assert max(len(line.rstrip()) for line in lines) <= width
    rows = [line for line in lines if "kernel_" in line and "accuracy" not in line]
    assert len(rows) == 11
    assert all(line.split()[0].startswith("kernel_") and line.split()[-1] == "0" for line in rows)


@pytest.mark.parametrize("height", [14, 18, 24, 30])
def test_the_panel_is_no_higher_than_the_terminal(height: int) -> None:
    """What scrolls off the top is drawn again and again below it."""
    findings = [a_finding(runs=3, steps=step) for step in range(2)]
    lines = drawn(statistics(), *findings, width=80, height=height)
    assert len(lines) < height
    assert any("more" in line for line in lines) == (height < 24)


def test_the_kernels_that_matter_most_are_kept() -> None:
    """On a small terminal the one kernel with a finding must not be among those left out."""
    made = statistics()
    made.findings = [a_finding()]
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(kernel_table(made, width=80, most_rows=4))
    shown = [line.split()[0] for line in capture.get().splitlines()[1:]]
    assert shown == ["kernel_3", "kernel_9", "kernel_10", "..."]


def test_a_case_at_work_is_shown_as_it_shrinks() -> None:
    """The first failing case is what one wants to see at once, and then that it gets smaller."""
    fresh, confirmed = a_finding(), a_finding(runs=3, failed=3, steps=12)
    lines = "\n".join(drawn(statistics(), fresh, confirmed, width=140))
    assert f"confirming: accuracy/out:value #{fresh.tag} kernel_3" in lines
    assert f"shrinking, 12 steps: accuracy/out:value #{confirmed.tag} kernel_3" in lines
    assert "dense_decode, float16, head_size 128, 8 query heads on 1 KV head, seq_lens 1, 2000, 17" in lines


def test_shares_are_found_one_kernel_at_a_time() -> None:
    """To find them all at every redraw would take the coordinator's time from the workers."""
    made = statistics(kernels=3)
    shares: dict[str, float] = {}
    for known in (1, 2, 3, 3):
        next_share(made, shares)
        assert len(shares) == known
    everything = InputSpace("dense_decode", KERNELS[1].supports, {}).possible
    made.kernels[KERNELS[1].target].coverage |= dict.fromkeys(everything, 1)
    next_share(made, shares)
    assert shares[KERNELS[1].target] == 1.0
    assert 0.4 < shares[KERNELS[0].target] < 0.6


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
    reporter.found(finding)
    reporter.confirmed(finding)
    reporter.smaller(finding)
    reporter.shrunk(finding)
    reporter.finished()
    text = file.getvalue()
    assert 1 <= text.count("40s left") <= 6  # it is drawn again below every event
    assert "seq_lens 1, 2000, 17" in text
    assert text.endswith("\x1b[2K")
