"""Whether two findings of a campaign are reported as one.

Workers pass over a failure in silence only if a known signature explains all of it. A report can go further: whatever
is merged there has been looked into, and is named with the finding that stands for it.
"""

from __future__ import annotations

from typing import Protocol

from attnfuzz.campaign.aspects import SILENT_ORACLES, aspects, is_part_of
from attnfuzz.campaign.signature import Signature, Symptom
from attnfuzz.oracles.verdict import Diagnosed, ends_process, is_fault

__all__ = ["Told", "are_same_bug"]

_ADDRESS_ORACLES = frozenset({"page_permutation", "block_table_slack"})
_FAULTS = ("SIGSEGV", "SIGBUS", "cuda:")


class Told(Protocol):
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


def are_same_bug(a: Told, b: Told) -> bool:
    """Whether the findings are taken for one bug of their kernel.

    A replayed cause that says which bug it is decides. Else they are if either would have been passed over, had the
    other been found first; and if what one is about (strides, layout, head mapping ...) is all or part of what the
    other is about, and they show as the same, or both as some wrong number, or both as a fault of memory; and if one
    says which stride is ignored, and the other needs strides of that tensor. Two that are about nothing but lengths and
    pages, and spoil the same tensor, are compared by what they need of those: a wrong address is another token's in one
    case and dead memory in the next, as pages lie, and where its weight is small, it only shows in the last digit once
    pages or unused table entries have changed.
    """
    mine, its = a.signature, b.signature
    if mine.symptom.kernel != its.symptom.kernel:
        return False
    if mine.symptom.is_cause or its.symptom.is_cause:
        may_be = its.symptom.kind in _maybe(a) or mine.symptom.kind in _maybe(b)
        return mine.symptom == its.symptom or (may_be and mine.symptom.oracle == its.symptom.oracle)
    if _names_its_stride(a, b) or _names_its_stride(b, a):
        return True
    if a.is_flaky and b.is_flaky and ends_process(mine.symptom) == ends_process(its.symptom):
        return True  # what a case needs that fails now and then is known too roughly to tell two apart
    if mine.explains(its.symptom, its.features) or its.explains(mine.symptom, mine.features):
        return True
    if not _may_be_alike(mine.symptom, its.symptom):
        return False
    less, more = sorted((aspects(mine.features), aspects(its.features)), key=len)
    if more:
        return bool(less) and less <= more
    if {mine.symptom.oracle, its.symptom.oracle} & _ADDRESS_ORACLES:
        return True
    one, other = mine.features, its.features
    return _spoil_the_same(mine.symptom, its.symptom) and (is_part_of(one, other) or is_part_of(other, one))


def _may_be_alike(a: Symptom, b: Symptom) -> bool:
    if _is_memory_fault(a) and _is_memory_fault(b):  # the address, and so the error, is a matter of luck
        return True
    return a == b or {a.oracle, b.oracle} <= SILENT_ORACLES | _ADDRESS_ORACLES


def _is_memory_fault(symptom: Symptom) -> bool:
    return is_fault(symptom.oracle, symptom.kind) or (symptom.oracle == "crash" and symptom.kind.startswith(_FAULTS))


def _names_its_stride(one: Told, other: Told) -> bool:
    """Whether ``one`` says that the kernel ignores a stride, which ``other`` needs, or says too."""
    if one.said is None or one.said.cause != "ignored_stride":
        return False
    name = f"strides:{one.said.tensor}"
    needed = {feature.partition("=")[0] for feature in other.signature.features}
    return one.signature.symptom == other.signature.symptom or (
        name in needed
        and (_is_memory_fault(other.signature.symptom) or other.signature.symptom.oracle in SILENT_ORACLES)
    )


def _maybe(told: Told) -> tuple[str, ...]:
    return () if told.said is None else told.said.maybe


def _spoil_the_same(a: Symptom, b: Symptom) -> bool:
    if _is_memory_fault(a) and _is_memory_fault(b):
        return True
    return a.kind.partition(":")[0] == b.kind.partition(":")[0]
