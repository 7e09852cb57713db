"""The order in which a campaign's findings are told: what to repair first comes first."""

from __future__ import annotations

from collections.abc import Iterable

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.undeclared import needed_limits

__all__ = ["heading_of", "in_order"]

_HEADINGS = (
    "",
    "undeclared: what follows ends with a declaration, if the kernel is not meant to do more",
    "flaky: what follows does not fail in every run",
)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Bugs whatever is declared, then those that a declaration ends, then those that fail now and then."""
    return sorted(findings, key=_kind)


def heading_of(finding: Finding) -> str:
    """What to say before the first of its kind; empty for bugs whatever is declared."""
    return _HEADINGS[_kind(finding)]


def _kind(finding: Finding) -> int:
    return 2 if finding.is_flaky else 1 if needed_limits(finding) else 0
