"""From what the user asked for to a running campaign: device, kernels, workers."""

from __future__ import annotations

import difflib
import secrets
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnfuzz.campaign.coordinator import Coordinator
from attnfuzz.campaign.judge.journal import FOLDER, JournalFolder
from attnfuzz.campaign.judge.process_memory import memory_limit
from attnfuzz.campaign.messages import Setup
from attnfuzz.campaign.readiness import Readiness
from attnfuzz.campaign.request import CampaignRequest, asked_of, needs_save_folder
from attnfuzz.campaign.result import CampaignResult, Reporter, Statistics, forgiving
from attnfuzz.campaign.saved.state import StateFile, StateWriter
from attnfuzz.campaign.stopping import Interrupts, format_duration
from attnfuzz.campaign.workers import WorkerChoice, WorkerPool, WorkerProcess, by_formula, cores
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.environment import folder_of_compiled
from attnfuzz.isolation.claims import PrivateFolder
from attnfuzz.isolation.devices import Gpu, find_gpus, likely_device
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.own import OracleError
from attnfuzz.oracles.registry import ORACLES, OracleName
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.project import project_root

_MOST_START_UP_S = 300.0
"""Seconds after which the budget begins even if no worker is ready, so that a campaign ends."""
_START_UP_S = 6.0
"""Importing torch and the kernels. What takes longer, on a busy machine, is time that a person waits: it counts as
budget, as does asking what kernels take. Their own compilers' time does not."""
_SAY_AFTER_S = 10.0
_ONLY_GPU = Gpu("")
"""Where torch finds one and nvidia-smi is not there: it needs no pinning."""


def run_campaign(request: CampaignRequest, reporter: Reporter, *, state_folder: Path = FOLDER) -> CampaignResult:
    """Run a campaign to its end, which a signal may bring about. ``state_folder``: for its state and journals.

    Raises, before it begins, KernelLoadError, ExecutorUnavailable, StateError for a campaign that cannot be resumed
    like this, LinkError for a symbolic link in ``state_folder`` where one of its files goes, and Interrupted.
    """
    reporter = forgiving(reporter)
    python = None if request.python is None else request.python.path
    with (
        Interrupts(raising=True) as interrupts,
        StateFile(state_folder) as state_file,
        JournalFolder(state_folder) as journal,
        ExitStack() as entered,
    ):
        scratch = _scratch()
        entered.callback(scratch.remove)
        pool = entered.enter_context(WorkerPool(scratch.path))
        reporter.waiting("loading torch")
        likely = likely_device(request.device)
        found: list[Gpu] = []

        def prepare_workers() -> None:
            if likely == "cuda":  # asked while their memory is free
                found.extend(find_gpus() or [_ONLY_GPU])
            pool.prepare(by_formula(cores(), found).workers if request.workers is None else request.workers)

        def warm_workers(zygote: Zygote) -> None:
            if likely == "cuda":
                pool.warm(_device_ids(found) or ("",), zygote, request.kernels if request.trust else ())

        runner = entered.enter_context(
            Runner(
                device=request.device,
                python=python,
                meanwhile=prepare_workers,
                forked=warm_workers,
                **_ways(request),
            )
        )
        if runner.device != likely:  # theirs is a zygote that was given up
            pool.prepare(0)
        _ = runner.environment  # asked while the process that tells is not shared with code under test
        reporter.waiting(f"loading {' '.join(request.kernels)}")
        with _saying_what_is_imported(request, reporter):
            declarations = _load_asked(runner, request)
        _check_oracles(request.oracles, declarations)
        if request.verifying and len(declarations) > 1:
            names = ", ".join(declaration.name for declaration in declarations)
            raise KernelLoadError(
                f"{' '.join(request.kernels)} names {len(declarations)} kernels ({names}), and one is verified at a "
                "time; name it as FILE:NAME"
            )
        if request.resume is not None:
            request.resume.check_kernels(declarations)
        readiness = entered.enter_context(
            Readiness(
                runner,
                declarations,
                make_runner=lambda: Runner(device=runner.device, python=python, **_ways(request)),
                note=reporter.note,
                infers=not request.pedantic,
                verifying=request.verifying,
                asks_all=request.asks_first,
                patience_s=request.budget_s / 2,
            )
        )
        resident_bytes = runner.resident_bytes  # before its executor is handed on
        readiness.start()
        if request.asks_first:
            readiness.wait()
        _say_what_was_left(request, journal, state_file, reporter)
        if runner.device == "cuda":
            reporter.note(what_is_compiled(folder_of_compiled()))
        gpus = found if runner.device == "cuda" else []
        asked = request.workers
        choice = by_formula(cores(), gpus) if asked is None else WorkerChoice(asked, "")
        built_s = readiness.wait_for_first(reporter.waiting)
        statistics = _statistics(request, runner, readiness.declarations, num_gpus=len(gpus), workers=choice)
        if not request.asks_first:
            statistics.counts_from = request.started + _START_UP_S + built_s
        parts = request.resume.parts if request.resume is not None else 0
        pool.prepare(statistics.workers)

        def launch(setup: Setup) -> WorkerProcess:
            return pool.launch(setup, runner.zygote)

        coordinator = Coordinator(
            request,
            statistics,
            launch=launch,
            reporter=reporter,
            readiness=readiness,
            checkpoints=StateWriter(state_file, asked_of(request), parts=parts),
            journal_folder=journal.path,
            memory_limit_bytes=memory_limit(resident_bytes, device=runner.device, workers=statistics.workers),
            device_ids=_device_ids(gpus),
        )
        result = coordinator.run(interrupts)
        result = replace(result, inferred=readiness.inferred, never_returned=readiness.never_returned)
        journal.keep = coordinator.has_lost_device
    if state_file.has_state:
        left = format_duration(statistics.remaining_s())
        where = [] if python is None else ["--python", str(python)]
        where += ["--save-dir", str(request.save_folder)] if needs_save_folder(request) else []
        command = shlex.join(["attnfuzz", "explore", "--resume", *where])
        reporter.note(f"{command} goes on from here ({left} of the budget left)")
    return result


def _ways(request: CampaignRequest) -> dict[str, Any]:
    """Settings of runners that are not workers'."""
    return {"watching": request.verifying, "import_patience_s": request.import_patience_s}


def _check_oracles(names: Sequence[OracleName], kernels: Sequence[Declaration]) -> None:
    """Raise OracleError for one that neither attnfuzz has nor the file of any of the kernels."""
    known = [*ORACLES, *sorted({name for kernel in kernels for name in kernel.oracles})]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise OracleError(f"no oracle is called {name!r}; {hint}")


@contextmanager
def _saying_what_is_imported(request: CampaignRequest, reporter: Reporter) -> Iterator[None]:
    """Tell the user what nothing is heard of for long; another thread does, while this one waits for the import."""
    names = ", ".join(request.kernels)
    patience = format_duration(request.import_patience_s)
    said = f"{names} is still being imported; if it does nothing for {patience}, it is given up"
    timer = threading.Timer(_SAY_AFTER_S, reporter.note, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _load_asked(runner: Runner, request: CampaignRequest) -> list[Declaration]:
    if request.trust:
        return load(runner, request.kernels)
    try:
        return load(runner, request.kernels, within=project_root())
    except KernelLoadError as error:
        names = shlex.join(request.kernels)
        raise KernelLoadError(
            f"{FOLDER / 'state.json'}: {error}, or name the kernels yourself: attnfuzz explore {names} --resume"
        ) from error


def load(runner: Runner, targets: Sequence[str], *, within: Path | None = None) -> list[Declaration]:
    """The kernels that ``targets`` name, each once.

    ``within``: the root of the project that they must lie in, where not the user but a file names them. Raises
    KernelLoadError, also where no case can be drawn for one.
    """
    distinct = {declaration.target: declaration for declaration in runner.declarations(targets, within=within)}
    for declaration in distinct.values():
        try:
            simplest_case(declaration.problem, declaration.supports, declaration.options)
        except ValueError as error:
            raise KernelLoadError(f"no case fits what {declaration.target} declares: {error}") from error
    return list(distinct.values())


def load_searchable(runner: Runner, targets: Sequence[str]) -> list[Declaration]:
    """As `load`, and prepared, so that no process does it again."""
    return runner.prepare(load(runner, targets))


def _device_ids(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """The ids of the GPUs that workers are pinned to: none where there is but one."""
    return tuple(gpu.id for gpu in gpus) if len(gpus) > 1 else ()


def _say_what_was_left(
    request: CampaignRequest, journal: JournalFolder, state_file: StateFile, reporter: Reporter
) -> None:
    for folder in journal.left_over:
        reporter.note(
            f"an earlier campaign was killed while it judged the cases in {folder}; attnfuzz replay {folder} tells "
            "whether one of them was the cause, and removes those that pass"
        )
    journal.announced()
    if not state_file.is_usable:
        reporter.note(f"{FOLDER} cannot be written, or another campaign runs here: --resume will not know of this one")
    elif state_file.has_state and request.resume is None:
        reporter.note("an interrupted campaign was left here; this one replaces what --resume would have gone on with")


def what_is_compiled(folder: Path) -> str:
    """A sentence on where compiled kernels of a GPU are kept: with none, compilers take much of a minute."""
    if any(folder.glob("*/*.json")):  # of each kernel; what launches them has none, and is there by now
        return f"compiled kernels are kept in {folder}; TRITON_CACHE_DIR names another folder"
    return (
        f"no kernel has been compiled into {folder} yet; what is compiled there spares the next search the compilers, "
        "and TRITON_CACHE_DIR names another folder"
    )


def _statistics(
    request: CampaignRequest, runner: Runner, declarations: list[Declaration], *, num_gpus: int, workers: WorkerChoice
) -> Statistics:
    before_s = request.resume.elapsed_s if request.resume is not None else 0.0
    statistics = Statistics(
        kernels=Statistics.of_kernels(declarations),
        started=request.started - before_s,
        deadline=time.monotonic() + _MOST_START_UP_S + request.budget_s,
        budget_s=request.budget_s,
        device=runner.device,
        device_name=f"{num_gpus} x {runner.device_name}" if num_gpus > 1 else runner.device_name,
        workers=workers.workers,
        why_so_many=workers.reason,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        pedantic=request.pedantic,
        verifying=request.verifying,
        against=request.against,
        python=request.python,
        oracles=request.oracles,
    )
    if request.resume is not None:
        request.resume.fill(statistics)
    return statistics


def _scratch() -> PrivateFolder:
    try:
        return PrivateFolder()
    except OSError as error:
        raise ExecutorUnavailable(
            f"no temporary folder can be made ({error}); make room there, or name another with TMPDIR"
        ) from error
