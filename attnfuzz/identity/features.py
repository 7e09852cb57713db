"""Features of a case that a bug may need, and which of them name a part of a kernel. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Set

from attnfuzz.bundled.merge_states import BOTH_EMPTY, FAR_APART, ONE_EMPTY, PAIR, SIDES_EMPTY, SOME
from attnfuzz.cases.facets.heads import GROUPED, RATIO_NOT_POW2, SEVERAL_HEADS, SEVERAL_KV_HEADS
from attnfuzz.cases.facets.sequences import SEVERAL_TOKENS
from attnfuzz.cases.facets.storage import (
    CACHE_STRIDES,
    FULL_PAGE,
    KV_STRIDES_DIFFER,
    PARTIAL_PAGE,
    SEVERAL_PAGES,
    SEVERAL_PER_PAGE,
    strided,
    strided_tensor,
)
from attnfuzz.cases.features import features, general_features, unusual_values
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import CACHE_TENSORS
from attnfuzz.problems.feature import Feature, Role
from attnfuzz.problems.supports import Supports

NEEDS_PRECEDING = Feature("preceding cases")
"""In place of a feature: the case fails only after others, and no case by itself can be told to be this bug."""

_NOTHING = "any case"
"""What files of earlier versions say where it is luck in which cases a mistake shows."""
_PARTS: frozenset[Role] = frozenset({"part", "empty", "other"})
_WHAT_LIES_WHERE: frozenset[Role] = frozenset({"place", "surroundings", "numbers"})
"""What lies at a wrong address, and whether that is seen: another token, another sequence's, dead memory."""
_OF_NUMBERS: frozenset[Role] = frozenset({"numbers", "scores"})
_OF_DIGITS = frozenset({"dtype", "head_size"})
_MOVED = Feature("pages moved", role="place")
_ANY_LENGTH = frozenset({PARTIAL_PAGE, SEVERAL_TOKENS})
_SIDES = frozenset({*SIDES_EMPTY, ONE_EMPTY, BOTH_EMPTY})
_CACHES = frozenset(strided(name) for names in CACHE_TENSORS for name in names)

Features = frozenset[Feature]


def kernel_parts(features: Features) -> Features:
    """The features that name a part of a kernel: strides, layout, head mapping, type, option, empty rows.

    Strides count by tensor, not by how they came about; those of the caches not at all if what matters is that K and V
    differ. Cases with no aspect in common are hardly the same bug, while every bug may need several tokens.
    """
    found = {one for one in features if one.role in _PARTS and not (strided_tensor(one) and one.value)}
    found -= _implied(found)
    if SEVERAL_KV_HEADS in features:
        found.discard(SEVERAL_HEADS)
    if RATIO_NOT_POW2 in found:
        found.discard(GROUPED)
    if KV_STRIDES_DIFFER in found:
        found -= {CACHE_STRIDES, *_CACHES}
        found = {one for one in found if one.field != "layout"}
    return frozenset(found)


def _implied(features: Set[Feature]) -> set[Feature]:
    """The ``features`` that say no more than another one does in particular."""
    found = {general for one in features if (general := one.general) is not None}
    if any(one.field == PAIR for one in features):
        found |= {one for one in features if one in _SIDES or one.field == SOME}
    if features & {GROUPED, SEVERAL_KV_HEADS}:
        found.add(SEVERAL_HEADS)
    if features & {*SIDES_EMPTY}:
        found.add(ONE_EMPTY)
    if BOTH_EMPTY in features:
        found.update(SIDES_EMPTY)
    if FULL_PAGE in features:  # which several tokens fill
        found |= {SEVERAL_TOKENS, SEVERAL_PER_PAGE}
    return found


def needs(features: Features) -> Features:
    """``features`` without what the minimal case has only to make the error visible, or cannot be without.

    A sequence on a page for several tokens either leaves a part of it free or has several tokens itself, so a case
    with one of the two does not tell whether that matters. If nothing is left, it is where pages lie that matters.
    """
    found = frozenset(one for one in features if one.role not in _WHAT_LIES_WHERE)
    if SEVERAL_PAGES in found:
        found -= {SEVERAL_TOKENS}
    if SEVERAL_PER_PAGE in found and len(found & _ANY_LENGTH) == 1:
        found -= _ANY_LENGTH
    return found or _moved(features)


def needs_numbers(features: Features) -> bool:
    """Whether it takes certain values, or scores of some size."""
    return any(one.role in _OF_NUMBERS for one in features)


def essentials(features: Features) -> Features:
    """The features that another case must have as well, to be one of the same bug: every bug may need several tokens or
    pages."""
    return kernel_parts(features) or needs(features)


def has_essentials(features: Features, of: Features) -> bool:
    """Whether a bug that needs ``of`` needs something, and a case with ``features`` has it."""
    return bool(about := essentials(of)) and about <= widened(features) | _moved(features)


def is_about(features: Features, of: Features) -> bool:
    """Whether a case with ``features`` has all parts that a bug is about which needs ``of``."""
    return kernel_parts(unconditional(of)) <= widened(features)


def widened(features: Features) -> Features:
    """Where both states are empty, one is; and no log-sum-exps are farther apart than that of an empty one."""
    return features | {ONE_EMPTY, FAR_APART} if features & {ONE_EMPTY, BOTH_EMPTY} else features


def _moved(features: Features) -> Features:
    return frozenset({_MOVED} if any(one.role == "place" for one in features) else ())


def most_specific(features: Features) -> Features:
    """``features`` for people: without general ones that a particular one implies."""
    particular = _implied(features)
    has_layout = any(one.field == "layout" for one in particular)
    shown = {one for one in features if one not in particular and not (has_layout and one in _CACHES)}
    if shown & {KV_STRIDES_DIFFER, *_CACHES} or has_layout or particular & _CACHES:
        shown.discard(CACHE_STRIDES)
    return frozenset(shown)


def of_last_digits(features: Features) -> Features:
    """The features that a bug which changes last digits is about: luck, and how many digits there are, decide which
    cases show it."""
    return frozenset(one for one in kernel_parts(features) if one.field not in _OF_DIGITS)


def unconditional(features: Features) -> Features:
    """``features`` of a failing case without those that matter only if another case, which has them not, passes."""
    return frozenset(one for one in features if one.role != "other")


def case_features(declaration: Declaration, case: Case) -> Features:
    """The features that make ``case`` more than the simplest case that the kernel supports, in particular and in
    general.

    And what it has not that a kernel may be written for.
    """
    supports, options = declaration.supports, declaration.options
    found = features(case, supports=supports, options=options)
    return found.union(*(told(case, supports=supports, options=options) for told in (general_features, unusual_values)))


def named(words: Iterable[str], case: Case) -> Features:
    """The features of ``case`` that a file calls so; of what it has not, nothing is known but the words."""
    supports = Supports()
    of_case = {*features(case), *general_features(case, supports=supports), *unusual_values(case, supports=supports)}
    by_words = {str(one): one for one in (*of_case, NEEDS_PRECEDING)}
    return frozenset(by_words.get(one) or Feature.read(one) for one in words if one != _NOTHING)
