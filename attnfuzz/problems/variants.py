"""Variants of attention: what is done to the scores beyond ``scale · q Kᵀ``, and the few numbers that it takes.

A case that says nothing of it is plain. With ``p`` the position of the query and ``t`` that of a key, both counted from
the sequence's first token (a decode query is its last: ``p = seq_len - 1``):

* ``window = w``: the query sees the ``w`` keys ``p - w < t <= p``, itself included, as Mistral's models do (Jiang et
  al., arXiv 2310.06825). vLLM's ``sliding_window = w`` is this; FlashAttention's ``window_size = (left, right)`` and
  FlashInfer's ``window_left`` do not count the query itself: ``left = w - 1``. With ``freed_pages`` pages that lie
  before the windows of all queries are dead memory (`attnfuzz.problems.block_table`); other keys outside are live.
* ``soft_cap = c``: each score ``s``, scaled already, becomes ``c tanh(s / c)`` (Gemma 2, arXiv 2408.00118).
* ``alibi``: ``slope_h · (t - p)`` is added to the scores of query head ``h`` (Press et al., arXiv 2108.12409). The LSE
  is that of these scores: zero at the query's own position.
* ``sinks``: one more logit for each query head, which takes weight and adds nothing to the output (gpt-oss,
  arXiv 2508.10925). It is neither scaled nor capped nor biased, and the LSE includes it, as FlashInfer's and
  FlashAttention's do: both put it into the running sum that the LSE is the logarithm of. A sequence without keys has
  ``out = 0`` and ``lse = sink``. A sink of -inf takes no weight: the result is that without it.

Torch-free.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Literal, get_args

import msgspec

from attnfuzz.problems.hashing import fold, stream_key

VariantName = Literal["window", "soft_cap", "alibi", "sinks"]
AlibiRecipe = Literal["geometric", "scattered"]
SinkRecipe = Literal["level", "high", "low", "absent"]

VARIANTS: tuple[VariantName, ...] = get_args(VariantName)
ALIBI_RECIPES: tuple[AlibiRecipe, ...] = get_args(AlibiRecipe)
SINK_RECIPES: tuple[SinkRecipe, ...] = get_args(SinkRecipe)

VARIANT_TENSORS: dict[str, VariantName] = {"alibi_slopes": "alibi", "sinks": "sinks"}
"""What holds one number for each query head, and the variant that it is there for."""

MAX_WINDOW = 1 << 24
MAX_SOFT_CAP = 1024.0
_SLOPES, _SINKS = 10, 11  # hash streams of a case's seed, beside those of `attnfuzz.values.draws.Stream`
_SINK_LEVELS: dict[SinkRecipe, float] = {"level": 0, "high": 48, "low": -48, "absent": -math.inf}


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The variants that a case asks for beyond plain attention; None: not that.

    ``alibi``: slopes as published (``"geometric"``, see `alibi_slopes`), or unlike each other (``"scattered"``).
    ``freed_pages``: whether pages behind the window have been given to others; False without a window.
    ``sinks``: about as large as usual scores (``"level"``), above (``"high"``) or below them (``"low"``); all -inf
    (``"absent"``).
    """

    window: int | None = None
    soft_cap: float | None = None
    alibi: AlibiRecipe | None = None
    sinks: SinkRecipe | None = None
    freed_pages: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window <= MAX_WINDOW:
            raise ValueError(f"window={self.window!r} must be between 1 and {MAX_WINDOW}; leave it out for no window")
        if self.window is None:  # equal variants are written in one way
            msgspec.structs.force_setattr(self, "freed_pages", False)
        if self.soft_cap is not None and not 0 < self.soft_cap <= MAX_SOFT_CAP:
            raise ValueError(f"soft_cap={self.soft_cap!r} must be in (0, {MAX_SOFT_CAP}]; leave it out for no cap")
        if self.soft_cap is not None and self.alibi is not None:
            raise ValueError(
                "soft_cap and alibi exclude each other: vLLM and FlashAttention cap the scores before they add the "
                "bias, FlashInfer after; leave one of them out"
            )

    def with_freed_pages(self) -> Variant:
        """This variant with pages behind the window freed."""
        return msgspec.structs.replace(self, freed_pages=True)

    @property
    def names(self) -> tuple[VariantName, ...]:
        """The variants that are asked for."""
        return tuple(name for name in VARIANTS if getattr(self, name) is not None)

    @property
    def has_weighty_sinks(self) -> bool:
        """Whether there are sinks above -inf."""
        return self.sinks is not None and self.sinks != "absent"

    def per_head_numbers(self, num_q_heads: int, seed: int) -> dict[str, tuple[float, ...]]:
        """The numbers that it takes for each query head, by the names of the tensors that hold it: float32 numbers."""
        found: dict[str, tuple[float, ...]] = {}
        if self.alibi is not None:
            found["alibi_slopes"] = alibi_slopes(self.alibi, num_q_heads, seed)
        if self.sinks is not None:
            found["sinks"] = sink_logits(self.sinks, num_q_heads, seed)
        return found


PLAIN_VARIANT = Variant()
_SIMPLEST = Variant(window=1, soft_cap=MAX_SOFT_CAP, sinks=SINK_RECIPES[0]), Variant(alibi=ALIBI_RECIPES[0])


def with_variants(variant: Variant, names: Collection[VariantName]) -> Variant:
    """``variant`` that also asks for ``names``, without what excludes them. Raises ValueError if they do themselves."""
    missing = [name for name in names if name not in variant.names]
    if "alibi" in missing:  # no model has it beside sinks
        variant = msgspec.structs.replace(variant, soft_cap=None, sinks=None)
    elif variant.alibi is not None and missing and "alibi" not in names:
        variant = msgspec.structs.replace(variant, alibi=None)
    found = {name: getattr(one, name) for one in _SIMPLEST for name in one.names}
    return msgspec.structs.replace(variant, **{name: found[name] for name in names if name not in variant.names})


def absent_tensors(variant: Variant) -> frozenset[str]:
    """The `VARIANT_TENSORS` that a case with this variant does not have."""
    return frozenset(name for name, of in VARIANT_TENSORS.items() if getattr(variant, of) is None)


@lru_cache(maxsize=1024)
def alibi_slopes(recipe: AlibiRecipe, num_q_heads: int, seed: int) -> tuple[float, ...]:
    """One slope above 0 for each query head, a float32 number.

    ``geometric``: ``2^(-8 (h + 1) / n)`` for a power of two ``n``; of another number of heads the first ones have the
    slopes of the power of two below, the others every second one of the power above (as the authors' code has it).
    ``scattered``: multiples of 1/64 up to 1, drawn for each head.
    """
    if recipe == "scattered":
        return tuple((1 + (word & 63)) / 64 for word in _words(seed, _SLOPES, num_q_heads))
    below = 1 << (num_q_heads.bit_length() - 1)
    slopes = [*_geometric(below), *_geometric(2 * below)[::2]]
    return tuple(slopes[:num_q_heads])


@lru_cache(maxsize=1024)
def sink_logits(recipe: SinkRecipe, num_q_heads: int, seed: int) -> tuple[float, ...]:
    """One logit for each query head, within 4 of the recipe's level: multiples of 1/8 (``level``) or of 1/4.

    bfloat16 holds them, which is what FlashAttention 3 takes sinks in.
    """
    bits = 6 if recipe == "level" else 5
    words = (word & ((1 << bits) - 1) for word in _words(seed, _SINKS, num_q_heads))
    return tuple(_SINK_LEVELS[recipe] + word * 8 / (1 << bits) - 4 for word in words)


def _geometric(num_heads: int) -> list[float]:
    """The slopes for a power of two heads. Square roots and products are rounded alike on every machine, powers are
    not."""
    ratio = 2.0**-8
    for _ in range(num_heads.bit_length() - 1):
        ratio = math.sqrt(ratio)
    slopes, slope = [], 1.0
    for _ in range(num_heads):
        slope *= ratio
        slopes.append(_as_float32(slope))
    return slopes


def _as_float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _words(seed: int, stream: int, count: int) -> Iterator[int]:
    key = stream_key(seed, stream)
    return (fold(key, i) >> 8 for i in range(count))
