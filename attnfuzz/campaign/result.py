"""The state of a campaign as it runs, what it amounts to at the end, and who is told of it.

An earlier campaign's summary says which bugs were known: for a search in which only what is new counts.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import msgspec

from attnfuzz.campaign.declaration_inference import Inferred
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.floor import TooFew, too_few
from attnfuzz.campaign.statistics import KernelStatistics, Throughput, WorkerProgress
from attnfuzz.data_files import MOST_RESULT_BYTES, read_data_file
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import HasBug, are_one
from attnfuzz.isolation.pythons import Python
from attnfuzz.oracles.registry import OracleName, oracle_of

FORMAT = "attnfuzz.summary/1"
"""Format of the summaries that are written and read; ``report.summary`` writes more fields than are read here."""
_Bug = tuple[str, str, str, str]
"""How a kernel is named and its name, how a bug is named and its name."""


class EarlierError(ValueError):
    """A file cannot serve as an earlier summary; the message is one sentence."""


class _Bugs(msgspec.Struct, frozen=True):
    signature: str
    cause: str = ""


class _Kernel(msgspec.Struct, frozen=True):
    name: str
    findings: tuple[_Bugs, ...]
    target: str = ""


class _Summary(msgspec.Struct, frozen=True):
    format: str
    kernels: tuple[_Kernel, ...]


@dataclass(frozen=True, slots=True)
class Earlier:
    """The bugs that the summary called ``name`` tells.

    A bug is known by its kernel and its cause. Where the summary is of a version that wrote no causes, and where only
    another machine has found it, the signature stands for the cause; in a summary without files of kernels, the name
    of a kernel stands for all of that name. ``saved``: bugs that are known from files of their cases, each with
    the address of its issue, or nothing.
    """

    name: str
    bugs: frozenset[_Bug] = field(default_factory=frozenset)
    saved: tuple[tuple[HasBug, str], ...] = ()

    def knows(self, found: Finding) -> bool:
        """Whether ``found`` was told."""
        kernels = (("target", found.declaration.target), ("name", found.declaration.name))
        bugs = (("cause", found.cause), ("signature", str(found.signature)))
        if any((*kernel, *bug) in self.bugs for kernel in kernels for bug in bugs):
            return True
        return any(are_one(one, found) for one, _ in self.saved)

    def issue_of(self, found: Finding) -> str:
        """Where ``found`` is discussed; empty if no saved case says so."""
        return next((issue for one, issue in self.saved if issue and are_one(one, found)), "")


def load_earlier(path: Path) -> Earlier:
    """Read a summary, of this or an older version. Raises EarlierError."""
    try:
        data = read_data_file(path, MOST_RESULT_BYTES)
    except OSError as error:
        raise EarlierError(f"{str(path)!r} cannot be read ({error.strerror}); {_REMEDY}") from error
    try:
        summary = msgspec.json.decode(data, type=_Summary)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EarlierError(f"{str(path)!r} is no summary of attnfuzz ({error}); {_REMEDY}") from error
    if summary.format != FORMAT:
        is_told = f"its format is {summary.format[:_SHOWN_CHARACTERS]!r}, not {FORMAT!r}"
        raise EarlierError(f"{str(path)!r} is no summary that can be read here ({is_told}); {_REMEDY}")
    return Earlier(path.name, frozenset(_bugs_in(summary)))


_REMEDY = "name what attnfuzz explore --json has written"
_SHOWN_CHARACTERS = 60


def _bugs_in(summary: _Summary) -> Iterator[_Bug]:
    for kernel in summary.kernels:
        of_kernel = ("target", kernel.target) if kernel.target else ("name", kernel.name)
        for bug in kernel.findings:
            yield (*of_kernel, *(("cause", bug.cause) if bug.cause else ("signature", bug.signature)))


StopReason = Literal["budget", "interrupted", "fail_fast", "workers_lost", "environment"]
Disposition = Literal["counts", "undecided", "known", "question", "outside"]
"""Dispositions of a finding: it makes the command fail; it has not been shrunk, may be another of its kernel, and is
told with that; an earlier campaign told it; the kernel's author has to answer it with a declaration; the kernel refuses
it, as a declaration says."""


LEAST_SEARCH_S = 5.0
"""However long the search waited to begin, or for what kernels take; a budget that is shorter is all of it."""


@dataclass(slots=True)
class Statistics:
    """Everything about a campaign that changes while it runs. Times are on the monotonic clock.

    ``why_so_many``: what the number of workers was chosen by; empty if it was asked for. ``deadline`` allows for
    start-up until ``begin``, which says when the budget ends. ``pedantic``: all that is not declared away is the
    contract. ``verifying``: no question is left open. ``against``: what an earlier campaign told, where only what is
    new counts. ``python``: where kernels run, if not in the driver's environment. ``oracles``: those that were asked
    for by name, if any were. ``first_case_s``: when the first case had been judged, in seconds since the command began.
    ``counts_from``: from when on the budget counts at the latest, however long start-up takes.
    ``asking``: of how many kernels it is not known yet what they take. ``compiling``: how many workers on a GPU have
    judged no case yet, for which a kernel has to be compiled.
    """

    kernels: dict[str, KernelStatistics]
    started: float
    deadline: float
    device: str
    device_name: str
    workers: int
    seed: int
    why_so_many: str = ""
    budget_s: float = math.inf
    pedantic: bool = False
    verifying: bool = False
    against: Earlier | None = None
    python: Python | None = None
    oracles: tuple[OracleName, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    throughput: Throughput = field(default_factory=Throughput)
    first_case_s: float | None = None
    counts_from: float = math.inf
    asking: int = 0
    compiling: int = 0

    @classmethod
    def of_kernels(cls, declarations: Sequence[Declaration]) -> dict[str, KernelStatistics]:
        """Empty statistics by target."""
        return {declaration.target: KernelStatistics(declaration=declaration) for declaration in declarations}

    def add(self, progress: WorkerProgress) -> None:
        """Add what a worker reported just now."""
        self.kernels[progress.kernel].add(progress)
        self.throughput.add(progress.device, self.elapsed_s(), progress.cases)
        if progress.cases and self.first_case_s is None:
            self.first_case_s = self.elapsed_s()

    def disposition(self, found: Finding) -> Disposition:
        """The disposition of ``found``: headlines and exit status are about findings that count."""
        if not self.in_contract(found):
            return "question" if found.is_question else "outside"
        if self.is_known(found):
            return "known"
        return "counts" if self.told_with(found) is None else "undecided"

    def told_with(self, found: Finding) -> Finding | None:
        """The finding that nothing tested tells ``found`` from, where that was not shrunk to the end.

        Few failures of a kernel are bugs of their own, which shrinking tells. Those that were shrunk come first, then
        those that were confirmed; what comes first stands for itself.
        """
        if not found.is_unfinished:
            return None
        target = found.declaration.target
        alike = [one for one in self.findings if one.declaration.target == target]
        counting = [one for one in alike if self.in_contract(one) and not self.is_known(one)]
        standing: list[Finding] = []
        for one in sorted(counting, key=lambda one: (one.is_unfinished, one.runs == 0, one.first_seen_s)):
            fitting = [told for told in standing if one.is_unfinished and told.bug.may_show_as(one.bug)]
            if one is found:
                return max(fitting, key=lambda told: told.symptom == one.symptom, default=None)
            if not fitting:
                standing.append(one)
        return None

    def in_contract(self, found: Finding) -> bool:
        """Whether ``found`` is a bug by what the kernels of this campaign are held to."""
        return self.pedantic or found.in_contract or (self.verifying and found.is_question)

    def is_known(self, found: Finding) -> bool:
        """Whether the earlier campaign told it."""
        return self.against is not None and self.against.knows(found)

    def share_compiling(self) -> float:
        """Part of the time of all workers that went into compiling kernels."""
        seconds = sum(kernel.seconds for kernel in self.kernels.values())
        return sum(kernel.compile_s for kernel in self.kernels.values()) / seconds if seconds else 0.0

    @property
    def restarts(self) -> int:
        """Executors that a case has cost."""
        return sum(kernel.restarts for kernel in self.kernels.values())

    @property
    def cases(self) -> int:
        """Cases judged."""
        return sum(kernel.cases for kernel in self.kernels.values())

    def begin(self) -> None:
        """Cases can be judged from now on, if not before: nothing may postpone the end any more.

        A third of the budget is left at least, and a few seconds: else a short one would end before the search.
        """
        now = time.monotonic()
        least_s = max(self.budget_s / 3, min(self.budget_s, LEAST_SEARCH_S))
        ends = max(min(now, self.counts_from) + self.budget_s, now + least_s)
        self.deadline = min(self.deadline, ends)

    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.started

    def remaining_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, min(self.budget_s, self.deadline - time.monotonic()))


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """The findings of a campaign and all else that it came to. ``troubles`` are errors of the framework, and
    ``of_problems`` those among them that are errors of users' problems.

    ``unconfirmed`` failures never came back and may have been the machine's doing: too slow, or out of memory.

    ``inferred`` is what probes found out of kernels whose declarations leave something open; of these, ``limited`` were
    searched in a contract that leaves something out. ``signal`` is the number of the one that interrupted it.
    ``pythons`` are the environments among which the budget was
    shared out, if there were several, ``devices`` the names of theirs, ``missed`` the targets of kernels that were not
    reached in one of them.
    ``unbuilt``: by target, how far kernels had come that compile themselves and were not built to the end;
    ``never_returned``: why kernels were not searched that never gave a result. ``unsettled``: by target, how far it
    was found out what a kernel takes, if not to the end within the budget: what failed was not looked into.
    """

    stop_reason: StopReason
    elapsed_s: float
    statistics: Statistics
    findings: tuple[Finding, ...]
    unconfirmed: tuple[Finding, ...] = ()
    troubles: tuple[str, ...] = ()
    of_problems: frozenset[str] = frozenset()
    signal: int | None = None
    inferred: tuple[Inferred, ...] = ()
    pythons: tuple[Python, ...] = ()
    devices: Mapping[Path, str] = field(default_factory=dict)
    missed: frozenset[str] = frozenset()
    unbuilt: Mapping[str, str] = field(default_factory=dict)
    never_returned: Mapping[str, str] = field(default_factory=dict)
    unsettled: Mapping[str, str] = field(default_factory=dict)

    @property
    def unreached(self) -> tuple[str, ...]:
        """Targets of the kernels that no case was judged on, in one environment at least: nothing is known of them."""
        found = {finding.declaration.target for finding in self.findings}
        reached = {target for target, kernel in self.statistics.kernels.items() if kernel.cases or target in found}
        return tuple(target for target in self.statistics.kernels if target not in reached or target in self.missed)

    @property
    def idle_oracles(self) -> tuple[OracleName, ...]:
        """The oracles asked for by name that had a word on no case: what they would say is not known.

        All others than relations look at each case.
        """
        kernels = self.statistics.kernels.values()
        if not self.statistics.cases:
            return ()
        asked = (name for name in self.statistics.oracles if oracle_of(name).is_relation)
        return tuple(name for name in asked if not any(kernel.related.get(name) for kernel in kernels))

    @property
    def unquestioned(self) -> tuple[str, ...]:
        """Targets of the kernels that no oracle asked for by name had a word on, though it had on another one."""
        asked, kernels = self.statistics.oracles, self.statistics.kernels
        if not asked or not all(oracle_of(name).is_relation for name in asked) or set(self.idle_oracles) == set(asked):
            return ()
        return tuple(
            target for target, kernel in kernels.items() if kernel.cases and not any(map(kernel.related.get, asked))
        )

    @property
    def untried(self) -> Iterator[tuple[str, str, int]]:
        """Kernels, relations none of whose runs could be made on any case of them, and on how many that was tried."""
        for target, kernel in self.statistics.kernels.items():
            for relation, cases in kernel.untried.items():
                if not kernel.related.get(relation):
                    yield target, relation, cases

    @property
    def too_few(self) -> tuple[TooFew, ...]:
        """Kernels without findings of which so little was tested that this says nothing."""
        found = {finding.declaration.target for finding in self.findings}
        kernels = (one for target, one in self.statistics.kernels.items() if target not in found)
        judged = (too_few(one, budget_s=self.statistics.budget_s) for one in kernels)
        return tuple(one for one in judged if one is not None)

    @property
    def interrupted_by(self) -> int | None:
        """The number of the signal that ended it early."""
        return (self.signal or signal.SIGINT) if self.stop_reason == "interrupted" else None

    @property
    def limited(self) -> tuple[Inferred, ...]:
        """The inferred contracts of kernels that do not take all that their declarations leave open."""
        return tuple(one for one in self.inferred if one.left_out)

    @property
    def questions(self) -> tuple[Finding, ...]:
        """Questions that only the authors of kernels can answer, each with its case."""
        return tuple(one for one in self.findings if self.statistics.disposition(one) == "question")

    @property
    def fails(self) -> bool:
        """Whether anything was found that counts."""
        return any(self.statistics.disposition(one) == "counts" for one in self.findings)

    def findings_of(self, target: str) -> list[Finding]:
        """The findings of one kernel."""
        return [finding for finding in self.findings if finding.declaration.target == target]


FindingEvent = Literal["found", "confirmed", "unconfirmed", "known", "smaller", "shrunk"]
"""*Found*: a case failed, and nothing is confirmed yet. *Confirmed*: it failed again and is saved at ``finding.path``.
*Unconfirmed*: it did not fail again: a flaky finding, which is saved, or nothing. *Known*: it came down to a bug that
was found before, and is forgotten. *Smaller*: a smaller case fails in the same way, for every step of shrinking.
*Shrunk*: shrinking has ended."""


class Reporter:
    """Called by the coordinator, always from the same thread; this one says nothing."""

    def waiting(self, what: str) -> None:
        """Told while the campaign waits for something before its first case; may be said again."""

    def started(self, statistics: Statistics) -> None:
        """The kernels are known and the workers start."""

    def progress(self, statistics: Statistics) -> None:
        """Several times a second."""

    def finding(self, event: FindingEvent, finding: Finding) -> None:
        """Told whenever something has become of a finding."""

    def finished(self) -> None:
        """The workers have ended; called once, also when the campaign ends by an exception."""

    def note(self, text: str) -> None:
        """Anything else worth a line."""


class _Forgiving:
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*what: object) -> None:
            with suppress(OSError):  # a terminal that has gone: the search goes on without being watched
                getattr(self._reporter, name)(*what)

        return tell


def forgiving(reporter: Reporter) -> Reporter:
    """Passes everything on, and lives with an output that is gone: a closed terminal, a pipe without a reader, a full
    disk. What was found is saved whether anybody reads of it or not."""
    return cast(Reporter, _Forgiving(reporter))
