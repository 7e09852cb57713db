"""From what the user asked for to a running campaign: device, kernels, workers."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from attnfuzz.campaign.coordinator import Coordinator, Plan
from attnfuzz.campaign.journal import JournalFolder
from attnfuzz.campaign.messages import Setup
from attnfuzz.campaign.reporter import Reporter
from attnfuzz.campaign.result import CampaignResult, Statistics
from attnfuzz.campaign.shared import SharedFindings
from attnfuzz.campaign.sharing import Exchange
from attnfuzz.campaign.worker_process import WorkerProcess
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.execution.runner import Runner
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, ORACLES, OracleName
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["Request", "load_searchable", "number_of_workers", "run_campaign"]

_ALWAYS_ON = ("crash", "hang")
_MAX_GPU_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a campaign is asked to do.

    ``started`` is when the command began, on the monotonic clock; ``budget_s`` counts from there. ``workers`` and
    ``seed`` are chosen if None; without ``oracles`` all of them judge. ``shared`` is the address of a Redis server.
    """

    kernels: tuple[str, ...]
    started: float
    budget_s: float
    save_folder: Path
    workers: int | None = None
    device: str = "auto"
    seed: int | None = None
    oracles: tuple[str, ...] = ()
    fail_fast: bool = False
    tolerance: Tolerance = "bound"
    shared: str | None = None


def run_campaign(request: Request, reporter: Reporter) -> CampaignResult:
    """Run a campaign to its end. Raises KernelLoadError and ExecutorUnavailable before it begins."""
    with Runner(device=request.device) as runner, JournalFolder() as journal, _scratch() as scratch:
        declarations = load_searchable(runner, request.kernels)
        for folder in journal.left_over:
            reporter.note(f"a campaign was cut off while it judged a case: attnfuzz replay {folder}")
        plan = Plan(
            statistics=_statistics(request, runner, declarations),
            oracles=_oracles(request.oracles),
            save_folder=request.save_folder,
            journal_folder=journal.path,
            fail_fast=request.fail_fast,
            tolerance=request.tolerance,
        )

        def launch(setup: Setup) -> WorkerProcess:
            return WorkerProcess(setup, runner.zygote, Path(scratch))

        with _exchange(request.shared, declarations) as exchange:
            return Coordinator(plan, launch=launch, reporter=reporter, exchange=exchange).run()


def load_searchable(runner: Runner, targets: tuple[str, ...]) -> list[Declaration]:
    """The kernels that ``targets`` name, each once. Raises KernelLoadError, also where no case can be drawn for one."""
    distinct = {declaration.target: declaration for declaration in runner.declarations(targets)}
    for declaration in distinct.values():
        try:
            simplest_case(declaration.problem, declaration.supports, declaration.options)
        except ValueError as error:
            raise KernelLoadError(f"no case fits what {declaration.target} declares: {error}") from error
    return list(distinct.values())


def number_of_workers(asked: int | None, device: str) -> int:
    """``asked``, or one a CPU core; on a GPU no more than share it well."""
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores - 1, _MAX_GPU_WORKERS)) if device == "cuda" else cores


def _statistics(request: Request, runner: Runner, declarations: list[Declaration]) -> Statistics:
    return Statistics(
        kernels=Statistics.of_kernels(declarations),
        started=request.started,
        deadline=request.started + request.budget_s,
        device=runner.device,
        device_name=runner.device_name,
        workers=number_of_workers(request.workers, runner.device),
        seed=secrets.randbits(32) if request.seed is None else request.seed,
    )


def _oracles(asked: tuple[str, ...]) -> tuple[OracleName, ...]:
    if not asked:
        return DEFAULT_ORACLES
    return cast(tuple[OracleName, ...], tuple(name for name in ORACLES if name in asked or name in _ALWAYS_ON))


def _exchange(url: str | None, declarations: list[Declaration]) -> AbstractContextManager[Exchange | None]:
    return SharedFindings(url, declarations) if url is not None else nullcontext()


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="attnfuzz-", ignore_cleanup_errors=True)
