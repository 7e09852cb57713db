"""Which of a bug's features say what it is about, and which only how large a case must be to show it."""

from __future__ import annotations

from collections.abc import Set

from attnfuzz.problems.choices import CACHE_TENSORS
from attnfuzz.problems.features import CACHE_STRIDES, DEAD_ROWS, KV_STRIDES_DIFFER

__all__ = [
    "ADDRESS_ORACLES",
    "ANY_CASE",
    "ROUNDING_ORACLES",
    "SILENT_ORACLES",
    "aspects",
    "is_part_of",
    "needs",
    "telling",
]

SILENT_ORACLES = frozenset({"accuracy", "dead_memory", "unwritten", "determinism"})
"""One wrong address gives a number that is merely wrong, or dead memory's, or nobody's, as the case has it."""

ADDRESS_ORACLES = frozenset({"page_permutation", "block_table_slack"})
"""They move what lies at a wrong address."""

ROUNDING_ORACLES = frozenset(
    {"page_permutation", "block_table_slack", "batch_invariance", "value_affinity", "merge_laws"}
)
"""They compare bits within the error bound, where it is chance in which cases a mistake changes the last digit."""
ANY_CASE = "any case"
"""In place of all features of such a failure: what the smallest case still has says nothing of the mistake."""

_SIZES = frozenset(
    {
        ANY_CASE,
        DEAD_ROWS,
        "block_size>1",
        "extra columns",
        "extra rows",
        "needles",
        "num_kv_heads>1",
        "num_q_heads>1",
        "num_seqs>1",
        "num_splits>1",
        "num_tokens>1",
        "pages",
        "pages=reversed",
        "pages=shuffled",
        "padding",
        "padding=out_of_range",
        "padding=wrong_page",
        "partial last page",
        "query_len>1",
        "ragged",
        "ragged queries",
        "scale",  # goes with the head size
        "seq_len>1",
        "seq_len>block_size",
        "seq_len>window",
        "shared pages",
        "spare blocks",
        "v_head_size>head_size",
    }
)
_RECIPES = ("keys", "values")
_VALUES = (*_RECIPES, "logit_exponent")
"""Recipes for numbers make an error visible more often than they cause it."""
_PLACES = frozenset({"pages=reversed", "pages=shuffled", "shared pages", "spare blocks"})
_MOVED = "pages moved"
_SURROUNDINGS = _PLACES | {"extra columns", "extra rows", "needles"}
"""They decide what lies at a wrong address: another token, another sequence's, dead memory."""
_ONE_SIDE = frozenset({"prefix empty", "suffix empty"})
_SIDES = _ONE_SIDE | {"one state empty", "both states empty"}
_ANY_LENGTH = frozenset({"partial last page", "seq_len>1"})
_CACHES = frozenset(f"strides:{name}" for names in CACHE_TENSORS for name in names)


def aspects(features: frozenset[str]) -> frozenset[str]:
    """The features that name a part of a kernel: strides, layout, head mapping, type, option, empty rows.

    Strides count by tensor, not by how they came about; those of the caches not at all if what matters is that K and V
    differ. Cases with no aspect in common are hardly the same bug, while every bug may need several tokens.
    """
    found = {one for one in features if one not in _SIZES and not one.startswith(_VALUES)}
    found -= {one for one in found if one.startswith("strides:") and "=" in one}
    found -= _implied(found)
    if "gqa_ratio not pow2" in found:
        found.discard("gqa_ratio>1")
    if KV_STRIDES_DIFFER in found:
        found -= {CACHE_STRIDES, *_CACHES}
        found = {one for one in found if not one.startswith("layout")}
    return frozenset(found)


def _implied(features: Set[str]) -> set[str]:
    """Those of ``features`` that say no more than another one does in particular."""
    found = {one.partition("=")[0] for one in features if "=" in one}
    if any(one.startswith("lse ") for one in features):
        found |= {one for one in features if one in _SIDES or one.startswith("some lse ")}
    if features & _ONE_SIDE:
        found.add("one state empty")
    if "both states empty" in features:
        found |= _ONE_SIDE
    return found


def needs(features: frozenset[str]) -> frozenset[str]:
    """``features`` without what the minimal case has only to make the error visible, or cannot be without.

    A sequence on a page for several tokens either leaves a part of it free or has several tokens itself, so a case
    with one of the two does not tell whether that matters. If nothing is left, it is where pages lie that matters.
    """
    found = frozenset(one for one in features if one not in _SURROUNDINGS and not one.startswith(_RECIPES))
    if "seq_len>block_size" in found:
        found -= {"seq_len>1"}
    if "block_size>1" in found and len(found & _ANY_LENGTH) == 1:
        found -= _ANY_LENGTH
    return found or _moved(features)


def is_part_of(less: frozenset[str], more: frozenset[str]) -> bool:
    """Whether a bug needs something, and all of it is also what another needs."""
    return bool(least := needs(less)) and least <= needs(more) | _moved(more)


def _moved(features: frozenset[str]) -> frozenset[str]:
    return frozenset({_MOVED}) if features & _PLACES else frozenset()


def telling(features: frozenset[str]) -> frozenset[str]:
    """``features`` for people: without general ones that a particular one implies."""
    particular = _implied(features)
    moved = _CACHES if "layout" in particular else frozenset[str]()
    shown = {one for one in features if one not in particular and one not in moved}
    if shown & {KV_STRIDES_DIFFER, *_CACHES} or particular & {"layout", *_CACHES}:
        shown.discard(CACHE_STRIDES)
    return frozenset(shown)
