"""Facts about each mistake by its name, whatever the case that shows it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PAST_THE_END = "past_the_end"
"""Slots that hold none of a sequence's tokens take weight."""
WITHOUT_WEIGHT = "read_without_weight"
"""A "dead_memory" failure where numbers in the place of NaN make no difference: 0 x NaN is NaN."""
READ_BEFORE_WRITTEN = "read_before_written"
"""An "unwritten" failure where a result changes with memory that nobody had written."""
KEPT_BETWEEN_CALLS = "kept_between_calls"
"""A case fails after other calls, and passes in a process of its own."""
LSE_TRANSPOSED = "lse_transposed"
"""The log-sum-exp has its axes, heads and rows, the other way round."""
OF_PROBLEM = "mistaken"
"""One of the mistakes that the problem knows, which gives all results of several cases; its way says which."""
RACE = "race"
"""The result depends on the order in which the programs of a launch run."""
NARROW_OFFSETS = "narrow_offsets"
KV_SCALES = "kv_scales"
K_SCALE, V_SCALE = "k_scale", "v_scale"
OTHER_STRIDES = "other_strides"
"""A "red_zone" failure where a result lies where the strides of another tensor put it."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """``name`` is short and stable: saved findings and reports call it so.

    - ``is_everywhere``: a kernel makes it wherever it computes. So it names the bug.
    - ``rounds``: it loses bits.
    - ``reads``: which tokens were read, or where; that goes by the size of a case and by what lies at a wrong address,
      so that two such mistakes, told of two cases, may be one.
    - ``of``: the mistake of which it is a part, which may be made by itself.
    """

    name: str
    is_everywhere: bool = False
    rounds: bool = False
    reads: bool = False
    of: str = ""

    @property
    def is_of_luck(self) -> bool:
        """Whether luck or size decides which cases show it, so that what these have says nothing."""
        return self.rounds or self.name == NARROW_OFFSETS


def _everywhere(*names: str, rounds: bool) -> dict[str, Mistake]:
    return {name: Mistake(name, is_everywhere=True, rounds=rounds) for name in names}


def _reads(*names: str) -> dict[str, Mistake]:
    return {name: Mistake(name, reads=True) for name in names}


_KNOWN = (
    {name: Mistake(name, of=KV_SCALES) for name in (K_SCALE, V_SCALE)}
    | _everywhere(
        "converted",
        "cut_off",
        "exponential_rounded",
        "flushed",
        "maximum_begins_finite",
        "maximum_not_kept",
        "maximum_not_subtracted",
        "maximum_of_hidden_keys",
        "maximum_of_one_part",
        "output_rounded",
        "partial_lse_rounded",
        "range_of_float16",
        "rounded_weights_summed",
        "scores_rounded",
        "sums_rounded",
        "tf32",
        "weights_rounded",
        rounds=True,
    )
    | _everywhere(LSE_TRANSPOSED, NARROW_OFFSETS, OTHER_STRIDES, "partial_lse", "value_columns", rounds=False)
    | _reads(
        PAST_THE_END,
        READ_BEFORE_WRITTEN,
        WITHOUT_WEIGHT,
        "another_length",
        "another_page",
        "another_query",
        "another_row",
        "another_sequence",
        "another_token",
        "block_table",
        "causal_limit",
        "displaced_rows",
        "ignored_page_ids",
        "ignored_stride",
        "output_is_zero",
        "single_token",
        "tokens_counted_twice",
        "tokens_dropped",
        "treated_as_empty",
        "values_dropped",
        "weights_dropped",
    )
)


def mistake_of(name: str) -> Mistake:
    """The facts about a mistake; for one that is not listed, no more than its name."""
    return _KNOWN.get(name) or Mistake(name)


def common_to(names: Iterable[str]) -> str:
    """The mistake that all of these are, or are parts of; empty if they have none in common."""
    every = frozenset(names)
    whole = {mistake_of(one).of or one for one in every}
    return next(iter(every if len(every) == 1 else whole), "") if len(whole) == 1 else ""


def parts_of(names: frozenset[str]) -> frozenset[str]:
    """These, and all parts of those that have some."""
    return names | {one.name for one in _KNOWN.values() if one.of in names}


def in_particular(names: frozenset[str]) -> frozenset[str]:
    """These without those of which a part is among them; of the others all parts."""
    return parts_of(names - {mistake_of(one).of for one in names})


def are_of_what_was_read(names: frozenset[str]) -> bool:
    """Whether all of these only say what was read; so do none at all."""
    return all(mistake_of(name).reads for name in names)


def are_roundings(names: frozenset[str]) -> bool:
    """Whether all of these lose bits; so do none at all."""
    return all(mistake_of(name).rounds for name in names)
