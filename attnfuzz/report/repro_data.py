"""What a repro script holds of a case: memory as bytes, where each tensor lies in it, expected results and bounds."""

from __future__ import annotations

import base64
import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.judging.expectations import bound_of
from attnfuzz.memory.arena import Arena
from attnfuzz.problems.cases import Case, MergeStatesCase
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.registry import problem_of

__all__ = ["MAX_TENSOR_BYTES", "ReproData", "ReproInputs", "TensorPlace", "pack", "repro_data", "repro_inputs"]

MAX_TENSOR_BYTES = 4 << 20
"""Of a case's tensors; a larger script could not be pasted anywhere."""

TensorPlace = tuple[int, str, tuple[int, ...], tuple[int, ...], int]
"""Number of the storage, dtype, shape, strides and offset in elements."""


@dataclass(frozen=True)
class ReproInputs:
    """``scalars`` and ``tensors`` are the kernel's inputs; ``storages``, in which the tensors lie, are packed."""

    storages: list[str]
    tensors: dict[str, TensorPlace]
    scalars: dict[str, Any]


@dataclass(frozen=True)
class ReproData(ReproInputs):
    """``expected`` and ``bounds`` are packed too; ``bounds`` are by device, then by result.

    ``results`` are the names of what the kernel returns.
    """

    results: list[str]
    expected: dict[str, str]
    bounds: dict[str, dict[str, str]]


def repro_inputs(declaration: Declaration, case: Case) -> ReproInputs:
    """Build ``case`` on the CPU, as the first run of the oracles does: everything dead or unwritten is NaN."""
    values = problem_of(case).values(case, "cpu", declaration.supports)
    return _inputs(declaration, case, values)


def repro_data(declaration: Declaration, case: Case) -> ReproData:
    """The inputs with what should come of them."""
    problem = problem_of(case)
    values = problem.values(case, "cpu", declaration.supports)
    inputs = _inputs(declaration, case, values)
    results = list(problem.results if declaration.supports.lse != "none" else problem.results[:1])
    expected = problem.reference(case, values)
    bounds = {
        device: bound_of(declaration, case, values, one_copy=one_copy)
        for device, one_copy in (("cpu", True), ("cuda", False))
    }
    return ReproData(
        **vars(inputs),
        results=results,
        expected=_pack_results(case, results, expected.out, expected.lse),
        bounds={device: _pack_results(case, results, bound.out, bound.lse) for device, bound in bounds.items()},
    )


def _inputs(declaration: Declaration, case: Case, values: Any) -> ReproInputs:
    arena = Arena("cpu", poison="nan", prefill="nan", capacity=tensor_nbytes(case))
    inputs = problem_of(case).build(case, arena, declaration.supports, values)
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    storages, tensors = _place({name: value for name, value in fields.items() if isinstance(value, Tensor)})
    scalars = {name: value for name, value in fields.items() if not isinstance(value, Tensor)}
    return ReproInputs(storages, tensors, scalars)


def pack(tensor: Shaped[Tensor, "..."]) -> str:
    """The bytes of ``tensor`` in order, compressed, as base64 text."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _place(tensors: dict[str, Tensor]) -> tuple[list[str], dict[str, TensorPlace]]:
    """Every storage that ``tensors`` are views of, and where each lies."""
    storages: dict[int, Tensor] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
    numbers = {address: number for number, address in enumerate(storages)}
    places = {
        name: (
            numbers[tensor.untyped_storage().data_ptr()],
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )
        for name, tensor in tensors.items()
    }
    return [pack(storage) for storage in storages.values()], places


def _pack_results(case: Case, results: list[str], out: Tensor, lse: Tensor) -> dict[str, str]:
    """In the axes of what the kernel returns (of splits, merged)."""
    if isinstance(case, MergeStatesCase) and case.lse_layout == "HT":
        lse = lse.T
    return {name: pack(part.double()) for name, part in zip(results, (out, lse), strict=False)}


def lse_unit(declaration: Declaration) -> float:
    """One unit of the kernel's log-sum-exp in natural logarithms."""
    return math.log(2) if declaration.supports.lse == "base2" else 1.0
