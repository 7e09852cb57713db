"""One finding of a campaign, from the first failing case to the minimal one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from attnfuzz.campaign.aspects import telling
from attnfuzz.campaign.signature import Signature, Symptom, failure_features
from attnfuzz.corpus import FindingRecord, Regression, current_environment
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.supports import Supports

__all__ = ["Finding"]

_ALSO = "also shows as: "
_FEATURES = re.compile(r" \[([^][]*)\]: ")
_MAX_ALSO = 8


@dataclass(slots=True, eq=False)
class Finding:
    """The smallest failing case so far, and how sure it is.

    ``case`` fails once those of ``preceding`` have run before it, in the same process. Until it has been confirmed
    which of them it needs, ``seen_after`` holds all that had run there.
    ``failed`` of ``runs`` repetitions failed; ``runs`` is 0 until it has been confirmed. ``first_seen_s`` and
    ``shrunk_s`` (None until shrinking has ended by itself) are seconds since the campaign began. ``known_as`` is the
    file of an earlier campaign with the same signature, ``replaces`` one whose case was larger. ``tag`` is a short hash
    of what was first seen: by it all lines about one finding are known, however small its case becomes.
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

    def __post_init__(self) -> None:
        if not self.tag:
            first_seen = (self.declaration.target, self.failure.oracle, self.failure.kind, encode_case(self.case))
            self.tag = hashlib.sha256(repr(first_seen).encode()).hexdigest()[:6]

    @property
    def ran_before(self) -> tuple[Case, ...]:
        """What it may take to see it again, besides the case."""
        return self.preceding or self.seen_after

    def also_shows_as(self, other: Finding) -> None:
        """Name ``other``, and what that was known to show as, among the details of this finding."""
        mine = [line for line in self.failure.details if not line.startswith(_ALSO)]
        its = [line for line in other.failure.details if line.startswith(_ALSO)]
        what = str(other.signature) if other.shrunk_s is not None else f"{other.symptom.oracle}/{other.symptom.kind}"
        its = [f"{_ALSO}{what}: {other.failure.message}", *its]
        lines = [line for line in self.failure.details if line.startswith(_ALSO)]
        kept = _one_of_each([*lines, *its])[:_MAX_ALSO]
        self.failure = msgspec.structs.replace(self.failure, details=(*mine, *kept))

    def sights(self) -> Iterator[frozenset[str]]:
        """The features of each bug that this finding has come to stand for."""
        for line in self.failure.details:
            if line.startswith(_ALSO) and (named := _FEATURES.search(line)):
                yield frozenset(named[1].split(", "))

    @property
    def symptom(self) -> Symptom:
        """Kernel, oracle and kind."""
        return Symptom.of(self.declaration.target, self.failure)

    @property
    def signature(self) -> Signature:
        """The symptom with the features of the smallest case so far."""
        return Signature(self.symptom, self.features or failure_features(self.declaration, self.case, self.failure))

    @property
    def is_flaky(self) -> bool:
        """Whether some repetitions passed."""
        return self.failed < self.runs

    def certainty(self) -> str:
        """How often it failed, if not always, and what else it needs; empty for a case that always fails alone."""
        if self.runs == 0:
            return "seen once; time ran out before it was confirmed"
        if self.is_flaky:
            return f"flaky: failed {self.failed} of {self.runs} runs"
        count = len(self.preceding)
        return f"needs {count} other case{'s' if count > 1 else ''} before it in the same process" if count else ""

    def regression(self, device: str) -> Regression:
        """What is saved of it."""
        failed, runs = (self.failed, self.runs) if self.is_flaky else (0, 0)
        record = FindingRecord.of(self.failure, telling(self.signature.features), failed=failed, runs=runs)
        return Regression(
            problem=self.declaration.problem,
            kernel=self.declaration.target,
            case=self.case,
            preceding=self.preceding,
            assumed=_assumed(self.declaration),
            finding=record,
            note=self.certainty(),
            environment=current_environment(device),
        )


def _assumed(declaration: Declaration) -> Supports | None:
    fields = {name: getattr(declaration.supports, name) for name in declaration.assumed}
    return Supports(**fields) if fields else None


def _one_of_each(lines: list[str]) -> list[str]:
    """Of lines that say the same of a symptom the shortest: the one with the fewest features."""
    kept: dict[tuple[str, str], str] = {}
    for line in lines:
        said = line.partition(" [")[0], line.partition("]: ")[2]
        kept[said] = min(kept.get(said, line), line, key=len)
    return list(kept.values())
