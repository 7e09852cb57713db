"""q, K and V of the attention problems, on logical positions: of many cases at once, and as an 8-bit cache holds them.

Numbers of an 8-bit cache stay in the case's dtype, which holds every float8 number, until they are written to the
cache. Rounding is to nearest, ties to even, and what is too large becomes the largest finite number. Four recipes would
lose by that what they are there for, and draw otherwise:

* ``positions``: the four numbers modulo 16 (float8_e5m2: 8), so that neighbouring tokens still differ.
* ``fine``: bit patterns, so that every exponent and fraction and all subnormal numbers occur. Of K, and of float8_e5m2,
  the largest exponent bit is 0, which keeps numbers below 2; for 0x7F and the like, which are no numbers, there is 0.
* ``small``: subnormal numbers of the format, of up to two units.
* ``large`` is a quarter as large in float8_e4m3fn, whose largest number is 448.

Where q is float16, nothing in the cache stands for more than a float16 holds: it was one before it was cached, and a
kernel may make one of it again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float, Float64, Int32, Int64
from torch import Tensor

from attnfuzz.problems.attention import AttentionCase
from attnfuzz.problems.hashing import fold, stream_key
from attnfuzz.problems.quantised_kv import LARGEST, SMALLEST, KvDtype, QuantisedKv
from attnfuzz.problems.recipes import DRAWN_KEYS, KeyRecipe, ValueRecipe
from attnfuzz.values.draws import DrawnRecipe, Filling, Recipe, Stream, drawn_as, exact, fill_all
from attnfuzz.values.tokens import TokenTable, number_each, on_device, token_table

_NEEDLE_LEVEL = 16
"""A needle's key is this many times the sign pattern; other recipes stay below 8 where they point the queries' way."""

_CODES_BELOW = {"float8_e4m3fn": 16, "float8_e5m2": 8}
"""Integers up to these have exact neighbours: 4 and 3 bits of significand."""

_BELOW_TWO = 0xBF
_LARGEST_FLOAT16 = 65504.0
_LARGEST_OF_FLOAT16 = 7168.0
"""In a format of 8 bits; times the largest scale, 8, below 65,504. Of scales that are "wide" a power of two is."""


_LARGER: dict[ValueRecipe, int] = {"positions": 6, "integers": 0, "normal": 0, "large": 9, "small": 0, "fine": 0}
"""Numbers of a recipe for V are so many powers of two above those of keys."""


@dataclass(frozen=True, slots=True)
class LogicalAttention:
    """The inputs of attention without any cache: the tokens of all sequences, one sequence after another.

    q has a row for each query token: in the decode problems, one for each sequence.
    ``starts[i]`` is the first token of sequence ``i``; ``starts[num_seqs]`` is ``total_tokens``.
    ``kv_scales``: those of K and of V in an 8-bit cache, with which ``k`` and ``v``, as it holds them, are to be
    multiplied; None where they stand for themselves.
    """

    q: Float[Tensor, "num_rows num_q_heads head_size"]
    k: Float[Tensor, "total_tokens num_kv_heads head_size"]
    v: Float[Tensor, "total_tokens num_kv_heads v_head_size"]
    starts: tuple[int, ...]
    kv_scales: Float64[Tensor, "2 num_kv_heads"] | None = None

    def dequantised(self) -> LogicalAttention:
        """These values with the K and V that the cache's numbers stand for, exact in float64; itself without scales."""
        if self.kv_scales is None:
            return self
        k_scale, v_scale = self.kv_scales[..., None]
        return replace(self, k=self.k.double() * k_scale, v=self.v.double() * v_scale, kv_scales=None)

    def sequence(
        self, i: int
    ) -> tuple[Float[Tensor, "seq_len num_kv_heads head_size"], Float[Tensor, "seq_len num_kv_heads v_head_size"]]:
        """K and V of sequence ``i``, in order of position, as the cache holds them."""
        tokens = slice(self.starts[i], self.starts[i + 1])
        return self.k[tokens], self.v[tokens]


def attention_values(case: AttentionCase, device: torch.device | str = "cpu") -> LogicalAttention:
    """The numbers of ``case``, in its dtype: the same bits on every device and library version.

    The queries are ``σ[d] · m``: a sign pattern that the whole case shares, times magnitudes 1/4, 1/2, 3/4 and 1.
    A key ``σ · r`` therefore has a score that grows with ``r`` for every query head. Keys (all times 2^logit_exponent):

    * ``equal``: ``σ``. ``rising``, ``falling``: ``σ · r/16``, r = 0 … 127 up or down the sequence.
    * ``negative``: ``-σ · c`` with c drawn from 128 … 191 per token.
    * ``integers`` (-2 … 2), ``normal`` (about N(0, 1.15²)), ``fine`` (uniform in -2 … 2, with as many bits as the dtype
      has; the others need at most 8): drawn per element; so are the queries then, unless the case has needles.
    * needles: ``16 σ`` at their position and KV head, whatever the recipe.

    Values: ``positions`` repeats 1 + position % 128, 1 + position // 128 % 128, 1 + kv_head % 128, 1 + seq % 128;
    ``integers``, ``normal``, ``fine``;
    ``large`` is ±512 … ±1020; ``small`` is what GPUs may take for 0 and what they may not: float16's subnormal numbers,
    and in the other dtypes, drawn over sixteen powers of two, 0 … 127 · 2^-118, of which an eighth are below 2^-126.
    Of an 8-bit cache, K and V are what it holds. Where V is a part of K, see `_keys_with_values`.
    """
    (values,) = attention_values_of_many([case], token_table([case], device))
    return values


def attention_values_of_many(cases: Sequence[AttentionCase], tokens: TokenTable) -> list[LogicalAttention]:
    """`attention_values` of each of ``cases``, on the device of ``tokens``, their table."""
    device = tokens.seq.device
    num_rows, num_seqs = [case.num_rows for case in cases], [case.num_seqs for case in cases]
    counts = {Stream.Q: num_rows, Stream.K: num_seqs, Stream.V: num_seqs}
    hashed = torch.cat([_hash_each(cases, stream, of_case) for stream, of_case in counts.items()])
    q_states, *states = torch.split(on_device(hashed, device), [sum(of_case) for of_case in counts.values()])
    k_states, v_states = fold(torch.stack(states)[:, tokens.owner], tokens.position).unbind()
    rows = {"signed": q_states, "k": k_states, "v": v_states}
    first_row = list(itertools.accumulate(num_rows, initial=0))
    signs = _sign_patterns(cases, device)
    rows |= _levels(cases, tokens, k_states)
    rows["code"] = _codes(tokens) if any(case.values.values == "positions" for case in cases) else v_states
    fillings: list[Filling] = []
    for i, case in enumerate(cases):
        queries = slice(first_row[i], first_row[i + 1])
        fillings += _attention_fillings(case, rows, queries, tokens.tokens_of(i), signs[i])
    drawn = fill_all(fillings)
    values = [
        LogicalAttention(
            q,
            _quantised_keys(case, k),
            _quantised_values(case, v),
            tuple(itertools.accumulate(case.seq_lens, initial=0)),
            _scales_of(case, device),
        )
        for case, q, k, v in zip(cases, drawn[::3], drawn[1::3], drawn[2::3], strict=True)
    ]
    _set_needles(cases, values, signs)
    return [_keys_with_values(case, one) for case, one in zip(cases, values, strict=True)]


def _keys_with_values(case: AttentionCase, drawn: LogicalAttention) -> LogicalAttention:
    """``drawn`` with V in place of the first numbers of each key, where the case has it there; changes it in place.

    What a recipe of keys makes of scores is left to the rest of the key: a query is 0 where V is. Only where all
    elements are drawn does it see V, which is then multiplied by 2^logit_exponent as the rest of the key is, and by as
    much less as it is larger.
    """
    if case.values_in_keys:
        size, values = case.value_size, case.values
        factor = 2.0 ** (values.logit_exponent - _LARGER[values.values]) if case.scores_read_values else 0.0
        drawn.k[..., :size] = drawn.v
        drawn.q[..., :size] *= factor
    return drawn


def _hash_each(cases: Sequence[AttentionCase], stream: Stream, counts: Sequence[int]) -> Int64[Tensor, " all"]:
    """The hash state of each of ``counts[i]`` things of each case, on the host."""
    keys = [stream_key(case.values.seed, stream) for case in cases]
    numbered = [(key, number) for key, count in zip(keys, counts, strict=True) for number in range(count)]
    key, number = torch.tensor(numbered, dtype=torch.int64, device="cpu").unbind(1)
    return cast(Tensor, fold(key, number))


def _sign_patterns(cases: Sequence[AttentionCase], device: torch.device) -> tuple[Int32[Tensor, " _head_size"], ...]:
    """The sign pattern of each case."""
    sizes = [case.head_size for case in cases]
    of_cases = [stream_key(case.values.seed, Stream.SIGN) for case in cases]
    keys = on_device(torch.tensor(of_cases, dtype=torch.int64, device="cpu"), device)
    case, dim = number_each(sizes, device)
    words: Tensor = fold(keys[case], dim)
    return torch.split(1 - (words & 2).int(), sizes)


def _attention_fillings(
    case: AttentionCase, rows: dict[str, Tensor], queries: slice, tokens: slice, signs: Int32[Tensor, " head_size"]
) -> list[Filling]:
    """q, k and v of one case."""
    keys, values = case.values.keys, case.values.values
    drawn = keys in DRAWN_KEYS
    dtype = getattr(torch, case.dtype)

    queries_shape = case.num_q_heads, case.head_size
    keys_shape = case.num_kv_heads, case.head_size
    values_shape = case.num_kv_heads, case.value_size

    def filling(state: Tensor, recipe: Recipe, shape: tuple[int, int], exponent: int) -> Filling:
        return Filling(
            rows=state,
            recipe=recipe,
            num_heads=shape[0],
            head_size=shape[1],
            dtype=dtype,
            exponent=exponent,
            signs=signs,
        )

    def drawn_query(state: Tensor, recipe: KeyRecipe) -> Filling:
        kind, exponent = drawn_as(recipe, dtype)
        return filling(state, kind, queries_shape, exponent)

    def drawn_filling(
        state: Tensor, recipe: KeyRecipe | ValueRecipe, shape: tuple[int, int], exponent: int = 0
    ) -> Filling:
        kind, exponent = _drawn_for_cache(recipe, dtype, case.kv, exponent)
        return filling(state, kind, shape, exponent)

    exponent = case.values.logit_exponent - (4 if keys in ("rising", "falling") else 0)
    return [
        filling(rows["signed"][queries], "signed", queries_shape, -2)
        if not drawn or case.values.needles
        else drawn_query(rows["signed"][queries], keys),
        drawn_filling(rows["k"][tokens], keys, keys_shape, exponent)
        if drawn
        else filling(rows[keys][tokens], "level", keys_shape, exponent),
        filling(rows["code"][tokens], "code", values_shape, 0)
        if values == "positions"
        else drawn_filling(rows["v"][tokens], values, values_shape),
    ]


def _levels(
    cases: Sequence[AttentionCase], tokens: TokenTable, k_states: Int64[Tensor, " all_tokens"]
) -> dict[str, Tensor]:
    """Factors of the sign pattern for each token, by recipe, as far as any case needs them."""
    wanted: set[KeyRecipe] = {case.values.keys for case in cases}
    levels = {}
    if "equal" in wanted:
        levels["equal"] = torch.ones_like(tokens.position)
    if "negative" in wanted:
        levels["negative"] = -(128 + (k_states >> 8 & 63))
    if wanted & {"rising", "falling"}:
        last = tokens.seq_len[tokens.owner] - 1
        rising = torch.minimum(tokens.position, last.clamp(min=0))
        for recipe, position in (("rising", rising), ("falling", last - rising)):
            levels[recipe] = torch.where(last < 128, position, position * 127 // last.clamp(min=1))
    return levels


def _codes(tokens: TokenTable) -> Int64[Tensor, " all_tokens"]:
    """Position and sequence of each token, 7 bits to the byte; the head's byte is left 0."""
    position, owner = tokens.position, tokens.local_seq[tokens.owner]
    return (position & 127) | (position >> 7 & 127) << 8 | (owner & 127) << 24


def _set_needles(
    cases: Sequence[AttentionCase],
    values: Sequence[LogicalAttention],
    signs: Sequence[Int32[Tensor, " _head_size"]],
) -> None:
    for i, case in enumerate(cases):
        hits = [*_needle_tokens(case)]
        if hits:
            token, kv_head = on_device(torch.tensor(hits, dtype=torch.int64, device="cpu"), signs[i].device).unbind(1)
            needle_key = exact(signs[i] * _NEEDLE_LEVEL, values[i].k.dtype, case.values.logit_exponent)
            values[i].k[token, kv_head] = _quantised_needle(case, needle_key)


def _needle_tokens(case: AttentionCase) -> Iterator[tuple[int, int]]:
    """Every (token, KV head) that holds a needle's key; on a shared page, in every sequence that reads it."""
    starts = tuple(itertools.accumulate(case.seq_lens, initial=0))
    for needle in case.values.needles:
        for seq in range(case.num_seqs) if needle.position < case.shared_tokens else (needle.seq,):
            if needle.position < case.seq_lens[seq]:
                yield starts[seq] + needle.position, needle.kv_head


def _drawn_for_cache(
    recipe: KeyRecipe | ValueRecipe, dtype: torch.dtype, kv: QuantisedKv | None, exponent: int = 0
) -> tuple[DrawnRecipe, int]:
    """As `drawn_as`, times ``2**exponent``, for K or V in a cache; bit patterns are drawn as they are."""
    if kv is not None and recipe == "fine":
        return "fine8", 0
    if kv is not None and recipe == "small":
        return "integers", round(math.log2(SMALLEST[kv.dtype]))
    kind, own_exponent = drawn_as(recipe, dtype)
    return kind, exponent + own_exponent


def _quantised_keys(case: AttentionCase, k: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``k`` as its recipe is drawn, before needles are set, as the cache of ``case`` holds it."""
    if case.kv is None:
        return k
    if case.values.keys == "fine":
        k = _of_bits(k, case.kv.dtype, _BELOW_TWO) * 2.0**case.values.logit_exponent
    return _rounded(k, case)


def _quantised_values(case: AttentionCase, v: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``v`` as its recipe is drawn, as the cache of ``case`` holds it."""
    if case.kv is None:
        return v
    dtype, recipe = case.kv.dtype, case.values.values
    if recipe == "fine":
        v = _of_bits(v, dtype, _BELOW_TWO if dtype == "float8_e5m2" else 0xFF)
        return v if case.kv.scales != "wide" else _rounded(v, case)
    if recipe == "positions":
        v = (v - 1) % _CODES_BELOW[dtype] + 1
    elif recipe == "large" and dtype == "float8_e4m3fn":
        v = v / 4
    return _rounded(v, case)


def _quantised_needle(case: AttentionCase, key: Float[Tensor, " head_size"]) -> Float[Tensor, " head_size"]:
    """The key of a needle, as the cache of ``case`` holds it."""
    return key if case.kv is None else _rounded(key, case)


def _rounded(numbers: Float[Tensor, "*shape"], case: AttentionCase) -> Float[Tensor, "*shape"]:
    """To the nearest of the cache, in the dtype they have. torch's versions differ in what they make of larger ones."""
    if case.kv is None:
        return numbers
    dtype = case.kv.dtype
    largest = LARGEST[dtype]
    if numbers.dtype == torch.float16:
        largest = min(largest, _LARGEST_OF_FLOAT16)
        if case.kv.scales == "wide":
            scales = case.kv.head_scales(case.num_kv_heads, case.values.seed)
            largest = min(largest, 2.0 ** math.floor(math.log2(_LARGEST_FLOAT16 / max(*scales.k, *scales.v))))
    return _numbers(numbers.float().clamp(-largest, largest).to(getattr(torch, dtype)), numbers.dtype)


def _numbers(cached: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """All numbers of an 8-bit format, in ``dtype``. Looking them up takes a CPU a fifth of torch's time."""
    if cached.is_cuda:
        return cached.to(dtype)
    codes = cached.contiguous().view(torch.uint8)
    return _all_numbers(cached.dtype, dtype).index_select(0, codes.flatten().int()).view(cached.shape)


@functools.lru_cache(maxsize=8)
def _all_numbers(cached: torch.dtype, dtype: torch.dtype) -> Float[Tensor, "256"]:
    """By the bits that stand for them."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(cached).to(dtype)


def _scales_of(case: AttentionCase, device: torch.device | str) -> Float64[Tensor, "2 num_kv_heads"] | None:
    """The scales of K and of V; None without an 8-bit cache."""
    if case.kv is None:
        return None
    scales = case.kv.head_scales(case.num_kv_heads, case.values.seed)
    return on_device(torch.tensor(scales, dtype=torch.float64, device="cpu"), device)


def _of_bits(drawn: Float[Tensor, "*shape"], dtype: KvDtype, mask: int) -> Float[Tensor, "*shape"]:
    """The numbers in ``dtype`` whose bits are the lowest 8 of these integers."""
    codes = (drawn.to(torch.int16) & mask).to(torch.uint8)
    found = _numbers(codes.view(getattr(torch, dtype)), torch.float32)
    return found.where(found.isfinite(), 0.0).to(drawn.dtype)
