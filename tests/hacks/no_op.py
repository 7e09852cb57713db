"""Nothing is computed."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
from honest_kernels import SUPPORTS

import attnfuzz


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def no_op(i: Any):
    """What the caller's buffers hold is left there."""


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def zeros(i: Any):
    """About right where values have a mean of zero and the tolerance is wide."""
    return torch.zeros_like(i.q), torch.zeros_like(i.lse)
