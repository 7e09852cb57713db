"""A case again with many more rows and with numbers that show each error: what is wrong in few numbers shows in many.

Each number has a sign of its own, scores are of the order of 1, and there are no needles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from attnfuzz.problems.attention import AttentionCase
from attnfuzz.problems.recipes import MAX_LOGIT_EXPONENT, MIN_LOGIT_EXPONENT, NORMAL_EXPONENT, Values

_FEWEST_TOKENS = 16
_ENOUGH_ROWS = {"cpu": 128, "cuda": 1024}
"""Triton's interpreter takes milliseconds for each."""
_MOST_SEQS = 64
_MOST_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""In all runs together: what a core looks at in some tenths of a second."""
_NEXT_SEED = 0x9E3779B1
"""Odd, so that no seed comes twice."""
_DEVIATION = 36.9 * 2.0**NORMAL_EXPONENT


def repeated(case: AttentionCase, device: str) -> Iterator[AttentionCase]:
    """The case with its sequences several times over, as often as it takes; none if no row tells much."""
    rows, numbers = len(telling_rows(case)) * case.num_q_heads, case.work
    if not rows:
        return
    wanted, most = math.ceil(_ENOUGH_ROWS[device] / rows), _MOST_NUMBERS[device] // numbers
    times = max(1, min(wanted, most, _MOST_SEQS // case.num_seqs))
    fields = {**case.of_sequences([*range(case.num_seqs)] * times), **case.with_own_pages()}
    for i in range(min(math.ceil(wanted / times), most // times)):
        seed = (case.values.seed + (i + 1) * _NEXT_SEED) % (1 << 32)
        yield msgspec.structs.replace(case, values=plain_values(case, seed), **fields)


def plain_values(case: AttentionCase, seed: int) -> Values:
    """Numbers whose scores are of the order of 1, for any scale and head size."""
    exponent = round(-math.log2(case.scale * _DEVIATION**2 * math.sqrt(case.head_size)))
    exponent = max(MIN_LOGIT_EXPONENT, min(exponent, MAX_LOGIT_EXPONENT))
    return Values(keys="normal", values="normal", logit_exponent=exponent, seed=seed)


def telling_rows(case: AttentionCase) -> list[int]:
    """The last query token of each sequence, where it sees enough keys; of one sequence they would share V."""
    last = [case.rows_of(seq)[-1] for seq in range(case.num_seqs) if len(case.rows_of(seq))]
    return [row for row in last if visible_keys(case, row) >= _FEWEST_TOKENS]


def visible_keys(case: AttentionCase, row: int) -> int:
    """How many keys a row sees: those in its window, if there is one."""
    length = case.row_lens[row]
    return length if case.variant.window is None else min(length, case.variant.window)
