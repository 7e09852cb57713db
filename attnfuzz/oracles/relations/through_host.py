"""A case's inputs in whatever memory of a GPU, written on the host first.

To write them on the GPU takes a hundred launches and more, and processes that share one get through a limited number of
them. Here it is a copy for each tensor, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnfuzz.problems.allocation import Allocator, role_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.registry import filled, problem_of
from attnfuzz.problems.shapes import strides_of, tensor_specs
from attnfuzz.problems.supports import Supports

__all__ = ["build_through_host"]


def build_through_host(
    case: Case, allocator: Allocator, supports: Supports, *, edit: Mapping[str, Callable[[Tensor], None]] | None = None
) -> Any:
    """As the ``build`` of the case's problem, with the same numbers; dead elements are NaN, or -1.

    ``edit`` may change tensors while they are on the host, by name.
    """
    written = filled(case, supports)
    for name, change in (edit or {}).items():
        if name in written:
            change(written[name])
    tensors = {}
    for name, spec in tensor_specs(case).items():
        dtype = getattr(torch, spec.dtype)
        given = allocator.tensor(name, spec.shape, dtype, strides=strides_of(case, name), role=role_of(spec))
        if spec.role != "output":
            _send(written[name], given)
        tensors[name] = given
    return problem_of(case).inputs(case, tensors)


def _send(source: Tensor, target: Tensor) -> None:
    """From pinned memory, which torch keeps until the copy has been made."""
    if target.device.type == "cuda" and source.numel():
        source = source.contiguous().pin_memory()
    target.copy_(source, non_blocking=True)
