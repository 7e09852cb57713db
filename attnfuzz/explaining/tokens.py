"""Mistakes about which tokens count, and about where K, V or the query come from.

Tokens left out, counted twice, or made of memory past the end; another head, sequence, page, token or tensor.
"""

import functools
import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.explaining.mistakes import Family
from attnfuzz.explaining.row import AttentionRow, Query, softmax_average
from attnfuzz.problems.block_table import block_table_rows, num_blocks, physical_pages
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.wording import row_words
from attnfuzz.verdict import MOST_PLACES, PAST_THE_END

__all__ = [
    "another_head",
    "another_page",
    "another_row",
    "another_sequence",
    "another_tensor",
    "at_an_edge",
    "behind_the_query",
    "counted_twice",
    "dropped",
    "dropped_from_v",
    "past_the_end",
    "periodic",
    "single_token",
    "slots_past_the_end",
]

_MAX_NUMBERS = 1 << 18
"""Predicted numbers of one family: bounds the time of a diagnosis."""

_MAX_EXTRA = 512
_TILES = (16, 32, 64, 128)

Ranges = Int64[Tensor, "ranges 2"]
Keys = Float64[Tensor, "seq_len head_size"]
Values = Float64[Tensor, "seq_len v_head_size"]


def dropped(row: AttentionRow) -> Iterator[Family]:
    """A range of tokens left out of weights and sum, each of those at an edge by itself first.

    Of the others there are so many that one may come near to any small error, and then its neighbours do, too.
    """
    for edge in _edges(row):
        yield _left_out(row, edge[None])
    for ranges in _ranges(row):
        yield _left_out(row, ranges)


def at_an_edge(row: AttentionRow) -> Family:
    """The last token left out, those of the last page or tile, or the first token: hardly one fits by chance."""
    return _left_out(row, _edges(row))


def _edges(row: AttentionRow) -> Ranges:
    length = row.num_tokens
    size = row.case.page_size or _TILES[0]
    ranges = [(length - 1, length), ((length - 1) // size * size, length), (0, 1)]
    return torch.tensor(ranges, dtype=torch.int64, device="cpu")


def _left_out(row: AttentionRow, ranges: Ranges) -> Family:
    weighted = _weighted(row)
    nothing = torch.zeros_like(weighted[:1])
    before = torch.cat((nothing, weighted.cumsum(0)))[ranges[:, 0]]
    behind = torch.cat((weighted.flip(0).cumsum(0).flip(0), nothing))[ranges[:, 1]]
    left = before + behind  # not all minus the range: beside a heavy token, nothing would be left of the others
    return Family(
        "tokens_dropped",
        left[:, :-1] / left[:, -1:],
        row.top + left[:, -1].log(),
        _names(row, ranges, "is dropped", "are dropped"),
        _places(row, ranges),
    )


def behind_the_query(row: AttentionRow) -> Iterator[Family]:
    """Tokens of the sequence that come after the query token, from the next one on."""
    last = min(row.case.seq_lens[row.seq], row.num_tokens + _MAX_EXTRA)
    if last > row.num_tokens:
        k, v = (of(row.seq, row.kv_head)[:last] for of in (row.keys_of, row.values_of))
        out, lse = _of_more_tokens(row, k, v)
        yield Family(
            "keys_behind_the_query",
            out,
            lse,
            lambda i: _behind(row, row.num_tokens + i + 1),
            lambda i: _tokens_of(row, row.num_tokens, row.num_tokens + i + 1),
        )


def _of_more_tokens(
    row: AttentionRow, k: Keys, v: Values
) -> tuple[Float64[Tensor, "ends v_head_size"], Float64[Tensor, " ends"]]:
    """What the first of these tokens give: one more than the row has, two more, up to all."""
    ends = torch.arange(row.num_tokens + 1, len(k) + 1, device="cpu")
    scores = (row.case.scale * (k @ row.q)).masked_fill(torch.arange(len(k), device="cpu") >= ends[:, None], -torch.inf)
    return softmax_average(scores, v.expand(len(ends), -1, -1))


def _behind(row: AttentionRow, end: int) -> str:
    verb = "takes" if end - row.num_tokens == 1 else "take"
    return f"{row.tokens(range(row.num_tokens, end))} of sequence {row.seq}, behind the query, {verb} weight"


def counted_twice(row: AttentionRow) -> Iterator[Family]:
    """A range of tokens counted twice."""
    for ranges in _ranges(row):
        masses, sums = _range_sums(row, ranges)
        total = row.weights.sum()
        counted = total + masses
        yield Family(
            "tokens_counted_twice",
            (total * row.expected + sums) / counted[:, None],
            row.top + counted.log(),
            _names(row, ranges, "is counted twice", "are counted twice"),
            _places(row, ranges),
        )


def dropped_from_v(row: AttentionRow) -> Iterator[Family]:
    """Tokens whose weight is in the sum, but whose value is not in the output."""
    for ranges in _ranges(row):
        _, sums = _range_sums(row, ranges)
        out = row.expected - sums / row.weights.sum()
        yield Family(
            "values_dropped",
            out,
            None,
            _names(row, ranges, "has weight, but its V is left out", "have weight, but their V is left out"),
            _places(row, ranges),
        )


def periodic(row: AttentionRow) -> Iterator[Family]:
    """The same place of every page or tile left out or, where tiles overlap, counted twice."""
    periods = {tile: f"tile of {tile}" for tile in _TILES} | {tile - 1: f"{tile - 1} tokens" for tile in _TILES}
    if row.case.page_size:
        periods[row.case.page_size] = "page"
    for period, unit in periods.items():
        if 1 < period < row.num_tokens:
            token, place = torch.arange(row.num_tokens, device="cpu"), torch.arange(period, device="cpu")
            of_every = f"of every {unit}"
            offsets = token % period == place[:, None]
            yield _scaled("tokens_dropped", row, (~offsets).double(), f"{of_every} is dropped")
            yield _scaled("tokens_counted_twice", row, 1 + offsets.double(), f"{of_every} is counted twice")
            offsets[:, 0] = False
            yield _scaled(
                "tokens_counted_twice", row, 1 + offsets.double(), f"{of_every} but the first is counted twice"
            )


def past_the_end(row: AttentionRow) -> Iterator[Family]:
    """Tokens past the sequence's end: zeros that a masked load gave, whatever the memory holds, or another's tokens."""
    counts = torch.arange(1, _MAX_EXTRA + 1, dtype=torch.float64, device="cpu")
    for number, source in (
        (0.0, "K and V masked to zero, the score not to -inf"),
        (row.poison, "read from memory that holds no token"),
    ):
        score = torch.tensor(row.case.scale * number * float(row.q.sum()), dtype=torch.float64, device="cpu")
        top = max(row.top, float(score))
        own = float((row.scores - top).exp().sum())
        mass = counts * (score - top).exp()
        out = (own * row.expected + mass[:, None] * number) / (own + mass)[:, None]
        yield Family(PAST_THE_END, out, top + (own + mass).log(), _extra_words(source))
    yield from slots_past_the_end(row)


def slots_past_the_end(row: AttentionRow) -> Iterator[Family]:
    """What a row of the block table leads to from the end of its sequence on, where some of that are tokens.

    Those of another sequence on a page that both share, or on a page that an unused entry names.
    """
    case, length = row.case, row.case.seq_lens[row.seq]
    if not isinstance(case, PagedDecodeCase) or row.num_tokens < length:
        return
    table, size, total = block_table_rows(case)[row.seq], case.block_size, num_blocks(case)
    tokens = _tokens_of_pages(case)
    found = list[tuple[int, int] | None]()
    for position in range(length, min(len(table) * size, length + _MAX_EXTRA)):
        page, offset = table[position // size], position % size
        token = tokens.get((page, offset))
        if not 0 <= page < total or (token is None and not math.isfinite(row.poison)):
            break
        found.append(token)
    if not any(found):
        return

    def read(of: Callable[[int, int], Tensor]) -> Tensor:
        of_seq = functools.cache(lambda seq: of(seq, row.kv_head))
        own = of_seq(row.seq)
        nothing = own.new_full(own.shape[1:], row.poison)
        slots = [nothing if token is None else of_seq(token[0])[token[1]] for token in found]
        return torch.cat((own, torch.stack(slots)))

    out, lse = _of_more_tokens(row, read(row.keys_of), read(row.values_of))
    words = _extra_words("where its row of the block table leads")
    yield Family(PAST_THE_END, out[:1], lse[:1], words)  # by itself: of many counts some come near to one another
    yield Family(PAST_THE_END, out, lse, words)


def _tokens_of_pages(case: PagedDecodeCase) -> dict[tuple[int, int], tuple[int, int]]:
    """Of each page and offset that holds one, a sequence and position."""
    return {
        (page, position % case.block_size): (seq, position)
        for seq, pages in enumerate(physical_pages(case))
        for i, page in enumerate(pages)
        for position in range(i * case.block_size, min((i + 1) * case.block_size, case.seq_lens[seq]))
    }


def _extra_words(source: str) -> Callable[[int], str]:
    def words(i: int) -> str:
        more = " or more" if i + 1 == _MAX_EXTRA else ""  # their number shows no longer in the result
        token, take = ("tokens", "take") if i else ("token", "takes")
        return f"{i + 1}{more} {token} past the end of the sequence {take} weight ({source})"

    return words


def _ranges(row: AttentionRow) -> Iterator[Ranges]:
    """Single tokens, suffixes, prefixes, then ranges between any tokens, or between pages of a long sequence."""
    num_tokens = row.num_tokens
    i = torch.arange(num_tokens, device="cpu")
    yield torch.stack((i, i + 1), -1)
    yield torch.stack((i[1:], torch.full_like(i[1:], num_tokens)), -1)
    yield torch.stack((torch.zeros_like(i[1:]), i[1:]), -1)
    block_size = row.case.page_size or _TILES[0]
    for step in (1, block_size):
        edges = torch.tensor([*range(0, num_tokens, step), num_tokens], dtype=torch.int64, device="cpu")
        if len(edges) ** 2 // 2 * row.case.value_size <= _MAX_NUMBERS:
            yield torch.combinations(edges, 2)
            return


def _weighted(row: AttentionRow) -> Float64[Tensor, "seq_len sums"]:
    """Each value times its weight and, last, the weight."""
    return torch.cat((row.weights[:, None] * row.v, row.weights[:, None]), -1)


def _range_sums(
    row: AttentionRow, ranges: Ranges
) -> tuple[Float64[Tensor, " ranges"], Float64[Tensor, "ranges v_head_size"]]:
    """Weight of each range, and its weighted values."""
    weighted = _weighted(row)
    sums = torch.cat((torch.zeros_like(weighted[:1]), weighted.cumsum(0)))
    parts = sums[ranges[:, 1]] - sums[ranges[:, 0]]
    return parts[:, -1], parts[:, :-1]


def _names(row: AttentionRow, ranges: Ranges, one: str, several: str) -> Callable[[int], str]:
    def words(i: int) -> str:
        start, end = (int(edge) for edge in ranges[i])
        return f"{row.tokens(range(start, end))} of sequence {row.seq} {one if end - start == 1 else several}"

    return words


def _scaled(cause: str, row: AttentionRow, factors: Float64[Tensor, "mistakes seq_len"], words: str) -> Family:
    weights = row.weights * factors
    total = weights.sum(-1)
    return Family(cause, (weights @ row.v) / total[:, None], row.top + total.log(), lambda i: f"token {i} {words}")


def _places(row: AttentionRow, ranges: Ranges) -> Callable[[int], tuple[tuple[int, int], ...]]:
    return lambda i: _tokens_of(row, *ranges[i].tolist())


def _tokens_of(row: AttentionRow, start: int, end: int) -> tuple[tuple[int, int], ...]:
    return tuple((row.seq, position) for position in range(start, min(end, start + MOST_PLACES)))


_MAX_PAGE_PAIRS = 4096
_MAX_ROWS = 64
"""On either side of the row, of which a long prompt has thousands."""


def another_head(row: AttentionRow) -> Iterator[Family]:
    """K and V, or one of them, of another KV head."""
    heads = [head for head in range(row.case.num_kv_heads) if head != row.kv_head]
    if not heads:
        return
    keys = [row.keys_of(row.seq, head)[: row.num_tokens] for head in heads]
    values = [row.values_of(row.seq, head)[: row.num_tokens] for head in heads]
    right = f", expected {row.kv_head}"
    yield _attend("head_map", row, keys, values, lambda i: f"query head {row.head} reads KV head {heads[i]}{right}")
    yield _attend(
        "head_map",
        row,
        keys,
        [row.v] * len(heads),
        lambda i: f"query head {row.head} reads K of KV head {heads[i]}{right}",
    )
    yield _attend(
        "head_map",
        row,
        [row.k] * len(heads),
        values,
        lambda i: f"query head {row.head} reads V of KV head {heads[i]}{right}",
    )


def another_sequence(row: AttentionRow) -> Iterator[Family]:
    """K and V of another sequence: all of it, or as many tokens as this one has."""
    others = [seq for seq, length in enumerate(row.case.seq_lens) if seq != row.seq and length]
    if others:
        yield _attend_sequences(row, others, None, "K and V")
        yield _attend_sequences(row, others, row.num_tokens, f"the first {row.num_tokens} tokens")


def another_page(row: AttentionRow) -> Iterator[Family]:
    """One page of the sequence, or the V of one page, replaced by a page that it or another sequence owns.

    The result is that of all other pages, merged with the page's: nothing is computed again for each pair of pages.
    """
    case = row.case
    if not isinstance(case, PagedDecodeCase) or not row.num_tokens:
        return
    size = case.block_size
    own = -(-row.num_tokens // size)
    if own * sum(map(case.blocks_of, range(case.num_seqs))) > _MAX_PAGE_PAIRS:
        return
    sources = [(seq, page) for seq in range(case.num_seqs) for page in range(case.blocks_of(seq))]
    pairs = [(page, i) for page in range(own) for i, source in enumerate(sources) if _fits(row, page, source)]
    if not pairs:
        return
    page, source = torch.tensor(pairs, dtype=torch.int64, device="cpu").unbind(1)

    own_scores, own_v = _in_pages(row, size, row.k, row.v)
    own_lse, own_out = _states(own_scores, own_v)
    others = own_lse.expand(own, -1).masked_fill(torch.eye(own, dtype=torch.bool, device="cpu"), -torch.inf)
    rest_lse, rest_out = others.logsumexp(-1)[page], (others.softmax(-1).nan_to_num(0.0) @ own_out)[page]

    filled = [seq for seq, length in enumerate(case.seq_lens) if length]
    read = [_in_pages(row, size, row.keys_of(seq, row.kv_head), row.values_of(seq, row.kv_head)) for seq in filled]
    scores, v = (torch.cat(parts) for parts in zip(*read, strict=True))
    of_the_last = scores.masked_fill(own_scores[-1].isinf(), -torch.inf)  # of which fewer tokens may be read
    states = [torch.stack(parts) for parts in zip(_states(scores, v), _states(of_the_last, v), strict=True)]
    page_lse, page_out = (state[(page == own - 1).long(), source] for state in states)
    lse = torch.logaddexp(rest_lse, page_lse)
    out = (rest_lse - lse).exp()[:, None] * rest_out + (page_lse - lse).exp()[:, None] * page_out

    right_lse = torch.logaddexp(rest_lse, own_lse[page])
    other_v = torch.einsum("pn,snd->psd", own_scores.softmax(-1), v)[page, source]
    v_out = (rest_lse - right_lse).exp()[:, None] * rest_out + (own_lse[page] - right_lse).exp()[:, None] * other_v

    def name(i: int) -> str:
        seq, other = sources[int(source[i])]
        return f"page {int(page[i])} of sequence {row.seq} is read from page {other} of sequence {seq}"

    yield Family("another_page", out, lse, name)
    yield Family("another_page", v_out, right_lse, lambda i: f"V of {name(i)}")


def _in_pages(
    row: AttentionRow, size: int, k: Keys, v: Values
) -> tuple[Float64[Tensor, "pages block_size"], Float64[Tensor, "pages block_size v_head_size"]]:
    """Scores and values of all tokens, page by page; behind the last token, -inf and zeros."""
    missing = -len(k) % size
    scores = torch.nn.functional.pad(row.case.scale * (k @ row.q), (0, missing), value=-torch.inf)
    values = torch.nn.functional.pad(v, (0, 0, 0, missing))
    return scores.reshape(-1, size), values.reshape(-1, size, v.shape[1])


def _states(
    scores: Float64[Tensor, "pages block_size"], v: Float64[Tensor, "pages block_size v_head_size"]
) -> tuple[Float64[Tensor, " pages"], Float64[Tensor, "pages v_head_size"]]:
    """LSE and output of each page alone."""
    out, lse = softmax_average(scores, v)
    return lse, out


def another_tensor(row: AttentionRow) -> Iterator[Family]:
    """K and V confused, as far as their heads are large enough for that, or V shifted against K."""
    if row.v.shape[1] <= row.k.shape[1]:
        yield _attend("another_tensor", row, [row.k], [row.k[:, : row.v.shape[1]]], lambda _: "K is read in place of V")
    if row.v.shape[1] == row.k.shape[1]:
        yield _attend("another_tensor", row, [row.v], [row.v], lambda _: "V is read in place of K")
        yield _attend("another_tensor", row, [row.v], [row.k], lambda _: "K and V are exchanged")
    shifted = [row.v.roll(-1, 0), row.v.roll(1, 0)]
    yield _attend(
        "another_tensor", row, [row.k] * 2, shifted, lambda i: f"V is read one token {'before' if i else 'after'} its K"
    )


def single_token(row: AttentionRow) -> Iterator[Family]:
    """The output is the value of one token."""
    for seq in [row.seq, *(seq for seq in range(row.case.num_seqs) if seq != row.seq)]:
        if row.case.seq_lens[seq]:
            values = torch.cat([row.values_of(seq, head) for head in range(row.case.num_kv_heads)])
            yield Family("single_token", values, None, _token_words(row, seq))


def another_row(row: AttentionRow) -> Iterator[Family]:
    """The result of another query."""
    case = row.case
    near = range(max(0, row.row - _MAX_ROWS), min(case.num_rows, row.row + _MAX_ROWS))
    queries = [Query(case=case, row=other, head=head) for other in near for head in range(case.num_q_heads)]
    others = [query for query in queries if query.num_tokens]
    out, lse = (torch.stack(parts) for parts in zip(*(_result(row, other) for other in others), strict=True))
    yield Family(
        "another_row",
        out,
        lse,
        lambda i: f"this is the result of {row_words(case, others[i].row)}, head {others[i].head}",
    )
    zero = torch.zeros_like(out[:1])
    yield Family(
        "treated_as_empty", zero, torch.full_like(zero[:, 0], -torch.inf), lambda _: "the sequence is treated as empty"
    )


def _result(row: AttentionRow, other: Query) -> tuple[Float64[Tensor, " v_head_size"], Float64[Tensor, ""]]:
    k, v = (of(other.seq, other.kv_head)[: other.num_tokens] for of in (row.keys_of, row.values_of))
    return softmax_average(row.case.scale * (k @ row.values.q[other.row, other.head].double()), v)


def _attend_sequences(row: AttentionRow, others: list[int], count: int | None, what: str) -> Family:
    keys = [row.keys_of(seq, row.kv_head)[:count] for seq in others]
    values = [row.values_of(seq, row.kv_head)[:count] for seq in others]
    return _attend(
        "another_sequence", row, keys, values, lambda i: f"sequence {row.seq} reads {what} of sequence {others[i]}"
    )


def _attend(
    cause: str, row: AttentionRow, keys: list[Keys], values: list[Values], words: Callable[[int], str]
) -> Family:
    results = [softmax_average(row.case.scale * (k @ row.q), v) for k, v in zip(keys, values, strict=True)]
    out, lse = (torch.stack(parts) for parts in zip(*results, strict=True))
    return Family(cause, out, lse, words)


def _fits(row: AttentionRow, page: int, source: tuple[int, int]) -> bool:
    """Whether the source page is another one that has a live token for each of this page's."""
    return source != (row.seq, page) and _live(row, *source) >= _read(row, page)


def _read(row: AttentionRow, page: int) -> int:
    """Tokens of one of its pages that the row attends to."""
    size = row.case.page_size
    return min(size, row.num_tokens - page * size)


def _live(row: AttentionRow, seq: int, page: int) -> int:
    case = row.case
    return min(case.block_size, case.seq_lens[seq] - page * case.block_size) if isinstance(case, PagedDecodeCase) else 0


def _token_words(row: AttentionRow, seq: int) -> Callable[[int], str]:
    def words(i: int) -> str:
        head, position = divmod(i, row.case.seq_lens[seq])
        return f"the output is V of {row.tokens([position])} of sequence {seq}, KV head {head}, alone"

    return words
