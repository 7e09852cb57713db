"""`python -m tests.vendor [FILE]`: which re-created bugs each vendor-style suite finds, and attnfuzz, as Markdown.

With `--resume RESULTS` what is found out is kept there as soon as it is known, and what is there already is not tried
again; `--shard 1/2` tries every second bug, and a later run of `--shard 2/2` that resumes makes one table of both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attnfuzz.mutation.killers import Command
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: Triton's interpreter")
    parser.add_argument("--jobs", type=int, default=1, help="suites and searches at once")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="NUMBER/COUNT", help="one of equal parts of all"
    )
    parser.add_argument("--resume", type=Path, metavar="RESULTS", help="go on from this file, if it is there")
    parser.add_argument("--only", nargs="+", metavar="MUTANT", help="these mutants")
    parser.add_argument("--finders", nargs="+", choices=[ATTNFUZZ, *SUITES], default=[ATTNFUZZ, *SUITES])
    arguments = parser.parse_args()
    historical = [mutant for mutant in MUTANTS if mutant.reference]
    mutants = [mutant_named(name) for name in arguments.only] if arguments.only else historical
    os.environ["TRITON_INTERPRET"] = "1" if arguments.device == "cpu" else "0"  # the suites go by it
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as there are jobs share the cores
    results = Results.read(arguments.resume, arguments.device)
    suites = {name: Command(_pytest(SUITES[name])) for name in arguments.finders if name != ATTNFUZZ}
    number, count = arguments.shard
    untried = [
        (mutant, name)
        for mutant in mutants[number - 1 :: count]
        for name in arguments.finders
        if name not in results.found.get(mutant.name, {})
    ]

    def put(mutant: Mutant, name: str) -> tuple[Mutant, str, Found]:
        found = _by_attnfuzz(mutant, arguments.device) if name == ATTNFUZZ else _by_suite(mutant, suites[name])
        return mutant, name, found

    def is_done(mutant: Mutant) -> bool:
        return set(arguments.finders) <= results.found.get(mutant.name, {}).keys()

    def page() -> str:
        done = [mutant for mutant in mutants if is_done(mutant)]
        rows = [_row(mutant, results.found[mutant.name], arguments.finders) for mutant in done]
        header = _header([results.found[mutant.name] for mutant in done], results.baseline, arguments)
        left = [f"\n**Still to be tried: {len(mutants) - len(done)} bugs.**"] if len(done) < len(mutants) else []
        return "\n".join([*header, *rows, *left, ""])

    with closing_all(suites.values()), ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            checked = {name: suite for name, suite in suites.items() if any(name == one for _, one in untried)}
            for name, seconds in zip(checked, pool.map(_check, checked.values()), strict=True):
                results.baseline[name] = seconds
                print(f"{name}: {seconds:.0f} s on the correct kernels", flush=True)
            for future in as_completed([pool.submit(put, *one) for one in untried]):
                mutant, name, found = future.result()
                results.keep(mutant.name, {name: found}, arguments.resume)
                if is_done(mutant):
                    print(_row(mutant, results.found[mutant.name], arguments.finders), flush=True)
                    if arguments.file is not None:
                        arguments.file.write_text(page())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if arguments.file is not None:
        arguments.file.write_text(page())
    print(page())


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()) or not 1 <= int(number) <= int(count):
        raise argparse.ArgumentTypeError(f"{text!r} must be NUMBER/COUNT with 1 <= NUMBER <= COUNT, such as 1/2")
    return int(number), int(count)


@dataclass
class Results:
    """Seconds by mutant and finder, and those of the suites on the correct kernels; of one device."""

    device: str
    found: dict[str, dict[str, Found]] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path | None, device: str) -> Results:
        if file is None or not file.exists():
            return cls(device)
        kept = json.loads(file.read_text())
        if kept["device"] != device:
            sys.exit(f"{file} holds results of --device {kept['device']}; name another file")
        return cls(device, kept["found"], kept["baseline"])

    def keep(self, mutant: str, found: dict[str, Found], file: Path | None) -> None:
        self.found[mutant] = self.found.get(mutant, {}) | found
        if file is not None:
            kept = {"device": self.device, "found": self.found, "baseline": self.baseline}
            file.write_text(json.dumps(kept, indent=1))


@contextmanager
def closing_all(commands: Iterable[Command]) -> Iterator[None]:
    try:
        yield
    finally:
        for command in commands:
            command.close()


def _pytest(suite: str) -> str:
    plugin = "-p no:attnfuzz -p attnfuzz.pytest_plugin"  # by its module's name, for checkouts that are not installed
    return f"{sys.executable} -m pytest -x -q -p no:cacheprovider {plugin} {HERE / suite}"


def _check(command: Command) -> float:
    """Seconds that the suite takes on the kernels as they are; raises KernelLoadError if it does not pass there."""
    with tempfile.TemporaryDirectory() as folder:
        overlay, log = Path(folder, "overlay.json"), Path(folder, "loaded")
        files = sorted(KERNELS.rglob("*.py"))
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


def _by_attnfuzz(mutant: Mutant, device: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        try:
            catch = hunt(mutant, Path(folder), seed=1, workers=1, device=device, budget_s=BUDGET_S[device])
        except NotFound:
            return None
    return catch.first_seen_s


def _header(
    results: Sequence[Mapping[str, Found]], baseline: Mapping[str, float], arguments: argparse.Namespace
) -> list[str]:
    names = arguments.finders
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "no GPU: suites scaled down"
    taken = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in baseline.items() if name in names)
    budget = BUDGET_S[arguments.device]
    return [
        "# Re-created bugs: what finds them",
        "",
        f"Measured {datetime.date.today().isoformat()} with `python -m tests.vendor --device {arguments.device} "
        f"--jobs {arguments.jobs}` on {os.cpu_count()} cores, {where}. The suites are written in the style of those "
        "projects (`tests/vendor`), and are not theirs; each runs whole, and what it never looks at cannot be found. "
        f"attnfuzz searches with one worker for at most {budget} s. Seconds count from the start of the command; a "
        f"dash means not found. Whole runs on the correct kernels: {taken or 'none'}.",
        "",
        "| | | " + " | ".join(names) + " |",
        "|---|---|" + "---:|" * len(names),
        "| **found** | | " + " | ".join(_score([result[name] for result in results]) for name in names) + " |",
        "| **median, s** | | " + " | ".join(_median([result[name] for result in results]) for name in names) + " |",
    ]


def _score(found: Sequence[Found]) -> str:
    count = sum(seconds is not None for seconds in found)
    return f"**{count} of {len(found)}** ({100 * count / max(1, len(found)):.0f}%)"


def _median(found: Sequence[Found]) -> str:
    seconds = [one for one in found if one is not None]
    return f"{statistics.median(seconds):.1f}" if seconds else "—"


def _row(mutant: Mutant, found: Mapping[str, Found], names: Sequence[str]) -> str:
    cells = ["—" if found[name] is None else f"{found[name]:.1f}" for name in names]
    return f"| {mutant.name} | {mutant.classes} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
