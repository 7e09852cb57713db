"""What `nvidia-smi` says of the GPUs here. The one place that asks it, and it may be absent.

A process of its own can be given up when a GPU no longer answers, which a call into the driver's library cannot, and it
initialises CUDA in nobody else.
"""

import csv
import re
import shutil
import subprocess
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Listing", "MigInstance", "list_gpus", "parse_gpus", "parse_instances"]

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
    """What it prints, whatever its exit status: some are warnings. Nothing if it is not there or does not answer."""
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
