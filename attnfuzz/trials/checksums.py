"""A number that changes with the tensors of a reference, which lie in the process that a kernel runs in.

Whoever looks through a process for tensors finds expected results too, and can make them say what a wrong kernel gives.
A number, unlike a copy, is no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from attnfuzz.memory.patterns import bits

CHANGED = (
    "the kernel has changed tensors that it was not given, of the reference that it is compared with: what kernels are "
    "judged with is not its own to change"
)


def checksum(things: Iterable[Any]) -> int:
    """Checksum of all tensors in ``things``, also in dataclasses, mappings and sequences. Waits for their device.

    A sum of their bits as integers, each tensor's times its place, in 64 bits.
    """
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in (tensor for thing in things for tensor in _tensors(thing) if tensor.numel()):
        found.setdefault(tensor.device, []).append(bits(tensor).sum())
    sums: list[int] = [one for of_device in found.values() for one in torch.stack(of_device).tolist()]
    return sum(place * one for place, one in enumerate(sums, 1)) % (1 << 64)


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from _tensors(getattr(thing, field.name))
    elif isinstance(thing, Mapping):
        yield from _tensors(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from _tensors(one)
