"""`python -m tests.quality [FILE]`: time to find and shrunk size of every mutant, as a table in Markdown.

FILE is written anew after each mutant. The exit status is 1 if one is not found, not shrunk as far as it could be, or
found in the correct kernel too.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
import triton

from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase
from tests.quality.hunting import Catch, NotFound, flaws, hunt
from tests.quality.mutants import MUTANTS, Mutant, mutant_named

WORKERS = 1
"""Of several, each may be at another symptom of the bug, and which of them the campaign ends with is up to chance."""
BUDGET_S = {"cpu": 60, "cuda": 120}

Hunted = tuple[Mutant, Catch | None]

_ONE_AT_A_TIME = threading.Lock()
"""An executor answers one call at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="also write the table there")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="mutants hunted at once")
    parser.add_argument("--only", nargs="+", metavar="MUTANT", help="hunt these")
    arguments = parser.parse_args()
    mutants = [mutant_named(name) for name in arguments.only] if arguments.only else MUTANTS
    complaints: list[str] = []
    hunted: list[Hunted] = []

    def page() -> str:
        done = sorted(hunted, key=lambda one: mutants.index(one[0]))
        header = _header(done, arguments.device, arguments.jobs, left=len(mutants) - len(done))
        return "\n".join([*header, *(_row(*one) for one in done), ""])

    def hunt_one(mutant: Mutant) -> Hunted:
        return mutant, _hunt(mutant, arguments.device, runner, complaints)

    with Runner(device=arguments.device) as runner, ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            for future in as_completed([pool.submit(hunt_one, mutant) for mutant in mutants]):
                hunted.append(future.result())
                print(_row(*hunted[-1]), flush=True)
                if arguments.file is not None:
                    arguments.file.write_text(page())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(page())
    sys.exit("\n".join(complaints) or 0)


def _hunt(mutant: Mutant, device: str, runner: Runner, complaints: list[str]) -> Catch | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            caught = hunt(mutant, Path(folder), seed=1, workers=WORKERS, device=device, budget_s=BUDGET_S[device])
        except NotFound as error:
            complaints.append(str(error))
            return None
        with _ONE_AT_A_TIME:
            complaints += [f"{mutant.name}: {flaw}" for flaw in flaws(mutant, caught, runner)]
        return caught


def _header(hunted: Sequence[Hunted], device: str, jobs: int, *, left: int) -> list[str]:
    catches = [catch for _, catch in hunted if catch is not None]
    done = [(catch, catch.shrunk_s) for catch in catches if catch.shrunk_s is not None]
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
        f"Measured {today} with `python -m tests.quality --device {device} --jobs {jobs}` on {where}: "
        f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}{interpreter}. "
        f"Each bug is planted in a copy of the kernels and hunted by `attnfuzz explore --fail-fast --workers {WORKERS} "
        f"--seed 1` for at most {BUDGET_S[device]} s. Seconds count from the start of that command, start-up and "
        "imports included. One run of each: how the time varies with the seed is not measured."
        + (f" **{left} bugs are still to be hunted.**" if left else ""),
        "",
        *(
            f"- {kind}: {_score(catches)}"
            for kind, catches in (
                ("Bugs that have shipped, re-created in the bundled kernels", _of(hunted, historical=True)),
                ("Other mistakes of the same kinds", _of(hunted, historical=False)),
            )
            if catches
        ),
        f"- Shrunk to the end: {len(done)}, after a median of {_median([shrunk_s for _, shrunk_s in done])}; "
        f"first failure to final case: median {_median(shrinking)}, longest {max(shrinking, default=0.0):.1f} s, "
        f"of crashes and hangs {max(fatal, default=0.0):.1f} s.",
        "",
        "| mutant | class | oracle | found, s | shrunk, s | smallest case |",
        "|---|---|---|---:|---:|---|",
    ]


def _of(hunted: Sequence[Hunted], *, historical: bool) -> list[Catch | None]:
    return [catch for mutant, catch in hunted if bool(mutant.reference) is historical]


def _score(catches: Sequence[Catch | None]) -> str:
    seen = [catch.first_seen_s for catch in catches if catch is not None]
    share = f" ({100 * len(seen) / len(catches):.0f}%)"
    within = f"{sum(seconds <= 10 for seconds in seen)} within 10 s"
    longest = f"longest {max(seen, default=0.0):.1f} s"
    return f"{len(seen)} of {len(catches)} found{share}, {within}; time to find: median {_median(seen)}, {longest}."


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} s" if seconds else "none"


def _row(mutant: Mutant, catch: Catch | None) -> str:
    cells = [mutant.name, mutant.classes]
    if catch is None:
        cells += ["not found", "", "", ""]
    else:
        cells += [catch.regression.finding.oracle, f"{catch.first_seen_s:.1f}", _shrunk(catch), _size(catch)]
    return f"| {' | '.join(cells)} |"


def _shrunk(catch: Catch) -> str:
    return "cut off" if catch.shrunk_s is None else f"{catch.shrunk_s:.1f}"


def _size(catch: Catch) -> str:
    case = catch.case
    heads = f"head size {case.head_size}"
    if isinstance(case, MergeStatesCase):
        return f"{case.num_tokens} token(s), {case.num_q_heads} head(s), {heads}, LSE {list(case.lse_pairs)}"
    assert isinstance(case, AttentionCase)
    heads += f" (V {case.v_head_size})" if case.v_head_size is not None else ""
    lengths = ", ".join(map(str, case.seq_lens))
    pages = f", page {case.block_size}" if hasattr(case, "block_size") else ""
    return f"lengths {lengths}; heads {case.num_q_heads}/{case.num_kv_heads}; {heads}{pages}"


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip()


if __name__ == "__main__":
    main()
