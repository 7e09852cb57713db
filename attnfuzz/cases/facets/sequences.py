"""Sequences, their lengths and their query tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import msgspec

from attnfuzz.cases.facets.facet import (
    Axis,
    Change,
    Changes,
    Domain,
    Facet,
    Levels,
    Options,
    Part,
    SizeRank,
    changed,
    listed,
)
from attnfuzz.cases.facets.rows import Row, query_phase, row_axes, rows_of
from attnfuzz.problems.attention import AttentionCase, VarlenCase
from attnfuzz.problems.boundaries import DEFAULT_TILES, num_splits_of, query_steps, steps_of, tile_sizes
from attnfuzz.problems.choices import min_seq_len
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Integer, Proposal, first_of, lower_integer, number_traits
from attnfuzz.problems.supports import Supports

A = TypeVar("A", bound=AttentionCase)
MoveToken = Callable[[int, int, int], int]

SEVERAL_SEQUENCES = Feature("num_seqs", ">1", "size")
RAGGED = Feature("ragged", role="size")
SEVERAL_TOKENS = Feature("seq_len", ">1", "size")
PADDING_TOKENS = Feature("padding tokens", role="empty")

_EMPTY_SEQUENCE = Feature("empty sequence", role="empty")
_NO_QUERY = Feature("no query", role="empty")
_CONTEXT = Feature("context")
_MOST_LEFT_OUT = 2
_COUNTED = Integer(0, 1 << 24, likely=(0, 1, 2))


def length_rank(length: int) -> int:
    """Ascending, with an empty sequence, which is a special case, between one token and two."""
    return 2 * length if length else 3


def keep_sequences(case: A, kept: Sequence[int]) -> A | None:
    """Only the sequences with these numbers, in this order."""
    return changed(case, **_of_kept(case, kept))


def _of_kept(case: AttentionCase, kept: Sequence[int]) -> Changes:
    place = {seq: i for i, seq in enumerate(kept)}
    needles = sorted(
        msgspec.structs.replace(needle, seq=place[needle.seq]) for needle in case.values.needles if needle.seq in place
    )
    return {"values": msgspec.structs.replace(case.values, needles=tuple(needles)), **case.of_sequences(kept)}


def with_lengths(case: A, lengths: Sequence[int], move: MoveToken | None = None) -> A | None:
    """Other lengths for the same sequences, with the query tokens that `AttentionCase.with_seq_lens` gives them.

    A needle stays at its position, or on the last token; ``move(position, old_length, new_length)`` may place it.
    """
    if move is None or not case.values.needles:
        return changed(case, seq_lens=tuple(lengths))
    moved = {
        msgspec.structs.replace(needle, position=move(needle.position, case.seq_lens[needle.seq], lengths[needle.seq]))
        for needle in case.values.needles
        if lengths[needle.seq]
    }
    values = msgspec.structs.replace(case.values, needles=tuple(sorted(moved)))
    return changed(case, seq_lens=tuple(lengths), values=values)


def rescaled(case: A, old: int, new: int) -> A | None:
    """Lengths and needles that lie in steps of ``new`` tokens as they now lie in steps of ``old``."""
    if old < 1 or new < 1:
        return None
    lengths = [rescaled_length(length, old, new) for length in case.seq_lens]
    return with_lengths(case, lengths, lambda at, _, length: min(rescaled_length(at, old, new), length - 1))


def rescaled_length(length: int, old: int, new: int) -> int:
    """As many whole steps of ``new`` tokens as there were of ``old``, and as near to the end of the last one."""
    steps, rest = divmod(length, old)
    if rest == old - 1:
        rest = new - 1
    return steps * new + min(rest, new - 1)


class Sequences(Facet[AttentionCase]):
    """How many sequences there are, and how long each is."""

    fields = ("seq_lens",)

    def told(self, case: AttentionCase) -> Iterator[str]:
        yield f"seq_lens {listed(case.seq_lens)}"

    def features(self, case: AttentionCase) -> Iterator[Feature]:
        if case.num_seqs > 1:
            yield SEVERAL_SEQUENCES
        if len(set(case.seq_lens)) > 1:
            yield RAGGED
        if 0 in case.seq_lens:
            yield _EMPTY_SEQUENCE
        if max(case.seq_lens) > 1:
            yield SEVERAL_TOKENS

    def traits(self, case: AttentionCase) -> Iterator[Feature]:
        """Features of some of the lengths, of each of them, and of the longest."""
        yield from number_traits("num_seqs", case.num_seqs) | number_traits("sum of lengths", sum(case.seq_lens))
        steps = tuple(sorted({*steps_of(case), *DEFAULT_TILES}))
        distinct = set(case.seq_lens)
        yield from set().union(*(_length_traits("some", length, steps) for length in distinct))
        yield from frozenset.intersection(*(_length_traits("every", length, steps) for length in distinct))
        yield from _length_traits("longest", max(distinct), steps)
        if len(distinct) == 1:
            yield Feature("equal lengths")

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("sequences", ("1", "several, equal", "several, ragged"), _sequences)

    def row_axes(self, domain: Domain) -> Iterator[Axis]:
        return row_axes(domain)

    def rows(self, case: AttentionCase) -> Iterable[Row]:
        return rows_of(case)

    def objections(self, case: AttentionCase, domain: Domain) -> Iterator[str]:
        most = domain.supports.max_seq_len
        if most is not None and case.max_seq_len > most:
            yield f"the case has max_seq_len={case.max_seq_len}, but the kernel declares at most {most}"
        if not domain.supports.empty_sequences and 0 in case.seq_lens:
            yield f"seq_lens[{case.seq_lens.index(0)}]=0, but the kernel declares empty_sequences=False"

    def size(self, case: AttentionCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        yield SizeRank.SEQUENCES, case.num_seqs
        ranks = tuple(map(length_rank, case.seq_lens))
        yield SizeRank.TOKENS, sum(ranks)
        yield SizeRank.EACH_TOKEN, ranks

    def shrink(self, case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
        case = yield from _fewer(case)
        low = min_seq_len(domain.supports)
        if case.num_seqs > 2:
            case = yield from lower_integer(case, max(case.seq_lens), max(1, low), _cap_lengths)
        for seq in range(case.num_seqs):
            length = case.seq_lens[seq]
            edit = _set_length(seq)
            case = yield from first_of(case, [edit(case, 1)])  # simpler than 0, too
            case = yield from lower_integer(case, length, low, edit, likely=set(_likely_lengths(case, length)))
        return case

    def simplest(self, case: AttentionCase, domain: Domain) -> Changes:
        """As many sequences, each as long as that of the simplest case."""
        return {"seq_lens": domain.simplest.seq_lens * case.num_seqs}

    def changes(self, case: AttentionCase, domain: Domain) -> Iterator[Change]:
        for seq in sorted({0, case.seq_lens.index(max(case.seq_lens))}):
            for length in (case.seq_lens[seq] - 1, case.seq_lens[seq] + 1):
                if length >= 0:
                    where = f" in sequence {seq}" if case.num_seqs > 1 else ""
                    words = f"seq_len {length} instead of {case.seq_lens[seq]}{where}"
                    yield words, {"seq_lens": _replaced(case.seq_lens, seq, length)}
        if case.num_seqs > 1:
            for seq in range(min(case.num_seqs, _MOST_LEFT_OUT)):
                kept = [other for other in range(case.num_seqs) if other != seq]
                yield f"sequence {seq} left out", _of_kept(case, kept)

    def alternatives(self, case: AttentionCase, domain: Domain) -> Iterator[Changes]:
        """Other lengths; the smallest unequal ones are 0 and 1."""
        if 0 in case.seq_lens and any(case.seq_lens):
            yield {"seq_lens": tuple(length + 1 for length in case.seq_lens)}

    def without(self, feature: Feature, case: AttentionCase, domain: Domain) -> Iterator[Changes]:
        if feature == _EMPTY_SEQUENCE:
            yield {"seq_lens": tuple(max(1, seq_len) for seq_len in case.seq_lens)}


def _fewer(case: A) -> Proposal[A]:
    """Halves, quarters, … single sequences (delta debugging); one with pages in another order; the simplest first."""
    chunk = case.num_seqs // 2
    while chunk:
        start = 0
        while start < case.num_seqs > chunk:
            kept = [seq for seq in range(case.num_seqs) if not start <= seq < start + chunk]
            candidate = keep_sequences(case, kept)
            if (yield candidate) and candidate is not None:
                case = candidate
            else:
                start += chunk
        chunk //= 2
    case = yield from first_of(case, _alone_on_moved_pages(case))
    simplest_first = sorted(range(case.num_seqs), key=lambda seq: length_rank(case.seq_lens[seq]))
    return (yield from first_of(case, [keep_sequences(case, simplest_first)]))


def _alone_on_moved_pages(case: A) -> Iterator[A | None]:
    """Where sequences share a page, the next one of all but one lies elsewhere: of a single one, in reversed order."""
    if not case.shared_tokens:
        return
    moved = msgspec.structs.replace(case.with_own_pages()["pages"], order="reversed")
    for seq in range(case.num_seqs):
        alone = keep_sequences(case, [seq])
        yield None if alone is None else changed(alone, pages=moved)


def _replaced(numbers: tuple[int, ...], i: int, number: int) -> tuple[int, ...]:
    return (*numbers[:i], number, *numbers[i + 1 :])


def _cap_lengths(case: AttentionCase, most: int) -> AttentionCase | None:
    return changed(case, seq_lens=tuple(min(length, most) for length in case.seq_lens))


def _set_length(seq: int) -> Callable[[AttentionCase, int], AttentionCase | None]:
    return lambda case, length: changed(case, seq_lens=_replaced(case.seq_lens, seq, length))


def _likely_lengths(case: AttentionCase, length: int) -> Iterator[int]:
    """Within one of the first boundaries, and those that end where ``length`` does in its page, tile or split."""
    steps = {*steps_of(case), *([num_splits_of(case)] if num_splits_of(case) > 1 else [])}
    for step in {*steps, *DEFAULT_TILES}:
        yield from (step - 1, step, step + 1)
    for step in steps:
        yield from (length % step, length % step + step)


def _sequences(case: AttentionCase) -> Levels:
    if len(case.seq_lens) == 1:
        return ("1",)
    return ("several, equal" if len(set(case.seq_lens)) == 1 else "several, ragged",)


@lru_cache(maxsize=1 << 14)
def _length_traits(whose: str, length: int, steps: tuple[int, ...]) -> frozenset[Feature]:
    places = (Feature(f"{whose} length", f" {place}") for step in steps for place in _places(length, step))
    return frozenset(places) | number_traits(f"{whose} length", length)


def _places(length: int, step: int) -> Iterator[str]:
    """Where in a page or tile the length ends."""
    rest = length % step
    yield f"ends {({0: 'with', 1: 'one past', step - 1: 'one short of'}).get(rest, 'inside')} a step of {step}"
    yield f"is {'longer' if length > step else 'no longer'} than {step}"


class QueryLens(Facet[VarlenCase]):
    """How many of each sequence's tokens are query tokens."""

    fields = ("query_lens",)

    def told(self, case: VarlenCase) -> Iterator[str]:
        yield f"query_lens {listed(case.query_lens)}"

    def features(self, case: VarlenCase) -> Iterator[Feature]:
        if max(case.query_lens) > 1:
            yield Feature("query_len", ">1", "size")
        if 0 in case.query_lens:
            yield _NO_QUERY
        if len(set(case.query_lens)) > 1:
            yield Feature("ragged queries", role="size")
        if any(0 < query_len < seq_len for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True)):
            yield _CONTEXT

    def traits(self, case: VarlenCase) -> Iterator[Feature]:
        yield from number_traits("num_tokens", case.num_rows) | number_traits("max_query_len", max(case.query_lens))

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("batch", ("decode", "prefill", "chunk", "mixed"), _batch)

    def objections(self, case: VarlenCase, domain: Domain) -> Iterator[str]:
        most = domain.supports.max_query_len
        if most is not None and case.max_query_len > most:
            yield f"the case has max_query_len={case.max_query_len}, but the kernel declares at most {most}"
        if not domain.supports.empty_sequences and 0 in case.query_lens:
            yield f"query_lens[{case.query_lens.index(0)}]=0, but the kernel declares empty_sequences=False"

    def size(self, case: VarlenCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        ranks = tuple(map(length_rank, case.query_lens))
        yield SizeRank.QUERIES, sum(ranks)
        yield SizeRank.EACH_TOKEN, ranks

    def shrink(self, case: VarlenCase, domain: Domain) -> Proposal[VarlenCase]:
        """Each sequence with fewer query tokens, or with less context before them."""
        case = yield from first_of(case, [changed(case, query_lens=tuple(min(1, n) for n in case.query_lens))])
        for seq in range(case.num_seqs):
            query_len, low = case.query_lens[seq], min_seq_len(domain.supports)
            fewer, shorter = _with_queries(seq), _with_context(seq)
            case = yield from first_of(case, [fewer(case, 1), shorter(case, 0)])  # 1 is simpler than 0, too
            likely = set(_likely_query_lens(case, query_len))
            case = yield from lower_integer(case, case.query_lens[seq], low, fewer, likely=likely)
            context = case.seq_lens[seq] - case.query_lens[seq]
            case = yield from lower_integer(case, context, 0, shorter)
        return case

    def simplest(self, case: VarlenCase, domain: Domain) -> Changes:
        return {"query_lens": tuple(min(1, query_len) for query_len in case.query_lens)}

    def without(self, feature: Feature, case: VarlenCase, domain: Domain) -> Iterator[Changes]:
        if feature == _NO_QUERY:
            lens = zip(case.query_lens, case.seq_lens, strict=True)
            yield {"query_lens": tuple(max(query_len, min(1, seq_len)) for query_len, seq_len in lens)}
        if feature == _CONTEXT:  # prefill in place of what goes on behind it; needles stay on the tokens that are left
            kept = tuple(needle for needle in case.values.needles if needle.position < case.query_lens[needle.seq])
            values = msgspec.structs.replace(case.values, needles=kept)
            yield {"seq_lens": case.query_lens, "query_lens": case.query_lens, "values": values}

    def follow(self, case: VarlenCase, changes: Changes) -> Changes:
        """A prefill stays one; otherwise there are as many query tokens, as far as the sequence still has them."""
        seq_lens = changes.get("seq_lens", ())
        is_open = len(seq_lens) == case.num_seqs and "query_lens" not in changes
        return case.with_seq_lens(seq_lens) if is_open else {}


QueryEdit = Callable[[VarlenCase, int], VarlenCase | None]


def _with_queries(seq: int) -> QueryEdit:
    """Fewer query tokens: those that are gone become context, or are gone altogether if that does not matter."""
    return lambda case, count: changed(case, query_lens=_replaced(case.query_lens, seq, count))


def _with_context(seq: int) -> QueryEdit:
    """A sequence with the same query tokens behind another number of context tokens."""

    def edit(case: VarlenCase, context: int) -> VarlenCase | None:
        lengths = _replaced(case.seq_lens, seq, context + case.query_lens[seq])
        shortened = with_lengths(case, lengths, lambda at, old, new: max(0, at - (old - new)))
        return shortened and changed(shortened, query_lens=case.query_lens)

    return edit


def _likely_query_lens(case: VarlenCase, query_len: int) -> Iterator[int]:
    """Within one of a tile of queries, and what ends where ``query_len`` does in its tile."""
    for step in query_steps(tile_sizes(case.options), case.gqa_ratio):
        yield from (step - 1, step, step + 1, query_len % step, query_len % step + step)


def _batch(case: VarlenCase) -> Levels:
    phases = {query_phase(*lens) for lens in zip(case.query_lens, case.seq_lens, strict=True)} - {"no query"}
    return (phases.pop() if len(phases) == 1 else "mixed",)


class QueryBounds(Facet[VarlenCase]):
    """By how much the lengths that a kernel is told as the longest exceed the longest."""

    fields = ("seq_slack", "query_slack")
    jumps_with = "storage"
    parts = (
        Part("seq_slack", _COUNTED, SizeRank.STORAGE, Feature("slack")),
        Part("query_slack", _COUNTED, SizeRank.STORAGE, Feature("slack")),
    )

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis(
            "bounds", ("tight", "loose"), lambda case: ("loose" if case.query_slack or case.seq_slack else "tight",)
        )


class QueryPadding(Facet[VarlenCase]):
    """Rows of q that no sequence has."""

    fields = ("padding_tokens",)
    jumps_with = "storage"
    parts = (Part("padding_tokens", _COUNTED, SizeRank.STORAGE, PADDING_TOKENS),)

    def draws(self, supports: Supports) -> Mapping[str, Sequence[int]]:
        return {"padding_tokens": (0, 0, 0, 1, 2, 3, 17)} if supports.padding_tokens else {}

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("padding tokens", ("none", "some"), lambda case: ("some" if case.padding_tokens else "none",))

    def objections(self, case: VarlenCase, domain: Domain) -> Iterator[str]:
        if case.padding_tokens and not domain.supports.padding_tokens:
            yield f"padding_tokens={case.padding_tokens}, but the kernel declares padding_tokens=False"
