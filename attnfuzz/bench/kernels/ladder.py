"""The figures of ``attnfuzz bench ladder``: which steps are timed on which suite, and in which order. Torch-free.

They are those of the documents that the bundled kernels are built after: arXiv 2511.11581 (figures 6 to 9), and the
notes on dense decode, PagedAttention, split-K and merging that docs/kernels.md names.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from attnfuzz.bench.kernels.measurements import L2State, MeasureRequest, Mode, Report, Result
from attnfuzz.bench.kernels.run import (
    Crashed,
    Measures,
    TimedEntry,
    TimingProcess,
    choices_of,
    measure_entries,
    timed_on,
)
from attnfuzz.bench.kernels.shapes import PROBLEMS_OF, SUITES, Shape, tiny
from attnfuzz.campaign.stopping import Interrupted
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.problems.supports import OptionValue

__all__ = [
    "FIGURES",
    "SUITES_OF_STEPS",
    "Builds",
    "Figure",
    "Step",
    "compile_ahead",
    "ladder_entries",
    "measure_ladder",
]


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel with the values of options to try, of which the fastest counts; the first declared of all others."""

    name: str
    kernel: str
    options: Mapping[str, tuple[OptionValue, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """``steps`` on the shapes of a suite. ``labels``: only those whose labels have this in them. ``together``: so many
    neighbours in the suite say something only beside each other."""

    suite: str
    steps: tuple[Step, ...]
    l2: L2State = "cold"
    modes: tuple[Mode, ...] = ("graph",)
    labels: str = ""
    together: int = 1

    def shapes(self) -> list[Shape]:
        """In the order in which they are measured: the ends first, then what lies between."""
        shapes = [shape for shape in SUITES[self.suite]() if self.labels in shape.label]
        groups = [shapes[i : i + self.together] for i in range(0, len(shapes), self.together)]
        return [shape for i in _ends_first(len(groups)) for shape in groups[i]]


SUITES_OF_STEPS = ("prompts", "half", "ragged")
"""Suites with 0, 50 and 100 % of decoding sequences."""

_FA3 = Step("FA3", "vllm:flash_attention_3", {"num_splits": (0,), "scheduled": (False, True)})
_FLASHINFER = Step("FlashInfer", "flashinfer:batch_decode", {"use_tensor_cores": (True,)})
_FLASHINFER_GRAPH = Step("FlashInfer", "flashinfer:batch_decode_graph", {"use_tensor_cores": (True,)})
_FLASHINFER_PREFILL = Step("FlashInfer", "flashinfer:batch_prefill")
_SDPA = Step("SDPA", "torch:sdpa")
_VARLEN = Step("torch varlen", "torch:varlen")

# A tile is a page of 16 until it is free; 16 rows are four query tokens of the four heads of a group.
_PAGE: dict[str, tuple[OptionValue, ...]] = {"block_m": (16,), "tile": (16,)}
_FREE: dict[str, tuple[OptionValue, ...]] = {"block_m": (16,), "tile": (64,), "num_splits": (1, 16)}
_CLIMB = (
    Step("naive", "paged_attention_naive", {"tile": (16,)}),
    Step("Q-Block", "paged_attention_q_block", _PAGE),
    Step("segments", "paged_attention_segments", {**_PAGE, "num_splits": (4, 16)}),
    Step("free tile", "paged_attention_segments", _FREE),
    Step("static grid", "paged_attention_static", _FREE),
    Step("tuned", "paged_attention_auto"),
)
_GROUPED = Step("grouped", "paged_grouped_auto")

FIGURES = (
    *(Figure(suite=suite, steps=(*_CLIMB, _GROUPED, _FA3, _FLASHINFER_PREFILL, _VARLEN)) for suite in SUITES_OF_STEPS),
    Figure(
        suite="output",
        steps=(*_CLIMB, _GROUPED, _FA3, _FLASHINFER_GRAPH),
        modes=("eager", "graph"),
    ),
    Figure(
        suite="qwen",
        steps=(
            Step("dense", "dense_naive", {"tile": (64,)}),
            Step("simple", "paged_simple"),
            Step("paged", "paged_naive", {"tile": (32,)}),
            Step("v1", "paged_attention_v1"),
            Step("v2", "paged_attention_v2", {"partition_size": (512,)}),
            Step("split-K", "paged_split_k", {"tile": (32,), "num_splits": (8, 32)}),
            Step("split-K by rule", "paged_split_k_auto", {"tile": (32,)}),
            _GROUPED,
            _FA3,
            _FLASHINFER,
            _SDPA,
        ),
        l2="warm",
    ),
    Figure(suite="variety", steps=(_GROUPED, _CLIMB[5], _FA3, _FLASHINFER, _SDPA)),
    Figure(suite="padded", steps=(*_CLIMB[4:], _GROUPED, _FA3, _FLASHINFER_GRAPH), together=2),
    Figure(
        suite="merge",
        steps=(
            Step("PyTorch", "merge_states_eager"),
            Step("a program a head", "merge_states_triton"),
            Step("wide programs", "merge_states_wide"),
            Step("FlashInfer", "flashinfer:merge_state"),
            Step("vLLM", "vllm:merge_attn_states"),
        ),
        labels="head 128",
    ),
)


def ladder_entries(
    figures: Sequence[Figure], declarations: Mapping[str, Declaration], *, on_gpu: bool
) -> Iterator[TimedEntry]:
    """A shape of each figure by turns, so that a run that is cut has something of all.

    Steps without a declaration are left out. Without a GPU there are two tiny shapes a figure, launched one by one.
    """
    rounds = [
        [_of_shape(figure, shape, declarations, on_gpu=on_gpu) for shape in figure.shapes()[: None if on_gpu else 2]]
        for figure in figures
    ]
    for turn in itertools.zip_longest(*rounds, fillvalue=()):
        for entries in turn:
            yield from entries


def _of_shape(
    figure: Figure, shape: Shape, declarations: Mapping[str, Declaration], *, on_gpu: bool
) -> list[TimedEntry]:
    shape = shape if on_gpu else tiny(shape)
    return [
        TimedEntry(
            figure.suite,
            shape,
            timed_on(shape, kernel),
            kernel.target,
            bool(kernel.versions),
            choices_of(kernel.options, step.options),
            l2=(figure.l2,) if on_gpu else ("warm",),
            modes=figure.modes if on_gpu else ("eager",),
            step=step.name,
        )
        for step in figure.steps
        if (kernel := declarations.get(step.kernel)) is not None and kernel.problem in PROBLEMS_OF[shape.kind]
    ]


_MATRIX_SIZE, _SMALL_MATRIX_SIZE = 8192, 64


def measure_ladder(
    entries: Iterable[TimedEntry],
    process: Measures,
    engines: Sequence[Declaration],
    *,
    suites: tuple[str, ...],
    seconds: float,
    budget_s: float,
    report_row: Callable[[Result], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Measure ``entries`` until the budget is spent or a signal comes, and what a large product of matrices takes."""
    size = _MATRIX_SIZE if process.machine.device == "cuda" else _SMALL_MATRIX_SIZE
    product = process.product(size, seconds)
    report = measure_entries(
        entries,
        process,
        engines,
        suites=suites,
        seconds=seconds,
        budget_s=budget_s,
        with_copies=False,
        report_row=report_row,
        clock=clock,
    )
    return replace(report, peak_tflop_s=2 * size**3 / product.median_us * 1e-6)


_BUILDS_ITSELF = "flashinfer:"
"""Engines that compile C++ when they are first called, for up to a minute for each dtype and head size."""


def compile_ahead(process: TimingProcess, entries: Sequence[TimedEntry], *, seconds: float) -> None:
    """Call each of attnfuzz's own kernels once, for at most so many ``seconds``: one after the other takes minutes."""
    own = [request for entry in entries if not entry.is_reference for request in entry.requests(0)]
    process.check(own, seconds)


def _call_each(
    process: TimingProcess, requests: Sequence[MeasureRequest], stopped: Callable[[], bool]
) -> list[MeasureRequest]:
    """In a process beside; those that did not end it."""
    called = []
    with suppress(ExecutorUnavailable), TimingProcess(beside=process) as mine:  # the other may end before
        for request in requests:
            if stopped():
                break
            with suppress(Crashed):  # it will crash again when it is measured, and be told then
                mine.measure(request)
                called.append(request)
    return called


class Builds:
    """Has engines compile themselves in a process beside the measuring one, one build at a time as they need it.

    Their entries are put off until no build is under way: two at a time spoil each other's log. ``left_out``: how many
    of them had to be left out in the end.
    """

    def __init__(self, process: TimingProcess, entries: Sequence[TimedEntry]) -> None:
        self._entries = entries
        late = [request for entry in entries if _builds_itself(entry) for request in entry.requests(0)]
        late.sort(key=lambda one: (one.shape.num_tokens, sum(one.shape.seq_lens)))  # short ones disturb the least
        wanted = [next(same) for _, same in itertools.groupby(sorted(late, key=_object_of), _object_of)]
        wanted.sort(key=late.index)
        self.left_out = 0
        self._closed = threading.Event()
        self._built: set[str] = set()
        self._thread = threading.Thread(target=self._work, args=(process, wanted), daemon=True)
        if wanted:
            self._thread.start()

    def entries(self, *, last_start: float, last_end: float, stopped: Callable[[], bool]) -> Iterator[TimedEntry]:
        """All that can be measured. No build begins after ``last_start``, and none is waited for after ``last_end``,
        both in seconds of the monotonic clock, or once ``stopped``; what is not built by then is left out."""
        put_off = []
        for entry in self._entries:
            if not _builds_itself(entry) or self._has_built(entry):
                yield entry
            else:
                put_off.append(entry)
        while self._thread.is_alive() and time.monotonic() < last_end and not stopped():
            if time.monotonic() > last_start:
                self.close()
            with suppress(Interrupted):  # it is counted, and ``stopped`` says so in the next round
                self._thread.join(0.2)
        ready = [entry for entry in put_off if self._has_built(entry)]
        self.left_out = len(put_off) - len(ready)
        yield from ready

    def close(self) -> None:
        """Begin no other build."""
        self._closed.set()

    def _has_built(self, entry: TimedEntry) -> bool:
        return not self._thread.is_alive() and all(_object_of(one) in self._built for one in entry.requests(0))

    def _work(self, process: TimingProcess, wanted: Sequence[MeasureRequest]) -> None:
        self._built.update(map(_object_of, _call_each(process, wanted, self._closed.is_set)))


def _builds_itself(entry: TimedEntry) -> bool:
    return entry.contender.startswith(_BUILDS_ITSELF)


def _object_of(request: MeasureRequest) -> str:
    """What stands for the object that is compiled for it."""
    shape = request.shape
    sizes = (shape.dtype, shape.kv_dtype, shape.head_size, bool(shape.window), shape.kind)
    return repr((request.contender, request.options, sizes))


def _ends_first(count: int) -> list[int]:
    """All places below ``count``: the first, the last, the middle, the quarters, and so on."""
    found = dict.fromkeys(
        round(part * (count - 1) / parts) for parts in (1, 2, 4, 8, 16, 32) for part in range(parts + 1)
    )
    return [*found, *(i for i in range(count) if i not in found)]
