"""One finding of a campaign, from the case that failed first down to the minimal one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from attnfuzz.campaign.environments import EnvironmentOutcome, difference
from attnfuzz.campaign.messages import Unfinished, written
from attnfuzz.corpus import FindingRecord, Regression, current_environment
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import WeightedRow
from attnfuzz.identity.bug import Bug, Signature, Symptom, failure_features, is_refusal, tag_of
from attnfuzz.identity.features import kernel_parts, most_specific, unconditional
from attnfuzz.isolation.pythons import Python
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.feature import Feature, words_of
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Failure, Sight

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
    findings that this one stands for; ``merged``: their bugs. ``remedy``: the declaration, if there is one, that says
    that the kernel is not meant to do better. ``cases_seen``: failing cases of the campaign that were put down to it,
    the first one included. ``weights``: what the kernel gave to each token, where that was measured. ``declarable``
    unless the kernel failed within the declaration that would end it. ``same_as``: the tag of a finding of the same
    bug, where cases near the case have told that. ``python``: where it was found, if not in the driver's environment;
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
    features: frozenset[Feature] = field(default_factory=frozenset)
    preceding: tuple[Case, ...] = ()
    seen_after: tuple[Case, ...] = ()
    tag: str = ""
    also: tuple[Sight, ...] = ()
    merged: tuple[Bug, ...] = ()
    remedy: Supports | None = None
    cases_seen: int = 1
    weights: tuple[WeightedRow, ...] = ()
    declarable: bool = True
    same_as: str = ""
    python: Python | None = None
    outcomes: tuple[EnvironmentOutcome, ...] = ()

    def __post_init__(self) -> None:
        if not self.tag:
            self.tag = tag_of(self.declaration.target, self.case, self.failure)

    def unfinished(self) -> Unfinished:
        """The record with which somebody else can go on with it."""
        return Unfinished(
            kernel=self.declaration.target, **written(self.case, self.failure, self.preceding or self.seen_after)
        )

    def also_shows_as(self, other: Finding) -> None:
        """Note what ``other`` showed as, and what that stood for."""
        features = tuple(words_of(most_specific(other.signature.features))) if other.shrunk_s is not None else ()
        failure = other.failure
        its = Sight(oracle=failure.oracle, kind=failure.kind, message=failure.message, features=features)
        self.also = one_of_each((*self.also, its, *other.also))
        self.merged = (*self.merged, *(() if other.is_unfinished else (other.bug,)), *other.merged)

    def sights(self) -> Iterator[frozenset[Feature]]:
        """The features of each bug that this finding has come to stand for."""
        return (frozenset(map(Feature.read, sight.features)) for sight in self.also)

    @property
    def symptom(self) -> Symptom:
        """Kernel, oracle and kind."""
        return Symptom.of(self.declaration.target, self.failure)

    @property
    def signature(self) -> Signature:
        """How it is named."""
        return Signature.of(self.declaration.target, self.failure, self._needed)

    @property
    def _needed(self) -> frozenset[Feature]:
        return self.features or unconditional(failure_features(self.declaration, self.case, self.failure))

    @property
    def bug(self) -> Bug:
        about = {
            "rough": self.is_unfinished,
            "flaky": self.is_flaky,
            "finding": self.tag,
            "case": encode_case(self.case),
        }
        return Bug.shown_by(self.declaration.target, self.failure, self._needed, **about)

    @property
    def cause(self) -> str:
        """The name of the bug: the same in every campaign that comes down to the same."""
        named = self.failure.cause or self.failure.name
        about = ", ".join(words_of(kernel_parts(self.signature.features)))
        return f"{named} [{about}]" if about else named

    @property
    def in_contract(self) -> bool:
        """Whether it is a bug whatever is declared; `Statistics.in_contract` knows of --pedantic, too."""
        return self.remedy is None

    @property
    def is_question(self) -> bool:
        """Whether a declaration ends it and the kernel refuses nothing: its author has to say what is meant."""
        return self.remedy is not None and not is_refusal(self.failure)

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
        """The outcomes of its case in several environments; empty where none are compared."""
        alike = f"{self.outcomes[0].ending} in each of {len(self.outcomes)} environments" if self.outcomes else ""
        return difference(self.outcomes, self.declaration.target) or alike

    def regression(self, device: str) -> Regression:
        """The regression file of the finding."""
        failed, runs = (self.failed, self.runs) if self.is_flaky else (0, 0)
        record = FindingRecord.of(
            self.failure,
            words_of(most_specific(self.signature.features)),
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
    """The part of ``declared`` that was inferred; None if nothing was."""
    names = [name for name in declaration.assumed if name in declared.__struct_fields__]
    return type(declared)(**{name: getattr(declared, name) for name in names}) if names else None


def one_of_each(sights: Iterable[Sight]) -> tuple[Sight, ...]:
    """A few, and of those that say the same of a symptom the one that needs least."""
    kept: dict[tuple[str, str, str], Sight] = {}
    for sight in sights:
        said = sight.oracle, sight.kind, sight.message
        kept[said] = min(kept.get(said, sight), sight, key=lambda one: len(one.features))
    return tuple(kept.values())[:_MAX_ALSO]
