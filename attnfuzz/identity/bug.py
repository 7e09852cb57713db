"""Bugs that are known, which failures they predict, and which findings are one bug. Torch-free.

A cause that was told decides: a failure has among its causes every mistake that gives its very result. Of two accesses
to memory that the kernel must leave alone, and of two indices out of range, so does the line, where it is the same.
Where neither decides, a failure that shows alike, of a case with all that the bug needs, is presumed to be it. Between
findings that show differently the part of the kernel decides that both are about.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from attnfuzz.bundled.merge_states import ONE_EMPTY, SIDES_EMPTY
from attnfuzz.cases.facets.contents import SCALES
from attnfuzz.cases.facets.sequences import RAGGED, SEVERAL_SEQUENCES
from attnfuzz.cases.facets.storage import EXTRA_COLUMNS, strided
from attnfuzz.corpus import FindingRecord
from attnfuzz.declaration import Declaration
from attnfuzz.identity.differences import differences, differing
from attnfuzz.identity.features import (
    NEEDS_PRECEDING,
    case_features,
    has_essentials,
    is_about,
    kernel_parts,
    most_specific,
    needs_numbers,
    of_last_digits,
)
from attnfuzz.judging.leaks import LEAK
from attnfuzz.mistake import (
    KEPT_BETWEEN_CALLS,
    OF_PROBLEM,
    PAST_THE_END,
    WITHOUT_WEIGHT,
    are_of_what_was_read,
    are_roundings,
    in_particular,
    mistake_of,
    parts_of,
)
from attnfuzz.oracles.registry import RED_ZONE, OracleName, oracle_of
from attnfuzz.problems.cases import AttentionCase, Case, encode_case
from attnfuzz.problems.feature import Feature, words_of
from attnfuzz.problems.repeated import plain_values
from attnfuzz.verdict import REPLACED, RESULT, Cause, Failure, SourceLine, ends_process, is_fault

_FAULTS = ("SIGSEGV", "SIGBUS", "cuda:")
_OF_STATISTICS = (":size", ":lean", ":factor")
_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")
_REFUSALS = frozenset(
    {
        "AssertionError",
        "CompilationError",
        "CompileTimeAssertionFailure",
        "NotImplementedError",
        "OutOfResources",
        "RuntimeError",
        "UnsupportedLanguageConstruct",
        "ValueError",
    }
)
_OF_THE_MACHINE = ("SIGKILL", "zygote", LEAK)
_COMPARE_RUNS = frozenset({"determinism", "call_sequence"})
_SUPPLIED: dict[str, frozenset[Feature]] = {
    "merge_laws": frozenset({ONE_EMPTY, *SIDES_EMPTY}),
    "batch_invariance": frozenset({SEVERAL_SEQUENCES, RAGGED}),
    "block_table_slack": frozenset({EXTRA_COLUMNS}),
    "value_affinity": frozenset({SCALES}),
}
"""What a relation's further runs have, whatever the case has."""
_OF_ROUNDING = frozenset({"value_affinity", "batch_invariance"})
_FEW_DIFFERENCES = 3
"""Between two cases: more of them say nothing."""
_STRIDE = "ignored_stride"
_PAGE_IDS = "ignored_page_ids"


@dataclass(frozen=True, slots=True)
class Symptom:
    """Kernel (by target), oracle and kind: all that a failure shows at once."""

    kernel: str
    oracle: str
    kind: str

    @classmethod
    def of(cls, kernel: str, failure: Failure | FindingRecord) -> Symptom:
        """The symptom of ``failure`` on the kernel loaded by ``kernel``."""
        is_plainly_wrong = failure.oracle == "residuals" and not failure.kind.endswith(_OF_STATISTICS)
        return cls(kernel, "accuracy" if is_plainly_wrong else failure.oracle, failure.kind)

    @property
    def is_of_bits(self) -> bool:
        """Whether a relation saw that bits differ."""
        return oracle_of(self.oracle).is_relation and self.kind == "bits"

    @property
    def is_of_last_digits(self) -> bool:
        """Whether these are as a rule the last ones, and it is chance in which cases a mistake changes them."""
        return self.oracle in _OF_ROUNDING and self.kind == "bits"

    @property
    def is_fault(self) -> bool:
        """Whether memory was accessed that is not there, or nobody's."""
        return is_fault(self.oracle, self.kind) or (self.oracle == "crash" and self.kind.startswith(_FAULTS))

    @property
    def is_of_index(self) -> bool:
        """Whether an index was out of range, which torch, NumPy and Python refuse; a GPU reads what lies there."""
        return self.oracle == "exception" and self.kind.partition(" ")[0] == "IndexError"

    @property
    def sort(self) -> str:
        """The sort of harm: memory or numbers are wrong, by whatever oracle; or something else, and what."""
        if self.oracle in ("exception", "hang") or (self.oracle == "crash" and not self.kind.startswith(_FAULTS)):
            return f"{self.oracle}/{self.kind}"
        return ""


def is_alike(one: Failure, other: Failure) -> bool:
    """Whether a smaller case that shows ``other`` may stand for one that shows ``one``.

    Not if it shows less: numbers where the process died, a wrong log-sum-exp where the output was wrong, or what only a
    relation sees.
    """
    if Symptom.of("", one).sort != Symptom.of("", other).sort or ends_process(one) != ends_process(other):
        return False
    if _is_of_relation(other) and not _is_of_relation(one):
        return False
    return _is_of_lse(_results(one)) == _is_of_lse(_results(other))


@dataclass(frozen=True)
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
    def features(self) -> frozenset[Feature]:
        """The features that make the case more than the simplest one, as far as the failure may need it."""
        return failure_features(self.declaration, self.case, self.failure)

    @property
    def relations(self) -> tuple[OracleName, ...]:
        """The relations to ask for, beside the usual oracles, to see the failure again."""
        return oracle_of(self.failure.oracle).relations

    def with_case(self, case: Case, failure: Failure) -> FailingCase:
        """Another case of the same kernel, with the same ones before it."""
        return FailingCase(self.declaration, case, failure, self.preceding)

    @property
    def told(self) -> Failure:
        """The failure, with what it needs besides the case: then it says nothing about the case by itself."""
        if not self.preceding:
            return self.failure
        differs = sorted({path for one in self.preceding for path in differing(self.case, one)})
        if not differs:
            earlier = "the same call"
        elif len(self.preceding) == 1 and len(differs) <= _FEW_DIFFERENCES:
            what = " and ".join(differences(self.case, self.preceding[0]))
            earlier = f"a call that is the same but for {what}"
        else:
            earlier = "another case" if len(self.preceding) == 1 else f"{len(self.preceding)} other cases"
        words = f"only after {earlier} in the same process: alone, in a fresh one, it passes"
        cause = Cause(mistake=KEPT_BETWEEN_CALLS, way=", ".join(differs[:_FEW_DIFFERENCES]), words=words)
        message = f"{self.failure.message}; {words}"
        return msgspec.structs.replace(self.failure, message=message, causes=(cause,), maybe=(), remedy={})


def failure_features(declaration: Declaration, case: Case, failure: Failure) -> frozenset[Feature]:
    """The features of ``case`` that ``failure`` may need."""
    if failure.oracle == "residuals" and isinstance(case, AttentionCase):  # it has other numbers of its own
        case = msgspec.structs.replace(case, values=plain_values(case, case.seed))
    return case_features(declaration, case)


def tag_of(kernel: str, case: Case, failure: Failure) -> str:
    """By what a finding is known from the moment that ``failure`` was seen first, however small its case becomes."""
    first_seen = (kernel, failure.oracle, failure.kind, encode_case(case))
    return hashlib.sha256(repr(first_seen).encode()).hexdigest()[:6]


def may_be_leak(failure: Failure) -> bool:
    """Whether the process, or what the kernel may have of the GPU, ran out of memory."""
    if failure.oracle == "crash":
        return failure.kind == "memory"
    return failure.oracle == "exception" and failure.kind.split(" ")[0] in _OUT_OF_MEMORY


def is_leak(failure: Failure | FindingRecord | Bug) -> bool:
    """Whether the kernel keeps memory with every call."""
    return failure.kind == LEAK


def is_told_of_all(failure: Failure) -> bool:
    """Whether whatever else is seen of the kernel would come of this: what judges it has been replaced, or is gone."""
    return failure.kind.endswith(REPLACED) or (failure.oracle == "crash" and failure.kind == "zygote")


def lacks_lse(failure: Failure) -> bool:
    """Whether a log-sum-exp was never written."""
    return failure.oracle == "unwritten" and _is_of_lse(frozenset({failure.kind}))


def is_refusal(failure: Failure) -> bool:
    """Whether the kernel, or a compiler, raised something, and attnfuzz objects to nothing else."""
    return failure.oracle == "exception" and failure.kind != RESULT


def says_it_cannot(failure: Failure) -> bool:
    """Whether the kernel, or a compiler, says that it does not do this; an index out of range is a mistake."""
    return failure.oracle == "exception" and failure.kind.partition(" ")[0] in _REFUSALS


def may_be_the_machine(failure: Failure) -> bool:
    """Whether no kernel need be at fault: it took too long, memory ran out or grew, or somebody killed the process.

    Anything else, a wrong number above all, comes of no load: a kernel that shows it once fails now and then.
    """
    if failure.oracle == "hang" or may_be_leak(failure):
        return True
    return failure.oracle == "crash" and failure.kind in _OF_THE_MACHINE


@dataclass(frozen=True, slots=True)
class Signature:
    """How a bug is named: its symptom, or the rounding that it is, with what its smallest case needs."""

    symptom: Symptom
    features: frozenset[Feature]

    @classmethod
    def of(cls, kernel: str, failure: Failure | FindingRecord, features: frozenset[Feature]) -> Signature:
        """The signature of a failure; roundings have no features, since their results depend on orders of summing."""
        symptom = Symptom.of(kernel, failure)
        if mistake_of(failure.cause).is_everywhere:
            return cls(Symptom(kernel, symptom.oracle, failure.cause), frozenset())
        return cls(symptom, of_last_digits(features) if symptom.is_of_last_digits else features)

    def __str__(self) -> str:
        needed = ", ".join(words_of(most_specific(self.features)))
        return f"{self.symptom.oracle}/{self.symptom.kind}" + (f" [{needed}]" if needed else "")


class Bug(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="known"):
    """A known bug of ``kernel`` that ``oracle`` sees as ``kind``; one that shows in several ways is several.

    Also what is known of a failure that may be one, before it is looked into.

    - ``features``: what it needs; of a failure, all that its case has that it may need.
    - ``mistakes``: those that give its very result, of which one is it. Empty if none is known.
    - ``perhaps``: mistakes that would give errors of such a size.
    - ``own``: which of the mistakes that the problem knows it is, if it is one; it gives all results of several cases.
    - ``results``: the tensors that are concerned, if known.
    - ``missing``: the declaration that it misses, as field and value.
    - ``line``: where it reads or writes what it must not, or an index is out of range, if that is known to be one line.
    - ``rough``: it has not been shrunk, so that it may need less than its ``features``.
    - ``flaky``: it does not show in every run.
    - ``finding``: the tag of the finding that tells it; failures that it predicts are counted as that one's.
    - ``case``: the smallest that shows it, if known.
    """

    kernel: str
    oracle: OracleName
    kind: str
    features: frozenset[Feature]
    mistakes: frozenset[str] = frozenset()
    perhaps: frozenset[str] = frozenset()
    own: str = ""
    results: frozenset[str] = frozenset()
    missing: frozenset[tuple[str, str | bool]] = frozenset()
    line: SourceLine | None = None
    rough: bool = False
    flaky: bool = False
    finding: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{6})?$")] = ""
    case: bytes = b""

    @classmethod
    def shown_by(cls, kernel: str, said: Failure | FindingRecord, features: frozenset[Feature], **more: Any) -> Bug:
        """The bug that an oracle tells of by what it ``said`` of a case that has ``features``. ``more``: other
        fields."""
        symptom = Symptom.of(kernel, said)
        is_of_an_access = symptom.is_fault or symptom.oracle == RED_ZONE.name  # whatever it is of, its line is wrong
        causes = said.causes if isinstance(said, Failure) else [Cause(mistake=said.cause)]
        raised_at = said.raised_at if isinstance(said, Failure) and symptom.is_of_index else None
        return cls(
            kernel=kernel,
            oracle=symptom.oracle,
            kind=symptom.kind,
            features=features | ({strided(said.tensor)} if said.cause == _STRIDE else set()),
            mistakes=frozenset(one.mistake for one in causes if one.mistake),
            perhaps=frozenset(said.maybe),
            own=causes[0].way if [one.mistake for one in causes] == [OF_PROBLEM] else "",
            results=_results(said),
            missing=frozenset(said.remedy.items() if isinstance(said, Failure) else ()),
            line=said.sources[0] if len(said.sources) == 1 and is_of_an_access else raised_at,
            **more,
        )

    @classmethod
    def seen_in(cls, failing: FailingCase) -> Bug:
        """The bug that a failing case shows."""
        return cls.shown_by(failing.declaration.target, failing.failure, failing.features)

    @property
    def symptom(self) -> Symptom:
        """Kernel, oracle and kind."""
        return Symptom(self.kernel, self.oracle, self.kind)

    @property
    def is_of_relation(self) -> bool:
        """Whether no single run shows it, nor ends the process."""
        return _is_of_relation(self)

    @property
    def all_features(self) -> frozenset[Feature]:
        """``features``, with those of the runs that its oracle makes of a case."""
        return self.features | _SUPPLIED.get(self.oracle, frozenset())

    @property
    def needs_others(self) -> bool:
        """Whether it shows only after other cases."""
        return NEEDS_PRECEDING in self.features

    @property
    def is_of_lse(self) -> bool:
        """Whether it spoils a log-sum-exp alone."""
        return _is_of_lse(self.results)

    @property
    def is_everywhere(self) -> bool:
        """Whether its mistake is known, and names it: the kernel makes it wherever it computes."""
        return bool(self.mistakes) and all(map(_is_everywhere, self.mistakes))

    @property
    def is_rounding(self) -> bool:
        """Whether it is known to round, or to have offsets that are too narrow."""
        return bool(self.mistakes) and all(mistake_of(one).is_of_luck for one in self.mistakes)

    @property
    def is_of_all_reads(self) -> bool:
        """Whether pages are read where no table said, so that whatever lies there is read, and shows in any way."""
        return self.mistakes == {_PAGE_IDS}

    @property
    def is_without_weight(self) -> bool:
        """Whether memory is read whose weight is 0, and not for a score that is so much larger than what lies there."""
        return self.mistakes == {WITHOUT_WEIGHT} and not needs_numbers(self.features)

    @property
    def is_wrong_number(self) -> bool:
        """Whether one run shows another number than the right one, and not NaN or infinity."""
        return self.oracle == "accuracy" and self.kind.endswith(":value")

    def is_in_formula_beside(self, fault: Bug) -> bool:
        """Whether its numbers are those of a mistake in the formula, of a part that ``fault`` is not about.

        What lies outside a tensor gives no such numbers on all wrong rows.
        """
        if self.symptom.is_fault or kernel_parts(self.features) <= kernel_parts(fault.features):
            return False
        return bool(told := self.mistakes or self.perhaps) and not any(
            mistake_of(one).reads or mistake_of(one).rounds for one in told
        )

    @property
    def is_of_luck(self) -> bool:
        """Whether luck decides, or size, in which cases it shows: what these have says nothing."""
        return self.is_rounding or self.symptom.is_of_last_digits

    @property
    def is_unsteady(self) -> bool:
        """Whether runs differ that should not."""
        return not ends_process(self) and (self.flaky or self.oracle in _COMPARE_RUNS)

    def predicts(self, seen: Bug) -> bool:
        """Whether a failure that shows as ``seen`` is taken for this bug, without running anything."""
        if self.kernel != seen.kernel:
            return False
        if self.is_everywhere and self.mistakes == seen.mistakes:
            return True  # whatever comes of it: numbers, or a shape
        if self.own and seen.own:
            return self.own == seen.own
        if self.symptom.sort != seen.symptom.sort:
            return False
        if self.line is not None and seen.line is not None and self.line.is_that_of(seen.line):
            return True  # whichever tensor lies there, and whether anything does
        if in_particular(self.mistakes) & parts_of(seen.mistakes | seen.perhaps) and (
            self.is_everywhere or is_about(seen.all_features, self.features)
        ):
            return True
        if KEPT_BETWEEN_CALLS in self.mistakes and seen.is_of_relation and are_of_what_was_read(seen.mistakes):
            return True  # whose runs come after others, so that what is kept of them is read
        if self.is_told_apart_from(seen):
            return False
        if self.is_write_astray and self.symptom == seen.symptom and not (self.rough or self.line or seen.line):
            return True  # around the same tensor, from a line that could not be found: whatever else a case needs
        if self.is_unsteady and (seen.is_unsteady or seen.symptom.is_of_bits):
            return (self.flaky and seen.flaky) or self.features - {NEEDS_PRECEDING} <= seen.features
        if self.symptom != seen.symptom:
            return False
        if self.features <= seen.features or self.missing & seen.missing:
            return True
        return self.symptom.is_of_bits and bool(self.case)  # told by its bits, and not just seen in them on the way

    def may_be_behind(self, seen: Bug) -> bool:
        """Whether it is worth running nearby cases: nothing tells the two apart, and ``seen`` has what it needs."""
        if self.kernel != seen.kernel or self.symptom.sort != seen.symptom.sort or self.is_told_apart_from(seen):
            return False
        return not self.is_of_luck and has_essentials(seen.all_features, self.features)

    @property
    def is_write_astray(self) -> bool:
        """Whether it writes around a tensor."""
        return self.oracle == RED_ZONE.name and self.kind.startswith("write ")

    def may_show_as(self, seen: Bug) -> bool:
        """Whether nothing that was tested tells ``seen`` from it, of which no more than one case is known.

        Tokens that a log-sum-exp has too many or too few of are wrong in the output too, if other values lie there; and
        an allocator aborts whose memory was written out of bounds.
        """
        is_of_tokens = bool(self.mistakes) and are_of_what_was_read(self.mistakes)
        is_aborted = seen.symptom.sort == "crash/SIGABRT" and self.is_write_astray
        if self.symptom.sort != seen.symptom.sort and not is_aborted:
            return False
        if self.is_told_apart_from(msgspec.structs.replace(seen, results=frozenset()) if is_of_tokens else seen):
            return False
        return not self.flaky or seen.is_unsteady or seen.symptom.is_of_bits

    def is_told_apart_from(self, other: Bug) -> bool:
        """Whether other results are concerned, or another cause is told.

        Where any case fails alike, a cause that is told of some of them says nothing.
        """
        pairs = ((self, other), (other, self))
        if self.own and other.own:
            return self.own != other.own
        if _is_of_lse(self.results) and _concern_others(self, other):
            return True
        if not self.features and self.symptom == other.symptom and not self.is_everywhere:
            return False
        if any(one.is_without_weight and another.is_wrong_number for one, another in pairs):
            return True  # it matters only where NaN or infinity lies, whose product with a weight of 0 is NaN
        if in_particular(self.mistakes) & parts_of(other.mistakes | other.perhaps) or other.mistakes & self.perhaps:
            return False
        if any(one.symptom.is_fault and another.is_in_formula_beside(one) for one, another in pairs):
            return True
        if self.is_rounding or other.is_rounding:  # large cases look like some rounding by chance, or like none
            return not any(one.rough and are_roundings(one.mistakes) for one in (self, other))
        if self.is_everywhere or other.is_everywhere:  # which names it, whatever another one reads
            return bool(self.mistakes and other.mistakes)
        return not any(are_of_what_was_read(one.mistakes) for one in (self, other))  # which holds where none is told


def _is_everywhere(mistake: str) -> bool:
    return mistake_of(mistake).is_everywhere


def _is_of_relation(failure: Failure | Bug) -> bool:
    return oracle_of(failure.oracle).is_relation and not ends_process(failure)


def _results(said: Failure | FindingRecord) -> frozenset[str]:
    is_of_result = said.oracle in ("accuracy", "dead_memory", "unwritten", "determinism", "residuals")
    return frozenset({said.tensor or said.kind.partition(":")[0]} if is_of_result else ())


def _is_of_lse(results: frozenset[str]) -> bool:
    return bool(results) and all(one.endswith("lse") for one in results)


def bugs_shown(
    shown: Iterable[FailingCase], needed: frozenset[Feature], told: FailingCase | None, **more: Any
) -> list[Bug]:
    """The known bug that was seen in all of ``shown``, one for each way in which it showed.

    Only ``told``, the smallest, tells its cause: larger cases have others by chance. ``more``: other fields.
    """
    bugs = {}
    for one in shown:
        bug = Bug.shown_by(one.declaration.target, one.failure, needed, **more)
        bugs[one.symptom] = msgspec.structs.replace(
            bug, mistakes=frozenset(), perhaps=frozenset(), own="", missing=frozenset(), line=None
        )
    if told is not None:
        case = encode_case(told.case)
        bugs[told.symptom] = Bug.shown_by(told.declaration.target, told.told, needed, case=case, **more)
    return list(bugs.values())


def _concern_others(one: Bug, other: Bug) -> bool:
    """Whether one spoils a log-sum-exp alone, and the other more, unless both are about the same part of the kernel."""
    if not (one.results and other.results) or _is_of_lse(one.results) == _is_of_lse(other.results):
        return False
    parts = [(kernel_parts(less.features), more.features) for less, more in ((one, other), (other, one))]
    return not any(mine and mine <= its for mine, its in parts)


class HasBug(Protocol):
    """A finding, with the bug that it shows, during a campaign or from a file."""

    @property
    def bug(self) -> Bug:
        """The bug as far as it is known."""


def are_one(a: HasBug, b: HasBug) -> bool:
    """Whether two findings are taken for one bug."""
    one, other = a.bug, b.bug
    if one.kernel != other.kernel:
        return False
    if one.predicts(other) or other.predicts(one):
        return True
    if one.rough and other.rough and one.symptom == other.symptom and not one.is_told_apart_from(other):
        return True  # nothing tells them apart, since the campaign ended too early
    if not (one.mistakes and other.mistakes) and any(map(_is_everywhere, one.perhaps & other.perhaps)):
        return True
    return any(rule(*pair) for rule in (_includes, _reads_anywhere) for pair in ((one, other), (other, one)))


def _includes(less: Bug, more: Bug) -> bool:
    """Whether ``more`` needs all that ``less`` is about.

    Where that is nothing but lengths and pages, it says something only of a bug that is about nothing else either.
    """
    if less.rough or more.is_of_luck or not less.may_be_behind(more):
        return False
    if _concern_others(less, more):
        return False  # or the output would be wrong in the smallest case of either
    return more.rough or bool(kernel_parts(less.features)) or not kernel_parts(more.features)


def _reads_anywhere(one: Bug, other: Bug) -> bool:
    """Whether ``one`` says that what is read is not where it should be, and ``other`` may be what lies there.

    Past the end of a sequence there may be no page, and no entry of the table.
    """
    if other.symptom.sort or not are_of_what_was_read(other.mistakes):
        return False
    if one.mistakes == {PAST_THE_END}:
        return other.symptom.is_fault and not kernel_parts(one.features | other.features)
    return one.is_of_all_reads


class KnownBugs:
    """The bugs found so far, and the symptoms that some worker is looking into."""

    def __init__(self, bugs: Iterable[Bug] = ()) -> None:
        self._bugs: dict[str, list[Bug]] = {}
        self._busy = Counter[Symptom]()
        for bug in bugs:
            self.add(bug)

    def add(self, bug: Bug) -> None:
        """Presume later failures that ``bug`` predicts to be known."""
        bugs = self._bugs.setdefault(bug.kernel, [])
        if bug not in bugs:
            bugs.append(bug)

    def predicting(self, failing: FailingCase, *, flaky: bool = False) -> Bug | None:
        """The bug that a failing case is taken for. ``flaky``: some runs of it pass."""
        bugs = self._bugs.get(failing.declaration.target)
        if not bugs:
            return None
        seen = msgspec.structs.replace(Bug.seen_in(failing), flaky=flaky)
        return next((bug for bug in bugs if bug.predicts(seen)), None)

    def possible(self, failing: FailingCase) -> list[Bug]:
        """Bugs that the failing case may be, though they do not predict it; those that need most first.

        What takes the process down is told, unless the bug is about the same part: it may be another one inside.
        """
        seen = Bug.seen_in(failing)
        found = [
            bug
            for bug in self._bugs.get(failing.declaration.target, ())
            if bug.may_be_behind(seen)
            if bug.symptom.is_fault or not seen.symptom.is_fault or kernel_parts(bug.features)
        ]
        return sorted(found, key=lambda bug: -len(bug.features))

    def beside(self, failing: FailingCase) -> list[Bug]:
        """Bugs that are about another part of the kernel than the failing case, though nothing tells them apart."""
        seen = Bug.seen_in(failing)
        return [
            bug
            for bug in self._bugs.get(failing.declaration.target, ())
            if bug.symptom.sort == seen.symptom.sort and not bug.is_told_apart_from(seen)
            if bug.case and kernel_parts(bug.features) and not kernel_parts(bug.features) <= seen.features
        ]

    def across(self, failing: FailingCase) -> list[Bug]:
        """Bugs of wrong memory or numbers, of a failure of an index out of range; and the other way round."""
        seen = failing.symptom
        return [
            bug
            for bug in self._bugs.get(seen.kernel, ())
            if bug.case and not bug.flaky
            if (bug.symptom.is_of_index and not seen.sort) or (seen.is_of_index and not bug.symptom.sort)
        ]

    def of_sort(self, symptom: Symptom) -> list[Bug]:
        """The bugs of the same kernel at which the same happens: wrong memory or numbers, by whatever oracle."""
        return [bug for bug in self._bugs.get(symptom.kernel, ()) if bug.symptom.sort == symptom.sort]

    def set_busy(self, symptom: Symptom, busy: bool) -> None:
        """Note that another worker starts or stops looking into ``symptom``."""
        self._busy[symptom] += 1 if busy else -1

    def is_busy(self, symptom: Symptom) -> bool:
        """Whether another worker looks into ``symptom`` now."""
        return self._busy[symptom] > 0
