"""`python -m tests.quality [FILE]`: time to find and shrunk size of every mutant, as a table in Markdown."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton

from attnfuzz.problems.cases import MergeStatesCase
from tests.quality.hunting import Catch, hunt
from tests.quality.mutants import MUTANTS, Mutant

WORKERS = 2
BUDGET_S = {"cpu": 60, "cuda": 120}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="also write the table there")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="mutants hunted at once")
    arguments = parser.parse_args()

    def catch(mutant: Mutant) -> Catch:
        device = arguments.device
        with tempfile.TemporaryDirectory() as folder:
            caught = hunt(mutant, Path(folder), seed=1, workers=WORKERS, device=device, budget_s=BUDGET_S[device])
        print(_row(mutant, caught), flush=True)
        return caught

    with ThreadPoolExecutor(arguments.jobs) as pool:
        catches = list(zip(MUTANTS, pool.map(catch, MUTANTS), strict=True))
    page = "\n".join([*_header(catches, arguments.device), *(_row(mutant, caught) for mutant, caught in catches), ""])
    print(page)
    if arguments.file is not None:
        arguments.file.write_text(page)


def _header(catches: list[tuple[Mutant, Catch]], device: str) -> list[str]:
    seen = [catch.first_seen_s for _, catch in catches]
    done = [(catch, catch.shrunk_s) for _, catch in catches if catch.shrunk_s is not None]
    shrunk = [shrunk_s for _, shrunk_s in done]
    shrinking = [shrunk_s - catch.first_seen_s for catch, shrunk_s in done]
    fatal = [
        shrunk_s - catch.first_seen_s
        for catch, shrunk_s in done
        if catch.regression.finding.oracle in ("crash", "hang")
    ]
    today = datetime.date.today().isoformat()
    machine = f"{os.cpu_count()} cores of {_processor()}"
    where = f"{machine}, no GPU" if device == "cpu" else f"{torch.cuda.get_device_name()}, {machine}"
    interpreter = " (interpreter)" if device == "cpu" else ""
    return [
        "# Planted bugs: time to find, shrunk size",
        "",
        f"Measured {today} with `make quality` on {where}: "
        f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}{interpreter}, "
        f"`attnfuzz explore --fail-fast --workers {WORKERS} --seed 1`. Seconds count from the start of the command, "
        "start-up and imports included.",
        "",
        f"{len(catches)} of {len(MUTANTS)} found; {sum(s <= 10 for s in seen)} within 10 s; "
        f"time to find: median {statistics.median(seen):.1f} s, longest {max(seen):.1f} s; "
        f"{len(done)} shrunk to the end: median {statistics.median(shrunk):.1f} s, longest {max(shrunk):.1f} s; "
        f"first failure to final case: median {statistics.median(shrinking):.1f} s, longest {max(shrinking):.1f} s, "
        f"of crashes and hangs {max(fatal, default=0.0):.1f} s.",
        "",
        "| mutant | bug | class | oracle | found, s | shrunk, s | smallest case |",
        "|---|---|---|---|---:|---:|---|",
    ]


def _row(mutant: Mutant, catch: Catch) -> str:
    cells = [mutant.name, mutant.bug, mutant.classes, catch.regression.finding.oracle]
    cells += [f"{catch.first_seen_s:.1f}", _shrunk(catch), _size(catch)]
    return f"| {' | '.join(cells)} |"


def _shrunk(catch: Catch) -> str:
    return "cut off" if catch.shrunk_s is None else f"{catch.shrunk_s:.1f}"


def _size(catch: Catch) -> str:
    case = catch.case
    heads = f"head size {case.head_size}"
    if isinstance(case, MergeStatesCase):
        return f"{case.num_tokens} token(s), {case.num_q_heads} head(s), {heads}, LSE {list(case.lse_pairs)}"
    lengths = ", ".join(map(str, case.seq_lens))
    pages = f", page {case.block_size}" if hasattr(case, "block_size") else ""
    return f"lengths {lengths}; heads {case.num_q_heads}/{case.num_kv_heads}; {heads}{pages}"


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip()


if __name__ == "__main__":
    main()
