"""How soon draws reach what is rare: `python -m tests.quality.reach` prints cases and seconds until each bug is found.

Planted bugs of each of `KINDS`, and right kernels of the same shape, are searched alone by one worker, as ``attnfuzz
explore`` does; or else the files and kernels that are named, of which those are right whose names begin with one of
`RIGHT`. A question counts as found, and the table says that it is one: of a kernel that says nothing, it is for its
author to say what is meant. It is told when the search ends, so that its seconds are those of the whole search.
Cases count whatever else the machine does; seconds do not. The exit status is 1 where anything is not as it should be.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

RIGHT = ("right", "ok_", "fixed")
_TESTS = Path(__file__).resolve().parents[1]
_REACHING = _TESTS / "quality" / "reaching_kernels.py"
_PLANNING = _TESTS / "oracles" / "relations" / "planning_kernels.py"
_KEEPING = _TESTS / "oracles" / "keeping_kernels.py"
_RACING = _TESTS / "oracles" / "relations" / "racing_kernels.py"
_WIDE = _TESTS / "families" / "wide_kernels.py"
_GRAPHS = _TESTS / "gpu" / "graph_kernels.py"


@dataclass(frozen=True)
class Kind:
    """``bugs`` and ``right``: patterns of the names of kernels in ``path``. ``devices``: where the bugs can show."""

    name: str
    path: Path
    bugs: tuple[str, ...]
    right: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)


_BOTH = ("cpu", "cuda")
KINDS = (
    Kind("tiles without a key", _REACHING, ("tiles_*", "blocks_*"), ("right_tiles", "right_segments")),
    Kind("state between calls", _PLANNING, ("plan_without_*",), ("plan_with_all",)),
    Kind("buffers that are kept", _KEEPING, ("scratch_of_*",), ("scratch_that_is_masked",)),
    Kind("sizes", _REACHING, ("sizes_*",), ("right_sizes",)),
    Kind("scales of 8-bit caches", _REACHING, ("scales_*",), ("right_scales",)),
    Kind("offsets into a mask", _REACHING, ("addresses_*",), ("right_addresses",)),
    Kind("offsets into caches", _WIDE, ("*_narrow", "*_in_float"), ("*_wide",)),
    Kind("strides of K and V", _REACHING, ("gaps_*",), ("right_gaps",), _BOTH),
    Kind(
        "captured graphs",
        _GRAPHS,
        ("grid_*", "splits_*", "table_*", "counter_*", "says_nothing_and_freezes*"),
        ("keeps_*", "says_nothing_and_is_right"),
        ("cuda",),
    ),
    Kind(
        "order of programs",
        _RACING,
        ("added_without*", "counts_before*", "last_program*", "zeroed_by*", "cleared_by*"),
        ("added_by*", "last_to_arrive*", "waits_for*", "stored_by*"),
        _BOTH,
    ),
    Kind(
        "pace of warps and streams",
        _RACING,
        ("stored_without*", "launched_on*", "values_copied*"),
        ("stored_behind*", "copied_behind*"),
        ("cuda",),
    ),
    Kind("row sums in 16 bits", _REACHING, ("sums_*",), ("right_sums",)),
    Kind("batches", _REACHING, ("batches_*",), ("right_batches",)),
)


@dataclass(frozen=True)
class Wanted:
    """A kernel to be searched, and whether it is right."""

    target: str
    is_right: bool
    kind: str = ""


@dataclass(frozen=True)
class Reached:
    """Cases of a search that ends at its first finding, when that was first seen, what was found and what is asked."""

    wanted: Wanted
    cases: int
    seconds: float
    told: tuple[str, ...]
    asked: tuple[str, ...] = ()

    @property
    def is_as_it_should_be(self) -> bool:
        """A bug is found or asked about, or a right kernel is neither accused nor asked."""
        return bool(self.told or self.asked) is not self.wanted.is_right

    @property
    def row(self) -> str:
        """Of the table that is printed."""
        is_right = self.wanted.is_right
        name = self.wanted.target.rpartition("/")[2]
        asked = [f"a question: {one}" for one in self.asked]
        told = "; ".join((*self.told, *asked))[:140].replace("|", "/") or ("silent" if is_right else "NOT FOUND")
        accused = "" if self.is_as_it_should_be else "ACCUSED: " * is_right
        return f"| {self.wanted.kind} | {name} | {self.cases} | {self.seconds:.1f} | {accused}{told} |"


def targets_in(path: Path) -> list[str]:
    """All kernels that a file declares, without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [f"{path}:{one.name}" for one in tree.body if isinstance(one, ast.FunctionDef) and _is_declared(one)]


def _is_declared(function: ast.FunctionDef) -> bool:
    calls = (one for one in function.decorator_list if isinstance(one, ast.Call))
    return any(isinstance(one.func, ast.Attribute) and one.func.attr == "kernel" for one in calls)


def wanted_on(device: str) -> Iterator[Wanted]:
    """All kernels of all kinds that can show there."""
    for kind in KINDS:
        for target in targets_in(kind.path) if device in kind.devices else ():
            name = target.rpartition(":")[2]
            is_right = any(fnmatch.fnmatch(name, one) for one in kind.right)
            if is_right or any(fnmatch.fnmatch(name, one) for one in kind.bugs):
                yield Wanted(target, is_right, kind.name)


def explore(wanted: Wanted, *, budget_s: int, seed: int, device: str = "cpu") -> Reached:
    """A search of one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        run = subprocess.run(
            [
                sys.executable, "-P", "-m", "attnfuzz", "explore", wanted.target, "--budget", f"{budget_s}s",
                "--seed", str(seed), "--workers", "1", "--device", device, "--quiet", "--fail-fast",
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
    findings = kernel["findings"]
    seconds = min((one["first_seen_s"] for one in findings), default=told["elapsed_s"])
    asked = tuple(f"{one['declaration']}? {one['message']}" for one in kernel.get("questions", ()))
    return Reached(wanted, kernel["cases"], seconds, tuple(one["message"] for one in findings), asked)


def _named(asked: Sequence[str]) -> Iterator[Wanted]:
    """What ``asked`` names: files, kernels in them, or patterns of these."""
    for one in asked:
        path, _, name = one.partition(".py")
        known = targets_in(Path(f"{path}.py").resolve())
        for target in fnmatch.filter(known, f"*.py:{name.removeprefix(':') or '*'}"):
            yield Wanted(target, target.rpartition(":")[2].startswith(RIGHT))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.reach", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="FILE.py[:NAME]", help="in place of the planted bugs")
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--budget", type=int, default=40, help="seconds for each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="kernels at once")
    options = parser.parse_args()
    how = {"budget_s": options.budget, "seed": options.seed, "device": options.device}
    print(f"on {options.device}, {options.budget} s each, {options.jobs} at once, seed {options.seed}\n")
    print("| kind | kernel | cases | seconds | told |")
    print("|---|---|---:|---:|---|")
    missed: list[str] = []
    questions = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        known = _named(options.targets) if options.targets else wanted_on(options.device)
        wanted = [one for one in known if fnmatch.fnmatch(one.target.rpartition(":")[2], options.only)]
        for found in pool.map(lambda one: explore(one, **how), wanted):
            print(found.row, flush=True)
            questions += found.is_as_it_should_be and not found.told and bool(found.asked)
            missed += [] if found.is_as_it_should_be else [found.wanted.target]
    right = len(wanted) - len(missed)
    print(f"\n{right} of {len(wanted)} as they should be, {questions} of them by a question; ", end="")
    print(f"not so: {', '.join(missed) or 'none'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
