"""Mistakes about which tokens count: left out, counted twice, or made of memory past the end."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.oracles.diagnosis.row import AttentionRow, softmax_average
from attnfuzz.oracles.diagnosis.suspect import Suspect
from attnfuzz.oracles.verdict import MOST_PLACES
from attnfuzz.problems.cases import PagedDecodeCase

__all__ = ["at_an_edge", "behind_the_query", "counted_twice", "dropped", "dropped_from_v", "past_the_end", "periodic"]

_MAX_NUMBERS = 1 << 18
"""Predicted numbers of one family: bounds the time of a diagnosis."""

_MAX_EXTRA = 512
_TILES = (16, 32, 64, 128)

Ranges = Int64[Tensor, "ranges 2"]


def dropped(row: AttentionRow) -> Iterator[Suspect]:
    """A range of tokens left out of weights and sum."""
    for ranges in _families(row):
        yield _reweighted("tokens_dropped", row, ranges, -1.0, "is dropped", "are dropped")


def at_an_edge(row: AttentionRow) -> Suspect:
    """The last token left out, those of the last page or tile, or the first token: hardly one fits by chance."""
    length = row.num_tokens
    size = row.case.block_size if isinstance(row.case, PagedDecodeCase) else _TILES[0]
    ranges = [(length - 1, length), ((length - 1) // size * size, length), (0, 1)]
    return _reweighted(
        "tokens_dropped", row, torch.tensor(ranges, dtype=torch.int64, device="cpu"), -1.0, "is dropped", "are dropped"
    )


def behind_the_query(row: AttentionRow) -> Iterator[Suspect]:
    """Tokens of the sequence that come after the query token, from the next one on."""
    k, v = row.keys_of(row.seq, row.kv_head), row.values_of(row.seq, row.kv_head)
    last = min(len(k), row.num_tokens + _MAX_EXTRA)
    if last == row.num_tokens:
        return
    scores = row.case.scale * (k[:last] @ row.q)
    ends = torch.arange(row.num_tokens + 1, last + 1, device="cpu")
    seen = scores.masked_fill(torch.arange(last, device="cpu") >= ends[:, None], -torch.inf)
    out, lse = softmax_average(seen, v[:last].expand(len(ends), -1, -1))
    yield Suspect(
        "keys_behind_the_query",
        out,
        lse,
        lambda i: _behind(row, int(ends[i])),
        lambda i: _tokens_of(row, row.num_tokens, int(ends[i])),
    )


def _behind(row: AttentionRow, end: int) -> str:
    verb = "takes" if end - row.num_tokens == 1 else "take"
    return f"{row.tokens(row.num_tokens, end)} of sequence {row.seq}, behind the query, {verb} weight"


def counted_twice(row: AttentionRow) -> Iterator[Suspect]:
    """A range of tokens counted twice."""
    for ranges in _families(row):
        yield _reweighted("tokens_counted_twice", row, ranges, 1.0, "is counted twice", "are counted twice")


def dropped_from_v(row: AttentionRow) -> Iterator[Suspect]:
    """Tokens whose weight is in the sum, but whose value is not in the output."""
    for ranges in _families(row):
        _, sums = _range_sums(row, ranges)
        out = row.expected - sums / row.weights.sum()
        yield Suspect(
            "values_dropped",
            out,
            None,
            _names(row, ranges, "has weight, but its V is left out", "have weight, but their V is left out"),
            _places(row, ranges),
        )


def periodic(row: AttentionRow) -> Iterator[Suspect]:
    """The same place of every page or tile left out or, where tiles overlap, counted twice."""
    periods = {tile: f"tile of {tile}" for tile in _TILES} | {tile - 1: f"{tile - 1} tokens" for tile in _TILES}
    if isinstance(row.case, PagedDecodeCase):
        periods[row.case.block_size] = "page"
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


def past_the_end(row: AttentionRow) -> Iterator[Suspect]:
    """Tokens past the sequence's end: zeros that a masked load gave, or whatever the memory holds."""
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
        yield Suspect("past_the_end", out, top + (own + mass).log(), _extra_words(source))


def _extra_words(source: str) -> Callable[[int], str]:
    def words(i: int) -> str:
        more = " or more" if i + 1 == _MAX_EXTRA else ""  # their number shows no longer in the result
        token, take = ("tokens", "take") if i else ("token", "takes")
        return f"{i + 1}{more} {token} past the end of the sequence {take} weight ({source})"

    return words


def _families(row: AttentionRow) -> Iterator[Ranges]:
    """Single tokens, suffixes, prefixes, then ranges between any tokens, or between pages of a long sequence."""
    num_tokens = row.num_tokens
    i = torch.arange(num_tokens, device="cpu")
    yield torch.stack((i, i + 1), -1)
    yield torch.stack((i[1:], torch.full_like(i[1:], num_tokens)), -1)
    yield torch.stack((torch.zeros_like(i[1:]), i[1:]), -1)
    block_size = row.case.block_size if isinstance(row.case, PagedDecodeCase) else _TILES[0]
    for step in (1, block_size):
        edges = torch.tensor([*range(0, num_tokens, step), num_tokens], dtype=torch.int64, device="cpu")
        if len(edges) ** 2 // 2 * row.case.value_size <= _MAX_NUMBERS:
            yield torch.combinations(edges, 2)
            return


def _range_sums(
    row: AttentionRow, ranges: Ranges
) -> tuple[Float64[Tensor, " ranges"], Float64[Tensor, "ranges v_head_size"]]:
    """Weight of each range, and its weighted values."""
    weighted = torch.cat((row.weights[:, None] * row.v, row.weights[:, None]), -1)
    sums = torch.cat((torch.zeros_like(weighted[:1]), weighted.cumsum(0)))
    parts = sums[ranges[:, 1]] - sums[ranges[:, 0]]
    return parts[:, -1], parts[:, :-1]


def _reweighted(cause: str, row: AttentionRow, ranges: Ranges, by: float, one: str, several: str) -> Suspect:
    masses, sums = _range_sums(row, ranges)
    total = row.weights.sum()
    left = (total + by * masses).clamp(min=0)
    out = (total * row.expected + by * sums) / left[:, None]
    return Suspect(
        cause,
        out,
        row.top + left.log(),
        _names(row, ranges, one, several),
        _places(row, ranges),
    )


def _names(row: AttentionRow, ranges: Ranges, one: str, several: str) -> Callable[[int], str]:
    def words(i: int) -> str:
        start, end = (int(edge) for edge in ranges[i])
        return f"{row.tokens(start, end)} of sequence {row.seq} {one if end - start == 1 else several}"

    return words


def _scaled(cause: str, row: AttentionRow, factors: Float64[Tensor, "mistakes seq_len"], words: str) -> Suspect:
    weights = row.weights * factors
    total = weights.sum(-1)
    return Suspect(cause, (weights @ row.v) / total[:, None], row.top + total.log(), lambda i: f"token {i} {words}")


def _places(row: AttentionRow, ranges: Ranges) -> Callable[[int], tuple[tuple[int, int], ...]]:
    return lambda i: _tokens_of(row, *ranges[i].tolist())


def _tokens_of(row: AttentionRow, start: int, end: int) -> tuple[tuple[int, int], ...]:
    return tuple((row.seq, position) for position in range(start, min(end, start + MOST_PLACES)))
