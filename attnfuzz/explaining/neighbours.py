"""Cases beside a failing one in which mistakes that coincide there predict different numbers. Torch-free.

Shrinking ends where little is left to tell mistakes apart: with equal weights, one token more or less, a window of one
key. The same shapes with numbers that differ, and a few tokens more or less, tell.

Roundings act on the same numbers, so that each gives errors of any size somewhere. There are cases in which some of
them change nothing: one key has a weight of 1, whatever its score; equal keys have, too, whose sums are exact with a
number of keys that is a power of 2; and where all values are equal, weights matter by their sum alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any

import msgspec

from attnfuzz.cases.facets.facet import changed
from attnfuzz.cases.facets.sequences import with_lengths
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase, VarlenCase, encode_case
from attnfuzz.problems.fields import Choice, Integer, Integers, Seed
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.recipes import MAX_LOGIT_EXPONENT, MIN_LOGIT_EXPONENT, STRIDE_KINDS, Needle, Values
from attnfuzz.problems.repeated import plain_values

_SEEDS = (0x2545F491, 0x9E3779B1)
_ANOTHER_SCALE = 0.625
"""Beside 1, 1/2 and the like, which stand in other places, too."""
_ROWS = 8
"""Rows of a case that tells roundings apart, with few heads; each is replayed with all of them."""
_ONE_TILE, _WHOLE_TILES, _MOST_KEYS = 16, 64, 192
_MEAN_MAGNITUDE = 0.625
"""Of queries where keys are "equal" or "falling"."""
_OVERFLOWS, _NEARLY_OVERFLOWS = 226.0, 56.0
"""Scores that overflow exp in float32, and that do not, also if they are 1.4 times as large or small."""
_BESIDE_A_NEEDLE, _MOST_NEEDLES = 20.0, 64
"""A score, of which that of a needle is 16 times as large."""
_OF_NEGATIVE = 160
"""So many times as far below 0 as equal scores above it are the "negative" ones."""
_FALL = 6.0
"""Between the largest and the smallest score, in which exp makes normal numbers of any format."""
_MORE_THAN_A_TILE = 37
"""Keys: what is left of a window without its first tile tells which one that was."""
_TILES = 64
"""Keys before a window that begins with a tile, of whatever size up to that."""
_SMALL_PAGES, _LARGE_PAGES = (4, 8), (16, 32)
"""Page sizes, one of which is another than the case's."""
_PAGES = (5, 7, 11, 13, 19)
"""Numbers of pages that kernels split into no equal parts."""
_OTHER_SEEDS = 4
_MORE = (3, 6, 11)
"""Of what cases of a user's own problem count."""
_MOST_STRIDES = 12
_BESIDE_EMPTY = ((11, 2, 0), (7, 3, 0))
_MANY = 1
"""The step to many tokens."""
_LONG = 70
"""Tokens: more than a tile of 64, and no multiple of any."""


def neighbours(case: Case) -> Iterator[Case]:
    """The most telling first."""
    if isinstance(case, AttentionCase):
        yield from _of_attention(case)
    elif isinstance(case, MergeStatesCase):
        yield from _of_merge(case)
    elif isinstance(case, OpenCase):
        yield from _of_own_problem(case)


def _of_attention(case: AttentionCase) -> Iterator[AttentionCase]:
    seen = {encode_case(case)}
    for one in (
        *_told_by_numbers(case),
        _of_other_scales(case),
        *_of_other_pages(case),
        *_of_another_window(case),
        *_of_more_queries(case),
        *_of_other_lengths(case),
    ):
        if one is not None and (encoded := encode_case(one)) not in seen:
            seen.add(encoded)
            yield one


def _told_by_numbers(case: AttentionCase) -> Iterator[AttentionCase | None]:
    """Make cases with scores about 0 and values unlike each other, and with its own numbers and smaller scores."""
    for seed in _SEEDS:
        yield msgspec.structs.replace(case, values=plain_values(case, (case.values.seed + seed) % (1 << 32)))
    plain = plain_values(case, (case.values.seed + _SEEDS[1]) % (1 << 32))
    yield changed(_with_two_heads(case), scale=case.scale * _ANOTHER_SCALE, values=plain)
    for exponent in (case.values.logit_exponent - 1, case.values.logit_exponent - 3):
        if exponent >= MIN_LOGIT_EXPONENT:
            yield msgspec.structs.replace(case, values=msgspec.structs.replace(case.values, logit_exponent=exponent))


def _with_two_heads(case: AttentionCase) -> AttentionCase:
    """In place of a single one, of which a mistake looks as if any head had it."""
    two = changed(case, num_q_heads=2, num_kv_heads=2) if case.num_q_heads == 1 else None
    return two or case


def _of_other_scales(case: AttentionCase) -> AttentionCase | None:
    """More tokens of an 8-bit cache, whose scales of K and of V are unlike each other, and neither is 1."""
    longer = with_lengths(case, tuple(length + 4 if length else 0 for length in case.seq_lens))
    if longer is None or longer.kv is None:
        return None
    plain = plain_values(longer, (case.values.seed + _SEEDS[0]) % (1 << 32))
    return changed(longer, kv=msgspec.structs.replace(longer.kv, scales="scattered"), values=plain)


def beside_empty(case: AttentionCase) -> Iterator[AttentionCase]:
    """A row without keys, beside a longer and a shorter one, of which a padded batch has places that hold no token."""
    numbers = plain_values(case, _SEEDS[0])
    several = msgspec.structs.replace(case, **case.of_sequences((0, 0, 0)), **case.with_own_pages(), values=numbers)
    for lengths in _BESIDE_EMPTY:
        made = changed(several, **several.with_seq_lens(lengths))
        if made is not None:
            yield made


def rising_cases(case: AttentionCase) -> Iterator[AttentionCase]:
    """Many tokens, each with a larger score than the one before: the maximum grows with each tile."""
    plain = plain_values(case, (case.values.seed + _SEEDS[0]) % (1 << 32))
    longer = with_lengths(case, tuple(max(length, _LONG) if length else 0 for length in case.seq_lens))
    if longer is not None:
        yield msgspec.structs.replace(longer, values=msgspec.structs.replace(plain, keys="rising"))


def maxima_cases(case: AttentionCase) -> Iterator[AttentionCase]:
    """Many tokens, of which float32's exp overflows or does not, according to the maximum that is subtracted before.

    The first is far above all others; the last is; both are; all are so large that exp overflows, and all nearly so
    large; all are so low that it becomes 0.
    """
    longest = max(_LONG, 2 * case.page_size + 3)
    longer = with_lengths(case, tuple(max(length, longest) if length else 0 for length in case.seq_lens))
    one = abs(case.scale) * _MEAN_MAGNITUDE * case.head_size
    if longer is None or case.scale <= 0:
        return
    plain = plain_values(longer, (case.values.seed + _SEEDS[0]) % (1 << 32))
    level = _with_exponent(plain, math.log2(_BESIDE_A_NEEDLE / one), keys="equal")
    for places in ((0,), (-1,), (0, -1)):
        needles = [
            Needle(seq=seq, position=place % length, kv_head=head)
            for seq, length in enumerate(longer.seq_lens)
            for head in range(case.num_kv_heads if length else 0)
            for place in places
        ]
        values = msgspec.structs.replace(level, needles=tuple(needles[:_MOST_NEEDLES]))
        yield msgspec.structs.replace(longer, values=values)
    for score in (_OVERFLOWS, _NEARLY_OVERFLOWS):
        yield msgspec.structs.replace(longer, values=_with_exponent(plain, math.log2(score / one), keys="equal"))
    low = _with_exponent(plain, math.log2(_OVERFLOWS / (_OF_NEGATIVE * one)), keys="negative")
    yield msgspec.structs.replace(longer, values=low)


def _of_other_pages(case: AttentionCase) -> Iterator[AttentionCase | None]:
    """More than two pages of another size, and some small ones, which are full: what is about a page is not about a
    token, nor about a tile of that size, nor a split."""
    page = case.page_size
    if not page:
        return
    other, beside = _SMALL_PAGES if page < _LARGE_PAGES[0] else _LARGE_PAGES
    partial = beside if page == other else other
    full = next(size for size in _SMALL_PAGES if size != page)
    for size, kept in (
        (partial, [max(length, 2 * partial + partial // 2) for length in case.seq_lens]),
        (full, [full * next(n for n in _PAGES if n * full >= min(length, _LONG)) for length in case.seq_lens]),
    ):
        longer = with_lengths(case, tuple(new if old else 0 for old, new in zip(case.seq_lens, kept, strict=True)))
        values = None if longer is None else plain_values(longer, (case.values.seed + _SEEDS[0]) % (1 << 32))
        yield None if longer is None else changed(longer, block_size=size, values=values)


def _of_more_queries(case: AttentionCase) -> Iterator[AttentionCase | None]:
    """Some query tokens more in each sequence that has any, contexts unlike each other, and one more row of padding.

    Of a window one sequence has many queries: a tile of them may share its first key.
    """
    if isinstance(case, VarlenCase):
        most = max(case.query_lens)
        many = case.query_lens.index(most) if case.variant.window is not None and most > 1 else None
        counts = tuple(
            count + (_LONG if seq == many else 2) + seq % 5 if count else 0 for seq, count in enumerate(case.query_lens)
        )
        lengths = tuple(
            old + count - few + 5 + 3 * (seq % 5) if count else old
            for seq, (old, count, few) in enumerate(zip(case.seq_lens, counts, case.query_lens, strict=True))
        )
        padding = case.padding_tokens + 1 if case.padding_tokens else 0
        plain = plain_values(case, (case.values.seed + _SEEDS[1]) % (1 << 32))
        yield changed(case, seq_lens=lengths, query_lens=counts, padding_tokens=padding, values=plain)


def _of_another_window(case: AttentionCase) -> Iterator[AttentionCase | None]:
    """A window of some keys more, in longer sequences; and two that are longer than a tile, of which one begins one."""
    if (window := case.variant.window) is None:
        return
    several = window + _MORE_THAN_A_TILE
    for keys, kept in (
        (window + 5, [length + 9 for length in case.seq_lens]),
        (several, [length + 2 * _MORE_THAN_A_TILE + 5 for length in case.seq_lens]),
        (several, [several + _TILES for _ in case.seq_lens]),
    ):
        longer = with_lengths(case, tuple(new if old else 0 for old, new in zip(case.seq_lens, kept, strict=True)))
        if longer is not None:
            variant = msgspec.structs.replace(case.variant, window=keys)
            yield changed(longer, variant=variant, values=plain_values(longer, _SEEDS[0] ^ case.values.seed))


def _of_other_lengths(case: AttentionCase) -> Iterator[AttentionCase | None]:
    """One token more and fewer, some more, many, the first alone: with numbers of their own that tell."""
    page = max(case.page_size, 1)
    steps: tuple[Callable[[int], int], ...] = (
        lambda length: length + 1,
        lambda length: max(length, _LONG + (1 - _LONG) % (page if page <= _LONG // 2 else 1)),  # one on the last page
        lambda length: length + 5,
        lambda length: (length // (2 * page) * 2 + 1) * page + 1,  # one token on a page with an even number
        lambda length: length - 1,
        lambda length: length // 2,
        lambda length: 1,
    )
    tried = {case.seq_lens}
    for number, step in enumerate(steps):
        kept = tuple(max(step(length), 1) if length else 0 for length in case.seq_lens)
        if kept in tried:
            continue
        tried.add(kept)
        longer = with_lengths(case, kept)
        if longer is not None:
            plain = plain_values(longer, (case.values.seed + _SEEDS[0] + number) % (1 << 32))
            yield longer if number == 0 else None
            yield changed(longer, values=plain)
            if number == _MANY:  # with equal weights, where each token shows
                yield changed(longer, values=msgspec.structs.replace(plain, keys="equal"))


def _of_merge(case: MergeStatesCase) -> Iterator[MergeStatesCase]:
    """Other numbers in the same states, then states of about the same weight, in several tokens."""
    for number, seed in enumerate(_SEEDS):
        yield msgspec.structs.replace(case, seed=(case.seed + seed) % (1 << 32), outputs="normal")
        for pair in (("finite", "finite"), ("equal", "equal")):
            several = changed(
                case,
                seed=(case.seed + seed) % (1 << 32),
                outputs="normal",
                lse_pairs=(pair,),
                num_tokens=max(case.num_tokens, 3 + number),
            )
            if several is not None:
                yield several


def _of_own_problem(case: OpenCase) -> Iterator[OpenCase]:
    """Other numbers, where they have a seed; more of all that is counted; and one more of what there are several."""
    for number in range(1, _OTHER_SEEDS + 1):
        yield from _with_more(case, Integer, 0, number)
    for more in _MORE:
        yield from _with_more(case, Integer, more, more)
    for more in _MORE:
        yield from _with_more(case, Integers, more, more, besides=True)


def longer_cases(case: OpenCase) -> Iterator[OpenCase]:
    """More of all that is counted, of several numbers each by another one: of one token nothing tells K from V.

    First with larger choices of a size too, as on pages of one token each place is the first one; then with lengths of
    which each other number is a small part.
    """
    few, several = _MORE[:2]
    yield from _with_more(_with_larger_choices(case, 1), Integer | Integers, few, few)
    for numbers in _with_more(case, Integer, several, several):
        yield from _with_more(numbers, Integers, _MORE_THAN_A_TILE, few)
    yield from _with_more(case, Integer | Integers, few, few)
    yield from _with_more(_with_larger_choices(case, 2), Integer | Integers, several, several)
    yield from _with_more(case, Integer | Integers, several, several)


def _with_larger_choices(case: OpenCase, steps: int) -> OpenCase:
    """Each choice of a size so many ``steps`` larger, as far as there are larger ones."""
    changes: dict[str, Any] = {}
    for name, kind in type(case).problem.fields.items():
        value = getattr(case, name)
        if isinstance(kind, Choice) and isinstance(value, int) and not isinstance(value, bool):
            larger = sorted(one for one in kind.values if isinstance(one, int) and one > value)
            changes |= {name: larger[min(steps, len(larger)) - 1]} if larger else {}
    return msgspec.structs.replace(case, **changes)


def of_other_strides(case: OpenCase) -> Iterator[OpenCase]:
    """Make cases with other strides, as its fields combine them: which tensor's gaps are taken for another's."""
    choices = {name: kind.values for name, kind in case.problem.fields.items() if isinstance(kind, Choice)}
    strides = {name: values for name, values in choices.items() if {"", *STRIDE_KINDS}.issuperset(values)}
    for chosen in itertools.islice(itertools.product(*strides.values()), _MOST_STRIDES):
        other = msgspec.structs.replace(case, **dict(zip(strides, chosen, strict=True)))
        if other != case:
            yield other


def _with_more(
    case: OpenCase, kinds: type | UnionType, more: int, seed: int, *, besides: bool = False
) -> Iterator[OpenCase]:
    """``besides``: of several numbers there is one more, beside those that there are."""
    changes: dict[str, Any] = {}
    for name, kind in type(case).problem.fields.items():
        value = getattr(case, name)
        if isinstance(kind, Seed):
            changes[name] = value ^ seed
        elif isinstance(kind, Integer) and isinstance(kind, kinds):
            changes[name] = min(value + more, kind.high)
        elif isinstance(kind, Integers) and isinstance(kind, kinds):
            of_each = (0,) * len(value) if besides else range(more, more + len(value))
            longer = (*value, max(value, default=kind.low) + more) if besides else value
            changes[name] = tuple(
                min(one + its, kind.high) for one, its in itertools.zip_longest(longer, of_each, fillvalue=0)
            )
    try:
        other = msgspec.structs.replace(case, **changes)
    except ValueError:  # more than there may be together
        return
    if other != case:
        yield other


def rounding_cases(case: AttentionCase) -> Iterator[AttentionCase]:
    """The kernel's case, in all but lengths and numbers, where each rounding shows beside others that do not.

    Of one key; of equal keys, whose weights are 1; of few keys, in one tile; of keys the first of which is the
    heaviest, so that no maximum rises; of values some of which are equal; and of many keys.
    """
    seq = next((seq for seq, count in enumerate(case.query_counts) if count and case.seq_lens[seq]), None)
    if seq is None:
        return
    times = max(1, min(_ROWS, -(-_ROWS // case.num_q_heads)))
    bare = msgspec.structs.replace(case.values, needles=())
    alone = msgspec.structs.replace(case, **case.of_sequences([seq] * times), **case.with_own_pages(), values=bare)
    if alone.kv is not None:  # no scale that overflows, nor a power of 2, with which nothing is rounded
        alone = msgspec.structs.replace(alone, kv=msgspec.structs.replace(alone.kv, scales="scattered"))
    if case.variant.has_weighty_sinks:  # beside a sink that is far above them no key has weight enough to tell
        alone = msgspec.structs.replace(alone, variant=msgspec.structs.replace(case.variant, sinks="level"))
    plain = plain_values(case, (case.values.seed + _SEEDS[0]) % (1 << 32))
    of_signs = abs(case.scale) * _MEAN_MAGNITUDE * case.head_size
    if alone.kv is not None:
        of_k = alone.kv.head_scales(case.num_kv_heads, plain.seed).k[0]
        plain, of_signs = _with_exponent(plain, plain.logit_exponent - math.log2(of_k)), of_signs * of_k
    fine = msgspec.structs.replace(plain, keys="fine")  # of so many bits that fewer show in the scores
    recipes: tuple[tuple[int, Values], ...] = (
        (1, plain),
        (_WHOLE_TILES, _with_exponent(plain, -math.log2(of_signs), keys="equal", values="fine")),
        (_ONE_TILE, msgspec.structs.replace(plain, logit_exponent=min(plain.logit_exponent + 1, MAX_LOGIT_EXPONENT))),
        (_WHOLE_TILES, _with_exponent(plain, math.log2(_FALL / (4 * of_signs)), keys="falling", values="fine")),
        (3 * _ONE_TILE, msgspec.structs.replace(plain, values="positions")),
        (_MOST_KEYS, fine),
    )
    of_power_of_2 = (1.0, _ANOTHER_SCALE) if math.frexp(case.scale)[0] in (0.5, -0.5) else (1.0,)  # it rounds nothing
    for length, values in recipes:
        for factor in of_power_of_2 if length == _ONE_TILE else (1.0,):
            lengths = alone.with_seq_lens((length,) * times)
            made = changed(alone, **lengths, values=values, scale=factor * case.scale)
            if made is not None:
                yield made


def _with_exponent(plain: Values, exponent: float, **recipes: str) -> Values:
    within = max(MIN_LOGIT_EXPONENT, min(round(exponent), MAX_LOGIT_EXPONENT))
    return msgspec.structs.replace(plain, logit_exponent=within, **recipes)
