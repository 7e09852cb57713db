"""q, K and V of the attention problems, on logical positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from attnfuzz.problems.block_table import shared_tokens
from attnfuzz.problems.cases import AttentionCase, PagedDecodeCase
from attnfuzz.problems.hashing import fold, stream_key
from attnfuzz.problems.limits import HASH_CHUNK_ELEMENTS
from attnfuzz.problems.recipes import DRAWN_KEYS, ValueRecipe
from attnfuzz.values.draws import Stream, draw, drawn_as, element_words, exact
from attnfuzz.values.quantised import drawn_for_cache, quantised_keys, quantised_needle, quantised_values, scales_of

__all__ = [
    "LogicalAttention",
    "TokenIndex",
    "attention_values",
    "decode_position",
    "keys_with_values",
    "needle_tokens",
    "token_index",
]

NEEDLE_LEVEL = 16
"""A needle's key is this many times the sign pattern; other recipes stay below 8 where they point the queries' way."""


_LARGER: dict[ValueRecipe, int] = {"positions": 6, "integers": 0, "normal": 0, "large": 9, "small": 0, "fine": 0}
"""Numbers of a recipe for V are so many powers of two above those of keys."""


@dataclass(frozen=True, slots=True)
class LogicalAttention:
    """What attention is computed from, without any cache: the tokens of all sequences, one sequence after another.

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
        """The same with K and V for which the cache's numbers stand, exact in float64; itself without scales."""
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


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """For each token: the sequence that reads it, its position there, and the sequence whose values it has.

    ``owner`` differs from ``seq`` on pages shared with sequence 0, whose tokens are sequence 0's.
    """

    seq: Int64[Tensor, " total_tokens"]
    position: Int64[Tensor, " total_tokens"]
    owner: Int64[Tensor, " total_tokens"]


def token_index(case: AttentionCase, device: torch.device | str = "cpu") -> TokenIndex:
    """Index of all tokens of ``case``, one sequence after another."""
    total = sum(case.seq_lens)
    lens = torch.tensor((case.seq_lens, _starts(case)[:-1]), dtype=torch.int64, device=device)
    seq = torch.repeat_interleave(torch.arange(case.num_seqs, device=device), lens[0], output_size=total)
    position = torch.arange(total, device=device) - lens[1][seq]
    shared = _shared(case)
    return TokenIndex(seq, position, torch.where(position < shared, 0, seq) if shared else seq)


def attention_values(case: AttentionCase, device: torch.device | str = "cpu") -> LogicalAttention:
    """The numbers of ``case``, in its dtype: the same bits on every device and library version.

    The queries are ``σ[d] · m``: a sign pattern that the whole case shares, times magnitudes 1/4, 1/2, 3/4 and 1.
    A key ``σ · r`` therefore has a score that grows with ``r`` for every query head. Keys (all times 2^logit_exponent):

    * ``equal``: ``σ``. ``rising``, ``falling``: ``σ · r/16``, r = 0 … 127 up or down the sequence.
    * ``negative``: ``-σ · c`` with c drawn from 128 … 191 per token.
    * ``integers`` (-2 … 2), ``normal`` (about N(0, 1.15²)), ``fine`` (uniform in -2 … 2, with as many bits as the dtype
      has; the others need at most 8): drawn per element; so are the queries then, unless the case has needles.
    * needles: ``16 σ`` at their position and KV head, whatever the recipe.

    Values: ``positions`` repeats the four numbers of ``decode_position``; ``integers``, ``normal``, ``fine``;
    ``large`` is ±512 … ±1020; ``small`` is what GPUs may take for 0 and what they may not: float16's subnormal numbers,
    and in the other dtypes, drawn over sixteen powers of two, 0 … 127 · 2^-118, of which an eighth are below 2^-126.
    For an 8-bit cache see `attnfuzz.values.quantised`, for V that is a part of K `keys_with_values`.
    """
    dtype = getattr(torch, case.dtype)
    tokens = token_index(case, device)
    sign = _sign_pattern(case, device)
    k = quantised_keys(case, _keys(case, tokens, sign, dtype))
    needle_key = exact(sign * NEEDLE_LEVEL, dtype, case.values.logit_exponent)
    _set_needles(case, k, quantised_needle(case, needle_key))
    v = quantised_values(case, _values(case, tokens, dtype))
    drawn = LogicalAttention(_queries(case, sign, dtype), k, v, _starts(case), scales_of(case, device))
    return keys_with_values(case, drawn)


def keys_with_values(case: AttentionCase, drawn: LogicalAttention) -> LogicalAttention:
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


def decode_position(row: Sequence[float] | Float[Tensor, " head_size"]) -> tuple[int, int, int] | None:
    """The ``(position, kv_head, seq)`` that a row of position-coded V names, or None if it is no such row.

    ``V[d]`` is, by ``d % 4``: 1 + position % 128, 1 + position // 128 % 128, 1 + kv_head % 128, 1 + seq % 128.
    Positions are known modulo 16384, the others modulo 128. A row shorter than 4 does not tell.
    """
    numbers = [float(number) for number in row]
    if len(numbers) < 4 or any(number not in _CODES for number in numbers):
        return None
    if any(number != numbers[d % 4] for d, number in enumerate(numbers)):
        return None
    low, high, kv_head, seq = (int(number) - 1 for number in numbers[:4])
    return low + 128 * high, kv_head, seq


_CODES = frozenset(float(code) for code in range(1, 129))


def _starts(case: AttentionCase) -> tuple[int, ...]:
    return (0, *itertools.accumulate(case.seq_lens))


def _shared(case: AttentionCase) -> int:
    return shared_tokens(case) if isinstance(case, PagedDecodeCase) else 0


def _sign_pattern(case: AttentionCase, device: torch.device | str) -> Int64[Tensor, " head_size"]:
    words: Tensor = fold(stream_key(case.values.seed, Stream.SIGN), torch.arange(case.head_size, device=device))
    return 1 - (words & 2)


def _queries(
    case: AttentionCase, sign: Int64[Tensor, " head_size"], dtype: torch.dtype
) -> Float[Tensor, "num_rows num_q_heads head_size"]:
    states: Tensor = fold(stream_key(case.values.seed, Stream.Q), torch.arange(case.num_rows, device=sign.device))
    words = element_words(states, case.num_q_heads, case.head_size)
    keys = case.values.keys
    if keys in DRAWN_KEYS and not case.values.needles:
        recipe, exponent = drawn_as(keys, dtype)
        return exact(draw(words, recipe), dtype, exponent)
    return exact(((words & 3) + 1) * sign, dtype, -2)


def _keys(
    case: AttentionCase, tokens: TokenIndex, sign: Int64[Tensor, " head_size"], dtype: torch.dtype
) -> Float[Tensor, "total_tokens num_kv_heads head_size"]:
    keys, exponent = case.values.keys, case.values.logit_exponent
    if keys in DRAWN_KEYS:
        return _drawn(case, tokens, Stream.K, dtype, exponent)
    if keys in ("rising", "falling"):
        exponent -= 4
    rows = exact(_levels(case, tokens)[:, None] * sign, dtype, exponent)
    return rows[:, None, :].repeat(1, case.num_kv_heads, 1)


def _levels(case: AttentionCase, tokens: TokenIndex) -> Int64[Tensor, " total_tokens"]:
    """The factor of the sign pattern, per token."""
    if case.values.keys == "equal":
        return torch.ones_like(tokens.position)
    if case.values.keys == "negative":
        return -(128 + (_token_states(case, tokens, Stream.K) >> 8 & 63))
    last = torch.tensor(case.seq_lens, dtype=torch.int64, device=tokens.owner.device)[tokens.owner] - 1
    # A page shared with sequence 0 can hold positions that sequence 0 itself has not reached: they count as its last.
    position = torch.minimum(tokens.position, last.clamp(min=0))
    if case.values.keys == "falling":
        position = last - position
    return torch.where(last < 128, position, position * 127 // last.clamp(min=1))


def _values(
    case: AttentionCase, tokens: TokenIndex, dtype: torch.dtype
) -> Float[Tensor, "total_tokens num_kv_heads v_head_size"]:
    if case.values.values != "positions":
        return _drawn(case, tokens, Stream.V, dtype, 0)
    codes = torch.zeros((len(tokens.seq), case.num_kv_heads, 4), dtype=torch.int64, device=tokens.seq.device)
    codes[..., 0] = (tokens.position & 127)[:, None]
    codes[..., 1] = (tokens.position >> 7 & 127)[:, None]
    codes[..., 2] = torch.arange(case.num_kv_heads, device=tokens.seq.device) & 127
    codes[..., 3] = (tokens.owner & 127)[:, None]
    return exact(codes + 1, dtype).repeat(1, 1, -(-case.value_size // 4))[..., : case.value_size].contiguous()


def _drawn(
    case: AttentionCase, tokens: TokenIndex, stream: Stream, dtype: torch.dtype, exponent: int
) -> Float[Tensor, "total_tokens num_kv_heads head_size_of_stream"]:
    of_keys = stream == Stream.K
    recipe, size = (case.values.keys, case.head_size) if of_keys else (case.values.values, case.value_size)
    kind, exponent = drawn_for_cache(recipe, dtype, case.kv, exponent)
    states = _token_states(case, tokens, stream)
    chunk = max(1, HASH_CHUNK_ELEMENTS // (case.num_kv_heads * size))
    if len(states) <= chunk:
        return exact(draw(element_words(states, case.num_kv_heads, size), kind), dtype, exponent)
    out = torch.empty((len(states), case.num_kv_heads, size), dtype=dtype, device=states.device)
    for rows, part in zip(torch.split(out, chunk), torch.split(states, chunk), strict=True):
        rows.copy_(exact(draw(element_words(part, case.num_kv_heads, size), kind), dtype, exponent))
    return out


def _token_states(case: AttentionCase, tokens: TokenIndex, stream: Stream) -> Int64[Tensor, " total_tokens"]:
    states: Tensor = fold(fold(stream_key(case.values.seed, stream), tokens.owner), tokens.position)
    return states


def _set_needles(
    case: AttentionCase,
    k: Float[Tensor, "total_tokens num_kv_heads head_size"],
    needle_key: Float[Tensor, " head_size"],
) -> None:
    hits = [*needle_tokens(case)]
    if hits:
        token, kv_head = torch.tensor(hits, dtype=torch.int64, device=k.device).unbind(1)
        k[token, kv_head] = needle_key


def needle_tokens(case: AttentionCase) -> Iterator[tuple[int, int]]:
    """Every (token, KV head) that holds a needle's key; on a shared page, in every sequence that reads it."""
    starts, shared = _starts(case), _shared(case)
    for needle in case.values.needles:
        for seq in range(case.num_seqs) if needle.position < shared else (needle.seq,):
            if needle.position < case.seq_lens[seq]:
                yield starts[seq] + needle.position, needle.kv_head
