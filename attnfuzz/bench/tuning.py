"""Chooses a kernel's options by measuring them over ragged batches, as servers have them. Torch-free."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf, prod

from attnfuzz.bench.kernels.run import Crashed, TimingProcess
from attnfuzz.bench.kernels.shapes import (
    PROBLEMS_OF,
    L2State,
    MeasureRequest,
    Shape,
    attention,
    ragged_lengths,
    smoke_suite,
)
from attnfuzz.bench.tuning_record import Batch, Configuration, Record
from attnfuzz.declaration import Declaration
from attnfuzz.problems.supports import OptionValue

ValuesToTry = Mapping[tuple[str, ...], tuple[tuple[OptionValue, ...], ...]]
"""Values to try, by the names of the options that take them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """``options``: values to try in place of all that are declared. ``seconds``: of one measurement."""

    options: ValuesToTry
    max_batches: int = 40
    max_configurations: int = 48
    l2: L2State = "cold"
    seconds: float = 0.02
    budget_s: float = inf


_SCREENED = 6
"""Batches to grow on, on which all configurations are measured."""

_NEAR = 1.1
"""How near to the best of a screened batch a configuration must come to be measured on the others to grow on."""

_MOST_KEPT = 12
_NOT_GROWN_ON = 7
"""Every so many batches one is kept to show what the tree is worth, and all with heads that it has not seen; of a
handful none is."""


def configurations(
    declared: Mapping[str, tuple[OptionValue, ...]], asked: ValuesToTry, most: int
) -> tuple[Configuration, list[Configuration]]:
    """The kernel's default configuration, and those to try in its place.

    That is all combinations of the declared choices, or of those asked for; if they are more than ``most``, a part of
    them, with the first one. What is asked for with one value is fixed, in the default too, and no part of the choice.
    """
    groups = dict.fromkeys(next((names for names in asked if name in names), (name,)) for name in declared)
    choices = {names: asked.get(names, tuple((value,) for value in declared[names[0]])) for names in groups}
    default = {name: values[0] for name, values in declared.items()}
    for names, values in choices.items():
        if len(values) == 1:
            default |= dict(zip(names, values[0], strict=True))
    varied = {names: values for names, values in choices.items() if len(values) > 1}
    names = tuple(itertools.chain(*varied))
    total = prod(map(len, varied.values()))
    wanted = set(range(total) if total <= most else [0, *random.Random(0).sample(range(1, total), most - 1)])
    found = [
        dict(zip(names, itertools.chain(*chosen), strict=True))
        for place, chosen in enumerate(itertools.product(*varied.values()))
        if place in wanted
    ]
    return default, found


def tune(
    process: TimingProcess,
    kernel: Declaration,
    plan: Tuning,
    note: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> Record:
    """Measure, until ``stopped`` or the budget is spent; then no batch is begun.

    Raises ValueError for a kernel that cannot be tuned.
    """
    for name in itertools.chain(*plan.options):
        if name not in kernel.options:
            known = ", ".join(kernel.options) or "none"
            raise ValueError(f"--option {name}: {kernel.target} has no such option; it has {known}")
    default, candidates = configurations(kernel.options, plan.options, plan.max_configurations)
    if len(candidates) < 2:
        raise ValueError(f"{kernel.target} has only one configuration, so there is nothing to choose; declare options")
    on_gpu = process.machine.device == "cuda"
    shapes = tuning_batches(str(kernel.problem), plan.max_batches)
    if not on_gpu:  # tiny ones, since Triton's interpreter has to get through them
        shapes = [one for one in smoke_suite() if kernel.problem in PROBLEMS_OF[one.kind]][: plan.max_batches]
    started, until = datetime.now(UTC).isoformat(timespec="seconds"), clock() + plan.budget_s
    unchosen = next((i for i, one in enumerate(candidates) if default | one == default), len(candidates))
    wrong: dict[int, str] = {}

    def request(i: int, shape: Shape) -> MeasureRequest:
        return MeasureRequest(
            contender=kernel.target,
            shape=shape,
            options=default | dict(*candidates[i : i + 1]),
            l2=(plan.l2,),
            modes=("graph",) if kernel.supports.graph_replay and on_gpu else ("eager",),
            seconds=plan.seconds,
        )

    def microseconds(i: int, shape: Shape) -> float:
        """The time of a configuration, or else the default; infinite if it does not run, or was wrong on some batch."""
        if i in wrong:
            return inf
        try:
            reply = process.measure(request(i, shape))
        except Crashed as how:
            wrong[i] = str(how)
            return inf
        if reply.status == "wrong":
            wrong[i] = reply.note
        return reply.times[0].median_us if reply.times else inf

    if on_gpu:
        note(f"compiling {len(candidates)} configurations")
        of_all = [request(i, shape) for shape in _to_compile(shapes) for i in {unchosen, *range(len(candidates))}]
        process.compile_ahead(of_all, plan.budget_s / 2)
    alive: Sequence[int] = range(len(candidates))
    rows: list[dict[int, float]] = []
    measured: list[tuple[Shape, bool, float, dict[int, float]]] = []
    for place, shape in enumerate(shapes):
        if place and (stopped() or clock() > until):
            break
        heads_are_kept_back = (shape.num_q_heads, shape.num_kv_heads) == _HEADS_KEPT_BACK
        grown_on = len(shapes) < _NOT_GROWN_ON or not (heads_are_kept_back or (place + 1) % _NOT_GROWN_ON == 0)
        if grown_on and len(rows) == _SCREENED:
            alive = _good(alive, rows)
            note(f"{len(alive)} of {len(candidates)} configurations are measured on all batches to grow on")
        times = {i: microseconds(i, shape) for i in (alive if grown_on else range(len(candidates)))}
        rows += [times] if grown_on else []
        usual = times[unchosen] if unchosen in times else microseconds(unchosen, shape)
        measured.append((shape, grown_on, usual, times))
        best = min(times, key=lambda i: times[i])
        kept_back = "" if grown_on else ", not to grow on"
        note(f"{shape.label}{kept_back}: {times[best]:.1f} us with {candidates[best]}; {usual:.1f} us by default")
    return Record(
        started=started,
        machine=process.machine,
        l2=plan.l2,
        default=default,
        configurations=tuple(candidates),
        batches=tuple(
            Batch(
                shape=shape,
                grown_on=grown_on,
                default_us=_or_none(usual),  # what was wrong anywhere counts nowhere
                times_us=tuple(_or_none(inf if i in wrong else times.get(i, inf)) for i in range(len(candidates))),
            )
            for shape, grown_on, usual, times in measured
        ),
        wrong=tuple(([*candidates, default][i], why) for i, why in wrong.items()),
        unreached=len(shapes) - len(measured),
    )


def _or_none(taken: float) -> float | None:
    return float(f"{taken:.5g}") if taken < inf else None


def _by_heads(shapes: Iterable[Shape]) -> Iterable[list[Shape]]:
    found: dict[tuple[int, int, int], list[Shape]] = {}
    for shape in shapes:
        found.setdefault((shape.num_q_heads, shape.num_kv_heads, shape.head_size), []).append(shape)
    return found.values()


def _to_compile(shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes with which all is compiled, or nearly: that depends on heads, and on whether sequences are cut."""
    return [
        end(alike, key=lambda one: one.longest / max(1, len(one.seq_lens)))
        for alike in _by_heads(shapes)
        for end in (min, max)
    ]


def _good(alive: Sequence[int], rows: Sequence[Mapping[int, float]]) -> list[int]:
    """The configurations near the best of some batch, the most often near ones if they are too many; in their old
    order.

    All of them where none ran.
    """
    near = {i: sum(row.get(i, inf) <= _NEAR * min(row.values()) < inf for row in rows) for i in alive}
    best = sorted((i for i in alive if near[i]), key=lambda i: -near[i])[:_MOST_KEPT]
    return sorted(best or alive)


_HEADS = ((32, 8, 128), (12, 2, 128), (28, 4, 128), (32, 8, 64), (64, 8, 128))
"""Query heads, KV heads and head size, the most usual first."""

_HEADS_KEPT_BACK = (12, 2)

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_MEDIAN_LENGTHS = (128, 512, 2048, 8192, 32768)
_MOST_TOKENS = 1 << 19
"""In a batch: 2 GiB of keys and values with 8 KV heads of 128."""

_PROMPTS = (64, 512, 2048)
_TOKENS_TO_MERGE = (64, 256, 1024, 4096, 16384)


def tuning_batches(problem: str, count: int) -> list[Shape]:
    """``count`` batches of different kinds, in an order in which the first few are as different as they can be.

    Raises ValueError for a problem that has none.
    """
    merges = [
        Shape(label=f"merge {tokens}x{heads}x{size}", num_q_heads=heads, head_size=size, num_tokens=tokens)
        for heads, _, size in _HEADS
        for tokens in _TOKENS_TO_MERGE
    ]
    shapes = [one for one in (*_decode(), *_mixed(), *merges) if problem in PROBLEMS_OF[one.kind]]
    if not shapes:
        raise ValueError(f"problem={problem!r} is not tuned; name a kernel of paged_decode, dense_decode, "
                         "paged_attention or merge_states")  # fmt: skip
    in_turn = itertools.chain(*itertools.zip_longest(*_by_heads(random.Random(0).sample(shapes, len(shapes)))))
    return [shape for shape in in_turn if shape is not None][:count]


def _decode() -> list[Shape]:
    rng, points = random.Random(0), itertools.product(_HEADS, _BATCHES, _MEDIAN_LENGTHS)
    shapes = [_shape("decode", heads, ragged_lengths(rng, batch, median), median) for heads, batch, median in points]
    return [one for one in shapes if sum(one.seq_lens) <= _MOST_TOKENS]


def _mixed() -> list[Shape]:
    """Prompts alone, and beside as many sequences that go on by a token."""
    rng = random.Random(1)
    shapes = []
    for heads, batch, median in itertools.product(_HEADS, _BATCHES[:5], _PROMPTS):
        prompts = ragged_lengths(rng, batch, median)
        going_on = ragged_lengths(rng, batch, 4 * median)
        shapes.append(_shape("prompts", heads, prompts, median, prompts))
        shapes.append(_shape("mixed", heads, prompts + going_on, median, prompts + [1] * batch))
    return shapes


def _shape(
    kind: str, heads: tuple[int, int, int], lengths: Sequence[int], median: int, queries: Sequence[int] = ()
) -> Shape:
    q_heads, kv_heads, size = heads
    label = f"{kind} {q_heads}/{kv_heads}x{size} {len(lengths)}x~{median}"
    return attention(label, q_heads, kv_heads, tuple(lengths), head_size=size, query_lens=tuple(queries))
