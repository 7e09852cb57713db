"""The order in which a campaign's findings are told: kernel by kernel, and of each what to repair first comes first."""

from __future__ import annotations

from collections.abc import Iterable

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.undeclared import needed_limits
from attnfuzz.oracles.verdict import ends_process

__all__ = ["heading_of", "in_order"]

_OUT_OF_CONTRACT = "Possibly out of contract: each goes away if you add the declaration it names"
_FLAKY = "Flaky: these do not fail in every run"
_OUT_OF_BOUNDS = frozenset({"guard_page", "page_relocation", "red_zone"})
_OF_DEAD_MEMORY = frozenset({"dead_memory", "unwritten"})
_JUST_ABOVE = 10.0
"""Times the error bound: a rounding that was not declared, rather than a wrong address."""


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Kernel by kernel, that with the worst finding first.

    Of a kernel crashes and accesses out of bounds, then wrong numbers, what memory without tokens does, what a
    declaration ends, errors just above their bound, and what is flaky.
    """
    kernels = dict[str, list[Finding]]()
    for finding in findings:
        kernels.setdefault(finding.declaration.target, []).append(finding)
    ordered = [sorted(of_kernel, key=_severity) for of_kernel in kernels.values()]
    return [finding for of_kernel in sorted(ordered, key=lambda its: _severity(its[0])) for finding in of_kernel]


def heading_of(finding: Finding) -> str:
    """What to say before the first of its kind; empty for bugs whatever is declared."""
    return _FLAKY if finding.is_flaky else _OUT_OF_CONTRACT if needed_limits(finding) else ""


def _severity(finding: Finding) -> int:
    """0 is the worst."""
    failure = finding.failure
    if finding.is_flaky:
        return 5
    if needed_limits(finding):
        return 3
    if ends_process(failure) or failure.oracle in _OUT_OF_BOUNDS:
        return 0
    if failure.oracle in _OF_DEAD_MEMORY:
        return 2
    is_near = failure.oracle == "accuracy" and 1.0 < (failure.error_ratio or 0.0) < _JUST_ABOVE
    return 4 if is_near else 1
