"""Whether two findings of a campaign are reported as one.

Workers pass over a failure in silence only if a known signature explains all of it. A report can go further: whatever
is merged there has been looked into, and is named with the finding that stands for it.
"""

from __future__ import annotations

from typing import Protocol

from attnfuzz.campaign.aspects import ADDRESS_ORACLES, SILENT_ORACLES, aspects, is_part_of
from attnfuzz.campaign.signature import Signature, Symptom
from attnfuzz.oracles.verdict import NARROW_OFFSETS, Diagnosed, ends_process

__all__ = ["RULES", "Told", "are_same_bug"]


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
    """Whether the findings are taken for one bug of their kernel: what a replayed cause says decides, else `RULES`."""
    mine, its = a.signature.symptom, b.signature.symptom
    if mine.kernel != its.kernel:
        return False
    if mine.is_cause or its.is_cause:
        return mine == its or its in _maybe(a) or mine in _maybe(b)
    return any(rule(a, b) or rule(b, a) for rule in RULES)


def _explains(a: Told, b: Told) -> bool:
    """``b`` would have been passed over, had ``a`` been found first."""
    return a.signature.explains(b.signature.symptom, b.signature.features)


def _is_flaky_alike(a: Told, b: Told) -> bool:
    """What a case needs that fails now and then is known too roughly to tell two apart."""
    return a.is_flaky and b.is_flaky and ends_process(a.signature.symptom) == ends_process(b.signature.symptom)


def _is_about_part(a: Told, b: Told) -> bool:
    """``b`` needs all that ``a`` is about (strides, layout, head mapping ...), and they may be alike."""
    mine, its = a.signature, b.signature
    less = aspects(mine.features)
    return bool(less) and less <= its.features and mine.symptom.may_be(its.symptom)


def _lies_alike(a: Told, b: Told) -> bool:
    """Both are about nothing but lengths and pages.

    ``b`` needs all that ``a`` needs, of the same tensor; or ``a`` shows once other things lie at wrong addresses.
    """
    mine, its = a.signature, b.signature
    if not mine.symptom.may_be(its.symptom) or aspects(mine.features) or aspects(its.features):
        return False
    if mine.symptom.oracle in ADDRESS_ORACLES:
        return True
    return _spoil_the_same(mine.symptom, its.symptom) and is_part_of(mine.features, its.features)


def _names_its_stride(one: Told, other: Told) -> bool:
    """``one`` says that the kernel ignores a stride, which ``other`` needs, or says too."""
    if one.said is None or one.said.cause != "ignored_stride":
        return False
    name = f"strides:{one.said.tensor}"
    needed = {feature.partition("=")[0] for feature in other.signature.features}
    return one.signature.symptom == other.signature.symptom or (
        name in needed and (other.signature.symptom.is_fault or other.signature.symptom.oracle in SILENT_ORACLES)
    )


def _may_be_one_rounding(one: Told, other: Told) -> bool:
    """Errors of both are so small that the same rounding may be behind them."""
    return any(symptom in _maybe(other) for symptom in _maybe(one) if symptom.kind != NARROW_OFFSETS)


def _maybe(told: Told) -> list[Symptom]:
    symptom = told.signature.symptom
    return [Symptom.of_cause(symptom.kernel, symptom.oracle, one) for one in (told.said.maybe if told.said else ())]


def _spoil_the_same(a: Symptom, b: Symptom) -> bool:
    if a.is_fault and b.is_fault:  # which address it was, and so whose tensor, is a matter of luck
        return True
    return a.kind.partition(":")[0] == b.kind.partition(":")[0]


RULES = (_explains, _names_its_stride, _is_flaky_alike, _is_about_part, _lies_alike, _may_be_one_rounding)
"""What makes two findings one, each asked both ways."""
