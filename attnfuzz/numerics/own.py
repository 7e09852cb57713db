"""For problems of a user's own: what attention gives, and how far a correct kernel may be off, of that or of one
rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from attnfuzz.numerics.arithmetic import half_smallest_subnormal, unit_roundoff
from attnfuzz.numerics.bounds import Bound, attention_bound
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.own import Expected

__all__ = ["attention", "rounding"]


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
) -> dict[str, Expected]:
    """``out [rows num_q_heads v_head_size]`` and ``lse [rows num_q_heads]`` (natural logarithm), each with its bound.

    Row i of ``q`` attends to all of ``k[i]`` and ``v[i]``, which hold the keys that it sees, in any order: a page
    table, a window or a list of indices is worked out by the problem. Query head h reads KV head
    h // (num_q_heads / num_kv_heads). A row without keys gives 0 and -inf.

    The numbers are those that the kernel reads. ``dtype``: of q and of ``out``; what may be rounded to it on the way
    says ``numerics``, by default as for a kernel that declares none. ``num_partials``: at most how many partial results
    are combined; ``soft_cap`` and ``sinks`` as `attnfuzz.problems.variants` describes them. The bounds are those of
    `attnfuzz.numerics.attention_bound`, which raises ValueError for what it is not made for.
    """
    stored = getattr(torch, dtype)
    sink = None if sinks is None else sinks.double()
    exact: list[tuple[Tensor, Tensor]] = []
    bounds: list[Bound] = []
    for row, (keys, values) in enumerate(zip(k, v, strict=True)):
        of_row = q[row].double(), keys.double(), values.double()
        exact.append(_exact(*of_row, scale=scale, soft_cap=soft_cap, sinks=sink))
        bounds.append(
            attention_bound(
                *of_row,
                scale,
                in_dtype=stored,
                out_dtype=stored,
                numerics=numerics or Numerics(),
                num_partials=num_partials,
                soft_cap=soft_cap,
                sinks=sink,
            )
        )
    out, lse = (torch.stack(parts) for parts in zip(*exact, strict=True))
    return {
        "out": Expected(out, bound=torch.stack([bound.out for bound in bounds])),
        "lse": Expected(lse, bound=torch.stack([bound.lse for bound in bounds])),
    }


def _exact(
    q: Float64[Tensor, "num_q_heads head_size"],
    k: Float64[Tensor, "tokens num_kv_heads head_size"],
    v: Float64[Tensor, "tokens num_kv_heads v_head_size"],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float64[Tensor, " num_q_heads"] | None,
) -> tuple[Float64[Tensor, "num_q_heads v_head_size"], Float64[Tensor, " num_q_heads"]]:
    group = len(q) // k.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (k, v))  # heads first
    scores = scale * (keys @ q[..., None])[..., 0]  # [num_q_heads, tokens]
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    total = torch.logsumexp(scores if sinks is None else torch.cat((scores, sinks[:, None]), dim=1), dim=1)
    weights = torch.exp(scores - total.nan_to_num(neginf=0.0)[:, None])
    return (weights[:, None] @ values)[:, 0], total


_SMALL_FORMATS = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17), "int8": (0.0, 0.5)}
"""Largest relative change where a number is normal, and largest absolute one where it is not."""
_QUOTIENT = 1 + 2.0**-10
"""What is rounded may be a quotient that was rounded to float32 before, or a product with a reciprocal: 2^-21 relative,
against the half unit of a format of 8 bits that it may be rounded across."""


def rounding(value: Float64[Tensor, "*shape"], dtype: str) -> Float64[Tensor, "*shape"]:
    """The largest error of ``value`` once it is stored as ``dtype``: a float of 8, 16 or 32 bits, or int8.

    It is worked out in float32 before, by a division or with a reciprocal. Raises ValueError for other dtypes.
    """
    if dtype in _SMALL_FORMATS:
        relative, absolute = _SMALL_FORMATS[dtype]
        return torch.clamp(value.abs() * relative, min=absolute) * _QUOTIENT + value.abs() * 2.0**-21
    kind = getattr(torch, dtype)
    return torch.clamp(value.abs() * unit_roundoff(kind), min=half_smallest_subnormal(kind)) + value.abs() * 2.0**-21
