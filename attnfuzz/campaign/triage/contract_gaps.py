"""Which declaration excludes what a finding needs: for kernels that rest on more than they declare.

What a kernel leaves undeclared is what engines hand over, so one that was written for less rightly fails. Such a
finding comes with the declaration that ends it, where all of this holds: the field has not been declared; the case,
shrunk to its end, needs what the field excludes; no other field is as likely; and it is something that kernels rest on.
That is how tensors lie in memory, that what a window has passed stays readable, and that no state has an LSE of +inf.
Anything else counts only where the kernel refuses it with an exception: wrong numbers for some sizes are a missing mask
or a wrong head map, and NaN for an empty sequence is 0/0. Nor is there a declaration for memory that is read before
anything is written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from attnfuzz.bundled.merge_states import PAIR
from attnfuzz.campaign.finding import Finding
from attnfuzz.cases.facets.contents import FREED_PAGES
from attnfuzz.cases.facets.facet import other_than
from attnfuzz.cases.facets.heads import GROUPED, HEAD_SIZE_NOT_POW2, SEVERAL_KV_HEADS
from attnfuzz.cases.facets.sequences import PADDING_TOKENS
from attnfuzz.cases.facets.storage import BLOCK_SIZE_NOT_POW2, KV_STRIDES_DIFFER, SEVERAL_SPLITS, strided_tensor
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import says_it_cannot
from attnfuzz.mistake import READ_BEFORE_WRITTEN, WITHOUT_WEIGHT
from attnfuzz.oracles.registry import PAGE_RELOCATION
from attnfuzz.problems.choices import (
    BLOCK_SIZES,
    CACHE_TENSORS,
    GQA_RATIOS,
    HEAD_SIZES,
    head_size_rank,
    is_power_of_two,
    layouts_of,
)
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import DTYPES, Strides, Supports, as_call

Limits = dict[str, Any]
"""Fields of `Supports` with what they would be declared to be."""
_UNDECLARED = Supports()
_POW2_HEAD_SIZES = (16, 32, 64, 128, 256)
_CACHES = frozenset(name for names in CACHE_TENSORS for name in names)


def with_remedy(finding: Finding) -> None:
    """Note the declaration that excludes what ``finding`` needs, and what it has come to stand for, if there is one."""
    limits = needed_limits(finding)
    finding.remedy = msgspec.structs.replace(_UNDECLARED, **limits) if limits else None


def needed_limits(finding: Finding) -> Limits:
    """The least that has to be declared so that ``finding`` is none; empty if it is a bug whatever is declared."""
    if (
        isinstance(finding.declaration.problem, OpenProblem)
        or finding.shrunk_s is None
        or finding.is_flaky
        or finding.preceding
        or not finding.declarable
        or finding.failure.cause == READ_BEFORE_WRITTEN
    ):
        return {}
    supports = finding.declaration.supports
    own = {name: value for name, value in _limits(finding).items() if supports.leaves_open(name)}
    if len(own) != 1:
        return {}
    is_elsewhere = own.keys() <= {"layouts", "strides"} and own.get("strides") != "serving"
    limits = _stricter(own, _limits_elsewhere(finding, own)) if is_elsewhere else own
    return limits if _ends(msgspec.structs.replace(supports, **limits), finding) else {}


@dataclass(frozen=True, slots=True)
class Restriction:
    """``ended`` of the ``findings`` of a kernel are none if it declares ``supports``."""

    declaration: Declaration
    supports: Supports
    ended: int
    findings: int

    def __str__(self) -> str:
        findings = "finding goes away" if self.findings == 1 else "findings go away"
        told = as_call("Supports", self.supports.declared())
        return f"{self.ended} of {self.findings} {findings} if you declare {told}"


def restriction_of(declaration: Declaration, findings: Sequence[Finding]) -> Restriction | None:
    """The declaration that excludes all ``findings`` of a kernel that one excludes at all; None if there is none."""
    limits: Limits = {}
    needing = []
    for finding in findings:
        if needed := needed_limits(finding):
            limits = _stricter(limits, needed)
            needing.append(finding)
    if not needing or () in limits.values():
        return None
    supports = msgspec.structs.replace(declaration.supports, **limits)
    try:
        simplest_case(declaration.problem, supports, declaration.options)
    except ValueError:  # no head size that is left fits a layout that is left
        return None
    return Restriction(declaration, supports, sum(_ends(supports, finding) for finding in needing), len(findings))


def _limits(finding: Finding) -> Limits:
    """The values of `Supports` fields that would exclude the finding, by field."""
    failure, case, features = finding.failure, finding.case, finding.signature.features
    if failure.remedy:
        return dict(failure.remedy)
    if failure.oracle == PAGE_RELOCATION.name:
        return {"strides": "contiguous"} if failure.cause == "ignored_stride" else {}
    if FREED_PAGES in features:  # what counts with a weight is beyond the window, whoever owns its page
        return {"freed_pages": False} if failure.cause == WITHOUT_WEIGHT else {}
    if any(one.field == PAIR and "+inf" in one.value for one in features):  # -inf is simpler, and would have done
        return {"empty_state_lse": ("-inf",)}
    if of_places := _of_places(finding.declaration, case, features):
        return of_places  # beside strides, an empty sequence merely decides what is read instead
    return _of_refusals(case, features) if says_it_cannot(failure) else {}


def _of_places(declaration: Declaration, case: Any, features: frozenset[Feature]) -> Limits:
    """Where tensors lie. That heads end within a vector is another matter: what lies there wants a mask."""
    if HEAD_SIZE_NOT_POW2 in features:
        return {}
    if KV_STRIDES_DIFFER in features:  # of a case without gaps it is a bug, which `_ends` finds out
        return {"strides": "serving"}
    found: Limits = {}
    named = {name for one in features if (name := strided_tensor(one))}
    strided = {name for name in named if case.strides.get(name, "contiguous") != "contiguous"}
    if case.page_size:
        particular = Feature("layout", f"={case.layout}") in features
        plain: Any = simplest_case(case.problem, declaration.supports, declaration.options)
        simplest = plain.layout
        if case.layout != simplest and (particular or (named - strided) & _CACHES):
            layouts = layouts_of(declaration.supports)
            found["layouts"] = layouts[: layouts.index(case.layout)] if particular else (simplest,)
    if strided:
        found["strides"] = "contiguous"
    return found


def _limits_elsewhere(finding: Finding, own: Limits) -> Limits:
    """Limits for the other tensors: a bug of addresses shows with any tensor that lies otherwise."""
    features = frozenset().union(*finding.sights())
    has_strides = any(map(strided_tensor, features))
    has_layouts = any(one.field == "layout" and one.value for one in features)
    found: Limits = {}
    if has_strides or (has_layouts and "strides" in own):  # another layout is outer strides to a kernel
        found["strides"] = "contiguous"
    if has_layouts:
        found["layouts"] = layouts_of(finding.declaration.supports)[:1]
    return {name: value for name, value in found.items() if finding.declaration.supports.leaves_open(name)}


def _of_refusals(case: Any, features: frozenset[Feature]) -> Limits:
    """Limits that exclude what the kernel raises for."""
    found: Limits = {}
    if any(one.role == "empty" for one in features - {PADDING_TOKENS}):
        found["empty_sequences"] = False
    if PADDING_TOKENS in features:
        found["padding_tokens"] = False
    if any(one.field == "dtype" for one in features):
        found["dtypes"] = tuple(dtype for dtype in DTYPES if dtype != case.dtype)
    if any(one.field == "head_size" for one in features):
        tried = [size for size in HEAD_SIZES if head_size_rank(size) < head_size_rank(case.head_size)]
        other = tuple(size for size in sorted(HEAD_SIZES) if other_than("head_size", size) in features)
        if sizes := _kept(_POW2_HEAD_SIZES, tried, case.head_size) or other:  # none where the simplest is refused
            found["head_sizes"] = sizes
    if GROUPED in features and SEVERAL_KV_HEADS not in features:
        powers = tuple(filter(is_power_of_two, GQA_RATIOS))
        found["gqa_ratios"] = _kept(powers, [ratio for ratio in GQA_RATIOS if ratio < case.gqa_ratio], case.gqa_ratio)
    if BLOCK_SIZE_NOT_POW2 in features:
        found["block_sizes"] = tuple(filter(is_power_of_two, BLOCK_SIZES))
    if case.partial_states and SEVERAL_SPLITS in features:
        found["max_num_splits"] = case.partial_states - 1
    return found


def _kept(powers: tuple[int, ...], passed: Sequence[int], refused: int) -> tuple[int, ...]:
    """Powers of two, if it is the first other number that is refused; else what is simpler, and has passed."""
    if not is_power_of_two(refused) and all(map(is_power_of_two, passed)):
        return powers
    return tuple(sorted(passed))


def _stricter(one: Limits, other: Limits) -> Limits:
    merged = dict(one)
    for name, value in other.items():
        mine: Any = merged.get(name, value)
        if name == "strides":
            merged[name] = max(mine, value, key=get_args(Strides).index)
        elif name == "lse":
            merged[name] = "none" if "none" in (mine, value) else value
        elif isinstance(value, tuple):
            merged[name] = tuple(part for part in mine if part in value)
        else:
            merged[name] = min(mine, value)
    return merged


def _ends(supports: Supports, finding: Finding) -> bool:
    """Whether a kernel that declares ``supports`` is not asked for what ``finding`` objects to."""
    failure, limits = finding.failure, _limits(finding)
    if limits.keys() == {"lse"}:
        return supports.lse in (limits["lse"], "none")
    if limits.keys() == {"graph_replay"}:
        return supports.graph_replay is False
    if failure.oracle == PAGE_RELOCATION.name:  # gives the case other strides than it has, as far as they are permitted
        return supports.strides == "contiguous"
    return not supports_case(supports, finding.declaration.options, finding.case)
