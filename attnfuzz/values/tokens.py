"""The tokens of many cases side by side, so that one operation serves them all, brought to a device without a wait."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from attnfuzz.problems.attention import AttentionCase

_Values = TypeVar("_Values", bound=Any)


def on_device(host: Shaped[Tensor, "*shape"], device: torch.device | str) -> Shaped[Tensor, "*shape"]:
    """``host`` on ``device``. A copy from pageable memory would first wait until the GPU is idle."""
    if torch.device(device).type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def all_on_device(hosts: Sequence[Shaped[Tensor, "..."]], device: torch.device | str) -> list[Shaped[Tensor, "..."]]:
    """As `on_device` for many small tensors, in one copy for each dtype."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(host.dtype for host in hosts):
        chosen = [i for i, host in enumerate(hosts) if host.dtype == dtype]
        sizes = [hosts[i].numel() for i in chosen]
        joined = torch.empty(sum(sizes), dtype=dtype, device="cpu", pin_memory=torch.device(device).type != "cpu")
        torch.cat([hosts[i].reshape(-1) for i in chosen], out=joined)
        parts = torch.split(joined.to(device, non_blocking=True), sizes)
        found |= {i: part.view(hosts[i].shape) for i, part in zip(chosen, parts, strict=True)}
    return [found[i] for i in range(len(hosts))]


def values_on(values: _Values, device: torch.device | str) -> _Values:
    """These logical values, a dataclass of tensors and numbers, in the memory of `device`."""
    parts = {field.name: getattr(values, field.name) for field in fields(values)}
    moved = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(values, **moved)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """For each token of several cases, one case after another: the sequence that reads it, its position there, and the
    sequence whose values it has (``owner``). Sequences are counted over all cases.

    ``owner`` differs from ``seq`` on pages shared with sequence 0 of a case, whose tokens are its.

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
        [shared for case in cases for shared in [case.shared_tokens] * case.num_seqs],
    )
    table = on_device(torch.tensor(columns, dtype=torch.int64, device="cpu"), device)
    seq_len, start, local_seq, case_seq, shared = table.unbind()
    total = starts[-1]
    seq = torch.repeat_interleave(torch.arange(len(lens), device=device), seq_len, output_size=total)
    position = torch.arange(total, device=device) - start[seq]
    owner = torch.where(position < shared[seq], case_seq[seq], seq) if any(columns[-1]) else seq
    first_token = tuple(starts[first] for first in first_seq)
    return TokenTable(first_token, first_seq, seq_len, local_seq, seq, position, owner)


def number_each(counts: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """For ``counts[i]`` things of each case: the case, and their number within it."""
    columns = [counts, [0, *itertools.accumulate(counts)][:-1]]
    table = on_device(torch.tensor(columns, dtype=torch.int64, device="cpu"), device)
    case = torch.repeat_interleave(torch.arange(len(counts), device=device), table[0], output_size=sum(counts))
    return case, torch.arange(sum(counts), device=device) - table[1, case]
