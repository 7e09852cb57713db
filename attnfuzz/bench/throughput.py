"""Cases a second: a plain loop, one worker, all workers, more GPUs; all in one run, since only ratios compare."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from attnfuzz.bench.plain_loop import run_plain_loop
from attnfuzz.campaign.result import CampaignResult, Reporter, Statistics
from attnfuzz.campaign.startup import CampaignRequest, load_searchable, run_campaign
from attnfuzz.campaign.workers import cores
from attnfuzz.isolation.devices import find_gpus
from attnfuzz.judging.runner import Runner

__all__ = [
    "Measured",
    "MeasuredCampaign",
    "Setting",
    "ThroughputPlan",
    "confined_to",
    "find_setting",
    "measure_campaign",
    "measure_throughput",
    "share_of_cores",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPlan:
    """What to measure. ``workers``: one campaign for each, None for as many as a campaign would choose.

    ``gpus``: identifiers of the devices for campaigns on the first one of them, two, four and all, each with as many
    workers for a GPU as the campaign on all of them chose, and confined to its GPUs' share of the CPU cores: one GPU
    alone would take those of the others.
    """

    kernels: tuple[str, ...]
    device: str
    seconds: float
    warmup_s: float
    workers: tuple[int | None, ...] = (1, None)
    gpus: tuple[str, ...] = ()
    plain_loop: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement: what ran, its cases a second, and the campaign that tells more (None for the plain loop)."""

    name: str
    rate: float
    measured: MeasuredCampaign | None = None
    gpus: int = 1


def measure_throughput(plan: ThroughputPlan, report: Callable[[Measured], None]) -> list[Measured]:
    """Measure one after another; ``report`` gets each row as it is known."""
    rows: list[Measured] = []

    def add(row: Measured) -> None:
        rows.append(row)
        report(row)

    if plan.plain_loop:
        loop = run_plain_loop(plan.kernels, device=plan.device, seconds=plan.seconds, warmup_s=plan.warmup_s)
        add(Measured("plain Hypothesis loop, 1 process", loop.rate))
    on_all = _campaign(plan, None, gpus=len(plan.gpus)) if len(plan.gpus) > 1 else None
    per_gpu = None if on_all is None else max(1, _workers(on_all) // on_all.gpus)
    for workers in plan.workers:
        add(_campaign(plan, workers or per_gpu))
    for count in (2, 4):
        if per_gpu is not None and count < len(plan.gpus):
            add(_campaign(plan, per_gpu * count, gpus=count))
    if on_all is not None:
        add(on_all)
    return rows


def _campaign(plan: ThroughputPlan, workers: int | None, *, gpus: int = 1) -> Measured:
    share = share_of_cores(gpus, len(plan.gpus)) if len(plan.gpus) > 1 else None
    with nullcontext() if share is None else confined_to(share):
        measured = measure_campaign(
            plan.kernels,
            seconds=plan.seconds,
            warmup_s=plan.warmup_s,
            workers=workers,
            device=plan.device,
            environment={"CUDA_VISIBLE_DEVICES": ",".join(plan.gpus[:gpus])} if plan.gpus else {},
        )
    count = measured.result.statistics.workers
    name = f"campaign, {count} worker{'s' if count > 1 else ''}{' (auto)' if workers is None else ''}"
    if share is not None:
        name += f", {gpus} GPU{'s' if gpus > 1 else ''}, {len(share)} cores"
    return Measured(name, measured.rate, measured, gpus)


def _workers(row: Measured) -> int:
    return row.measured.result.statistics.workers if row.measured is not None else 1


@dataclass(frozen=True, slots=True)
class MeasuredCampaign:
    """A campaign and the part of it that counts: from the end of the warm-up to the last report.

    ``cases`` by target and ``seconds`` are those of that part; ``campaign_s`` includes the warm-up.
    """

    result: CampaignResult
    seconds: float
    cases: Mapping[str, int]
    campaign_s: float

    @property
    def rate(self) -> float:
        """Cases a second on all kernels."""
        return sum(self.cases.values()) / self.seconds if self.seconds > 0 else 0.0

    def rate_of(self, targets: Sequence[str]) -> float:
        """Cases a second on ``targets`` together."""
        return sum(self.cases.get(target, 0) for target in targets) / self.seconds if self.seconds > 0 else 0.0


def measure_campaign(
    kernels: Sequence[str],
    *,
    seconds: float,
    warmup_s: float,
    workers: int | None = None,
    device: str = "auto",
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
    watch: Reporter | None = None,
) -> MeasuredCampaign:
    """Run ``kernels`` for ``warmup_s`` and then ``seconds``, both from when the first case has been judged.

    Findings are saved nowhere. ``environment`` is set for the campaign's processes; ``watch`` hears of its progress.
    """
    progress = _Progress(warmup_s, seconds, watch or Reporter())
    with tempfile.TemporaryDirectory(prefix="attnfuzz-bench-") as folder, _environment(environment or {}):
        request = CampaignRequest(
            kernels=tuple(kernels),
            started=time.monotonic(),
            budget_s=warmup_s + seconds + _STARTUP_ALLOWANCE_S,
            save_folder=Path(folder),
            workers=workers,
            device=device,
            seed=seed,
        )
        result = run_campaign(request, progress)
    seconds_counted, cases = progress.counted()
    return MeasuredCampaign(result, seconds_counted, cases, campaign_s=warmup_s + seconds_counted)


_STARTUP_ALLOWANCE_S = 600.0
"""How long it may take until the first case is judged; from then on the deadline is known."""


class _Progress(Reporter):
    def __init__(self, warmup_s: float, seconds: float, watch: Reporter) -> None:
        self._warmup_s = warmup_s
        self._seconds = seconds
        self._watch = watch
        self._counting_from: float | None = None
        self._first = self._last = (0.0, dict[str, int]())

    def started(self, statistics: Statistics) -> None:
        self._watch.started(statistics)

    def progress(self, statistics: Statistics) -> None:
        now = time.monotonic(), {target: kernel.cases for target, kernel in statistics.kernels.items()}
        if self._counting_from is None and statistics.cases:
            self._counting_from = now[0] + self._warmup_s
            statistics.deadline = self._counting_from + self._seconds
        if self._counting_from is None or now[0] <= self._counting_from:
            self._first = now
        self._last = now
        self._watch.progress(statistics)

    def counted(self) -> tuple[float, dict[str, int]]:
        """Seconds and cases between the end of the warm-up and the last report."""
        (began, before), (ended, after) = self._first, self._last
        return ended - began, {target: count - before.get(target, 0) for target, count in after.items()}


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True)
class Setting:
    """``kernels`` by target. ``device`` is "cpu" or "cuda". ``gpus``: identifiers for CUDA_VISIBLE_DEVICES."""

    kernels: tuple[str, ...]
    device: str
    device_name: str
    cores: int
    gpus: tuple[str, ...] = ()


def find_setting(targets: tuple[str, ...], device: str) -> Setting:
    """Load the kernels that ``targets`` name, all bundled ones if none is named. Raises as a campaign would."""
    with Runner(device=device) as runner:
        declarations = load_searchable(runner, targets or ("*",))
        return Setting(
            kernels=tuple(one.target for one in declarations),
            device=runner.device,
            device_name=runner.device_name,
            cores=cores(),
            gpus=tuple(gpu.id for gpu in find_gpus()) if runner.device == "cuda" else (),
        )


_SYSTEM = Path("/sys/devices/system/cpu")


def share_of_cores(part: int, whole: int, system: Path = _SYSTEM) -> frozenset[int]:
    """``part`` of ``whole`` equal shares of the CPUs that this process may use, whole cores as far as possible.

    Two hardware threads of one core do little more than one of them, so a share must not have the cores of others to
    itself. ``system``: where Linux tells which threads share a core.
    """
    usable = os.sched_getaffinity(0)
    by_core = sorted(usable, key=lambda cpu: (min(_siblings(cpu, system) & usable), cpu))
    return frozenset(by_core[: max(1, len(by_core) * part // whole)])


@contextmanager
def confined_to(cpus: frozenset[int]) -> Iterator[None]:
    """Run this thread, and all processes that it starts meanwhile, on ``cpus`` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _siblings(cpu: int, system: Path) -> set[int]:
    """The CPUs that are threads of one core with ``cpu``, itself included; nothing but itself if that is unknown."""
    try:
        text = (system / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:  # containers may hide it
        return {cpu}
    ranges = [part.split("-") for part in text.strip().split(",")]
    return {cpu} | {one for ends in ranges for one in range(int(ends[0]), int(ends[-1]) + 1)}
