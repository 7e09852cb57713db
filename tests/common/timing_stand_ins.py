"""A process whose measurements the test makes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from attnfuzz.bench.kernels.run import TimingProcess
from attnfuzz.bench.kernels.shapes import MachineReply, MeasureReply, MeasureRequest, Timed, bytes_to_move
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Problem
from attnfuzz.problems.supports import Supports

SDPA = Declaration(
    name="torch:sdpa",
    target="torch:sdpa",
    problem="dense_decode",
    versions={"torch": "2.13"},
    options={"backend": ("default", "flash")},
)


class Pretended(TimingProcess):
    """A GPU that copies 1000 bytes a nanosecond; ``answer`` is asked for what each contender takes."""

    def __init__(self, answer: Callable[[MeasureRequest], MeasureReply]) -> None:
        ExitStack.__init__(self)
        self.machine = MachineReply(device="cuda", name="GPU <1>", l2_bytes=50 << 20, processors=132, capability=(9, 0))
        self.asked: list[MeasureRequest] = []
        self.compiled: list[MeasureRequest] = []
        self._answer = answer

    def copy(self, nbytes: int, seconds: float) -> Timed:
        del seconds
        return Timed(l2="cold", mode="graph", median_us=nbytes * 1e-6, p10_us=0, p90_us=0, samples=1, calls=1)

    def measure(self, request: MeasureRequest) -> MeasureReply:
        self.asked.append(request)
        return self._answer(request)

    def compile_ahead(self, requests: Sequence[MeasureRequest], seconds: float) -> None:
        del seconds
        self.compiled += requests


def times(request: MeasureRequest, factor: float) -> MeasureReply:
    """``factor`` times what a copy takes from memory in a graph, 10 microseconds more if eager."""
    found = []
    for mode in request.modes:
        for l2 in request.l2:
            median = factor * bytes_to_move(request.shape) * 1e-6 + (10 if mode == "eager" else 0)
            found.append(Timed(l2=l2, mode=mode, median_us=median, p10_us=median, p90_us=median, samples=10, calls=10))
    return MeasureReply(status="ok", times=tuple(found), error_ratio=0.5)


def declared(name: str, problem: Problem = "paged_decode", **options: tuple[int, ...]) -> Declaration:
    return Declaration(
        name=name, target=name, problem=problem, supports=Supports(graph_replay=True), options=dict(options)
    )
