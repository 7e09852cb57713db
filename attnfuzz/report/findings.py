"""Texts about a finding for all reports, a case in one line, and the order in which findings are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, TypeVar

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Disposition, Statistics
from attnfuzz.campaign.saved.replay import replay_command
from attnfuzz.cases.facets import facets_of
from attnfuzz.cases.facets.facet import listed
from attnfuzz.corpus import FindingRecord, encode_regression
from attnfuzz.identity.features import kernel_parts, most_specific
from attnfuzz.mistake import NARROW_OFFSETS, mistake_of
from attnfuzz.oracles.registry import Severity, oracle_of
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    MergeStatesCase,
    PagedDecodeCase,
)
from attnfuzz.problems.feature import Feature, words_of
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.supports import as_call
from attnfuzz.verdict import Failure, ends_process, where_to_look

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
    """The case in one line of plain characters, with the lengths of its sequences, variants and options."""
    told = (words for facet in facets_of(type(case)) for words in facet.told(case))
    return ", ".join([headline(case).replace(" · ", ", "), *told])


def _value(value: object) -> str:
    return f"({listed(value)})" if isinstance(value, tuple) else str(value) or '""'


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
    """ "2 findings, and 1 failure being shrunk, 1 question"; "0 findings" before there are any."""
    counts, *others = _dispositions(entries_of(statistics.findings, statistics), statistics, "being shrunk")
    questions = sum(statistics.disposition(found) == "question" for found in statistics.findings)
    asked = [count(questions, "question")] if questions else []
    return ", ".join([_findings(counts, statistics), *others, *asked])


def what_was_found(result: CampaignResult) -> str:
    """The counts at the end of a campaign; "nothing found" if there are none."""
    statistics = result.statistics
    counts, *others = _dispositions(entries_of(result.findings, statistics), statistics, "not told apart")
    done = "confirmed" if result.unconfirmed and not result.findings else "found"
    new = "new " if any(map(statistics.is_known, result.findings)) else ""
    within = f" within what {'it was' if len(statistics.kernels) == 1 else 'they were'} found to take"
    by = f" by {' and '.join(statistics.oracles)}" if statistics.oracles else ""
    nothing = f"nothing {new}{done}{by}{within if result.questions else ''}"
    found = ", ".join([_findings(counts, statistics) if counts else nothing, *others])
    return f"{found}; {count(len(result.questions), 'question')}" if result.questions else found


def known_from(statistics: Statistics) -> str:
    """Where to look up what is known."""
    return f"known from {statistics.against.name}" if statistics.against is not None else "known"


def _known_as(found: Finding, statistics: Statistics) -> str:
    issue = statistics.against.issue_of(found) if statistics.against is not None else ""
    return ", ".join(filter(None, (known_from(statistics), issue)))


def _findings(number: int, statistics: Statistics) -> str:
    return count(number, "finding" if statistics.against is None else "new finding")


def _dispositions(
    entries: Iterable[list[Finding]], statistics: Statistics, how_far: str
) -> tuple[int, *tuple[str, ...]]:
    """How many count, and how many do not, and why; ``how_far`` those have come that may be others."""
    dispositions = Counter(statistics.disposition(first) for first, *_ in entries)
    known, outside, undecided = (dispositions[one] for one in ("known", "outside", "undecided"))
    others = (
        *([f"and {count(undecided, 'failure')} {how_far}"] if undecided else []),
        *([f"{known} {known_from(statistics)}"] if known else []),
        *([f"and {outside} possibly out of contract"] if outside else []),
    )
    return dispositions["counts"], *others


@dataclass(frozen=True, slots=True)
class ToldFinding:
    """The texts of every report about ``finding``, each in its own form; empty where there is nothing to say.

    ``number``: its place among those of the campaign. ``title``: see `title_of`. ``disposition``: what it amounts to.
    ``status``: whether it is new, where that was asked for. ``case`` is its case in one line, ``lines`` what is said
    beside its message, ``certainty`` how sure it is, and ``comparison`` what came of it in several environments.
    ``saved`` is what its regression file holds, and ``command`` what runs that again. ``others``: findings of other
    kernels that come of the same code; they have its number.
    """

    number: int
    finding: Finding
    title: str
    disposition: Disposition
    status: str
    case: str
    lines: tuple[str, ...]
    certainty: str
    comparison: str
    saved: str
    command: str
    others: tuple[ToldFinding, ...] = ()

    @property
    def target(self) -> str:
        """The target of its kernel."""
        return self.finding.declaration.target

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of all kernels that show it."""
        return (self.target, *(one.target for one in self.others))

    @property
    def message(self) -> str:
        """The message of the oracle."""
        return self.finding.failure.message

    @property
    def severity(self) -> Severity:
        """The harm that it does."""
        return _severity(self.finding)

    @property
    def shown_by(self) -> str:
        """How many kernels show it, and where that is known why; empty if it is one."""
        if not self.others:
            return ""
        all_of_them = (self, *self.others)
        lines = _in_common(
            frozenset((one.file, one.line) for one in told.finding.failure.sources) for told in all_of_them
        )
        calls = _in_common(frozenset(told.finding.declaration.calls) for told in all_of_them)
        where = [f"{file}:{line}" for file, line in sorted(lines)] or sorted(calls)
        return f"shown by {len(all_of_them)} kernels" + (f", which all run {' and '.join(where)}" if where else "")


def _in_common(sets: Iterable[frozenset[_One]]) -> frozenset[_One]:
    return frozenset.intersection(*sets)


def title_of(found: Finding | FindingRecord) -> str:
    """The name of a finding, and in brackets how its smallest case differs from the simplest one.

    What a case needs that was not shrunk is not known, and where nothing is in brackets, no more is said than that
    the simplest values of all fields show it.
    """
    if isinstance(found, FindingRecord):
        name, needs = found.name, found.features
    else:
        name = found.failure.name
        needs = () if found.shrunk_s is None else tuple(words_of(most_specific(found.signature.features)))
    return f"{name} [{', '.join(needs)}]" if needs else name


def told_findings(result: CampaignResult) -> list[ToldFinding]:
    """All that were found, in the order of all reports: one for several kernels that share the code which is wrong."""
    told = []
    for number, (first, *others) in enumerate(_entries_in_order(result), start=1):
        beside = tuple(_told(number, finding, result.statistics) for finding in others)
        told.append(replace(_told(number, first, result.statistics), others=beside))
    return told


def undecided(finding: Finding, statistics: Statistics) -> list[Finding]:
    """Findings that were not shrunk to the end, and may be ``finding``."""
    return [one for one in statistics.findings if statistics.told_with(one) is finding]


def _undecided_lines(finding: Finding, statistics: Statistics) -> Iterator[str]:
    if found := undecided(finding, statistics):
        cases = sum(one.cases_seen for one in found)
        shown = ", ".join(dict.fromkeys(one.failure.name for one in found))
        were = "was" if cases == 1 else "were"
        yield f"{count(cases, 'further failing case')} {were} not told apart from it: {shown}"


def _told(number: int, finding: Finding, statistics: Statistics) -> ToldFinding:
    regression = finding.regression(statistics.device_name)
    is_new = "" if statistics.against is None else "new"
    path = finding.path
    return ToldFinding(
        number=number,
        finding=finding,
        title=title_of(finding),
        disposition=statistics.disposition(finding),
        status=_known_as(finding, statistics) if statistics.is_known(finding) else is_new,
        case=one_line(finding.case),
        lines=(*finding_lines(regression.finding, finding.case), *_undecided_lines(finding, statistics)),
        certainty=finding.certainty(),
        comparison=finding.comparison(),
        saved=encode_regression(regression).decode().rstrip(),
        command="" if path is None else replay_command(path, finding.declaration.target, finding.python),
    )


def finding_lines(finding: FindingRecord, case: Case) -> tuple[str, ...]:
    """Lines about ``finding`` beside its message: code to look at, details, a declaration that excludes it, other
    signs."""
    remedy = () if finding.remedy is None else remedy_lines(finding.remedy.declared(), case)
    also = [
        f"also shows as: {one.name}"
        + (f" [{', '.join(one.features)}]: {one.message}" if one.features else f": {one.message}")
        for one in finding.also
    ]
    return (*where_to_look(finding.sources), *finding.details, *_perhaps(finding), *remedy, *also)


def _perhaps(finding: FindingRecord) -> Iterator[str]:
    """The roundings that would account for it, where no one is told: time was over before, or none stood out."""
    names = [name.replace("_", " ") for name in finding.maybe if mistake_of(name).rounds]
    if names and not finding.cause:
        yield (
            f"what it is was not found out: of roundings, errors of such a size may come of {', '.join(names)}, and "
            "other mistakes make such errors, too; attnfuzz explain looks further"
        )


def remedy_lines(limits: Mapping[str, Any], case: Case) -> tuple[str, ...]:
    """Advice that a kernel which is meant to do this declares ``limits``; nothing if there are none."""
    return (f"if the kernel is {_words(case, limits)}, declare {as_call('Supports', limits)}",) if limits else ()


_MEANT = {
    "freed_pages": "only meant for caches that keep the pages behind a window",
    "empty_sequences": "not meant to take empty sequences",
    "padding_tokens": "not meant to take padding tokens",
    "graph_replay": "not meant to be captured into a CUDA graph",
}


_TENSORS = {
    "last_contiguous": "tensors whose last dimension is contiguous",
    "serving": "a K and V that lie alike",
    "contiguous": "contiguous tensors",
}


def _words(case: Case, limits: Mapping[str, Any]) -> str:
    """A kernel that declares ``limits``, in words, seen from ``case``."""
    places = []
    if "strides" in limits:
        places.append(_TENSORS[limits["strides"]])
    if "layouts" in limits:
        places.append(f"the layout{'s' if len(limits['layouts']) > 1 else ''} {', '.join(limits['layouts'])}")
    meant = [f"only meant for {' and '.join(places)}"] if places else []
    return " and ".join(meant + [_meant(case, *one) for one in limits.items() if one[0] not in ("strides", "layouts")])


def _meant(case: Case, name: str, limit: Any) -> str:
    if name == "lse":
        return "meant to return logarithms to base 2" if limit == "base2" else "not meant to return an LSE"
    if name == "empty_state_lse":
        return f"only meant for empty states whose LSE is {limit[0]}"
    if name in _MEANT:
        return _MEANT[name]
    field = {"max_num_splits": "num_splits"}.get(name, name.removesuffix("s"))
    return f"not meant to take {field} {getattr(case, field)}"


QUESTIONS = (
    "Questions: on these inputs the kernel raises nothing and is wrong; declare that it is not meant for them, or "
    "repair it"
)
OUT_OF_CONTRACT = "Possibly out of contract: each goes away if you add the declaration it names"
_FLAKY = "Flaky: these do not fail in every run"
_JUST_ABOVE = 10.0
"""Times the error bound: a rounding that was not declared, rather than a wrong address."""


def severity_of(
    failure: Failure, needs: frozenset[Feature] = frozenset(), *, is_flaky: bool = False, is_declarable: bool = False
) -> Severity:
    """The harm that ``failure`` does, for all that was seen.

    ``needs``: features of its smallest case. ``is_declarable``: a declaration says that the kernel is not meant to do
    better.
    """
    severity = oracle_of(failure.oracle).severity
    if is_flaky:
        return Severity.FLAKY
    if NARROW_OFFSETS in (failure.cause, failure.kind):  # a fault, too: what lies there is chance
        return Severity.LARGE_ADDRESSES
    if ends_process(failure) or severity is Severity.OUT_OF_BOUNDS:
        return Severity.OUT_OF_BOUNDS
    if is_declarable or _is_of_empties(needs):
        return Severity.CONTRACT
    is_near = severity is Severity.WRONG and 1.0 < (failure.error_ratio or 0.0) < _JUST_ABOVE
    return Severity.NEAR if is_near else severity


def _severity(finding: Finding) -> Severity:
    return severity_of(
        finding.failure,
        finding.signature.features,
        is_flaky=finding.is_flaky,
        is_declarable=finding.remedy is not None,
    )


def _is_of_empties(features: frozenset[Feature]) -> bool:
    """Whether it is about nothing but what results hold where there are no keys: kernels differ in that."""
    about = kernel_parts(features)
    return bool(about) and all(one.role == "empty" for one in about)


def in_order(result: CampaignResult) -> list[Finding]:
    """All findings as they are told, those of one entry one after another."""
    return [finding for entry in _entries_in_order(result) for finding in entry]


def _entries_in_order(result: CampaignResult) -> list[list[Finding]]:
    """Findings in the contract, the most severe first; then those that only the author can judge; then those outside of
    the contract. Of equals, the kernel with the worst comes first."""
    parts: dict[Disposition, list[Finding]] = {"counts": [], "question": [], "outside": []}
    for finding in result.findings:
        disposition = result.statistics.disposition(finding)
        if disposition != "undecided":
            parts["counts" if disposition == "known" else disposition].append(finding)
    return [entry for part in parts.values() for entry in entries_of(_by_severity(part), result.statistics)]


def _by_severity(findings: list[Finding]) -> list[Finding]:
    """Findings by severity; of equals, those whose line is known first, which say the most where several are one."""
    ordered = sorted(findings, key=lambda one: (_severity(one), not one.failure.sources))
    kernels = list(dict.fromkeys(one.declaration.target for one in ordered))
    return sorted(ordered, key=lambda one: (_severity(one), kernels.index(one.declaration.target)))


def entries_of(findings: Iterable[Finding], statistics: Statistics) -> list[list[Finding]]:
    """Findings of several kernels that come of the same code, together, in the order of the first of them."""
    entries: list[list[Finding]] = []
    for finding in findings:
        for entry in entries:
            if _belongs(finding, entry, statistics):
                entry.append(finding)
                break
        else:
            entries.append([finding])
    return entries


def _belongs(finding: Finding, entry: list[Finding], statistics: Statistics) -> bool:
    """Two findings of one kernel are two bugs, for all that is known; so are a known one and a new one."""
    if statistics.disposition(finding) != statistics.disposition(entry[0]) or finding.is_flaky != entry[0].is_flaky:
        return False
    if finding.declaration.target in {one.declaration.target for one in entry}:
        return False
    return any(are_of_one_place(finding, one) for one in entry)


def are_of_one_place(a: Finding, b: Finding) -> bool:
    """Whether findings of two kernels come of code that both run.

    The same line of source, or a function of an engine that the adapters of both call, in which the same mistake is
    made in the same way; where nobody knows which, the symptom and what it is about are the same.
    """
    if a.failure.sources and b.failure.sources:
        return any(one.is_that_of(other) for one in a.failure.sources for other in b.failure.sources)
    if set(a.declaration.calls).isdisjoint(b.declaration.calls):
        return False
    mistakes_of_a, mistakes_of_b = ({(one.mistake, one.way) for one in finding.failure.causes} for finding in (a, b))
    if mistakes_of_a and mistakes_of_b:
        return not mistakes_of_a.isdisjoint(mistakes_of_b)
    return a.cause == b.cause


def kernels_in_order(result: CampaignResult) -> list[str]:
    """All kernels, those with findings first, as these are told."""
    told = dict.fromkeys(finding.declaration.target for finding in in_order(result))
    return [*(target for target in told if target in result.statistics.kernels)] + [
        target for target in result.statistics.kernels if target not in told
    ]


def heading_of(finding: Finding, statistics: Statistics) -> str:
    """The heading before the first finding of its kind; empty for one that is certain to be a bug."""
    disposition = statistics.disposition(finding)
    headings = {"question": QUESTIONS, "outside": OUT_OF_CONTRACT}
    if disposition in headings:
        return headings[disposition]
    return _FLAKY if finding.is_flaky else ""
