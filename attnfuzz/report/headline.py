"""A case in one line."""

from __future__ import annotations

from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)

__all__ = ["count", "headline", "one_line"]

_MAX_LENGTHS = 8


def headline(case: Case) -> str:
    """Problem, dtype, heads and pages: "paged_decode · float16 · head_size 64 · 4 query heads on 1 KV head · ..."."""
    parts = [case.problem, case.dtype, f"head_size {case.head_size}"]
    if isinstance(case, AttentionCase) and case.kv is not None:
        parts[1] += f", cache {case.kv.dtype} with a scale per {case.kv.per}"
    if isinstance(case, AttentionCase) and case.v_head_size is not None:
        parts += [f"v_head_size {case.v_head_size}"]
    if isinstance(case, MergeStatesCase):
        parts += [count(case.num_tokens, "token"), count(case.num_q_heads, "query head")]
    else:
        parts += [f"{count(case.num_q_heads, 'query head')} on {count(case.num_kv_heads, 'KV head')}"]
    if isinstance(case, PagedDecodeCase):
        parts += [f"{case.layout}, pages of {count(case.block_size, 'token')}"]
    return " · ".join(parts)


def one_line(case: Case) -> str:
    """What the case is in plain characters, with the lengths of its sequences, variants and options."""
    parts = [headline(case).replace(" · ", ", ")]
    if isinstance(case, PagedAttentionCase):
        parts.append(f"query_lens {_listed(case.query_lens)}")
    if isinstance(case, AttentionCase):
        parts += [f"seq_lens {_listed(case.seq_lens)}", *case.variant.names]
    if isinstance(case, SplitDecodeCase):
        parts.append(f"num_splits={case.num_splits}")
    return ", ".join([*parts, *(f"{name}={value}" for name, value in case.options.items())])


def _listed(lengths: tuple[int, ...]) -> str:
    return ", ".join(map(str, lengths[:_MAX_LENGTHS])) + (", ..." if len(lengths) > _MAX_LENGTHS else "")


def count(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
