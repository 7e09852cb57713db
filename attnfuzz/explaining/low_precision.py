"""Replay a row with fewer bits on the way: in float64, in each way in which that may be done.

Products of q and k, their sums, q or k times the scale, scores; exp; weights; sums of weights and of values; partial
states; numbers that are so small that they are taken for 0; keys and values that take another dtype on the way; and exp
of scores from which no maximum is subtracted, or not the largest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.explaining.mistakes import Replay
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.explaining.words import joined
from attnfuzz.inputs.reference import row_weights
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.verdict import Cause

_MOST_PRODUCTS = 1 << 17
"""Of a row: the tokens that weigh most are replayed."""
_CHUNKS = (2, 4, 8)
"""How many neighbouring products a thread may add up before threads exchange their sums."""
TILES = (1, 16, 32, 64, 128)
_DESIGNED_TILES = (16, 64)
_EIGHT = 8
_MOST_STEPS = 256
"""Roundings of a sum, one after the other, that are replayed."""
_SPLITS = (2, 3, 4, 8, 16, 32)
OF_EMPTY_ROWS = "maximum_begins_finite"
"""The one mistake of these that makes rows without keys wrong, too."""
LOWEST_EXPONENT = -1000.0
"""exp is 0 of all that is lower, in whatever format."""
_LOWEST_OF_FLOAT32, _LARGEST_OF_FLOAT32 = -104.0, math.log(torch.finfo(torch.float32).max)
"""float32's exp is 0 of all that is lower, and infinite of all that is larger."""
_HARMLESS_FALL = 40.0
"""Scores no further apart overflow in no order, whatever their number: exp gives 2.4e17."""
_LOG_OF_KEYS = 10.0
"""So many keys have one score at most: those of a tile, or of a sequence."""
_OF_16_BITS = ("float16", "bfloat16")
_FLOAT8 = "float8_e4m3fn"
_SHORTER = (*_OF_16_BITS, _FLOAT8, "float8_e5m2")
_LARGEST_EXPONENT = 700.0
_TF32_BITS = 10
_CUBIC_EXP2 = (0.077119089663028717, 0.227564394474029541, 0.695146143436431885, 1.0)

Scores = Float64[Tensor, " num_tokens"]
_ManyScores = Float64[Tensor, "*ways num_tokens"]
Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Design:
    """A design that kernels round by on purpose beside a mistake: weights, before they multiply V.

    They are rounded beside the maximum of their ``tile`` and those before. ``sums_rounded``: and summed so.
    """

    tile: int = 0
    rounded: Round | None = None
    sums_rounded: bool = False


EXACT = Design()
"""Nothing is."""


def designs(rows: Sequence[AttentionRow], declared: Numerics) -> Iterator[Design]:
    """List designs that a kernel may have which declares this, if they make a difference; the first rounds nothing."""
    yield EXACT
    dtype, number = rows[0].case.dtype, rows[0].num_tokens
    if dtype == "float32" or declared.probabilities != "input":
        return
    summed = (False, True) if declared.row_sum == "input" else (False,)
    seen: list[list[Any]] = []
    for tile in (number, *(tile for tile in _DESIGNED_TILES if tile < number)):
        exact = [(row.log_weights - maxima_so_far(row.log_weights, tile)).exp() for row in rows]
        weights = [_rounding_to(dtype)(one).tolist() for one in exact]
        if weights not in seen and any(one.tolist() != of_row for one, of_row in zip(exact, weights, strict=True)):
            seen.append(weights)
            yield from (Design(tile, _rounding_to(dtype), sums_rounded) for sums_rounded in summed)


@dataclass(frozen=True)
class Rounding(Replay):
    """One mistake, in each of the ways in which it may have been made.

    ``cause`` is that of a family, and ``name`` tells its members apart. ``numerics``: what declares it, of a design's
    own rounding.
    """

    lse: Float64[Tensor, " ways_of_lse"]
    name: str
    words: str
    numerics: Mapping[str, str] = field(default_factory=dict)

    def as_cause(self) -> Cause:
        """As one of the mistakes that may be behind a failure."""
        return Cause(mistake=self.cause, way=self.name, words=self.words, numerics=dict(self.numerics))

    @property
    def is_finite_at_all(self) -> bool:
        """Whether one of the ways gives numbers only."""
        return bool(self.out.isfinite().all(1).any() & self.lse.isfinite().any())


def roundings(
    row: AttentionRow, *, one_copy: bool, causes: Collection[str] | None = None, in_passing: bool = False
) -> Iterator[Rounding]:
    """The simplest first. The same number for every row of a case.

    ``causes``: of which alone. ``in_passing``: only in the case's own format, and in the likeliest orders.
    """
    for group, made in groups(row, one_copy=one_copy, in_passing=in_passing):
        if causes is None or group.cause in causes:
            yield from made


class Group(NamedTuple):
    """Roundings of one ``cause``, to one ``format`` where that matters."""

    cause: str
    format: str = ""


def groups(
    row: AttentionRow, *, one_copy: bool, beside: Design = EXACT, of_weights: bool = True, in_passing: bool = False
) -> Iterator[tuple[Group, Iterator[Rounding]]]:
    """See `roundings`. Nothing is replayed of a group that is not asked for.

    ``beside``: what is rounded besides; then only mistakes in what comes before the weights are replayed.
    ``of_weights``: sums are also those of rounded weights.
    """
    own = row.case.dtype
    formats = {name: _rounding_to(name) for name in sorted(_OF_16_BITS, key=lambda name: name != own)}
    first = next(iter(formats))
    if in_passing and own in formats:
        formats = {own: formats[own]}
    likely = {} if in_passing and own == "float32" else formats
    if own == "float32" and beside is EXACT:
        yield Group("tf32"), _in_tf32(row)
    for name, rounded in likely.items():
        made = _scores_rounded(row, name, rounded, copies=not one_copy, beside=beside)
        yield Group("scores_rounded", name), made
    if row.kv_scales is not None:
        yield Group("scores_rounded", _FLOAT8), _query_in_8_bits(row, beside=beside)
    if likely:
        yield Group("exponential_rounded"), _exponentials_rounded(row, first, beside=beside)
    if beside is not EXACT:
        return
    for name, rounded in likely.items():
        yield Group("rounded_weights_summed", name), _sum_of_rounded_weights(row, name, rounded)
    yield Group("weights_rounded"), _weights_rounded(row)
    for name, rounded in formats.items():
        made = _sums_rounded(row, name, rounded, of_weights=of_weights, in_passing=in_passing)
        of_tiles = _tiles_rounded(row, name, rounded, of_weights=of_weights)
        yield Group("sums_rounded", name), itertools.chain(made, of_tiles)
    for name, rounded in likely.items():
        yield Group("partial_lse_rounded", name), _states_rounded(row, name, rounded)
        yield Group("cut_off", name), _cut_off(row, name)
    for name, rounded in formats.items():
        if name != own and own != "bfloat16":  # which has the fewest bits
            yield Group("output_rounded", name), _output_rounded(row, name, rounded)
    if own == "float16":
        yield Group("flushed"), _flushed(row)
    if own == "bfloat16":
        yield Group("range_of_float16"), _in_range_of_float16(row)
    yield Group("converted"), _converted(row)
    yield Group("maximum_not_subtracted"), _without_maximum(row)
    yield Group(OF_EMPTY_ROWS), _finite_maximum(row)
    yield Group("maximum_of_hidden_keys"), _maximum_of_hidden_keys(row)
    yield Group("maximum_not_kept"), _maximum_of_each_tile(row)
    yield Group("maximum_of_one_part"), _maximum_of_one_part(row)


def _told(which: str, row: AttentionRow, name: str) -> str:
    """Tell what is rounded, and to which format, if that is not the case's own."""
    return which if name == row.case.dtype else f"{which} in {name}"


def _rounding_to(name: str) -> Round:
    dtype = getattr(torch, name)
    return (lambda x: x.float().to(dtype).double()) if name == _FLOAT8 else (lambda x: x.to(dtype).double())


def _scores_rounded(
    row: AttentionRow, name: str, rounded: Round, *, copies: bool, beside: Design = EXACT
) -> Iterator[Rounding]:
    """``copies``: threads that sum a score together may each have their own."""
    scale = row.case.scale
    heaviest = row.weights.topk(min(row.num_tokens, max(1, _MOST_PRODUCTS // row.case.head_size))).indices
    q, k = row.q, row.k[heaviest]
    if name not in row.summed_products:
        totals = torch.stack(list(_sums(q * k, rounded)))
        row.summed_products[name] = torch.stack(_scaled(totals, scale, rounded), 1).flatten(0, 1)
    summed = list(row.summed_products[name])
    root = math.sqrt(abs(scale))

    def made(which: str, words: str, ways: list[Scores], *, copies: bool = False, **numerics: str) -> Rounding:
        declared = numerics if name == row.case.dtype else {}
        return _of_scores(
            row, heaviest, _told(which, row, name), words, ways, copies=copies, beside=beside, numerics=declared
        )

    yield made(
        "products",
        f"the products of q and k are rounded to {name} before they are summed",
        [scale * rounded(q * k).sum(-1)],
    )
    yield made(
        "scaled query",
        f"q x scale is rounded to {name} before it is multiplied with k",
        [k @ rounded(scale * q)],
        query="scaled",
    )
    yield made(
        "scaled query in base 2",
        f"q x scale x log2(e) is rounded to {name} before it is multiplied with k",
        [k @ rounded(scale * math.log2(math.e) * q) / math.log2(math.e)],
        query="scaled",
    )
    yield made(
        "both scaled",
        f"q and k times the scale's root are rounded to {name} before they are multiplied",
        [math.copysign(1.0, scale) * (rounded(root * k) @ rounded(root * q))],
        query="scaled_both",
    )
    yield made(
        "scores",
        f"the scores are rounded to {name}",
        [*_scaled(rounded(k @ q), scale, rounded), *_scaled(k @ q, scale, rounded)[1:]],
        scores="input",
    )
    yield made(
        "scores of a scaled query",
        f"q x scale is rounded to {name} before it is multiplied with k, and so are the scores",
        [rounded(k @ rounded(scale * q)), rounded(k @ rounded(scale * math.log2(math.e) * q)) / math.log2(math.e)],
        query="scaled",
        scores="input",
    )
    yield made(
        "products and sums",
        f"the products of q and k are rounded to {name}, and so are their sums",
        summed,
        copies=copies,
    )
    if row.kv_scales is not None:  # they are of K and of V, by KV head
        of_k = float(row.kv_scales[0, row.kv_head])
        yield made(
            "query times K's scale",
            f"q x the cache's scale of K is rounded to {name} before it is multiplied with k",
            [scale * (k / of_k) @ rounded(of_k * q), (k / of_k) @ rounded(scale * of_k * q)],
            query="scaled",
        )


def _query_in_8_bits(row: AttentionRow, *, beside: Design = EXACT) -> Iterator[Rounding]:
    """To the cache's format, on purpose where the matrix product takes no others beside it."""
    words = f"q is rounded to {_FLOAT8} before it is multiplied with k"
    scores = row.case.scale * (row.k @ _rounding_to(_FLOAT8)(row.q))
    every = torch.arange(row.num_tokens, device="cpu")
    yield _of_scores(row, every, "query in 8 bits", words, [scores], beside=beside, numerics={"query": _FLOAT8})


def _exponentials_rounded(row: AttentionRow, name: str, *, beside: Design = EXACT) -> Iterator[Rounding]:
    rounded = _rounding_to(name)
    cubic, short = "exp2 is a polynomial of degree 3", f"exp2 is taken of numbers in {name}"
    for which, words, declared, exp in (
        ("cubic exp2", cubic, "cubic", _cubic_exp),
        ("short exp2", short, "input", lambda x: rounded(torch.exp2(rounded(x * math.log2(math.e))))),
    ):
        out, lse = _designed(row, row.log_weights[None], beside, exp)
        yield Rounding("exponential_rounded", out, lse, which, words, {"exponential": declared})


def _weights_rounded(row: AttentionRow) -> Iterator[Rounding]:
    """To 16 bits, the case's or not, or to 8: a cast that somebody wrote for the models at hand.

    To 8 bits on purpose where the cache has no more.
    """
    on_purpose = {row.case.dtype: "input"} | ({} if row.case.kv is None else {_FLOAT8: _FLOAT8})
    for name in _SHORTER:
        numerics = {"probabilities": on_purpose[name]} if name in on_purpose else {}
        words = f"weights are rounded to {name} before they are multiplied with V"
        rounded = _rounding_to(name)
        ways = [((weights @ row.v) / row.total, row.lse) for weights in _rounded_in_tiles(row, rounded)]
        ways.append((rounded(row.shares) @ row.v, row.lse))  # once they are divided by their sum
        yield _rounding("weights_rounded", f"weights in {name}", words, ways, numerics)


def _sum_of_rounded_weights(row: AttentionRow, name: str, rounded: Round) -> Iterator[Rounding]:
    """Weights are rounded beside the maximum of their tile and those before, and summed so for output and LSE."""
    ways = []
    for weights in _rounded_in_tiles(row, rounded):
        total = weights.sum() + (row.sink - row.top).exp()
        ways.append(((weights @ row.v) / total, row.top + total.log()))
    ways.append((row.expected, ways[-1][1]))  # beside an output that is computed apart from it
    words = f"softmax weights are rounded to {name} before they are summed"
    numerics = {"row_sum": "input"} if name == row.case.dtype else {}
    yield _rounding("rounded_weights_summed", _told("sum of rounded weights", row, name), words, ways, numerics)


def _rounded_in_tiles(row: AttentionRow, rounded: Round) -> Iterator[Tensor]:
    """Weights beside the row's maximum, rounded beside that of their tile and those before, for each usual tile."""
    scores = row.log_weights

    def beside_tops(tile: int) -> Tensor:
        tops = maxima_so_far(scores, tile)
        return rounded((scores - tops).exp()) * (tops - row.top).exp()

    made = functools.cache(beside_tops)
    yield from (made(min(tile, row.num_tokens)) for tile in (*tiles_of(row), row.num_tokens))


def tiles_of(row: AttentionRow) -> tuple[int, ...]:
    """Numbers of keys that kernels take at once: usual ones, and those of a page."""
    return (*TILES, *{row.case.page_size} - {0, *TILES})


def maxima_so_far(scores: Float64[Tensor, "*ways n"], tile: int) -> Float64[Tensor, "*ways n"]:
    """The largest score up to the end of the tile of each; finite, whatever lies there."""
    return scores.cummax(-1).values[..., _ends(scores.shape[-1], tile)].clamp(min=torch.finfo(torch.float64).min)


@functools.lru_cache(maxsize=64)  # each row asks for those of a few tiles some hundred times
def _ends(number: int, tile: int) -> Int64[Tensor, " number"]:
    """The last token of the tile of each."""
    return torch.arange(number, device="cpu").div(tile, rounding_mode="floor").add(1).mul(tile).clamp(max=number) - 1


def _sums_rounded(
    row: AttentionRow, name: str, rounded: Round, *, of_weights: bool, in_passing: bool
) -> Iterator[Rounding]:
    """Sums that are kept in 16 bits from tile to tile, or from token to token; ``of_weights``: rounded ones, too."""
    number = 1 + of_weights

    tiles = [tile for tile in tiles_of(row) if -(-row.num_tokens // tile) <= _MOST_STEPS] or [row.num_tokens]
    orders = (False,) if in_passing else (False, True)
    of_tiles = functools.cache(functools.partial(_in_tiles, row, rounded=rounded, of_weights=rounded))
    single = row.num_tokens  # in one tile there is one order
    made = [
        of_tiles(tile=min(tile, single), at_once=at_once and tile < single)[:number]
        for tile in tiles
        for at_once in orders
    ]
    ways = [way for of_orders in zip(*made, strict=True) for way in of_orders]
    exact = [one for one in _in_tiles(row, row.num_tokens, torch.clone, rounded)[:number] for _ in made]
    for which, words, of_sum, of_v in (
        ("row sum", f"the sum of the softmax weights is kept in {name}", True, False),
        ("accumulator", f"the sum of weights x V is kept in {name}", False, True),
        ("both sums", f"the sums of the softmax weights and of weights x V are kept in {name}", True, True),
    ):
        pairs = list(zip(ways, exact, strict=True))
        totals = [(way if of_sum else right)[-1] for way, right in pairs]
        outs = [(way if of_v else right)[:-1] / total for (way, right), total in zip(pairs, totals, strict=True)]
        lses = [row.top + total.log() for total in totals]
        yield _rounding("sums_rounded", _told(which, row, name), words, list(zip(outs, lses, strict=True)))


def _tiles_rounded(row: AttentionRow, name: str, rounded: Round, *, of_weights: bool) -> Iterator[Rounding]:
    """Weights x V of each tile by themselves: in a product that returns 16 bits, or summed in these by eights."""
    exact = _in_tiles(row, row.num_tokens, torch.clone, rounded)[0]
    tiles = [tile for tile in tiles_of(row)[1:] if -(-row.num_tokens // tile) <= _MOST_STEPS] or [row.num_tokens]
    of_one = functools.cache(lambda tile: _in_tiles(row, tile, torch.clone, rounded, of_tile=rounded)[: 1 + of_weights])
    every = (of_one(min(tile, row.num_tokens)) for tile in tiles)
    outs = [way[:-1] / exact[-1] for of_tile in every for way in of_tile]
    by_tile = f"weights x V are rounded to {name}, summed over each tile"
    by_eights = f"weights x V are multiplied and summed in {name}, eight keys at a time"
    for which, words, made, declared in (
        ("tile sums", by_tile, outs, "rounded"),
        ("sums of eight", by_eights, _by_eights(row, rounded), "input"),
    ):
        numerics = {"tile_sums": declared} if name == row.case.dtype else {}
        yield _rounding("sums_rounded", _told(which, row, name), words, [(out, row.lse) for out in made], numerics)


def _by_eights(row: AttentionRow, rounded: Round) -> Iterator[Tensor]:
    """As vLLM's `dot` of eight weights and values in four registers of two: of float16; of bfloat16, products alone.

    Of weights beside the row's maximum or, as it has them, divided by their sum.
    """
    padding = -row.num_tokens % _EIGHT
    values = torch.nn.functional.pad(row.v, (0, 0, 0, padding)).reshape(-1, 4, 2, row.v.shape[1])
    for weights, end in ((row.weights / row.total, 1.0), (row.weights, row.total)):
        shares = torch.nn.functional.pad(rounded(weights), (0, padding)).reshape(-1, 4, 2)
        products = rounded(shares[..., None] * values)
        yield products.sum((0, 1, 2)) / end
        yield _in_order(products.movedim(1, -1), rounded)[..., 0].sum((0, 1)) / end


def _in_tiles(
    row: AttentionRow,
    tile: int,
    rounded: Round,
    of_weights: Round,
    *,
    of_tile: Round = torch.clone,
    at_once: bool = False,
) -> Float64[Tensor, "2 sums"]:
    """Sums of weights x V and, last, of weights, by online softmax over tiles of tokens: rounded after each.

    The second time ``of_weights`` is that of weights before they multiply V, as most kernels have it. ``of_tile`` is
    that of what a tile adds. ``at_once``: beside the maximum of all keys, which was found before.
    """
    padding = -len(row.log_weights) % tile
    tiled = torch.nn.functional.pad(row.log_weights, (0, padding), value=-torch.inf).reshape(-1, tile)
    tops = tiled.amax(1).cummax(0).values
    if at_once:
        tops = tops[-1:].expand(len(tops))
    finite = tops.clamp(min=torch.finfo(torch.float64).min)
    values = torch.nn.functional.pad(row.v, (0, 0, 0, padding)).reshape(-1, tile, row.v.shape[1])
    weights = (tiled - finite[:, None]).exp()
    averages = of_tile(torch.einsum("wtn,tnd->wtd", torch.stack((weights, of_weights(weights))), values))
    sums = weights.sum(1, keepdim=True).expand(2, -1, -1)
    rescale = (torch.cat((tops[:1], tops[:-1])) - finite).exp()
    total = torch.zeros_like(averages[:, 0])
    total = torch.cat((total, total[:, :1]), 1)
    for factor, added in zip(rescale, torch.cat((averages, sums), 2).unbind(1), strict=True):
        total = rounded(total * factor + added)
    total = total * (finite[-1] - row.top).exp()
    total[:, -1] += (row.sink - row.top).exp()
    return total


def _states_rounded(row: AttentionRow, name: str, rounded: Round) -> Iterator[Rounding]:
    """Partial log-sum-exps in 16 bits, for each usual number of splits."""
    words = f"the partial log-sum-exps are rounded to {name}"
    ways = []
    for length in sorted({-(-row.num_tokens // number) for number in _SPLITS}):
        parts = in_parts(row.log_weights, [t // length for t in range(row.num_tokens)])
        ways.append(row.averaged(rounded(parts.logsumexp(1)), outputs_of(row, parts)))
    yield _rounding("partial_lse_rounded", _told("partial LSE", row, name), words, ways)


def in_parts(scores: Float64[Tensor, "*rows n"], part_of: Sequence[int]) -> Float64[Tensor, "*of_parts n"]:
    """The scores of each part, -inf for all others."""
    parts = torch.arange(max(part_of) + 1, device="cpu")[:, None]
    return scores.masked_fill(torch.tensor(part_of, dtype=torch.int64, device="cpu") != parts, -torch.inf)


def outputs_of(row: AttentionRow, parts: Float64[Tensor, "parts n"]) -> Float64[Tensor, "parts v_head_size"]:
    """Compute what each part of the row's keys gives by itself."""
    return parts.softmax(1).nan_to_num(0.0) @ row.v


def _cut_off(row: AttentionRow, name: str) -> Iterator[Rounding]:
    """Bits that a 16-bit number has no room for are left out, which takes half a unit off on average."""
    dtype = getattr(torch, name)

    def cut(x: Tensor) -> Tensor:
        nearest = x.to(dtype)
        smaller = (nearest.view(torch.int16) - 1).view(nearest.dtype)  # in magnitude
        return torch.where(nearest.double().abs() > x.abs(), smaller, nearest).double()

    words = f"is cut off to {name}, not rounded"
    outs = [(of_weights(row.weights) @ row.v) / row.total for of_weights in (torch.clone, _rounding_to(name))]
    which = _told("output cut off", row, name)
    yield _rounding("cut_off", which, f"the output {words}", [(cut(out), row.lse) for out in outs])
    weights = cut(row.weights)
    ends = row.total, float(weights.sum() + (row.sink - row.top).exp())
    ways = [((weights @ row.v) / end, row.top + math.log(end)) for end in ends]
    yield _rounding("cut_off", _told("weights cut off", row, name), f"each softmax weight {words}", ways)


def _output_rounded(row: AttentionRow, name: str, rounded: Round) -> Iterator[Rounding]:
    """The output takes a format of fewer bits than its own before it is stored: then it has only numbers of that.

    Of what is rounded besides depends which of two neighbouring ones.
    """
    nearest, reach = rounded(row.got), row.expected.abs() * torch.finfo(getattr(torch, name)).eps / 2 + row.bound
    out = torch.where((nearest - row.expected).abs() <= reach, nearest, rounded(row.expected))
    words = f"the output is rounded to {name} before it is stored"
    yield _rounding("output_rounded", _told("output", row, name), words, [(out, row.lse)])


def _flushed(row: AttentionRow) -> Iterator[Rounding]:
    """Numbers below float16's smallest normal one, which count: GPUs take none for 0 but float32's, below 2^-126."""
    smallest = torch.finfo(torch.float16).smallest_normal
    v, out = (part.masked_fill(part.abs() < smallest, 0.0) for part in (row.v, row.expected))
    for name, what, made in (("V flushed", "numbers of V", row.shares @ v), ("output flushed", "outputs", out)):
        words = f"{what} below {smallest:.3g} are taken for 0: subnormal ones of float16"
        yield _rounding("flushed", name, words, [(made, row.lse)])


def _in_range_of_float16(row: AttentionRow) -> Iterator[Rounding]:
    """V, its weighted sum or the average in float16 on the way, which holds no number as small as bfloat16 does."""
    rounded = _rounding_to("float16")
    outs = (row.shares @ rounded(row.v), rounded(row.weights @ row.v) / row.total, rounded(row.expected))
    words = f"V, or what is summed of weights x V, is float16 on the way, where numbers below {2.0**-25:.1g} are 0"
    yield _rounding("range_of_float16", "float16 on the way", words, [(out, row.lse) for out in outs])


def _converted(row: AttentionRow) -> Iterator[Rounding]:
    """Keys and values that take a dtype of fewer bits, or of a smaller range, before they are multiplied."""
    for name in _SHORTER:
        dtype = getattr(torch, name)
        with_q = (("q", "K", "V"),) if name != row.case.dtype else ()  # of which it is
        every = {"q": row.q, "K": row.k, "V": row.v}
        converted = {part: one.float().to(dtype).double() for part, one in every.items()}
        for parts in (("K",), ("V",), ("K", "V"), *with_q):
            q, k, v = (converted[part] if part in parts else one for part, one in every.items())
            words = f"{joined(parts)} {'are' if parts[1:] else 'is'} converted to {name} on the way"
            numerics = {"dequantised": "input"} if name == row.case.dtype and parts == ("K", "V") else {}
            ways = [row.given(row.case.scale * (k @ q), v)]
            yield _rounding("converted", f"{' '.join(parts)} to {name}", words, ways, numerics)


def _without_maximum(row: AttentionRow) -> Iterator[Rounding]:
    """exp of float32 scores as they are: it overflows at 88.7, and becomes 0 at -87.3 or, with subnormals, at -104."""
    scores = torch.cat((row.log_weights, row.sink[None]))
    ways: list[tuple[Tensor, Tensor | float]] = []
    for smallest in (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).smallest_normal * 2.0**-23):
        weights = scores.clamp(max=_LARGEST_EXPONENT).exp()
        weights = torch.where(weights > torch.finfo(torch.float32).max, torch.inf, weights)
        weights = torch.where(weights < smallest, 0.0, weights)
        ways += _beside_any_lse(row, (weights[:-1] @ row.v) / weights.sum(), weights.sum().log())
        if not weights.sum():  # by which some kernels do not divide
            ways += _beside_any_lse(row, torch.zeros_like(row.expected), -math.inf)
    flows = "overflows float32 at 88.7" if row.top > 0 else "underflows float32"
    words = f"exp {flows}: the maximum, {row.top:.4g}, is not subtracted from the scores"
    yield _rounding("maximum_not_subtracted", "no maximum", words, ways)


def _finite_maximum(row: AttentionRow) -> Iterator[Rounding]:
    """A running maximum that begins at a large negative number, with a sum of weights that is not 0.

    Beside scores that lie below, what it begins with takes nearly all weight, and V none of that. Where keys that must
    not be seen have that number as their score, they take it instead, and the output is an average of their V, whatever
    lies there: then the log-sum-exp says so by itself, if it is near a number that somebody may have written.
    """
    begins = row.got_lse if row.got_lse is not None and math.isfinite(row.got_lse) else 0.0
    is_low = row.top < _LOWEST_OF_FLOAT32
    is_lost = is_low and begins > row.lse + row.lse_bound
    lost = min(0.0, row.lse - begins) if is_lost else 0.0
    ways: list[tuple[Tensor, Tensor | float]] = [(math.exp(lost) * row.expected, row.lse - lost)]
    if is_lost and row.got_lse == -math.inf:  # it begins above all scores, of which no weight is left
        ways = [(torch.zeros_like(row.expected), -math.inf), (torch.full_like(row.expected, torch.nan), -math.inf)]
    if is_lost and row.got_lse is None:  # nothing tells with which number it begins: perhaps with a lower one
        ways.append((row.expected, row.lse))
    is_written = is_low and begins < LOWEST_EXPONENT and bool(_stands_for_infinity(begins, row.case.scale))
    if is_written and abs(begins - row.lse) > row.lse_bound:  # below it, too, where that number is not scaled as scores
        ways.append((row.got, begins))
    yield _rounding(OF_EMPTY_ROWS, "finite maximum", _words_of_finite(row, begins if is_written else 0.0), ways)


def start_of(row: AttentionRow) -> tuple[float, float] | None:
    """Between what a running maximum begins that gives this wrong row; None if the log-sum-exp does not tell.

    Several masked scores may stand for one.
    """
    if row.got_lse == -math.inf:
        return row.top + _HARMLESS_FALL, math.inf
    if row.got_lse is None or not row.lse + row.lse_bound < row.got_lse < math.inf:
        return None
    more = row.got_lse - row.lse
    begins = row.got_lse if more > _LOG_OF_KEYS else row.lse + math.log(math.expm1(more))
    return begins - _LOG_OF_KEYS, begins + _LOG_OF_KEYS


def _maximum_of_hidden_keys(row: AttentionRow) -> Iterator[Rounding]:
    """A maximum of all scores of the sequence, those included that are masked after it is taken.

    Exponentials of the others become 0 in float32 where one of these is that much larger.
    """
    if row.case.variant.alibi is not None:
        return
    every = row.capped(row.case.scale * (row.keys_of(row.seq, row.kv_head) @ row.q))
    top = float(every.max())
    weights = (row.log_weights - top).exp().float().double()
    ways: list[tuple[Tensor, Tensor | float]] = []
    for left in (weights, weights.masked_fill(weights < torch.finfo(torch.float32).tiny, 0.0)):
        if float(total := left.sum()) > 0:
            ways.append(((left @ row.v) / total, top + math.log(total)))
        else:
            ways += [(torch.full_like(row.expected, empty), -math.inf) for empty in (0.0, math.nan)]
    words = f"the maximum is taken of hidden keys, too: {top:.4g}, beside which exp of {row.top:.4g} is 0"
    yield _rounding("maximum_of_hidden_keys", "hidden keys", words, ways)


def _words_of_finite(row: AttentionRow, begins: float) -> str:
    """With the scores in each unit in which that number may be written, and the log-sum-exp if it is such a number."""
    tops = [f"{row.top:.4g}", f"{row.top / math.log(2):.4g} to base 2"]
    if row.case.scale != 1.0:
        tops.insert(1, f"{row.top / row.case.scale:.4g} before the scale")
    low = f"all scores lie below it: the largest is {', '.join(tops[:-1])} and {tops[-1]}"
    if not begins:
        return f"the running maximum begins at a finite number, or masked scores are one, and {low}"
    written = " or ".join(_stands_for_infinity(begins, row.case.scale))
    return f"the running maximum begins at a finite number, or masked scores are one, and {low}; lse is about {written}"


def _maximum_of_each_tile(row: AttentionRow) -> Iterator[Rounding]:
    """An online softmax that takes the maximum of the tile at hand, not the largest so far.

    The sums so far are multiplied by exp(maximum before - maximum of the tile). That is right unless they overflow.
    """
    scores = row.log_weights
    tiles = {tile for tile in tiles_of(row) if len(scores) <= tile * _MOST_STEPS}
    if float(scores.max() - scores.min()) < _HARMLESS_FALL:
        tiles = set()
    found = [_by_tiles(scores, row.v, tile) for tile in tiles if tile < len(scores)]
    ways: list[tuple[Tensor, Tensor | float]] = [(out, lse) for out, lse in found if not bool(out.isfinite().all())]
    others = _beside_any_lse(row, *ways[0])[1:] if ways else []
    if len(ways) < len(tiles) or not tiles:
        ways.append((row.expected, row.lse))
    ways += others
    words = "the maximum is that of each tile, not the largest so far, and what was summed before overflows float32"
    yield _rounding("maximum_not_kept", "maximum of each tile", words, ways)


def _maximum_of_one_part(row: AttentionRow) -> Iterator[Rounding]:
    """One maximum for all, that of the first or last tile, page or split: right, unless a score is far above it."""
    scores, number = row.log_weights, row.num_tokens
    sizes = {*tiles_of(row), *(-(-number // parts) for parts in _SPLITS)}
    for which in ("first", "last"):
        parts = (scores[:size] if which == "first" else scores[(number - 1) // size * size :] for size in sizes)
        overflows = [row.top - float(part.max()) > _LARGEST_OF_FLOAT32 for part in parts]
        ways: list[tuple[Tensor, Tensor | float]] = []
        if any(overflows):
            ways += _beside_any_lse(row, torch.full_like(row.expected, torch.nan), math.inf)
        if not all(overflows):
            ways.append((row.expected, row.lse))
        words = (
            f"exp overflows float32 at 88.7: what is subtracted is the maximum of the {which} tile or split alone, "
            f"and the largest score is {row.top:.4g}"
        )
        yield _rounding("maximum_of_one_part", f"{which} part", words, ways)


def _beside_any_lse(row: AttentionRow, out: Tensor, lse: Tensor | float) -> list[tuple[Tensor, Tensor | float]]:
    """An output with its own log-sum-exp, with NaN, as 0 x inf makes it, and with the right one, computed apart."""
    return [(out, lse), (out, math.nan), (out, row.lse)]


def _by_tiles(scores: Scores, v: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of sums in float32."""
    top, total = torch.tensor([-math.inf, 0.0], dtype=torch.float32, device="cpu")
    average = torch.zeros(v.shape[1], dtype=torch.float32, device="cpu")
    for start in range(0, len(scores), tile):
        part = scores[start : start + tile].float()
        before, top = top, part.max()
        factor, weights = (before - top).exp(), (part - top).exp()
        total = total * factor + weights.sum()
        average = average * factor + weights @ v[start : start + tile].float()
    return (average / total).double(), (top + total.log()).double()


def _stands_for_infinity(lse: float, scale: float) -> list[str]:
    """The numbers of one digit, as -5e4, that are the score of some keys if so low a log-sum-exp is theirs.

    They may have been scores before the scale, or to base 2.
    """
    found: dict[float, str] = {}
    for unit, told in (
        (1.0, ""),
        (math.log(2), " to base 2"),
        (abs(scale), " before the scale"),
        (abs(scale) * math.log(2), " before the scale"),
    ):
        written = -lse / unit
        digit = 10.0 ** math.floor(math.log10(written)) if written > 0 else math.inf
        nearest = round(written / digit) * digit
        if abs(written - nearest) * unit <= _LOG_OF_KEYS:
            found.setdefault(unit, f"{-nearest:.0e}{told}")
    return list(found.values())


def _rounding(
    cause: str,
    name: str,
    words: str,
    ways: Sequence[tuple[Tensor, Tensor | float]],
    numerics: Mapping[str, str] = MappingProxyType({}),
) -> Rounding:
    outs, lses = zip(*ways, strict=True)
    lse = torch.tensor(list(map(float, lses)), dtype=torch.float64, device="cpu")
    return Rounding(cause, torch.stack(outs), lse, name, words, numerics)


def _scaled(dots: _ManyScores, scale: float, rounded: Round) -> tuple[_ManyScores, ...]:
    """Times the scale: in more bits, in as many, and with a scale of as many (Triton makes a tensor's type of it)."""
    of_its_type = float(rounded(torch.tensor(scale, dtype=torch.float64, device="cpu")))
    return scale * dots, rounded(scale * dots), rounded(of_its_type * dots)


def _sums(products: Float64[Tensor, "num_tokens head_size"], rounded: Round) -> Iterator[Scores]:
    """Add rounded products, rounding at the end or after each addition, in orders in which kernels add."""
    exact = torch.nn.functional.pad(products, (0, (1 << (products.shape[1] - 1).bit_length()) - products.shape[1]))
    terms = rounded(exact)
    yield rounded(terms.sum(-1))
    yield _in_order(terms, rounded)[:, 0]
    for one, other in ((terms, terms), (exact, terms), (terms, exact)):  # with `fma`, the product of one is not rounded
        yield _by_pairs(one, other, rounded, of_neighbours=True)
        yield _by_pairs(one, other, rounded)
    for chunk in _CHUNKS:
        for part in (terms, exact) if chunk < terms.shape[1] else ():
            in_chunks = _in_order(part.reshape(len(part), -1, chunk), rounded)[..., 0]
            yield _by_pairs(in_chunks, in_chunks, rounded)


def _in_order(terms: Tensor, rounded: Round) -> Tensor:
    """One after the other: of products that are not rounded, each is added before it is, as `fma` does."""
    total = rounded(terms[..., :1])
    for i in range(1, terms.shape[-1]):
        total = rounded(total + terms[..., i : i + 1])
    return total


def _by_pairs(one: Tensor, other: Tensor, rounded: Round, *, of_neighbours: bool = False) -> Scores:
    """Sums of pairs, one of each from ``other`` at first, and of these, until one is left."""
    while one.shape[1] > 1:
        half = one.shape[1] // 2
        pairs = (one[:, ::2], other[:, 1::2]) if of_neighbours else (one[:, :half], other[:, half:])
        one = other = rounded(pairs[0] + pairs[1])
    return rounded(one[:, 0])


def _of_scores(
    row: AttentionRow,
    tokens: Int64[Tensor, " replayed"],
    name: str,
    words: str,
    ways: list[Float64[Tensor, " replayed"]],
    *,
    copies: bool = False,
    beside: Design = EXACT,
    numerics: Mapping[str, str] = MappingProxyType({}),
) -> Rounding:
    """Change the scores of some ``tokens``, while the others keep theirs.

    ``copies``: the weights of the sum of values may come of another way than those of the sum that divides it.
    """
    has_no_weight = any(bool(scores.isneginf().any()) for scores in ways)
    every = row.scores.expand(len(ways), -1).index_copy(1, tokens, torch.stack(ways))
    log_weights = every if row.is_plain else torch.stack([row.final(scores) for scores in every])
    if beside is not EXACT:
        return Rounding("scores_rounded", *_designed(row, log_weights, beside), name, words, numerics)
    terms = torch.cat((log_weights, row.sink.expand(len(ways), 1)), 1)
    weights, lse = terms.softmax(1)[:, :-1], terms.logsumexp(1)
    out = weights @ row.v
    if copies:
        numerators = (weights * (lse - row.lse).exp()[:, None]) @ row.v
        out = torch.cat([out, *(numerators / (end - row.lse).exp() for end in (lse.amin(), lse.amax()))])
    if has_no_weight:  # where a tile or a split has nothing but scores of -inf, they may be subtracted from each other
        out, lse = (torch.cat((part, torch.full_like(part[:1], torch.nan))) for part in (out, lse))
    return Rounding("scores_rounded", out, lse, name, words, numerics)


def _designed(
    row: AttentionRow, log_weights: Float64[Tensor, "ways n"], beside: Design, exp: Round = torch.exp
) -> tuple[Float64[Tensor, "ways v_head_size"], Float64[Tensor, " ways"]]:
    """Outputs and LSEs of a kernel that rounds its weights on purpose, which are ``exp`` of these."""
    top = torch.maximum(log_weights.amax(1, keepdim=True), row.sink)
    tops = maxima_so_far(log_weights, beside.tile or log_weights.shape[1])
    weights = exp(log_weights - tops).masked_fill(log_weights == -torch.inf, 0.0)
    of_v = weights if beside.rounded is None else beside.rounded(weights)
    rescale = (tops - top).exp()
    total = ((of_v if beside.sums_rounded else weights) * rescale).sum(1, keepdim=True) + (row.sink - top).exp()
    return ((of_v * rescale) @ row.v) / total, (top + total.log())[:, 0]


def _cubic_exp(x: Tensor) -> Tensor:
    """exp2 on the fraction by the polynomial of FlashAttention 4, which minimises the relative error."""
    whole = (x * math.log2(math.e)).clamp(min=-1000.0).floor()
    fraction = (x * math.log2(math.e)).clamp(min=-1000.0) - whole
    polynomial = torch.zeros_like(fraction)
    for coefficient in _CUBIC_EXP2:
        polynomial = polynomial * fraction + coefficient
    return torch.ldexp(polynomial, whole)


def _in_tf32(row: AttentionRow) -> Iterator[Rounding]:
    """Both products with operands of 10 bits behind the point, rounded to nearest or cut off."""
    ways = []
    for nearest in (True, False):
        q, k, v = (_to_tf32(part, nearest=nearest) for part in (row.q, row.k, row.v))
        weights, lse = row_weights(row.case, row.row, row.head, row.case.scale * (k @ q))
        largest = weights.max()
        ways.append((_to_tf32(weights / largest, nearest=nearest) @ v * largest, lse))
    words = "the matrix products are computed in TF32 (for `tl.dot`, input_precision='ieee' is exact)"
    yield _rounding("tf32", "tf32", words, ways, {"matmul": "tf32"})


def _to_tf32(x: Tensor, *, nearest: bool) -> Tensor:
    mantissa, exponent = x.frexp()
    steps = mantissa * 2.0 ** (_TF32_BITS + 1)
    return torch.ldexp((steps.round() if nearest else steps.trunc()) / 2.0 ** (_TF32_BITS + 1), exponent)
