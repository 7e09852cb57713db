"""For problems of a user's own: what attention gives, and how far a correct kernel may be off, of that or of one
rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import half_smallest_subnormal, unit_roundoff
from attnfuzz.numerics.bounds import ragged_rows
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.own import Expected


def attention(
    q: Float[Tensor, "rows num_q_heads head_size"],
    k: Sequence[Float[Tensor, "_ num_kv_heads head_size"]],
    v: Sequence[Float[Tensor, "_ num_kv_heads v_head_size"]],
    *,
    scale: float,
    dtype: str,
    numerics: Numerics | None = None,
    num_partials: int = 1,
    soft_cap: float | None = None,
    sinks: Float[Tensor, " num_q_heads"] | None = None,
    smallest_kv: tuple[float, float] | None = None,
) -> dict[str, Expected]:
    """Give ``out [rows num_q_heads v_head_size]`` and ``lse [rows num_q_heads]`` (natural), each with its bound.

    Row i of ``q`` attends to all of ``k[i]`` and ``v[i]``, which hold the keys that it sees, in any order: a page
    table, a window or a list of indices is worked out by the problem. Query head h reads KV head
    h // (num_q_heads / num_kv_heads). A row without keys gives 0 and -inf.

    The numbers are those that the kernel reads. ``dtype`` is that of q and of ``out``; ``numerics`` says what may be
    rounded to it on the way, by default as for a kernel that declares none. At most ``num_partials`` partial results
    are combined; ``soft_cap`` and ``sinks`` as `attnfuzz.problems.variants` describes them. Where ``k`` and ``v``
    are numbers of 8 bits times scales, ``smallest_kv`` are the smallest sizes other than 0 that these products can
    have: a kernel may round in multiplying, and to ``dtype`` with ``numerics`` that say ``dequantised="input"``.
    The bounds are those of `attnfuzz.numerics.attention_bound`, which raises ValueError for what it is not made
    for.
    """
    stored = getattr(torch, dtype)
    found = ragged_rows(
        q.double(),
        [keys.double() for keys in k],
        [values.double() for values in v],
        scale,
        in_dtype=stored,
        out_dtype=stored,
        numerics=numerics or Numerics(),
        num_partials=num_partials,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.double(),
        smallest_kv=smallest_kv,
    )
    return {"out": _expected(found.out, found.out_error), "lse": _expected(found.lse, found.lse_error)}


def _expected(value: Float64[Tensor, "*shape"], bound: Float64[Tensor, "*shape"]) -> Expected:
    """The expected result; of elements that are NaN nothing is promised."""
    is_promised = ~value.isnan()
    if bool(is_promised.all()):
        return Expected(value, bound=bound)
    return Expected(value.nan_to_num(0.0), where=is_promised, bound=bound)


_SMALL_FORMATS = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17), "int8": (0.0, 0.5)}
"""Largest relative change where a number is normal, and largest absolute one where it is not."""
_QUOTIENT = 1 + 2.0**-10
"""What is rounded may be a quotient that was rounded to float32 before, or a product with a reciprocal: 2^-21 relative,
against the half unit of a format of 8 bits that it may be rounded across."""


def rounding(value: Float64[Tensor, "*shape"], dtype: str) -> Float64[Tensor, "*shape"]:
    """Give the largest error of ``value`` that a kernel has stored as ``dtype``: a float of 8, 16 or 32 bits, or int8.

    The kernel may have computed it in float32, by a division or with a reciprocal. Raises ValueError for other dtypes.
    """
    if dtype in _SMALL_FORMATS:
        relative, absolute = _SMALL_FORMATS[dtype]
        return torch.clamp(value.abs() * relative, min=absolute) * _QUOTIENT + value.abs() * 2.0**-21
    kind = getattr(torch, dtype)
    return torch.clamp(value.abs() * unit_roundoff(kind), min=half_smallest_subnormal(kind)) + value.abs() * 2.0**-21
