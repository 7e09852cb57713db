"""Host side of a paged cache of 8-bit numbers: what its scales are to a wrapper and to a kernel.

A cached number ``x`` of KV head ``h`` stands for ``x · k_scale[h]``, or ``x · v_scale[h]``. Both are constant over the
sums of a KV head, so a kernel need not multiply a single key or value:

    s_t = scale · q · (k_scale k_t) = (scale k_scale) · (q · k_t)
    out = Σ p_t (v_scale v_t) = v_scale · Σ p_t v_t

Scales are float32 tensors of one element, as vLLM has them, or of one for each KV head: the former have a stride of 0.
They stay on the device, so that a captured graph reads what they hold when it is replayed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["KvScales"]


class KvScales(NamedTuple):
    """``k``, ``v``: ``[1]`` or ``[num_kv_heads]``; None for a cache of q's dtype."""

    k: Tensor | None = None
    v: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name, to be checked with the others."""
        named = {"k_scale": self.k, "v_scale": self.v}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments and constants of a kernel, by name."""
        return {
            "p_k_scale": self.k,
            "p_v_scale": self.v,
            "stride_k_scale": _stride(self.k),
            "stride_v_scale": _stride(self.v),
            "HAS_KV_SCALES": self.k is not None,
        }

    def of_heads(self, num_kv_heads: int) -> tuple[Tensor, Tensor] | None:
        """Both ``[num_kv_heads]``, without copying."""
        if self.k is None or self.v is None:
            return None
        return self.k.expand(num_kv_heads), self.v.expand(num_kv_heads)


def _stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.shape[0] == 1 else scale.stride(0)
