"""`assert_close`: is this the attention of these tensors, within what correct kernels may round?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.explaining.diagnose import no_runs
from attnfuzz.inputs.layouts import token_views
from attnfuzz.oracles.accuracy import objection
from attnfuzz.problems.cases import DenseDecodeCase, PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.limits import check_size
from attnfuzz.problems.quantised_kv import KV_DTYPES, KvScales, QuantisedKv
from attnfuzz.problems.supports import Layout, Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, Variant
from attnfuzz.trials.comparison import Comparison, Reference, axes_of
from attnfuzz.values import LogicalAttention

__tracebackhide__ = True
"""pytest then shows the line that calls `assert_close`, and none of this module."""

_BASES: dict[str | float, float] = {"natural": 1.0, math.e: 1.0, "base2": math.log(2), 2: math.log(2)}
_SWAPPED = {"NHD": "HND", "HND": "NHD"}


class _GivenVariant(Variant, frozen=True, kw_only=True):
    """One whose numbers for each query head are somebody's own."""

    given: dict[str, tuple[float, ...]]

    def per_head_numbers(self, num_q_heads: int, seed: int) -> dict[str, tuple[float, ...]]:
        of = {"alibi_slopes": self.alibi, "sinks": self.sinks}
        return {name: numbers for name, numbers in self.given.items() if of[name] is not None}


class _GivenScales(QuantisedKv, frozen=True, kw_only=True):
    given: KvScales

    def head_scales(self, num_kv_heads: int, seed: int) -> KvScales:
        return self.given


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
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Tensor, " num_q_heads"] | None = None,
    sinks: Float[Tensor, " num_q_heads"] | None = None,
    k_scale: Float[Tensor, "..."] | float | None = None,
    v_scale: Float[Tensor, "..."] | float | None = None,
    lse_base: str | float = "natural",
    numerics: Numerics | None = None,
) -> None:
    """Raise AssertionError, saying which token or head is wrong, unless ``out``, and ``lse``, are within their bounds.

    Keys and values are either ``k`` and ``v`` or a paged cache with its ``block_table``, whose ``layout`` is one of
    `attnfuzz.Supports`. Each sequence has one query token, or as many as ``cu_seqlens_q`` says, causal: the last of its
    sequence. ``window`` (which counts the query itself), ``soft_cap``, ``alibi_slopes`` and ``sinks`` mean what
    `attnfuzz.problems.variants` says. K and V of 8 bits are multiplied with ``k_scale`` and ``v_scale``: one number, or
    one for each KV head. ``lse_base`` is the base of the logarithm in ``lse``: "natural", or 2 (also "base2").
    ``numerics`` says what the kernel rounds on purpose. `attnfuzz.numerics` derives the bounds; an empty sequence must
    have 0 and -inf.

    Raises ValueError for tensors that do not fit together or hold NaN or infinity where they are read. Where another
    ``layout`` or ``lse_base`` makes the results right, either error says so.
    """
    given: dict[str, Any] = {
        "q": q, "seq_lens": seq_lens, "scale": scale, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache,
        "block_table": block_table, "layout": layout, "cu_seqlens_q": cu_seqlens_q, "window": window,
        "soft_cap": soft_cap, "alibi_slopes": alibi_slopes, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
        "lse_base": _base(lse_base), "numerics": numerics or Numerics(),
    }  # fmt: skip
    try:
        reference, comparisons = _compared(out, lse, **given)
        failure = objection(reference, comparisons, "nan", nearby=no_runs)
    except ValueError as error:
        if remedy := _remedy(out, lse, given):
            raise ValueError(f"{error}\n{remedy}") from None
        raise
    if failure is not None:
        told = (failure.message, *failure.details, _remedy(out, lse, given))
        raise AssertionError("\n".join(filter(None, told)))


def _remedy(out: Tensor, lse: Tensor | None, given: dict[str, Any]) -> str:
    """The argument with which these results are right, if it was forgotten; empty where there is none."""
    k_cache, bases, layouts = given["k_cache"], [given["lse_base"]], [given["layout"]]
    if k_cache is not None and k_cache.dim() == 4 and layouts[0] in _SWAPPED:
        layouts.append(_SWAPPED[layouts[0]])
    if lse is not None:
        bases += {1.0, math.log(2)} - {*bases}
    for other_layout, base in list(itertools.product(layouts, bases))[1:]:
        try:
            _, comparisons = _compared(out, lse, **{**given, "layout": other_layout, "lse_base": base})
        except ValueError:
            continue
        if any(bool((one.ratio > 1).any()) for one in comparisons):
            continue
        arguments, why = [], []
        if other_layout != given["layout"]:
            arguments.append(f"layout={other_layout!r}")
            slots = token_views(given["k_cache"], given["v_cache"], given["layout"]).k
            why.append(
                f"as {given['layout']} this cache has pages of {slots.shape[1]} tokens and {slots.shape[2]} KV heads"
            )
        if base != given["lse_base"]:
            arguments.append("lse_base=2" if base != 1 else 'lse_base="natural"')
            why.append("lse holds " + ("base-2" if base != 1 else "natural") + " logarithms")
        return f"with {', '.join(arguments)} these results are right: {'; '.join(why)}"
    return ""


def _compared(
    out: Tensor,
    lse: Tensor | None,
    *,
    q: Tensor,
    seq_lens: Tensor | Sequence[int],
    scale: float,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    block_table: Tensor | None,
    layout: Layout,
    cu_seqlens_q: Tensor | Sequence[int] | None,
    window: int | None,
    soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    lse_base: float,
    numerics: Numerics,
) -> tuple[Reference, list[Comparison]]:
    """The results beside what these arguments give; ``lse_base`` is the natural logarithm of the base."""
    lengths = tuple(_integers(seq_lens))
    ends = None if cu_seqlens_q is None else _integers(cu_seqlens_q)
    fields = _fields(out, q, lengths, scale)
    fields["variant"] = _variant(q.shape[1], window, soft_cap, {"alibi_slopes": alibi_slopes, "sinks": sinks})
    new = (1,) * len(lengths) if ends is None else tuple(b - a for a, b in itertools.pairwise(ends))
    seen = [slice(max(0, n - max(of, 1) + 1 - (window or n)), n) for n, of in zip(lengths, new, strict=True)]
    if k is not None and v is not None and block_table is None and ends is None:
        if max(lengths) > min(k.shape[1], v.shape[1]):
            raise ValueError(f"k has {k.shape[1]} tokens and v {v.shape[1]}, but a sequence has {max(lengths)}")
        keys, values = ([_behind(part[i, of], of.start) for i, of in enumerate(seen)] for part in (k, v))
        kv = _scales(keys[0], k_scale, v_scale)
        make: Any = DenseDecodeCase
        if kv is not None or fields["variant"].names:  # which dense_decode does not know
            make, fields["block_size"] = PagedDecodeCase, k.shape[1]
    elif k_cache is not None and v_cache is not None and block_table is not None:
        views = token_views(k_cache, v_cache, layout)
        fields["block_size"] = views.k.shape[1]
        keys, values = (_gathered(part, block_table, seen) for part in (views.k, views.v))
        kv = _scales(keys[0], k_scale, v_scale)
        make = PagedDecodeCase
        if ends is not None:
            make, fields["query_lens"] = PagedAttentionCase, new
    else:
        raise ValueError(
            "give k and v, or else k_cache, v_cache and block_table, which cu_seqlens_q needs; pages of one token "
            "describe any K and V"
        )
    if values[0].shape[2] != out.shape[2]:
        raise ValueError(f"out has heads of {out.shape[2]}, and v of {values[0].shape[2]}; they must be of one size")
    if kv is not None:
        fields["kv"] = kv
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
    scales = None if kv is None else torch.tensor(kv.given, dtype=torch.float64, device=q.device)
    starts = (0, *itertools.accumulate(lengths))
    logical = LogicalAttention(q, torch.cat(keys).to(q.dtype), torch.cat(values).to(q.dtype), starts, scales)
    for name, tensor in (("q", logical.q), ("k", logical.k), ("v", logical.v)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity where it is read; no result is right then")
    supports = Supports() if lse is not None else Supports(lse="none")
    declaration = Declaration(name="result", problem=case.problem, supports=supports, numerics=numerics)
    reference = Reference(declaration, case, device=out.device.type, tolerance="bound")
    reference.values = logical
    expected, bound = reference.expected, reference.bound
    axis = axes_of("out", case)[0]
    comparisons = [Comparison("out", (axis, "head", "dim"), out, expected.out, bound.out)]
    if lse is not None:
        comparisons.append(Comparison("lse", (axis, "head"), lse.double() * lse_base, expected.lse, bound.lse))
    return reference, comparisons


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


def _variant(
    num_q_heads: int, window: int | None, soft_cap: float | None, per_head: dict[str, Tensor | None]
) -> Variant:
    given = {name: tuple(part.tolist()) for name, part in per_head.items() if part is not None}
    for name, numbers in given.items():
        if len(numbers) != num_q_heads:
            raise ValueError(
                f"{name} has {len(numbers)} numbers; it must have one for each of {num_q_heads} query heads"
            )
    sinks = given.get("sinks")
    if window is None and soft_cap is None and not given:
        return PLAIN_VARIANT
    return _GivenVariant(
        window=window,
        soft_cap=soft_cap,
        alibi="scattered" if "alibi_slopes" in given else None,
        sinks=None if sinks is None else "absent" if set(sinks) == {-math.inf} else "level",
        given=given,
    )


def _scales(keys: Tensor, k_scale: Tensor | float | None, v_scale: Tensor | float | None) -> _GivenScales | None:
    dtype = str(keys.dtype).removeprefix("torch.")
    if k_scale is None and v_scale is None and dtype not in KV_DTYPES:
        return None
    if dtype not in KV_DTYPES:
        raise ValueError(
            f"k_scale and v_scale belong to a cache of {' or '.join(KV_DTYPES)}, not of {dtype}; view it so"
        )
    heads = keys.shape[1]
    given = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        numbers = (
            [1.0 if scale is None else float(scale)] if not isinstance(scale, Tensor) else scale.flatten().tolist()
        )
        if len(numbers) not in (1, heads) or not all(0 < number < math.inf for number in numbers):
            raise ValueError(f"{name} must hold one number above 0, or one for each of {heads} KV heads: {numbers}")
        given.append(tuple(numbers * (heads // len(numbers))))
    return _GivenScales(dtype=dtype, per="head", scales="scattered", given=KvScales(*given))


def _gathered(
    slots: Float[Tensor, "num_blocks block_size num_kv_heads ..."],
    block_table: Int[Tensor, "num_seqs max_blocks_per_seq"],
    seen: list[slice],
) -> list[Tensor]:
    """The tokens of each sequence, in order; parts of a head that the packed layout has apart are put together.

    Those that no query sees are 0: their pages may be others' by now.
    """
    size = slots.shape[1]
    found = []
    for row, tokens in zip(block_table.long().cpu(), seen, strict=True):
        first = tokens.start // size
        pages = row[first : -(-tokens.stop // size)]
        if (first + len(pages)) * size < tokens.stop or bool(((pages < 0) | (pages >= len(slots))).any()):
            raise ValueError(
                f"block_table names pages {pages.tolist()} for {tokens.stop} tokens; the cache has {len(slots)} pages "
                f"of {size} tokens"
            )
        held = slots[pages.to(slots.device)].flatten(0, 1)
        found.append(_behind(held[tokens.start - first * size : tokens.stop - first * size].flatten(2), tokens.start))
    return found


def _behind(tokens: Tensor, unseen: int) -> Tensor:
    return torch.cat((tokens.new_zeros(unseen, *tokens.shape[1:]), tokens)) if unseen else tokens


def _base(base: str | float) -> float:
    if base not in _BASES:
        raise ValueError(f'lse_base={base!r} must be "natural" or 2, the base of the logarithm in lse')
    return _BASES[base]
