"""Host side of what attention on a paged cache can do beyond plain attention: arguments, checks, what kernels get.

A number ``x`` of KV head ``h`` in a cache of 8-bit numbers stands for ``x · k_scale[h]``, or ``x · v_scale[h]``. Both
are constant over the sums of a KV head, so a kernel need not multiply a single key or value:

    s_t = scale · q · (k_scale k_t) = (scale k_scale) · (q · k_t)
    out = Σ p_t (v_scale v_t) = v_scale · Σ p_t v_t

Scales are float32 tensors of one element, as vLLM has them, or of one for each KV head: the former have a stride of 0.
They stay on the device, so that a captured graph reads what they hold when it is replayed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from attnfuzz.kernels.common.checks import check_positive


class Variants(TypedDict, total=False):
    """Keyword arguments that every wrapper on a paged cache takes; None, or left out: not asked for.

    ``window``: the query sees so many keys, its own included. ``soft_cap``, above 0: ``s`` becomes ``soft_cap · tanh(s
    / soft_cap)``. ``alibi_slopes``: times ``key position - query position``, added to a head's scores. ``sinks``: a
    logit of each head that takes weight and has no value; the LSE includes it. Both float32 ``[num_q_heads]``.
    ``k_scale``, ``v_scale``: of caches in float8_e4m3fn or float8_e5m2, what their numbers are multiplied with: float32
    ``[1]`` or ``[num_kv_heads]``. A GPU needs compute capability 8.9 for the former format.
    """

    window: int | None
    soft_cap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class MaskedVariants(TypedDict, total=False):
    """The ``Variants`` that go with a mask, which says itself what a query sees, and nothing of distances."""

    soft_cap: float | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class Variant(NamedTuple):
    """The values of ``Variants``."""

    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, to be checked with the others."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    @property
    def of_scores(self) -> dict[str, Any]:
        """Arguments of a kernel that makes scores, by name; for None Triton compiles no code."""
        return {
            "p_slopes": self.alibi_slopes,
            "stride_slope": 0 if self.alibi_slopes is None else self.alibi_slopes.stride(0),
            "window": self.window,
            "soft_cap": None if self.soft_cap is None else float(self.soft_cap),
            "p_k_scale": self.k_scale,
            "p_v_scale": self.v_scale,
            "stride_k_scale": _stride(self.k_scale),
            "stride_v_scale": _stride(self.v_scale),
        }

    @property
    def of_rows(self) -> dict[str, Any]:
        """Arguments of a kernel that finishes its rows, which also adds the sinks."""
        return {**self.of_scores, **sink_arguments(self.sinks)}

    def kv_scales_of_heads(self, num_kv_heads: int) -> tuple[Tensor, Tensor] | None:
        """Scales of K and of V, ``[num_kv_heads]``, without copying."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return self.k_scale.expand(num_kv_heads), self.v_scale.expand(num_kv_heads)


def sink_arguments(sinks: Tensor | None) -> dict[str, Any]:
    """Arguments of a kernel that adds ``sinks``, by name."""
    return {"p_sinks": sinks, "stride_sink": 0 if sinks is None else sinks.stride(0)}


def check_variant(variant: Variant) -> None:
    """Raise ValueError for a window or cap that makes no sense; its tensors are checked beside the others."""
    if variant.window is not None:
        check_positive("window", variant.window)
    cap = variant.soft_cap
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"soft_cap={cap!r} must be a finite number above 0; leave it out for no cap")
    if cap is not None and variant.alibi_slopes is not None:
        raise ValueError("soft_cap and alibi_slopes exclude each other, since libraries disagree on their order")


def _stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.shape[0] == 1 else scale.stride(0)
