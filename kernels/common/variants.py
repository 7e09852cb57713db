"""Host side of what paged decode can do beyond plain attention: checks, and what the kernels are launched with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from attnfuzz.kernels.common.checks import check_positive

__all__ = ["Variant", "check_variant", "sink_arguments"]


class Variant(NamedTuple):
    """None: not asked for. ``attnfuzz.problems.variants`` defines each.

    ``window``: keys that the query sees, its own included. ``soft_cap``: above 0. ``alibi_slopes``, ``sinks``: float32
    ``[num_q_heads]``.
    """

    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name, to be checked with the others."""
        named = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def of_scores(self) -> dict[str, Any]:
        """Arguments and constants of a kernel that makes scores, by name."""
        return {
            "p_slopes": self.alibi_slopes,
            "window": self.window or 0,
            "soft_cap": float(self.soft_cap or 0.0),
            "stride_slope": 0 if self.alibi_slopes is None else self.alibi_slopes.stride(0),
            "HAS_WINDOW": self.window is not None,
            "HAS_CAP": self.soft_cap is not None,
            "HAS_ALIBI": self.alibi_slopes is not None,
        }


def sink_arguments(sinks: Tensor | None) -> dict[str, Any]:
    """Arguments and constants of a kernel that adds ``sinks``, by name."""
    stride = 0 if sinks is None else sinks.stride(0)
    return {"p_sinks": sinks, "stride_sink": stride, "HAS_SINKS": sinks is not None}


def check_variant(variant: Variant) -> None:
    """Raise ValueError for a window or cap that makes no sense; its tensors are checked beside the others."""
    if variant.window is not None:
        check_positive("window", variant.window)
    cap = variant.soft_cap
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"soft_cap={cap!r} must be a finite number above 0; leave it out for no cap")
    if cap is not None and variant.alibi_slopes is not None:
        raise ValueError("soft_cap and alibi_slopes exclude each other, since libraries disagree on their order")
