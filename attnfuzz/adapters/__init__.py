"""Other people's kernels under the names of their engines: ``vllm:unified_attention``, ``flashinfer:*``.

An adapter is a file: it says how an engine's functions are called on the inputs of a problem, and what they support.
Those of this folder come with attnfuzz; a distribution of anybody's brings others as entry points of the group
``attnfuzz.kernels``, each the name of an engine and a module. Engines are imported in executors only.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

_GROUP = "attnfuzz.kernels"
_NO_ADAPTERS = ("__init__", "engine", "flashinfer_builds", "solution", "tokens")


def engines() -> dict[str, str]:
    """The module of each engine's adapters, by its name; attnfuzz's own go first."""
    found = {point.name: point.module for point in importlib.metadata.entry_points(group=_GROUP)}
    files = (file.stem for file in Path(__file__).parent.glob("*.py"))
    return found | {name: f"{__name__}.{name}" for name in sorted(files) if name not in _NO_ADAPTERS}


def module_of(place: str) -> str:
    """The module of the adapters of an engine; ``place`` itself if it names none."""
    return engines().get(place, place) if place.isidentifier() else place
