"""`python -m tests.vendor [FILE]`: which re-created bugs each vendor-style suite finds, and attnfuzz, as Markdown."""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from attnfuzz.mutation.commands import Command
from attnfuzz.overlay import write_overlay
from tests.quality.hunting import NotFound, hunt
from tests.quality.mutants import MUTANTS, Mutant, mutant_named
from tests.quality.planting import KERNELS, lay_over

HERE = Path(__file__).parent
SUITES = {
    "vLLM": "vllm_style.py",
    "FlashInfer": "flashinfer_style.py",
    "SGLang": "sglang_style.py",
    "flash-attention": "flash_attention_style.py",
}
ATTNFUZZ = "attnfuzz"
BUDGET_S = {"cpu": 60, "cuda": 120}

Found = float | None
"""Seconds from the start of the command until it failed, or until attnfuzz saw a failure; None if neither happened."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vendor", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="also write the table there")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--only", nargs="+", metavar="MUTANT", help="these mutants")
    parser.add_argument("--finders", nargs="+", choices=[ATTNFUZZ, *SUITES], default=[ATTNFUZZ, *SUITES])
    arguments = parser.parse_args()
    historical = [mutant for mutant in MUTANTS if mutant.reference]
    mutants = [mutant_named(name) for name in arguments.only] if arguments.only else historical
    suites = {name: Command(_pytest(SUITES[name])) for name in arguments.finders if name != ATTNFUZZ}
    baseline = {name: _check(command) for name, command in suites.items()}

    def put(mutant: Mutant) -> dict[str, Found]:
        found = {name: _by_suite(mutant, command) for name, command in suites.items()}
        if ATTNFUZZ in arguments.finders:
            found = {ATTNFUZZ: _by_attnfuzz(mutant)} | found
        print(_row(mutant, found), flush=True)
        return found

    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(put, mutants))
    for command in suites.values():
        command.close()
    page = "\n".join([*_header(results, baseline, arguments.jobs), *map(_row, mutants, results), ""])
    print(page)
    if arguments.file is not None:
        arguments.file.write_text(page)


def _pytest(suite: str) -> str:
    return f"{sys.executable} -m pytest -x -q -p no:cacheprovider {HERE / suite}"


def _check(command: Command) -> float:
    """Seconds that the suite takes on the kernels as they are; raises KernelLoadError if it does not pass there."""
    with tempfile.TemporaryDirectory() as folder:
        overlay, log = Path(folder, "overlay.json"), Path(folder, "loaded")
        files = sorted(KERNELS.glob("*.py"))
        write_overlay(overlay, {file: file for file in files}, loaded=log)
        started = time.monotonic()
        command.check(overlay, log, files)
        return time.monotonic() - started


def _by_suite(mutant: Mutant, command: Command) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        run = command.run(lay_over(mutant, Path(folder)))
    if run.ended == "error":
        raise RuntimeError(f"{command.line} could not tell about {mutant.name}:\n{run.tail}")
    return None if run.ended == "passed" else run.seconds


def _by_attnfuzz(mutant: Mutant) -> Found:
    device = "cpu" if os.environ.get("TRITON_INTERPRET", "1") == "1" else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        try:
            catch = hunt(mutant, Path(folder), seed=1, workers=1, device=device, budget_s=BUDGET_S[device])
        except NotFound:
            return None
    return catch.first_seen_s


def _header(results: Sequence[Mapping[str, Found]], baseline: Mapping[str, float], jobs: int) -> list[str]:
    names = list(results[0])
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: suites scaled down"
    taken = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in baseline.items())
    return [
        "# Re-created bugs: what finds them",
        "",
        f"Measured {datetime.date.today().isoformat()} with `python -m tests.vendor` on {os.cpu_count()} cores, "
        f"{where}, {jobs} at a time. Seconds count from the start of the command. Whole runs on the correct kernels: "
        f"{taken or 'none'}.",
        "",
        "| | | " + " | ".join(names) + " |",
        "|---|---|" + "---:|" * len(names),
        "| **found** | | " + " | ".join(_score([result[name] for result in results]) for name in names) + " |",
        "| **median, s** | | " + " | ".join(_median([result[name] for result in results]) for name in names) + " |",
    ]


def _score(found: Sequence[Found]) -> str:
    count = sum(seconds is not None for seconds in found)
    return f"**{count} of {len(found)}** ({100 * count / len(found):.0f}%)"


def _median(found: Sequence[Found]) -> str:
    seconds = [one for one in found if one is not None]
    return f"{statistics.median(seconds):.1f}" if seconds else "—"


def _row(mutant: Mutant, found: Mapping[str, Found]) -> str:
    cells = ["—" if seconds is None else f"{seconds:.1f}" for seconds in found.values()]
    return f"| {mutant.name} | {mutant.classes} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
