"""The findings of a campaign as workers report them: kept apart by signature, merged where they are the same bug."""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from attnfuzz.campaign.declaration_inference import LeftOut
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import (
    Confirmed,
    Duplicate,
    Found,
    Minimised,
    Smaller,
    Unconfirmed,
    Unfinished,
    WrittenFailure,
)
from attnfuzz.campaign.result import Reporter
from attnfuzz.campaign.saved.saving import SaveFolder
from attnfuzz.campaign.saved.state import SavedFinding
from attnfuzz.campaign.triage.contract_gaps import with_remedy
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import FailingCase, KnownBugs, are_one, may_be_the_machine
from attnfuzz.identity.features import kernel_parts, most_specific, needs
from attnfuzz.isolation.pythons import Python
from attnfuzz.minimise import size_key
from attnfuzz.oracles.registry import HANG
from attnfuzz.problems.supports import Supports

_TOO_OFTEN = 3
"""Hangs of one kernel that do not come again, from which on no machine is blamed."""


class FindingBook:
    """Takes what workers say of their findings, in order, and keeps the files up to date with it."""

    def __init__(
        self,
        kernels: dict[str, Declaration],
        *,
        started: float,
        folder: SaveFolder,
        reporter: Reporter,
        python: Python | None = None,
    ) -> None:
        self._kernels = kernels
        self._started = started
        self._folder = folder
        self._reporter = reporter
        self._python = python
        self._open: dict[str, Finding] = {}
        self._by_tag: dict[str, Finding] = {}
        self._slow = Counter[str]()
        self.findings: list[Finding] = []
        self.unconfirmed: list[Finding] = []

    def found(self, message: Found) -> Finding:
        """Open a finding."""
        finding = self._opened(message.finding, message.kernel, message)
        self._open[finding.name] = finding
        self._by_tag[finding.tag] = finding
        self._reporter.finding("found", finding)
        return finding

    def ask(self, question: LeftOut, declaration: Declaration) -> None:
        """Take up what probes left open of a kernel, with the case that shows it; the search leaves that out."""
        case, failure = question.case, question.failure
        if failure is None:
            raise ValueError(f"{question}: a question has a case that fails")
        elapsed_s = time.monotonic() - self._started
        finding = Finding(
            name=f"question-{len(self.findings)}",
            declaration=declaration,
            case=case,
            failure=failure,
            first_seen_s=elapsed_s,
            shrunk_s=elapsed_s,
            failed=1,
            runs=1,
            minimised=True,
            remedy=msgspec.structs.replace(Supports(), **{question.name: question.kept}),
            python=self._python,
        )
        self.findings.append(finding)
        self._by_tag[finding.tag] = finding
        self._folder.save(finding)
        self._reporter.finding("shrunk", finding)

    def seen_again(self, cases: dict[str, int]) -> None:
        """Count failing cases, by the tag of the finding that they were put down to."""
        for tag, count in cases.items():
            if (finding := self._by_tag.get(tag)) is not None:
                finding.cases_seen += count

    def standing_for(self, tag: str) -> str:
        """The tag of the finding that the one with ``tag`` is reported as."""
        return self._by_tag[tag].tag if tag in self._by_tag else ""

    def confirmed(self, message: Confirmed) -> None:
        """Save the case as it is, before anything is tried on it."""
        finding = self._open[message.finding]
        finding.failed, finding.runs, finding.seen_after = message.failed, message.runs, ()
        if finding not in self.findings:
            self._save_new(finding)
            self._reporter.finding("confirmed", finding)

    def unconfirmed_by(self, message: Unconfirmed) -> None:
        """Close a failure that did not show again in ``message.runs`` runs: a flaky finding, whose rate is one of all.

        What the machine may have caused is none, and is kept apart, and so is the end of a process that came of no case
        alone. A hang of that kind was a slow case and is dropped, unless the kernel does it again and again.
        """
        finding = self._open.pop(message.finding)
        if not may_be_the_machine(finding.failure) and not message.lost_together:
            finding.failed, finding.runs, finding.seen_after = 1, message.runs + 1, ()
            self._save_new(finding)  # it cannot be shrunk, since it hardly ever fails
            if not self._is_merged(finding):
                self._reporter.finding("unconfirmed", finding)
            return
        finding.runs = message.runs
        target = finding.declaration.target
        self._slow[target] += finding.failure.oracle == HANG.name
        if finding.failure.oracle != HANG.name or self._slow[target] >= _TOO_OFTEN:
            self._doubt(finding)

    def smaller(self, message: Smaller) -> None:
        """Replace the case, on disk too."""
        finding = self._open[message.finding]
        case, finding.preceding = message.cases(finding.declaration.problem)
        finding.steps += case != finding.case  # the same case may come again with another oracle's word on it
        finding.case, finding.failure = case, message.failure
        self._folder.save(finding)
        self._reporter.finding("smaller", finding)

    def forget(self, name: str) -> None:
        """Drop a finding, if there is one, that has turned out to be none."""
        finding = self._open.pop(name, None)
        if finding in self.findings:
            self._drop(finding)

    def duplicate(self, message: Duplicate) -> Finding:
        """Close a finding that is a known bug, and forget it."""
        finding = self._open.pop(message.finding)
        of = next((bug.finding for bug in message.bugs), "")
        if (known := self._by_tag.get(of)) is not None:
            self._count_for(known, finding)
            finding.same_as = known.tag
        if finding in self.findings:
            self._drop(finding)
        self._reporter.finding("known", finding)
        return finding

    def minimised(self, message: Minimised) -> Finding:
        """Close a finding and give it its signature; one that is the same bug as another is merged with it."""
        finding = self._open.pop(message.finding)
        finding.features, finding.weights = message.features, message.weights
        details = (*finding.failure.details, *message.explanation)
        blame = finding.failure.blame | message.blame
        finding.failure = msgspec.structs.replace(finding.failure, details=details, blame=blame)
        if message.complete:
            finding.shrunk_s = time.monotonic() - self._started
        finding.declarable, finding.same_as = message.declarable, message.same_as
        with_remedy(finding)
        self._settle(finding)
        return finding

    def abandon(self, worker: int, *, ends: bool = True) -> list[Finding]:
        """Close what a worker was looking into when it was lost, or the campaign ``ends``, keeping what it had.

        If the campaign goes on, what was not confirmed is no finding yet: somebody else has to look into it.
        """
        left = [name for name in self._open if name.startswith(f"{worker}-")]
        findings = [self._open.pop(name) for name in left]
        for finding in findings:
            if finding in self.findings:
                finding.failure = finding.failure.undecided
                self._settle(finding)
            elif ends:
                self._keep_unconfirmed(finding)
        return findings

    def accept_unfinished(self, unfinished: Unfinished, *, unless: KnownBugs) -> None:
        """Keep a failure that nobody could look into any more, unless it is a known bug."""
        finding = self._opened("", unfinished.kernel, unfinished)
        same = (finding.case, finding.declaration)
        known = any((other.case, other.declaration) == same for other in self.findings)
        failing = FailingCase(finding.declaration, finding.case, finding.failure)
        if not known and unless.predicting(failing) is None:
            self._keep_unconfirmed(finding)

    def restore(self, saved: SavedFinding, name: str) -> None:
        """Take up a finding of an earlier part of the campaign."""
        finding = saved.restore(self._kernels[saved.kernel], name)
        finding.python = self._python
        self.findings.append(finding)
        self._by_tag[finding.tag] = finding
        self._folder.adopt(finding)

    def settle(self, kernel: Declaration) -> None:
        """Hold findings of an earlier part of the campaign against ``kernel``, now that it is known what it takes."""
        for finding in self.findings:
            if finding.declaration is self._kernels[kernel.target]:
                finding.declaration = kernel

    def pending(self) -> list[Unfinished]:
        """Failures that workers are looking into, as far as they have got."""
        return [finding.unfinished() for finding in self._open.values()]

    def save_all(self) -> None:
        """Make sure that every finding is on disk, also if its file or its folder has vanished."""
        for finding in self.findings:
            self._folder.save_if_missing(finding)

    def _opened(self, name: str, kernel: str, seen: WrittenFailure) -> Finding:
        declaration = self._kernels[kernel]
        case, seen_after = seen.cases(declaration.problem)
        return Finding(
            name=name,
            declaration=declaration,
            case=case,
            failure=seen.failure,
            first_seen_s=time.monotonic() - self._started,
            seen_after=seen_after,
            python=self._python,
        )

    def _keep_unconfirmed(self, finding: Finding) -> None:
        if finding.failure.oracle == HANG.name and not finding.runs:  # a slow machine looks the same
            self._doubt(finding)
        else:
            finding.failure = finding.failure.undecided
            self._save_new(finding)
            self._settle(finding)

    def _doubt(self, finding: Finding) -> None:
        if all(other.symptom != finding.symptom for other in self.unconfirmed):
            self.unconfirmed.append(finding)
        self._reporter.finding("unconfirmed", finding)

    def _save_new(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._folder.save(finding)

    def _settle(self, finding: Finding) -> None:
        if not self._is_merged(finding):
            self._folder.save(finding)
            self._reporter.finding("shrunk", finding)

    def _is_merged(self, finding: Finding) -> bool:
        """Whether a finding that is done with goes into another, which is the same bug."""
        finding.minimised = True
        is_merged = False
        while (other := self._same_bug_as(finding)) is not None:
            kept, dropped = sorted((other, finding), key=_preference)
            kept.first_seen_s = min(kept.first_seen_s, dropped.first_seen_s)
            self._count_for(kept, dropped)
            is_told = dropped.shrunk_s is None and kept.symptom == dropped.symptom
            if not is_told and (kept.symptom, kept.features) != (dropped.symptom, dropped.features):
                kept.also_shows_as(dropped)
                with_remedy(kept)
            self._drop(dropped)
            if dropped is finding:
                finding.same_as = kept.tag
                self._reporter.finding("known", finding)
                is_merged, finding = True, kept  # which may be one with others, now that it stands for more
            if is_merged:
                self._folder.save(kept)
        return is_merged

    def _same_bug_as(self, finding: Finding) -> Finding | None:
        """The settled finding that has most in common with ``finding``, if they are one bug.

        What was not shrunk, and has no cause, may be any of several: it is none of them for certain.
        """
        same = [
            other
            for other in self.findings
            if other.minimised and other is not finding
            if (
                _have_one_cause(finding, other)
                if other.is_question != finding.is_question
                else _are_one(finding, other) or self._by_tag.get(finding.same_as) is other
            )
        ]
        if finding.is_unfinished and not finding.failure.cause and sum(not one.is_unfinished for one in same) > 1:
            return None
        mine = kernel_parts(finding.signature.features)
        return max(same, key=lambda other: len(mine & kernel_parts(other.signature.features)), default=None)

    def _count_for(self, kept: Finding, dropped: Finding) -> None:
        """Cases of ``dropped``, later ones too, count for ``kept``."""
        kept.cases_seen += dropped.cases_seen
        self._by_tag |= {tag: kept for tag, finding in self._by_tag.items() if finding is dropped}

    def _drop(self, finding: Finding) -> None:
        self.findings.remove(finding)
        self._folder.forget(finding)


def _are_one(finding: Finding, other: Finding) -> bool:
    """Whether two findings are taken for one bug, as they are told or as one of them showed that was merged."""
    if are_one(finding, other):
        return True
    if finding.bug.is_told_apart_from(other.bug):
        return False
    pairs = ((finding, other), (other, finding))
    return any(bug.predicts(its.bug) for mine, its in pairs for bug in mine.merged)


def _have_one_cause(finding: Finding, other: Finding) -> bool:
    """Whether the very mistake is told of both: then a declaration that ends one of them leaves the other."""
    if finding.declaration.target != other.declaration.target:
        return False
    told = [{(one.mistake, one.way) for one in each.failure.causes} for each in (finding, other)]
    return bool(told[0]) and told[0] == told[1]


def _preference(finding: Finding) -> tuple[object, ...]:
    """The rank of a finding among those of one bug. The first is kept: no question, shrunk, confirmed, is seen in one
    run, needs least, is explained best, is smallest. What says where all is read from is told before what was read.

    What one that has not been shrunk needs is not known, and a reader wants the case that is done with.
    """
    features = finding.signature.features
    return (
        finding.is_question,
        finding.shrunk_s is None,
        finding.runs == 0,
        finding.bug.is_of_relation and not finding.bug.is_of_all_reads,
        len(kernel_parts(features)),
        len(needs(features)),
        len(most_specific(features)),
        not (finding.failure.cause or finding.failure.blame.tokens),
        *size_key(finding.case, options=finding.declaration.options),
    )
