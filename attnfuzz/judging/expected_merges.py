"""Expected results and bounds of merge_states: every pair of states is a row of two tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.judging.arithmetic import arithmetic_of
from attnfuzz.judging.row_batches import Block, Place, Results, RowBatch, joined, row_batches, windows
from attnfuzz.numerics.arithmetic import side_by_side
from attnfuzz.numerics.merge import merge_rows
from attnfuzz.numerics.row_units import merge_units
from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.values import LogicalStates

__all__ = ["expect_merges"]

Request = tuple[Declaration, MergeStatesCase, LogicalStates]


def expect_merges(requests: Sequence[Request], *, one_copy: bool) -> tuple[Results, list[Place]]:
    """Results of at least one case, and where each case's are. `one_copy` as for `expectations`."""
    blocks: list[Block] = []
    places: list[Place] = []
    out = lse = 0
    for _, case, values in requests:
        blocks.append(_block(case, out, lse))
        places.append((out, lse, (case.num_tokens, case.num_q_heads, case.head_size)))
        out += values.prefix_output.numel()
        lse += values.prefix_lse.numel()
    device = requests[0][2].prefix_output.device
    results = Results(out, lse, device)
    widest = max(case.head_size for _, case, _ in requests)
    outputs = joined([part for *_, values in requests for part in (values.prefix_output, values.suffix_output)], widest)
    lses = joined([part for *_, values in requests for part in (values.prefix_lse, values.suffix_lse)], 0)
    arithmetic = [arithmetic_of(declaration, case, one_copy=one_copy) for declaration, case, _ in requests]
    lse_units = [math.log(2) if values.lse_base2 else 1.0 for *_, values in requests]
    units = merge_units(side_by_side(arithmetic), lse_unit=torch.tensor(lse_units, dtype=torch.float64, device="cpu"))
    for batch in row_batches(blocks, units, device):
        results.put(batch, merge_rows(*_fetch(batch, outputs, lses), batch.units))
    return results, places


def _block(case: MergeStatesCase, out: int, lse: int) -> Block:
    """All pairs of states of a case. Of both outputs and LSEs all prefixes of a case come first, then the suffixes."""
    num_pairs = case.num_tokens * case.num_q_heads
    return Block(
        num_tokens=2,
        head_size=case.head_size,
        v_head_size=case.head_size,
        group=1,
        num_rows=num_pairs,
        query=out,
        out=out,
        lse=lse,
        key=2 * lse,
        key_row=1,
        key_token=num_pairs,
        value=2 * out,
        value_row=case.head_size,
        value_token=num_pairs * case.head_size,
    )


def _fetch(batch: RowBatch, outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    side = torch.arange(2, device=outputs.device)
    of_lse, of_output = torch.addcmul(batch.key_and_value, side, batch.token).unbind()
    return lses[of_lse].double(), windows(outputs, batch.head_size)[of_output].double()
