"""`python -m tests.quality.first_minute`: what a person sees of campaigns in their first minutes, as one table.

All bundled kernels, one kernel of an engine, all of the engines that are installed, kernels in files of a user
(`--files FILE:NAME ...`) and bugs that are planted in bundled kernels, each with nothing compiled. `--before FOLDER`
measures another tree of attnfuzz as well: rows that need few cores at once, each tree on half of them, the others in
turn, and of the other tree mostly for a minute. What there is no time for within `--limit` seconds is left out, and
named. The exit status is 1 if a campaign could not be run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tests.quality.mutants import mutant_named
from tests.quality.planting import plant

_ROOT = Path(__file__).resolve().parents[2]
_PLANTED = (
    "v_not_masked",
    "whole_pages_loaded_without_mask",
    "merge_both_empty",
    "empty_row_not_written",
    "every_split_writes_the_first_lse",
    "empty_sequence_divides_by_zero",
    "dense_v_not_masked",
    "merge_plus_inf",
)
_WITH_DEFECTS = (
    "sglang:decode_attention",
    "sglang:extend_attention",
    "sglang:merge_state",
    "sglang:suffix_merge",
    "sglang:verify_mla",
    "vllm:decode_attention",
    "vllm:unified_attention",
    "vllm:unified_attention_segments",
)
"""Released kernels of docs/defects.md that Triton compiles."""
_AT_ONCE = 4
_MINUTE_S, _FOUR_MINUTES_S = 52, 232
"""Of a campaign whose command is over after about a minute, and after four."""
_STARTS_AND_ENDS_S = 15.0


_MOST_STATUS = 2
"""Exit statuses of a campaign that has run: nothing found, something found, something not judged."""


class _Finding(msgspec.Struct):
    cause: str
    first_seen_s: float
    shrunk_s: float | None
    in_contract: bool


class _Kernel(msgspec.Struct):
    target: str
    findings: tuple[_Finding, ...]
    cases: int = 0


class MinuteSummary(msgspec.Struct):
    """What is read of a campaign's ``--json``."""

    cases: int
    device: str
    kernels: tuple[_Kernel, ...]
    first_case_s: float | None = None
    first_minute: int = 0
    compiling: float = 0.0


@dataclass(frozen=True, slots=True)
class FirstMinute:
    """Seconds since one command began: until its first line, until its end, and what its own summary says."""

    first_line_s: float | None
    wall_s: float
    summary: MinuteSummary

    @property
    def found(self) -> Iterator[tuple[float, float | None, str, str]]:
        """When each finding that counts was first seen and when it was shrunk, its kernel and its cause; in order."""
        findings = (
            (one.first_seen_s, one.shrunk_s, kernel.target, one.cause)
            for kernel in self.summary.kernels
            for one in kernel.findings
            if one.in_contract
        )
        return iter(sorted(findings, key=lambda found: (found[0], found[2:])))


def measure_first_minute(arguments: Sequence[str], command: Sequence[str]) -> FirstMinute:
    """``COMMAND explore ARGUMENTS`` in an empty folder, with no kernel compiled.

    Raises RuntimeError with what a command said that has not run.
    """
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as complaints:
        written = Path(scratch) / "summary.json"
        asked = [*command, "explore", *arguments, "--json", str(written), "--save-dir", f"{scratch}/found"]
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{scratch}/triton"}
        started = time.monotonic()
        with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=complaints, env=environment) as process:
            stdout = process.stdout
            assert stdout is not None
            first = os.read(stdout.fileno(), 1)
            first_line_s = time.monotonic() - started if first else None
            said = stdout.read()
            status = process.wait()
        wall_s = time.monotonic() - started
        complaints.seek(0)
        if status not in range(_MOST_STATUS + 1) or not written.exists():
            told = (first + said + complaints.read()).decode(errors="replace").strip()
            raise RuntimeError(f"{' '.join(asked)} ended with status {status}: {told}")
        return FirstMinute(first_line_s, wall_s, msgspec.json.decode(written.read_bytes(), type=MinuteSummary))


@dataclass(frozen=True, slots=True)
class Row:
    """Campaigns that are told as one; ``few_cores``: both trees at once. ``budget_s`` of each, which may end sooner.

    ``is_compared``: the other tree has all of that, too.
    """

    name: str
    campaigns: Sequence[Sequence[str]]
    budget_s: int
    few_cores: bool = False
    is_compared: bool = False

    @property
    def needs_s(self) -> float:
        """For one tree, or for both at once."""
        return -(-len(self.campaigns) // _AT_ONCE) * (self.budget_s + _STARTS_AND_ENDS_S)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a row: ``campaigns`` in which something ran, ``errors`` of the others."""

    row: Row
    tree: str
    campaigns: Sequence[FirstMinute]
    errors: Sequence[str] = ()


def rows(files: Sequence[str], planted: Sequence[str], *, quick: bool, files_s: int = 60) -> list[Row]:
    """What is measured, the most telling first."""
    one = Row("`vllm:decode_attention`, 1 worker", [["vllm:decode_attention", "--workers", "1"]], 20, few_cores=True)
    found = [[target, "--fail-fast", "--pedantic", "--workers", "1"] for target in planted]
    bugs = Row(f"{len(planted)} planted bugs, 1 worker each", found, 18, few_cores=True)
    chosen = [one, Row("all bundled kernels", [["*"]], _MINUTE_S if quick else 112)] + [bugs] * bool(planted)
    if not quick:
        chosen.append(Row("`vllm:*` and `sglang:*`, 14 workers", [["vllm:*", "sglang:*", "--workers", "14"]], 45))
        chosen += [Row(f"{len(files)} kernels in files", [files], files_s)] * bool(files)
        one_each = [[target, "--fail-fast", "--workers", "1"] for target in _WITH_DEFECTS]
        chosen.append(
            Row(f"{len(one_each)} released kernels with defects, 1 worker each", one_each, 60, few_cores=True)
        )
        chosen.append(Row("all bundled kernels, four minutes", [["*"]], _FOUR_MINUTES_S, is_compared=True))
    return chosen


def _seconds(values: Iterable[float | None]) -> str:
    seen = [value for value in values if value is not None]
    return f"{statistics.median(seen):.1f} s" if seen else "none"


def table(measured: Sequence[Measured]) -> str:
    """In Markdown; of several campaigns medians, and of cases what all of them had."""
    lines = [
        "| what | tree | first line | first case | first finding | it is shrunk | found | cases in 60 s | cases/s | "
        "compiling | wall, budget |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in measured:
        ran = one.campaigns
        firsts = [next(campaign.found, None) for campaign in ran]
        shrunk = [min((found[1] for found in campaign.found if found[1] is not None), default=None) for campaign in ran]
        findings = sum(len(list(campaign.found)) for campaign in ran)
        count = f"{sum(first is not None for first in firsts)} of {len(one.row.campaigns)}"
        cases = sum(campaign.summary.cases for campaign in ran)
        wall_s = [campaign.wall_s for campaign in ran]
        compiling = [campaign.summary.compiling for campaign in ran]
        cells = [
            one.row.name,
            one.tree,
            _seconds(campaign.first_line_s for campaign in ran),
            _seconds(campaign.summary.first_case_s for campaign in ran),
            _seconds(first[0] if first is not None else None for first in firsts),
            _seconds(shrunk),
            count if len(one.row.campaigns) > 1 else str(findings),
            f"{sum(campaign.summary.first_minute for campaign in ran):,}",
            f"{cases / sum(wall_s):.0f}" if ran else "-",
            f"{100 * statistics.mean(compiling):.0f} %" if ran else "-",
            f"{_seconds(wall_s)}, {one.row.budget_s} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measure(row: Row, tree: str, folder: Path, cores: Sequence[int], more: Sequence[str]) -> Measured:
    """The row in ``folder``'s attnfuzz, on ``cores``."""
    path = [str(folder), *(one for one in os.environ.get("PYTHONPATH", "").split(":") if one and Path(one) != _ROOT)]
    command = [
        *("taskset", "-c", ",".join(map(str, cores)), "env", f"PYTHONPATH={':'.join(path)}"),
        *(sys.executable, "-P", "-m", "attnfuzz"),
    ]
    errors: list[str] = []

    def one(arguments: Sequence[str]) -> FirstMinute | None:
        asked = [*arguments, "--budget", f"{row.budget_s}s", "--seed", "1", *more]
        try:
            measured = measure_first_minute(asked, command)
        except RuntimeError as error:
            errors.append(f"{' '.join(arguments)}: {str(error)[-400:]}")
            return None
        for seen_s, shrunk_s, target, cause in measured.found:
            shrunk = "not shrunk" if shrunk_s is None else f"shrunk after {shrunk_s:.1f} s"
            print(f"   {tree}: {seen_s:.1f} s {target.rpartition('/')[2]} {cause} ({shrunk})", flush=True)
        fewest = sorted((kernel.cases, kernel.target.rpartition("/")[2]) for kernel in measured.summary.kernels)[:8]
        if len(fewest) > 1:
            print(f"   {tree}: fewest cases: {', '.join(f'{cases} {name}' for cases, name in fewest)}", flush=True)
        return measured

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        ran = list(pool.map(one, row.campaigns))
    return Measured(row, tree, [one for one in ran if one is not None], errors)


def turns(chosen: Sequence[Row], trees: Sequence[str]) -> Iterator[tuple[Row, Sequence[str]]]:
    """Rows with the trees that are measured at once. The other tree has its turn after all of this one, if alone."""
    *others, last = trees
    for row in chosen:
        yield row, trees if row.few_cores else [last]
    for row in chosen:
        for tree in () if row.few_cores else others:
            yield row if row.is_compared else replace(row, budget_s=min(row.budget_s, _MINUTE_S)), [tree]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.first_minute", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one kernel, the bundled ones for a minute, planted bugs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another tree of attnfuzz, to compare with")
    parser.add_argument("--files", nargs="*", default=(), metavar="FILE:NAME")
    parser.add_argument("--files-budget", type=int, default=60, metavar="SECONDS")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="of the list, from 1 on")
    parser.add_argument("--limit", type=float, default=400.0, metavar="SECONDS")
    asked = parser.parse_args()
    until = time.monotonic() + asked.limit
    trees = {"after": _ROOT} if asked.before is None else {"before": asked.before.resolve(), "after": _ROOT}
    cores = sorted(os.sched_getaffinity(0))
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as scratch:
        targets = [plant(mutant_named(name), Path(scratch)) for name in _PLANTED]
        chosen = rows(asked.files, targets, quick=asked.quick, files_s=asked.files_budget)
        kept = [chosen[number - 1] for number in asked.rows] if asked.rows else chosen
        for row, group in turns(kept, list(trees)):
            if time.monotonic() + row.needs_s > until:
                print(f"no time for {row.name}, {', '.join(group)}", flush=True)
                continue
            print(f"{row.name}, {', '.join(group)}", flush=True)
            with ThreadPoolExecutor(len(group)) as pool:
                done = [
                    pool.submit(_measure, row, tree, trees[tree], cores[i :: len(group)], ["--device", asked.device])
                    for i, tree in enumerate(group)
                ]
                measured += [one.result() for one in done]
            for one in measured[-len(group) :]:
                print("\n".join(one.errors), end="\n" * bool(one.errors), flush=True)
    print(table(measured))
    sys.exit(any(one.errors for one in measured))


if __name__ == "__main__":
    main()
