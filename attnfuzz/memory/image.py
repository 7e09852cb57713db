"""Memory of many cases for both of their runs: filled at one place, and copied to where kernels run and back as one.

Everything that the kernels of a batch get is laid out in one stretch of memory, with red zones and poison as in an
`Arena`. What was sent is compared with what comes back.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from attnfuzz.memory.arena import Arena, Region
from attnfuzz.memory.fetch import Fetch, pinned
from attnfuzz.memory.geometry import Cursor, Place, aligned
from attnfuzz.memory.patterns import POISON_BYTES, Fill, prefill_
from attnfuzz.problems.cases import Case
from attnfuzz.problems.shapes import Role, strides_of, tensor_specs
from attnfuzz.problems.strides import strided_layout

__all__ = ["RUNS", "Image", "Plan", "plan_of"]

RUNS: tuple[Fill, Fill] = ("nan", "finite")
"""What poison and pre-fill are in the first and in the second run."""

_MARGIN = 1 << 14
"""Bytes before and after each case, beyond its red zones, that count as its surroundings."""


class _Slot(NamedTuple):
    """A tensor's place; ``place`` counts from the start of its case."""

    role: Role
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    place: Place


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a case's tensors go in the ``nbytes`` bytes that it takes for both runs together."""

    slots: dict[str, _Slot]
    nbytes: int


class Image:
    """Two rows of bytes, one for each run. In order: write to `tensors`, `send`, run kernels, `start`, wait, look."""

    def __init__(self, plans: Sequence[Plan], device: torch.device | str, *, home: torch.device | str = "cpu") -> None:
        """``plans``: one for each case. ``device``: where kernels run.

        ``home``: where tensors are filled and looked at, "cpu" or ``device``.
        """
        self.device = torch.device(device)
        self._plans = plans
        self._starts = list(itertools.accumulate((plan.nbytes // len(RUNS) for plan in plans), initial=0))
        shape = len(RUNS), self._starts[-1]
        self._at_home = self.device.type == torch.device(home).type
        if self._at_home:
            self._sent = torch.empty(shape, dtype=torch.uint8, device=self.device)
        else:
            self._sent = pinned(math.prod(shape)).view(shape)
        for row, fill in zip(self._sent, RUNS, strict=True):
            row.fill_(POISON_BYTES[fill])
        self._memory = self._sent

    def tensors(self, case: int) -> dict[str, Shaped[Tensor, "runs ..."]]:
        """The tensors of case number ``case`` in both runs, at home, to be filled: poison, or pre-fill in outputs."""
        found = {}
        for name, slot in self._plans[case].slots.items():
            found[name] = self._views(self._sent, case, slot)
            if slot.role == "output":
                for view, fill in zip(found[name], RUNS, strict=True):
                    prefill_(view, fill)
        return found

    def send(self) -> None:
        """Copy everything to where kernels run, without waiting."""
        self._memory = self._sent.clone() if self._at_home else self._sent.to(self.device, non_blocking=True)

    def on_device(self, case: int) -> dict[str, Shaped[Tensor, "runs ..."]]:
        """The tensors of case number ``case`` in both runs, for its kernel."""
        return {name: self._views(self._memory, case, slot) for name, slot in self._plans[case].slots.items()}

    def start(self, fetch: Fetch) -> None:
        """Have everything copied back."""
        fetch.start_buffer(self._memory.view(-1))

    def arena(self, case: int, run: int, fetch: Fetch) -> Arena:
        """What came back of one run beside what was sent."""
        memory = fetch.at_home(self._memory)
        regions = [
            Region(name, slot.role, 0, *slot.place, self._views(memory, case, slot)[run])
            for name, slot in self._plans[case].slots.items()
        ]
        part = slice(self._starts[case], self._starts[case + 1])
        return Arena.sealed(memory[run, part], self._sent[run, part], regions, poison=RUNS[run], prefill=RUNS[run])

    def damage(self, fetch: Fetch) -> list[tuple[bool, bool]]:
        """For each case and run, whether a byte changed that is not an element of an output."""
        memory = fetch.at_home(self._memory)
        for case, plan in enumerate(self._plans):
            for slot in plan.slots.values():
                if slot.role == "output":
                    self._views(self._sent, case, slot).copy_(self._views(memory, case, slot))
        one, other = memory.view(torch.int64), self._sent.view(torch.int64)
        if torch.equal(one, other):
            return [(False, False)] * len(self._plans)
        bounds = [start // one.dtype.itemsize for start in self._starts]
        first, second = (
            [not torch.equal(row[start:end], sent[start:end]) for start, end in itertools.pairwise(bounds)]
            for row, sent in zip(one, other, strict=True)
        )
        return list(zip(first, second, strict=True))

    def _views(self, rows: UInt8[Tensor, "runs nbytes"], case: int, slot: _Slot) -> Shaped[Tensor, "runs ..."]:
        itemsize = slot.dtype.itemsize
        first = (self._starts[case] + slot.place.start) // itemsize
        row = rows.shape[1] // itemsize
        return rows.view(slot.dtype).as_strided((len(RUNS), *slot.shape), (row, *slot.strides), first)


@functools.lru_cache(maxsize=256)
def _plan_of(specs: tuple[tuple[str, Role, tuple[int, ...], str, str], ...]) -> Plan:
    cursor = Cursor()
    cursor.used = _MARGIN
    slots = {}
    for name, role, shape, dtype_name, strides in specs:
        dtype = getattr(torch, dtype_name)
        layout = strided_layout(shape, strides, dtype.itemsize)  # type: ignore[arg-type]  # a stride kind
        place = cursor.place(shape, layout.strides, dtype.itemsize, layout.offset)
        slots[name] = _Slot(role, shape, layout.strides, dtype, place)
    return Plan(slots, len(RUNS) * aligned(cursor.used + _MARGIN))


def plan_of(case: Case) -> Plan:
    """The plan for ``case``."""
    specs = tensor_specs(case).items()
    return _plan_of(tuple((name, spec.role, spec.shape, spec.dtype, strides_of(case, name)) for name, spec in specs))
