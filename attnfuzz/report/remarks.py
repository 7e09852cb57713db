"""Remarks that a reader needs beside the findings: one list, which every report and the exit status go by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.floor import sentences_of
from attnfuzz.campaign.result import CampaignResult
from attnfuzz.campaign.triage.contract_gaps import restriction_of
from attnfuzz.internal_errors import gpu_memory_ran_out
from attnfuzz.oracles.registry import ACCURACY, PAGE_RELOCATION
from attnfuzz.report.findings import count, largest_ratio, title_of

Weight = Literal["note", "doubt", "unjudged"]
"""*Unjudged*: too little was judged for "nothing found" to say something. *Doubt*: something failed that was not looked
into. Either ends a command with 2 that found nothing; a *note* does not."""


@dataclass(frozen=True, slots=True)
class Remark:
    """``text`` says all; ``title`` is a heading for it. ``targets``: the kernels it is about, all if none is named."""

    weight: Weight
    title: str
    text: str
    targets: tuple[str, ...] = ()
    details: tuple[str, ...] = ()


def remarks_on(result: CampaignResult) -> list[Remark]:
    """The remarks on a campaign, those that something was not judged for last: they stand beside the verdict."""
    return [*_doubts(result), *_notes(result), *_unjudged(result)]


def not_all_judged(result: CampaignResult) -> bool:
    """Whether so little was judged of something that "nothing found" says nothing of it."""
    return any(_unjudged(result))


def more_time(result: CampaignResult) -> str:
    """The remedy where no case was judged: time helps only where it ran out, and nothing else kept cases away."""
    kept = result.troubles or any(result.statistics.kernels[target].not_runnable for target in result.unreached)
    return "" if kept else _larger_budget(result)


def _larger_budget(result: CampaignResult) -> str:
    return "; raise --budget" if result.stop_reason == "budget" else ""


def _doubts(result: CampaignResult) -> Iterator[Remark]:
    for finding in result.unconfirmed:
        target = finding.declaration.target
        text = f"not confirmed: {target} {title_of(finding)}; {_doubt(finding)}"
        yield Remark("doubt", "Not confirmed", text, (target,), (finding.failure.message,))
    for trouble in result.troubles:
        said = trouble.strip()
        if trouble in result.of_problems:
            yield Remark("doubt", "Error of a problem", said)
        elif gpu_memory_ran_out(trouble):
            yield Remark("doubt", "Not judged", f"not judged: {said}")
        elif result.stop_reason == "environment":
            yield Remark("doubt", "Not judged", f"cannot go on here: {said}")
        else:
            yield Remark("doubt", "Internal error", f"internal error: {said}")


def _doubt(finding: Finding) -> str:
    if finding.runs:
        return f"it did not fail again in {count(finding.runs, 'run')}"
    return "time ran out before a second run; raise --budget"


def _notes(result: CampaignResult) -> Iterator[Remark]:
    kernels = result.statistics.kernels
    for target, kernel in kernels.items():  # that rest on more than they declare: the declaration to copy
        refused = [one for one in result.findings_of(target) if not one.is_question]
        if (restriction := restriction_of(kernel.declaration, refused)) is not None:
            of_whom = f"{target}: " if len(kernels) > 1 else ""
            yield Remark("note", "A declaration", f"{of_whom}{restriction}", (target,))
    for inferred in result.limited:  # what was not searched, and the declaration that makes that the contract
        if inferred.settled:
            yield Remark("note", "Outside the contract", str(inferred), (inferred.target,))
    for target, how_far in result.unbuilt.items():
        yield Remark("note", "Not built", f"{target}: {how_far}; no more of it was searched", (target,))
    for target, relation, cases in result.untried:
        yield Remark("note", "Not tried", f"{target}: {untried_words(relation, cases)}", (target,))
    for target, kernel in kernels.items():
        if kernel.not_runnable:  # their number is in no other
            number, reasons = sum(kernel.not_runnable.values()), sorted(kernel.not_runnable.items())
            why = f": {reasons[0][0]}" if len(reasons) == 1 else ""
            text = f"{target}: {count(number, 'case')} left out, not runnable here{why}; use a GPU"
            each = () if why else tuple(f"{count(cases, 'case')}: {reason}" for reason, cases in reasons)
            yield Remark("note", "Not runnable here", text, (target,), each)
    ratio = largest_ratio(result.statistics)
    if ratio > 1 and result.statistics.oracles and ACCURACY.name not in result.statistics.oracles:
        text = f"errors reach {ratio:.3g} times their bound, which accuracy would object to: it was not asked"
        yield Remark("note", "Not asked", text)


def _unjudged(result: CampaignResult) -> Iterator[Remark]:
    for target, why in result.never_returned.items():
        yield Remark("unjudged", "Never returned", f"{target} {why}", (target,))
    if result.statistics.cases and (unreached := [one for one in result.unreached if one not in result.never_returned]):
        yield Remark("unjudged", "Never reached", f"{_never_reached(unreached)}{more_time(result)}", tuple(unreached))
    for target, how_far in result.unsettled.items():
        yield Remark("unjudged", "Not settled", f"{target}: {how_far}{_larger_budget(result)}", (target,))
    few = tuple(one.target for one in result.too_few)
    sentences = sentences_of(result.too_few)
    of_each = [(one,) for one in few] if len(sentences) == len(few) else [few]
    for targets, sentence in zip(of_each, sentences, strict=True):
        yield Remark("unjudged", "Too few cases", sentence, targets)
    for oracle in result.idle_oracles:
        cases = count(result.statistics.cases, "case")
        text = f"{oracle} applies to none of {cases} that were drawn: nothing is known of what it looks for"
        yield Remark("unjudged", "Not asked", text)
    if result.unquestioned:
        asked = ", ".join(result.statistics.oracles)
        text = f"no case of {', '.join(result.unquestioned)} was judged by {asked}, which does not apply there"
        yield Remark("unjudged", "Not asked", text, result.unquestioned)


def _never_reached(targets: Sequence[str]) -> str:
    """Which kernels nothing is known of: without this sentence "nothing found" would be taken for theirs too."""
    was = "kernel was" if len(targets) == 1 else "kernels were"
    return f"{len(targets)} {was} never reached: {', '.join(targets)}"


def untried_words(relation: str, cases: int) -> str:
    """A sentence: ``relation`` was tried in vain on so many cases of a kernel; it says what is not known therefore."""
    words = f"{relation} could make none of its runs in {count(cases, 'case')}"
    if relation != PAGE_RELOCATION.name:
        return f"{words}: nothing is known of what it looks for"
    return (
        f"{words}: the kernel, or its wrapper, does not take tensors that reach past 2^31 elements, or copies them, or "
        "this machine cannot provide them; whether its offsets are wide enough is not known"
    )
