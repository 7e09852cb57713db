"""From what the user asked for to a running campaign: device, kernels, workers."""

from __future__ import annotations

import math
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import cast

import msgspec

from attnfuzz.campaign.calibration import PROBE_KERNEL, Choice, ProbeLoad, by_formula, calibrate, cores
from attnfuzz.campaign.checkpoints import Checkpoints
from attnfuzz.campaign.coordinator import Coordinator, Plan
from attnfuzz.campaign.duration import format_duration
from attnfuzz.campaign.inference import Inferred, infer, with_declared
from attnfuzz.campaign.interrupts import Interrupts
from attnfuzz.campaign.journal import JournalFolder
from attnfuzz.campaign.memory_limit import memory_limit
from attnfuzz.campaign.messages import Setup
from attnfuzz.campaign.reporter import ForgivingReporter, Reporter
from attnfuzz.campaign.request import Request
from attnfuzz.campaign.result import CampaignResult, Statistics
from attnfuzz.campaign.resuming import asked_of
from attnfuzz.campaign.shared import SharedFindings
from attnfuzz.campaign.sharing import Exchange
from attnfuzz.campaign.state import FOLDER, StateFile
from attnfuzz.campaign.worker_process import WorkerProcess
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.execution.builds import BUILD_PATIENCE_S
from attnfuzz.execution.claims import PrivateFolder
from attnfuzz.execution.devices import DeviceLease, Gpu, find_gpus
from attnfuzz.execution.outcomes import DeadlinePassed, ExecutorUnavailable, ServiceError
from attnfuzz.execution.runner import Runner
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, ORACLES, OracleName
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import dtypes_of, head_sizes_of, options_of
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.where import alternatives
from attnfuzz.project import project_root

__all__ = [
    "Request",
    "asked_oracles",
    "choose_workers",
    "have_built",
    "infer_contracts",
    "load_searchable",
    "run_campaign",
    "within_contracts",
]

_ALWAYS_ON = ("crash", "hang")
_BUILDING_TIMEOUT_S = {"cpu": 5.0, "cuda": 20.0}
"""Of a case that is run for what it builds, which itself has all the time it needs."""
_MOST_BUILT = 32
_SHORTEST_BUILD_S = 1.0
"""What seems to be one and takes less is the inaccuracy of what Triton tells and of when processes are looked at."""
_MOST_START_UP_S = 300.0
"""Of the workers: if none is ready by then, the budget begins all the same, so that a campaign ends."""
_ONLY_GPU = Gpu("")
"""Where torch finds one and nvidia-smi is not there: it needs no pinning."""


def run_campaign(request: Request, reporter: Reporter, *, state_folder: Path = FOLDER) -> CampaignResult:
    """Run a campaign to its end, which a signal may bring about. ``state_folder``: for its state and journals.

    Raises, before it begins, KernelLoadError, ExecutorUnavailable, StateError for a campaign that cannot be resumed
    like this, and Interrupted.
    """
    reporter = ForgivingReporter(reporter)
    with (
        Interrupts(raising=True) as interrupts,
        StateFile(state_folder) as state_file,
        Runner(device=request.device, python=None if request.python is None else request.python.path) as runner,
        JournalFolder(state_folder) as journal,
    ):
        declarations = _load_asked(runner, request, note=reporter.note)
        if request.verifying:
            _check_one(declarations, request.kernels)
        have_built(runner, declarations, reporter.note)
        inferred = []
        if not request.pedantic:
            inferred = infer_contracts(runner, declarations, reporter.note, verifying=request.verifying)
        declarations = within_contracts(declarations, inferred)
        if request.resume is not None:
            request.resume.check_kernels(declarations)
        _say_what_was_left(request, journal, state_file, reporter)
        gpus = (find_gpus() or [_ONLY_GPU]) if runner.device == "cuda" else []
        choice = choose_workers(request, runner, gpus)
        plan = _plan(request, runner, declarations, journal, state_file, gpus=gpus, workers=choice)
        scratch = _scratch()

        def launch(setup: Setup) -> WorkerProcess:
            return WorkerProcess(setup, runner.zygote, scratch.path)

        with _exchange(request.shared, declarations) as exchange:
            coordinator = Coordinator(plan, launch=launch, reporter=reporter, exchange=exchange)
            result = coordinator.run(interrupts)
        result = replace(result, inferred=tuple(one for one in inferred if one.left_out or one.stricter))
        journal.keep = coordinator.has_lost_device
        scratch.remove()
    if state_file.has_state:
        left = format_duration(plan.statistics.remaining_s())
        where = [] if request.python is None else ["--python", str(request.python.path)]
        command = shlex.join(["attnfuzz", "explore", "--resume", *where])
        reporter.note(f"{command} goes on from here ({left} of the budget left)")
    return result


def _check_one(declarations: Sequence[Declaration], named: Sequence[str]) -> None:
    """Raise KernelLoadError for several kernels where one is to be verified."""
    if len(declarations) > 1:
        names = ", ".join(declaration.name for declaration in declarations)
        raise KernelLoadError(
            f"{' '.join(named)} names {len(declarations)} kernels ({names}), and one is verified at a time; "
            "name it as FILE:NAME"
        )


def _load_asked(runner: Runner, request: Request, *, note: Callable[[str], None]) -> list[Declaration]:
    if request.trust:
        return load_searchable(runner, request.kernels, note=note)
    try:
        return load_searchable(runner, request.kernels, within=project_root(), note=note)
    except KernelLoadError as error:
        names = shlex.join(request.kernels)
        raise KernelLoadError(
            f"{FOLDER / 'state.json'}: {error}, or name the kernels yourself: attnfuzz explore {names} --resume"
        ) from error


def load_searchable(
    runner: Runner,
    targets: tuple[str, ...],
    *,
    within: Path | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Declaration]:
    """The kernels that ``targets`` name, each once and prepared, so that no worker does it again.

    ``within``: the root of the project that they must lie in, where not the user but a file names them. Raises
    KernelLoadError, also where no case can be drawn for one.
    """
    distinct = {declaration.target: declaration for declaration in runner.declarations(targets, within=within)}
    for declaration in distinct.values():
        try:
            simplest_case(declaration.problem, declaration.supports, declaration.options)
        except ValueError as error:
            raise KernelLoadError(f"no case fits what {declaration.target} declares: {error}") from error
    if unready := [declaration.target for declaration in distinct.values() if declaration.needs_preparing]:
        note(f"preparing {', '.join(unready)}")
    return runner.prepare(list(distinct.values()))


def have_built(runner: Runner, declarations: Sequence[Declaration], note: Callable[[str], None]) -> None:
    """Run kernels that compile themselves once, before many processes would compile the same at once.

    Whether a kernel does shows in its simplest case. If so, one is run of each dtype, head size and option as well: one
    after the other, since build tools that share a folder (FlashInfer's do) forget each other's results when they run
    at once. What a case comes to is left to the search. Bundled kernels are Triton's to compile.
    """
    runner.give_up_builds_at(time.monotonic() + BUILD_PATIENCE_S)
    for declaration in declarations:
        if ":" not in declaration.target:
            continue
        simplest, *others = _one_of_each(declaration)
        if _builds(runner, declaration, simplest):
            note(f"{declaration.target} compiles itself: building what it declares, one after the other")
            for case in others:
                _builds(runner, declaration, case)
    runner.give_up_builds_at(math.inf)


def infer_contracts(
    runner: Runner, declarations: Sequence[Declaration], note: Callable[[str], None], *, verifying: bool = False
) -> list[Inferred]:
    """What each kernel of the user takes where it declares nothing. Bundled kernels mean their defaults.

    ``verifying``: see `infer`.

    Several at once, each in a process of its own: on a GPU most probes are compiled first.
    """
    users = [declaration for declaration in declarations if ":" in declaration.target]
    over = threading.Event()

    def probe(declaration: Declaration) -> Inferred:
        with runner.sibling() as own:
            return infer(own, declaration, is_over=over.is_set, verifying=verifying)

    with ThreadPoolExecutor(max(1, min(len(users), cores()))) as pool:
        try:
            inferred = list(pool.map(probe, users))
        except BaseException:  # an interrupt, say: the other threads need not go on
            over.set()
            raise
    for one in inferred:
        if one.left_out:
            taken = f"what it was found to take, {one.text}"
            note(f"{one.target} is searched within {taken}; --pedantic searches everything")
    return inferred


def within_contracts(declarations: Sequence[Declaration], inferred: Sequence[Inferred]) -> list[Declaration]:
    """The kernels, those of ``inferred`` with what that says."""
    found = {one.target: one for one in inferred}
    return [
        with_declared(one, found[one.target].supports, found[one.target].numerics) if one.target in found else one
        for one in declarations
    ]


def _one_of_each(declaration: Declaration) -> list[Case]:
    """The simplest case of each combination of dtype, head size and options, up to a number, the simplest first."""
    supports, options = declaration.supports, declaration.options
    combinations = (
        (one, *values)
        for one in alternatives(supports)
        for values in product(
            dtypes_of(one),
            (None,) if one.leaves_open("head_sizes") else head_sizes_of(one, supports.dtypes[0]),
            product(*options_of(one, options).values()),
        )
    )
    cases = list[Case]()
    for alternative, dtype, size, chosen in islice(combinations, _MOST_BUILT):
        one = msgspec.structs.replace(alternative, dtypes=(dtype,), head_sizes=None if size is None else (size,))
        choices = {name: (choice,) for name, choice in zip(options, chosen, strict=True)}
        try:
            cases.append(simplest_case(declaration.problem, one, choices))
        except ValueError:  # the size does not go with any of the layouts
            continue
    return cases or [simplest_case(declaration.problem, supports, options)]


def _builds(runner: Runner, declaration: Declaration, case: Case) -> bool:
    """Whether the kernel starts a compiler for ``case``, and how the case ends does not matter."""
    try:
        verdict = runner.judge(
            declaration, case, timeout_s=_BUILDING_TIMEOUT_S[runner.device], thorough=False, relations=()
        )
    except (DeadlinePassed, ServiceError, CaseTooLarge):  # told when the search meets it
        return False
    return verdict.timing.built_s > _SHORTEST_BUILD_S


def choose_workers(request: Request, runner: Runner, gpus: Sequence[Gpu]) -> Choice:
    """As many as were asked for, or as many as make the campaign faster."""
    if request.workers is not None:
        return Choice(request.workers, "")
    if runner.device == "cpu":
        return by_formula(cores(), ())
    (probe,) = runner.declarations((PROBE_KERNEL,))
    pinned = DeviceLease(gpus[0].id).environment if len(gpus) > 1 else {}
    with ProbeLoad(probe, runner.zygote, device=runner.device, environment=pinned) as load:
        return calibrate(cores(), gpus, budget_s=request.budget_s, measure=load.measure)


def _say_what_was_left(request: Request, journal: JournalFolder, state_file: StateFile, reporter: Reporter) -> None:
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


def _plan(
    request: Request,
    runner: Runner,
    declarations: list[Declaration],
    journal: JournalFolder,
    state_file: StateFile,
    *,
    gpus: Sequence[Gpu],
    workers: Choice,
) -> Plan:
    statistics = _statistics(request, runner, declarations, num_gpus=len(gpus), workers=workers)
    parts = request.resume.parts if request.resume is not None else 0
    return Plan(
        statistics=statistics,
        oracles=asked_oracles(request.oracles),
        save_folder=request.save_folder,
        journal_folder=journal.path,
        fail_fast=request.fail_fast,
        tolerance=request.tolerance,
        memory_limit_bytes=memory_limit(runner.resident_bytes, device=runner.device, workers=statistics.workers),
        device_ids=tuple(gpu.id for gpu in gpus) if len(gpus) > 1 else (),
        checkpoints=Checkpoints(state_file, asked_of(request), parts=parts),
        resumed=request.resume,
    )


def _statistics(
    request: Request, runner: Runner, declarations: list[Declaration], *, num_gpus: int, workers: Choice
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
        against=request.against,
        python=request.python,
    )
    if request.resume is not None:
        request.resume.fill(statistics)
    return statistics


def asked_oracles(asked: tuple[str, ...]) -> tuple[OracleName, ...]:
    """Those that judge where a user has named some, or none: all of them then."""
    if not asked:
        return DEFAULT_ORACLES
    return cast(tuple[OracleName, ...], tuple(name for name in ORACLES if name in asked or name in _ALWAYS_ON))


def _exchange(url: str | None, declarations: list[Declaration]) -> AbstractContextManager[Exchange | None]:
    return SharedFindings(url, declarations) if url is not None else nullcontext()


def _scratch() -> PrivateFolder:
    try:
        return PrivateFolder()
    except OSError as error:
        raise ExecutorUnavailable(
            f"no temporary folder can be made ({error}); make room there, or name another with TMPDIR"
        ) from error
