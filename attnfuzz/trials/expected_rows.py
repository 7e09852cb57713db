"""Expected results and bounds of many cases as rows: the KV heads of each query token, or pairs of states.

A row of attention has the keys that its query sees, so a window costs nothing. Cases with a soft cap, ALiBi or sinks
take more operations and go by themselves: there, a sink is one more token of its row. A pair of states to be merged is
a row of two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.numerics.arithmetic import Arithmetic, attention_arithmetic, merge_arithmetic, side_by_side
from attnfuzz.numerics.bounds import attention_rows, merge_rows
from attnfuzz.numerics.row_units import attention_units, merge_units, variant_units
from attnfuzz.numerics.rows import RowResult
from attnfuzz.numerics.scores import VariantRows
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase
from attnfuzz.problems.quantised_kv import smallest_magnitudes
from attnfuzz.trials.row_batches import Place, Results, RowBatch, RowBlock, joined, row_batches, to_device, windows
from attnfuzz.values import LogicalAttention, LogicalStates


def arithmetic_of(declaration: Declaration, case: AttentionCase | MergeStatesCase, *, one_copy: bool) -> Arithmetic:
    """Units of what the kernel may round. `one_copy`: see `attention_bound`.

    A kernel may add sinks in a stage of its own, as it combines splits.
    """
    dtype = getattr(torch, case.dtype)
    if not isinstance(case, AttentionCase):
        return merge_arithmetic(dtype)
    num_partials = _num_partials(declaration, case)
    return attention_arithmetic(
        declaration.numerics,
        in_dtype=dtype,
        out_dtype=dtype,
        is_split=num_partials > 1 or case.variant.sinks is not None,
        partial_merge=case.partial_states > 0,
        one_copy=one_copy,
        num_partials=num_partials,
        smallest_kv=_smallest_kv(case),
    )


def _smallest_kv(case: AttentionCase) -> tuple[float, float] | None:
    if case.kv is None:
        return None
    return smallest_magnitudes(case.kv, case.kv.head_scales(case.num_kv_heads, case.values.seed))


def _num_partials(declaration: Declaration, case: AttentionCase) -> int:
    """A kernel that does not say into how many parts it splits a sequence may split it: the looser bound.

    One that chains their merges then has as many as there are tokens, a sink among them, since each rounds once more.
    """
    if case.partial_states:
        return case.partial_states
    most = max(case.seq_lens, default=0) + 1 if declaration.numerics.partials == "chained" else 2
    choices = declaration.options.get("num_splits")
    num_splits = case.options.get("num_splits", choices[0] if choices else most)
    return num_splits if isinstance(num_splits, int) and num_splits >= 1 else most


Request = tuple[Declaration, AttentionCase, LogicalAttention]


def changes_scores(case: AttentionCase) -> bool:
    """Whether `case` has a variant other than a window."""
    variant = case.variant
    return variant.soft_cap is not None or variant.alibi is not None or variant.sinks is not None


def expect_attention(requests: Sequence[Request], *, one_copy: bool) -> tuple[Results, list[Place]]:
    """Results of at least one case, and where each case's are. `one_copy` as for `expectations`.

    Either all or none of the cases are such that their variant `changes_scores`.
    """
    blocks: list[RowBlock] = []
    case_of_block: list[int] = []
    places: list[Place] = []
    query = out = lse = key = 0
    for i, (_, case, values) in enumerate(requests):
        of_case = _blocks(case, values.starts, query, out, lse, key)
        blocks += of_case
        case_of_block += [i] * len(of_case)
        places.append((out, lse, (case.num_rows, case.num_q_heads, case.value_size)))
        query += values.q.numel()
        out += case.num_rows * case.num_q_heads * case.value_size
        lse += case.num_rows * case.num_q_heads
        key += values.k.numel() + values.v.numel()
    device = requests[0][2].q.device
    results = Results(out, lse, device)
    if blocks:
        widest = max(max(case.head_size, case.value_size) for _, case, _ in requests)
        queries = joined([values.q for _, _, values in requests], widest)
        exact = [values.dequantised() for _, _, values in requests]
        tokens = joined([part for values in exact for part in (values.k, values.v)], widest)
        units = _units(requests, blocks, case_of_block, one_copy=one_copy)
        per_head = to_device(_per_head(requests), device) if changes_scores(requests[0][1]) else None
        for batch in row_batches(blocks, units, device):
            if per_head is None:
                results.put(batch, attention_rows(*_fetch(batch, queries, tokens), batch.units))
            else:
                results.put(batch, _attention_with_variants(batch, queries, tokens, per_head))
    return results, places


def _blocks(case: AttentionCase, starts: tuple[int, ...], query: int, out: int, lse: int, key: int) -> list[RowBlock]:
    """The rows that have keys. K, then V, of all the case's tokens begins at `key`, token after token.

    With sinks above -inf all rows, with one token more, which has no key.
    """
    token, v_token = case.num_kv_heads * case.head_size, case.num_kv_heads * case.value_size
    value = key + starts[-1] * token
    num_sinks = int(case.variant.has_weighty_sinks)
    return [
        RowBlock(
            num_tokens=num_keys + num_sinks,
            head_size=case.head_size,
            v_head_size=case.value_size,
            group=case.gqa_ratio,
            num_rows=case.num_kv_heads,
            query=query + row * case.num_q_heads * case.head_size,
            out=out + row * case.num_q_heads * case.value_size,
            lse=lse + row * case.num_q_heads,
            key=key + first * token if num_keys else 0,  # without keys, anywhere
            key_row=case.head_size if num_keys else 0,
            key_token=token,
            value=value + first * v_token if num_keys else 0,
            value_row=case.value_size if num_keys else 0,
            value_token=v_token,
        )
        for row, num_keys, first in _visible(case, starts)
        if num_keys or num_sinks
    ]


def _visible(case: AttentionCase, starts: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Each query token, how many keys it sees, and the first of them among the tokens of the case."""
    window = case.variant.window
    for row, (seq, length) in enumerate(zip(case.row_seqs, case.row_lens, strict=True)):
        num_keys = length if window is None else min(length, window)
        yield row, num_keys, starts[seq] + length - num_keys


def _units(
    requests: Sequence[Request], blocks: Sequence[RowBlock], case_of_block: Sequence[int], *, one_copy: bool
) -> Tensor:
    arithmetic = [arithmetic_of(declaration, case, one_copy=one_copy) for declaration, case, _ in requests]
    scales = [float(case.scale) for _, case, _ in requests]
    sizes = torch.tensor(
        [(scales[i], block.head_size, block.num_tokens) for i, block in zip(case_of_block, blocks, strict=True)],
        dtype=torch.float64,
        device="cpu",
    )
    scale, head_size, num_tokens = sizes.unbind(1)
    of_block = side_by_side([arithmetic[i] for i in case_of_block])
    if not changes_scores(requests[0][1]):
        return attention_units(of_block, scale=scale, head_size=head_size, num_tokens=num_tokens)
    soft_cap, is_biased, reach, has_sink = _variant_columns([requests[i][1] for i in case_of_block])
    return variant_units(
        of_block,
        scale=scale,
        head_size=head_size,
        num_tokens=num_tokens,
        soft_cap=soft_cap,
        is_biased=is_biased,
        reach=reach,
        has_sink=has_sink,
    )


def _variant_columns(cases: Sequence[AttentionCase]) -> Sequence[Tensor]:
    """Variants of the case of each block: soft cap, whether it has ALiBi, longest reach, whether it has sinks."""
    variants = [case.variant for case in cases]
    rows = [
        (variant.soft_cap or 0.0, variant.alibi is not None, max(case.seq_lens) - 1, variant.has_weighty_sinks)
        for case, variant in zip(cases, variants, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").unbind(1)


def _per_head(requests: Sequence[Request]) -> Tensor:
    """ALiBi slopes and sinks `[2, num_lse]` of every query head of every row, 0 where a case has none."""
    slopes: list[float] = []
    sinks: list[float] = []
    for _, case, _ in requests:
        numbers = case.variant.per_head_numbers(case.num_q_heads, case.values.seed)
        none = (0.0,) * case.num_q_heads
        slopes += numbers.get("alibi_slopes", none) * case.num_rows
        sinks += numbers.get("sinks", none) * case.num_rows
    return torch.tensor([slopes, sinks], dtype=torch.float64, device="cpu")


def _attention_with_variants(batch: RowBatch, queries: Tensor, tokens: Tensor, per_head: Tensor) -> RowResult:
    has_sink = batch.units.variant.has_sink.view(-1, 1).long() if batch.units.variant is not None else 0
    position = torch.arange(batch.num_tokens, device=tokens.device)
    last_key = batch.last_token - has_sink
    is_sink = (position > last_key) & (has_sink > 0)
    keys = replace(batch, last_token=last_key.clamp(min=0))
    q, k, v, _ = _fetch(keys, queries, tokens)
    slope, sink = per_head[:, batch.lse].unsqueeze(-1).unbind()
    variant = VariantRows(
        slope=slope,
        sink=sink,
        distance=torch.minimum(position - last_key, position.new_zeros(())).to(torch.float64).unsqueeze(1),
        is_sink=is_sink.unsqueeze(1),
    )
    present = (position <= batch.last_token).to(torch.float64).unsqueeze(1)
    v = v.masked_fill(is_sink.unsqueeze(-1), 0.0)
    return attention_rows(q, k, v, present, batch.units, variant)


def _fetch(batch: RowBatch, queries: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded q, K, V in float64 and which tokens are present; a row that is shorter repeats its last token."""
    position = torch.arange(batch.num_tokens, device=tokens.device)
    token = torch.minimum(position, batch.last_token)
    present = (position <= batch.last_token).to(torch.float64).unsqueeze(1)
    places = torch.addcmul(batch.key_and_value, token, batch.token)
    k, v = windows(tokens, batch.head_size)[places].double().unbind()
    q = windows(queries, batch.head_size)[batch.queries].where(batch.own_dims, 0).double()
    return q, k, v, present


MergeRequest = tuple[Declaration, MergeStatesCase, LogicalStates]


def expect_merges(requests: Sequence[MergeRequest], *, one_copy: bool) -> tuple[Results, list[Place]]:
    """Results of at least one case, and where each case's are. `one_copy` as for `expectations`."""
    blocks: list[RowBlock] = []
    places: list[Place] = []
    out = lse = 0
    for _, case, values in requests:
        blocks.append(_block_of_states(case, out, lse))
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
        results.put(batch, merge_rows(*_fetch_states(batch, outputs, lses), batch.units))
    return results, places


def _block_of_states(case: MergeStatesCase, out: int, lse: int) -> RowBlock:
    """All pairs of states of a case. Of both outputs and LSEs all prefixes of a case come first, then the suffixes."""
    num_pairs = case.num_tokens * case.num_q_heads
    return RowBlock(
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


def _fetch_states(batch: RowBatch, outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    side = torch.arange(2, device=outputs.device)
    of_lse, of_output = torch.addcmul(batch.key_and_value, side, batch.token).unbind()
    return lses[of_lse].double(), windows(outputs, batch.head_size)[of_output].double()
