"""attnfuzz.bench.endurance: memory of a process tree, and what is compared with what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from attnfuzz.bench.endurance import HOSTILE, Endurance, EnduranceSummary, MemorySample, resident_bytes_of_tree
from attnfuzz.bench.throughput import MeasuredCampaign
from attnfuzz.declaration import load_kernels
from attnfuzz.report.bench import print_endurance
from attnfuzz.verdict import Failure


@dataclass
class _Campaign:
    findings: list[Any] = field(default_factory=list)


def process(folder: Path, pid: int, parent: int, kib: int) -> None:
    entry = folder / str(pid)
    entry.mkdir()
    (entry / "stat").write_text(f"{pid} (a (strange) name) S {parent} 1 1")
    (entry / "smaps_rollup").write_text(f"header\nRss: 999999 kB\nPss: {kib} kB\nPss_Anon: 5 kB\n")


def measured(rate: float, findings: list[Any] | None = None) -> MeasuredCampaign:
    return MeasuredCampaign(_Campaign(findings or []), 10.0, {"a": int(10 * rate), HOSTILE[0]: 1000}, 20.0)  # type: ignore[arg-type]  # a stand-in


def summary(rate: float, *in_contract: bool) -> EnduranceSummary:
    findings = [{"oracle": "accuracy", "in_contract": one} for one in in_contract]
    kernel = {"name": "a", "cases": int(10 * rate), "findings": findings}
    return msgspec.convert({"elapsed_s": 10.0, "cases": 0, "kernels": [kernel]}, EnduranceSummary)


def test_memory_is_that_of_all_descendants(tmp_path: Path) -> None:
    """A leak in an executor, a grandchild in a session of its own, would not be seen."""
    for pid, parent, kib in ((10, 1, 100), (11, 10, 20), (12, 11, 3), (13, 1, 5000)):
        process(tmp_path, pid, parent, kib)
    assert resident_bytes_of_tree(10, tmp_path) == 123 * 1024
    assert resident_bytes_of_tree(10, tmp_path, but_for=11) == 100 * 1024


def test_a_process_that_ends_meanwhile_counts_nothing(tmp_path: Path) -> None:
    """The benchmark would end with an error whenever an executor does."""
    process(tmp_path, 10, 1, 100)
    (tmp_path / "11").mkdir()
    assert resident_bytes_of_tree(10, tmp_path) == 100 * 1024


def test_what_a_declaration_ends_is_no_stray() -> None:
    """A kernel that was written for contiguous tensors would look as if it had been harmed."""
    outside = SimpleNamespace(
        in_contract=False,
        declaration=SimpleNamespace(target="a", name="a"),
        failure=Failure(oracle="accuracy", kind="out", message="a wrong number"),
    )
    alone = Endurance(targets=("a",), alone=summary(20.0, False), together=measured(15.0, [outside]), memory=())
    assert alone.strays == []
    counted = Endurance(targets=("a",), alone=summary(20.0, False, True), together=measured(15.0), memory=())
    assert counted.strays == ["a: 1 without the hostile ones"]


def test_only_healthy_kernels_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Cases of the hostile kernels would make up for those that the others lost to them."""
    failure = Failure(oracle="crash", kind="SIGSEGV", message="died")
    finding = SimpleNamespace(declaration=SimpleNamespace(target=HOSTILE[0]), failure=failure)
    stray = SimpleNamespace(
        in_contract=True,
        declaration=SimpleNamespace(target="a", name="a"),
        failure=Failure(oracle="accuracy", kind="out", message="a wrong number"),
    )
    endured = Endurance(
        targets=("a",),
        alone=summary(20.0),
        together=measured(15.0, [finding, stray]),
        memory=tuple(MemorySample(float(i), i * 2**20) for i in range(101)),
    )
    assert endured.rate_kept == pytest.approx(0.75)
    assert endured.found == {"crashes_on_5_percent": ["crash/SIGSEGV"], "hangs": [], "leaks": []}
    from attnfuzz.report.terminal import make_console

    print_endurance(make_console(), endured)
    printed = capsys.readouterr().out
    assert "75%" in printed
    assert "found on a healthy kernel: a: accuracy/out: a wrong number" in printed
    assert "5 15 25 35 45 55 65 75 85 95" in printed


def test_hostile_kernels_can_be_loaded_by_their_names() -> None:
    """The campaign beside them would be refused."""
    assert [load_kernels(target)[0].declaration.target for target in HOSTILE] == list(HOSTILE)
