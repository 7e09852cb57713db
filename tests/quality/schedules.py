"""What other timing shows on a GPU: `python -m tests.quality.schedules` prints what each oracle finds, and its cost.

Drawn cases are judged by the usual oracles and by `delays`, of planted races also by the relations that stay in the
process; each kernel in a process of its own: those of `tests/oracles/relations/racing_kernels.py`, then all bundled
ones. A kernel's cases end with its budget.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnfuzz.cases.supported import adapt_options
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import DEFAULT_ORACLES, DELAYS, GUARD_PAGE, PAGE_RELOCATION, OracleName
from attnfuzz.oracles.relations.catalogue import applicable
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.problems.cases import Case
from attnfuzz.strategies import GPU_SIZES
from attnfuzz.trials.observation import KernelRaised
from attnfuzz.trials.trial import Trial
from attnfuzz.triton_compat.compiling import CompileTimes
from tests.common.drawing import drawn_cases
from tests.gpu.bundled_cases import BUNDLED
from tests.oracles.relations import racing_kernels

RACES = Path(racing_kernels.__file__)
_LEFT_OUT = {DELAYS.name, GUARD_PAGE.name, PAGE_RELOCATION.name}
"""The last two may end the process; they look at addresses, which no race is about."""


def races() -> list[str]:
    """Targets of the planted races, and of the right kernels beside them."""
    return [f"{RACES}:{name}" for name in racing_kernels.__all__]


@dataclass
class Seen:
    """``found``: by each oracle, how many of the ``cases``, and by "delays" how many of ``delayed``; ``first``: the
    number of the first. ``ms``: of a case without compiling, ``compiling``: seconds in all."""

    target: str
    cases: int = 0
    delayed: int = 0
    found: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    compiling: dict[str, float] = field(default_factory=dict)
    message: str = ""

    @property
    def row(self) -> str:
        """Of the table that is printed."""
        others = {name: count for name, count in self.found.items() if name != DELAYS.name}
        by_others = ", ".join(f"{name} {count} (first {self.first[name]})" for name, count in others.items())
        by_delays = self.found.get(DELAYS.name, 0)
        first = self.first.get(DELAYS.name, "")
        costs = [f"{self.ms.get(what, 0):.0f} ({self.compiling.get(what, 0):.0f} s)" for what in ("usual", "delays")]
        name = self.target.rpartition("/")[2]
        columns = (
            name,
            self.cases,
            by_others or "none",
            f"{by_delays} of {self.delayed}",
            first,
            *costs,
            self.message[:160],
        )
        return f"| {' | '.join(map(str, columns))} |"


def cases_of(kernel: Kernel, count: int, seed: int) -> Iterator[Case]:
    """As a search on a GPU draws them."""
    declaration = kernel.declaration
    drawn = drawn_cases(declaration.problem, count, seed=seed, supports=declaration.supports, sizes=GPU_SIZES)
    return (adapt_options(case, declaration.options) for case in drawn)


def seen_of(target: str, *, count: int, budget_s: float, seed: int, device: str, with_relations: bool) -> Seen:
    """Of one kernel, in this process."""
    (kernel,) = load_kernels(target)
    compiled = CompileTimes()
    compiled.start_listening()
    seen, found = Seen(target), Counter[str]()
    spent, compiling = defaultdict[str, float](float), defaultdict[str, float](float)
    until = time.monotonic() + budget_s
    for number, case in enumerate(cases_of(kernel, count, seed), 1):
        if time.monotonic() > until:
            break
        seen.cases = number
        wanted: Sequence[Relation] = applicable(kernel.declaration, case, DEFAULT_ORACLES, device=device)
        names = [one.name for one in wanted if one.name not in _LEFT_OUT] if with_relations else []
        objections = dict[str, str]()
        for name in (None, *names):
            begun, before = time.monotonic(), compiled.seconds
            objections |= _judged(kernel, case, (name,) if name else (), device)
            what = "relations" if name else "usual"
            compiling[what] += compiled.seconds - before
            spent[what] += time.monotonic() - begun - (compiled.seconds - before)
        delays = next((one for one in wanted if one.name == DELAYS.name), None)
        if delays is not None and not objections.keys() - set(names):
            begun, before = time.monotonic(), compiled.seconds
            objections |= _delayed(kernel, case, delays, device)
            compiling["delays"] += compiled.seconds - before
            spent["delays"] += time.monotonic() - begun - (compiled.seconds - before)
            seen.delayed += 1
        for name, message in objections.items():
            found[name] += 1
            seen.first.setdefault(name, number)
            seen.message = message if name == DELAYS.name or not seen.message else seen.message
    seen.found, seen.compiling = dict(found), dict(compiling)
    seen.ms = {
        what: 1000 * seconds / max(1, seen.delayed if what == "delays" else seen.cases)
        for what, seconds in spent.items()
    }
    return seen


def _judged(kernel: Kernel, case: Case, relations: tuple[OracleName, ...], device: str) -> dict[str, str]:
    verdict = judge(kernel, case, device=device, inquire=False, relations=relations)
    if verdict.fatal:
        raise RuntimeError(f"the GPU is lost: {verdict.failure}")
    failure = verdict.failure
    return {} if failure is None else {failure.oracle: failure.message}


def _delayed(kernel: Kernel, case: Case, relation: Relation, device: str) -> dict[str, str]:
    try:
        failure = relation.check(Trial(kernel, case, device=device, tolerance="bound"))
    except KernelRaised as raised:
        return {DELAYS.name: f"raised {raised.error}"}
    return {} if failure is None else {DELAYS.name: failure.message}


def _in_process(target: str, options: argparse.Namespace) -> Seen:
    command = [sys.executable, "-P", "-m", "tests.quality.schedules", "--alone", target, "--cases", str(options.cases)]
    command += ["--budget", str(options.budget), "--seed", str(options.seed), "--device", options.device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * options.budget + 60)
    except subprocess.TimeoutExpired:
        return Seen(target, message="did not end")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return Seen(target, message=f"died, status {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
    return Seen(**json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.schedules", description=__doc__)
    parser.add_argument("targets", nargs="*", help="kernels; the planted races and all bundled ones if none is given")
    parser.add_argument("--cases", type=int, default=200, help="of each kernel, at most")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for each kernel")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="kernels at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--alone", metavar="KERNEL", help="judge it in this process, and print what was seen as JSON")
    options = parser.parse_args()
    if options.alone:
        how: dict[str, Any] = {"count": options.cases, "budget_s": options.budget, "seed": options.seed}
        seen = seen_of(options.alone, **how, device=options.device, with_relations=options.alone.startswith(str(RACES)))
        print(json.dumps(vars(seen)))
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{where}, torch {torch.__version__}, seed {options.seed}, {options.budget:g} s a kernel\n")
    print("| kernel | cases | by others | by delays | first | ms a case (s compiling) | ms of delays (s) | told |")
    print("|---|---:|---|---:|---:|---:|---:|---|", flush=True)
    targets = options.targets or [*races(), *BUNDLED]
    with ThreadPoolExecutor(options.jobs) as pool:
        for seen in pool.map(lambda target: _in_process(target, options), targets):
            print(seen.row, flush=True)


if __name__ == "__main__":
    main()
