"""What all reports say of a finding, a case in one line, and the order in which findings are told."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import singledispatch
from typing import Any, TypeVar

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Standing, Statistics
from attnfuzz.campaign.saved.replay import replay_command
from attnfuzz.cases.facets import facets_of
from attnfuzz.cases.facets.facet import listed
from attnfuzz.corpus import FindingRecord, encode_regression
from attnfuzz.identity.features import aspects
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    MergeStatesCase,
    PagedDecodeCase,
)
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.supports import as_call
from attnfuzz.verdict import ends_process, where_to_look

__all__ = [
    "CLOSE_TO_THE_BOUND",
    "OUT_OF_CONTRACT",
    "QUESTIONS",
    "UNFINISHED",
    "Severity",
    "ToldFinding",
    "count",
    "finding_lines",
    "found_so_far",
    "heading_of",
    "headline",
    "in_order",
    "kernels_in_order",
    "known_since",
    "largest_ratio",
    "one_line",
    "remedy_lines",
    "restarts_of",
    "severity_of",
    "told_findings",
    "what_was_found",
    "wrapped",
]


_One = TypeVar("_One")

CLOSE_TO_THE_BOUND = 0.9
"""Times the bound: above it an error stands out, though it is allowed."""


def headline(case: Case) -> str:
    """Problem, dtype, heads and pages: "paged_decode · float16 · head_size 64 · 4 query heads on 1 KV head · ..."."""
    return " · ".join([str(case.problem), *_heading(case)])


@singledispatch
def _heading(case: Case) -> list[str]:
    """Its parts after the problem's name."""
    raise TypeError(f"nothing is known to say of a case of {case.problem}")


@_heading.register
def _(case: OpenCase) -> list[str]:
    return [f"{name} {_value(getattr(case, name))}" for name in case.problem.fields]


@_heading.register
def _(case: MergeStatesCase) -> list[str]:
    heads = count(case.num_q_heads, "query head")
    return [case.dtype, f"head_size {case.head_size}", count(case.num_tokens, "token"), heads]


@_heading.register
def _(case: AttentionCase) -> list[str]:
    cache = "" if case.kv is None else f", cache {case.kv.dtype} with a scale per {case.kv.per}"
    v_head_size = [] if case.v_head_size is None else [f"v_head_size {case.v_head_size}"]
    heads = f"{count(case.num_q_heads, 'query head')} on {count(case.num_kv_heads, 'KV head')}"
    return [f"{case.dtype}{cache}", f"head_size {case.head_size}", *v_head_size, heads]


@_heading.register
def _(case: PagedDecodeCase) -> list[str]:
    parts: list[str] = _heading.dispatch(AttentionCase)(case)
    return [*parts, f"{case.layout}, pages of {count(case.block_size, 'token')}"]


def one_line(case: Case) -> str:
    """What the case is in plain characters, with the lengths of its sequences, variants and options."""
    told = (words for facet in facets_of(type(case)) for words in facet.told(case))
    return ", ".join([headline(case).replace(" · ", ", "), *told])


def _value(value: object) -> str:
    return f"({listed(value)})" if isinstance(value, tuple) else str(value)


def count(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def largest_ratio(statistics: Statistics) -> float:
    """The largest error over bound of all kernels."""
    return max((kernel.max_error_ratio for kernel in statistics.kernels.values()), default=0.0)


def wrapped(parts: Iterable[_One], width: int, width_of: Callable[[_One], int]) -> Iterator[list[_One]]:
    """Lines of at least one part each, as many as fit into ``width``."""
    line: list[_One] = []
    for part in parts:
        if line and sum(map(width_of, line)) + width_of(part) > width:
            yield line
            line = []
        line.append(part)
    if line:
        yield line


def restarts_of(statistics: Statistics) -> str:
    """How often a kernel's process was lost."""
    return f"kernel processes restarted {count(statistics.restarts, 'time')}"


def found_so_far(statistics: Statistics) -> str:
    """ "2 findings, and 1 possibly out of contract"; "0 findings" before there are any."""
    counts, *others = _standings(statistics.findings, statistics, "being shrunk")
    return ", ".join([_findings(counts, statistics), *others])


def what_was_found(result: CampaignResult) -> str:
    """The same at the end; "nothing found" if nothing was."""
    statistics = result.statistics
    counts, *others = _standings(result.findings, statistics, "not shrunk to the end")
    done = "confirmed" if result.unconfirmed and not result.findings else "found"
    new = "new " if any(map(statistics.is_known, result.findings)) else ""
    within = f" within what {'it was' if len(statistics.kernels) == 1 else 'they were'} found to take"
    by = f" by {' and '.join(statistics.oracles)}" if statistics.oracles else ""
    nothing = f"nothing {new}{done}{by}{within if result.questions else ''}"
    found = ", ".join([_findings(counts, statistics) if counts else nothing, *others])
    return f"{found}; {count(len(result.questions), 'question')}" if result.questions else found


def known_since(statistics: Statistics) -> str:
    """Where to look up what is known."""
    return f"known since {statistics.against.name}" if statistics.against is not None else "known"


def _known_as(found: Finding, statistics: Statistics) -> str:
    issue = statistics.against.issue_of(found) if statistics.against is not None else ""
    return ", ".join(filter(None, (known_since(statistics), issue)))


def _findings(number: int, statistics: Statistics) -> str:
    return count(number, "finding" if statistics.against is None else "new finding")


def _standings(found: Iterable[Finding], statistics: Statistics, how_far: str) -> tuple[int, *tuple[str, ...]]:
    """How many count, and how many do not, and why; ``how_far`` those have come that may be others."""
    standings = [statistics.standing(one) for one in found]
    known, outside, unfinished = (standings.count(one) for one in ("known", "outside", "unfinished"))
    others = (
        *([f"and {count(unfinished, 'failure')} {how_far}"] if unfinished else []),
        *([f"{known} {known_since(statistics)}"] if known else []),
        *([f"and {outside} possibly out of contract"] if outside else []),
    )
    return standings.count("counts"), *others


@dataclass(frozen=True, slots=True)
class ToldFinding:
    """What every report says of ``finding``, each in its own form; texts are empty where there is nothing to say.

    ``number``: its place among those of the campaign. ``standing``: what it amounts to. ``status``: whether it is new,
    where that was asked for. ``case`` is its case in one line, ``lines`` what is said beside its message, ``certainty``
    how sure it is, and ``comparison`` what came of it in several environments. ``saved`` is what its regression file
    holds, and ``command`` what runs that again.
    """

    number: int
    finding: Finding
    standing: Standing
    status: str
    case: str
    lines: tuple[str, ...]
    certainty: str
    comparison: str
    saved: str
    command: str

    @property
    def target(self) -> str:
        """That of its kernel."""
        return self.finding.declaration.target

    @property
    def message(self) -> str:
        """What an oracle says of it."""
        return self.finding.failure.message

    @property
    def severity(self) -> Severity:
        """What it does."""
        return severity_of(self.finding)


def told_findings(result: CampaignResult) -> list[ToldFinding]:
    """All that were found, in the order of all reports."""
    statistics = result.statistics
    return [_told(number, finding, statistics) for number, finding in enumerate(in_order(result), start=1)]


def _told(number: int, finding: Finding, statistics: Statistics) -> ToldFinding:
    regression = finding.regression(statistics.device_name)
    is_new = "" if statistics.against is None else "new"
    path = finding.path
    return ToldFinding(
        number=number,
        finding=finding,
        standing=statistics.standing(finding),
        status=_known_as(finding, statistics) if statistics.is_known(finding) else is_new,
        case=one_line(finding.case),
        lines=finding_lines(regression.finding, finding.case),
        certainty=finding.certainty(),
        comparison=finding.comparison(),
        saved=encode_regression(regression).decode().rstrip(),
        command="" if path is None else replay_command(path, finding.declaration.target, finding.python),
    )


def finding_lines(finding: FindingRecord, case: Case) -> tuple[str, ...]:
    """What there is to say of ``finding`` beside its message: which lines to look at, details, what declares it away,
    how else it shows."""
    remedy = () if finding.remedy is None else remedy_lines(finding.remedy.declared(), case)
    also = [
        f"also shows as: {one.oracle}/{one.kind}"
        + (f" [{', '.join(one.features)}]: {one.message}" if one.features else f": {one.message}")
        for one in finding.also
    ]
    return (*where_to_look(finding.sources), *finding.details, *remedy, *also)


def remedy_lines(limits: Mapping[str, Any], case: Case) -> tuple[str, ...]:
    """That a kernel which is meant to do this declares ``limits``; nothing if there are none."""
    return (f"if the kernel is {_words(case, limits)}, declare {as_call('Supports', limits)}",) if limits else ()


def _words(case: Case, limits: Mapping[str, Any]) -> str:
    """What a kernel that declares ``limits`` is, seen from ``case``."""
    places = []
    if "strides" in limits:
        contiguous = limits["strides"] == "contiguous"
        places.append("contiguous tensors" if contiguous else "tensors whose last dimension is contiguous")
    if "layouts" in limits:
        places.append(f"the layout{'s' if len(limits['layouts']) > 1 else ''} {', '.join(limits['layouts'])}")
    if places:
        return f"only meant for {' and '.join(places)}"
    (name,) = limits
    if name == "lse":
        return "meant to return logarithms to base 2" if limits[name] == "base2" else "not meant to return an LSE"
    if name == "freed_pages":
        return "only meant for caches that keep the pages behind a window"
    if name == "empty_state_lse":
        return f"only meant for empty states whose LSE is {limits[name][0]}"
    if name in ("empty_sequences", "padding_tokens"):
        return f"not meant to take {name.replace('_', ' ')}"
    field = {"max_num_splits": "num_splits"}.get(name, name.removesuffix("s"))
    return f"not meant to take {field} {getattr(case, field)}"


QUESTIONS = (
    "Questions: here the kernel refuses nothing and is wrong; if it was never meant for this, the declaration says so, "
    "and if it was, this is a bug"
)
OUT_OF_CONTRACT = "Possibly out of contract: each goes away if you add the declaration it names"
_FLAKY = "Flaky: these do not fail in every run"
UNFINISHED = "Not shrunk to the end: each may be a finding above, or a bug of its own; a longer --budget tells"
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
    """What is in the contract, kernel by kernel, that with the worst finding first; then so what may be one of these,
    not being shrunk; then what only the author can say; then what is not in the contract.

    Of a kernel crashes and accesses out of bounds, then wrong numbers, what memory without tokens does, questions of
    the contract, errors just above their bound, and what is flaky; what has one cause stands together, at the place of
    its worst.
    """
    parts: dict[Standing, list[Finding]] = {"counts": [], "unfinished": [], "question": [], "outside": []}
    for finding in result.findings:
        standing = result.statistics.standing(finding)
        parts["counts" if standing == "known" else standing].append(finding)
    return [finding for part in parts.values() for finding in _by_kernel(part)]


def kernels_in_order(result: CampaignResult) -> list[str]:
    """All kernels, those with findings first, as these are told."""
    told = dict.fromkeys(finding.declaration.target for finding in in_order(result))
    return [*(target for target in told if target in result.statistics.kernels)] + [
        target for target in result.statistics.kernels if target not in told
    ]


def heading_of(finding: Finding, statistics: Statistics) -> str:
    """What to say before the first of its kind; empty for what is certain to be a bug."""
    standing = statistics.standing(finding)
    headings = {"question": QUESTIONS, "outside": OUT_OF_CONTRACT, "unfinished": UNFINISHED}
    if standing in headings:
        return headings[standing]
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
