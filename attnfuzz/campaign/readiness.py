"""When each kernel can be searched: at once, in part, or once it is built. Torch-free.

Many kernels compile themselves when they are first called, some for minutes. So each kernel of the user is looked at
in a process of its own, all at once: what it takes where it declares nothing is found out there (`infer`), and one that
starts a compiler meanwhile is stopped, and left to be built beside the search. The search of a kernel begins with the
first ordinary cases that it is right about, within no more than these have; it widens once all is known. Where more
kernels are asked than there are cores, and no GPU does the work, a search would only hold that up, and waits.

Builds are made one after the other, by one process: build tools that share a folder forget each other's results when
they run at once. Kernels of which an adapter says that they do not are built at once, each in a process of its own, as
far as there are cores and memory; none waits for what another one builds. First comes what the simplest case of each
kernel needs, then what those of other dtypes, head sizes and options do; a kernel is searched in what of it is built.
Where their engine has a builder (`attnfuzz.declaration.Builder`), that begins with all of it at once, as one job,
before any kernel has been looked at; what builds a kernel then waits for it, and builds what it leaves.
Bundled kernels, and those of engines that are settled, are Triton's to compile, and mean what they declare.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice, product, zip_longest
from typing import Self

import msgspec

from attnfuzz.campaign.declaration_inference import (
    Failing,
    Inferred,
    LeftOut,
    adopting,
    infer,
    roundings_told,
    with_declared,
)
from attnfuzz.campaign.messages import Adopted, Join, Unfinished, written
from attnfuzz.campaign.probe_cases import ProbeCases, points
from attnfuzz.campaign.workers import cores
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.identity.bug import Symptom, is_refusal
from attnfuzz.isolation.builds import OwnCompilers
from attnfuzz.isolation.outcomes import DeadlinePassed, ExecutorUnavailable, ServiceError
from attnfuzz.isolation.process import available_bytes
from attnfuzz.judging.runner import ProblemUnusable, Runner
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import dtypes_of, head_sizes_of, options_of
from attnfuzz.problems.combinations import alternatives
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Combination, Supports
from attnfuzz.verdict import Failure, Verdict, ends_process

_TIMEOUT_S = {"cpu": 5.0, "cuda": 20.0}
"""Seconds for a case that is run for what it builds, which itself has all the time it needs."""
_LEAST_PATIENCE_S = {"cpu": 10.0, "cuda": 30.0}
"""In which a kernel that works has shown it, compilations included."""
_MOST_BUILT = 32
_MOST_TRIED = 8
_CORES_OF_BUILD, _BYTES_OF_BUILD = 2, 12 << 30
"""Cores and memory for each kernel that is built: FlashInfer compiles up to ten files, with 1 to 2 GB for each."""
_LOOK_EVERY_S = 0.05
_ASK_BUILDER_EVERY_S = 0.5
_TOLD_OF_BUILDS = 4
"""How often it is told, about, how far a job of a builder has come."""
_GRACE_S = 2.0


@dataclass(slots=True)
class _Building:
    """A kernel that is being built: what there is to build of it, and what was built and passes its simplest case.

    ``raised``: what came of the last one of which it gave no result.
    """

    declaration: Declaration
    to_build: list[tuple[Combination, Case]]
    total: int
    built: list[Combination] = field(default_factory=list)
    raised: Failure | None = None
    inferred: Inferred | None = None

    @property
    def contract(self) -> Declaration:
        """The kernel with what was found that it takes."""
        found = self.inferred
        return self.declaration if found is None else with_declared(self.declaration, found.supports, found.numerics)


@dataclass(frozen=True, slots=True)
class _Looked:
    """Whether a kernel ``is_ready``, and what it was found to take."""

    target: str
    is_ready: bool
    inferred: Inferred | None


class Readiness:
    """Builds the kernels of one campaign, and finds out what they take. A context manager: leaving it ends both.

    ``asks_all``: also kernels that are settled. ``patience_s``: for a kernel that is right about nothing, which is to
    be told of while there is time. ``infers``: whether to find out what kernels of the
    user take where they declare nothing; ``verifying`` as of `infer`. ``make_runner`` makes what builds, from a
    zygote of its own: executors that come from one wait for each other's compilers, and no hang of a search may
    pass for such a wait.
    """

    def __init__(
        self,
        runner: Runner,
        declarations: Sequence[Declaration],
        *,
        make_runner: Callable[[], Runner],
        note: Callable[[str], None],
        infers: bool = True,
        verifying: bool = False,
        asks_all: bool = False,
        patience_s: float = math.inf,
    ) -> None:
        self._runner = runner
        self._patience_s = max(patience_s, _LEAST_PATIENCE_S[runner.device])
        self._make_runner = make_runner
        self._note = note
        self._infers = infers
        self._verifying = verifying
        self._asks_all = asks_all
        self._declarations = {one.target: one for one in declarations}
        users = (
            one
            for one in declarations
            if one.needs_preparing or not (one.is_bundled or (one.is_settled and not asks_all))
        )
        self._users = sorted(users, key=lambda one: one.builds_apart)  # those wait for what their builder says
        self.asking = {one.target for one in self._users}
        """Targets of the kernels of which it is not known yet what they take, or whether they are ready."""
        self._building: dict[str, _Building] = {}
        self._inferred: dict[str, Inferred] = {}
        self._told: queue.SimpleQueue[Join | _Looked | Inferred | Unfinished | str] = queue.SimpleQueue()
        """Messages of the threads that look at kernels and build them: the reporter is not theirs."""
        self._joining: list[Join] = []
        self._asked: list[tuple[LeftOut, Declaration]] = []
        self._failing: list[Unfinished] = []
        self._over = threading.Event()
        self._together = [one for one in self._users if one.builds_apart]
        self._missing: set[str] = set()
        """Targets of which modules are missing that are built as one job."""
        self._are_missing_known = threading.Event()
        self._job = ""
        """How far that job has come, in words, while it goes on."""
        self._job_thread: threading.Thread | None = None
        self._begun = threading.Event()
        """Whether there is something to search, so that what is asked need not make way for it any more."""
        self._thread: threading.Thread | None = None
        self._builder: Runner | None = None
        self._first: Runner | None = None
        """The runner that has started the device and imported all kernels, for the kernel that is looked at first."""
        self._why_not: dict[str, str] = {}
        self.never_returned: dict[str, str] = {}
        """By target, why a kernel is not searched that never gave a result, in words."""
        self._error: BaseException | None = None

    @property
    def inferred(self) -> tuple[Inferred, ...]:
        """Inferred contracts of kernels that do not take all that their declarations leave open."""
        return tuple(one for one in list(self._inferred.values()) if one.left_out or one.stricter)

    @property
    def ready(self) -> list[Declaration]:
        """The kernels that nothing has to be found out of."""
        users = {one.target for one in self._users}
        return [one for target, one in self._declarations.items() if target not in users]

    @property
    def declarations(self) -> list[Declaration]:
        """All kernels: those that are ready within their contracts, the others as they are declared."""
        return list(self._declarations.values())

    @property
    def unbuilt(self) -> dict[str, str]:
        """How far each kernel has come that was not built to the end, by target."""
        return {
            target: self._why_not.get(target)
            or f"{len(one.built)} of {one.total} combinations of dtype, head size and options are built"
            for target, one in list(self._building.items())  # which the thread shortens
        }

    def adopt(self, adopted: Adopted) -> None:
        """Tell of a design of a kernel that the search has found."""
        target, failure = adopted.kernel, adopted.failure
        declared = self._declarations[target]
        nothing = Inferred(target=target, supports=declared.supports, left_out=(), probes=0, works=True)
        found = self._inferred.get(target, nothing)
        numerics = adopting(found.numerics, adopted.numerics)
        told = roundings_told(found.numerics, numerics, "wrong", failure)
        self._inferred[target] = msgspec.structs.replace(found, numerics=numerics, left_out=(*found.left_out, *told))

    def start(self) -> None:
        """Find out in the background which kernels are ready and what those take, and build the others.

        `take` tells what has come of it.
        """
        if self._together:
            self._job_thread = threading.Thread(target=self._build_together, daemon=True)
            self._job_thread.start()
        if self._users:
            self._first = self._runner.heir()
            self._thread = threading.Thread(target=self._find_out, daemon=True)
            self._thread.start()

    @property
    def stage(self) -> str:
        """The present stage, in words."""
        number = len(self._users)
        if self._job and (not self.asking or self.asking <= self._missing):
            return self._job
        if not self.asking:
            return f"building {', '.join(list(self._building))}"
        kernels = next(iter(self._users)).target if number == 1 else f"{number} kernels"
        done = f": {number - len(self.asking)} done" if number > 1 else ""
        return f"asking {kernels} what {'it takes' if number == 1 else 'they take'}{done}"

    def wait(self) -> None:
        """Wait until it is known what each kernel takes that is ready."""
        while self.asking and self._thread is not None:
            self._thread.join(_LOOK_EVERY_S)
            self._listen()
        self._listen()

    def wait_for_first(self, waiting: Callable[[str], None] = lambda what: None) -> float:
        """Wait until there is a kernel to search, and say so; the seconds in which all that could be were being built.

        Raises KernelLoadError if none can be searched, with a sentence for each.
        """
        began, is_over = time.monotonic(), self._thread is None
        asked = began
        while not self.ready and not self._joining and self._thread is not None and not is_over:
            waiting(self.stage)
            self._thread.join(_LOOK_EVERY_S)
            asked = time.monotonic() if self.asking else asked
            is_over = not self._thread.is_alive()
            self._listen()
        if not self.ready and not self._joining:
            never = [f"{target} {why}" for target, why in self.never_returned.items()]
            raise KernelLoadError("\n".join([*never, *self._why_not.values()]))
        return time.monotonic() - asked

    def stop_asking(self) -> dict[str, str]:
        """Find out no more: by target, in words, how far that has come of each kernel of which not all is known."""
        how_far = {target: "what it takes was not found out" for target in sorted(self.asking)}
        self._over.set()
        self._begun.set()
        if self._thread is not None:
            self._thread.join(_GRACE_S)
        while not self._told.empty():
            said = self._told.get()
            if isinstance(said, _Looked) and said.target in how_far and (found := said.inferred) is not None:
                so_far = ", ".join(map(str, found.left_out))
                how_far[said.target] += f" in {found.probes} probes" * bool(found.probes)
                how_far[said.target] += f" (so far: {so_far})" * bool(so_far)
        return {target: how for target, how in how_far.items() if target not in self.never_returned}

    def take(self) -> list[Join]:
        """Kernels that can be searched now and could not before."""
        self._listen()
        taken, self._joining = self._joining, []
        return taken

    def take_questions(self) -> list[tuple[LeftOut, Declaration]]:
        """Findings of probes that only an author can judge, with the kernel as it takes all else."""
        asked, self._asked = self._asked, []
        return asked

    def take_failures(self) -> list[Unfinished]:
        """Failures that probes met on their way, to be looked into."""
        failing, self._failing = self._failing, []
        return failing

    def _listen(self) -> None:
        while True:
            try:
                said = self._told.get_nowait()
            except queue.Empty:
                break
            match said:
                case Join():
                    self._joining.append(said)
                case _Looked():
                    self._take_in(said)
                case Inferred():
                    self._learn(said)
                case Unfinished():
                    self._failing.append(said)
                case str():
                    self._note(said)
        if self._error is not None:
            raise self._error

    def _take_in(self, looked: _Looked) -> None:
        """Have a kernel searched that has been looked at, as far as it is ready."""
        target, found = looked.target, looked.inferred
        self.asking.discard(target)
        if target in self.never_returned or not looked.is_ready:
            return
        declaration = self._declarations[target]
        if found is not None:
            self._learn(found)
            declaration = with_declared(declaration, found.supports, found.numerics)
        self._declarations[target] = declaration
        self._joining.append(Join(kernel=declaration))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._begun.set()
        if self._builder is not None:
            self._builder.zygote.close()  # which may be done while the thread waits for it
        if self._thread is not None:
            self._thread.join(_GRACE_S)
            if self._thread.is_alive():  # a kernel keeps it waiting
                self._runner.zygote.close()
            self._thread.join()
        if self._job_thread is not None:
            self._job_thread.join()
        if self._first is not None:  # the kernel has to be built before anybody looks at it
            self._first.close()

    def _learn(self, inferred: Inferred) -> None:
        self._inferred[inferred.target] = inferred
        declaration = with_declared(self._declarations[inferred.target], inferred.declarable, inferred.numerics)
        self._asked += [(question, declaration) for question in inferred.questions]
        self._failing += [_unfinished(inferred.target, one) for one in inferred.failing]
        if inferred.left_out:
            taken = f"what it was found to take, {inferred.searched}"
            self._note(f"{inferred.target} is searched within {taken}; --pedantic searches everything")

    def _find_out(self) -> None:
        """In the background: look at all kernels, then build those that are not ready."""
        try:
            most = max(1, min(len(self._users), cores()))
            with ThreadPoolExecutor(most) as pool:
                for looked in [
                    *(pool.submit(self._look, one) for one in self._users[: self._at_first]),
                    *(pool.submit(self._look_later, one) for one in self._users[self._at_first :]),
                ]:
                    looked.result()
        except BaseException as error:  # noqa: BLE001 - as of `_build`
            if not self._over.is_set():
                self._error = error
            return
        found = self._building
        self._building = {one.target: found[one.target] for one in self._users if one.target in found}
        if self._building and not self._over.is_set():
            names = ", ".join(self._building)
            verb = "compiles itself" if len(self._building) == 1 else "compile themselves"
            self._told.put(f"{names} {verb}, and will be searched as far as that has come")
            self._build()

    @property
    def _at_first(self) -> int:
        """How many kernels are asked until the first can be searched: on a GPU their compilers take half of the cores.

        With all of them, sixteen kernels would be known at about the same time, and the first of them late.
        """
        return max(1, cores() // 2) if self._runner.device == "cuda" else len(self._users)

    def _look_later(self, declaration: Declaration) -> None:
        self._begun.wait()
        self._look(declaration)

    def _look(self, declaration: Declaration) -> None:
        try:
            self._look_now(declaration)
        finally:
            self._begun.set()

    def _look_now(self, declaration: Declaration) -> None:
        if self._over.is_set():
            return
        with ExitStack() as opened:
            is_ready, inferred = self._look_at(declaration, opened)
            if not is_ready and declaration.target not in self.never_returned:
                to_build = _one_of_each(declaration)
                self._building[declaration.target] = _Building(declaration, to_build, len(to_build))
            # told before the process ends, which takes a quarter of a second on a GPU
            self._told.put(_Looked(declaration.target, is_ready, inferred))

    def _look_at(self, declaration: Declaration, opened: ExitStack) -> tuple[bool, Inferred | None]:
        """Whether the kernel is ready, and what it takes; ``opened`` gets the process in which it is looked at."""
        if declaration.builds_apart:
            self._are_missing_known.wait()
        if declaration.needs_preparing or declaration.target in self._missing:  # nothing can be asked of it yet
            return False, None

        def begin(supports: Supports, failing: Sequence[Failing]) -> None:
            # else a search takes time from finding out what kernels take, which it waits for with all that fails
            has_cores_left = self._runner.device == "cuda" or len(self._users) <= cores()
            if not compilers.seen and has_cores_left:
                least = msgspec.structs.replace(declaration, supports=supports)
                self._told.put(Join(kernel=least, is_settled=False))
                for one in failing:
                    self._told.put(_unfinished(declaration.target, one))
                self._begun.set()

        compilers = OwnCompilers()
        made = None
        if declaration is self._users[0]:
            made, self._first = self._first, None
        own = opened.enter_context(made or self._runner.sibling())
        own.give_up_builds(compilers)
        simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
        try:
            first = _verdict(own, declaration, simplest)
        except ProblemUnusable as error:
            self.never_returned[declaration.target] = f"is not searched: {error}"
            return True, None
        raised = None if first is None else _raised(first)
        if (
            raised is not None
            and raised.misuse
            and not compilers.seen
            and self._never_returns(own, declaration, raised)
        ):
            return True, None
        found = None
        if self._infers and not compilers.seen:
            found = infer(
                own,
                declaration,
                is_over=lambda: compilers.seen or self._over.is_set(),
                verifying=self._verifying,
                stricter=self._asks_all,
                begin=begin,
                patience_s=self._patience_s,
            )
        if raised is not None and found is not None and not found.works and not compilers.seen:
            self._never_returns(own, declaration, raised)
        return not compilers.seen, None if compilers.seen else found

    def _build_together(self) -> None:
        """In the background: have the builder of an engine build all that its kernels need for what is built first."""
        try:
            with self._runner.sibling() as runner:
                runner.give_up_builds(lambda builds: self._over.is_set())
                lists = [[(kernel, case) for _, case in _one_of_each(kernel)] for kernel in self._together]
                turns = [one for some in zip_longest(*lists) for one in some if one is not None]  # first each's first
                self._follow(runner, turns)
        except (DeadlinePassed, ExecutorUnavailable, ServiceError) as error:  # each builds its own
            if not self._over.is_set():
                self._told.put(f"{', '.join(one.target for one in self._together)} build for themselves: {error}")
        except BaseException as error:  # noqa: BLE001 - as of `_build`
            if not self._over.is_set():
                self._error = error
        finally:
            self._job = ""
            self._are_missing_known.set()

    def _follow(self, runner: Runner, cases: Sequence[tuple[Declaration, Case]]) -> None:
        begun = runner.begin_builds(cases)
        if begun is None:
            return
        for (declaration, _), missing in zip(cases, begun.missing, strict=False):
            if missing:
                self._missing.add(declaration.target)
        number = len({name for names in begun.missing for name in names})
        kept = f"{begun.modules} are kept in {begun.folder}; {begun.setting} names another folder"
        what = f"building {number} {begun.modules}"
        self._told.put(f"{what}; {kept}" if number else kept)
        self._job = f"{what}: 0 done" if number else ""
        self._are_missing_known.set()
        told = 0
        while number and not self._over.wait(_ASK_BUILDER_EVERY_S):
            far = runner.built()
            if far is None or far.is_over:
                break
            self._job = f"{what}: {far.built} done"
            if far.built >= told + max(1, number // _TOLD_OF_BUILDS):
                told = far.built
                self._told.put(self._job)

    def _never_returns(self, runner: Runner, declaration: Declaration, raised: Failure) -> bool:
        """Whether the kernel, which failed so on its simplest case, does the same on one of each kind; that is noted.

        What it raises there is no bug of some case, and none that a case could be saved for.
        """
        tried = [case for _, case in _one_of_each(declaration)[:_MOST_TRIED]]
        if not isinstance(declaration.problem, OpenProblem):  # some kernels index what the simplest is too small for
            larger = ProbeCases(declaration, next(points(declaration)))
            tried += larger.permitted((*larger.ordinary(), *larger.single_rows()))
        for case in tried:
            verdict = _verdict(runner, declaration, case)
            again = None if verdict is None else _raised(verdict)
            if again is None or Symptom.of("", again) != Symptom.of("", raised):
                return False
        where = "" if is_refusal(raised) else " on the device of its inputs"
        remedy = f"; {raised.misuse}" if raised.misuse else ""
        self.never_returned[declaration.target] = f"never returned a result{where}: {raised.message}{remedy}"
        return True

    def _build(self) -> None:
        kernels = list(self._building.values())
        try:
            self._builder = self._make_runner()
            with self._builder as first, ExitStack() as opened, ThreadPoolExecutor(len(kernels)) as pool:
                first.give_up_builds(lambda builds: self._over.is_set())
                free = available_bytes()
                most = _MOST_BUILT if free is None else free // _BYTES_OF_BUILD
                turns = _in_turn(kernels, max(1, min(cores() // _CORES_OF_BUILD, most)))
                others = (opened.enter_context(first.sibling()) for _ in turns[1:])
                for done in [pool.submit(self._build_all, *each) for each in zip((first, *others), turns, strict=True)]:
                    done.result()
        except ExecutorUnavailable as error:
            self._why_not |= {target: f"it could not be built: {error}" for target in self._building}
            self._told.put(f"{', '.join(self._building)} could not be built: {error}")
        except BaseException as error:  # noqa: BLE001 - a thread's end: whoever takes what it made is told
            if not self._over.is_set():
                self._error = error

    def _build_all(self, runner: Runner, waiting: list[_Building]) -> None:
        while waiting and not self._over.is_set():
            waiting = [one for one in waiting if not self._over.is_set() and self._goes_on(runner, one)]

    def _goes_on(self, runner: Runner, kernel: _Building) -> bool:
        """Build some of ``kernel``; whether there is more to build."""
        target = kernel.declaration.target
        try:
            self._build_some(runner, kernel)
        except KernelLoadError as error:
            self._why_not[target] = str(error)
            self._told.put(f"{target} is not searched: {error}")
            return False
        if self._over.is_set():
            return False
        if kernel.to_build:
            if kernel.built and not kernel.declaration.supports.leaves_open("dtypes"):
                self._told.put(Join(kernel=kernel.contract, built=tuple(kernel.built)))
            return True
        failed = kernel.raised
        if not kernel.built and failed and failed.misuse and self._never_returns(runner, kernel.declaration, failed):
            self._building.pop(target)
            return False
        if self._infers and kernel.inferred is None:
            self._infer(runner, kernel, kernel.declaration)
        if not self._over.is_set():
            self._building.pop(target)
            self._told.put(Join(kernel=kernel.contract))
        return False

    def _build_some(self, runner: Runner, kernel: _Building) -> None:
        """Have ``kernel`` prepare itself, and its next combination built."""
        (kernel.declaration,) = runner.prepare([kernel.declaration])
        combination, case = kernel.to_build.pop(0)
        verdict = _verdict(runner, kernel.declaration, case)
        if verdict is None or verdict.failure is not None:
            kernel.raised = None if verdict is None else _raised(verdict)
            if verdict is not None and ends_process(verdict.failure):
                kernel.to_build.clear()  # what it comes to is for the search to tell
            return
        kernel.built.append(combination)
        if self._infers and kernel.inferred is None and not kernel.declaration.supports.leaves_open("dtypes"):
            within = msgspec.structs.replace(kernel.declaration.supports, where=(combination,))
            self._infer(runner, kernel, msgspec.structs.replace(kernel.declaration, supports=within))

    def _infer(self, runner: Runner, kernel: _Building, declaration: Declaration) -> None:
        found = infer(
            runner, declaration, is_over=self._over.is_set, verifying=self._verifying, stricter=self._asks_all
        )
        if not self._over.is_set():
            where = kernel.declaration.supports.where
            found = msgspec.structs.replace(found, supports=msgspec.structs.replace(found.supports, where=where))
            kernel.inferred = found
            self._told.put(found)


def _in_turn(kernels: Sequence[_Building], at_once: int) -> list[list[_Building]]:
    """Lists of kernels of which each is built one after the other, beside the other lists."""
    alone = [one for one in kernels if not one.declaration.builds_apart]
    apart = [one for one in kernels if one.declaration.builds_apart]
    number = max(1, min(at_once, len(apart)))
    return [one for one in (alone, *(apart[i::number] for i in range(number))) if one]


def _unfinished(target: str, failing: Failing) -> Unfinished:
    before = [] if failing.before is None else [failing.before]
    return Unfinished(kernel=target, **written(failing.case, failing.failure, before))


def _raised(verdict: Verdict) -> Failure | None:
    """How the kernel failed to give any result: an exception, or tensors elsewhere than where results are looked for.

    One of another shape or dtype is a result, if a wrong one.
    """
    failure = verdict.failure
    if failure is None:
        return None
    return failure if is_refusal(failure) or failure.misuse else None


def _one_of_each(declaration: Declaration) -> list[tuple[Combination, Case]]:
    """Each combination of dtype, head size and options with its simplest case, up to a number, the simplest first."""
    supports, options = declaration.supports, declaration.options
    if isinstance(declaration.problem, OpenProblem):
        return [({}, simplest_case(declaration.problem, supports, options))]
    combinations = (
        (one, *values)
        for one in alternatives(supports)
        for values in product(
            dtypes_of(one),
            (None,) if one.leaves_open("head_sizes") else head_sizes_of(one, supports.dtypes[0]),
            product(*options_of(one, options).values()),
        )
    )
    cases = list[tuple[Combination, Case]]()
    for alternative, dtype, size, chosen in islice(combinations, _MOST_BUILT):
        combination: dict[str, tuple[object, ...]] = dict(next(iter(alternative.combinations), {}))
        combination["dtype"] = (dtype,)
        if size is not None:
            combination["head_size"] = (size,)
        combination |= {name: (choice,) for name, choice in zip(options, chosen, strict=True)}
        one = msgspec.structs.replace(supports, where=(combination,))
        try:
            cases.append((one.combinations[0], simplest_case(declaration.problem, one, options)))
        except ValueError:  # the size does not go with any of the layouts
            continue
    return cases or [({}, simplest_case(declaration.problem, supports, options))]


def _verdict(runner: Runner, declaration: Declaration, case: Case) -> Verdict | None:
    """The verdict on a case that is run for what it builds; None where that is told when the search meets it."""
    try:
        return runner.judge(declaration, case, timeout_s=_TIMEOUT_S[runner.device], run_twice=False, relations=())
    except (DeadlinePassed, ServiceError, CaseTooLarge):
        return None
