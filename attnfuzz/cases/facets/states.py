"""States to be merged: how many, which kinds of LSE meet, how the LSEs lie. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from attnfuzz.cases.facets.facet import Axis, Change, Changes, Domain, Facet, Levels, Options, Part, Place, changed
from attnfuzz.cases.facets.heads import heads_class
from attnfuzz.problems.cases import LsePair, MergeStatesCase
from attnfuzz.problems.choices import lse_kinds_of
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Choice, Integer, Proposal, Seed, first_of
from attnfuzz.problems.recipes import LSE_KINDS, STATE_RECIPES, LseKind
from attnfuzz.problems.supports import Supports

__all__ = [
    "BOTH_EMPTY",
    "FAR_APART",
    "ONE_EMPTY",
    "PAIR",
    "SIDES_EMPTY",
    "SOME",
    "LseLayout",
    "LsePairs",
    "StateHeads",
    "StateNumbers",
    "Tokens",
]

PAIR, SOME = "lse", "some lse"
ONE_EMPTY, BOTH_EMPTY = Feature("one state empty", role="empty"), Feature("both states empty", role="empty")
SIDES_EMPTY = Feature("prefix empty", role="empty"), Feature("suffix empty", role="empty")
FAR_APART = Feature(SOME, " far apart")

_COUNTED = Integer(1, 1 << 20, likely=(1, 2))
_PLAIN: tuple[LsePair, ...] = (("finite", "finite"),)


class Tokens(Facet[MergeStatesCase]):
    """How many tokens have states."""

    fields = ("num_tokens",)
    parts = (Part("num_tokens", _COUNTED, Place.SEQUENCES, Feature("num_tokens", ">1", "size"), "{} token"),)

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("tokens", ("1", "2 to 16", "over 16"), _tokens)

    def shrink(self, case: MergeStatesCase, domain: Domain) -> Proposal[MergeStatesCase]:
        """One token and one head, with each kind of pair in turn; else fewer tokens."""
        if case.num_tokens * case.num_q_heads > 1:
            pairs = dict.fromkeys(case.lse_pairs)
            alone = [changed(case, num_tokens=1, num_q_heads=1, lse_pairs=(pair,)) for pair in pairs]
            case = yield from first_of(case, alone)
        return (yield from super().shrink(case, domain))


def _tokens(case: MergeStatesCase) -> Levels:
    tokens = case.num_tokens
    return ("1" if tokens == 1 else "2 to 16" if tokens <= 16 else "over 16",)


class StateHeads(Facet[MergeStatesCase]):
    """How many heads have states."""

    fields = ("num_q_heads",)
    jumps_with = "heads"
    parts = (Part("num_q_heads", _COUNTED, Place.HEADS, Feature("num_q_heads", ">1", "size"), "{} query head"),)

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("heads", ("1", "pow2", "other"), lambda case: (heads_class(case.num_q_heads),))


class LsePairs(Facet[MergeStatesCase]):
    """Which kinds of LSE meet."""

    fields = ("lse_pairs",)

    def features(self, case: MergeStatesCase) -> Iterator[Feature]:
        for pair in case.lse_pairs:
            if pair != _PLAIN[0]:
                yield Feature(PAIR, f" {pair[0]}/{pair[1]}", "empty" if any(map(_is_empty, pair)) else "part")

    def traits(self, case: MergeStatesCase) -> Iterator[Feature]:
        for prefix, suffix in case.lse_pairs:
            yield Feature("some prefix LSE", f" {prefix}")
            yield Feature("some suffix LSE", f" {suffix}")
            yield Feature("some LSE", f" {prefix}/{suffix}")
        kinds = {kind for pair in case.lse_pairs for kind in pair}
        if len(kinds) == 1:
            yield Feature("every LSE", f" {kinds.pop()}")

    def general(self, case: MergeStatesCase, domain: Domain) -> Iterator[Feature]:
        """Which side is empty, and what kinds of LSE there are: a mistake cannot tell others of these from them."""
        for pair in case.lse_pairs:
            empty = tuple(map(_is_empty, pair))
            if any(empty):
                yield BOTH_EMPTY if all(empty) else ONE_EMPTY
            yield from (side for side, is_empty in zip(SIDES_EMPTY, empty, strict=True) if is_empty)
            for kind in pair:
                if kind != "finite":
                    yield Feature(SOME, f" {kind}", "empty" if _is_empty(kind) else "part")
            if {"high", "low"} & set(pair):
                yield FAR_APART

    def row_axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("prefix LSE", LSE_KINDS, partial(_lse, 0))
        yield Axis("suffix LSE", LSE_KINDS, partial(_lse, 1))

    def rows(self, case: MergeStatesCase) -> Iterable[LsePair]:
        return set(case.lse_pairs)

    def objections(self, case: MergeStatesCase, domain: Domain) -> Iterator[str]:
        declared = lse_kinds_of(domain.supports)
        others = (kind for pair in case.lse_pairs for kind in pair if kind not in declared)
        yield from (f"lse_pairs={kind!r}, but the kernel declares {declared}" for kind in others)

    def size(self, case: MergeStatesCase, options: Options) -> Iterator[tuple[Place, object]]:
        kinds = tuple((LSE_KINDS.index(prefix), LSE_KINDS.index(suffix)) for prefix, suffix in case.lse_pairs)
        yield Place.TOKENS, (len(kinds), sum(map(sum, kinds)), kinds)

    def shrink(self, case: MergeStatesCase, domain: Domain) -> Proposal[MergeStatesCase]:
        """Fewer pairs, then simpler kinds on each side."""
        for i in range(len(case.lse_pairs) - 1, -1, -1):
            case = yield from first_of(case, [_with_pairs(case, [*case.lse_pairs[:i], *case.lse_pairs[i + 1 :]])])
        kinds = lse_kinds_of(domain.supports)
        for i in range(len(case.lse_pairs)):
            _, suffix = case.lse_pairs[i]
            case = yield from first_of(case, [_with_pair(case, i, (kind, suffix)) for kind in kinds])
            prefix, _ = case.lse_pairs[i]
            case = yield from first_of(case, [_with_pair(case, i, (prefix, kind)) for kind in kinds])
        return case

    def changes(self, case: MergeStatesCase, domain: Domain) -> Iterator[Change]:
        if case.lse_pairs != _PLAIN:
            has_empty = any(_is_empty(kind) for pair in case.lse_pairs for kind in pair)
            yield "finite LSEs only" if has_empty else "LSEs between -4 and 4 only", {"lse_pairs": _PLAIN}

    def alternatives(self, case: MergeStatesCase, domain: Domain) -> Iterator[Changes]:
        """Each side of each pair of another kind, and the sides exchanged; an empty state stays empty."""
        for i, (prefix, suffix) in enumerate(case.lse_pairs):
            swapped = (suffix, prefix)
            others = [(kind, suffix) for kind in _alike(prefix)] + [(prefix, kind) for kind in _alike(suffix)]
            both = zip(_alike(prefix), _alike(suffix), strict=False)
            for pair in (swapped, *others, *both):
                if pair != (prefix, suffix):
                    yield {"lse_pairs": (*case.lse_pairs[:i], pair, *case.lse_pairs[i + 1 :])}


def _is_empty(kind: LseKind) -> bool:
    return kind in ("-inf", "+inf")


def _lse(side: int, pair: LsePair) -> Levels:
    return (pair[side],)


def _with_pair(case: MergeStatesCase, i: int, pair: LsePair) -> MergeStatesCase | None:
    return _with_pairs(case, [*case.lse_pairs[:i], pair, *case.lse_pairs[i + 1 :]])


def _with_pairs(case: MergeStatesCase, pairs: Sequence[LsePair]) -> MergeStatesCase | None:
    return changed(case, lse_pairs=tuple(pairs))


def _alike(kind: LseKind) -> tuple[LseKind, ...]:
    """Other kinds of a state that is as empty or not."""
    groups: tuple[tuple[LseKind, ...], ...] = (("-inf", "+inf"), ("finite", "equal", "high", "low"))
    return next(tuple(other for other in group if other != kind) for group in groups if kind in group)


class LseLayout(Facet[MergeStatesCase]):
    """The order of the dimensions of the LSEs, which the kernel declares."""

    fields = ("lse_layout",)
    parts = (Part("lse_layout", Choice(("HT", "TH")), Place.STORAGE, Feature("lse_layout", "={}")),)

    def objections(self, case: MergeStatesCase, domain: Domain) -> Iterator[str]:
        if case.lse_layout != domain.supports.lse_layout:
            yield f"lse_layout={case.lse_layout!r}, but the kernel declares {(domain.supports.lse_layout,)}"


class StateNumbers(Facet[MergeStatesCase]):
    """The numbers in the states."""

    fields = ("outputs", "seed")
    jumps_with = "numbers"
    parts = (
        Part("outputs", Choice(STATE_RECIPES), Place.CONTENTS, Feature("values", "={}", "numbers"), "outputs {}"),
        Part("seed", Seed(), Place.CONTENTS),
    )

    def draws(self, supports: Supports) -> Mapping[str, Sequence[object]]:
        return {"seed": range(64), "outputs": STATE_RECIPES}
