"""What a case has that a bug may need, and which of it names a part of a kernel. Torch-free."""

from __future__ import annotations

from collections.abc import Set

from attnfuzz.cases.facets.facet import is_told_by_another
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import CACHE_TENSORS
from attnfuzz.problems.features import (
    CACHE_STRIDES,
    DEAD_ROWS,
    KV_STRIDES_DIFFER,
    SEVERAL_HEADS,
    SHARED_PAGES,
    departures,
    features,
    general_features,
)

__all__ = [
    "ANY_CASE",
    "NEEDS_PRECEDING",
    "aspects",
    "case_features",
    "certain",
    "essentials",
    "has_essentials",
    "is_about",
    "needs",
    "needs_numbers",
    "telling",
    "widened",
]

ANY_CASE = "any case"
"""What is told in place of features where it is luck in which cases a mistake shows."""
NEEDS_PRECEDING = "preceding cases"
"""In place of a feature: the case fails only after others, and no case by itself can be told to be this bug."""

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
        SHARED_PAGES,
        "spare blocks",
        "v_head_size>head_size",
    }
)
_RECIPES = ("keys", "values")
_VALUES = (*_RECIPES, "logit_exponent")
"""Recipes for numbers make an error visible more often than they cause it."""
_PLACES = frozenset({"pages=reversed", "pages=shuffled", SHARED_PAGES, "spare blocks"})
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
    if "num_kv_heads>1" in features:
        found.discard(SEVERAL_HEADS)
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
    if features & {"gqa_ratio>1", "num_kv_heads>1"}:
        found.add(SEVERAL_HEADS)
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


def needs_numbers(features: frozenset[str]) -> bool:
    """Whether it takes certain values, or scores of some size."""
    return any(one.startswith(_VALUES) or one in ("needles", "scale") for one in features)


def essentials(features: frozenset[str]) -> frozenset[str]:
    """What another case has to have as well, to be one of the same bug: every bug may need several tokens or pages."""
    return aspects(features) or needs(features)


def has_essentials(features: frozenset[str], of: frozenset[str]) -> bool:
    """Whether a bug that needs ``of`` needs something, and a case with ``features`` has it."""
    return bool(about := essentials(of)) and about <= widened(features) | _moved(features)


def is_about(features: frozenset[str], of: frozenset[str]) -> bool:
    """Whether a case with ``features`` has all parts that a bug is about which needs ``of``."""
    return aspects(certain(of)) <= widened(features)


def widened(features: frozenset[str]) -> frozenset[str]:
    """Where both states are empty, one is; and no log-sum-exps are farther apart than that of an empty one."""
    are_empty = bool(features & {"one state empty", "both states empty"})
    return features | {"one state empty", "some lse far apart"} if are_empty else features


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


def certain(features: frozenset[str]) -> frozenset[str]:
    """``features`` of a failing case without those that matter only if another case, which has them not, passes."""
    return frozenset(one for one in features if not is_told_by_another(one))


def case_features(declaration: Declaration, case: Case) -> frozenset[str]:
    """What makes ``case`` more than the simplest case that the kernel supports, in particular and in general.

    And what it has not that a kernel may be written for.
    """
    supports, options = declaration.supports, declaration.options
    found = features(case, supports=supports, options=options)
    return found.union(*(named(case, supports=supports, options=options) for named in (general_features, departures)))
