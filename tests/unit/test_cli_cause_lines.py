"""`attnfuzz explore` on a file with a rounding mistake: every report names its line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("attnfuzz")
KERNELS = Path(__file__).with_name("rounding_kernels.py")


@pytest.mark.night
def test_reports_name_the_line_of_a_rounding(tmp_path: Path) -> None:
    """A maintainer would be told what is rounded, and have to find out where."""
    shutil.copy(KERNELS, tmp_path / "mine.py")
    command = [str(COMMAND), "explore", "mine.py:rounded_products", "--budget", "20s", "--workers", "1", "--seed", "1"]
    command += ["--save-dir", "saved", "--json", "found.json", "--html", "found.html", "--device", "cpu"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 1, run.stderr
    lines = (tmp_path / "mine.py").read_text(encoding="utf-8").splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith("  # products"))
    look = f"look at mine.py:{number}: `{lines[number - 1].strip()}`"
    assert look in run.stdout
    (kernel,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["kernels"]
    rounded = [finding for finding in kernel["findings"] if finding["cause"].startswith("scores_rounded")]
    assert [finding["sources"] for finding in rounded] == [
        [{"file": "mine.py", "line": number, "text": lines[number - 1].strip()}]
    ]
    saved = json.loads((tmp_path / rounded[0]["path"]).read_text(encoding="utf-8"))
    assert saved["finding"]["sources"] == rounded[0]["sources"]
    assert f"mine.py:{number}" in (tmp_path / "found.html").read_text(encoding="utf-8")
    shown = subprocess.run(
        [str(COMMAND), "explain", rounded[0]["path"], "--device", "cpu", "--json", "explained.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert look in shown.stdout
    explained = json.loads((tmp_path / "explained.json").read_text(encoding="utf-8"))
    assert explained["explanation"]["sources"] == rounded[0]["sources"]
