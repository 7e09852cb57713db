"""The GPUs that kernels may run on, found without CUDA, and leases that pin a process to one of them. Torch-free."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnfuzz.execution.nvidia_smi import Listing, list_gpus

__all__ = ["DeviceLease", "Gpu", "LeasePool", "find_gpus"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_UUID_PREFIXES = ("GPU-", "MIG-")
_INDEX = re.compile(r"\d+")


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


def find_gpus(count: int | None = None) -> list[Gpu]:
    """The GPUs that a process started here may use, in CUDA_VISIBLE_DEVICES' order, or nvidia-smi's without it.

    ``count`` is how many CUDA saw in such a process, if one was asked; it settles what nvidia-smi does not know. Of a
    GPU divided by MIG the instances count, of which CUDA shows a process no more than one.
    """
    visible = os.environ.get(VISIBLE)
    listed = list_gpus() if visible is None or visible.strip() else []
    found = list(_undivided(listed)) if visible is None else _masked(visible, listed)
    if count is None or count == len(found) or (count > 0 and any(gpu.id.startswith("MIG-") for gpu in found)):
        return found
    return found[:count] if visible is not None else [Gpu(str(index)) for index in range(count)]


class LeasePool:
    """Shares GPUs out evenly. A holder keeps its GPU for as long as that is in use and the lease is not given back."""

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

    def retire(self, device_id: str) -> frozenset[str]:
        """Lease the GPU to nobody any more; who held it, and is to take another."""
        return frozenset(self._holders.pop(device_id, ()))


def _undivided(listed: Sequence[Listing]) -> Iterator[Gpu]:
    for gpu in listed:
        for part in gpu.instances:
            yield Gpu(part.uuid, f"{gpu.name} MIG {part.profile}", part.memory_bytes, part.memory_bytes)
        if not gpu.instances:
            yield Gpu(gpu.uuid, gpu.name, gpu.memory_bytes, gpu.free_bytes)


def _masked(visible: str, listed: Sequence[Listing]) -> list[Gpu]:
    """As CUDA reads the variable (CUDA programming guide, "CUDA_VISIBLE_DEVICES"): up to the first that is invalid.

    One that is named twice hides all. Indices are passed on as they are: CUDA may number GPUs otherwise than
    nvidia-smi, and the process that is given one inherits CUDA_DEVICE_ORDER.
    """
    found: list[Gpu] = []
    for token in (part.strip() for part in visible.split(",")):
        gpu = _named(token, listed)
        if gpu is None:
            break
        if gpu in found:
            return []
        found.append(gpu)
    return found


def _named(token: str, listed: Sequence[Listing]) -> Gpu | None:
    """The GPU that one entry names, None if it is invalid. UUIDs may be cut short; "1gpu" is index 1."""
    if token.startswith(_UUID_PREFIXES):
        known = [gpu for gpu in _undivided(listed) if gpu.id.startswith(token)]
        return _renamed(known[0], token) if known else Gpu(token)
    index = _INDEX.match(token)
    if index is None or (listed and int(index[0]) >= len(listed)):
        return None
    alike = {(gpu.name, gpu.memory_bytes, gpu.instances) for gpu in listed}
    known = list(_undivided(listed[:1])) if len(alike) == 1 else []  # else which of them it is, only CUDA knows
    return _renamed(known[0], index[0]) if known else Gpu(index[0])


def _renamed(gpu: Gpu, device_id: str) -> Gpu:
    return Gpu(device_id, gpu.name, gpu.memory_bytes, gpu.free_bytes)
