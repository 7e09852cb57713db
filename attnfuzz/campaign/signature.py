"""What tells one bug from another.

Before shrinking only the *symptom* is known: kernel, oracle and kind of failure. After shrinking, the features that the
minimal case still needs complete the *signature*. A later failure with the same symptom whose case has all of those
features is presumed to be the same bug; one that lacks some of them cannot be, and is looked into.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnfuzz.campaign.aspects import ADDRESS_ORACLES, ANY_CASE, ROUNDING_ORACLES, SILENT_ORACLES, aspects, telling
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import IDENTIFYING_CAUSES, Diagnosed, Failure, is_fault
from attnfuzz.problems.cases import Case
from attnfuzz.problems.features import features, general_features

__all__ = ["NEEDS_PRECEDING", "KnownFindings", "Signature", "Symptom", "case_features", "failure_features"]

NEEDS_PRECEDING = "preceding cases"
"""In place of a feature: the case fails only after others, and no case by itself can be told to be this bug."""

_SEE_ROUNDINGS = frozenset({"residuals", "value_affinity"})
"""Besides accuracy: to which of them a rounding shows first is a matter of luck."""
_FAULTS = ("SIGSEGV", "SIGBUS", "cuda:")
_IGNORED = "ignored stride"


def case_features(declaration: Declaration, case: Case) -> frozenset[str]:
    """What makes ``case`` more than the simplest case that the kernel supports, in particular and in general."""
    supports, options = declaration.supports, declaration.options
    return features(case, supports=supports, options=options) | general_features(
        case, supports=supports, options=options
    )


def failure_features(declaration: Declaration, case: Case, failure: Failure) -> frozenset[str]:
    """What ``failure`` may need of ``case``."""
    if failure.cause in IDENTIFYING_CAUSES or Symptom.of(declaration.target, failure).is_rounding:
        return frozenset({ANY_CASE})
    return case_features(declaration, case)


@dataclass(frozen=True, slots=True)
class Symptom:
    """Kernel (by target), oracle and kind: all that a failure shows at once.

    In place of the kind stands a cause that tells which bug it is.
    """

    kernel: str
    oracle: str
    kind: str

    @classmethod
    def of(cls, kernel: str, failure: Diagnosed) -> Symptom:
        """The symptom of ``failure`` on the kernel loaded by ``kernel``."""
        if failure.cause in IDENTIFYING_CAUSES:
            return cls.of_cause(kernel, failure.oracle, failure.cause)
        return cls(kernel, failure.oracle, failure.kind)

    @classmethod
    def of_cause(cls, kernel: str, oracle: str, cause: str) -> Symptom:
        """That of a bug which a cause names, by whichever oracle that knows roundings it shows."""
        return cls(kernel, "accuracy" if oracle in _SEE_ROUNDINGS else oracle, cause)

    @property
    def is_cause(self) -> bool:
        """Whether it says which bug it is."""
        return self.kind in IDENTIFYING_CAUSES

    @property
    def is_fault(self) -> bool:
        """Whether memory was accessed that is not there, or nobody's."""
        return is_fault(self.oracle, self.kind) or (self.oracle == "crash" and self.kind.startswith(_FAULTS))

    @property
    def is_of_memory(self) -> bool:
        """Whether a wrong address may be behind it: a wrong number, dead memory's, nobody's, or a fault."""
        return self.oracle in SILENT_ORACLES | ADDRESS_ORACLES or self.is_fault or self.kind.startswith(_IGNORED)

    @property
    def is_rounding(self) -> bool:
        """Whether only bits differ, within the error bound."""
        return self.oracle in ROUNDING_ORACLES and self.kind == "bits"

    def may_be(self, other: Symptom) -> bool:
        """Whether one bug may show both ways, as the case has it."""
        return self == other or (self.kernel == other.kernel and self.is_of_memory and other.is_of_memory)


@dataclass(frozen=True, slots=True)
class Signature:
    """A symptom with the features that its minimal case still has."""

    symptom: Symptom
    features: frozenset[str]

    @property
    def says_nothing(self) -> bool:
        """Whether any case may be the bug, or it takes others before it."""
        return not self.features or bool(self.features & {ANY_CASE, NEEDS_PRECEDING})

    def explains(self, symptom: Symptom, features: frozenset[str]) -> bool:
        """Whether a failing case with ``features`` is presumed to be this bug."""
        return self.symptom == symptom and self.features <= features

    def __str__(self) -> str:
        needs = ", ".join(sorted(telling(self.features))) or "any case"
        return f"{self.symptom.oracle}/{self.symptom.kind} [{needs}]"


class KnownFindings:
    """The signatures found so far, and the symptoms that some worker is looking into."""

    def __init__(self) -> None:
        self._signatures: dict[Symptom, list[Signature]] = {}
        self._flaky: list[Signature] = []
        self._busy: dict[Symptom, int] = {}

    def add(self, signature: Signature, *, flaky: bool = False) -> None:
        """Presume later failures that ``signature`` explains to be known. ``flaky``: it does not show in every run."""
        others = self._signatures.setdefault(signature.symptom, [])
        if signature not in others:
            others.append(signature)
            self._flaky += [signature] if flaky else []

    def may_cause(self, kernel: str, failure: Failure) -> bool:
        """Whether a bug found before, which its cause tells, would give much the same."""
        return any(self.has_symptom(Symptom.of_cause(kernel, failure.oracle, cause)) for cause in failure.maybe)

    def explains(self, symptom: Symptom, features: frozenset[str]) -> bool:
        """Whether a failing case with ``features`` is presumed to be a bug found before."""
        return bool(self.explaining(symptom, features))

    def flaky_one(self, kernel: str, features: frozenset[str]) -> Signature | None:
        """A flaky bug of ``kernel`` that a flaky failure of a case with ``features`` is put down to, by any oracle."""
        found = (one for one in self._flaky if one.symptom.kernel == kernel and one.features <= features)
        return next(found, None)

    def has_symptom(self, symptom: Symptom) -> bool:
        """Whether any finding shows this symptom."""
        return symptom in self._signatures

    def needs_preceding(self, symptom: Symptom) -> bool:
        """Whether a finding shows this symptom only after other cases."""
        return any(NEEDS_PRECEDING in signature.features for signature in self._signatures.get(symptom, ()))

    def alike(self, symptom: Symptom, features: frozenset[str]) -> list[Signature]:
        """Bugs that a case with ``features`` may be, known by other symptoms; those that need most first.

        A fault is taken for a bug that gives wrong numbers only where both are about the same part of the kernel.
        """
        found = (
            signature
            for other, signatures in self._signatures.items()
            if other != symptom and (other.may_be(symptom) or (symptom.is_rounding and other.is_of_memory))
            for signature in signatures
            if other.kernel == symptom.kernel and not signature.says_nothing and signature.features <= features
            if other.is_fault == symptom.is_fault or aspects(signature.features)
        )
        return sorted(found, key=lambda signature: -len(signature.features))

    def explaining(self, symptom: Symptom, features: frozenset[str]) -> list[Signature]:
        """The signatures that a failing case with ``features`` is put down to."""
        return [signature for signature in self._signatures.get(symptom, ()) if signature.features <= features]

    def set_busy(self, symptom: Symptom, busy: bool) -> None:
        """Note that another worker starts or stops looking into ``symptom``."""
        count = self._busy.get(symptom, 0) + (1 if busy else -1)
        if count > 0:
            self._busy[symptom] = count
        else:
            self._busy.pop(symptom, None)

    def is_busy(self, symptom: Symptom) -> bool:
        """Whether another worker looks into ``symptom`` now."""
        return symptom in self._busy
