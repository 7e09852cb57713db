"""Draws the contents of q, K and V: score shapes, magnitudes and softmax scales, needles; and LSEs to be merged."""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

from attnfuzz.problems.boundaries import DEFAULT_TILES, boundary_positions, causal_positions
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import (
    MAX_LOGIT_EXPONENT,
    MIN_LOGIT_EXPONENT,
    KeyRecipe,
    LseKind,
    LsePair,
    Needle,
    ValueRecipe,
    Values,
)
from attnfuzz.strategies.decisions import Decisions

MOST_NEEDLES = 3
_PRESENT = (False, False, True)
_NEEDLE_BYTES = 4
NEEDLES_BYTES = MOST_NEEDLES * _NEEDLE_BYTES


class Causal(NamedTuple):
    """Query tokens of each sequence, none where the problem has no causal limit, and ``query_steps``.

    ``window``: keys that a query sees, if not all.
    """

    query_lens: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    window: int | None = None

    def positions(self, seq: int, seq_len: int) -> tuple[int, ...]:
        """Where a limit of a query token lies, and just past it; of the window, that of the last one."""
        ends = causal_positions(seq_len, self.query_lens[seq], self.steps) if self.query_lens else ()
        if self.window is None or self.window >= seq_len:
            return ends
        return (*ends, seq_len - self.window - 1, seq_len - self.window)


NOT_CAUSAL = Causal()


def decide_needles(
    decisions: Decisions,
    seq_lens: tuple[int, ...],
    *,
    num_kv_heads: int,
    steps: tuple[int, ...],
    num_splits: int,
    causal: Causal = NOT_CAUSAL,
    max_needles: int = MOST_NEEDLES,
) -> tuple[Needle, ...]:
    """Each of the needles is there or not by itself, so that the shrinker can remove any of them."""
    rows = [seq for seq, seq_len in enumerate(seq_lens) if seq_len]
    drawn = set()
    for _ in range(max_needles if rows else 0):
        needle = decisions.part(_NEEDLE_BYTES)
        if needle.pick(_PRESENT):
            seq = needle.pick(rows)
            ends = boundary_positions(seq_lens[seq], steps or DEFAULT_TILES, num_splits)
            position = needle.pick((*ends, *causal.positions(seq, seq_lens[seq])))
            drawn.add(Needle(seq=seq, position=position, kv_head=needle.pick(range(num_kv_heads))))
    return tuple(sorted(drawn))


_KEYS: tuple[KeyRecipe, ...] = (*get_args(KeyRecipe), "fine")
"""Twice the recipe that alone tells rounded inputs from others, in one dtype of three."""
_KEYS_OF_SPLITS: tuple[KeyRecipe, ...] = (*_KEYS, *("negative",) * 4)
"""Merging has more maxima that begin, or are masked, at -inf. Not with sinks or a cap, which keep them up."""
_KEYS_OF_MASKED_TILES: tuple[KeyRecipe, ...] = (*_KEYS, *("negative",) * 8, *("equal",) * 3)
"""A maximum that a tile without keys leaves behind shows where all scores lie far below it, or far above."""
_VALUES: tuple[ValueRecipe, ...] = get_args(ValueRecipe)
_HIGH_EXPONENTS = (0, 4, 8)
_EXPONENTS = (0, 0, 0, 0, 1, 2, 4, 8, -2, -6)
_LOW_SCORE = 5.1e4
"""Numbers of this size stand in for -inf in kernels (FlashInfer's is -5e4)."""
_LOW_SCORE_OF_TIES = 8e3
"""The same of an 8-bit cache, which rounds ``negative`` keys to three or five numbers. Errors of scores decide between
tokens of equal ones, and at 5e4 they amount to a factor of e: then any mixture of values is within the bound."""
_NEGATIVE_SCORE = 80.0
"""Of ``negative`` keys, for each of the head's dimensions and before the scale: the least, on average over queries."""
_LARGEST_REACH = 4096.0
"""Head size x scale x scale of K x 2^exponent. Beyond it scores err by so much that any mixture of values is within its
bound."""
_SEEDS = range(64)
_FACTORS = (1.0, 0.125, 0.5, 2.0, 0.0625)
VALUES_BYTES = 4 + NEEDLES_BYTES


def decide_scale(decisions: Decisions, head_size: int) -> float:
    """``1/sqrt(head_size)`` half of the time."""
    usual = default_scale(head_size)
    return decisions.pick((*[usual] * len(_FACTORS), *_FACTORS))


def decide_values(
    decisions: Decisions,
    seq_lens: tuple[int, ...],
    *,
    num_kv_heads: int,
    steps: tuple[int, ...],
    num_splits: int,
    reach: float,
    causal: Causal = NOT_CAUSAL,
    may_lie_low: bool = True,
    begins_masked: bool = False,
    kv: QuantisedKv | None = None,
) -> Values:
    """``reach``: head size times scale. What an 8-bit cache multiplies K with counts as well.

    ``begins_masked``: whether some row sees nothing of the tile that its block begins with.
    """
    of_low = _KEYS_OF_MASKED_TILES if begins_masked else _KEYS_OF_SPLITS if num_splits > 1 else _KEYS
    keys = decisions.pick(of_low if may_lie_low else _KEYS)
    values = decisions.pick(_VALUES)
    seed = decisions.pick(_SEEDS)
    largest_scale = max(kv.head_scales(num_kv_heads, seed).k) if kv is not None else 1.0
    reach *= largest_scale
    lowest = _exponent((_LOW_SCORE if kv is None else _LOW_SCORE_OF_TIES) / (_NEGATIVE_SCORE * reach))
    is_level = begins_masked and keys == "equal"
    exponents = (0, lowest, lowest // 2, lowest) if keys == "negative" else _HIGH_EXPONENTS if is_level else _EXPONENTS
    exponent = decisions.pick(exponents)
    if kv is not None and kv.scales == "wide" and keys != "negative":  # numbers as large as their scales are small
        exponent = max(MIN_LOGIT_EXPONENT, min(exponent - round(math.log2(largest_scale)), MAX_LOGIT_EXPONENT))
    exponent = min(exponent, lowest if keys == "negative" else _exponent(_LARGEST_REACH / reach))
    if kv is not None and kv.scales == "large":  # what the cache stands for stays in float16
        keys, exponent = "normal" if keys == "negative" else keys, MIN_LOGIT_EXPONENT
    needles = decide_needles(
        decisions,
        seq_lens,
        num_kv_heads=num_kv_heads,
        steps=steps,
        num_splits=num_splits,
        causal=causal,
        max_needles=0 if is_level else _most_needles(keys, lies_low=exponent == lowest),
    )
    return Values(keys=keys, values=values, logit_exponent=exponent, seed=seed, needles=needles)


def _exponent(factor: float) -> int:
    """The least power of 2 that reaches ``factor``, as far as cases have it."""
    return min(max(MIN_LOGIT_EXPONENT, math.ceil(math.log2(factor))), MAX_LOGIT_EXPONENT)


def _most_needles(keys: KeyRecipe, *, lies_low: bool) -> int:
    """Beside them queries are not fine, and the largest score of a row is far above 0: of low ones most have none."""
    if keys == "negative":
        return 0 if lies_low else 1
    return 0 if keys == "fine" else MOST_NEEDLES


_MOST_PAIRS = 8
_PAIR_PRESENT = (False, True)
_PAIR_BYTES = 3
LSE_PAIRS_BYTES = _MOST_PAIRS * _PAIR_BYTES


def decide_lse_pairs(
    decisions: Decisions, kinds: tuple[LseKind, ...], *, min_pairs: int, max_pairs: int
) -> tuple[LsePair, ...]:
    """Each pair is there or not by itself, so that the shrinker can remove any of them."""
    pairs: list[LsePair] = []
    for _ in range(_MOST_PAIRS):
        pair = decisions.part(_PAIR_BYTES)
        if pair.pick(_PAIR_PRESENT):
            pairs.append((pair.pick(kinds), pair.pick(kinds)))
    return (*pairs[:max_pairs], *[(kinds[0], kinds[0])] * (min_pairs - len(pairs)))
