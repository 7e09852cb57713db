"""The tokens of many cases side by side, so that one operation serves them all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from attnfuzz.problems.block_table import shared_tokens
from attnfuzz.problems.cases import AttentionCase, PagedDecodeCase
from attnfuzz.values.transfer import on_device

__all__ = ["TokenTable", "token_table"]


@dataclass(frozen=True, slots=True)
class TokenTable:
    """As `TokenIndex`, for all tokens of several cases, one case after another; sequences are counted over all cases.

    ``first_token[i]`` and ``first_seq[i]`` are where case ``i`` starts; both end with the number of all.
    ``seq_len`` and ``local_seq``, the number of a sequence within its case, are per sequence.
    """

    first_token: tuple[int, ...]
    first_seq: tuple[int, ...]
    seq_len: Int64[Tensor, " all_seqs"]
    local_seq: Int64[Tensor, " all_seqs"]
    seq: Int64[Tensor, " all_tokens"]
    position: Int64[Tensor, " all_tokens"]
    owner: Int64[Tensor, " all_tokens"]

    def tokens_of(self, case: int) -> slice:
        """Where the tokens of case number ``case`` are."""
        return slice(self.first_token[case], self.first_token[case + 1])

    def seqs_of(self, case: int) -> slice:
        """Where the sequences of case number ``case`` are."""
        return slice(self.first_seq[case], self.first_seq[case + 1])


def token_table(cases: Sequence[AttentionCase], device: torch.device | str) -> TokenTable:
    """The table of all tokens of ``cases``, made on ``device`` by ten operations, however many cases there are."""
    lens = [seq_len for case in cases for seq_len in case.seq_lens]
    starts = [0, *itertools.accumulate(lens)]
    first_seq = (0, *itertools.accumulate(case.num_seqs for case in cases))
    columns = (
        lens,
        starts[:-1],
        [seq for case in cases for seq in range(case.num_seqs)],
        [first for first, case in zip(first_seq, cases, strict=False) for _ in case.seq_lens],
        [shared for case in cases for shared in [_shared(case)] * case.num_seqs],
    )
    table = on_device(torch.tensor(columns, dtype=torch.int64, device="cpu"), device)
    seq_len, start, local_seq, case_seq, shared = table.unbind()
    total = starts[-1]
    seq = torch.repeat_interleave(torch.arange(len(lens), device=device), seq_len, output_size=total)
    position = torch.arange(total, device=device) - start[seq]
    owner = torch.where(position < shared[seq], case_seq[seq], seq) if any(columns[-1]) else seq
    first_token = tuple(starts[first] for first in first_seq)
    return TokenTable(first_token, first_seq, seq_len, local_seq, seq, position, owner)


def _shared(case: AttentionCase) -> int:
    return shared_tokens(case) if isinstance(case, PagedDecodeCase) else 0
