"""tests/conftest.py: what is tested is what lies beside the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import attnfuzz

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def test_another_attnfuzz_than_the_one_beside_the_tests_is_refused(tmp_path: Path) -> None:
    """Changes to a clone would seem to pass its tests, which import what is installed from elsewhere."""
    clone = tmp_path.resolve() / "clone"
    (clone / "tests").mkdir(parents=True)
    (clone / "attnfuzz").mkdir()
    shutil.copy(CONFTEST, clone / "tests")
    (clone / "tests" / "test_any.py").write_text("def test_any(): ...\n")
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=120, check=False)
    installed = Path(attnfuzz.__file__).resolve().parent
    assert done.returncode == 4, done.stdout
    assert done.stderr.strip() == (
        f"ERROR: these tests are of {clone / 'attnfuzz'}, but `import attnfuzz` finds {installed}; "
        f"set PYTHONPATH={clone}, or install that one: pip install -e {clone}"
    )
