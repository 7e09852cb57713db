"""Into how many splits a batch of decode requests is cut, by what the host knows before a launch.

That is the shape of the batch, the device, and an upper bound of the lengths: what the block table has room for, or
less if the engine knows better. The lengths themselves are on the device, and asking for them would wait for it.

``"one_per_sm"`` fills each multiprocessor with one program, and gives a split 64 tokens at least:

    num_splits = min(max(1, max_seq_len // 64), max(1, ceil(num_sms / (num_seqs · num_q_heads))))

Where there are a little fewer programs than multiprocessors, it rounds up to twice as many splits, which then take two
rounds, of half the tokens each; where there are more, it never cuts, though the last round may leave most of the device
idle. ``"device"`` weighs these. Programs run in waves of as many as the device holds at once, and the time is

    waves(n) · (ceil(max_seq_len / n) + START) + [n > 1] · (REDUCE + n),     waves(n) = ceil(num_programs · n / slots)

in units of the time that a program takes for one token. START is what a program costs before its first token, REDUCE
the second kernel, which also reads n partial results one after the other. Programs are not in step, so a few percent
are not worth a cut: the fewest splits are taken whose time is within a tenth of the shortest.
"""

from __future__ import annotations

import math
from functools import lru_cache

from attnfuzz.kernels.common.checks import check_choice, check_positive

_TOKENS_PER_SPLIT = 64
_START = 32
_REDUCE = 128
_WORTH_A_CUT = 1.1
_MOST_SPLITS = 256
"""Partial results are memory, and the second kernel reads them one after the other."""

_HEURISTICS = {"one_per_sm": "as many programs as multiprocessors", "device": "that weighs waves"}


def one_per_sm_num_splits(max_seq_len: int, num_programs: int, num_sms: int) -> int:
    """As many as give each multiprocessor a program, of enough tokens.

    ``num_programs``: without splits, a program for each sequence and query head.
    """
    return min(max(1, max_seq_len // _TOKENS_PER_SPLIT), max(1, math.ceil(num_sms / max(1, num_programs))))


@lru_cache(maxsize=4096)
def device_num_splits(max_seq_len: int, num_programs: int, num_sms: int, *, programs_per_sm: int = 4) -> int:
    """The fewest splits that by the model above take at most a tenth longer than the best number of them.

    ``num_programs`` as for the other; ``programs_per_sm``: how many programs a multiprocessor holds at once.
    """
    slots = num_sms * programs_per_sm

    def time(num_splits: int) -> int:
        waves = math.ceil(max(1, num_programs) * num_splits / slots)
        reduction = _REDUCE + num_splits if num_splits > 1 else 0
        return waves * (math.ceil(max_seq_len / num_splits) + _START) + reduction

    most = min(_MOST_SPLITS, max(1, max_seq_len // _TOKENS_PER_SPLIT))
    times = [time(num_splits) for num_splits in range(1, most + 1)]
    longest = _WORTH_A_CUT * min(times)
    return 1 + next(i for i, one in enumerate(times) if one <= longest)


def resolve_num_splits(num_splits: int | str, max_seq_len: int, num_programs: int, num_sms: int) -> int:
    """``num_splits`` itself if it is a number, else by the heuristic of that name. Raises ValueError."""
    if not isinstance(num_splits, str):
        check_positive("num_splits", num_splits)
        return num_splits
    check_choice("num_splits", num_splits, _HEURISTICS)
    choose = one_per_sm_num_splits if num_splits == "one_per_sm" else device_num_splits
    return choose(max_seq_len, num_programs, num_sms)
