"""The parts a case is described with: value recipes, page maps, stride recipes. Torch-free data, strictly validated."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

KeyRecipe = Literal["equal", "integers", "normal", "rising", "falling", "negative", "fine"]
ValueRecipe = Literal["positions", "integers", "normal", "large", "small", "fine"]
StateRecipe = Literal["normal", "fine"]
LseKind = Literal["finite", "equal", "high", "low", "-inf", "+inf"]
StrideKind = Literal["contiguous", "outer_gap", "padded_rows", "transposed", "offset", "every_other"]
PageOrder = Literal["identity", "reversed", "shuffled"]
Padding = Literal["zero", "wrong_page", "garbage"]

KEY_RECIPES: tuple[str, ...] = get_args(KeyRecipe)
DRAWN_KEYS: tuple[KeyRecipe, ...] = ("integers", "normal", "fine")
"""Recipes of keys that draw every element on its own."""
VALUE_RECIPES: tuple[str, ...] = get_args(ValueRecipe)
STATE_RECIPES: tuple[StateRecipe, ...] = get_args(StateRecipe)
LSE_KINDS: tuple[str, ...] = get_args(LseKind)
LsePair = tuple[LseKind, LseKind]
STRIDE_KINDS: tuple[StrideKind, ...] = get_args(StrideKind)

MIN_LOGIT_EXPONENT, MAX_LOGIT_EXPONENT = -6, 8
MOST_TAKEN = 1024
NORMAL_EXPONENT = -5
"""The "normal" recipe draws integers of standard deviation 36.9; times 2^-5 it is 1.15."""


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueError naming the field, its value and the rule unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be between {low} and {high}")


class Needle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """One key aligned with its sequence's queries, so that it takes nearly all the weight."""

    seq: int
    position: int
    kv_head: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_range(name, getattr(self, name), 0, 1 << 30)


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How q, K and V are filled (see ``attnfuzz.values`` for the exact numbers).

    ``keys`` shapes the scores over the positions of a sequence; K is multiplied by ``2**logit_exponent``.
    ``values`` shapes V: ``"positions"`` encodes (position, KV head, sequence), so that the output names what was read.
    """

    keys: KeyRecipe = "equal"
    values: ValueRecipe = "positions"
    logit_exponent: int = 0
    seed: int = 0
    needles: tuple[Needle, ...] = ()

    def __post_init__(self) -> None:
        check_range("logit_exponent", self.logit_exponent, MIN_LOGIT_EXPONENT, MAX_LOGIT_EXPONENT)
        check_range("seed", self.seed, 0, (1 << 32) - 1)
        if len(self.needles) > 64:
            raise ValueError(f"needles holds {len(self.needles)} entries; must be at most 64")


class Pages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the pages of the sequences lie in the cache and what else the block table holds.

    ``order``: physical order of the pages that are used; ``shuffled`` also mixes the spare pages in.
    ``spare_blocks``: pages that no sequence owns. ``extra_columns``: block-table columns beyond the longest sequence.
    ``shared_blocks``: every sequence uses sequence 0's physical page for its first ``shared_blocks`` pages
    (as far as both have them), as a prefix cache does.
    ``padding``: what unused table entries hold: 0, a valid page that is wrong, or ids that do not exist.
    ``taken``: pages that sequences take before any other, one sequence after another, as a running program had them.
    """

    order: PageOrder = "identity"
    spare_blocks: int = 0
    extra_columns: int = 0
    shared_blocks: int = 0
    padding: Padding = "zero"
    seed: int = 0
    taken: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_range("len(taken)", len(self.taken), 0, MOST_TAKEN)
        for page in self.taken:
            check_range("taken", page, 0, 1 << 20)
        check_range("spare_blocks", self.spare_blocks, 0, 1 << 20)
        check_range("extra_columns", self.extra_columns, 0, 1 << 16)
        check_range("shared_blocks", self.shared_blocks, 0, 1 << 20)
        check_range("seed", self.seed, 0, (1 << 32) - 1)
