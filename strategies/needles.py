"""Keys that take nearly all the weight, put where a boundary error would drop or double them."""

from __future__ import annotations

from typing import NamedTuple

from attnfuzz.problems.boundaries import DEFAULT_TILES, boundary_positions, causal_positions
from attnfuzz.problems.recipes import Needle
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
