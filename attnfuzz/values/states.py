"""The two states that a case of merge_states merges, of many cases at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from attnfuzz.problems.hashing import fold, stream_key
from attnfuzz.problems.recipes import LSE_KINDS
from attnfuzz.values.draws import Filling, Stream, drawn_as, exact, fill_all
from attnfuzz.values.tokens import number_each, on_device

_LSE_FAR = 192
""""high" and "low": exp and exp2 of ±192 leave float32 on either side, so a merge that skips the maximum fails."""


@dataclass(frozen=True, slots=True)
class LogicalStates:
    """Two states per (token, query head). An LSE of -inf or +inf says that the state is empty and its output unused.

    ``empty_are_zeros``: that output holds zeros nevertheless; else nobody writes it.
    ``lse_base2``: the LSE numbers are base-2 logarithms (the numbers themselves are the same for both bases).
    """

    prefix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    suffix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    prefix_lse: Float32[Tensor, "num_tokens num_q_heads"]
    suffix_lse: Float32[Tensor, "num_tokens num_q_heads"]
    lse_base2: bool = False
    empty_are_zeros: bool = False

    @property
    def prefix_live(self) -> Bool[Tensor, "num_tokens num_q_heads"]:
        """Rows whose prefix state holds keys."""
        return self.prefix_lse.isfinite()

    @property
    def suffix_live(self) -> Bool[Tensor, "num_tokens num_q_heads"]:
        """Rows whose suffix state holds keys."""
        return self.suffix_lse.isfinite()


def merge_values(
    case: Any, device: torch.device | str = "cpu", *, lse_base2: bool = False, empty_are_zeros: bool = False
) -> LogicalStates:
    """The numbers of ``case``: outputs about N(0, 1.15²), or fine, LSE multiples of 1/16.

    LSE kinds: ``finite`` is drawn from [-4, 4) for each side, ``equal`` from the same range once for both sides,
    ``high`` from [192, 196), ``low`` from [-196, -192); ``-inf`` and ``+inf`` are what they say.
    """
    (values,) = merge_values_of_many([case], device, lse_base2=lse_base2, empty_are_zeros=empty_are_zeros)
    return values


def merge_values_of_many(
    cases: Sequence[Any],
    device: torch.device | str,
    *,
    lse_base2: bool = False,
    empty_are_zeros: bool = False,
) -> list[LogicalStates]:
    """`merge_values` of each of ``cases``."""
    counts = [case.num_tokens for case in cases]
    streams = (Stream.PREFIX_OUTPUT, Stream.SUFFIX_OUTPUT)
    keys = torch.tensor(
        [[stream_key(case.seed, stream) for case in cases] for stream in streams], dtype=torch.int64, device="cpu"
    )
    case, token = number_each(counts, device)
    states = fold(on_device(keys, device)[:, case], token)
    drawn_ones = [drawn_as(case.outputs, getattr(torch, case.dtype)) for case in cases]
    fillings = [
        Filling(
            rows=rows,
            recipe=drawn_ones[i][0],
            num_heads=cases[i].num_q_heads,
            head_size=cases[i].head_size,
            dtype=getattr(torch, cases[i].dtype),
            exponent=drawn_ones[i][1],
        )
        for side in states
        for i, rows in enumerate(torch.split(side, counts))
    ]
    drawn = fill_all(fillings)
    sizes = [case.num_tokens * case.num_q_heads for case in cases]
    prefix_lses, suffix_lses = (torch.split(side, sizes) for side in _lses(cases, sizes, device))
    return [
        LogicalStates(
            drawn[i],
            drawn[len(cases) + i],
            prefix_lses[i].view(case.num_tokens, case.num_q_heads),
            suffix_lses[i].view(case.num_tokens, case.num_q_heads),
            lse_base2,
            empty_are_zeros,
        )
        for i, case in enumerate(cases)
    ]


def _lses(cases: Sequence[Any], sizes: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """LSEs of the prefix and the suffix for each token and head of each case."""
    streams = (Stream.PREFIX_LSE, Stream.SUFFIX_LSE, Stream.COMMON_LSE)
    pairs = [tuple(map(LSE_KINDS.index, pair)) for case in cases for pair in case.lse_pairs]
    first_pair = [0, *itertools.accumulate(len(case.lse_pairs) for case in cases)]
    table = torch.tensor(
        [
            *([stream_key(case.seed, stream) for case in cases] for stream in streams),
            first_pair[:-1],
            [len(case.lse_pairs) for case in cases],
        ],
        dtype=torch.int64,
        device="cpu",
    )
    case, row = number_each(sizes, device)
    at = on_device(table, device)[:, case]
    kinds = on_device(torch.tensor(pairs, dtype=torch.int64, device="cpu"), device)[at[3] + row % at[4]]
    prefix, suffix, common = (fold(at[:3], row) >> 8 & 127).unbind()
    lse = _lse_of_kinds(kinds.T.flatten(), torch.cat((prefix, suffix)), common.repeat(2))
    return lse[: len(row)], lse[len(row) :]


def _lse_of_kinds(
    kinds: Int64[Tensor, " rows"], own: Int64[Tensor, " rows"], common: Int64[Tensor, " rows"]
) -> Float32[Tensor, " rows"]:
    """LSEs of the kinds ``LSE_KINDS[kinds]``, from numbers 0 to 127 drawn for one side and for both sides in common."""
    far = 16 * _LSE_FAR
    by_kind = {
        "finite": own - 64,
        "equal": common - 64,
        "high": far + own // 2,
        "low": -far - 1 - own // 2,
        "-inf": own.new_zeros(()),
        "+inf": own.new_zeros(()),
    }
    sixteenths = torch.stack([by_kind[kind].expand_as(own) for kind in LSE_KINDS]).gather(0, kinds[None])[0]
    lse = exact(sixteenths, torch.float32, -4)
    for kind in ("-inf", "+inf"):
        lse.masked_fill_(kinds == LSE_KINDS.index(kind), float(kind))
    return lse
