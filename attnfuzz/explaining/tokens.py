"""Mistakes about which tokens count, and about where K, V or the query come from.

Tokens left out, counted twice, or made of memory past the end; another head, sequence, page, token or tensor; results
that lie in other rows. Each is replayed beside whatever variant or mask a case has.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.explaining.low_precision import TILES
from attnfuzz.explaining.mistakes import Family, Predicted, family
from attnfuzz.explaining.row import AttentionRow, Query
from attnfuzz.inputs.reference import row_weights
from attnfuzz.mistake import K_SCALE, KV_SCALES, PAST_THE_END, V_SCALE
from attnfuzz.problems.block_table import block_table_rows, num_blocks, physical_pages
from attnfuzz.problems.cases import AttentionCase, PagedDecodeCase, has_query_lens
from attnfuzz.problems.wording import plural, row_words
from attnfuzz.verdict import MOST_PLACES, Cause

OF_PADDING = "a padding row, numbered as its sequence"
"""The way of reading another query in which that is nobody's."""
_MAX_EXTRA = 512
_LARGEST_EXPONENT = 20.0
_OF_COUNTS = 1e-5
"""Between a log-sum-exp in float32 and the logarithm of a number up to that."""
_MOST_BY_NUMBER = 96
"""Tokens of a row up to which each is named by its position."""
_MOST_RANGES = 20
_WITH_PADDING = "with rows of padding as queries of its sequence"
TILES_OF_KEYS = TILES[1:]
_BLOCKS_OF_QUERIES = (8, *TILES_OF_KEYS)
_PARTS = (2, 3, 4, 8)
"""Into which kernels split the keys of one sequence."""
_STEPS = (2, 3, 4, 8)
"""From one token to the next of a stride."""
_MOST_AT_AN_END = 8
_MOST_WEIGHTS = 1 << 18
"""Of all sets of tokens that are tried in other places, each of which takes a weight for each token."""
_MOST_UNITS = 8
"""Pages or tiles that are told by their numbers."""

Keys = Float64[Tensor, "seq_len head_size"]
Values = Float64[Tensor, "seq_len v_head_size"]
Positions = tuple[int, ...]


class _Unit(NamedTuple):
    """In what steps a kernel goes through keys, and the tokens of each that it may treat otherwise than the rest."""

    size: int
    name: str
    offsets: Sequence[int]


def _units(case: AttentionCase, length: int) -> Iterator[_Unit]:
    """Also those longer than that: the first of them lies in the row as well."""
    page = max(case.page_size, 1)
    if case.page_size:
        yield _Unit(page, "page", range(page))
    for tile in TILES_OF_KEYS:  # also one as long as a page, which other pages tell from that
        yield _Unit(tile, f"tile of {tile}", range(tile))
    for parts in sorted({*_PARTS, case.partial_states} - {0, 1}):
        equal, of_pages = -(-length // parts), -(-length // page // parts) * page
        for size, name in {of_pages: f"part of {parts}, in whole pages", equal: f"part of {parts}"}.items():
            yield _Unit(size, name, tuple(sorted({0, size - 1})))


def token_sets(row: AttentionRow) -> Sequence[tuple[str, Positions]]:
    """Tokens that a kernel may treat alike by mistake, by the rule that says which they are in any row."""
    case = row.case
    beside = (("the next sequence", row.seq + 1), ("the sequence before", row.seq - 1))
    lengths = tuple((which, case.seq_lens[seq]) for which, seq in beside if 0 <= seq < case.num_seqs)
    return _token_sets(row.num_tokens, row.first_seen, case.page_size, tuple(_units(case, row.num_tokens)), lengths)


@functools.lru_cache(maxsize=8)  # as many as there are lengths in the runs of a diagnosis
def _token_sets(
    length: int, first: int, page: int, units: tuple[_Unit, ...], lengths: tuple[tuple[str, int], ...]
) -> Sequence[tuple[str, Positions]]:
    """Make token sets of a row that sees ``length`` tokens from ``first`` on, beside sequences of other ``lengths``."""
    return tuple(_made_token_sets(length, first, page, units, lengths))


def _made_token_sets(
    length: int, first: int, page: int, units: tuple[_Unit, ...], lengths: tuple[tuple[str, int], ...]
) -> Iterator[tuple[str, Positions]]:
    every = range(length)
    yield "every token but the last", tuple(every[:-1])
    yield "every token but the first", tuple(every[1:])
    for back in range(min(_MOST_AT_AN_END, length)):
        before = f"{_ordinal(back)} token" if back > 1 else "token"
        yield f"the {before} before the last" if back else "the last token", (length - 1 - back,)
    if length:
        yield "the first token", (0,)
    for count in range(2, min(_MOST_AT_AN_END, length - 1) + 1):
        yield f"the last {count} tokens", tuple(every[-count:])
        yield f"the first {count} tokens", tuple(every[:count])
    for step in (step for step in _STEPS if step != page):
        for begin in range(min(step, length)):
            yield f"every {_ordinal(step)} token, from token {begin} on", tuple(every[begin::step])
    for parts in _PARTS:
        if length % parts:
            yield f"what is left over of {parts} equal parts", tuple(every[length // parts * parts :])
    for which, other in lengths:
        if 0 < other < length:
            yield f"what lies behind the length of {which}", tuple(every[other:])
    if first:
        yield "the first token of the window", (first,)
        yield "every token of the window but the last", tuple(every[first:-1])
    for unit in units:
        yield from _of_unit(every, unit)
        size = unit.size
        if first % size:
            yield f"the first, partial {unit.name} of the window", tuple(every[first : -(-first // size) * size])
        if first:
            yield f"the first {unit.name} of the window", tuple(every[first : (first // size + 1) * size])
    for tile in TILES_OF_KEYS:  # where tiles overlap by one
        if tile - 1 < length:
            yield f"the first token of each {tile - 1} but the first", tuple(every[tile - 1 :: tile - 1])


def _of_unit(every: range, of: _Unit) -> Iterator[tuple[str, Positions]]:
    """Whole pages or tiles, and the tokens that have the same place in each of them, or in all but one."""
    length, (size, unit, offsets) = len(every), of
    last = (length - 1) // size * size
    yield f"the last {unit}", tuple(every[last:])
    if length % size:
        if length - last == 1:
            yield f"the last {unit}, of one token", (last,)
        yield f"the last, partial {unit}", tuple(every[last:])
        yield f"every full {unit}", tuple(every[:last])
    else:
        yield f"the last {unit}, where that is full", tuple(every[last:])
    yield f"the {unit} before the last", tuple(every[last - size : last])
    yield f"the first {unit}", tuple(every[:size])
    for number in range(1, min(last // size + 1, _MOST_UNITS)):
        yield f"{unit} number {number}", tuple(every[number * size : (number + 1) * size])
    yield f"every {unit} but the first", tuple(every[size:])
    yield f"every {unit} but the last", tuple(every[:last])
    yield f"every second {unit}", tuple(t for t in every if t // size % 2)
    yield f"every {unit} but each second one", tuple(t for t in every if not t // size % 2)
    for offset in offsets[:length]:
        token = "the last token" if offset == size - 1 else f"token {offset}" if offset else "the first token"
        yield f"{token} of each {unit}", tuple(every[offset::size])
        yield f"{token} of each {unit} but the first", tuple(every[size + offset :: size])
        yield f"{token} of each {unit} but the last", tuple(every[offset:last:size])
        of_last = f", where the last {unit} is full" if offset == size - 1 else f" of the last {unit}"
        yield f"{token}{of_last}", tuple(every[last + offset : last + offset + 1])
        if last:
            yield f"{token} of the {unit} before the last", (last - size + offset,)


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _by_number(row: AttentionRow) -> Iterator[tuple[str, Positions]]:
    """Tokens, and stretches of them, by their positions, as far as there are few."""
    length, every = row.num_tokens, range(row.num_tokens)
    if length <= _MOST_BY_NUMBER:
        for t in every:
            yield f"token {t}", (t,)
            if 1 < t < length - 1:
                yield f"tokens from {t} on", tuple(every[t:])
                yield f"tokens before {t}", tuple(every[:t])
    if length <= _MOST_RANGES:
        for start in every[1:]:
            for end in range(start + 2, length):
                yield f"tokens {start}-{end - 1}", tuple(range(start, end))


def miscounted(row: AttentionRow) -> Iterator[Family]:
    """Sets of tokens left out, counted twice, in the sum of weights without their values, or the other way round."""
    rules = dict(token_sets(row))
    named = list(_seen_of(row, itertools.chain(rules.items(), _by_number(row))))
    if not named:
        return
    ways = [way for way, _ in named]
    distinct = {chosen: i for i, chosen in enumerate(dict.fromkeys(chosen for _, chosen in named))}
    of_set = torch.tensor([distinct[chosen] for _, chosen in named], dtype=torch.int64, device="cpu")
    inside = _inside(distinct, row).double()
    sink = (row.sink - row.top).exp()

    def about(i: int) -> tuple[tuple[int, int], ...]:
        return tuple((row.seq, position) for position in named[i][1][:MOST_PLACES])

    without, twice, as_before = (
        ((weights := times * row.weights).sum(-1) + sink, weights @ row.v)
        for times in (1 - inside, 1 + inside, torch.ones_like(inside))
    )
    for mistake, one, several, (total, _), (_, of_values) in (
        ("tokens_dropped", "is dropped", "are dropped", without, without),
        ("tokens_counted_twice", "is counted twice", "are counted twice", twice, twice),
        (
            "values_dropped",
            "has weight, but its V is left out",
            "have weight, but their V is left out",
            as_before,
            without,
        ),
        (
            "weights_dropped",
            "is averaged, but its weight is left out of the sum that divides",
            "are averaged, but their weights are left out of the sum that divides",
            without,
            as_before,
        ),
    ):
        out = of_values / total[:, None]

        def words(i: int, one: str = one, several: str = several) -> str:
            chosen = named[i][1]
            return f"{row.tokens(chosen)} of sequence {row.seq} {one if len(chosen) == 1 else several}"

        lse = None if mistake == "values_dropped" else (row.top + total.log())[of_set]
        yield Family(mistake, out[of_set], lse, ways, words, about, lambda i: ways[i] if ways[i] in rules else "")


def behind_the_query(row: AttentionRow) -> Iterator[Predicted]:
    """Another causal limit: more tokens of the sequence than those up to the query, or fewer."""
    case, length = row.case, row.num_tokens
    if case.seen(row.row) is not None:  # a mask says which
        return
    end = min(case.seq_lens[row.seq], length + _MAX_EXTRA)
    k, v = (of(row.seq, row.kv_head)[:end] for of in (row.keys_of, row.values_of))
    dots = case.scale * (k @ row.q)
    limits, told = {"the next token": length + 1}, dict[str, str]()
    limits |= {f"{more} tokens behind the query": length + more for more in range(2, min(17, end - length + 1))}
    limits["all later tokens"] = end
    for size in (*TILES_OF_KEYS, *((case.page_size,) if case.page_size > 1 else ())):
        limits[f"later tokens of its tile of {size}"] = min(-(-length // size) * size, end)
        limits[f"later tokens of full tiles of {size}"] = max(end // size * size, length)
    query_len = len(case.rows_of(row.seq))
    context = case.seq_lens[row.seq] - query_len
    number = row.row - case.rows_of(row.seq).start
    for block in _BLOCKS_OF_QUERIES if number else ():
        for tile in TILES_OF_KEYS:
            first = context + number // block * block  # of those whose tiles are gone through together
            way = f"tiles of {tile} that the first query of a block of {block} sees"
            limits[way] = min(first // tile * tile + tile, length)
            told[way] = f"up to the tile of {tile} in which the first query of its block lies"
    if has_query_lens(case.problem):
        limits["as if it had no context"] = number + 1
        if case.gqa_ratio > 1 and query_len > 1:
            limits["as if each query head were a token"] = context + number // case.gqa_ratio + 1
        for which, other in (("the first sequence", 0), ("the last sequence", case.num_seqs - 1)):
            if other != row.seq:
                others = len(case.rows_of(other))
                limits[f"with the query length of {which}"] = max(case.seq_lens[row.seq] - others, 0) + number + 1
                limits[f"with the context of {which}"] = case.seq_lens[other] - others + number + 1
        if (longest := max(case.query_counts)) > query_len:
            limits["with the query length of the longest"] = context + query_len - longest + number + 1
        if row.seq == case.num_seqs - 1 and (padding := getattr(case, "padding_tokens", 0)):
            limits[_WITH_PADDING] = context - padding + number + 1
    for way, limit in limits.items():
        if limit == length or limit > end:
            continue
        if limit <= 0:  # nothing is averaged
            words = f"the query sees no key: its position is computed {way}"
            yield Predicted(torch.full_like(row.expected, math.nan), -math.inf, way, words)
            continue
        scores = _final_up_to(row, dots[:limit], length)
        if limit > length:
            takes = "takes" if limit - length == 1 else "take"
            which = row.tokens(range(length, limit))
            words = f"{which} of sequence {row.seq}, behind the query, {takes} weight"
            words += f": its position is computed {way}" if way.startswith("with ") else ""
        else:
            how = told.get(way, f"its position is computed {way}" if way.startswith("with ") else way)
            words = f"the query sees the first {'key' if limit == 1 else f'{limit} keys'} only, {how}"
        yield Predicted(*row.averaged(scores, v[:limit]), way, words)


def _final_up_to(row: AttentionRow, dots: Float64[Tensor, " n"], length: int) -> Float64[Tensor, " n"]:
    """Scores of the first keys, some behind the query, with the window and the bias counted from the query."""
    if len(dots) <= length:
        return row.final(torch.cat((dots, dots.new_zeros(length - len(dots)))))[: len(dots)]
    variant = row.case.variant
    scores = row.capped(dots)
    distance = torch.arange(1 - length, len(dots) - length + 1, dtype=torch.float64, device="cpu")
    numbers = variant.per_head_numbers(row.case.num_q_heads, row.case.values.seed)
    if "alibi_slopes" in numbers:
        scores = scores + numbers["alibi_slopes"][row.head] * distance
    return scores if variant.window is None else scores.masked_fill(distance <= -variant.window, -torch.inf)


def past_the_end(row: AttentionRow) -> Iterator[Family]:
    """Tokens past the sequence's end: zeros that a masked load gave, whatever the memory holds, or another's tokens."""
    if row.case.variant.alibi is None and row.num_tokens == row.case.seq_lens[row.seq]:
        counts = torch.arange(1, _MAX_EXTRA + 1, dtype=torch.float64, device="cpu")
        masked = _source_of_zeros(row)
        for number, source, way in (
            (0.0, masked, "zeros"),
            (row.poison, "read from memory that holds no token", "dead memory"),
        ):
            if not math.isfinite(number):  # it would give NaN, as much else does
                continue
            dot = torch.tensor([row.case.scale * number * float(row.q.sum())], dtype=torch.float64, device="cpu")
            score = float(row.capped(dot))
            top = max(row.top, score)
            own = row.total * math.exp(row.top - top)
            mass = counts * math.exp(score - top)
            out = (own * row.expected + mass[:, None] * number) / (own + mass)[:, None]
            lse = top + (own + mass).log()
            counted = _counted(row, way)
            which = torch.tensor([number for _, number in counted], dtype=torch.int64, device="cpu")
            words = _extra_words(source, [number for _, number in counted])
            yield Family(PAST_THE_END, out[which], lse[which], [name for name, _ in counted], words)
            if number == 0.0 and (filled := _filling_pages(row)):
                which = torch.tensor([count - 1 for _, count in filled], dtype=torch.int64, device="cpu")
                ways = [f"zeros behind each page, up to {tile}" for tile, _ in filled]
                told = [
                    f"{count} rows of zeros take weight: those that fill each page of {row.case.page_size} up to {tile}"
                    for tile, count in filled
                ]
                yield Family(PAST_THE_END, out[which], lse[which], ways, told.__getitem__)
    yield from slots_past_the_end(row)


def _source_of_zeros(row: AttentionRow) -> str:
    masked = "K and V masked to zero, the score not to -inf"
    if not row.case.partial_states:  # there a part's own log-sum-exp tells
        masked += "; or a part without keys has LSE 0"
    return masked


def zeros_counted(row: AttentionRow) -> int | None:
    """How many zeros past the end, of score 0, give what came out of a row, be it one without keys; None if none do."""
    if row.got_lse is None or not row.is_finite or row.got_lse > _LARGEST_EXPONENT or row.case.variant.alibi:
        return None
    own = math.exp(min(row.lse, _LARGEST_EXPONENT))
    count = round(math.exp(row.got_lse) - own)
    if not 0 < count <= _MAX_EXTRA or abs(math.log(own + count) - row.got_lse) > _OF_COUNTS:
        return None
    out = row.expected * own / (own + count)
    return count if bool(((row.got - out).abs() <= 2 * row.bound).all()) else None


def of_zeros(row: AttentionRow, count: int) -> Cause:
    """The mistake by which a row has ``count`` zeros past its end as tokens."""
    words = _extra_words(_source_of_zeros(row), [count - 1])(0)
    return Cause(mistake=PAST_THE_END, way=f"{count} of zeros", words=words)


def _filling_pages(row: AttentionRow) -> list[tuple[int, int]]:
    """Tiles that are longer than a page, and how many rows of them are no part of any of the row's pages."""
    page = row.case.page_size
    pages = -(-row.num_tokens // page) if page > 1 else 0
    counts = [(tile, pages * (tile - page)) for tile in TILES_OF_KEYS]
    return [(tile, count) for tile, count in counts if 0 < count <= _MAX_EXTRA]


def _counted(row: AttentionRow, source: str) -> list[tuple[str, int]]:
    """How many tokens more than the first, by each way of rounding up that leads there, and by their number."""
    found = []
    for size in sorted({row.case.page_size or 1, 4, 8, *TILES_OF_KEYS}):
        if extra := -row.num_tokens % size:
            found.append((f"{source} up to the end of a tile of {size}", extra - 1))
    return found + [(f"{number + 1} of {source}", number) for number in range(_MAX_EXTRA)]


def slots_past_the_end(row: AttentionRow) -> Iterator[Family]:
    """Find the slots behind a sequence's last token, where some of them hold tokens.

    Those of another sequence on a page that both share, on one that an unused entry of the block table names, or on
    page 0, which many kernels read where no entry is.
    """
    case = row.case
    if not isinstance(case, PagedDecodeCase) or row.num_tokens < case.seq_lens[row.seq] or case.variant.alibi:
        return
    table = block_table_rows(case)[row.seq]
    owned = table[: -(-case.seq_lens[row.seq] // case.block_size)]
    left = -case.seq_lens[row.seq] % case.block_size
    zeros = (0,) * -(-_MAX_EXTRA // case.block_size)
    yield from _behind_the_last(row, table, 0, "through the table", "where its row of the block table leads")
    yield from _behind_the_last(row, (*owned, *zeros), left, "on page 0", "from page 0, in place of pages it has not")


def _behind_the_last(row: AttentionRow, table: Sequence[int], least: int, way: str, source: str) -> Iterator[Family]:
    """More than ``least`` slots from a sequence's end on, if ``table`` has its pages, up to one of which nothing
    follows."""
    case, length = row.case, row.case.seq_lens[row.seq]
    if not isinstance(case, PagedDecodeCase):
        return
    size, total, tokens = case.block_size, num_blocks(case), _tokens_of_pages(case)
    found = list[tuple[int, int] | None]()
    for position in range(length, min(len(table) * size, length + _MAX_EXTRA)):
        page, offset = table[position // size], position % size
        token = tokens.get((page, offset))
        if not 0 <= page < total or (token is None and not math.isfinite(row.poison)):
            break
        found.append(token)
    if not any(found):
        return

    if len(found) <= least:
        return
    k, v = (torch.cat((of(row.seq, row.kv_head), _in_slots(row, of, found))) for of in (row.keys_of, row.values_of))
    ends = torch.arange(length + least + 1, len(k) + 1, device="cpu")
    dots = row.case.scale * (k @ row.q)
    scores = torch.cat((row.log_weights if length else dots[:0], row.capped(dots[length:])))
    masked = scores.masked_fill(torch.arange(len(k), device="cpu") >= ends[:, None], -torch.inf)
    out, lse = row.average(masked, v)
    numbers = range(least, least + len(ends))
    yield Family(PAST_THE_END, out, lse, [f"{i + 1} {way}" for i in numbers], _extra_words(source, numbers))


def _in_slots(
    row: AttentionRow, of: Callable[[int, int], Tensor], slots: Sequence[tuple[int, int] | None]
) -> Float64[Tensor, "slots size"]:
    """Keys or values, as ``of`` gives those of a sequence, of tokens in slots; what dead memory holds in the others."""
    of_seq = functools.cache(lambda seq: of(seq, row.kv_head))
    nothing = of_seq(row.seq).new_full(of_seq(row.seq).shape[1:], row.poison)
    return torch.stack([nothing if slot is None else of_seq(slot[0])[slot[1]] for slot in slots])


def _tokens_of_pages(case: PagedDecodeCase) -> dict[tuple[int, int], tuple[int, int]]:
    """Map each page and offset that holds a token to a sequence and position."""
    return {
        (page, position % case.block_size): (seq, position)
        for seq, pages in enumerate(physical_pages(case))
        for i, page in enumerate(pages)
        for position in range(i * case.block_size, min((i + 1) * case.block_size, case.seq_lens[seq]))
    }


def _extra_words(source: str, numbers: Sequence[int]) -> Callable[[int], str]:
    """Name one token more than each of ``numbers``."""

    def words(i: int) -> str:
        number = numbers[i]
        more = " or more" if number + 1 == _MAX_EXTRA else ""  # their number shows no longer in the result
        token, take = ("tokens", "take") if number else ("token", "takes")
        return f"{number + 1}{more} {token} past the end of the sequence {take} weight ({source})"

    return words


_NEAR = 8
"""Rows and heads on either side, of which a long prompt has thousands."""


def _attend(row: AttentionRow, k: Keys, v: Values, q: Tensor | None = None) -> tuple[Tensor, float]:
    """The row with other keys, values or query of the same positions."""
    return row.given(row.case.scale * (k @ (row.q if q is None else q)), v)


def _elsewhere(row: AttentionRow, k: Keys, v: Values, way: str, words: str) -> Iterator[Predicted]:
    """K and V from other places, or one of them alone."""
    for which, keys, values in (("", k, v), (", for K alone", k, row.v), (", for V alone", row.k, v)):
        yield Predicted(*_attend(row, keys, values), way + which, words + which)


def another_head(row: AttentionRow) -> Iterator[Predicted]:
    """K and V, or one of them, of another KV head, by the formula that leads there."""
    read = functools.cache(
        lambda head: tuple(of(row.seq, head)[: row.num_tokens] for of in (row.keys_of, row.values_of))
    )
    for formula, head in row.other_kv_heads():
        k, v = read(head)
        for what, way, keys, values in (("", "", k, v), ("K of ", "K, ", k, row.v), ("V of ", "V, ", row.k, v)):
            words = f"query head {row.head} reads {what}KV head {head}, expected {row.kv_head}"
            yield Predicted(*_attend(row, keys, values), f"{way}{formula}", words)


def another_sequence(row: AttentionRow) -> Iterator[Predicted]:
    """K and V of another sequence: all of it, or as many tokens as this one has."""
    case = row.case
    for way, seq in row.other_seqs():
        if not case.seq_lens[seq]:
            continue
        k, v = row.keys_of(seq, row.kv_head), row.values_of(seq, row.kv_head)
        first = "the first token" if row.num_tokens == 1 else f"the first {row.num_tokens} tokens"
        for count, what in ((None, "K and V"), (row.num_tokens, first)):
            if count is not None and count > len(k):
                continue
            keys, values = k[:count], v[:count]
            if len(keys) == row.num_tokens:  # which is both
                what = first
            words = f"sequence {row.seq} reads {what} of sequence {seq}"
            if count is None:
                scores = _final_up_to(row, case.scale * (keys @ row.q), len(keys))
                yield Predicted(*row.averaged(scores, values), f"{way}, all of it", words)
            else:
                yield from _elsewhere(row, keys, values, f"{way}, as long as this one", words)


def another_length(row: AttentionRow) -> Iterator[Predicted]:
    """The keys of a sequence up to the length of another: fewer, or what lies behind its last one as well.

    Where that is dead memory of which nothing follows, or nothing is known of what lies there, neither is of the row.
    """
    case, own = row.case, row.num_tokens
    variant = case.variant
    if own != case.seq_lens[row.seq] or has_query_lens(case.problem):
        return
    if variant.window is not None or variant.alibi is not None:
        return
    far = {f"sequence {seq}": seq for seq in range(min(case.num_seqs, _MOST_SEQUENCES)) if seq != row.seq}
    for way, other in (*row.other_seqs(), *far.items()):
        length = case.seq_lens[other]
        if length == own or length > own + _MAX_EXTRA:
            continue
        words = f"sequence {row.seq} is taken to be as long as sequence {other}: {plural(length, 'token')}, not {own}"
        if not length:
            yield Predicted(torch.zeros_like(row.expected), float(row.sink), way, words)
            continue
        slots = _slots_behind(row, length)
        if slots is None:
            yield Predicted(torch.full_like(row.expected, math.nan), math.nan, way, words)
            continue
        k, v = (of(row.seq, row.kv_head)[:length] for of in (row.keys_of, row.values_of))
        if slots:
            more = (_in_slots(row, of, slots) for of in (row.keys_of, row.values_of))
            k, v = (torch.cat(parts) for parts in zip((k, v), more, strict=True))
        yield Predicted(*row.averaged(row.capped(case.scale * (k @ row.q)), v), way, words)


def _slots_behind(row: AttentionRow, length: int) -> list[tuple[int, int] | None] | None:
    """List what lies in the slots from the last key of a sequence on, to where it would end if it had this length."""
    case = row.case
    if length <= row.num_tokens:
        return []
    found: list[tuple[int, int] | None] = [None] * (length - row.num_tokens)
    if isinstance(case, PagedDecodeCase):
        table, owners = block_table_rows(case)[row.seq], _tokens_of_pages(case)
        if length > len(table) * case.block_size:
            return None
        at = [(table[t // case.block_size], t % case.block_size) for t in range(row.num_tokens, length)]
        if not all(0 <= page < num_blocks(case) for page, _ in at):
            return None
        found = [owners.get(place) for place in at]
    return found if math.isfinite(row.poison) or None not in found else None


def through_the_table(row: AttentionRow) -> Iterator[Predicted]:
    """Pages that are found through the wrong entry of the block table."""
    case = row.case
    if not isinstance(case, PagedDecodeCase) or not row.num_tokens:
        return
    size, table = case.block_size, block_table_rows(case)
    own, last, power = table[row.seq], len(table[row.seq]) - 1, 1 << (size - 1).bit_length()
    of, positions = "of the block table", range(row.num_tokens)

    def of_first(unit: int, entries: Sequence[int]) -> Callable[[int], int]:
        return lambda t: entries[t // unit * unit // size]

    through_the_first = f"every page is read through the first entry {of}"
    rules: list[tuple[str, str, Callable[[int], int]]] = [  # the page that each token is read from
        ("the next entry", f"a page is read through the next entry {of}", lambda t: own[min(t // size + 1, last)]),
        (
            "the entry before",
            f"a page is read through the entry before its own {of}",
            lambda t: own[max(t // size - 1, 0)],
        ),
        ("the first entry", through_the_first, lambda t: own[0]),
        ("the page's number", "a page's number in its sequence is taken for a physical page", lambda t: t // size),
        # a shift in place of a division
        (
            "pages of a power of 2",
            f"the entry {of} is that of position // {power}, not // {size}",
            lambda t: own[t // power],
        ),
    ]
    flat, needed = [entry for entries in table for entry in entries], -(-max(case.seq_lens) // size)
    if case.num_seqs > 1:  # of the first sequence it is the page's number
        place = f"{len(own)} x the sequence + the page"
        words = f"the place of an entry in the block table, {place}, is taken for what it holds"
        rules.append(("the place of an entry", words, lambda t: len(own) * row.seq + t // size))
    if needed < len(own):
        words = f"rows {of} are taken to be {needed} long, as the longest sequence needs, not {len(own)}"
        rules.append(("rows as long as needed", words, lambda t: flat[row.seq * needed + t // size]))
    for tile in (tile for tile in TILES_OF_KEYS if tile > size):
        words = f"all of a tile of {tile} is read from the page of its first token"
        words = through_the_first if tile >= row.num_tokens else words
        rules.append((f"one page for a tile of {tile}", words, of_first(tile, own)))
    for way, other in row.other_seqs():
        words = f"pages of sequence {row.seq} are read through sequence {other}'s row {of}"
        if len(table[other]) * size >= row.num_tokens:
            rules.append((f"the row of {way}", words, of_first(1, table[other])))
    owners = _tokens_of_pages(case)
    for way, words, page_of in rules:
        pages = [page_of(t) for t in positions]
        slots = [owners.get((page, t % size)) for t, page in enumerate(pages)]
        is_outside = not all(0 <= page < num_blocks(case) for page in pages)
        is_unknown = None in slots and not math.isfinite(row.poison)
        is_nowhere = not any(slots)  # dead memory is alike everywhere, so that no place is borne out
        if slots == [(row.seq, t) for t in positions]:
            continue
        if is_outside or is_unknown or is_nowhere:
            if math.isfinite(row.poison):  # where that is NaN, all of it would be given by NaN
                yield Predicted(torch.full_like(row.expected, torch.nan), math.nan, way, words)
            continue
        k, v = (_in_slots(row, of_seq, slots) for of_seq in (row.keys_of, row.values_of))
        yield from _elsewhere(row, k, v, way, words)


_MOST_SEQUENCES = 8
_MOST_PAGES = 16


def another_page(row: AttentionRow) -> Iterator[Predicted]:
    """One page of the sequence, or its K or V, replaced by a page that it or a sequence beside it owns."""
    case = row.case
    if not isinstance(case, PagedDecodeCase) or not 0 < row.num_tokens <= _MOST_PAGES * case.block_size:
        return
    size, own = case.block_size, -(-row.num_tokens // case.block_size)
    read = functools.cache(lambda seq: tuple(of(seq, row.kv_head) for of in (row.keys_of, row.values_of)))
    for page in range(own):
        tokens = slice(page * size, min((page + 1) * size, row.num_tokens))
        count = tokens.stop - tokens.start
        here = ((row.seq, other) for other in (page - 1, page + 1, 0, own - 1))
        beside = ((row.seq + step, other) for step in (-1, 1) for other in (page, 0))
        for seq, other in dict.fromkeys((*here, *beside)):
            if not 0 <= seq < case.num_seqs or other < 0 or (seq, other) == (row.seq, page):
                continue
            if case.seq_lens[seq] - other * size < count:
                continue
            k, v = (part[other * size : other * size + count] for part in read(seq))
            keys, values = row.k.clone(), row.v.clone()
            keys[tokens], values[tokens] = k, v
            words = f"page {page} of sequence {row.seq} is read from page {other} of sequence {seq}"
            way = f"page {page} from page {other} of sequence {seq}"
            yield from _elsewhere(row, keys, values, way, words)


def another_token(row: AttentionRow) -> Iterator[Family]:
    """Tokens that are read from the places of others: an offset has too few bits, or is off by one in some places."""
    page, found = row.case.page_size, list[Predicted]()
    for size in sorted({page // 2, *TILES_OF_KEYS}):
        if 0 < size < min(page, row.num_tokens):
            sources = [t - t % page + t % page % size for t in range(row.num_tokens)]
            way = f"offsets modulo {size}" if 2 * size != page else "offsets modulo half of a page"
            words = _moved_words(row, [t for t, source in enumerate(sources) if source != t], sources)
            found += _elsewhere(row, row.k[sources], row.v[sources], way, words)
    for way, span in (("positions masked", row.num_tokens), ("offsets masked", page)) if page & page - 1 > 0 else ():
        masked = [t - t % page + (t % span & page - 1) for t in range(row.num_tokens)]
        if max(masked, default=row.num_tokens) < row.num_tokens:  # else it reads what lies behind the sequence
            position = "position" if span != page else f"(position % {page})"
            words = f"the offset in a page is {position} & {page - 1}, not position % {page}"
            found += _elsewhere(row, row.k[masked], row.v[masked], way, words)
    yield from family("another_token", found)
    named = _named_sets(row)
    for step, where in ((-1, "before"), (1, "behind")):
        last = row.num_tokens - 1
        inside = [(way, chosen) for way, chosen in named if min(chosen) + step >= 0 and max(chosen) + step <= last]
        sources = [min(max(t + step, 0), last) for t in range(row.num_tokens)]

        def told(chosen: Positions, sources: Sequence[int] = sources) -> str:
            return _moved_words(row, chosen, sources)

        ways = [f"{way}, from the token {where} it" for way, _ in inside]
        sets = [chosen for _, chosen in inside]
        yield from _of_some_tokens(("another_token",) * 3, row, ways, sets, row.k[sources], row.v[sources], told)


def unscaled_tokens(row: AttentionRow) -> Iterator[Family]:
    """Tokens of an 8-bit cache that are not multiplied by its scales, where others are."""
    if row.kv_scales is None:
        return
    named = _named_sets(row)
    ways, sets = [f"left out of {way}" for way, _ in named], [chosen for _, chosen in named]
    of_k, of_v = row.kv_scales[:, row.kv_head].tolist()

    def words(chosen: Positions) -> str:
        return f"{row.tokens(chosen)} of sequence {row.seq} {_are(chosen)} read without the scales of the cache"

    yield from _of_some_tokens((KV_SCALES, K_SCALE, V_SCALE), row, ways, sets, row.k / of_k, row.v / of_v, words)


def _named_sets(row: AttentionRow) -> list[tuple[str, Positions]]:
    """Keep `token_sets` of which the row sees something; of a long row the first ones, which name its ends."""
    return list(itertools.islice(_seen_of(row, token_sets(row)), _MOST_WEIGHTS // max(row.num_tokens, 1)))


def _seen_of(row: AttentionRow, sets: Iterable[tuple[str, Positions]]) -> Iterator[tuple[str, Positions]]:
    """Keep ``sets`` of which the row sees something, without what it does not."""
    seen = set(row.seen)
    if len(seen) == row.num_tokens:
        return (one for one in sets if one[1])
    return ((way, chosen) for way, every in sets if (chosen := tuple(t for t in every if t in seen)))


def _inside(sets: Collection[Positions], row: AttentionRow) -> Bool[Tensor, "sets seq_len"]:
    """Which tokens are in each set."""
    chosen, counts = (
        torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        for numbers in (itertools.chain.from_iterable(sets), map(len, sets))
    )
    inside = torch.zeros(len(sets), row.num_tokens, dtype=torch.bool, device="cpu")
    inside[torch.arange(len(sets), device="cpu").repeat_interleave(counts), chosen] = True
    return inside


def _are(tokens: Positions | Sequence[int]) -> str:
    return "is" if len(tokens) == 1 else "are"


def _moved_words(row: AttentionRow, moved: Sequence[int], sources: Sequence[int]) -> str:
    there, of = row.tokens([sources[t] for t in moved]), "its" if len(moved) == 1 else "their"
    return f"{row.tokens(moved)} of sequence {row.seq} {_are(moved)} read from {there}, in place of {of} own"


def _of_some_tokens(
    mistakes: tuple[str, str, str],
    row: AttentionRow,
    ways: Sequence[str],
    sets: Sequence[Positions],
    k: Keys,
    v: Values,
    words: Callable[[Positions], str],
) -> Iterator[Family]:
    """The tokens of each set have these keys and values, or one of both, and the others have their own.

    ``mistakes``: of both, of the keys alone, and of the values alone.
    """
    if not sets:
        return
    inside = _inside(sets, row)
    own = row.log_weights.expand(inside.shape)
    others = torch.where(inside, row.final(row.case.scale * (k @ row.q)), own)
    for mistake, which, scores, is_of_v in zip(
        mistakes, ("", ", for K alone", ", for V alone"), (others, others, own), (True, False, True), strict=True
    ):
        terms = torch.cat((scores, row.sink.expand(len(sets), 1)), -1)
        weights = terms.softmax(-1)[:, :-1]
        out = (weights * ~inside) @ row.v + (weights * inside) @ v if is_of_v else weights @ row.v

        def told(i: int, which: str = which) -> str:
            return words(sets[i]) + which

        yield Family(mistake, out, terms.logsumexp(-1), [way + which for way in ways], told)


def another_tensor(row: AttentionRow) -> Iterator[Predicted]:
    """K and V confused, as far as their heads are large enough for that, or V shifted against K."""
    size = row.v.shape[1]
    if size <= row.k.shape[1]:
        words = "K is read in place of V"
        yield Predicted(*_attend(row, row.k, row.k[:, :size]), words, words)
    if size == row.k.shape[1]:
        for words, v in (("V is read in place of K", row.v), ("K and V are exchanged", row.k)):
            yield Predicted(*_attend(row, row.v, v), words, words)
    for where, step in (("behind", 1), ("before", -1)) if row.num_tokens > 1 else ():
        words = f"V is read one token {where} its K"
        yield Predicted(*_attend(row, row.k, row.v.roll(-step, 0)), words, words)
        within = [min(max(t + step, 0), row.num_tokens - 1) for t in range(row.num_tokens)]
        yield Predicted(*_attend(row, row.k, row.v[within]), f"{words}, within the sequence", words)


_PADS = (1, 4, 8, 16, 32, 64)
"""Columns that a plane of weights may have besides one for each token."""
_MOST_HEADS = 128


def weights_of_another_stride(row: AttentionRow) -> Iterator[Predicted]:
    """Weights of all query heads that are stored with one row stride and read with another.

    Row r is then read r times the difference beside its place: from another head's weights, or from nobody's.
    """
    case, length = row.case, row.num_tokens
    if not 1 < case.num_q_heads <= _MOST_HEADS:
        return
    heads = (Query(case=case, row=row.row, head=head) for head in range(case.num_q_heads))
    rows = torch.stack([row_weights(case, row.row, one.head, row.scores_of(one))[0] for one in heads])
    every = range(case.num_q_heads)
    numbered = {"": list(every)}
    if case.num_kv_heads > 1:
        numbered[" of its group"] = [head % case.gqa_ratio for head in every]
    for pad in _PADS:
        for stored, read in ((length, length + pad), (length + pad, length)):
            plane = torch.nn.functional.pad(rows, (0, stored - length)).flatten()
            plane = torch.nn.functional.pad(plane, (0, len(rows) * pad))
            where = "behind" if read > stored else "before"
            for of, number in numbered.items():
                starts = [head * stored + number[head] * (read - stored) for head in every]
                given = torch.stack([plane[at : at + length] for at in starts])
                if torch.equal(given[row.head], rows[row.head]):
                    continue
                words = (
                    f"the weights of query head {row.head} are read {number[row.head] * pad} places {where} their own, "
                    f"as if rows of weights{of} were {read} long, not {stored}"
                )
                yield Predicted(given[row.head] @ row.v, None, f"{pad} {where}{of}", words)


def single_token(row: AttentionRow) -> Iterator[Predicted]:
    """The output is the value of one token."""
    if row.num_tokens < 2:
        return
    heaviest, first = int(row.log_weights.argmax()), row.seen[0] if row.seen else 0
    for way, t in (("heaviest", heaviest), ("last", row.num_tokens - 1), ("first", first)):
        words = f"the output is V of {row.tokens([t])} of sequence {row.seq} alone"
        yield Predicted(row.v[t], None, f"the {way}", words)


def another_row(row: AttentionRow) -> Iterator[Family]:
    """The result of another query, or its query with this row's keys; no result at all."""
    case = row.case
    found, of_query = [], []
    rules = {"numbered as its sequence": row.seq, "the first": 0, "the last": case.num_rows - 1}
    others = ((rule, at) for rule, at in rules.items() if at != row.row and at < case.num_rows)
    by_rule = [(f"row {rule}", Query(case=case, row=at, head=row.head)) for rule, at in others]
    near = ((f"{one.row - row.row:+d} rows, {one.head - row.head:+d} heads", one) for one in _other_queries(row))
    for way, other in (*by_rule, *near):
        q = row.values.q[other.row, other.head].double()
        name = f"{row_words(case, other.row)}, head {other.head}"
        if other.num_tokens:
            found.append(Predicted(*_result_of(row, other), way, f"this is the result of {name}"))
        of_query.append(Predicted(*_attend(row, row.k, row.v, q), way, f"the query of {name} is read"))
    padding = range(case.num_rows, case.num_rows + getattr(case, "padding_tokens", 0))
    if row.seq in padding and math.isfinite(row.poison):
        q, words = torch.full_like(row.q, row.poison), f"row {row.seq} of q is read, which holds no query"
        of_query.append(Predicted(*_attend(row, row.k, row.v, q), OF_PADDING, words))
    yield from family("another_row", found)
    yield from family("another_query", of_query)
    zero = torch.zeros_like(row.v[0]) if row.num_tokens else row.got.new_zeros(len(row.got))
    words = "out and lse are those of a row without keys"
    is_out_right = bool(((row.got - row.expected).abs() <= row.bound).all())
    is_lse_right = row.got_lse is not None and abs(row.got_lse - row.lse) <= row.lse_bound
    if row.got_lse is not None and (is_out_right or not is_lse_right):  # else only the output is 0
        yield from family("treated_as_empty", [Predicted(zero, float(row.sink), "no keys", words)])
    yield from family("output_is_zero", [Predicted(zero, None, "zero", "the output is 0")])


def _other_queries(row: AttentionRow) -> Iterator[Query]:
    """Find queries of rows near by, and of other heads in the same row and its neighbours, far ones if by a rule."""
    near = range(max(0, row.head - _NEAR), min(row.case.num_q_heads, row.head + _NEAR + 1))
    heads = sorted({*near, *(head for _, head in row.other_heads())})
    for other in range(max(0, row.row - _NEAR), min(row.case.num_rows, row.row + _NEAR + 1)):
        for head in heads:
            if (other, head) != (row.row, row.head) and (head == row.head or abs(other - row.row) <= 1):
                yield Query(case=row.case, row=other, head=head)


def _result_of(row: AttentionRow, other: Query) -> tuple[Tensor, float]:
    """The right result of another row."""
    weights, lse = row_weights(row.case, other.row, other.head, row.scores_of(other))
    return weights @ row.values_of(other.seq, other.kv_head)[: other.num_tokens], float(lse)


def displaced(row: AttentionRow) -> Iterator[Predicted]:
    """Results that lie where they would if each sequence had as many query tokens as a padded batch gives it."""
    case = row.case
    counts = [len(case.rows_of(seq)) for seq in range(case.num_seqs)]
    if case.num_seqs < 2 or not has_query_lens(case.problem):
        return
    given = getattr(case, "max_query_len", max(counts))
    strides: dict[str, int] = {}
    for longest, what in ((max(counts), "the longest"), (given, "max_query_len")):
        strides[f"as many query tokens as {what}"] = longest
        for step in (2, 4, 8, 16, 32, 64):
            strides[f"a multiple of {step} query tokens, for {what}"] = -(-longest // step) * step
    for way, stride in strides.items():
        written = {seq * stride + j: one for seq in range(case.num_seqs) for j, one in enumerate(case.rows_of(seq))}
        source = written.get(row.row)
        if source == row.row:
            continue
        out, lse = torch.zeros_like(row.expected), -math.inf
        if source is not None and case.row_lens[source]:
            out, lse = _result_of(row, Query(case=case, row=source, head=row.head))
        yield Predicted(out, lse, way, f"output rows lie as if each sequence had {stride} query tokens")
