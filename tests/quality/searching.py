"""Whether mutants are found, without shrinking: from one warm process, in a fraction of the time of a hunt.

`python -m tests.quality.searching [MUTANT...]` prints the score and the time to kill; the exit status is 1 if one
survives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from attnfuzz.declaration import Declaration
from attnfuzz.isolation.devices import Device
from attnfuzz.judging.runner import DEFAULT_TIMEOUT_S, Runner
from attnfuzz.mutation.hunting import CaseStream, Hunt, Hunted, Hunter
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.overlay import VARIABLE
from tests.quality.mutants import MUTANTS, Mutant, mutant_named
from tests.quality.planting import lay_over

Search = Callable[[Mutant], Hunted]

_PATIENCE = 4
"""A slow case on a busy machine would else be taken for a hang, and a mutant for found by the wrong oracle."""


@contextmanager
def hunting(
    mutants: Sequence[Mutant], *, device: Device = "cpu", seed: int = 0, budget_s: float = 60.0
) -> Iterator[tuple[Hunter, Mapping[str, Declaration]]]:
    """What hunts for ``mutants`` have in common, and the declarations of their kernels by name."""
    with Runner(device=device) as runner:
        declarations = {one.name: one for one in runner.declarations(sorted({mutant.kernel for mutant in mutants}))}
        hunter = Hunter(
            zygote=runner.zygote,
            device=device,
            streams={one.target: CaseStream(one, seed=seed, device=device) for one in declarations.values()},
            oracles=DEFAULT_ORACLES,
            budget_s=budget_s,
            hang_s=_PATIENCE * DEFAULT_TIMEOUT_S[device],
        )
        yield hunter, declarations


@contextmanager
def searcher(
    mutants: Sequence[Mutant], *, device: Device = "cpu", seed: int = 0, budget_s: float = 60.0
) -> Iterator[Search]:
    """A search that judges cases of one of ``mutants`` until one fails; its seconds count from the first case on."""
    with hunting(mutants, device=device, seed=seed, budget_s=budget_s) as (hunter, declarations):

        def search(mutant: Mutant) -> Hunted:
            with tempfile.TemporaryDirectory() as folder:
                overlay = lay_over(mutant, Path(folder))
                with hunter.runner({VARIABLE: str(overlay)}) as mutated:
                    return Hunt(hunter, mutated, [declarations[mutant.kernel]]).run()

        yield search


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.searching", description=__doc__)
    parser.add_argument("mutants", nargs="*", metavar="MUTANT", help="all if none is given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each")
    parser.add_argument("--seed", type=int, default=0, help="of the cases drawn")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    arguments = parser.parse_args()
    mutants = [mutant_named(name) for name in arguments.mutants] or MUTANTS
    options = {"device": arguments.device, "seed": arguments.seed, "budget_s": arguments.budget}
    with searcher(mutants, **options) as search, ThreadPoolExecutor(arguments.jobs) as pool:

        def told(mutant: Mutant) -> Hunted:
            hunted = search(mutant)
            by = hunted.kill.by if hunted.kill is not None else "nothing"
            print(f"{hunted.seconds:6.1f} s {hunted.cases:5} cases  {by:16} {mutant.name}", flush=True)
            return hunted

        results = list(zip(mutants, pool.map(told, mutants), strict=True))
    print(_score("re-created", [hunted for mutant, hunted in results if mutant.reference]))
    print(_score("others", [hunted for mutant, hunted in results if not mutant.reference]))
    sys.exit(1 if any(hunted.kill is None for _, hunted in results) else 0)


def _score(what: str, results: Sequence[Hunted]) -> str:
    seconds = [hunted.seconds for hunted in results if hunted.kill is not None]
    if not seconds:
        return f"{what}: 0 of {len(results)} found"
    times = f"time to kill: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    return f"{what}: {len(seconds)} of {len(results)} found ({100 * len(seconds) / len(results):.0f}%), {times}"


if __name__ == "__main__":
    main()
