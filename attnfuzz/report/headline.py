"""A case in one line, and what a finding says in lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attnfuzz.campaign.elsewhere import FoundElsewhere
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Statistics
from attnfuzz.campaign.undeclared import declared_limits, supports_text
from attnfuzz.corpus import FindingRecord
from attnfuzz.oracles.verdict import where_to_look
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.open_cases import OpenCase

__all__ = [
    "count",
    "finding_lines",
    "found_so_far",
    "headline",
    "known_since",
    "one_line",
    "remedy_lines",
    "restarts_of",
    "what_was_found",
]

_MAX_LENGTHS = 8


def headline(case: Case) -> str:
    """Problem, dtype, heads and pages: "paged_decode · float16 · head_size 64 · 4 query heads on 1 KV head · ..."."""
    if isinstance(case, OpenCase):
        told = (f"{name} {_value(getattr(case, name))}" for name in case.problem.fields)
        return " · ".join([case.problem.name, *told])
    parts: list[str] = [case.problem, case.dtype, f"head_size {case.head_size}"]
    if isinstance(case, AttentionCase) and case.kv is not None:
        parts[1] += f", cache {case.kv.dtype} with a scale per {case.kv.per}"
    if isinstance(case, AttentionCase) and case.v_head_size is not None:
        parts += [f"v_head_size {case.v_head_size}"]
    if isinstance(case, MergeStatesCase):
        parts += [count(case.num_tokens, "token"), count(case.num_q_heads, "query head")]
    else:
        parts += [f"{count(case.num_q_heads, 'query head')} on {count(case.num_kv_heads, 'KV head')}"]
    if isinstance(case, PagedDecodeCase):
        parts += [f"{case.layout}, pages of {count(case.block_size, 'token')}"]
    return " · ".join(parts)


def one_line(case: Case) -> str:
    """What the case is in plain characters, with the lengths of its sequences, variants and options."""
    parts = [headline(case).replace(" · ", ", ")]
    if isinstance(case, PagedAttentionCase):
        parts.append(f"query_lens {_listed(case.query_lens)}")
    if isinstance(case, AttentionCase):
        parts += [f"seq_lens {_listed(case.seq_lens)}", *case.variant.names]
    if isinstance(case, SplitDecodeCase):
        parts.append(f"num_splits={case.num_splits}")
    return ", ".join([*parts, *(f"{name}={value}" for name, value in case.options.items())])


def _value(value: object) -> str:
    return f"({_listed(value)})" if isinstance(value, tuple) else str(value)


def _listed(lengths: tuple[int, ...]) -> str:
    return ", ".join(map(str, lengths[:_MAX_LENGTHS])) + (", ..." if len(lengths) > _MAX_LENGTHS else "")


def count(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def restarts_of(statistics: Statistics) -> str:
    """How often a kernel's process was lost."""
    return f"kernel processes restarted {count(statistics.restarts, 'time')}"


def found_so_far(statistics: Statistics) -> str:
    """ "2 findings, and 1 possibly out of contract"; "0 findings" before there are any."""
    counts, *others = _standings(statistics.findings, statistics)
    return ", ".join([_findings(counts, statistics), *others])


def what_was_found(result: CampaignResult) -> str:
    """The same at the end, with what other machines have found; "nothing found" if nothing was."""
    statistics = result.statistics
    counts, *others = _standings((*result.findings, *result.elsewhere), statistics)
    own = sum(statistics.standing(finding) == "counts" for finding in result.findings)
    elsewhere = [f"{counts - own} known elsewhere"] if counts > own else []
    done = "confirmed" if result.unconfirmed and not result.findings else "found"
    new = "new " if elsewhere or any(map(statistics.is_known, result.findings)) else ""
    return ", ".join([_findings(own, statistics) if own else f"nothing {new}{done}", *elsewhere, *others])


def known_since(statistics: Statistics) -> str:
    """Where to look up what is known."""
    return f"known since {statistics.against.name}" if statistics.against is not None else "known"


def _findings(number: int, statistics: Statistics) -> str:
    return count(number, "finding" if statistics.against is None else "new finding")


def _standings(found: Iterable[Finding | FoundElsewhere], statistics: Statistics) -> tuple[int, *tuple[str, ...]]:
    """How many count, and how many do not, and why."""
    standings = [statistics.standing(one) for one in found]
    known, outside = standings.count("known"), standings.count("outside")
    others = (
        *([f"{known} {known_since(statistics)}"] if known else []),
        *([f"and {outside} possibly out of contract"] if outside else []),
    )
    return standings.count("counts"), *others


def finding_lines(finding: FindingRecord, case: Case) -> tuple[str, ...]:
    """What there is to say of ``finding`` beside its message: which lines to look at, details, what declares it away,
    how else it shows."""
    remedy = () if finding.remedy is None else remedy_lines(declared_limits(finding.remedy), case)
    also = [
        f"also shows as: {one.oracle}/{one.kind}"
        + (f" [{', '.join(one.features)}]: {one.message}" if one.features else f": {one.message}")
        for one in finding.also
    ]
    return (*where_to_look(finding.sources), *finding.details, *remedy, *also)


def remedy_lines(limits: Mapping[str, Any], case: Case) -> tuple[str, ...]:
    """That a kernel which is meant to do this declares ``limits``; nothing if there are none."""
    return (f"if the kernel is {_words(case, limits)}, declare {supports_text(limits)}",) if limits else ()


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
