"""Where the tensors of a case come from: the Allocator that builders ask, and a plain one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attnfuzz.problems.module import Case
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.shapes import Role, TensorSpec, strided_layout, strides_of, tensor_specs


@runtime_checkable
class Allocator(Protocol):
    """Hands out memory that is already poison (inputs) or pre-filled (outputs); builders write live elements only."""

    device: torch.device

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, strides: StrideKind, role: Role
    ) -> Tensor:
        """A tensor of ``shape`` and ``dtype`` on ``device``, placed as ``strides`` says."""
        ...

    def only_changes(self, name: str, where: Tensor) -> None:
        """Forbid changes of the output ``name`` but for elements of ``where``."""
        ...


class PlainAllocator:
    """One fresh torch storage per tensor, filled with NaN (floats) or -1 (integers). No red zones."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, strides: StrideKind, role: Role
    ) -> Tensor:
        layout = strided_layout(shape, strides, dtype.itemsize)
        poison = float("nan") if dtype.is_floating_point else -1
        storage = torch.full((layout.storage_elements,), poison, dtype=dtype, device=self.device)
        return storage.as_strided(shape, layout.strides, layout.offset)

    def only_changes(self, name: str, where: Tensor) -> None:
        """Nothing is watched here."""


def role_of(spec: TensorSpec) -> Role:
    """The role of a tensor: one that is changed in place is pre-filled before its contents are written."""
    return "input" if spec.role == "input" else "output"


def allocate(case: Case, allocator: Allocator) -> dict[str, Tensor]:
    """Every tensor of ``tensor_specs(case)``, still all poison."""
    return {
        name: allocator.tensor(
            name, spec.shape, getattr(torch, spec.dtype), strides=strides_of(case, name), role=role_of(spec)
        )
        for name, spec in tensor_specs(case).items()
    }
