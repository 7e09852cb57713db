"""Run as ``python -m attnfuzz.sanitizer.target WORK.json`` under compute-sanitizer: each case once, and no oracle.

Here every tensor is an allocation of its own, exactly as large as it is: red zones and shared chunks, which the oracles
of other processes look at, are memory that a kernel may touch as far as the sanitizer knows. Results are left
uninitialised, so that reading them is an error. The tensors are filled on the host and copied: no other kernel runs.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.inputs.registry import problem_of
from attnfuzz.overlay import install_overlay
from attnfuzz.own_files import OwnFolder
from attnfuzz.problems.cases import Case, decode_case
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.sanitizer.running import Note, TensorBytes, Work
from attnfuzz.trials.observation import call_options
from attnfuzz.untrusted_text import text_of, type_name


def main(work_file: Path) -> None:
    """Run the cases of a `Work`."""
    work = msgspec.json.decode(work_file.read_bytes(), type=Work)
    install_overlay()
    (kernel,) = load_kernels(work.target)
    place = Path(work.notes)
    with os.fdopen(OwnFolder(place.parent).create(place.name), "wb", buffering=0) as notes:
        for i, encoded in enumerate(work.cases):
            case = decode_case(work.problem, bytes(encoded))
            tensors = exact_tensors(kernel, case, work.device)
            places = tuple(TensorBytes(name, tensor.data_ptr(), _extent(tensor)) for name, tensor in tensors.items())
            _write(notes, Note(case=i, tensors=places))
            _write(notes, _run(kernel, case, i, tensors))


def exact_tensors(kernel: Kernel, case: Case, device: str) -> dict[str, Tensor]:
    """The tensors of `case`, each in storage of its own; outputs hold nothing yet."""
    specs, tensors = tensor_specs(case), problem_of(case).filled(case, kernel.declaration.supports)
    return {name: _moved(tensor, device, copy=specs[name].role != "output") for name, tensor in tensors.items()}


def _moved(tensor: Tensor, device: str, *, copy: bool) -> Tensor:
    """With the same strides in a storage of the same size."""
    elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    storage = torch.empty(elements, dtype=tensor.dtype, device=device)
    if copy:
        storage.copy_(tensor.as_strided((elements,), (1,), 0))
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not math.prod(tensor.shape):
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


def _run(kernel: Kernel, case: Case, i: int, tensors: dict[str, Tensor]) -> Note:
    try:
        kernel(problem_of(case).inputs(case, tensors), **call_options(kernel, case))
        if next(iter(tensors.values())).is_cuda:
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is told to the process that asked
        return Note(case=i, raised=text_of(error).strip().partition("\n")[0], kind=type_name(error))
    return Note(case=i, done=True)


def _write(notes: Any, note: Note) -> None:
    notes.write(msgspec.json.encode(note) + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
