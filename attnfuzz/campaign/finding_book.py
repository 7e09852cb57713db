"""The findings of a campaign as workers report them: kept apart by signature, merged where they are the same bug."""

from __future__ import annotations

import time

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import Confirmed, Duplicate, Found, Minimised, Smaller, Unconfirmed
from attnfuzz.campaign.reporter import Reporter
from attnfuzz.campaign.saving import SaveFolder
from attnfuzz.campaign.signature import Symptom
from attnfuzz.declaration import Declaration
from attnfuzz.minimise import size_key
from attnfuzz.problems.cases import decode_case

__all__ = ["FindingBook"]


class FindingBook:
    """Takes what workers say of their findings, in order, and keeps the files up to date with it."""

    def __init__(
        self, kernels: dict[str, Declaration], *, started: float, folder: SaveFolder, reporter: Reporter
    ) -> None:
        self._kernels = kernels
        self._started = started
        self._folder = folder
        self._reporter = reporter
        self._open: dict[str, Finding] = {}
        self.findings: list[Finding] = []
        self.unconfirmed: list[Finding] = []

    def found(self, message: Found) -> Finding:
        """Open a finding."""
        declaration = self._kernels[message.kernel]
        finding = Finding(
            name=message.finding,
            declaration=declaration,
            case=decode_case(declaration.problem, bytes(message.case)),
            failure=message.failure,
            first_seen_s=time.monotonic() - self._started,
        )
        self._open[finding.name] = finding
        self._reporter.found(finding)
        return finding

    def confirmed(self, message: Confirmed) -> None:
        """Save the case as it is, before anything is tried on it."""
        finding = self._open[message.finding]
        finding.failed, finding.runs = message.failed, message.runs
        self._accept(finding)

    def unconfirmed_by(self, message: Unconfirmed) -> Finding:
        """Close a finding that did not fail again. A hang that did not was a slow case and is not kept."""
        finding = self._open.pop(message.finding)
        finding.runs = message.runs
        if finding.failure.oracle != "hang":
            self._doubt(finding)
        return finding

    def smaller(self, message: Smaller) -> None:
        """Replace the case, on disk too."""
        finding = self._open[message.finding]
        case = decode_case(finding.declaration.problem, bytes(message.case))
        finding.steps += case != finding.case  # the same case may come again with another oracle's word on it
        finding.case, finding.failure = case, message.failure
        self._folder.save(finding)

    def duplicate(self, message: Duplicate) -> Symptom:
        """Close a finding that is a known bug, and forget it."""
        finding = self._open.pop(message.finding)
        if finding in self.findings:
            self._drop(finding)
        self._reporter.known(finding)
        return finding.symptom

    def minimised(self, message: Minimised) -> Symptom:
        """Close a finding and give it its signature; one that is the same bug as another is merged with it."""
        finding = self._open.pop(message.finding)
        finding.features = message.features
        if message.complete:
            finding.shrunk_s = time.monotonic() - self._started
        self._settle(finding)
        return finding.symptom

    def abandon(self, worker: int) -> list[Finding]:
        """Close what a worker was looking into when it was lost or the campaign ended, keeping what it had."""
        left = [name for name in self._open if name.startswith(f"{worker}-")]
        findings = [self._open.pop(name) for name in left]
        for finding in findings:
            if finding.failure.oracle == "hang" and not finding.runs:  # a slow machine looks the same
                self._doubt(finding)
            else:
                self._accept(finding)
                self._settle(finding)
        return findings

    def _doubt(self, finding: Finding) -> None:
        if all(other.symptom != finding.symptom for other in self.unconfirmed):
            self.unconfirmed.append(finding)
        self._reporter.unconfirmed(finding)

    def _accept(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)
            self._folder.save(finding)
            self._reporter.confirmed(finding)

    def _settle(self, finding: Finding) -> None:
        finding.minimised = True
        for other in [other for other in self.findings if other.minimised and other is not finding]:
            if _are_same_bug(finding, other):
                kept, dropped = sorted((finding, other), key=_simplicity)
                kept.first_seen_s = min(kept.first_seen_s, dropped.first_seen_s)
                self._drop(dropped)
                if dropped is finding:
                    return
        self._folder.save(finding)
        self._reporter.shrunk(finding)

    def _drop(self, finding: Finding) -> None:
        self.findings.remove(finding)
        self._folder.forget(finding)


def _are_same_bug(a: Finding, b: Finding) -> bool:
    """Whether either would have been passed over silently, had the other been found first."""
    mine, its = a.signature, b.signature
    if a.is_flaky and b.is_flaky and a.declaration.target == b.declaration.target:
        return mine.features <= its.features or its.features <= mine.features
    return mine.explains(its.symptom, its.features) or its.explains(mine.symptom, mine.features)


def _simplicity(finding: Finding) -> tuple[object, ...]:
    return (len(finding.signature.features), *size_key(finding.case, options=finding.declaration.options))
