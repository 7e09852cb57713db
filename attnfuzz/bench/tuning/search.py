"""Measures configurations over batches: all of them on a few, then the good ones on all. Torch-free."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

from attnfuzz.bench.kernels.laboratory import Crashed
from attnfuzz.bench.kernels.messages import L2State, MeasureRequest
from attnfuzz.bench.kernels.run import Measures
from attnfuzz.bench.kernels.shapes import Shape
from attnfuzz.bench.tuning.batches import features_of
from attnfuzz.bench.tuning.tree import Sample
from attnfuzz.declaration import Declaration
from attnfuzz.problems.supports import OptionValue

__all__ = ["Configuration", "Measurements", "configurations", "measure_batches"]

Configuration = dict[str, OptionValue]

_SCREENED = 6
"""Batches on which all configurations are measured first."""

_NEAR = 1.1
"""How near to the best of a screened batch a configuration must come to be measured on all."""

_MOST_KEPT = 12


@dataclass(frozen=True, slots=True)
class Measurements:
    """One sample a batch, each with a time for each of ``configurations``, those that were measured on all.

    ``wrong``: what is left out for being wrong, and what was said of it. ``unreached``: batches without times.
    """

    configurations: list[Configuration]
    samples: list[Sample]
    shapes: list[Shape]
    wrong: list[tuple[Configuration, str]]
    unreached: int


def configurations(
    declared: Mapping[str, tuple[OptionValue, ...]], asked: Mapping[str, tuple[OptionValue, ...]], most: int
) -> list[Configuration]:
    """All combinations of the declared choices, or of those asked for; if they are more than ``most``, a part of them.

    The first one, which is what the kernel takes by default, is always there.
    """
    values = [asked.get(name, choices) for name, choices in declared.items()]
    total = prod(map(len, values))
    places = range(total) if total <= most else [0, *sorted(random.Random(0).sample(range(1, total), most - 1))]
    combinations = itertools.product(*values)
    wanted = set(places)
    return [dict(zip(declared, chosen, strict=True)) for place, chosen in enumerate(combinations) if place in wanted]


def measure_batches(
    laboratory: Measures,
    kernel: Declaration,
    candidates: Sequence[Configuration],
    shapes: Sequence[Shape],
    *,
    l2: L2State = "cold",
    seconds: float = 0.02,
    budget_s: float = inf,
    note: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Measurements:
    """No batch is begun once the budget is spent."""
    until = clock() + budget_s
    bench = _Bench(laboratory, kernel, l2, seconds)
    alive = list(range(len(candidates)))
    rows: dict[int, dict[int, float]] = {}
    for place, shape in enumerate(shapes):
        if place and clock() > until:
            break
        if place == _SCREENED:
            alive = _good(alive, rows)
            note(f"{len(alive)} of {len(candidates)} configurations are measured on all batches")
        times = {i: bench.time(candidates[i], shape) for i in alive if i not in bench.wrong_of(candidates)}
        if any(taken < inf for taken in times.values()):
            rows[place] = times
            best = min(times, key=lambda i: times[i])
            note(f"{shape.label}: {times[best]:.1f} us with {candidates[best]}")
    kept = [i for i in _good(alive, rows) if i not in bench.wrong_of(candidates)] if rows else []
    samples = [
        Sample({name: float(value) for name, value in features_of(shapes[place]).items()}, tuple(row[i] for i in kept))
        for place, row in rows.items()
        if kept and min(row[i] for i in kept) < inf
    ]
    measured = [shapes[place] for place, row in rows.items() if kept and min(row[i] for i in kept) < inf]
    wrong = [(candidates[i], why) for i, why in bench.wrong_of(candidates).items()]
    return Measurements([candidates[i] for i in kept], samples, measured, wrong, len(shapes) - len(rows))


class _Bench:
    def __init__(self, laboratory: Measures, kernel: Declaration, l2: L2State, seconds: float) -> None:
        self._laboratory = laboratory
        self._kernel = kernel
        self._l2: L2State = l2
        self._seconds = seconds
        self._wrong: list[tuple[Configuration, str]] = []

    def wrong_of(self, candidates: Sequence[Configuration]) -> dict[int, str]:
        """Which of ``candidates`` have been wrong, and what was said of them."""
        return {candidates.index(one): why for one, why in self._wrong}

    def time(self, configuration: Configuration, shape: Shape) -> float:
        """Microseconds under a CUDA graph if that can be, eager otherwise; infinite if it does not run."""
        in_graph = self._kernel.supports.graph_replay and self._laboratory.machine.device == "cuda"
        request = MeasureRequest(
            contender=self._kernel.target,
            shape=shape,
            options=configuration,
            l2=(self._l2,),
            modes=("graph",) if in_graph else ("eager",),
            seconds=self._seconds,
        )
        try:
            reply = self._laboratory.measure(request)
        except Crashed as how:
            self._wrong.append((configuration, str(how)))
            return inf
        if reply.status == "wrong":
            self._wrong.append((configuration, reply.note))
        return reply.times[0].median_us if reply.times else inf


def _good(alive: Sequence[int], rows: Mapping[int, Mapping[int, float]]) -> list[int]:
    """Those near the best of some batch, the most often near ones first if they are too many; in their old order."""
    near = {i: sum(row.get(i, inf) <= _NEAR * min(row.values()) for row in rows.values()) for i in alive}
    best = sorted((i for i in alive if near[i]), key=lambda i: -near[i])[:_MOST_KEPT]
    return sorted(best)
