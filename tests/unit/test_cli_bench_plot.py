"""``attnfuzz bench plot`` as it is typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from attnfuzz.bench.kernels.measurements import Report, decode_report, encode_report, joined
from attnfuzz.bench.kernels.run import KernelBench, measure_kernels
from attnfuzz.bench.kernels.shapes import SUITES
from tests.unit.in_process import attnfuzz
from tests.unit.timing_stand_ins import SDPA, Pretended, declared, times


def plot(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return attnfuzz("bench", "plot", *arguments, cwd=cwd)


def report(suite: str) -> Report:
    kernels = [declared("paged"), declared("merge", "merge_states")]
    process = Pretended(lambda request: times(request, 1.25))
    return measure_kernels(KernelBench(suites={suite: SUITES[suite]()}, options={}), process, kernels, [SDPA])


@pytest.mark.night
def test_two_files_become_one_page(tmp_path: Path) -> None:
    """Times that were measured on a machine without a display could not be looked at on another."""
    for suite in ("qwen", "merge"):
        (tmp_path / f"{suite}.json").write_bytes(encode_report(report(suite)))
    run = plot("qwen.json", "merge.json", "--html", "both.html", "--json", "both.json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "paged (L2 cold): 1.00 times SDPA" in run.stdout
    page = (tmp_path / "both.html").read_text()
    assert 'id="qwen"' in page
    assert 'id="merge"' in page
    assert decode_report((tmp_path / "both.json").read_bytes()).suites == ("qwen", "merge")


def test_what_is_no_report_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Somebody's file would end in a traceback."""
    (tmp_path / "other.json").write_text('{"format": "attnfuzz.summary/1"}')
    run = plot("other.json", cwd=tmp_path)
    assert run.returncode == 2
    assert "other.json is not what attnfuzz bench kernels --json writes" in run.stderr


def test_only_a_file_of_ordinary_size_is_read(tmp_path: Path) -> None:
    """A named pipe would be waited for, and a sparse file fill the memory."""
    os.mkfifo(tmp_path / "pipe.json")
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(1 << 40)
    for name, reason in (("pipe.json", "it is a named pipe, no file"), ("sparse.json", "larger than 33554432 bytes")):
        run = plot(name, cwd=tmp_path)
        assert (run.returncode, run.stderr) == (2, f"Error: {name} cannot be read: {reason}\n")


def test_times_of_two_devices_are_not_joined() -> None:
    """A kernel on one GPU would be set against another one on a faster GPU."""
    one = report("qwen")
    other = replace(one, machine=replace(one.machine, name="GPU <2>"))
    with pytest.raises(ValueError, match="cannot be compared"):
        joined([one, other])


def test_without_matplotlib_a_png_is_refused_and_a_page_has_its_tables(tmp_path: Path) -> None:
    """Minutes of measuring would end in a traceback, or a page of numbers need a package that only draws."""
    (tmp_path / "qwen.json").write_bytes(encode_report(report("qwen")))
    script = "import sys; sys.modules['matplotlib'] = None; from attnfuzz.cli import main; main()"

    def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-c", script, "bench", "plot", "qwen.json", *arguments]
        return subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)

    refused = bare("--png", "times.png")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "pip install 'attnfuzz[plot]'" in refused.stderr
    run = bare("--html", "times.html")
    assert run.returncode == 0, run.stderr
    assert "the page has tables only" in run.stdout
    assert "times SDPA" in (tmp_path / "times.html").read_text()
