"""The GPUs that kernels may run on, found without CUDA, and leases that pin a process to one of them. Torch-free.

`nvidia-smi`, which may be absent, says what there is: a process of its own can be given up when a GPU no longer
answers, which a call into the driver's library cannot, and it initialises CUDA in nobody else.
"""

import csv
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]

_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")


def likely_device(wanted: str) -> Device:
    """The device that a zygote is started for; "auto" looks for a driver's files."""
    if wanted == "cuda":
        return "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_driver = any(Path(file).exists() for file in _DRIVER_FILES)
    return "cuda" if wanted == "auto" and has_driver and not hidden else "cpu"


_QUERY = ["--query-gpu=uuid,name,memory.total,memory.free,mig.mode.current", "--format=csv,noheader,nounits"]
_LIST = ["-L"]
_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 1.0
_MEBIBYTE = 1 << 20
_GPU_LINE = re.compile(r"GPU \d+:.*\(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)")
_MIG_MEMORY = re.compile(r"\.(\d+)gb")


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A part of a GPU. `profile` is its size, such as "1g.10gb"."""

    uuid: str
    profile: str

    @property
    def memory_bytes(self) -> int | None:
        """Its memory as the name of its profile rounds it; None if that does not say."""
        size = _MIG_MEMORY.search(self.profile)
        return int(size[1]) << 30 if size else None


@dataclass(frozen=True, slots=True)
class Listing:
    """One GPU. Memory is None where it has none of its own; `instances` is empty unless it is divided by MIG."""

    uuid: str
    name: str
    memory_bytes: int | None
    free_bytes: int | None
    instances: tuple[MigInstance, ...] = ()


def list_gpus() -> list[Listing]:
    """Every GPU of the machine (or container), in the order of `nvidia-smi`; none if that is absent or fails."""
    table = _ask(_QUERY)
    instances = parse_instances(_ask(_LIST)) if ", Enabled" in table else {}
    return parse_gpus(table, instances)


def parse_gpus(table: str, instances: dict[str, tuple[MigInstance, ...]]) -> list[Listing]:
    """The GPUs of a table of UUID, name, total and free memory in MiB, and MIG mode; other lines are ignored."""
    rows = csv.reader(table.splitlines(), skipinitialspace=True)
    return [
        Listing(uuid, name, _bytes(total), _bytes(free), instances.get(uuid, ()))
        for uuid, name, total, free, _ in (row for row in rows if len(row) == 5)
        if uuid.startswith("GPU-")
    ]


def parse_instances(listing: str) -> dict[str, tuple[MigInstance, ...]]:
    """The MIG instances in the output of ``nvidia-smi -L``, by the UUID of their GPU."""
    found: dict[str, list[MigInstance]] = defaultdict(list)
    gpu = ""
    for line in listing.splitlines():
        if match := _GPU_LINE.match(line):
            gpu = match[1]
        elif match := _MIG_LINE.match(line):
            found[gpu].append(MigInstance(uuid=match[2], profile=match[1]))
    return {uuid: tuple(each) for uuid, each in found.items()}


def _ask(arguments: list[str]) -> str:
    """The output of the command, whatever its exit status: some are warnings. Empty if there is no answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        process = subprocess.Popen(
            [program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return ""
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # inside a driver that hangs, it cannot even be killed
            process.communicate(timeout=_KILL_TIMEOUT_S)
        return ""
    return output.decode(errors="replace")


def _bytes(mebibytes: str) -> int | None:
    """None for "[N/A]", which a GPU that shares the processor's memory answers."""
    return int(mebibytes) * _MEBIBYTE if mebibytes.isdecimal() else None


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
        """Variables that pin a process to the GPU, if set before CUDA is initialised: it is number 0 there."""
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
