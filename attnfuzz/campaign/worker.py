"""A worker process: ``python -m attnfuzz.campaign.worker CHANNEL_FD BROKER_FD``, started by the coordinator.

Its loop: rounds of drawn cases over the kernels, and triage of every failure that is not known.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.draw.costly_relations import CostlyRelations
from attnfuzz.campaign.draw.larger_cases import LargerCases, asked_sizes, longest_sequence
from attnfuzz.campaign.draw.sampling import BatchSize, CaseSource, Schedule, StrategyFor, WorkingSets, derive_seed
from attnfuzz.campaign.floor import floor_of
from attnfuzz.campaign.judge.case_judge import GRACE_S, CaseJudge, OutOfTime, Patience, Pipeline, Unjudged
from attnfuzz.campaign.judge.journal import Journal
from attnfuzz.campaign.judge.process_memory import MemoryWatch
from attnfuzz.campaign.messages import (
    Begin,
    Busy,
    Channel,
    ChannelClosed,
    FormatCompiled,
    Join,
    Ready,
    Setup,
    Stop,
    ToWorker,
    Trouble,
    Unfinished,
    Warm,
)
from attnfuzz.campaign.statistics import ProgressMeter
from attnfuzz.campaign.triage.confirmation import first_death
from attnfuzz.campaign.triage.explanation import explain_in_short
from attnfuzz.campaign.triage.failure_queue import FailureQueue
from attnfuzz.campaign.workers import BorrowedZygote
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.identity.bug import Bug, FailingCase, is_leak
from attnfuzz.isolation.devices import DeviceLease
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import DeviceLost, ExecutorUnavailable
from attnfuzz.isolation.process import die_with_parent, why_starved
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.runner import Runner, start_executor
from attnfuzz.mistake import READ_BEFORE_WRITTEN
from attnfuzz.oracles.registry import oracle_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.formats import Format, format_of
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.strategies.cases import case_lists
from attnfuzz.strategies.formats import draw_formats, first_formats
from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES, Sizes
from attnfuzz.verdict import Failure, Relations, Verdict, ends_process

_MOST_TOGETHER = 64
_LEAST_OF_ROUND = 32
"""Cases, before it makes way for another format: batches have grown by then, and what shows in any format is found."""
_WAIT_FOR_BATCH_S = 1.0
_MAX_DEATH_SEARCHES = 3
_KEPT_OF_A_SYMPTOM = 4
"""Failing cases of a kernel of which it is not known yet what it takes."""


class WorkerLoop:
    """Searches the kernels of ``setup`` until its deadline or until the coordinator says stop.

    ``formats`` are for a GPU, where a format that is new costs as much as hundreds of cases; without them, the format
    of each case is drawn too. ``larger``: where large cases are not drawn like any others. ``most_together``: as many
    cases as are judged in one batch. ``mail`` came before the search.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        judge: CaseJudge,
        strategy_for: StrategyFor,
        channel: Channel[ToWorker],
        mail: Iterable[ToWorker] = (),
        formats: WorkingSets | None = None,
        larger: LargerCases | None = None,
        most_together: int = _MOST_TOGETHER,
    ) -> None:
        self._setup = setup
        self._judge = judge
        self._channel = channel
        self._mail = list(mail)
        self._formats = formats
        self._larger = larger
        self._costly = CostlyRelations(
            setup.oracles, device=setup.device, worker=setup.worker, num_workers=setup.num_workers
        )
        self._drawing = CaseSource(strategy_for, seeds=(setup.seed, setup.worker), formats=formats)
        self._kernels: dict[str, Declaration] = {}
        targets = [declaration.target for declaration in setup.kernels]
        self._schedule = Schedule(targets, worker=setup.worker, num_workers=setup.num_workers)
        self._meter = ProgressMeter(channel.send, device=setup.device_label)
        self._failures = FailureQueue(
            setup.worker,
            deadline=setup.deadline,
            judge=judge,
            meter=self._meter,
            send=channel.send,
            is_over=self._is_over,
            adopting=setup.adopting,
        )
        self._drawn: defaultdict[str, list[Case]] = defaultdict(list)
        self._sizes = defaultdict[str, BatchSize](lambda: BatchSize(most_together))
        self._early: list[Unfinished] = []
        self._provisional: dict[str, Declaration] = {}
        self._to_judge_again: defaultdict[str, list[FailingCase]] = defaultdict(list)
        self._to_ask_again: defaultdict[str, list[FailingCase]] = defaultdict(list)
        self._pipeline = Pipeline(partial(judge.together, relations=self._costly.usual))
        self._death_searches: Counter[str] = Counter()
        self._stopped = False
        for declaration in setup.kernels:
            self._join(Join(kernel=declaration))

    def run(self) -> None:
        """Search. Raises ChannelClosed when the coordinator is gone."""
        while not self._is_over():
            self._look_into_failures()
            if not self._is_over():
                self._one_turn(self._kernels[self._schedule.next_target()])
        self._collect()
        self._look_into_failures()  # no time for that, but they are reported
        self._meter.flush()

    def _is_over(self) -> bool:
        self._read_mail()
        return self._stopped or time.monotonic() >= self._setup.deadline

    def _read_mail(self) -> None:
        early, self._mail = self._mail, []
        for message in (*early, *self._channel.receive()):
            match message:
                case Bug():
                    self._failures.learn(message)
                    if is_leak(message):
                        self._judge.leaks(message.kernel)
                    if oracle_of(message.oracle).ends_process:
                        self._schedule.is_fatal(message.kernel)
                case Busy():
                    self._failures.set_busy(message)
                case Unfinished():
                    self._defer(message)
                case FormatCompiled():
                    if self._formats is not None:
                        self._formats.offer(self._kernels[message.kernel], message.format, message.seconds)
                case Join():
                    self._join(message)
                case Stop():
                    self._stopped = True

    def _join(self, join: Join) -> None:
        """Search a kernel from now on, within what is built of it."""
        declaration, target = join.kernel, join.kernel.target
        self._meter.joins(declaration)
        self._schedule.add(target, floor=-(-floor_of(declaration) // self._setup.num_workers))
        if join.built:
            within = msgspec.structs.replace(declaration.supports, where=join.built)
            declaration = msgspec.structs.replace(declaration, supports=within)
        self._kernels[target] = declaration
        if not join.is_settled:
            self._provisional[target] = declaration
        elif target in self._provisional:
            kept = self._to_judge_again.pop(target, [])
            self._drawn[target][:0] = [failing.case for failing in kept if not failing.relations]
            self._to_ask_again[target] = [failing for failing in kept if failing.relations]
        self._failures.adopted(target, declaration.numerics)
        if self._formats is not None:
            self._formats.joins(declaration)
            if not (declaration.is_bundled or declaration.is_settled or isinstance(declaration.problem, OpenProblem)):
                # run before the search to see whether the kernel compiles itself, and so in Triton's cache
                simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
                self._formats.offer(declaration, format_of(simplest))
        early, self._early = self._early, []
        for unfinished in early:
            self._defer(unfinished)

    def _defer(self, unfinished: Unfinished) -> None:
        """Look into a failure that a worker which was lost had met."""
        declaration = self._kernels.get(unfinished.kernel)
        if declaration is None or self._waits(declaration, unfinished.failure):  # it is still being built, or asked
            self._early.append(unfinished)
            return
        case, preceding = unfinished.cases(declaration.problem)
        self._failures.wait(FailingCase(declaration, case, unfinished.failure, preceding))

    def _one_turn(self, declaration: Declaration) -> None:
        """One round on a kernel: drawn cases are judged as soon as there are enough for a batch, and none is judged."""
        target = declaration.target
        started = time.monotonic()
        cases_before = self._meter.cases(target)
        self._scout(declaration)
        if self._goes_on():
            roomy = None if self._larger is None else self._larger.roomy(declaration)
            now = time.monotonic()  # a compiler may have taken more than the slice
            until = now + self._schedule.slice_s(target, max(0.0, self._setup.deadline - now))
            drawn = self._drawn[target]
            least = self._meter.cases(target) + _LEAST_OF_ROUND

            def visit(case: Case) -> bool:  # asked once at least, or the slice might end before the first case is drawn
                drawn.append(case)
                enough = self._sizes[target].size * (1 + self._pipeline.is_judging)  # it doubles if all goes well
                if len(drawn) >= enough:
                    self._read_mail()
                    if self._kernels[target] is not declaration:  # it has become known what the kernel takes
                        return False
                    self._collect()
                    size = self._sizes[target].size
                    cases = drawn[:size]
                    del drawn[:size]
                    self._have_judged(declaration, cases)
                    self._take_costly_turns(declaration)
                    is_due = self._formats is not None and self._formats.is_scouting_due(declaration)
                    if self._meter.cases(target) >= least and is_due:
                        return False
                return self._goes_on() and time.monotonic() < until

            (roomy or self._drawing).round(declaration, visit, until=self._setup.deadline)
            if self._larger is not None:
                cases, seconds = self._meter.cases(target) - cases_before, time.monotonic() - started
                self._larger.round_over(declaration, roomy=roomy is not None, cases=cases, seconds=seconds)
            self._go_far(declaration)
            self._meter.flush()
        self._schedule.record(
            target, seconds=time.monotonic() - started, cases=self._meter.cases(target) - cases_before
        )

    def _go_far(self, declaration: Declaration) -> None:
        """Judge a few long cases, if it is time for some; each alone, with all the time that a case may take."""
        if self._larger is None or not self._goes_on():
            return
        due = self._larger.due(declaration, until=self._setup.deadline)
        if due:
            self._collect()
        for case in due:
            started = time.monotonic()
            if not self._goes_on() or self._failures.deaths.should_skip(declaration, case):
                continue
            passed = not self._judge_alone(declaration, [case], patience="longest")
            self._larger.judged(
                declaration, longest_sequence(case), time.monotonic() - started, passed=passed and self._goes_on()
            )

    def _take_costly_turns(self, declaration: Declaration) -> None:
        """Ask for relations that are costly, on cases that have passed all else, if it is time for some.

        Before, for those that have objected when it was not known yet what the kernel takes: others would not see it.
        """
        target, faults = declaration.target, self._failures.deaths.faults
        while self._goes_on() and self._to_ask_again[target] and not self._is_provisional(declaration):
            failing = self._to_ask_again[target].pop(0)
            self._ask(declaration, failing.case, failing.relations)
        while self._goes_on() and not self._is_provisional(declaration):
            due = self._costly.due(target)
            if due is None:
                break
            started = time.monotonic()
            self._ask(declaration, due.case, faults.relations_for(declaration, due.case, turn=due.turn))
            self._costly.taken(target, time.monotonic() - started)

    def _ask(self, declaration: Declaration, case: Case, relations: Relations) -> None:
        """Have a case judged once more, which has been counted, with these relations."""
        self._collect()
        if not self._goes_on():
            return
        with contextlib.suppress(OutOfTime, Unjudged):  # the case has passed all else, and is counted as that
            verdict = self._judge(declaration, case, relations=relations, patience="longest")
            self._meter.related(declaration, verdict)
            if verdict.failure is not None:
                self._take_in(declaration, case, 0.0, verdict)

    def _scout(self, declaration: Declaration) -> None:
        """Have new formats compiled if it is time to; in the background, unless there are none to draw from."""
        if self._formats is None:
            return
        if drawn := self._drawing.scout(declaration):
            self._read_mail()
            self._have_judged(declaration, drawn)
        if not self._formats.any_for(declaration):
            self._collect()

    def _goes_on(self) -> bool:
        return not self._failures.is_any_ready and not self._stopped and time.monotonic() < self._setup.deadline

    def _have_judged(self, declaration: Declaration, cases: list[Case]) -> None:
        """Take in what has been judged, then have ``cases`` judged: a batch in the background, a single one at once."""
        self._collect()
        if not self._goes_on():
            self._drawn[declaration.target].extend(cases)
            return
        target, deaths = declaration.target, self._failures.deaths
        drawn, cases = cases, [case for case in cases if not deaths.should_skip(declaration, case)]
        self._meter.skipped(target, len(drawn) - len(cases))  # each would cost an executor
        alone = [case for case in cases if len(cases) == 1 or deaths.expects_death(declaration, case)]
        alone += [case for case in cases if case not in alone and deaths.faults.covers(declaration, case)]
        self._judge_alone(declaration, alone)
        if together := [case for case in cases if case not in alone]:
            self._pipeline.submit(declaration, together)

    def _collect(self) -> None:
        """Take in the batch that is being judged, if there is one; not for long once the campaign is over."""
        batch = self._pipeline.collect(_WAIT_FOR_BATCH_S)
        while batch is None and self._pipeline.is_busy and not self._stopped:
            self._read_mail()
            batch = self._pipeline.collect(_WAIT_FOR_BATCH_S)
        if batch is None:
            return
        target = batch.declaration.target
        if batch.verdicts is None:
            self._sizes[target].went_wrong()
            before, lost = self._judge.history.of(batch.declaration), self._judge.lost
            failed = self._judge_alone(batch.declaration, batch.cases)
            if self._is_provisional(batch.declaration):
                lost = None
            if not failed and not self._find_death(batch.declaration, before) and lost is not None:
                self._failures.doubt(FailingCase(batch.declaration, batch.cases[-1], lost, tuple(batch.cases[:-1])))
            return
        self._sizes[target].went_well(batch.warm_seconds, len(batch.cases))
        for case, verdict in zip(batch.cases, batch.verdicts, strict=True):
            self._take_in(batch.declaration, case, batch.case_seconds(verdict), verdict)
        self._look_for_leak()

    def _look_for_leak(self) -> None:
        """Find out about a kernel that has made the executor grow."""
        if not self._goes_on():
            return
        started = time.monotonic()
        if (searched := self._judge.look_for_leak()) is not None:
            self._schedule.charge(searched.declaration.target, time.monotonic() - started)
            if searched.failure is not None:
                self._weigh(FailingCase(searched.declaration, searched.case, searched.failure), 0.0)

    def _find_death(self, declaration: Declaration, cases: Sequence[Case]) -> bool:
        """Find out what took a batch down that no case of it takes down alone; whether that could be."""
        self._death_searches[declaration.target] += 1
        if self._death_searches[declaration.target] <= _MAX_DEATH_SEARCHES and self._goes_on():
            failing = first_death(self._judge, declaration, cases)
            if failing is not None:
                self._weigh(failing, 0.0)
                return True
        return False

    def _judge_alone(self, declaration: Declaration, cases: Sequence[Case], *, patience: Patience = "learned") -> bool:
        """One after the other, up to one that fails; the rest waits for the kernel's next round. Whether any failed."""
        failed = False
        for i, case in enumerate(cases):
            if not self._goes_on():
                self._drawn[declaration.target].extend(cases[i:])
                break
            started = time.monotonic()
            try:
                relations = self._failures.deaths.faults.relations_for(declaration, case)
                verdict = self._judge(declaration, case, relations=relations, patience=patience)
            except OutOfTime:
                break
            except Unjudged:
                failed = True
                continue
            failed |= verdict.failure is not None
            seconds = time.monotonic() - started
            if verdict.failure is None:
                self._sizes[declaration.target].went_well(max(0.0, seconds - verdict.timing.compile_s), 1)
            self._take_in(declaration, case, seconds, verdict)
            self._look_for_leak()
        return failed

    def _take_in(self, declaration: Declaration, case: Case, seconds: float, verdict: Verdict) -> None:
        failure = verdict.failure
        counted = verdict
        if failure is not None and (failure.designs or self._is_provisional(declaration)):
            # by what bound it is to be measured is not known before it is known what the kernel rounds and takes
            counted = msgspec.structs.replace(verdict, error_ratio=0.0)
        self._meter.judged(declaration, case, seconds, counted)
        self._failures.deaths.judged(declaration, case, failure)
        if ends_process(failure):
            self._sizes[declaration.target].went_wrong()
        elif self._formats is not None:
            compile_s = verdict.timing.compile_s
            if (new := self._formats.judged(declaration, case, seconds, compile_s=compile_s)) is not None:
                self._channel.send(FormatCompiled(kernel=declaration.target, format=new, seconds=seconds))
        compile_s, passed = verdict.timing.compile_s, failure is None
        self._costly.judged(declaration.target, case, seconds, compile_s=compile_s, passed=passed)
        if failure is not None:
            self._weigh(FailingCase(declaration, case, failure, self._judge.history.before(declaration, case)), seconds)

    def _weigh(self, failing: FailingCase, seconds: float) -> None:
        self._read_mail()
        if self._waits(failing.declaration, failing.failure):
            self._keep_for_later(failing)
        else:
            self._failures.weigh(failing, seconds)

    def _is_provisional(self, declaration: Declaration) -> bool:
        """Whether it says no more than was known before all was that the kernel takes."""
        return declaration is self._provisional.get(declaration.target)

    def _waits(self, declaration: Declaration, failure: Failure) -> bool:
        """Whether what is found out of the kernel may yet end a failure; nothing ends that of memory read too early."""
        return self._is_provisional(declaration) and failure.cause != READ_BEFORE_WRITTEN

    def _keep_for_later(self, failing: FailingCase) -> None:
        """Have a case judged again once it is known what its kernel takes, and rounds on purpose.

        A few of each symptom do.
        """
        target = failing.declaration.target
        if self._kernels[target] is not failing.declaration:  # it has become known meanwhile
            if failing.relations:
                self._to_ask_again[target].append(failing)
            else:
                self._drawn[target].append(failing.case)
            return
        kept = self._to_judge_again[target]
        if sum(one.symptom == failing.symptom for one in kept) < _KEPT_OF_A_SYMPTOM:
            kept.append(failing)

    def _look_into_failures(self) -> None:
        """Find out about each failing case that waits; of a campaign that was stopped, one of each kernel is told."""
        told = set[str]()
        while self._failures.is_any_ready:
            started = time.monotonic()
            self._collect()
            if (failing := self._failures.take()) is None:
                break
            target = failing.declaration.target
            if self._stopped and target in told:
                continue
            told.add(target)
            self._failures.investigate(failing)
            self._sizes[target].went_wrong()
            self._schedule.charge(target, time.monotonic() - started)


_SETUP_WAIT_S = 60.0
_FIRST_FORMATS = 16


def main(arguments: list[str]) -> int:
    """Work until the coordinator is content or gone; the exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel_fd, broker_fd = (int(argument) for argument in arguments)
    channel = Channel(socket.socket(fileno=channel_fd), msgspec.json.Decoder(ToWorker))
    zygote = cast(Zygote, BorrowedZygote(socket.socket(fileno=broker_fd)))  # all that an executor asks of a zygote
    mail: list[ToWorker] = []
    warmed: tuple[str, Executor] | None = None
    try:
        while not mail or isinstance(mail[0], Warm):
            if mail and isinstance(warm := mail.pop(0), Warm):
                warmed = warm.device_id, start_executor(zygote, _pinning(warm.device_id), warm.targets)
            if not mail:  # the kernels are still being imported; of a coordinator that has ended, receive tells
                mail += channel.receive(_SETUP_WAIT_S)
        setup, *mail = mail
        if not isinstance(setup, Setup):
            raise TypeError(f"the first message is {setup!r}; it must be a Setup")
        if warmed is not None and warmed[0] != setup.device_id:
            warmed[1].close()
            warmed = None
        work(setup, mail, channel, zygote, None if warmed is None else warmed[1])
    except ChannelClosed:
        return 1
    except (ExecutorUnavailable, KernelLoadError) as error:
        lost = isinstance(error, DeviceLost)
        channel.send(Trouble(message=str(error), environment=True, device_lost=lost))
        return 1
    except Exception as error:  # noqa: BLE001 - a process boundary: the coordinator is told everything
        starved = why_starved(error)
        channel.send(Trouble(message=starved or traceback.format_exc(), environment=starved is not None))
        return 1
    return 0


def work(
    setup: Setup, mail: list[ToWorker], channel: Channel[ToWorker], zygote: Zygote, executor: Executor | None = None
) -> None:
    """Search as ``setup`` says, with executors from ``zygote``. ``mail`` has come after ``setup``.

    ``executor``: one that has started the device.
    """
    on_gpu = setup.device == "cuda"
    asked: dict[str, int | None] = {"max_seq_len": setup.max_seq_len, "max_seqs": setup.max_seqs}
    sizes = asked_sizes(GPU_SIZES if on_gpu else CPU_SIZES, **asked)
    settings: dict[str, Any] = {
        "oracles": setup.oracles,
        "tolerance": setup.tolerance,
        "memory_limit_bytes": setup.memory_limit_bytes,
        "watching": setup.watching,
        "import_patience_s": setup.import_patience_s,
    }
    pinning = _pinning(setup.device_id)
    runner = Runner(device=setup.device, environment=pinning, zygote=zygote, executor=executor, **settings)
    python = Path(setup.python) if setup.python else None
    with ExitStack() as opened:
        journal = opened.enter_context(contextlib.closing(Journal(Path(setup.journal) if setup.journal else None)))
        judge = CaseJudge(
            runner,
            deadline=setup.deadline,
            longest_s=runner.timeout_s,
            journal=journal,
            memory=MemoryWatch(setup.memory_limit_bytes, sharing_gpu=setup.sharing),
            explain=explain_in_short,
            complain=lambda text: channel.send(Trouble(message=text)),
            problem_fails=lambda text: channel.send(Trouble(message=text, of_problem=True)),
            interpret=(lambda: Runner(device="cpu", python=python, wait=False, **settings)) if on_gpu else None,
        )
        opened.callback(judge.close)
        runner.kernels.start_device()
        if setup.kernels:  # or the first is still being built
            runner.kernels.import_known(setup.kernels)
        channel.send(Ready())
        begin = _await_begin(channel, mail)
        if begin is None:
            return
        setup = msgspec.structs.replace(setup, deadline=begin.deadline)
        judge.deadline = begin.deadline
        runner.give_up_builds(lambda builds: time.monotonic() >= begin.deadline + GRACE_S)
        turn, workers = setup.worker / setup.num_workers, setup.num_workers
        WorkerLoop(
            setup,
            judge=judge,
            strategy_for=partial(_strategy, sizes),
            channel=channel,
            mail=mail,
            formats=WorkingSets(partial(_formats, setup, sizes), turn=turn, workers=workers) if on_gpu else None,
            larger=_larger_cases(setup, sizes, on_gpu=on_gpu),
        ).run()


def _pinning(device_id: str) -> dict[str, str]:
    return DeviceLease(device_id).environment if device_id else {}


def _await_begin(channel: Channel[ToWorker], mail: list[ToWorker]) -> Begin | None:
    """The message with which the search begins, None if it is over before; ``mail`` gets those for the search."""
    until = time.monotonic() + _SETUP_WAIT_S
    while (now := time.monotonic()) < until:
        for message in mail:
            if isinstance(message, Begin | Stop):
                mail.remove(message)
                return message if isinstance(message, Begin) else None
        mail += channel.receive(until - now)
    raise TimeoutError(f"no Begin came within {_SETUP_WAIT_S:.0f} s")


def _strategy(
    sizes: Sizes, declaration: Declaration, formats: Sequence[Format], length: int
) -> SearchStrategy[list[Case]]:
    return case_lists(
        declaration.problem,
        length=length,
        supports=declaration.supports,
        options=declaration.options,
        sizes=sizes,
        formats=formats,
        numbers=declaration.lengths,
    )


def _larger_cases(setup: Setup, usual: Sizes, *, on_gpu: bool) -> LargerCases:
    def source_of(sizes: Sizes) -> CaseSource:
        return CaseSource(partial(_strategy, sizes), seeds=(setup.seed, setup.worker, sizes.max_seq_len))

    return LargerCases(source_of, usual=usual, on_gpu=on_gpu, max_seq_len=setup.max_seq_len)


def _formats(setup: Setup, sizes: Sizes, declaration: Declaration) -> Iterator[Format]:
    """Formats that a worker compiles: each begins at its own place among the first, and adds some of its own."""
    domain: dict[str, Any] = {"supports": declaration.supports, "options": declaration.options, "sizes": sizes}
    first = first_formats(declaration.problem, count=_FIRST_FORMATS, **domain)
    place = setup.worker * len(first) // setup.num_workers
    own = derive_seed(setup.seed, setup.worker, declaration.name, "formats")
    yield from (*first[place:], *first[:place])
    yield from draw_formats(declaration.problem, seed=own, **domain)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
