"""Expected results and bounds of the attention problems: every KV head of every sequence is a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.numerics.arithmetic import side_by_side
from attnfuzz.numerics.attention import attention_rows
from attnfuzz.numerics.row_units import attention_units
from attnfuzz.oracles.arithmetic import arithmetic_of
from attnfuzz.oracles.row_batches import Block, Place, Results, RowBatch, joined, row_batches, windows
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.values import LogicalAttention

__all__ = ["expect_attention"]

Request = tuple[Declaration, AttentionCase, LogicalAttention]


def expect_attention(requests: Sequence[Request], *, interpreted: bool) -> tuple[Results, list[Place]]:
    """Results of at least one case, and where each case's are. `interpreted` as for `expectations`."""
    blocks: list[Block] = []
    case_of_block: list[int] = []
    places: list[Place] = []
    out = lse = key = 0
    for i, (_, case, values) in enumerate(requests):
        of_case = _blocks(case, values.starts, out, lse, key)
        blocks += of_case
        case_of_block += [i] * len(of_case)
        places.append((out, lse, (case.num_seqs, case.num_q_heads, case.head_size)))
        out += values.q.numel()
        lse += case.num_seqs * case.num_q_heads
        key += 2 * values.k.numel()
    device = requests[0][2].q.device
    results = Results(out, lse, device)
    if blocks:
        widest = max(case.head_size for _, case, _ in requests)
        queries = joined([values.q for _, _, values in requests], widest)
        tokens = joined([part for _, _, values in requests for part in (values.k, values.v)], widest)
        units = _units(requests, blocks, case_of_block, interpreted=interpreted)
        for batch in row_batches(blocks, units, device):
            q, k, v, present = _fetch(batch, queries, tokens)
            results.put(batch, attention_rows(q, k, v, present, batch.units))
    return results, places


def _blocks(case: AttentionCase, starts: tuple[int, ...], out: int, lse: int, key: int) -> list[Block]:
    """The sequences that have tokens. K, then V, of all the case's tokens begins at `key`, token after token."""
    token = case.num_kv_heads * case.head_size
    value = key + starts[-1] * token
    return [
        Block(
            num_tokens=seq_len,
            head_size=case.head_size,
            group=case.gqa_ratio,
            num_rows=case.num_kv_heads,
            out=out + seq * case.num_q_heads * case.head_size,
            lse=lse + seq * case.num_q_heads,
            key=key + starts[seq] * token,
            key_row=case.head_size,
            key_token=token,
            value=value + starts[seq] * token,
            value_token=token,
        )
        for seq, seq_len in enumerate(case.seq_lens)
        if seq_len
    ]


def _units(
    requests: Sequence[Request], blocks: Sequence[Block], case_of_block: Sequence[int], *, interpreted: bool
) -> Tensor:
    arithmetic = [arithmetic_of(declaration, case, interpreted=interpreted) for declaration, case, _ in requests]
    scales = [float(case.scale) for _, case, _ in requests]
    sizes = torch.tensor(
        [(scales[i], block.head_size, block.num_tokens) for i, block in zip(case_of_block, blocks, strict=True)],
        dtype=torch.float64,
    )
    scale, head_size, num_tokens = sizes.unbind(1)
    return attention_units(
        side_by_side([arithmetic[i] for i in case_of_block]), scale=scale, head_size=head_size, num_tokens=num_tokens
    )


def _fetch(batch: RowBatch, queries: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded q, K, V in float64 and which tokens are present; a row that is shorter repeats its last token."""
    position = torch.arange(batch.num_tokens, device=tokens.device)
    token = torch.minimum(position, batch.last_token)
    present = (position <= batch.last_token).to(torch.float64).unsqueeze(1)
    places = torch.addcmul(batch.key_and_value, token, batch.token)
    k, v = windows(tokens, batch.head_size)[places].double().unbind()
    q = windows(queries, batch.head_size)[batch.heads].where(batch.own_dims, 0).double()
    return q, k, v, present
