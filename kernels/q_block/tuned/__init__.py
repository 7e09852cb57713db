"""Launches that were measured: one module a GPU, as `attnfuzz bench tune paged_attention_auto --python FILE` writes it.

The records of these measurements lie in `docs/tuning/` under the same names, and give the same modules again. A module
that is added here is used from then on.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol, cast

from attnfuzz.kernels.common.device import GpuLimits

__all__ = ["Tree", "tree_for"]


class Tree(Protocol):
    """A generated module. ``RANGES``: the least and the largest value of each feature that was measured."""

    DEVICE: str
    CAPABILITY: tuple[int, int] | None
    PROCESSORS: int
    RANGES: Mapping[str, tuple[int, int]]

    def choose_options(self, **features: int) -> dict[str, int]: ...


_TREES = [cast("Tree", importlib.import_module(f"{__name__}.{found.name}")) for found in pkgutil.iter_modules(__path__)]


@lru_cache
def tree_for(gpu: GpuLimits) -> Tree | None:
    """What was measured on a GPU of this name, or else on one of its capability with as many multiprocessors.

    An H200, for example, computes as an H100 does, and has more memory.
    """
    same = (tree for tree in _TREES if gpu.name == tree.DEVICE)
    alike = (tree for tree in _TREES if (gpu.capability, gpu.processors) == (tree.CAPABILITY, tree.PROCESSORS))
    return next(same, None) or next(alike, None)
