"""The order in which all reports tell findings: by kernel, then by cause, and what to repair first comes first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import IntEnum
from typing import TypeVar

from attnfuzz.campaign.aspects import aspects
from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Statistics
from attnfuzz.oracles.verdict import ends_process

__all__ = ["OUT_OF_CONTRACT", "Severity", "heading_of", "in_order", "kernels_in_order", "severity_of"]

OUT_OF_CONTRACT = "Possibly out of contract: each goes away if you add the declaration it names"
_FLAKY = "Flaky: these do not fail in every run"
_OUT_OF_BOUNDS = frozenset({"guard_page", "page_relocation", "red_zone"})
_OF_DEAD_MEMORY = frozenset({"dead_memory", "unwritten"})
_OF_EMPTIES = frozenset(
    {
        "both states empty",
        "empty sequence",
        "no query",
        "one state empty",
        "padding tokens",
        "prefix empty",
        "suffix empty",
    }
)
"""What a case has that is about rows without keys or tokens."""
_JUST_ABOVE = 10.0
"""Times the error bound: a rounding that was not declared, rather than a wrong address."""

_One = TypeVar("_One")


class Severity(IntEnum):
    """What a finding does, the worst first."""

    FATAL = 0
    WRONG = 1
    DEAD_MEMORY = 2
    CONTRACT = 3
    NEAR = 4
    FLAKY = 5

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Severity.FATAL: "crash, hang or out of bounds",
    Severity.WRONG: "wrong or no result",
    Severity.DEAD_MEMORY: "dead or unwritten memory",
    Severity.CONTRACT: "contract question",
    Severity.NEAR: "just above its bound",
    Severity.FLAKY: "flaky",
}


def in_order(result: CampaignResult) -> list[Finding]:
    """What is in the contract, kernel by kernel, that with the worst finding first; then so what is not.

    Of a kernel crashes and accesses out of bounds, then wrong numbers, what memory without tokens does, questions of
    the contract, errors just above their bound, and what is flaky; what has one cause stands together, at the place of
    its worst.
    """
    in_contract = result.statistics.in_contract
    bugs = [finding for finding in result.findings if in_contract(finding)]
    others = [finding for finding in result.findings if not in_contract(finding)]
    return [*_by_kernel(bugs), *_by_kernel(others)]


def kernels_in_order(result: CampaignResult) -> list[str]:
    """All kernels, those with findings first, as these are told."""
    told = dict.fromkeys(finding.declaration.target for finding in in_order(result))
    return [*(target for target in told if target in result.statistics.kernels)] + [
        target for target in result.statistics.kernels if target not in told
    ]


def heading_of(finding: Finding, statistics: Statistics) -> str:
    """What to say before the first of its kind; empty for what is certain to be a bug."""
    if not statistics.in_contract(finding):
        return OUT_OF_CONTRACT
    return _FLAKY if finding.is_flaky else ""


def severity_of(finding: Finding) -> Severity:
    """What it does, for all that was seen."""
    failure = finding.failure
    if finding.is_flaky:
        return Severity.FLAKY
    if ends_process(failure) or failure.oracle in _OUT_OF_BOUNDS:
        return Severity.FATAL
    if finding.remedy is not None or _is_of_empties(finding):
        return Severity.CONTRACT
    if failure.oracle in _OF_DEAD_MEMORY:
        return Severity.DEAD_MEMORY
    is_near = failure.oracle == "accuracy" and 1.0 < (failure.error_ratio or 0.0) < _JUST_ABOVE
    return Severity.NEAR if is_near else Severity.WRONG


def _is_of_empties(finding: Finding) -> bool:
    """Whether it is about nothing but what results hold where there are no keys: kernels differ in that."""
    about = aspects(finding.signature.features)
    return bool(about) and all(one in _OF_EMPTIES or (one.startswith("lse ") and "inf" in one) for one in about)


def _by_kernel(findings: Iterable[Finding]) -> list[Finding]:
    def by_cause(of_kernel: Sequence[Finding]) -> list[Finding]:
        by_severity = sorted(of_kernel, key=severity_of)
        return _grouped(by_severity, lambda finding: (finding.is_flaky, finding.cause))

    kernels = dict[str, list[Finding]]()
    for finding in findings:
        kernels.setdefault(finding.declaration.target, []).append(finding)
    ordered = [by_cause(of_kernel) for of_kernel in kernels.values()]
    return [finding for of_kernel in sorted(ordered, key=lambda its: severity_of(its[0])) for finding in of_kernel]


def _grouped(ordered: Iterable[_One], key: Callable[[_One], Hashable]) -> list[_One]:
    """Equals moved up to the first of them."""
    groups = dict[Hashable, list[_One]]()
    for one in ordered:
        groups.setdefault(key(one), []).append(one)
    return [one for group in groups.values() for one in group]
