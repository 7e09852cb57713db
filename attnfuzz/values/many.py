"""The numbers of many cases at once: the same bits as `attention_values` and `merge_values` give for each alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from attnfuzz.problems.cases import AttentionCase, MergeStatesCase
from attnfuzz.problems.hashing import fold, stream_key
from attnfuzz.problems.recipes import DRAWN_KEYS, LSE_KINDS, KeyRecipe, ValueRecipe
from attnfuzz.values.attention import NEEDLE_LEVEL, LogicalAttention, keys_with_values, needle_tokens
from attnfuzz.values.blocks import Block, Recipe, fill_blocks
from attnfuzz.values.draws import Stream, drawn_as, exact
from attnfuzz.values.quantised import drawn_for_cache, quantised_keys, quantised_needle, quantised_values, scales_of
from attnfuzz.values.states import LogicalStates, lse_of_kinds
from attnfuzz.values.token_table import TokenTable
from attnfuzz.values.transfer import on_device

__all__ = ["attention_values_of_many", "merge_values_of_many"]


def attention_values_of_many(cases: Sequence[AttentionCase], tokens: TokenTable) -> list[LogicalAttention]:
    """The numbers of each of ``cases``, on the device of ``tokens``, their table."""
    device = tokens.seq.device
    num_rows, num_seqs = [case.num_rows for case in cases], [case.num_seqs for case in cases]
    counts = {Stream.Q: num_rows, Stream.K: num_seqs, Stream.V: num_seqs}
    hashed = torch.cat([_hash_each(cases, stream, of_case) for stream, of_case in counts.items()])
    q_states, *states = torch.split(on_device(hashed, device), [sum(of_case) for of_case in counts.values()])
    k_states, v_states = fold(torch.stack(states)[:, tokens.owner], tokens.position).unbind()
    rows = {"signed": q_states, "k": k_states, "v": v_states}
    first_row = list(itertools.accumulate(num_rows, initial=0))
    signs = _sign_patterns(cases, device)
    rows |= _levels(cases, tokens, k_states)
    rows["code"] = _codes(tokens) if any(case.values.values == "positions" for case in cases) else v_states
    blocks: list[Block] = []
    for i, case in enumerate(cases):
        queries = slice(first_row[i], first_row[i + 1])
        blocks += _attention_blocks(case, rows, queries, tokens.tokens_of(i), signs[i])
    drawn = fill_blocks(blocks)
    values = [
        LogicalAttention(
            q,
            quantised_keys(case, k),
            quantised_values(case, v),
            tuple(itertools.accumulate(case.seq_lens, initial=0)),
            scales_of(case, device),
        )
        for case, q, k, v in zip(cases, drawn[::3], drawn[1::3], drawn[2::3], strict=True)
    ]
    _set_needles(cases, values, signs)
    return [keys_with_values(case, one) for case, one in zip(cases, values, strict=True)]


def merge_values_of_many(
    cases: Sequence[MergeStatesCase],
    device: torch.device | str,
    *,
    lse_base2: bool = False,
    empty_are_zeros: bool = False,
) -> list[LogicalStates]:
    """The numbers of each of ``cases``; ``lse_base2`` and ``empty_are_zeros`` as in `merge_values`."""
    counts = [case.num_tokens for case in cases]
    streams = (Stream.PREFIX_OUTPUT, Stream.SUFFIX_OUTPUT)
    keys = torch.tensor(
        [[stream_key(case.seed, stream) for case in cases] for stream in streams], dtype=torch.int64, device="cpu"
    )
    case, token = _number(counts, device)
    states = fold(on_device(keys, device)[:, case], token)
    drawn_ones = [drawn_as(case.outputs, getattr(torch, case.dtype)) for case in cases]
    blocks = [
        Block(
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
    drawn = fill_blocks(blocks)
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


def _hash_each(cases: Sequence[AttentionCase], stream: Stream, counts: Sequence[int]) -> Int64[Tensor, " all"]:
    """The hash state of each of ``counts[i]`` things of each case, on the host."""
    keys = [stream_key(case.values.seed, stream) for case in cases]
    numbered = [(key, number) for key, count in zip(keys, counts, strict=True) for number in range(count)]
    key, number = torch.tensor(numbered, dtype=torch.int64, device="cpu").unbind(1)
    return cast(Tensor, fold(key, number))


def _sign_patterns(cases: Sequence[AttentionCase], device: torch.device) -> tuple[Int32[Tensor, " _head_size"], ...]:
    """The sign pattern of each case."""
    sizes = [case.head_size for case in cases]
    of_cases = [stream_key(case.values.seed, Stream.SIGN) for case in cases]
    keys = on_device(torch.tensor(of_cases, dtype=torch.int64, device="cpu"), device)
    case, dim = _number(sizes, device)
    words: Tensor = fold(keys[case], dim)
    return torch.split(1 - (words & 2).int(), sizes)


def _attention_blocks(
    case: AttentionCase, rows: dict[str, Tensor], queries: slice, tokens: slice, signs: Int32[Tensor, " head_size"]
) -> list[Block]:
    """q, k and v of one case."""
    keys, values = case.values.keys, case.values.values
    drawn = keys in DRAWN_KEYS
    dtype = getattr(torch, case.dtype)

    queries_shape = case.num_q_heads, case.head_size
    keys_shape = case.num_kv_heads, case.head_size
    values_shape = case.num_kv_heads, case.value_size

    def block(state: Tensor, recipe: Recipe, shape: tuple[int, int], exponent: int) -> Block:
        return Block(
            rows=state,
            recipe=recipe,
            num_heads=shape[0],
            head_size=shape[1],
            dtype=dtype,
            exponent=exponent,
            signs=signs,
        )

    def drawn_query(state: Tensor, recipe: KeyRecipe) -> Block:
        kind, exponent = drawn_as(recipe, dtype)
        return block(state, kind, queries_shape, exponent)

    def drawn_block(state: Tensor, recipe: KeyRecipe | ValueRecipe, shape: tuple[int, int], exponent: int = 0) -> Block:
        kind, exponent = drawn_for_cache(recipe, dtype, case.kv, exponent)
        return block(state, kind, shape, exponent)

    exponent = case.values.logit_exponent - (4 if keys in ("rising", "falling") else 0)
    return [
        block(rows["signed"][queries], "signed", queries_shape, -2)
        if not drawn or case.values.needles
        else drawn_query(rows["signed"][queries], keys),
        drawn_block(rows["k"][tokens], keys, keys_shape, exponent)
        if drawn
        else block(rows[keys][tokens], "level", keys_shape, exponent),
        block(rows["code"][tokens], "code", values_shape, 0)
        if values == "positions"
        else drawn_block(rows["v"][tokens], values, values_shape),
    ]


def _levels(
    cases: Sequence[AttentionCase], tokens: TokenTable, k_states: Int64[Tensor, " all_tokens"]
) -> dict[str, Tensor]:
    """Factors of the sign pattern for each token, by recipe, as far as any case needs them."""
    wanted: set[KeyRecipe] = {case.values.keys for case in cases}
    levels = {}
    if "equal" in wanted:
        levels["equal"] = torch.ones_like(tokens.position)
    if "negative" in wanted:
        levels["negative"] = -(128 + (k_states >> 8 & 63))
    if wanted & {"rising", "falling"}:
        last = tokens.seq_len[tokens.owner] - 1
        rising = torch.minimum(tokens.position, last.clamp(min=0))
        for recipe, position in (("rising", rising), ("falling", last - rising)):
            levels[recipe] = torch.where(last < 128, position, position * 127 // last.clamp(min=1))
    return levels


def _codes(tokens: TokenTable) -> Int64[Tensor, " all_tokens"]:
    """Position and sequence of each token, 7 bits to the byte; the head's byte is left 0."""
    position, owner = tokens.position, tokens.local_seq[tokens.owner]
    return (position & 127) | (position >> 7 & 127) << 8 | (owner & 127) << 24


def _set_needles(
    cases: Sequence[AttentionCase],
    values: Sequence[LogicalAttention],
    signs: Sequence[Int32[Tensor, " _head_size"]],
) -> None:
    for i, case in enumerate(cases):
        hits = [*needle_tokens(case)]
        if hits:
            token, kv_head = on_device(torch.tensor(hits, dtype=torch.int64, device="cpu"), signs[i].device).unbind(1)
            needle_key = exact(signs[i] * NEEDLE_LEVEL, values[i].k.dtype, case.values.logit_exponent)
            values[i].k[token, kv_head] = quantised_needle(case, needle_key)


def _lses(cases: Sequence[MergeStatesCase], sizes: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
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
    case, row = _number(sizes, device)
    at = on_device(table, device)[:, case]
    kinds = on_device(torch.tensor(pairs, dtype=torch.int64, device="cpu"), device)[at[3] + row % at[4]]
    prefix, suffix, common = (fold(at[:3], row) >> 8 & 127).unbind()
    lse = lse_of_kinds(kinds.T.flatten(), torch.cat((prefix, suffix)), common.repeat(2))
    return lse[: len(row)], lse[len(row) :]


def _number(counts: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """For ``counts[i]`` things of each case: the case, and their number within it."""
    columns = [counts, [0, *itertools.accumulate(counts)][:-1]]
    table = on_device(torch.tensor(columns, dtype=torch.int64, device="cpu"), device)
    case = torch.repeat_interleave(torch.arange(len(counts), device=device), table[0], output_size=sum(counts))
    return case, torch.arange(sum(counts), device=device) - table[1, case]
