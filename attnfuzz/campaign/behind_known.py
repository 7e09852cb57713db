"""Looking behind a known bug: relatives of a failing case that the known bug cannot explain.

A bug that shows in most cases hides every other one with the same symptom. If a case that the known bug explains still
fails once it has been simplified to where that bug needs more, a second bug is at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from attnfuzz.campaign.aspects import ANY_CASE, aspects
from attnfuzz.campaign.siblings import without
from attnfuzz.campaign.signature import KnownFindings, case_features
from attnfuzz.campaign.suspect import Suspect
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.lengths import with_seq_lens
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supported import supports_case

__all__ = ["relatives_beyond", "simpler_in_one_respect", "with_simplest_values"]

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
    ("v_head_size",),
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


def relatives_beyond(known: KnownFindings, suspect: Suspect) -> list[Case]:
    """Cases that differ from the suspect's in one respect, and would be news if they failed in the same way."""
    declaration = suspect.declaration
    if ANY_CASE in suspect.features:
        return []
    return [
        case
        for case in (*_supported(suspect, _siblings(known, suspect)), *simpler_in_one_respect(suspect))
        if not known.explains(suspect.symptom, case_features(declaration, case))
    ]


def simpler_in_one_respect(suspect: Suspect) -> list[Case]:
    """The case with one group of fields as in the simplest case, for each group in turn."""
    return _supported(suspect, _relatives(suspect))


def with_simplest_values(suspect: Suspect) -> Case | None:
    """The case with the simplest recipe for its numbers; None if it has that already."""
    case, simplest = suspect.case, _simplest(suspect)
    recipes = {name: getattr(simplest, name) for name in _RECIPES if hasattr(case, name)}
    changed = (changed for changed in _changed(case, recipes) if changed != case)
    return next(iter(_supported(suspect, changed)), None)


def _supported(suspect: Suspect, cases: Iterable[Case]) -> list[Case]:
    declaration = suspect.declaration
    return [case for case in cases if supports_case(declaration.supports, declaration.options, case)]


def _siblings(known: KnownFindings, suspect: Suspect) -> Iterator[Case]:
    """The case without what a known bug is about, and with all the rest: nothing else is taken away that may matter."""
    signatures = known.explaining(suspect.symptom, suspect.features)
    for aspect in sorted({aspect for signature in signatures for aspect in aspects(signature.features)}):
        yield from without(aspect, suspect.declaration, suspect.case)


def _relatives(suspect: Suspect) -> Iterator[Case]:
    case, simplest = suspect.case, _simplest(suspect)
    for group in _GROUPS:
        changes = {name: getattr(simplest, name) for name in group if hasattr(case, name)}
        if "seq_lens" in changes and isinstance(case, AttentionCase):
            changes = with_seq_lens(case, changes["seq_lens"] * case.num_seqs)
        if "query_lens" in changes and "seq_lens" not in changes:
            changes["query_lens"] = tuple(min(1, query_len) for query_len in getattr(case, "query_lens", ()))
        if any(getattr(case, name) != value for name, value in changes.items()):
            yield from _changed(case, changes)


def _simplest(suspect: Suspect) -> Case:
    declaration = suspect.declaration
    return simplest_case(declaration.problem, declaration.supports, declaration.options)


def _changed(case: Case, changes: dict[str, Any]) -> Iterator[Case]:
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
