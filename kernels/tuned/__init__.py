"""Launches that were measured: a module for each kernel and GPU, as `attnfuzz bench tune --python FILE` writes it.

The records of these measurements lie in `docs/tuning/` under the same names, and give the same modules again. A module
that is added here is used from then on.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol, cast

from attnfuzz.kernels.common.device import GpuLimits


class Tree(Protocol):
    """A generated module. ``RANGES``: the least and the largest value of each feature that was measured."""

    KERNEL: str
    DEVICE: str
    CAPABILITY: tuple[int, int] | None
    PROCESSORS: int
    RANGES: Mapping[str, tuple[int, int]]

    def choose_options(self, **features: int) -> dict[str, Any]: ...


_TREES = [cast("Tree", importlib.import_module(f"{__name__}.{found.name}")) for found in pkgutil.iter_modules(__path__)]


@lru_cache
def tree_for(kernel: str, gpu: GpuLimits) -> Tree | None:
    """The tree that was measured on a GPU of this name, or else on one of its capability and size.

    An H200, for example, computes as an H100 does, and has more memory.
    """
    of_kernel = [tree for tree in _TREES if kernel == tree.KERNEL]
    same = (tree for tree in of_kernel if gpu.name == tree.DEVICE)
    alike = (tree for tree in of_kernel if (gpu.capability, gpu.processors) == (tree.CAPABILITY, tree.PROCESSORS))
    return next(same, None) or next(alike, None)


def measured_choice(kernel: str, gpu: GpuLimits | None, **features: int) -> dict[str, Any]:
    """The options for a batch; none where nothing like it was measured: on another GPU, or with larger heads.

    Batches may be larger or longer than those that were measured.
    """
    tree = None if gpu is None else tree_for(kernel, gpu)
    if tree is None or features["head_size"] > tree.RANGES["head_size"][1]:
        return {}
    return tree.choose_options(**{name: features[name] for name in tree.RANGES})
