"""Chooses a kernel's options by measuring them over ragged batches, as servers have them. Torch-free."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

from attnfuzz.bench.kernels.measurements import L2State, MeasureRequest
from attnfuzz.bench.kernels.run import Crashed, Measures
from attnfuzz.bench.kernels.shapes import PROBLEMS_OF, Shape, ragged_lengths, smoke_suite
from attnfuzz.bench.tuning_tree import Configuration, Sample, Tuned, cross_validated_regret, grow_tree, regret
from attnfuzz.declaration import Declaration
from attnfuzz.problems.supports import OptionValue

__all__ = [
    "FEATURES",
    "Configuration",
    "Measurements",
    "Tuning",
    "configurations",
    "features_of",
    "measure_batches",
    "tune",
    "tuning_batches",
]


_LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """``options``: values to try in place of all that are declared. ``seconds``: of one measurement."""

    options: Mapping[str, tuple[OptionValue, ...]]
    features: tuple[str, ...]
    max_batches: int = 40
    max_configurations: int = 48
    max_leaves: int = 8
    l2: L2State = "cold"
    seconds: float = 0.02
    budget_s: float = float("inf")


def tune(
    process: Measures, kernel: Declaration, plan: Tuning, note: Callable[[str], None] = lambda _: None
) -> tuple[Tuned, Measurements]:
    """Measure and grow. Raises ValueError for a kernel that cannot be tuned, or of which nothing ran."""
    for name in plan.options:
        if name not in kernel.options:
            known = ", ".join(kernel.options) or "none"
            raise ValueError(f"--option {name}: {kernel.target} has no such option; it has {known}")
    candidates = configurations(kernel.options, plan.options, plan.max_configurations)
    if len(candidates) < 2:
        raise ValueError(f"{kernel.target} has only one configuration, so there is nothing to choose; declare options")
    measured = measure_batches(
        process,
        kernel,
        candidates,
        _batches(process.machine.device, kernel, plan.max_batches),
        l2=plan.l2,
        seconds=plan.seconds,
        budget_s=plan.budget_s,
        note=note,
    )
    if not measured.samples:
        raise ValueError(f"no configuration of {kernel.target} ran on any batch; try it with attnfuzz bench kernels")
    samples, kept = measured.samples, measured.configurations
    node = grow_tree(samples, plan.features, kept, max_leaves=plan.max_leaves, least_gain=_LEAST_GAIN)
    tuned = Tuned(
        kernel=kernel.target,
        device=process.machine.name,
        versions=process.machine.versions,
        batches=len(samples),
        configurations=len(candidates),
        regret=regret(samples, kept, node),
        regret_of_one=regret(samples, kept, grow_tree(samples, plan.features, kept, max_leaves=1)),
        regret_unseen=cross_validated_regret(
            samples, plan.features, kept, max_leaves=plan.max_leaves, least_gain=_LEAST_GAIN
        ),
        features=plan.features,
        tree=node,
    )
    return tuned, measured


def _batches(device: str, kernel: Declaration, count: int) -> list[Shape]:
    """Tiny ones where Triton's interpreter has to get through them."""
    batches = tuning_batches(str(kernel.problem), count)
    if device == "cuda":
        return batches
    return [shape for shape in smoke_suite() if kernel.problem in PROBLEMS_OF[shape.kind]][:count]


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
    process: Measures,
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
    bench = _Bench(process, kernel, l2, seconds)
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
    def __init__(self, process: Measures, kernel: Declaration, l2: L2State, seconds: float) -> None:
        self._process = process
        self._kernel = kernel
        self._l2: L2State = l2
        self._seconds = seconds
        self._wrong: list[tuple[Configuration, str]] = []

    def wrong_of(self, candidates: Sequence[Configuration]) -> dict[int, str]:
        """Which of ``candidates`` have been wrong, and what was said of them."""
        return {candidates.index(one): why for one, why in self._wrong}

    def time(self, configuration: Configuration, shape: Shape) -> float:
        """Microseconds under a CUDA graph if that can be, eager otherwise; infinite if it does not run."""
        in_graph = self._kernel.supports.graph_replay and self._process.machine.device == "cuda"
        request = MeasureRequest(
            contender=self._kernel.target,
            shape=shape,
            options=configuration,
            l2=(self._l2,),
            modes=("graph",) if in_graph else ("eager",),
            seconds=self._seconds,
        )
        try:
            reply = self._process.measure(request)
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


FEATURES = ("batch", "max_seq_len", "heads_per_group", "head_size", "max_query_len", "total_tokens")
"""What a decision may depend on. All but the last are known to the host when a CUDA graph is captured."""

_HEADS = ((32, 8, 128), (12, 2, 128), (28, 4, 128), (32, 8, 64), (64, 8, 128))
"""Query heads, KV heads and head size, the most usual first."""

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_MEDIAN_LENGTHS = (128, 512, 2048, 8192, 32768)
_MOST_TOKENS = 1 << 19
"""In a batch: 2 GiB of keys and values with 8 KV heads of 128."""

_PROMPTS = (64, 512, 2048)
_TOKENS_TO_MERGE = (64, 256, 1024, 4096, 16384)


def tuning_batches(problem: str, count: int, seed: int = 0) -> list[Shape]:
    """``count`` batches of different kinds, in an order in which the first few are as different as they can be.

    Raises ValueError for a problem that has none.
    """
    if problem == "merge_states":
        shapes = [
            Shape(label=f"merge {tokens}x{heads}x{size}", num_q_heads=heads, head_size=size, num_tokens=tokens)
            for heads, _, size in _HEADS
            for tokens in _TOKENS_TO_MERGE
        ]
    elif problem in ("paged_decode", "dense_decode"):
        shapes = _decode(seed)
    elif problem == "paged_attention":
        shapes = _decode(seed) + _mixed(seed)
    else:
        raise ValueError(f"problem={problem!r} is not tuned; name a kernel of paged_decode, dense_decode, "
                         "paged_attention or merge_states")  # fmt: skip
    return random.Random(seed).sample(shapes, min(count, len(shapes)))


def features_of(shape: Shape) -> dict[str, int]:
    """The numbers of ``FEATURES``; of a merge, its tokens are the batch."""
    if shape.kind == "merge":
        return dict(zip(FEATURES, (shape.num_tokens, 1, 1, shape.head_size, 1, shape.num_tokens), strict=True))
    numbers = (
        len(shape.seq_lens),
        shape.longest,
        shape.num_q_heads // shape.num_kv_heads,
        shape.head_size,
        max(shape.queries),
        sum(shape.seq_lens),
    )
    return dict(zip(FEATURES, numbers, strict=True))


def _decode(seed: int) -> list[Shape]:
    rng = random.Random(seed)
    shapes = []
    for heads in _HEADS:
        for batch in _BATCHES:
            for median in _MEDIAN_LENGTHS:
                lengths = ragged_lengths(rng, batch, median)
                if sum(lengths) <= _MOST_TOKENS:
                    shapes.append(_shape("decode", heads, lengths, median))
    return shapes


def _mixed(seed: int) -> list[Shape]:
    """Prompts alone, and beside as many sequences that go on by a token."""
    rng = random.Random(seed + 1)
    shapes = []
    for heads in _HEADS:
        for batch in _BATCHES[:5]:
            for median in _PROMPTS:
                prompts = ragged_lengths(rng, batch, median)
                going_on = ragged_lengths(rng, batch, 4 * median)
                shapes.append(_shape("prompts", heads, prompts, median, prompts))
                queries = prompts + [1] * batch
                shapes.append(_shape("mixed", heads, prompts + going_on, median, queries))
    return shapes


def _shape(
    kind: str, heads: tuple[int, int, int], lengths: Sequence[int], median: int, queries: Sequence[int] = ()
) -> Shape:
    num_q_heads, num_kv_heads, head_size = heads
    return Shape(
        label=f"{kind} {num_q_heads}/{num_kv_heads}x{head_size} {len(lengths)}x~{median}",
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        seq_lens=tuple(lengths),
        query_lens=tuple(queries),
    )
