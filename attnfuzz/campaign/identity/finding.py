"""A case that failed once, where every finding begins, and one finding of a campaign down to the minimal case."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from attnfuzz.campaign.environments import EnvironmentOutcome, difference
from attnfuzz.campaign.identity.signature import Signature, Symptom, aspects, certain, failure_features, telling
from attnfuzz.campaign.messages import Unfinished, written
from attnfuzz.corpus import FindingRecord, Regression, current_environment
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import WeightedRow
from attnfuzz.isolation.pythons import Python
from attnfuzz.judging.leaks import LEAK
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.features import departures
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import RESULT, Failure, Sight

__all__ = [
    "FailingCase",
    "Finding",
    "may_be_leak",
    "may_be_the_machine",
    "one_of_each",
]


@dataclass(frozen=True, slots=True)
class FailingCase:
    """A case that failed, and the cases that ran before it in the same process."""

    declaration: Declaration
    case: Case
    failure: Failure
    preceding: tuple[Case, ...] = ()

    @property
    def symptom(self) -> Symptom:
        """Kernel, oracle and kind."""
        return Symptom.of(self.declaration.target, self.failure)

    @property
    def features(self) -> frozenset[str]:
        """What makes the case more than the simplest one, as far as the failure may need it."""
        return failure_features(self.declaration, self.case, self.failure)

    def as_(self, case: Case, failure: Failure) -> FailingCase:
        """Another case of the same kernel, with the same ones before it."""
        return FailingCase(self.declaration, case, failure, self.preceding)

    @property
    def told(self) -> Failure:
        """The failure, with what it needs besides the case."""
        if not self.preceding:
            return self.failure
        others = "another case has" if len(self.preceding) == 1 else f"{len(self.preceding)} other cases have"
        message = f"{self.failure.message}; only after {others} run in the same process"
        return msgspec.structs.replace(self.failure, message=message)


_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")


def may_be_leak(failure: Failure) -> bool:
    """Whether the process, or what the kernel may have of the GPU, ran out of memory."""
    if failure.oracle == "crash":
        return failure.kind == "memory"
    return failure.oracle == "exception" and failure.kind.split(" ")[0] in _OUT_OF_MEMORY


_OF_THE_MACHINE = ("SIGKILL", "zygote", LEAK)


def may_be_the_machine(failure: Failure) -> bool:
    """Whether no kernel need be at fault: it took too long, memory ran out or grew, or somebody killed the process.

    Anything else, a wrong number above all, comes of no load: a kernel that shows it once fails now and then.
    """
    if failure.oracle == "hang" or may_be_leak(failure):
        return True
    return failure.oracle == "crash" and failure.kind in _OF_THE_MACHINE


_MAX_ALSO = 8
Declared = TypeVar("Declared", Supports, Numerics)


@dataclass(slots=True, eq=False)
class Finding:
    """The smallest failing case so far, and how sure it is.

    ``case`` fails once those of ``preceding`` have run before it, in the same process. Until it has been confirmed
    which of them it needs, ``seen_after`` holds all that had run there.
    ``failed`` of ``runs`` repetitions failed; ``runs`` is 0 until it has been confirmed. ``first_seen_s`` and
    ``shrunk_s`` (None until shrinking has ended by itself) are seconds since the campaign began. ``known_as`` is the
    file of an earlier campaign with the same signature, ``replaces`` one whose case was larger. ``tag`` is a short hash
    of what was first seen: by it all lines about one finding are known, however small its case becomes. ``also``: other
    findings that this one stands for. ``remedy``: the declaration, if there is one, that says that the kernel is not
    meant to do better. ``cases_seen``: failing cases of the campaign that were put down to it, the first one included.
    ``weights``: what the kernel gave to each token, where that was measured. ``declarable`` unless the kernel failed
    within the declaration that would end it. ``python``: where it was found, if not in the driver's environment;
    ``outcomes``: what comes of the case in each environment, where several are compared.
    """

    name: str
    declaration: Declaration
    case: Case
    failure: Failure
    first_seen_s: float
    failed: int = 0
    runs: int = 0
    shrunk_s: float | None = None
    minimised: bool = False
    steps: int = 0
    path: Path | None = None
    known_as: Path | None = None
    replaces: Path | None = None
    features: frozenset[str] = field(default_factory=frozenset)
    preceding: tuple[Case, ...] = ()
    seen_after: tuple[Case, ...] = ()
    tag: str = ""
    also: tuple[Sight, ...] = ()
    remedy: Supports | None = None
    cases_seen: int = 1
    weights: tuple[WeightedRow, ...] = ()
    declarable: bool = True
    python: Python | None = None
    outcomes: tuple[EnvironmentOutcome, ...] = ()

    def __post_init__(self) -> None:
        if not self.tag:
            first_seen = (self.declaration.target, self.failure.oracle, self.failure.kind, encode_case(self.case))
            self.tag = hashlib.sha256(repr(first_seen).encode()).hexdigest()[:6]

    @property
    def ran_before(self) -> tuple[Case, ...]:
        """What it may take to see it again, besides the case."""
        return self.preceding or self.seen_after

    def unfinished(self) -> Unfinished:
        """What somebody else has to know to go on with it."""
        return Unfinished(kernel=self.declaration.target, **written(self.case, self.failure, self.ran_before))

    def also_shows_as(self, other: Finding) -> None:
        """Note what ``other`` showed as, and what that stood for."""
        features = tuple(sorted(telling(other.signature.features))) if other.shrunk_s is not None else ()
        failure = other.failure
        its = Sight(oracle=failure.oracle, kind=failure.kind, message=failure.message, features=features)
        self.also = one_of_each((*self.also, its, *other.also))

    def sights(self) -> Iterator[frozenset[str]]:
        """The features of each bug that this finding has come to stand for."""
        return (frozenset(sight.features) for sight in self.also)

    @property
    def symptom(self) -> Symptom:
        """Kernel, oracle and kind."""
        return Symptom.of(self.declaration.target, self.failure)

    @property
    def signature(self) -> Signature:
        """The symptom with the features of the smallest case so far."""
        features = self.features or certain(failure_features(self.declaration, self.case, self.failure))
        return Signature(self.symptom, features)

    @property
    def may_need(self) -> frozenset[str]:
        """What the failure needs as far as is known, and what it would need if another case passed."""
        supports, options = self.declaration.supports, self.declaration.options
        return self.signature.features | departures(self.case, supports=supports, options=options)

    @property
    def cause(self) -> str:
        """What the bug is called: the same in every campaign that comes down to the same."""
        named = self.failure.cause or self.failure.name
        about = ", ".join(sorted(aspects(self.signature.features)))
        return f"{named} [{about}]" if about else named

    @property
    def said(self) -> Failure:
        """What an oracle says of its smallest case."""
        return self.failure

    @property
    def in_contract(self) -> bool:
        """Whether it is a bug whatever is declared; `Statistics.in_contract` knows of --pedantic, too."""
        return self.remedy is None

    @property
    def is_question(self) -> bool:
        """Whether a declaration ends it and the kernel refuses nothing: its author has to say what is meant."""
        refuses = self.failure.oracle == "exception" and self.failure.kind != RESULT
        return self.remedy is not None and not refuses

    @property
    def is_flaky(self) -> bool:
        """Whether some repetitions passed."""
        return self.failed < self.runs

    @property
    def is_unfinished(self) -> bool:
        """Whether shrinking was cut off, or has not ended yet: what it needs is not known."""
        return self.shrunk_s is None and not self.is_flaky

    def certainty(self) -> str:
        """How often it failed, if not always, and what else it needs; empty for a case that always fails alone."""
        if self.runs == 0:
            return "seen once; time ran out before it was confirmed"
        if self.is_flaky:
            return f"flaky: failed {self.failed} of {self.runs} runs"
        count = len(self.preceding)
        return f"needs {count} other case{'s' if count > 1 else ''} before it in the same process" if count else ""

    def comparison(self) -> str:
        """What its case came to in several environments; empty where none are compared."""
        alike = f"{self.outcomes[0].ending} in each of {len(self.outcomes)} environments" if self.outcomes else ""
        return difference(self.outcomes, self.declaration.target) or alike

    def regression(self, device: str) -> Regression:
        """What is saved of it."""
        failed, runs = (self.failed, self.runs) if self.is_flaky else (0, 0)
        record = FindingRecord.of(
            self.failure,
            telling(self.signature.features),
            failed=failed,
            runs=runs,
            also=self.also,
            remedy=self.remedy,
        )
        environment = current_environment(device, None if self.python is None else self.python.versions)
        versions = {**environment.versions, **self.declaration.versions}
        return Regression(
            problem=self.declaration.problem,
            kernel=self.declaration.target,
            case=self.case,
            preceding=self.preceding,
            assumed=_assumed(self.declaration, self.declaration.supports),
            assumed_numerics=_assumed(self.declaration, self.declaration.numerics),
            finding=record,
            note=self.certainty(),
            environment=msgspec.structs.replace(environment, versions=versions),
        )


def _assumed(declaration: Declaration, declared: Declared) -> Declared | None:
    """What of ``declared`` was inferred; None if nothing was."""
    names = [name for name in declaration.assumed if name in declared.__struct_fields__]
    return type(declared)(**{name: getattr(declared, name) for name in names}) if names else None


def one_of_each(sights: Iterable[Sight]) -> tuple[Sight, ...]:
    """A few, and of those that say the same of a symptom the one that needs least."""
    kept: dict[tuple[str, str, str], Sight] = {}
    for sight in sights:
        said = sight.oracle, sight.kind, sight.message
        kept[said] = min(kept.get(said, sight), sight, key=lambda one: len(one.features))
    return tuple(kept.values())[:_MAX_ALSO]
