"""Cases beside a failing one: each differs from it in one respect, and a run of it tells what the failure needs.

One question is asked of them throughout: does the case still fail without what a known bug needs? If one of its
relatives does, another bug is at work; if none does, it is that bug, however it shows. Shrinking cannot tell: it only
ever goes to simpler cases. It takes a mistake with the strides of K for one that takes the strides of K for those of V,
since the smallest case of both has unusual strides in K alone; and of ten pairs of LSEs that a kernel fails for, it
tells the one that was met first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import msgspec

from attnfuzz.campaign.identity.finding import FailingCase
from attnfuzz.campaign.identity.signature import Signature, aspects, case_features
from attnfuzz.cases.facets import Changes, facets_of
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
)
from attnfuzz.problems.choices import CACHE_TENSORS, block_sizes_of, lying_alike, stride_kinds_of
from attnfuzz.problems.features import CACHE_STRIDES, KV_STRIDES_DIFFER
from attnfuzz.problems.lengths import with_seq_lens
from attnfuzz.problems.open_cases import OpenCase, open_changes
from attnfuzz.problems.recipes import LseKind, StrideKind
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supported import supports_case

__all__ = [
    "alternatives",
    "lacking",
    "nearest_permitted",
    "simpler_in_one_respect",
    "strides_swapped",
    "with_simplest_values",
    "without",
]

# fields that mean something together; each group in turn is taken from the simplest case
_GROUPS = (
    ("seq_lens",),
    ("query_lens",),
    ("num_q_heads", "num_kv_heads"),
    ("block_size",),
    ("num_splits",),
    ("pages",),
    ("layout",),
    ("options",),
    ("strides",),
    ("values",),
    ("outputs",),
    ("variant",),
    ("kv",),
    ("head_size", "scale"),
    ("dtype",),
    ("num_tokens",),
    ("lse_pairs",),
    ("extra_rows",),
    ("query_slack", "seq_slack"),
    ("padding_tokens",),
)
_RECIPES = ("values", "outputs")  # of attention, and of states to merge


def lacking(known: Signature, suspect: FailingCase) -> list[Case]:
    """Relatives that lack what the bug ``known`` needs."""
    features = case_features(suspect.declaration, suspect.case)
    return [
        case
        for case in _relatives(suspect, known.features & features)
        if not known.features <= case_features(suspect.declaration, case)
    ]


def _relatives(suspect: FailingCase, needed: Set[str]) -> list[Case]:
    """First the case without what ``needed`` is about and with all the rest, so that nothing else is taken away."""
    declaration, case = suspect.declaration, suspect.case
    about = sorted(aspects(frozenset(needed)))
    siblings = (sibling for aspect in about for sibling in without(aspect, declaration, case))
    return [*_supported(suspect, siblings), *simpler_in_one_respect(suspect)]


def simpler_in_one_respect(suspect: FailingCase) -> list[Case]:
    """The case with one group of fields as in the simplest case, for each group in turn."""
    return _supported(suspect, _simpler(suspect))


def with_simplest_values(suspect: FailingCase) -> Case | None:
    """The case with the simplest recipe for its numbers; None if it has that already."""
    case, simplest = suspect.case, _simplest(suspect)
    recipes = {name: getattr(simplest, name) for name in _RECIPES if hasattr(case, name)}
    changed = (changed for changed in _fitted(case, recipes) if changed != case)
    return next(iter(_supported(suspect, changed)), None)


def nearest_permitted(suspect: FailingCase) -> Case | None:
    """The case, changed as little as its kernel's declaration asks for; None if that is more than two groups."""
    permits = functools.partial(supports_case, suspect.declaration.supports, suspect.declaration.options)
    once = [suspect.case, *_simpler(suspect)]
    twice = (case for changed in once[1:] for case in _simpler(suspect.as_(changed, suspect.failure)))
    return next(filter(permits, itertools.chain(once, twice)), None)


def _supported(suspect: FailingCase, cases: Iterable[Case]) -> list[Case]:
    declaration = suspect.declaration
    return [case for case in cases if supports_case(declaration.supports, declaration.options, case)]


def _simpler(suspect: FailingCase) -> Iterator[Case]:
    case, simplest = suspect.case, _simplest(suspect)
    own: tuple[tuple[str, ...], ...] = (
        () if not isinstance(case, OpenCase) else tuple((name,) for name in (*case.problem.fields, "options"))
    )
    for group in own or (*_GROUPS, *(facet.fields for facet in facets_of(type(case)))):
        changes = {name: getattr(simplest, name) for name in group if hasattr(case, name)}
        if "seq_lens" in changes and isinstance(case, AttentionCase):
            changes = with_seq_lens(case, changes["seq_lens"] * case.num_seqs)
        if "query_lens" in changes and "seq_lens" not in changes:
            changes["query_lens"] = tuple(min(1, query_len) for query_len in getattr(case, "query_lens", ()))
        if any(getattr(case, name) != value for name, value in changes.items()):
            yield from _fitted(case, changes)


def _simplest(suspect: FailingCase) -> Case:
    declaration = suspect.declaration
    return simplest_case(declaration.problem, declaration.supports, declaration.options)


def _fitted(case: Case, changes: dict[str, Any]) -> Iterator[Case]:
    """The case with ``changes``, without the needles that have no place in it any more; nothing if it is no case."""
    if isinstance(case, AttentionCase) and "values" not in changes:
        seq_lens = changes.get("seq_lens", case.seq_lens)
        num_kv_heads = changes.get("num_kv_heads", case.num_kv_heads)
        needles = tuple(
            needle
            for needle in case.values.needles
            if needle.position < seq_lens[needle.seq] and needle.kv_head < num_kv_heads
        )
        changes["values"] = msgspec.structs.replace(case.values, needles=needles)
    try:
        yield msgspec.structs.replace(case, **changes)
    except ValueError:  # the packed layout and a head size that does not fit it, for one
        return


def strides_swapped(declaration: Declaration, case: Case) -> Case | None:
    """``case`` with the strides of K and V exchanged; None if that changes nothing."""
    if isinstance(case, OpenCase):
        return None
    k, v = _kv_names(case)
    return _changed(declaration, case, {"strides": {**case.strides, k: _kind(case, v), v: _kind(case, k)}})


def without(aspect: str, declaration: Declaration, case: Case) -> list[Case]:
    """``case`` without ``aspect`` and otherwise the same; several if there are several ways, none if there is none."""
    if isinstance(case, OpenCase):
        return []
    changed = (_changed(declaration, case, changes) for changes in _ways_without(aspect, declaration, case))
    return [case for case in changed if case is not None]


def alternatives(declaration: Declaration, case: Case) -> Iterator[Case]:
    """``case`` with another value of a field that is not the simplest: what fails alike does not need that value.

    The simplest has been tried by shrinking. Of two states to merge an empty one stays empty and another does not.
    Tokens are put onto pages of other sizes, and rows that hold no token come about in the other way.
    """
    if isinstance(case, OpenCase):
        yield from (changed for _, changed in open_changes(case, declaration.options))
        return
    simplest = simplest_case(case.problem, declaration.supports, declaration.options)
    for changes in _other_values(declaration, case, simplest):
        if (changed := _changed(declaration, case, changes)) is not None:
            yield changed


def _other_values(declaration: Declaration, case: Case, simplest: Case) -> Iterator[Changes]:
    supports = declaration.supports
    if isinstance(case, MergeStatesCase):
        yield from _other_states(case)
    if isinstance(case, PagedDecodeCase):
        yield from _other_pages(case, block_sizes_of(supports))
    if isinstance(case, DenseDecodeCase):
        yield from _other_rows(case)
    if case.dtype != simplest.dtype:
        yield from ({"dtype": dtype} for dtype in supports.dtypes if dtype not in (case.dtype, simplest.dtype))
    if isinstance(case, PagedDecodeCase) and isinstance(simplest, PagedDecodeCase) and case.layout != simplest.layout:
        known = (case.layout, simplest.layout)
        yield from ({"layout": layout} for layout in supports.layouts if layout not in known)
    for name, value in case.options.items():
        first, *others = declaration.options[name]
        if value != first:
            yield from ({"options": {**case.options, name: other}} for other in others if other != value)
    for name, kind in case.strides.items():
        kinds = (other for other in stride_kinds_of(supports.strides, name) if other not in ("contiguous", kind))
        yield from ({"strides": {**case.strides, name: other}} for other in kinds)


def _other_pages(case: PagedDecodeCase, sizes: tuple[int, ...]) -> Iterator[Changes]:
    """As many pages as can be, one that is full, and one that is not."""
    longest = max(case.seq_lens)
    full = longest if longest in sizes else None
    partial = next((size for size in sorted(sizes) if size > longest), None)
    for size in (min(sizes), full, partial):
        if size not in (None, case.block_size):
            yield {"block_size": size}


def _other_rows(case: DenseDecodeCase) -> Iterator[Changes]:
    """Rows behind a sequence that belong to a longer one, or to none."""
    longest = max(case.seq_lens)
    if case.extra_rows:
        yield {"seq_lens": (*case.seq_lens, longest + case.extra_rows), "extra_rows": 0}
    elif (shortest := min(case.seq_lens)) < longest:
        yield {"seq_lens": (shortest,), "extra_rows": longest - shortest}


def _other_states(case: MergeStatesCase) -> Iterator[Changes]:
    """Each side of each pair of another kind, and the sides exchanged."""
    pairs = case.lse_pairs
    for i, (prefix, suffix) in enumerate(pairs):
        swapped = (suffix, prefix)
        others = [(kind, suffix) for kind in _alike_kinds(prefix)] + [(prefix, kind) for kind in _alike_kinds(suffix)]
        both = zip(_alike_kinds(prefix), _alike_kinds(suffix), strict=False)
        for pair in (swapped, *others, *both):
            if pair != (prefix, suffix):
                yield {"lse_pairs": (*pairs[:i], pair, *pairs[i + 1 :])}


def _alike_kinds(kind: LseKind) -> tuple[LseKind, ...]:
    """Other kinds of a state that is as empty or not."""
    groups: tuple[tuple[LseKind, ...], ...] = (("-inf", "+inf"), ("finite", "equal", "high", "low"))
    return next(tuple(other for other in group if other != kind) for group in groups if kind in group)


def _ways_without(aspect: str, declaration: Declaration, case: Case) -> Iterator[Changes]:
    if aspect == KV_STRIDES_DIFFER:
        yield from _alike(declaration, case)
    elif aspect == CACHE_STRIDES:
        yield {**_simplest_layout(declaration, case), "strides": _without_caches(case)}
    elif aspect.startswith("strides:"):
        names = lying_alike(declaration.supports.strides, aspect.removeprefix("strides:"))
        yield {"strides": {**case.strides, **dict.fromkeys(names, "contiguous")}}
    elif aspect in _CHANGES and isinstance(case, AttentionCase):
        yield _CHANGES[aspect](case)
    else:
        for facet in facets_of(type(case)):
            yield from facet.without(aspect, case)


def _alike(declaration: Declaration, case: Case) -> Iterator[Changes]:
    """The strides of K for V too, and those of V for K: of heads of one size. The packed layout knows no such thing."""
    k, v = _kv_names(case)
    packed = isinstance(case, PagedDecodeCase) and case.layout == "packed"
    layout = _simplest_layout(declaration, case) if packed else {}
    sizes = {"v_head_size": None} if isinstance(case, AttentionCase) and case.v_head_size is not None else {}
    for kind in dict.fromkeys((_kind(case, k), _kind(case, v))):
        if layout or sizes or kind != "contiguous":
            yield {**layout, **sizes, "strides": {**case.strides, k: kind, v: kind}}


def _no_empty_sequence(case: AttentionCase) -> Changes:
    return {"seq_lens": tuple(max(1, seq_len) for seq_len in case.seq_lens)}


def _a_query_each(case: AttentionCase) -> Changes:
    if not isinstance(case, PagedAttentionCase):
        return {}
    lens = zip(case.query_lens, case.seq_lens, strict=True)
    return {"query_lens": tuple(max(query_len, min(1, seq_len)) for query_len, seq_len in lens)}


def _no_context(case: AttentionCase) -> Changes:
    """Prefill in place of what goes on behind a context; needles stay on the tokens that are left."""
    if not isinstance(case, PagedAttentionCase):
        return {}
    kept = tuple(needle for needle in case.values.needles if needle.position < case.query_lens[needle.seq])
    values = msgspec.structs.replace(case.values, needles=kept)
    return {"seq_lens": case.query_lens, "values": values}


def _pow2_gqa_ratio(case: AttentionCase) -> Changes:
    return {"num_q_heads": case.num_kv_heads << (case.gqa_ratio.bit_length() - 1)}


_CHANGES: dict[str, Callable[[AttentionCase], Changes]] = {
    "context": _no_context,
    "empty sequence": _no_empty_sequence,
    "gqa_ratio not pow2": _pow2_gqa_ratio,
    "no query": _a_query_each,
}


def _kv_names(case: Case) -> tuple[str, str]:
    of_case = (names for names in CACHE_TENSORS if set(names) <= set(case.tensor_names))
    return next(((names[0], names[-1]) for names in of_case), ("", ""))


def _kind(case: Case, name: str) -> StrideKind:
    return case.strides.get(name, "contiguous")


def _without_caches(case: Case) -> Mapping[str, StrideKind]:
    return {name: kind for name, kind in case.strides.items() if name not in _kv_names(case)}


def _simplest_layout(declaration: Declaration, case: Case) -> dict[str, Any]:
    simplest = simplest_case(case.problem, declaration.supports, declaration.options)
    return {"layout": simplest.layout} if isinstance(simplest, PagedDecodeCase) else {}


def _changed(declaration: Declaration, case: Case, changes: Changes) -> Case | None:
    try:
        changed = msgspec.structs.replace(case, **_plain(changes))
    except ValueError:  # strides for V in the interleaved layout, for one
        return None
    supported = supports_case(declaration.supports, declaration.options, changed)
    return changed if supported and changed != case else None


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` without strides that say nothing: a case is written in one way only."""
    plain = dict(changes)
    if "strides" in plain:
        plain["strides"] = {name: kind for name, kind in plain["strides"].items() if kind != "contiguous"}
    return plain
