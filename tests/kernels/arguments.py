"""Tensors of variants, for tests of kernels, which make them when they run: on the device of the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def slopes() -> Tensor:
    return torch.tensor([0.5, 0.25, 0.125, 0.0625])


def sinks() -> Tensor:
    return torch.tensor([0.5, -30.0, 40.0, 2.0])


def absent_sinks() -> Tensor:
    """Of one head there is none."""
    return torch.tensor([0.5, -torch.inf, 40.0, 2.0])


def made(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments``, with what functions among them return."""
    return {name: value() if callable(value) else value for name, value in arguments.items()}
