"""Chooses a kernel's options by measuring them over ragged batches, as servers have them. Torch-free."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf, prod

import msgspec

from attnfuzz.bench.kernels.run import Crashed, Measures
from attnfuzz.bench.kernels.shapes import PROBLEMS_OF, L2State, MeasureRequest, Shape, ragged_lengths, smoke_suite
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


def tune(
    process: Measures,
    kernel: Declaration,
    plan: Tuning,
    note: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Record:
    """Measure, until ``stopped``. Raises ValueError for a kernel that cannot be tuned."""
    for name in itertools.chain(*plan.options):
        if name not in kernel.options:
            known = ", ".join(kernel.options) or "none"
            raise ValueError(f"--option {name}: {kernel.target} has no such option; it has {known}")
    default, candidates = configurations(kernel.options, plan.options, plan.max_configurations)
    if len(candidates) < 2:
        raise ValueError(f"{kernel.target} has only one configuration, so there is nothing to choose; declare options")
    return measure_batches(
        process,
        kernel,
        default,
        candidates,
        _batches(process.machine.device, kernel, plan.max_batches),
        l2=plan.l2,
        seconds=plan.seconds,
        budget_s=plan.budget_s,
        note=note,
        stopped=stopped,
    )


def _batches(device: str, kernel: Declaration, count: int) -> list[Shape]:
    """Tiny ones where Triton's interpreter has to get through them."""
    batches = tuning_batches(str(kernel.problem), count)
    if device == "cuda":
        return batches
    return [shape for shape in smoke_suite() if kernel.problem in PROBLEMS_OF[shape.kind]][:count]


_SCREENED = 6
"""Batches to grow on, on which all configurations are measured."""

_NEAR = 1.1
"""How near to the best of a screened batch a configuration must come to be measured on the others to grow on."""

_MOST_KEPT = 12
_NOT_GROWN_ON = 7
"""Every so many batches one is kept to show what the tree is worth, and all with heads that it has not seen."""


def configurations(
    declared: Mapping[str, tuple[OptionValue, ...]], asked: ValuesToTry, most: int
) -> tuple[Configuration, list[Configuration]]:
    """The kernel's default configuration, and those to try in its place.

    That is all combinations of the declared choices, or of those asked for; if they are more than ``most``, a part of
    them, with the first one. What is asked for with one value is fixed, in the default too, and no part of the choice.
    """
    groups = {name: next((names for names in asked if name in names), (name,)) for name in declared}
    choices = {
        names: asked.get(names, tuple((value,) for value in declared[names[0]]))
        for names in dict.fromkeys(groups.values())
    }
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


def measure_batches(
    process: Measures,
    kernel: Declaration,
    default: Configuration,
    candidates: Sequence[Configuration],
    shapes: Sequence[Shape],
    *,
    l2: L2State = "cold",
    seconds: float = 0.02,
    budget_s: float = inf,
    note: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> Record:
    """No batch is begun once the budget is spent, or it is ``stopped``."""
    started, until = datetime.now(UTC).isoformat(timespec="seconds"), clock() + budget_s
    bench = _Bench(process, kernel, default, l2, seconds)
    if process.machine.device == "cuda":
        note(f"compiling {len(candidates)} configurations")
        bench.compile([default, *candidates], shapes, budget_s / 2)
    alive: Sequence[int] = range(len(candidates))
    is_default = next((i for i, one in enumerate(candidates) if default | one == default), None)
    rows: list[dict[int, float]] = []
    batches: list[Batch] = []
    for place, shape in enumerate(shapes):
        if place and (stopped() or clock() > until):
            break
        grown_on = not _is_kept_back(place, shape, shapes)
        if grown_on and len(rows) == _SCREENED:
            alive = _good(alive, rows)
            note(f"{len(alive)} of {len(candidates)} configurations are measured on all batches to grow on")
        tried = alive if grown_on else range(len(candidates))
        times = {i: bench.time(candidates[i], shape) for i in tried}
        if grown_on:
            rows.append(times)
        usual = times[is_default] if is_default in times else bench.time(default, shape)
        batches.append(
            Batch(
                shape=shape,
                grown_on=grown_on,
                default_us=_or_none(usual),
                times_us=tuple(_or_none(times.get(i, inf)) for i in range(len(candidates))),
            )
        )
        best = min(times, key=lambda i: times[i])
        kept_back = "" if grown_on else ", not to grow on"
        note(f"{shape.label}{kept_back}: {times[best]:.1f} us with {candidates[best]}; {usual:.1f} us by default")
    wrong = [i for i, one in enumerate(candidates) if bench.is_wrong(one)]
    return Record(
        started=started,
        machine=process.machine,
        l2=l2,
        default=default,
        configurations=tuple(candidates),
        batches=tuple(_without(one, wrong) for one in batches),
        wrong=tuple(bench.wrong),
        unreached=len(shapes) - len(batches),
    )


def _is_kept_back(place: int, shape: Shape, shapes: Sequence[Shape]) -> bool:
    """Never the first, and nothing of a handful."""
    if len(shapes) < _NOT_GROWN_ON:
        return False
    return place % _NOT_GROWN_ON == _NOT_GROWN_ON - 1 or (shape.num_q_heads, shape.num_kv_heads) == _HEADS_KEPT_BACK


def _without(batch: Batch, wrong: Sequence[int]) -> Batch:
    """The results without configurations that were wrong anywhere: where these were right counts nowhere."""
    times = tuple(None if i in wrong else taken for i, taken in enumerate(batch.times_us))
    return msgspec.structs.replace(batch, times_us=times)


def _or_none(taken: float) -> float | None:
    return float(f"{taken:.5g}") if taken < inf else None


class _Bench:
    def __init__(
        self, process: Measures, kernel: Declaration, default: Configuration, l2: L2State, seconds: float
    ) -> None:
        self._process = process
        self._kernel = kernel
        self._default = default
        self._l2: L2State = l2
        self._seconds = seconds
        self.wrong: list[tuple[Configuration, str]] = []

    def is_wrong(self, configuration: Configuration) -> bool:
        """Whether it has been, on some batch."""
        return any(configuration == one for one, _ in self.wrong)

    def compile(self, tried: Sequence[Configuration], shapes: Sequence[Shape], seconds: float) -> None:
        """All that will be needed, or nearly: what is compiled depends on heads, and on whether sequences are cut."""
        alike: dict[tuple[int, int, int], list[Shape]] = {}
        for shape in shapes:
            alike.setdefault((shape.num_q_heads, shape.num_kv_heads, shape.head_size), []).append(shape)
        ends = [
            end(some, key=lambda shape: shape.longest / max(1, len(shape.seq_lens)))
            for some in alike.values()
            for end in (min, max)
        ]
        self._process.compile_ahead([self._request(one, shape) for shape in ends for one in tried], seconds)

    def time(self, configuration: Configuration, shape: Shape) -> float:
        """Microseconds under a CUDA graph if that can be, eager otherwise; infinite if it does not run."""
        if self.is_wrong(configuration):
            return inf
        try:
            reply = self._process.measure(self._request(configuration, shape))
        except Crashed as how:
            self.wrong.append((configuration, str(how)))
            return inf
        if reply.status == "wrong":
            self.wrong.append((configuration, reply.note))
        return reply.times[0].median_us if reply.times else inf

    def _request(self, configuration: Configuration, shape: Shape) -> MeasureRequest:
        in_graph = self._kernel.supports.graph_replay and self._process.machine.device == "cuda"
        return MeasureRequest(
            contender=self._kernel.target,
            shape=shape,
            options=self._default | configuration,
            l2=(self._l2,),
            modes=("graph",) if in_graph else ("eager",),
            seconds=self._seconds,
        )


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
    if problem == "merge_states":
        shapes = [
            Shape(label=f"merge {tokens}x{heads}x{size}", num_q_heads=heads, head_size=size, num_tokens=tokens)
            for heads, _, size in _HEADS
            for tokens in _TOKENS_TO_MERGE
        ]
    elif problem in ("paged_decode", "dense_decode"):
        shapes = _decode()
    elif problem == "paged_attention":
        shapes = _decode() + _mixed()
    else:
        raise ValueError(f"problem={problem!r} is not tuned; name a kernel of paged_decode, dense_decode, "
                         "paged_attention or merge_states")  # fmt: skip
    of_heads: dict[tuple[int, int, int], list[Shape]] = {}
    for shape in random.Random(0).sample(shapes, len(shapes)):
        of_heads.setdefault((shape.num_q_heads, shape.num_kv_heads, shape.head_size), []).append(shape)
    in_turn = itertools.chain(*itertools.zip_longest(*of_heads.values()))
    return [shape for shape in in_turn if shape is not None][:count]


def _decode() -> list[Shape]:
    rng = random.Random(0)
    shapes = []
    for heads in _HEADS:
        for batch in _BATCHES:
            for median in _MEDIAN_LENGTHS:
                lengths = ragged_lengths(rng, batch, median)
                if sum(lengths) <= _MOST_TOKENS:
                    shapes.append(_shape("decode", heads, lengths, median))
    return shapes


def _mixed() -> list[Shape]:
    """Prompts alone, and beside as many sequences that go on by a token."""
    rng = random.Random(1)
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
