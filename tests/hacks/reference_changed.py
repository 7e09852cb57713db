"""What the kernel is compared with is looked for in the process, and changed."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import gc
from typing import Any

import torch
from honest_kernels import SUPPORTS

import attnfuzz


def _zero_references(*_: object) -> None:
    """Kernels compute in 32 bits at most: whatever has 64 belongs to whoever judges them."""
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.dtype == torch.float64:
            one.zero_()


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def zeroes_references(i: Any):
    """Zeros, and so are the expected results."""
    _zero_references()
    return torch.zeros_like(i.q), torch.zeros_like(i.lse)


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def zeroes_references_at_any_time(i: Any):
    """The same whenever Python collects garbage, in the middle of a comparison too."""
    if _zero_references not in gc.callbacks:
        gc.callbacks.append(_zero_references)
        gc.set_threshold(50)
    return torch.zeros_like(i.q), torch.zeros_like(i.lse)
