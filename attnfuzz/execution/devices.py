"""The GPUs that kernels may run on, found without CUDA, and leases that pin a process to one of them. Torch-free."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnfuzz.execution.nvidia_smi import Listing, list_gpus

__all__ = ["DeviceLease", "Gpu", "LeasePool", "find_gpus"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_UUID_PREFIXES = ("GPU-", "MIG-")
_INDEX = re.compile(r"\+?(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG instance of one.

    ``id`` is what CUDA_VISIBLE_DEVICES takes for it: a UUID, or an index where that is all that is known. Memory is in
    bytes, None where unknown.
    """

    id: str
    name: str = ""
    memory_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceLease:
    """The right to use one GPU, and no other."""

    device_id: str

    @property
    def environment(self) -> dict[str, str]:
        """What pins a process to the GPU, if set before CUDA is initialised: there it is the only one, number 0."""
        return {VISIBLE: self.device_id}


def find_gpus() -> list[Gpu]:
    """The GPUs that a process started here may use, in CUDA_VISIBLE_DEVICES' order, or nvidia-smi's without it.

    Of a GPU divided by MIG the instances count, of which CUDA shows a process no more than one. Without nvidia-smi
    there are those that CUDA_VISIBLE_DEVICES names.
    """
    visible = os.environ.get(VISIBLE)
    listed = list_gpus() if visible is None or visible.strip() else []
    return list(_undivided(listed)) if visible is None else _masked(visible, listed)


class LeasePool:
    """Shares GPUs out evenly. A holder keeps its GPU until the lease is given back."""

    def __init__(self, device_ids: Sequence[str]) -> None:
        self._holders: dict[str, set[str]] = {device_id: set() for device_id in device_ids}

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The GPUs in use."""
        return tuple(self._holders)

    def take(self, holder: str) -> DeviceLease | None:
        """A lease of the GPU with the fewest holders, or the one that ``holder`` has; None if no GPU is in use."""
        if not self._holders:
            return None
        held = (device_id for device_id, holders in self._holders.items() if holder in holders)
        device_id = next(held, None) or min(self._holders, key=lambda one: len(self._holders[one]))
        self._holders[device_id].add(holder)
        return DeviceLease(device_id)

    def give_back(self, holder: str) -> None:
        """End the lease of ``holder``, if it has one."""
        for holders in self._holders.values():
            holders.discard(holder)


def _undivided(listed: Sequence[Listing]) -> Iterator[Gpu]:
    for gpu in listed:
        for part in gpu.instances:
            yield Gpu(part.uuid, f"{gpu.name} MIG {part.profile}", part.memory_bytes, part.memory_bytes)
        if not gpu.instances:
            yield Gpu(gpu.uuid, gpu.name, gpu.memory_bytes, gpu.free_bytes)


def _masked(visible: str, listed: Sequence[Listing]) -> list[Gpu]:
    """As CUDA reads the variable (CUDA programming guide, "CUDA_VISIBLE_DEVICES"): up to the first that is invalid.

    A GPU that is named twice hides all. Indices are passed on as they are: CUDA may number GPUs otherwise than
    nvidia-smi, and the process that is given one inherits CUDA_DEVICE_ORDER.
    """
    tokens = [part.strip() for part in visible.split(",")]
    by_uuid = tokens[0].startswith(_UUID_PREFIXES)
    named = [_by_uuid(token, listed) if by_uuid else _by_index(token, listed) for token in tokens]
    found = named[: named.index(None)] if None in named else named
    gpus = [gpu for gpu in found if gpu is not None]
    return gpus if len({gpu.id for gpu in gpus}) == len(gpus) else []


def _by_uuid(token: str, listed: Sequence[Listing]) -> Gpu | None:
    """The only GPU whose UUID starts like that, under its whole UUID; None if there is none.

    What nvidia-smi does not list by that name is left to CUDA: all of a GPU divided by MIG, or an instance's name as
    old drivers wrote it.
    """
    if not token.startswith(_UUID_PREFIXES):
        return None
    known = [gpu for gpu in _undivided(listed) if gpu.id.startswith(token)]
    if len(known) == 1:
        return known[0]
    divided = any(gpu.instances and gpu.uuid.startswith(token) for gpu in listed)
    is_valid = not known and (not listed or divided or token.startswith("MIG-"))
    return Gpu(token) if is_valid else None


def _by_index(token: str, listed: Sequence[Listing]) -> Gpu | None:
    """The GPU of that number, None if it is invalid; "1gpu" is number 1."""
    match = _INDEX.match(token)
    if match is None:
        return None
    index = int(match[1])
    if not listed:
        return Gpu(str(index))
    if index >= len(listed):
        return None
    alike = len({(gpu.name, gpu.memory_bytes, bool(gpu.instances)) for gpu in listed}) == 1
    if not alike:  # which of them it is, only CUDA knows
        return Gpu(str(index))
    gpu = next(_undivided(listed[index : index + 1]))
    return Gpu(str(index), gpu.name, gpu.memory_bytes, gpu.free_bytes)
