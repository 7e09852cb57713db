"""The cases that may be proposed: those that one kernel supports. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnfuzz.problems.supports import OptionValue, Supports

__all__ = ["Domain"]


@dataclass(frozen=True, slots=True)
class Domain:
    """What a kernel declares: its ``supports`` and the choices of its ``options``."""

    supports: Supports
    options: Mapping[str, tuple[OptionValue, ...]]
