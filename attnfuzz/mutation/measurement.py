"""All mutants of some kernels, put to a killer side by side; what each came to, in the order of the mutants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnfuzz.campaign.judge.process_memory import memory_limit
from attnfuzz.campaign.startup import load_searchable
from attnfuzz.campaign.workers import cores
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.claims import PrivateFolder
from attnfuzz.isolation.outcomes import ExecutorUnavailable, ServiceError
from attnfuzz.judging.runner import DEFAULT_TIMEOUT_S, Runner
from attnfuzz.mutation.equivalents import EquivalentMutant, Equivalents, load_equivalents
from attnfuzz.mutation.hunting import CaseStream, Hunt, Hunter
from attnfuzz.mutation.killers import Command, CommandKiller, Killer, SearchKiller
from attnfuzz.mutation.mutants import Mutant, MutantOutcome, mutants_of
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.overlay import write_overlay
from attnfuzz.own_files import OwnFolder

_PATIENCE = 3.0
"""Times a case's usual limit, for kernels as they are: a machine that is busy is no reason to refuse them."""
_SLOWER = 20.0
_FIRST_OF_COMMANDS_S = 2.0
_LEAST_HANG_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantsRequest:
    """The mutants to measure. ``jobs``: None for one per CPU core. ``operators``, ``ids`` of mutants: all if empty.

    ``command`` takes the place of attnfuzz's search.
    ``budget_s`` is for one mutant, and for the kernels without one unless ``first_s`` or a ``command`` says otherwise.
    ``known``: what an earlier measurement, of ``earlier_s`` on ``earlier_device``, came to by id of the mutant; these
    are not put to the killer again. ``shard``: of that many equal parts of the mutants, only the one of this number,
    from 1 on, is put to it; what is known of the others is told all the same.
    """

    kernels: tuple[str, ...]
    budget_s: float = 30.0
    first_s: float | None = None
    jobs: int | None = None
    device: str = "auto"
    seed: int = 0
    operators: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    shard: tuple[int, int] = (1, 1)
    oracles: tuple[OracleName, ...] = DEFAULT_ORACLES
    command: str | None = None
    equivalents: Path | None = None
    known: Mapping[str, MutantOutcome] = field(default_factory=dict)
    earlier_s: float = 0.0
    earlier_device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMutants:
    """The outcome of each mutant; ``left`` have none yet. Of all mutants, and only then, ``stale`` are the equivalents
    that match none, and ``without_code`` the kernels none of whose code is Triton's."""

    request: MutantsRequest
    device: str
    device_name: str
    jobs: int
    kernels: tuple[Declaration, ...]
    outcomes: tuple[tuple[Mutant, MutantOutcome], ...]
    stale: tuple[EquivalentMutant, ...]
    without_code: tuple[Declaration, ...]
    seconds: float
    left: int = 0


OnOutcome = Callable[[Mutant, MutantOutcome], None]


def choose_mutants(runner: Runner, request: MutantsRequest) -> tuple[list[Declaration], list[Mutant]]:
    """The kernels asked for, and the mutants of their code. Raises KernelLoadError if there are none."""
    declarations = load_searchable(runner, request.kernels)
    mutants = mutants_of(declarations, device=runner.device)
    mutants = [one for one in mutants if not request.operators or one.operator in request.operators]
    if unknown := set(request.ids) - {one.id for one in mutants}:
        raise KernelLoadError(f"no mutant is called {min(unknown)!r}; attnfuzz mutants --list names those there are")
    mutants = [one for one in mutants if not request.ids or one.id in request.ids]
    if not mutants:
        names = ", ".join(declaration.name for declaration in declarations)
        asked = f" by {', '.join(request.operators)}" if request.operators else ""
        raise KernelLoadError(
            f"there is nothing to change{asked} in {names}: only Triton kernels in the kernel's own file and beside it "
            "are mutated"
        )
    return declarations, mutants


def in_shard(mutants: Sequence[Mutant], shard: tuple[int, int]) -> Sequence[Mutant]:
    """The mutants of the part ``(number, count)``, number from 1 on."""
    number, count = shard
    return mutants[number - 1 :: count]


def measure(
    request: MutantsRequest,
    *,
    note: Callable[[str], None] = lambda text: None,
    on_outcome: OnOutcome = lambda mutant, outcome: None,
    so_far: Callable[[MeasuredMutants], None] = lambda measured: None,
) -> MeasuredMutants:
    """Put every mutant to the search, or to the user's command. ``on_outcome`` gets each as soon as it is known, and
    ``so_far`` all that are.

    Raises KernelLoadError, also where the kernels fail without a mutant, and ExecutorUnavailable.
    """
    started = time.monotonic()
    with Runner(device=request.device) as runner, _scratch() as folder:
        if request.earlier_device not in ("", runner.device_name):
            raise KernelLoadError(
                f"what is to be resumed was measured on {request.earlier_device}, not {runner.device_name}; leave out "
                "--resume"
            )
        declarations, mutants = choose_mutants(runner, request)
        equivalents = load_equivalents(mutants, request.equivalents)
        jobs = request.jobs or cores()
        hunter = _hunter(request, runner, declarations, jobs=jobs)
        hunter = _first_without_mutant(hunter, mutants, _first_s(request), note)
        are_all = not request.operators and not request.ids
        stale = tuple(equivalents.stale(mutants)) if are_all else ()
        mutated = {declaration.target for mutant in mutants for declaration in mutant.kernels}
        found: dict[str, MutantOutcome] = {}

        def measured() -> MeasuredMutants:
            told = {**request.known, **found}  # what is known stays in the file, also if this is interrupted
            outcomes = tuple((mutant, told[mutant.id]) for mutant in mutants if mutant.id in told)
            return MeasuredMutants(
                request=request,
                device=runner.device,
                device_name=runner.device_name,
                jobs=jobs,
                kernels=tuple(declarations),
                outcomes=outcomes,
                stale=stale,
                without_code=tuple(one for one in declarations if are_all and one.target not in mutated),
                seconds=request.earlier_s + time.monotonic() - started,
                left=len(mutants) - len(outcomes),
            )

        def hear(mutant: Mutant, outcome: MutantOutcome) -> None:
            found[mutant.id] = outcome
            on_outcome(mutant, outcome)
            so_far(measured())

        waiting = []
        in_part = {one.id for one in in_shard(mutants, request.shard)}
        for mutant in mutants:
            if (outcome := _settled(mutant, request, equivalents)) is not None:
                hear(mutant, outcome)
            elif mutant.id in in_part:
                waiting.append(mutant)
        with _killer(request, hunter, mutants, folder, note) as killer:
            put_to(
                killer,
                waiting,
                folder=folder,
                jobs=jobs,
                on_outcome=hear,
            )
        return measured()


def put_to(killer: Killer, mutants: Sequence[Mutant], *, folder: Path, jobs: int, on_outcome: OnOutcome) -> None:
    """Give ``on_outcome`` what becomes of each mutant, ``jobs`` at a time; sources are copied to ``folder``."""

    def work(number: int, mutant: Mutant) -> MutantOutcome:
        try:
            return killer(mutant, _overlay_of(mutant, folder / str(number)))
        except ServiceError as error:  # of the framework: nothing is known of the mutant
            return MutantOutcome(status="error", detail=str(error))

    with _pool(jobs) as pool:
        futures = [pool.submit(work, number, mutant) for number, mutant in enumerate(mutants)]
        numbers = {future: number for number, future in enumerate(futures)}
        for future in as_completed(futures):
            on_outcome(mutants[numbers[future]], future.result())


def _settled(mutant: Mutant, request: MutantsRequest, equivalents: Equivalents) -> MutantOutcome | None:
    """The outcome of a mutant that need not be put to the killer: it is listed as equivalent, or known from before."""
    if (reason := equivalents.reason(mutant)) is not None:
        return MutantOutcome(status="equivalent", detail=reason)
    return request.known.get(mutant.id)


@contextmanager
def _pool(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for executors or commands; when interrupted, nothing more is begun."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _first_s(request: MutantsRequest) -> float:
    """How long the kernels are hunted without a mutant; for a command only to know how long a case may take."""
    if request.first_s is not None:
        return request.first_s
    return request.budget_s if request.command is None else min(request.budget_s, _FIRST_OF_COMMANDS_S)


def _hunter(request: MutantsRequest, runner: Runner, declarations: Sequence[Declaration], *, jobs: int) -> Hunter:
    return Hunter(
        zygote=runner.zygote,
        device=runner.device,
        streams={one.target: CaseStream(one, seed=request.seed, device=runner.device) for one in declarations},
        oracles=request.oracles,
        budget_s=request.budget_s,
        hang_s=_PATIENCE * DEFAULT_TIMEOUT_S[runner.device],
        memory_limit_bytes=memory_limit(runner.resident_bytes, device=runner.device, workers=jobs),
    )


def _first_without_mutant(
    hunter: Hunter, mutants: Sequence[Mutant], seconds: float, note: Callable[[str], None]
) -> Hunter:
    """Hunt the kernels as they are, which must survive; then it is known how long a case may take."""
    kernels = list({declaration.target: declaration for mutant in mutants for declaration in mutant.kernels}.values())
    note(f"first without a mutant, for {seconds:g} s: {', '.join(kernel.name for kernel in kernels)}")
    with hunter.runner({}) as runner:
        hunted = Hunt(replace(hunter, budget_s=seconds), runner, kernels).run()
    if hunted.kill is not None and hunted.kill.failure is not None:
        raise KernelLoadError(
            f"{hunted.kill.kernel} fails without a mutant ({hunted.kill.failure.message}); run attnfuzz explore on it "
            "and repair that first"
        )
    return replace(hunter, hang_s=min(hunter.hang_s, max(_LEAST_HANG_S, _SLOWER * hunted.slowest_s)))


@contextmanager
def _killer(
    request: MutantsRequest, hunter: Hunter, mutants: Sequence[Mutant], folder: Path, note: Callable[[str], None]
) -> Iterator[Killer]:
    if request.command is None:
        yield SearchKiller(hunter)
        return
    files = sorted({mutant.path for mutant in mutants})
    overlay, log = folder / "overlay.json", folder / "loaded"
    write_overlay(overlay, {file: file for file in files}, loaded=log)
    with closing(Command(request.command)) as command:
        note(f"first without a mutant: {request.command}")
        command.check(overlay, log, files)
        yield CommandKiller(command, hunter)


@contextmanager
def _scratch() -> Iterator[Path]:
    try:
        folder = PrivateFolder()
    except OSError as error:
        raise ExecutorUnavailable(
            f"no temporary folder can be made ({error}); make room there, or name another with TMPDIR"
        ) from error
    try:
        yield folder.path
    finally:
        folder.remove()


def _overlay_of(mutant: Mutant, folder: Path) -> Path:
    """Write the mutant's file, and the overlay that has it loaded."""
    copy = OwnFolder(folder.parent).make_new(folder.name).write(mutant.path.name, mutant.data)
    write_overlay(folder / "overlay.json", {mutant.path: copy})
    return folder / "overlay.json"
