"""`assert_close`: is this the attention of these tensors, within what correct kernels may round?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnfuzz.declaration import Declaration, Numerics, Supports
from attnfuzz.oracles.accuracy import objection
from attnfuzz.oracles.comparison import Comparison, Reference
from attnfuzz.problems.cases import DenseDecodeCase, PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.layouts import token_views
from attnfuzz.problems.limits import check_size
from attnfuzz.problems.supports import Layout
from attnfuzz.values import LogicalAttention

__all__ = ["assert_close"]

_BASES = {"natural": 1.0, "base2": math.log(2)}


def assert_close(
    out: Float[Tensor, "num_tokens num_q_heads v_head_size"],
    lse: Float[Tensor, "num_tokens num_q_heads"] | None = None,
    *,
    q: Float[Tensor, "num_tokens num_q_heads head_size"],
    seq_lens: Int[Tensor, " num_seqs"] | Sequence[int],
    scale: float,
    k: Float[Tensor, "num_seqs max_seq_len num_kv_heads head_size"] | None = None,
    v: Float[Tensor, "num_seqs max_seq_len num_kv_heads v_head_size"] | None = None,
    k_cache: Float[Tensor, "num_blocks ..."] | None = None,
    v_cache: Float[Tensor, "num_blocks ..."] | None = None,
    block_table: Int[Tensor, "num_seqs max_blocks_per_seq"] | None = None,
    layout: Layout = "NHD",
    cu_seqlens_q: Int[Tensor, " num_seqs_plus_1"] | Sequence[int] | None = None,
    lse_base: str = "natural",
    numerics: Numerics | None = None,
) -> None:
    """Raise AssertionError, saying which token or head is wrong, unless ``out``, and ``lse``, are within their bounds.

    Keys and values are either ``k`` and ``v`` or a paged cache with its ``block_table``, in a ``layout`` of
    `attnfuzz.Supports`. One query token for each sequence, or those that ``cu_seqlens_q`` says, causal: the last of its
    sequence. ``lse_base``: "natural" or "base2". ``numerics``: what the kernel rounds on purpose. Bounds are those of
    `attnfuzz.numerics`, and an empty sequence has 0 and -inf. Windows, caps, sinks and 8-bit caches are not known here.

    Raises ValueError for tensors that do not fit together or hold NaN or infinity where they are read.
    """
    lengths = tuple(_integers(seq_lens))
    ends = None if cu_seqlens_q is None else _integers(cu_seqlens_q)
    fields = _fields(out, q, lengths, scale)
    if k is not None and v is not None and block_table is None and ends is None:
        if max(lengths) > min(k.shape[1], v.shape[1]):
            raise ValueError(f"k has {k.shape[1]} tokens and v {v.shape[1]}, but a sequence has {max(lengths)}")
        keys, values = ([part[i, :n] for i, n in enumerate(lengths)] for part in (k, v))
        make: Any = DenseDecodeCase
    elif k_cache is not None and v_cache is not None and block_table is not None:
        views = token_views(k_cache, v_cache, layout)
        fields["block_size"] = views.k.shape[1]
        keys, values = (_gathered(part, block_table, lengths) for part in (views.k, views.v))
        make = PagedDecodeCase
        if ends is not None:
            make, fields["query_lens"] = PagedAttentionCase, tuple(b - a for a, b in itertools.pairwise(ends))
    else:
        raise ValueError(
            "give k and v, or else k_cache, v_cache and block_table, which cu_seqlens_q needs; pages of one token "
            "describe any K and V"
        )
    if values[0].shape[2] != out.shape[2]:
        raise ValueError(f"out has heads of {out.shape[2]}, and v of {values[0].shape[2]}; they must be of one size")
    case = make(num_kv_heads=keys[0].shape[1], v_head_size=values[0].shape[2], **fields)
    rows = sum(fields.get("query_lens", (1,) * len(lengths)))
    for name, tensor, shape in (
        ("q", q, (rows, case.num_q_heads, case.head_size)),
        ("out", out, (rows, case.num_q_heads, case.value_size)),
        ("lse", lse, (rows, case.num_q_heads)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with the other tensors it must be {shape}")
    check_size(case)
    logical = LogicalAttention(q, torch.cat(keys), torch.cat(values), (0, *itertools.accumulate(lengths)))
    for name, tensor in (("q", logical.q), ("k", logical.k), ("v", logical.v)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity where it is read; no result is right then")
    _judge(case, logical, out, None if lse is None else lse.double() * _base(lse_base), numerics or Numerics())


def _integers(given: Tensor | Sequence[int]) -> list[int]:
    return list(given.tolist() if isinstance(given, Tensor) else given)


def _fields(out: Tensor, q: Tensor, lengths: tuple[int, ...], scale: float) -> dict[str, Any]:
    if q.dim() != 3 or out.dim() != 3:
        raise ValueError(
            f"q and out have shapes {tuple(q.shape)} and {tuple(out.shape)}; both need tokens, heads, dims"
        )
    dtype = str(q.dtype).removeprefix("torch.")
    return {
        "num_q_heads": q.shape[1], "head_size": q.shape[2], "dtype": dtype, "seq_lens": lengths, "scale": float(scale)
    }  # fmt: skip


def _gathered(
    slots: Float[Tensor, "num_blocks block_size num_kv_heads ..."],
    block_table: Int[Tensor, "num_seqs max_blocks_per_seq"],
    lengths: tuple[int, ...],
) -> list[Tensor]:
    """The tokens of each sequence, in order; parts of a head that the packed layout has apart are put together."""
    size = slots.shape[1]
    found = []
    for row, length in zip(block_table.long().cpu(), lengths, strict=True):
        pages = row[: -(-length // size)]
        if len(pages) * size < length or bool(((pages < 0) | (pages >= len(slots))).any()):
            raise ValueError(
                f"block_table names pages {pages.tolist()} for {length} tokens; the cache has {len(slots)}"
            )
        found.append(slots[pages.to(slots.device)].flatten(0, 1)[:length].flatten(2))
    return found


def _base(name: str) -> float:
    if name not in _BASES:
        raise ValueError(f"lse_base={name!r} must be one of {', '.join(map(repr, _BASES))}")
    return _BASES[name]


def _judge(case: Any, values: LogicalAttention, out: Tensor, lse: Tensor | None, numerics: Numerics) -> None:
    supports = Supports() if lse is not None else Supports(lse="none")
    declaration = Declaration(name="result", problem=case.problem, supports=supports, numerics=numerics)
    reference = Reference(declaration, case, device=out.device.type, tolerance="bound")
    reference.values = values
    expected, bound = reference.expected, reference.bound
    rows = "token" if isinstance(case, PagedAttentionCase) else "seq"
    comparisons = [Comparison("out", (rows, "head", "dim"), out, expected.out, bound.out)]
    if lse is not None:
        comparisons.append(Comparison("lse", (rows, "head"), lse, expected.lse, bound.lse))
    failure = objection(reference, comparisons, "nan")
    if failure is not None:
        raise AssertionError("\n".join((failure.message, *failure.details)))
