"""Cases a second: a plain loop, one worker, all workers, more GPUs; all in one run, since only ratios compare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from attnfuzz.bench.campaigns import Measured, measure_campaign
from attnfuzz.bench.core_share import confined_to, share_of_cores
from attnfuzz.bench.plain_loop import run_plain_loop

__all__ = ["Row", "ThroughputPlan", "measure_throughput"]


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
class Row:
    """One measurement: what ran, its cases a second, and the campaign that tells more (None for the plain loop)."""

    name: str
    rate: float
    measured: Measured | None = None
    gpus: int = 1


def measure_throughput(plan: ThroughputPlan, report: Callable[[Row], None]) -> list[Row]:
    """Measure one after another; ``report`` gets each row as it is known."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        report(row)

    if plan.plain_loop:
        loop = run_plain_loop(plan.kernels, device=plan.device, seconds=plan.seconds, warmup_s=plan.warmup_s)
        add(Row("plain Hypothesis loop, 1 process", loop.rate))
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


def _campaign(plan: ThroughputPlan, workers: int | None, *, gpus: int = 1) -> Row:
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
    return Row(name, measured.rate, measured, gpus)


def _workers(row: Row) -> int:
    return row.measured.result.statistics.workers if row.measured is not None else 1
