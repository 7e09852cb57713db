"""Output of ``attnfuzz verify`` about a kernel: pass or fail, in lines and as the document ``attnfuzz.verify/1``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult
from attnfuzz.campaign.statistics import by_axis, coverage_of
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.cases.facets.sequences import PADDING_TOKENS
from attnfuzz.corpus import current_environment
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import EXCEPTION
from attnfuzz.problems.cases import Case
from attnfuzz.problems.supports import as_call
from attnfuzz.report.findings import ToldFinding, count, one_line, remedy_lines, told_findings
from attnfuzz.report.remarks import untried_words

FORMAT = "attnfuzz.verify/1"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was not held against the kernel, which its file leaves open: ``text`` is a sentence.

    ``field`` of `Supports` is ``declare`` then. ``how`` shows it that it is not taken: it "raises", gives "wrong"
    numbers, or "dies"; or it does something else in its place throughout, a "convention". ``said`` are the kernel's
    words, or an oracle's.
    """

    field: str
    declare: str
    how: str
    said: str
    text: str


class Counterexample(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest case that fails, and how. ``certainty`` is empty where it always does, by itself.

    ``regression`` and ``script`` are the files that ``--save-dir`` asks for.
    """

    oracle: str
    kind: str
    cause: str
    message: str
    details: tuple[str, ...]
    certainty: str
    case: Case
    preceding: tuple[Case, ...]
    regression: str | None = None
    script: str | None = None


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The document. Where the verdict is "error" nothing was judged, and ``error`` is why.

    ``declared``: what the kernel's file declares, which is not questioned. ``left_out``: see `Limit`.
    ``covered``: what cases had, by feature of inputs; ``largest``: the tokens of the longest ``sequence``, and the most
    ``sequences`` and ``tokens`` of a case. Nothing is known of what lies beyond.
    ``max_error_ratio``: the largest finite error over bound of all cases, failing ones included.
    ``untried``: what could be tried on no case, a sentence each.
    ``unconfirmed``: what failed once, did not come again, and may have been the machine's doing.
    """

    format: str = FORMAT
    verdict: Literal["pass", "fail", "error"]
    kernel: str
    problem: str | None = None
    cases: int = 0
    largest: dict[str, int] = {}
    covered: dict[str, tuple[str, ...]] = {}
    elapsed_s: float
    seed: int | None = None
    device: str | None = None
    environment: dict[str, str]
    declared: str = ""
    left_out: tuple[Limit, ...] = ()
    max_error_ratio: float | None = None
    counterexample: Counterexample | None = None
    untried: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()
    error: str | None = None


def verification_of(
    result: CampaignResult, kernel: str, *, regression: Path | None = None, script: Path | None = None
) -> Verification:
    """The document of a campaign about one kernel that was judged, which is called ``kernel``."""
    statistics = result.statistics
    (searched,) = statistics.kernels.values()
    found = counting(result)
    covered = by_axis(coverage_of(searched.declaration, searched.coverage).levels)
    return Verification(
        verdict="pass" if found is None else "fail",
        kernel=kernel,
        problem=str(searched.declaration.problem),
        cases=searched.cases,
        largest=searched.largest,
        covered={axis: tuple(level.level for level in levels) for axis, levels in covered.items()},
        elapsed_s=round(result.elapsed_s, 3),
        seed=statistics.seed,
        device=statistics.device_name,
        environment=current_environment(statistics.device_name).versions,
        declared=_declared(searched.declaration),
        left_out=(*_left_out(result), *_outside(result)),
        max_error_ratio=searched.max_error_ratio,
        counterexample=None if found is None else _counterexample(found, regression, script),
        untried=tuple(untried_words(relation, cases) for _, relation, cases in result.untried),
        unconfirmed=tuple(finding.failure.message for finding in result.unconfirmed),
    )


def failed_to_verify(kernel: str, error: str, elapsed_s: float) -> Verification:
    """The document about a kernel that could not be judged."""
    return Verification(
        verdict="error",
        kernel=kernel,
        elapsed_s=round(elapsed_s, 3),
        environment=current_environment("").versions,
        error=error,
    )


def counting(result: CampaignResult) -> ToldFinding | None:
    """The worst finding that counts; None if there is none."""
    return next((told for told in told_findings(result) if told.disposition == "counts"), None)


def lines_of(verification: Verification) -> Iterator[str]:
    """For people."""
    longest = verification.largest.get("sequence")
    far = "" if longest is None else f", none longer than {count(longest, 'token')},"
    searched = f"{count(verification.cases, 'case')} of {verification.problem}{far}"
    if verification.counterexample is not None and not verification.cases:
        searched = f"{verification.problem}, before the search of cases began,"
    effort = f"{searched} in {format_duration(verification.elapsed_s)} on {verification.device}"
    yield f"{verification.verdict.upper()}  {verification.kernel}  ({effort}, seed {verification.seed})"
    if (found := verification.counterexample) is not None:
        yield f"  {found.oracle}: {found.message}"
        yield f"  {one_line(found.case)}"
        yield from (f"  {line}" for line in (*found.details, found.certainty) if line)
        files = [path for path in (found.regression, found.script) if path is not None]
        if files:
            yield f"  saved in {' and '.join(files)}"
    if verification.declared:
        yield f"  declared: {verification.declared}"
    for limit in verification.left_out:
        if limit.how == "convention":
            yield f"  taken for its design, as every case shows it: {limit.text}"
        else:
            yield f"  not searched: {limit.text}{f': {limit.said}' if limit.said else ''}"
    yield from (f"  not tried: {words}" for words in verification.untried)
    yield from (f"  not confirmed: {message}" for message in verification.unconfirmed)


def _counterexample(told: ToldFinding, regression: Path | None, script: Path | None) -> Counterexample:
    found = told.finding
    return Counterexample(
        oracle=found.failure.oracle,
        kind=found.failure.kind,
        cause=found.cause,
        message=told.message,
        details=(*told.lines, *_answer(found)),
        certainty=told.certainty,
        case=found.case,
        preceding=found.preceding,
        regression=None if regression is None else str(regression),
        script=None if script is None else str(script),
    )


def _answer(finding: Finding) -> tuple[str, ...]:
    """The declaration of a kernel that is not meant to take sequences without keys, if the finding needs one.

    To its author that is a question; whoever verifies a kernel has none, and is told what was ordered or not.
    """
    supports = finding.declaration.supports
    has_empty = any(one.role == "empty" for one in finding.signature.features - {PADDING_TOKENS})
    if finding.remedy is not None or not has_empty or not supports.leaves_open("empty_sequences"):
        return ()
    return remedy_lines({"empty_sequences": False}, finding.case)


def _left_out(result: CampaignResult) -> Iterator[Limit]:
    for inferred in result.inferred:
        for left_out in inferred.left_out:
            yield Limit(
                field=left_out.name,
                declare=as_call("Supports", {left_out.name: left_out.kept}),
                how="convention" if left_out.disposition == "convention" else left_out.how,
                said=left_out.said,
                text=str(left_out),
            )


def _outside(result: CampaignResult) -> Iterator[Limit]:
    """Findings that a declaration ends: refusals, and where tensors lie."""
    for finding in result.findings:
        if finding.remedy is None or result.statistics.disposition(finding) != "outside":
            continue
        limits = finding.remedy.declared()
        declare = as_call("Supports", limits)
        how = "raises" if finding.failure.oracle == EXCEPTION.name else "wrong"
        yield Limit(
            field=", ".join(limits),
            declare=declare,
            how=how,
            said=finding.failure.message,
            text=f"it fails outside {declare}",
        )


def _declared(declaration: Declaration) -> str:
    """The part of ``declaration`` that its file says itself."""
    parts = {"Supports": declaration.supports.declared(), "Numerics": declaration.numerics.declared()}
    own = {
        name: {field: value for field, value in fields.items() if field not in declaration.assumed}
        for name, fields in parts.items()
    }
    return ", ".join(as_call(name, fields) for name, fields in own.items() if fields)
