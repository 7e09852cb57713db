"""How soon draws reach what is rare: `python -m tests.quality.reach` prints cases and seconds until each bug is found.

Each kernel of `tests/quality/reaching_kernels.py` is searched alone by one worker on a CPU, as ``attnfuzz explore``
does. Cases count whatever else the machine does; seconds do not.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from attnfuzz.declaration import Kernel
from tests.quality import reaching_kernels

__all__ = ["KERNELS", "explore", "names"]

KERNELS = Path(reaching_kernels.__file__)


def names() -> list[str]:
    """Of all kernels."""
    return [name for name, found in vars(reaching_kernels).items() if isinstance(found, Kernel)]


def explore(name: str, *, budget_s: int, seed: int) -> tuple[int, float, list[str]]:
    """Cases of a search that ends at its first finding, the seconds that it took, and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        run = subprocess.run(
            [
                sys.executable, "-P", "-m", "attnfuzz", "explore", f"{KERNELS}:{name}", "--budget", f"{budget_s}s",
                "--seed", str(seed), "--workers", "1", "--device", "cpu", "--quiet", "--fail-fast",
                "--save-dir", folder, "--json", str(summary),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=10 * budget_s + 120,
        )  # fmt: skip
        if not summary.exists():
            raise RuntimeError(f"nothing was searched: {run.stderr}")
        told = json.loads(summary.read_text(encoding="utf-8"))
    (kernel,) = told["kernels"]
    return kernel["cases"], told["elapsed_s"], [finding["message"] for finding in kernel["findings"]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.reach", description=__doc__)
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--budget", type=int, default=40, help="seconds for each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("| kernel | cases | seconds | told |")
    print("|---|---:|---:|---|")
    for name in fnmatch.filter(names(), options.only):
        cases, seconds, told = explore(name, budget_s=options.budget, seed=options.seed)
        print(f"| {name} | {cases} | {seconds:.0f} | {'; '.join(told)[:140] or 'nothing'} |", flush=True)


if __name__ == "__main__":
    main()
