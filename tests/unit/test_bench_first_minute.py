"""attnfuzz.bench.first_minute: what is measured of a whole command, and how it is told."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from attnfuzz.bench.first_minute import measure_first_minutes
from attnfuzz.report.bench import print_first_minute

COMMAND = """
import json, os, sys
from pathlib import Path
written = Path(sys.argv[sys.argv.index("--json") + 1])
compiled = Path(os.environ["TRITON_CACHE_DIR"])
print("asking", flush=True)
finding = {"cause": "crash", "first_seen_s": 2.5, "shrunk_s": None, "in_contract": True}
kernels = [{"target": "k.py:k", "findings": [finding, {**finding, "in_contract": False, "first_seen_s": 1.0}]}]
summary = {"cases": 90, "device": "a GPU", "kernels": kernels, "compiling": 0.0 if compiled.exists() else 0.75}
compiled.mkdir(exist_ok=True)
written.write_text(json.dumps(summary | {"first_case_s": 1.5, "first_minute": 80}))
sys.exit(1)
"""


def test_the_second_run_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    """A warm start would be measured cold, or a cold one warm, and no change of either would show."""
    (tmp_path / "explore.py").write_text(COMMAND)
    console = Console(file=io.StringIO(), width=200)
    command = [sys.executable, str(tmp_path / "explore.py")]
    cold, warm = measure_first_minutes(["k.py"], command=command, runs=2)
    assert (cold.warm, cold.summary.compiling, warm.warm, warm.summary.compiling) == (False, 0.75, True, 0.0)
    assert cold.first_line_s is not None
    assert 0 < cold.first_line_s <= cold.wall_s
    assert list(cold.found) == [(2.5, None, "k.py:k", "crash")]
    print_first_minute(console, cold)
    told = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "nothing compiled, on a GPU: first line " in told
    assert "first case 1.5 s, 80 cases in 60 s, 90 in all, 75% of the time compiling" in told
    assert "2.5 s  k.py:k  crash (not shrunk)" in told


def test_a_command_that_does_not_run_says_why(tmp_path: Path) -> None:
    """A misspelt kernel would look like a campaign without cases."""
    (tmp_path / "explore.py").write_text("print('no such kernel'); raise SystemExit(3)")
    command = [sys.executable, str(tmp_path / "explore.py")]
    with pytest.raises(RuntimeError, match="status 3: no such kernel"):
        list(measure_first_minutes(["k.py"], command=command))
