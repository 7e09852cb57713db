"""``attnfuzz bench ladder``: what it times and in which order, its page and pictures, and a run that is cut off."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from attnfuzz.bench.kernels import ladder
from attnfuzz.bench.kernels.ladder import FIGURES, Builds, ladder_entries, measure_ladder
from attnfuzz.bench.kernels.measurements import MeasureReply, MeasureRequest, Report, decode_report, encode_report
from attnfuzz.bench.kernels.run import Crashed, TimingProcess
from attnfuzz.campaign.stopping import Interrupted
from attnfuzz.declaration import Declaration, Supports
from attnfuzz.problems.cases import Problem
from attnfuzz.report.ladder_page import ladder_page
from tests.unit.in_process import attnfuzz
from tests.unit.timing_stand_ins import Pretended, times

ENGINES = {"vllm": "vllm 0.33.0", "flashinfer": "flashinfer-python 0.5.3", "torch": "torch 2.11.0"}
FACTORS = {"paged_attention_naive": 5.0, "paged_grouped_auto": 0.95, "merge_states_eager": 4.0}


def problem_of(kernel: str) -> Problem:
    name = kernel.rpartition(":")[2]
    if name.startswith("merge"):
        return "merge_states"
    if name in ("dense_naive", "sdpa"):
        return "dense_decode"
    return "paged_attention" if "attention_" in name or name in ("batch_prefill", "varlen") else "paged_decode"


def declaration_of(kernel: str) -> Declaration:
    package = ENGINES.get(kernel.partition(":")[0]) if ":" in kernel else None
    versions = dict([package.rsplit(" ", 1)]) if package else {}
    supports = Supports(graph_replay=True)
    return Declaration(name=kernel, target=kernel, problem=problem_of(kernel), supports=supports, versions=versions)


KNOWN = {step.kernel: declaration_of(step.kernel) for figure in FIGURES for step in figure.steps}
ENTRIES = list(ladder_entries(FIGURES, KNOWN, on_gpu=True))


def answer(request: MeasureRequest) -> MeasureReply:
    if request.contender == "paged_attention_v1":
        return MeasureReply(status="wrong", error_ratio=9.0, note="9 times the <error> bound")
    return times(request, FACTORS.get(request.contender, 1.0))


def measured(answer: Callable[[MeasureRequest], MeasureReply] = answer, *, budget_s: float = float("inf")) -> Report:
    clock = itertools.count().__next__
    engines = [one for one in KNOWN.values() if one.versions]
    suites = tuple(figure.suite for figure in FIGURES)
    return measure_ladder(
        ENTRIES, Pretended(answer), engines,
        suites=suites, seconds=0.02, budget_s=budget_s, clock=lambda: float(clock()),
    )  # fmt: skip


@pytest.fixture(scope="module")
def report() -> Report:
    return measured()


@pytest.fixture(scope="module")
def shown(report: Report) -> tuple[str, dict[str, bytes]]:
    return ladder_page(report)


def test_a_page_is_the_same_from_its_json(report: Report, shown: tuple[str, dict[str, bytes]]) -> None:
    """What was measured on a GPU could not be shown again without one."""
    assert decode_report(encode_report(report)) == report
    page, pictures = shown
    assert set(pictures) == {
        f"ladder-{name}.svg" for name in ("steps", "output", "splitting", "padded", "variety", "merge", "roofline")
    }
    for name, drawn in pictures.items():
        assert f"](pictures/{name})" in page
        assert ET.fromstring(drawn).tag.endswith("svg")


def test_a_page_says_what_was_found_where_and_when(report: Report, shown: tuple[str, dict[str, bytes]]) -> None:
    """A reader would have to work out the gains, or would not know of which GPU they are."""
    page, _ = shown
    assert f"{report.started[:10]}, GPU &lt;1>" in page
    assert "flashinfer-python 0.5.3, torch 2.11.0, vllm 0.33.0" in page
    assert "| naive → Q-Block | 5.00 x (5.00 to 5.00) |" in page
    assert "| tuned → grouped |  |  | 1.05 x (1.05 to 1.05) |" in page
    assert "in one CUDA graph for all lengths: naive 20.0 %" in page
    assert "| batch 128 |" in page
    assert (
        "grouped takes 0.95 x (0.95 to 0.95) the time of the faster of FlashAttention 3 and FlashInfer; above" in page
    )
    assert "Behind a window of 1,024, grouped takes 1.00 times as long with 32,768 tokens." in page
    assert "static grid: the padded batch takes 1.00 x (1.00 to 1.00) the time of the batch as it is." in page
    assert "| PyTorch |" in page
    assert "The ridge is at 500 operations a byte." in page
    assert "v1 (paged_attention_v1) on qwen, 12/2 128: wrong: 9 times the &lt;error> bound" in page
    assert "not reached" not in page


def test_a_run_that_is_cut_has_something_of_each_figure() -> None:
    """The last figures would be empty whenever GPU time is short."""
    budget_s = 60.0
    report = measured(budget_s=budget_s)
    assert {one.suite for one in report.results} == {figure.suite for figure in FIGURES}
    assert 0 < report.unreached < len(ENTRIES)
    page, _ = ladder_page(report)
    assert f"{report.unreached} measurements were not reached." in page


def test_a_signal_ends_a_run_with_what_it_knows() -> None:
    """Minutes on a GPU would be lost."""
    asked = itertools.count()

    def interrupted(request: MeasureRequest) -> MeasureReply:
        if next(asked) == 30:
            raise Interrupted(signal.SIGTERM)
        return answer(request)

    report = measured(interrupted)
    assert report.unreached
    assert len(report.results) >= 25
    assert "measurements were not reached" in ladder_page(report)[0]


def test_suites_of_steps_have_the_share_of_decodes_that_they_are_named_for() -> None:
    """A figure for prompts would be one for decode."""
    for suite, share in zip(ladder.SUITES_OF_STEPS, (0, 0.5, 1), strict=True):
        (figure,) = (one for one in FIGURES if one.suite == suite)
        for shape in figure.shapes():
            assert sum(length == 1 for length in shape.queries) == share * len(shape.seq_lens)
        assert max(len(shape.seq_lens) for shape in figure.shapes()) == 128


class Building:
    """In the place of a process: one object is built, the other ends it."""

    def __init__(self, device: str = "auto", *, beside: object = None) -> None:
        self.requests: list[MeasureRequest] = []

    def __enter__(self) -> Building:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def measure(self, request: MeasureRequest) -> MeasureReply:
        if request.shape.head_size != 128:
            raise Crashed("the compiler failed")
        return answer(request)


def test_what_could_not_be_built_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement would wait a minute for a compiler that fails, and the budget be spent on it."""
    monkeypatch.setattr(ladder, "TimingProcess", Building)
    process = object.__new__(TimingProcess)
    builds = Builds(process, ENTRIES)
    found = list(builds.entries(last_start=float("inf"), last_end=float("inf"), stopped=lambda: False))
    left_out = [one for one in ENTRIES if one not in found]
    assert len(left_out) == builds.left_out
    assert {one.contender for one in left_out} == {"flashinfer:batch_decode"}
    assert {one.shape.head_size for one in left_out} == {64, 256}


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        return attnfuzz("bench", "ladder", *arguments, cwd=cwd)


@pytest.mark.night
def test_the_command_writes_json_page_and_pictures_and_the_page_again(tmp_path: Path) -> None:
    """Nobody could try the command without a GPU, or its page would be lost with the run."""
    first = run(
        "--device", "cpu", "--suite", "merge", "--suite", "padded", "--seconds", "0.001s",
        "--json", "ladder.json", "--page", "ladder.md", cwd=tmp_path,
    )  # fmt: skip
    assert first.returncode == 0, first.stdout + first.stderr
    page = (tmp_path / "ladder.md").read_text()
    assert "the times say nothing" in page
    report = decode_report((tmp_path / "ladder.json").read_bytes())
    assert {one.step for one in report.results} >= {"PyTorch", "wide programs", "static grid", "grouped"}
    assert {one.status for one in report.results if not one.is_reference} == {"ok"}
    again = run("ladder.json", "--page", "again.md", cwd=tmp_path)
    assert (again.returncode, (tmp_path / "again.md").read_text()) == (0, page)


@pytest.mark.night
def test_a_signal_to_the_command_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that a scheduler ends would leave nothing behind."""
    measure, asked = TimingProcess.measure, itertools.count()

    def stopped(process: TimingProcess, request: MeasureRequest) -> MeasureReply:
        if next(asked) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(process, request)

    monkeypatch.setattr(TimingProcess, "measure", stopped)
    end = run(
        "--device", "cpu", "--suite", "merge", "--seconds", "0.001s", "--json", "a.json", "--page", "a.md", cwd=tmp_path
    )
    assert end.returncode == 128 + signal.SIGTERM, end.stdout + end.stderr
    report = decode_report((tmp_path / "a.json").read_bytes())
    assert {one.step for one in report.results} == {"PyTorch", "a program a head"}
    assert report.unreached == 2  # the third step, on both shapes
    assert "2 measurements were not reached" in (tmp_path / "a.md").read_text()


def test_what_cannot_be_done_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """Minutes of measuring would come to nothing."""
    (tmp_path / "other.json").write_text("{}")
    one, other = measured(budget_s=20), measured(budget_s=20)
    (tmp_path / "one.json").write_bytes(encode_report(one))
    (tmp_path / "two.json").write_bytes(encode_report(replace(other, machine=replace(other.machine, name="another"))))
    for arguments, said in (
        ((), "name a file with --json, a page with --page, or both"),
        (("--json", "a.json"), "there is no GPU here"),
        (("other.json", "--page", "a.md"), "other.json is not what"),
        (("one.json", "two.json", "--page", "a.md"), "cannot be compared"),
        (("--device", "cpu", "--suite", "decode", "--json", "a.json"), "--suite: there are figures of prompts, half"),
    ):
        refused = run(*arguments, cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert said in refused.stderr
