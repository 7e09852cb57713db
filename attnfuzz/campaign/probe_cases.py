"""The small cases by which a kernel is asked what it takes: made, not drawn, so it is asked the same everywhere.

Torch-free. `ProbeCases` makes them for one combination of ordinary values; `trial_of` makes those that try a
declaration before anybody is told to make it: pairs of a case that it keeps and one that it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import AttentionCase, Case, LsePair, MergeStatesCase, PagedDecodeCase, has_query_lens
from attnfuzz.problems.choices import (
    dtypes_of,
    head_counts_of,
    layouts_of,
    lying_alike,
    merge_heads_of,
    split_counts_of,
    strided_tensors_of,
)
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import StrideKind, ValueRecipe
from attnfuzz.problems.simplest import simplest_case, simplest_cases
from attnfuzz.problems.supports import Supports

Pair = tuple[Case, Case]
"""A case that a declaration keeps, and one that differs from it in what the declaration leaves out."""
TOLD_ON_ALL_PATHS = frozenset({"query", "scores", "probabilities"})
"""Fields of `Numerics` that a kernel cannot have without failing some of each of `ProbeCases.of_paths`; sums over tiles
show in some shapes only."""
_LONG = 300
_LONGER = 600
"""Tokens, of which many kernels make several partial results."""
_LARGE_SCORES = ((5, 0), (7, 1), (4, 2), (6, 3), (5, 4))
"""Exponents of keys, and seeds."""
_MOST_CHOICES = 3
_NEXT_TO_NOTHING = 2.0**-20
_ONE_VALUE = {
    "dtypes": "dtype",
    "head_sizes": "head_size",
    "block_sizes": "block_size",
    "layouts": "layout",
    "gqa_ratios": "gqa_ratio",
}
"""Fields of `Supports` of which a case has one value, under the name that it has there."""


def points(declaration: Declaration) -> Iterator[Supports]:
    """Combinations of one value of each field, the most ordinary first: what most kernels take, then what others do.

    Where the kernel declares which values go together, those of one of its combinations after the other.
    """
    supports = declaration.supports
    for one, _ in simplest_cases(declaration.problem, supports, declaration.options):
        values: dict[str, tuple[Any, ...]] = {
            "dtypes": dtypes_of(one),
            "layouts": layouts_of(one),
            "head_sizes": supports.head_sizes or (64, 128, 16, 256, 80),
            "block_sizes": supports.block_sizes or (16, 1, 64, 32, 128),
            "gqa_ratios": supports.gqa_ratios or (1, 4),
        }
        for combination in one.combinations:
            named = {"head_sizes": "head_size", "block_sizes": "block_size", "gqa_ratios": "gqa_ratio"}
            values |= {name: combination[field] for name, field in named.items() if field in combination}
        ordinary = {"head_sizes": (64, 128), "block_sizes": (16, 32, 64)}
        for name, preferred in ordinary.items():
            values[name] = (
                *(value for value in values[name] if value in preferred),
                *(value for value in values[name] if value not in preferred),
            )
        first = {name: choices[:1] for name, choices in values.items()}
        yield msgspec.structs.replace(one, **first)
        for name, choices in values.items():
            for choice in choices[1:4]:
                yield msgspec.structs.replace(one, **{**first, name: (choice,)})


def with_values_of(case: Case, point: Supports) -> Supports:
    """``point`` with the dtype, head size, page size, layout and GQA ratio of ``case``."""
    values = {name: getattr(case, field, None) for name, field in _ONE_VALUE.items()}
    return msgspec.structs.replace(point, **{name: (value,) for name, value in values.items() if value is not None})


def with_ordinary(case: Case, name: str, point: Supports) -> Case | None:
    """``case`` as it is with the value of ``point`` for the field ``name`` of `Supports`; itself if it has that one.

    None if there is no such case, or if no one value of a case says what the field is about.
    """
    changes: dict[str, Any] = {"strides": {}} if name == "strides" else {}
    if name in _ONE_VALUE:
        changes = {_ONE_VALUE[name]: getattr(point, name)[0]}
    try:
        return msgspec.structs.replace(case, **changes) if changes else None
    except ValueError:  # values that do not go together
        return None


@dataclass(frozen=True, slots=True)
class ProbeCases:
    """Cases with the values of ``point``, which has one of each field.

    ``is_even``: sequences have one length, which fills their pages; else they are ragged. ``kv``: the 8-bit cache of
    those with lengths.
    """

    declaration: Declaration
    point: Supports
    is_even: bool = False
    kv: QuantisedKv | None = None

    def ordinary(self, **fields: Any) -> list[Case]:
        """Small cases in which each layout and stride makes a difference; none where values do not go together."""
        try:
            simplest = simplest_case(self.declaration.problem, self.point, self.declaration.options)
        except ValueError:  # a head size that does not fit a layout
            return []
        if not isinstance(simplest, AttentionCase):
            pairs: tuple[tuple[LsePair, ...], ...] = (
                (("finite", "finite"),), (("equal", "equal"),), (("high", "low"), ("low", "high"))
            )  # fmt: skip
            two = {} if merge_heads_of(self.point) else {"num_q_heads": 2}
            return [
                msgspec.structs.replace(simplest, num_tokens=3, lse_pairs=lse_pairs, **two, **fields)
                for lse_pairs in pairs
            ]
        size = simplest.page_size or 4
        ragged, even = ((2 * size, size), (size + 1, 1, 2 * size)), ((2 * size,) * 2, (2 * size,) * 3)
        shapes = even if self.is_even else ragged
        return [self.with_lengths(simplest, lengths, **fields) for lengths in shapes]

    def with_lengths(self, case: AttentionCase, lengths: Sequence[int], **fields: Any) -> Case:
        """``case`` with other sequences, several heads and, of kernels that split, several splits."""
        supports = self.declaration.supports
        longest = supports.max_seq_len or max(lengths)
        seq_lens = tuple(min(length, longest) for length in lengths)
        changes: dict[str, Any] = {"seq_lens": seq_lens, **({"kv": self.kv} if self.kv else {}), **fields}
        if head_counts_of(self.point) is None:
            changes = {"num_kv_heads": 2, "num_q_heads": 2 * case.gqa_ratio, **changes}
        if has_query_lens(case.problem) and "query_lens" not in fields:
            most = supports.max_query_len or longest
            of_first, of_others = (most, most) if self.is_even else (min(2, most), 1)
            changes["query_lens"] = tuple(
                min(length, of_others if i else of_first) for i, length in enumerate(seq_lens)
            )
        if splits := case.partial_states:
            changes["num_splits"] = next((one for one in split_counts_of(self.point) if one > 1), splits)
        return cast(Case, msgspec.structs.replace(case, **changes))

    def empty(self) -> Iterator[Case]:
        """Sequences and states without keys, in each of the ways in which they occur."""
        first, *_ = self.ordinary()
        if not isinstance(first, AttentionCase):
            pairs: tuple[LsePair, ...] = (("finite", "-inf"), ("-inf", "finite"), ("-inf", "-inf"))
            for pair in pairs:
                yield msgspec.structs.replace(first, lse_pairs=(pair,))
            return
        size = min(first.seq_lens)
        if has_query_lens(first.problem):
            queries = max(first.query_counts) if self.is_even else 1
            yield self.with_lengths(first, (size, 0), query_lens=(queries, 0))
            yield self.with_lengths(first, (0, size), query_lens=(0, queries))
            yield self.with_lengths(first, (size, size), query_lens=(queries, 0))
            return
        yield self.with_lengths(first, (0,))
        yield self.with_lengths(first, (size, 0))
        yield self.with_lengths(first, (0, size))

    def single_rows(self) -> Iterator[Case]:
        """One sequence each, short ones and long ones: what a kernel does with some rows only shows by itself."""
        first, *_ = self.ordinary() or (None,)
        if isinstance(first, MergeStatesCase):
            pairs: tuple[LsePair, ...] = (("finite", "finite"), ("equal", "equal"), ("high", "low"), ("low", "high"))
            for pair in pairs:
                yield msgspec.structs.replace(first, num_tokens=1, lse_pairs=(pair,))
        elif isinstance(first, AttentionCase):
            size = first.page_size or 4
            for length in (1, size, 2 * size + 1, 5 * size + 3, _LONG):
                yield self.with_lengths(first, (length,))

    def of_roundings(self) -> Iterator[Case]:
        """Cases of numbers and scales that no rounding leaves as they are; in float16, also of its lowest range."""
        for seed, case in enumerate(self.ordinary()):
            if not isinstance(case, AttentionCase):
                return
            kinds: list[tuple[ValueRecipe, int]] = [("normal", 1), ("normal", 3)]
            kinds += [("small", 1)] if case.dtype == "float16" else []
            lengths = [4 * length for length in case.seq_lens]
            for of_v, exponent in kinds:  # q times a power of 2 is exact, and exponents of small scores nearly so
                values = msgspec.structs.replace(
                    case.values, keys="fine", values=of_v, logit_exponent=exponent, seed=seed
                )
                yield self.with_lengths(case, lengths, values=values, scale=0.7 * case.scale)

    def of_paths(self) -> Iterator[list[Case]]:
        """Shapes for which kernels have code of their own: short and long, one head, each option and number of splits.

        Each with numbers that tell whether scores or weights are rounded. Scores are large: then that costs more than
        anything that needs no declaration, however long a sequence is. So a kernel that rounds them fails one of each.
        """
        first, *_ = self.ordinary() or (None,)
        if not isinstance(first, AttentionCase):
            return
        size = first.page_size or 4
        short = (size,) * 4 if self.is_even else (9, 5, 7, 3)
        long = (-(-_LONGER // size) * size,) * 2 if self.is_even else (_LONGER, 33, 5)
        shapes: list[tuple[tuple[int, ...], dict[str, Any]]] = [(short, {}), (long, {})]
        if head_counts_of(self.point) is None:
            shapes.append((2 * short, {"num_kv_heads": 1, "num_q_heads": first.gqa_ratio}))
        if first.partial_states:
            shapes += [(long, {"num_splits": count}) for count in split_counts_of(self.point)[:_MOST_CHOICES]]
        for name, choices in self.declaration.options.items():
            others = choices[1 : 1 + _MOST_CHOICES]
            shapes += [(long, {"options": {**dict(first.options), name: choice}}) for choice in others]
        for lengths, fields in shapes:
            large = (
                msgspec.structs.replace(first.values, keys="fine", values="normal", logit_exponent=exponent, seed=seed)
                for exponent, seed in _LARGE_SCORES
            )
            yield [self.with_lengths(first, lengths, values=one, scale=0.7 * first.scale, **fields) for one in large]

    def of_few_bits(self) -> Iterator[Case]:
        """Cases with keys of one score, next to 0, and 8-bit values: all weights are 1, and any operand is exact.

        A query that is rounded has no part in the log-sum-exp then.
        """
        for seed, case in enumerate(self.ordinary()):
            if isinstance(case, AttentionCase):
                values = msgspec.structs.replace(case.values, keys="equal", values="normal", seed=seed)
                lengths = [4 * length for length in case.seq_lens]
                yield self.with_lengths(case, lengths, values=values, scale=_NEXT_TO_NOTHING * case.scale)

    def permitted(self, cases: Iterable[Case]) -> list[Case]:
        """The ``cases`` that the kernel declares to take."""
        return [one for one in cases if supports_case(self.declaration.supports, self.declaration.options, one)]


def trial_of(declaration: Declaration, limits: Mapping[str, Any], case: Case) -> Iterator[Pair]:
    """Pairs that try whether a kernel which fails ``case`` is one that may declare ``limits``, fields of `Supports`.

    A kernel that does not take what they leave out fails the second of each pair, of whatever shape, and is right about
    the first of some. A layout is tried where layouts differ, and tensors that are not contiguous among others that are
    not: a kernel which is right about one of these does heed strides.
    """
    ordinary = next(points(declaration), None)
    if ordinary is None:
        return
    for is_even in (False, True):
        kept = ProbeCases(declaration, ordinary, is_even)
        yield from (pair for pair in _pairs(kept, limits, case) if kept.permitted(pair[1:]))


def _pairs(kept: ProbeCases, limits: Mapping[str, Any], case: Case) -> Iterator[Pair]:
    inside = kept.ordinary()
    values = {name: (getattr(case, field),) for name, field in _ONE_VALUE.items() if name in limits}
    strides: dict[str, StrideKind] = getattr(case, "strides", {}) if "strides" in limits else {}
    if values or strides:
        other = ProbeCases(kept.declaration, msgspec.structs.replace(kept.point, **values), kept.is_even)
        own = {name: kind for name, kind in strides.items() if kind != "contiguous"}
        for recipe in (own, *strided_beside(kept.declaration, kept.point, own)):
            yield from zip(inside, other.ordinary(**({"strides": recipe} if recipe else {})), strict=False)
    if "empty_sequences" in limits and inside:
        yield from ((inside[0], one) for one in kept.empty())
    if "padding_tokens" in limits:
        yield from zip(inside, kept.ordinary(padding_tokens=2), strict=False)
    if "max_num_splits" in limits:
        yield from zip(inside, kept.ordinary(num_splits=case.partial_states), strict=False)
    for one in inside:
        if "empty_state_lse" in limits and isinstance(one, MergeStatesCase):
            yield from told_by_either_infinity(one)
        if "freed_pages" in limits and isinstance(one, PagedDecodeCase):
            yield behind_a_window(one)


def told_by_either_infinity(case: MergeStatesCase) -> Iterator[Pair]:
    """``case`` with an empty state told by -inf, and with one told by +inf, on either side."""
    pairs: tuple[tuple[LsePair, LsePair], ...] = (
        (("finite", "-inf"), ("finite", "+inf")), (("-inf", "finite"), ("+inf", "finite"))
    )  # fmt: skip
    for minus, plus in pairs:
        yield msgspec.structs.replace(case, lse_pairs=(minus,)), msgspec.structs.replace(case, lse_pairs=(plus,))


def behind_a_window(case: PagedDecodeCase) -> Pair:
    """``case`` with a window of one token, and with the pages behind it given to others as well."""
    variant = msgspec.structs.replace(case.variant, window=1)
    freed = variant.with_freed_pages()
    return msgspec.structs.replace(case, variant=variant), msgspec.structs.replace(case, variant=freed)


def strided_beside(
    declaration: Declaration, point: Supports, own: Mapping[str, StrideKind]
) -> Iterator[dict[str, StrideKind]]:
    """``own`` recipes, with each other tensor lying in one of these ways as well, and with all of them."""
    (layout,) = layouts_of(point)[:1]
    tensors = strided_tensors_of(declaration.problem, declaration.supports, layout)
    level = declaration.supports.strides
    others = [
        names for names in dict.fromkeys(lying_alike(level, name) for name in tensors) if not set(names) & set(own)
    ]
    for kind in dict.fromkeys(own.values()):
        recipes = [{**own, **{name: kind for name in names if name in tensors}} for names in others]
        yield from recipes
        if len(recipes) > 1:
            yield {name: one for recipe in recipes for name, one in recipe.items()}
