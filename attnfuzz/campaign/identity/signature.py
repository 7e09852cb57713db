"""What tells one bug from another, and when two findings are one.

Before shrinking only the *symptom* is known: kernel, oracle and kind of failure. After shrinking, the features that the
minimal case still needs complete the *signature*. A later failure with the same symptom whose case has all of those
features is presumed to be the same bug; one that lacks some of them cannot be, and is looked into.

Workers pass over a failure in silence only if a known signature explains all of it. A report can go further
(`are_same_bug`): whatever is merged there has been looked into, and is named with the finding that stands for it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

import msgspec

from attnfuzz.campaign.messages import Known
from attnfuzz.cases.facets.facet import is_told_by_another
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.choices import CACHE_TENSORS
from attnfuzz.problems.features import (
    CACHE_STRIDES,
    DEAD_ROWS,
    KV_STRIDES_DIFFER,
    SEVERAL_HEADS,
    SHARED_PAGES,
    departures,
    features,
    general_features,
)
from attnfuzz.problems.repeated import plain_values
from attnfuzz.verdict import (
    IDENTIFYING_CAUSES,
    MISTAKES_IN_FORMULAS,
    NARROW_OFFSETS,
    PAST_THE_END,
    Diagnosed,
    Failure,
    ends_process,
    is_fault,
)

__all__ = [
    "ADDRESS_ORACLES",
    "ANY_CASE",
    "NEEDS_PRECEDING",
    "ROUNDING_ORACLES",
    "RULES",
    "SILENT_ORACLES",
    "FindingLike",
    "KnownFindings",
    "Signature",
    "Symptom",
    "are_same_bug",
    "aspects",
    "case_features",
    "certain",
    "failure_features",
    "is_part_of",
    "needs",
    "needs_numbers",
    "telling",
]

SILENT_ORACLES = frozenset({"accuracy", "dead_memory", "unwritten", "determinism"})
"""One wrong address gives a number that is merely wrong, or dead memory's, or nobody's, as the case has it."""

ADDRESS_ORACLES = frozenset({"page_permutation", "block_table_slack"})
"""They move what lies at a wrong address."""

ROUNDING_ORACLES = frozenset(
    {"page_permutation", "block_table_slack", "batch_invariance", "value_affinity", "merge_laws"}
)
"""They compare bits within the error bound, where it is chance in which cases a mistake changes the last digit."""
ANY_CASE = "any case"
"""In place of all features of such a failure: what the smallest case still has says nothing of the mistake."""

_SIZES = frozenset(
    {
        ANY_CASE,
        DEAD_ROWS,
        "block_size>1",
        "extra columns",
        "extra rows",
        "needles",
        "num_kv_heads>1",
        "num_q_heads>1",
        "num_seqs>1",
        "num_splits>1",
        "num_tokens>1",
        "pages",
        "pages=reversed",
        "pages=shuffled",
        "padding",
        "padding=out_of_range",
        "padding=wrong_page",
        "partial last page",
        "query_len>1",
        "ragged",
        "ragged queries",
        "scale",  # goes with the head size
        "seq_len>1",
        "seq_len>block_size",
        "seq_len>window",
        SHARED_PAGES,
        "spare blocks",
        "v_head_size>head_size",
    }
)
_RECIPES = ("keys", "values")
_VALUES = (*_RECIPES, "logit_exponent")
"""Recipes for numbers make an error visible more often than they cause it."""
_PLACES = frozenset({"pages=reversed", "pages=shuffled", SHARED_PAGES, "spare blocks"})
_MOVED = "pages moved"
_SURROUNDINGS = _PLACES | {"extra columns", "extra rows", "needles"}
"""They decide what lies at a wrong address: another token, another sequence's, dead memory."""
_ONE_SIDE = frozenset({"prefix empty", "suffix empty"})
_SIDES = _ONE_SIDE | {"one state empty", "both states empty"}
_ANY_LENGTH = frozenset({"partial last page", "seq_len>1"})
_CACHES = frozenset(f"strides:{name}" for names in CACHE_TENSORS for name in names)


def aspects(features: frozenset[str]) -> frozenset[str]:
    """The features that name a part of a kernel: strides, layout, head mapping, type, option, empty rows.

    Strides count by tensor, not by how they came about; those of the caches not at all if what matters is that K and V
    differ. Cases with no aspect in common are hardly the same bug, while every bug may need several tokens.
    """
    found = {one for one in features if one not in _SIZES and not one.startswith(_VALUES)}
    found -= {one for one in found if one.startswith("strides:") and "=" in one}
    found -= _implied(found)
    if "num_kv_heads>1" in features:
        found.discard(SEVERAL_HEADS)
    if "gqa_ratio not pow2" in found:
        found.discard("gqa_ratio>1")
    if KV_STRIDES_DIFFER in found:
        found -= {CACHE_STRIDES, *_CACHES}
        found = {one for one in found if not one.startswith("layout")}
    return frozenset(found)


def _implied(features: Set[str]) -> set[str]:
    """Those of ``features`` that say no more than another one does in particular."""
    found = {one.partition("=")[0] for one in features if "=" in one}
    if any(one.startswith("lse ") for one in features):
        found |= {one for one in features if one in _SIDES or one.startswith("some lse ")}
    if features & {"gqa_ratio>1", "num_kv_heads>1"}:
        found.add(SEVERAL_HEADS)
    if features & _ONE_SIDE:
        found.add("one state empty")
    if "both states empty" in features:
        found |= _ONE_SIDE
    return found


def needs(features: frozenset[str]) -> frozenset[str]:
    """``features`` without what the minimal case has only to make the error visible, or cannot be without.

    A sequence on a page for several tokens either leaves a part of it free or has several tokens itself, so a case
    with one of the two does not tell whether that matters. If nothing is left, it is where pages lie that matters.
    """
    found = frozenset(one for one in features if one not in _SURROUNDINGS and not one.startswith(_RECIPES))
    if "seq_len>block_size" in found:
        found -= {"seq_len>1"}
    if "block_size>1" in found and len(found & _ANY_LENGTH) == 1:
        found -= _ANY_LENGTH
    return found or _moved(features)


def needs_numbers(features: frozenset[str]) -> bool:
    """Whether it takes certain values, or scores of some size."""
    return any(one.startswith(_VALUES) or one in ("needles", "scale") for one in features)


def is_part_of(less: frozenset[str], more: frozenset[str]) -> bool:
    """Whether a bug needs something, and all of it is also what another needs."""
    return bool(least := needs(less)) and least <= needs(more) | _moved(more)


def _moved(features: frozenset[str]) -> frozenset[str]:
    return frozenset({_MOVED}) if features & _PLACES else frozenset()


def telling(features: frozenset[str]) -> frozenset[str]:
    """``features`` for people: without general ones that a particular one implies."""
    particular = _implied(features)
    moved = _CACHES if "layout" in particular else frozenset[str]()
    shown = {one for one in features if one not in particular and one not in moved}
    if shown & {KV_STRIDES_DIFFER, *_CACHES} or particular & {"layout", *_CACHES}:
        shown.discard(CACHE_STRIDES)
    return frozenset(shown)


def certain(features: frozenset[str]) -> frozenset[str]:
    """``features`` of a failing case without those that matter only if another case, which has them not, passes."""
    return frozenset(one for one in features if not is_told_by_another(one))


NEEDS_PRECEDING = "preceding cases"
"""In place of a feature: the case fails only after others, and no case by itself can be told to be this bug."""
_SEE_ROUNDINGS = frozenset({"residuals", "value_affinity"})
"""Besides accuracy: to which of them a rounding shows first is a matter of luck."""
_OF_STATISTICS = (":size", ":lean")
_FAULTS = ("SIGSEGV", "SIGBUS", "cuda:")
_IGNORED_PAGE_IDS = "ignored page ids"
_IGNORED = ("ignored stride", _IGNORED_PAGE_IDS)


def case_features(declaration: Declaration, case: Case) -> frozenset[str]:
    """What makes ``case`` more than the simplest case that the kernel supports, in particular and in general.

    And what it has not that a kernel may be written for.
    """
    supports, options = declaration.supports, declaration.options
    found = features(case, supports=supports, options=options)
    return found.union(*(named(case, supports=supports, options=options) for named in (general_features, departures)))


def failure_features(declaration: Declaration, case: Case, failure: Failure) -> frozenset[str]:
    """What ``failure`` may need of ``case``."""
    if failure.cause in IDENTIFYING_CAUSES or Symptom.of(declaration.target, failure).is_rounding:
        return frozenset({ANY_CASE})
    if failure.oracle == "residuals" and isinstance(case, AttentionCase):  # it has other numbers of its own
        case = msgspec.structs.replace(case, values=plain_values(case, case.seed))
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
        is_plainly_wrong = failure.oracle == "residuals" and not failure.kind.endswith(_OF_STATISTICS)
        return cls(kernel, "accuracy" if is_plainly_wrong else failure.oracle, failure.kind)

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

    def learn(self, known: Known) -> Signature:
        """As `add`, of what somebody has found."""
        signature = Signature(Symptom(known.kernel, known.oracle, known.kind), known.features)
        self.add(signature, flaky=known.flaky)
        return signature

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


class FindingLike(Protocol):
    """What is known of a finding, during a campaign or from a file."""

    @property
    def signature(self) -> Signature:
        """Symptom, and what the case needs."""

    @property
    def is_flaky(self) -> bool:
        """Whether some runs pass."""

    @property
    def said(self) -> Diagnosed | None:
        """What an oracle says of its smallest case, if that is known."""


def are_same_bug(a: FindingLike, b: FindingLike) -> bool:
    """Whether the findings are taken for one bug of their kernel: what a replayed cause says decides, else `RULES`."""
    mine, its = a.signature.symptom, b.signature.symptom
    if mine.kernel != its.kernel:
        return False
    if mine.is_cause or its.is_cause:
        shared = {mine, *_maybe(a)} & {its, *_maybe(b)}
        return mine == its or its in shared or mine in shared or (bool(shared) and mine.is_cause != its.is_cause)
    return any(rule(a, b) or rule(b, a) for rule in RULES)


def _explains(a: FindingLike, b: FindingLike) -> bool:
    """``b`` would have been passed over, had ``a`` been found first."""
    return a.signature.explains(b.signature.symptom, b.signature.features)


def _is_flaky_alike(a: FindingLike, b: FindingLike) -> bool:
    """What a case needs that fails now and then is known too roughly to tell two apart."""
    return a.is_flaky and b.is_flaky and ends_process(a.signature.symptom) == ends_process(b.signature.symptom)


def _is_about_part(a: FindingLike, b: FindingLike) -> bool:
    """``b`` needs all that ``a`` is about (strides, layout, head mapping ...), and they may be alike."""
    mine, its = a.signature, b.signature
    less = aspects(mine.features)
    return bool(less) and less <= its.features and mine.symptom.may_be(its.symptom)


def _lies_alike(a: FindingLike, b: FindingLike) -> bool:
    """Both are about nothing but lengths and pages.

    ``b`` needs all that ``a`` needs, of the same tensor; or ``a`` shows once other things lie at wrong addresses.
    """
    mine, its = a.signature, b.signature
    if not mine.symptom.may_be(its.symptom) or aspects(mine.features) or aspects(its.features):
        return False
    if mine.symptom.oracle in ADDRESS_ORACLES:
        return True
    return _spoil_the_same(mine.symptom, its.symptom) and is_part_of(mine.features, its.features)


def _ignores_page_ids(a: FindingLike, b: FindingLike) -> bool:
    """``a`` says that pages are not read where the block table has them, so anything may have been read in ``b``."""
    mine, its = a.signature, b.signature
    if mine.symptom.kind != _IGNORED_PAGE_IDS or not mine.symptom.may_be(its.symptom):
        return False
    is_told = b.said is not None and b.said.cause in MISTAKES_IN_FORMULAS
    return not is_told and aspects(mine.features) <= its.features


def _names_its_stride(one: FindingLike, other: FindingLike) -> bool:
    """``one`` says that the kernel ignores a stride, which ``other`` needs, or says too."""
    if one.said is None or one.said.cause != "ignored_stride":
        return False
    name = f"strides:{one.said.tensor}"
    needed = {feature.partition("=")[0] for feature in other.signature.features}
    return one.signature.symptom == other.signature.symptom or (
        name in needed and (other.signature.symptom.is_fault or other.signature.symptom.oracle in SILENT_ORACLES)
    )


def _says_the_same(a: FindingLike, b: FindingLike) -> bool:
    """One mistake is told of both, or may be told of ``b``, which needs all that ``a`` is about."""
    mine, its = a.signature, b.signature
    if a.said is None or b.said is None or not a.said.cause or not mine.symptom.may_be(its.symptom):
        return False
    return a.said.cause in (b.said.cause, *b.said.maybe) and aspects(mine.features) <= its.features


def _runs_off_the_end(a: FindingLike, b: FindingLike) -> bool:
    """``a`` reads past the end of a sequence, and ``b`` faults: there may be no page, and no entry of the table."""
    mine, its = a.signature, b.signature
    if a.said is None or a.said.cause != PAST_THE_END or mine.symptom.kernel != its.symptom.kernel:
        return False
    return its.symptom.is_fault and not aspects(its.features) and not aspects(mine.features)


def _may_be_one_rounding(one: FindingLike, other: FindingLike) -> bool:
    """Errors of both are so small that the same rounding may be behind them."""
    return any(symptom in _maybe(other) for symptom in _maybe(one) if symptom.kind != NARROW_OFFSETS)


def _maybe(told: FindingLike) -> list[Symptom]:
    symptom = told.signature.symptom
    return [Symptom.of_cause(symptom.kernel, symptom.oracle, one) for one in (told.said.maybe if told.said else ())]


def _spoil_the_same(a: Symptom, b: Symptom) -> bool:
    if a.is_fault and b.is_fault:  # which address it was, and so whose tensor, is a matter of luck
        return True
    return a.kind.partition(":")[0] == b.kind.partition(":")[0]


RULES = (
    _explains,
    _ignores_page_ids,
    _names_its_stride,
    _is_flaky_alike,
    _is_about_part,
    _lies_alike,
    _says_the_same,
    _runs_off_the_end,
    _may_be_one_rounding,
)
"""What makes two findings one, each asked both ways."""
