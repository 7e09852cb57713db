"""Memory of many cases for both of their runs: filled at one place, and copied to where kernels run and back as one.

Everything that the kernels of a batch get is laid out in two areas, with red zones and poison as in an `Arena`. Inputs
of floating-point numbers are nearly all of it. They are the same in both runs but for the poison, and come back only if
they were changed: they are compared where they are. Everything else is filled twice and comes back.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int16, Shaped, UInt8
from torch import Tensor

from attnfuzz.memory.arena import Arena, Region
from attnfuzz.memory.fetch import Fetch, pinned
from attnfuzz.memory.geometry import Cursor, Place, aligned
from attnfuzz.memory.patterns import POISON_BYTES, Fill, bits, prefill_
from attnfuzz.problems.cases import Case
from attnfuzz.problems.shapes import Role, strides_of, tensor_specs
from attnfuzz.problems.strides import strided_layout

__all__ = ["RUNS", "Image", "Plan", "plan_of"]

RUNS: tuple[Fill, Fill] = ("nan", "finite")
"""What poison and pre-fill are in the first and in the second run."""

_MARGIN = 1 << 14
"""Bytes between two cases, beyond their red zones, that count as the surroundings of both."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class _Slot(NamedTuple):
    """A tensor's place; ``place`` counts from the start of its case in the area of inputs or in that of the rest."""

    is_float_input: bool
    role: Role
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    place: Place


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a case's tensors go, and the bytes that one run takes in both areas."""

    slots: dict[str, _Slot]
    input_bytes: int
    other_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes for both runs together."""
        return len(RUNS) * (self.input_bytes + self.other_bytes)


class _Rows:
    """A row of bytes for each run, and views of them."""

    def __init__(self, rows: UInt8[Tensor, "runs nbytes"]) -> None:
        self.bytes = rows
        self._typed: dict[torch.dtype, Tensor] = {}

    def tensor(self, slot: _Slot, start: int) -> Shaped[Tensor, "runs ..."]:
        """The tensor of a case that begins at ``start``."""
        itemsize = slot.dtype.itemsize
        typed = self._typed.get(slot.dtype)
        if typed is None:
            typed = self._typed[slot.dtype] = self.bytes.view(slot.dtype)
        runs, row = typed.shape
        return typed.as_strided((runs, *slot.shape), (row, *slot.strides), (start + slot.place.start) // itemsize)


class _Area:
    """One kind of memory of all cases; ``at_home`` and ``memory`` hold what was sent and what kernels get."""

    def __init__(self, sizes: Sequence[int], *, runs: int, home: torch.device, pin: bool) -> None:
        self.starts = list(itertools.accumulate(sizes, initial=0))
        shape = runs, self.starts[-1] + _MARGIN
        at_home = pinned(math.prod(shape)).view(shape) if pin else torch.empty(shape, dtype=torch.uint8, device=home)
        self.memory = self.at_home = _Rows(at_home)
        self._poison(slice(self.starts[-1], None))

    def clear(self, case: int) -> None:
        """Poison the memory of a case at home. One by one, so that it is near by when the case is written."""
        self._poison(slice(self.starts[case], self.starts[case + 1]))

    def around(self, case: int) -> slice:
        """A case with its surroundings."""
        return slice(self.starts[case], self.starts[case + 1] + _MARGIN)

    def tensor(self, rows: _Rows, case: int, slot: _Slot) -> Shaped[Tensor, "runs ..."]:
        """A tensor of a case in ``rows``."""
        return rows.tensor(slot, self.starts[case])

    def _poison(self, part: slice) -> None:
        for row, fill in zip(self.at_home.bytes, RUNS, strict=False):
            row[part].fill_(POISON_BYTES[fill])


class Image:
    """Two areas. In order: write to `tensors`, `send`, run kernels, `start`, wait, look."""

    def __init__(
        self,
        plans: Sequence[Plan],
        device: torch.device | str,
        *,
        home: torch.device | str = "cpu",
        derive: bool | None = None,
    ) -> None:
        """``plans``: one for each case. ``device``: where kernels run.

        ``home``: where tensors are filled and looked at, "cpu" or ``device``. ``derive``: whether inputs of the second
        run are made on the device of those of the first; by default on a GPU, which takes a few launches for what the
        host would have to write and send.
        """
        self.device = torch.device(device)
        home = torch.device(home)
        self._plans = plans
        self._derives = self.device.type == "cuda" if derive is None else derive
        self._at_home = self.device.type == home.type
        pin = not self._at_home
        runs = 1 if self._derives else len(RUNS)
        self._inputs = _Area([plan.input_bytes for plan in plans], runs=runs, home=home, pin=pin)
        self._others = _Area([plan.other_bytes for plan in plans], runs=len(RUNS), home=home, pin=pin)
        self._unchanged_inputs = self._inputs.at_home
        self._inputs_changed: Tensor | None = None

    def tensors(self, case: int) -> dict[str, Shaped[Tensor, "runs ..."]]:
        """The tensors of case number ``case`` at home, to be filled: poison, or pre-fill in outputs.

        Tensors have both runs, or only the first.
        """
        self._inputs.clear(case)
        self._others.clear(case)
        found = {}
        for name, slot in self._plans[case].slots.items():
            area = self._area(slot)
            found[name] = area.tensor(area.at_home, case, slot)
            if slot.role == "output":
                bits(found[name]).copy_(_prefill_of_runs(slot.dtype, len(slot.shape), found[name].device))
        return found

    def send(self) -> None:
        """Copy everything to where kernels run, without waiting."""
        self._unchanged_inputs = self._both_runs(self._sent(self._inputs))
        self._inputs.memory = _Rows(self._unchanged_inputs.bytes.clone())
        others = self._sent(self._others)
        self._others.memory = _Rows(others.clone() if self._at_home else others)

    def on_device(self, case: int) -> dict[str, Shaped[Tensor, "runs ..."]]:
        """The tensors of case number ``case`` in both runs, for its kernel."""
        slots = self._plans[case].slots.items()
        return {name: (area := self._area(slot)).tensor(area.memory, case, slot) for name, slot in slots}

    def start(self, fetch: Fetch) -> None:
        """Have everything copied back that is needed to look at."""
        if self.device.type != "cpu":
            words, unchanged = (rows.bytes.view(torch.int64) for rows in (self._inputs.memory, self._unchanged_inputs))
            self._inputs_changed = (words != unchanged).any()
            fetch.start([self._inputs_changed])
        fetch.start_buffer(self._others.memory.bytes.view(-1))

    def arena(self, case: int, run: int, fetch: Fetch) -> Arena:
        """What came back of one run beside what was sent: all but the inputs that `input_damage` looks at."""
        memory = _Rows(fetch.at_home(self._others.memory.bytes))
        regions = [
            Region(name, slot.role, 0, *slot.place, self._others.tensor(memory, case, slot)[run])
            for name, slot in self._plans[case].slots.items()
            if not slot.is_float_input
        ]
        part, sent = self._others.around(case), self._others.at_home.bytes
        return Arena.sealed(memory.bytes[run, part], sent[run, part], regions, poison=RUNS[run], prefill=RUNS[run])

    def damage(self, fetch: Fetch) -> list[tuple[bool, bool]]:
        """For each case and run, whether a byte changed that is not an element of an output.

        A change between two cases counts against both.
        """
        area, memory = self._others, _Rows(fetch.at_home(self._others.memory.bytes))
        for case, plan in enumerate(self._plans):
            for slot in plan.slots.values():
                if slot.role == "output":
                    area.tensor(area.at_home, case, slot).copy_(area.tensor(memory, case, slot))
        of_others = self._changes(area, memory, area.at_home)
        of_inputs = self.input_damage(fetch)
        return [(one[0] or other[0], one[1] or other[1]) for one, other in zip(of_inputs, of_others, strict=True)]

    def input_damage(self, fetch: Fetch) -> list[tuple[bool, bool]]:
        """As `damage`, of inputs of floating-point numbers and what is around them."""
        if self._inputs_changed is not None and not fetch.at_home(self._inputs_changed):
            return [(False, False)] * len(self._plans)
        return self._changes(self._inputs, self._inputs.memory, self._unchanged_inputs)

    def _changes(self, area: _Area, rows: _Rows, unchanged: _Rows) -> list[tuple[bool, bool]]:
        if _equal(rows.bytes, unchanged.bytes):
            return [(False, False)] * len(self._plans)
        parts = [area.around(case) for case in range(len(self._plans))]
        first, second = (
            [not _equal(row[part], expected[part]) for part in parts]
            for row, expected in zip(rows.bytes, unchanged.bytes, strict=True)
        )
        return list(zip(first, second, strict=True))

    def _area(self, slot: _Slot) -> _Area:
        return self._inputs if slot.is_float_input else self._others

    def _sent(self, area: _Area) -> UInt8[Tensor, "runs nbytes"]:
        return area.at_home.bytes if self._at_home else area.at_home.bytes.to(self.device, non_blocking=True)

    def _both_runs(self, sent: UInt8[Tensor, "runs nbytes"]) -> _Rows:
        if not self._derives:
            return _Rows(sent)
        both = sent.new_empty((len(RUNS), sent.shape[1]))
        both[0].copy_(sent[0])
        both[1].copy_(_with_second_poison(sent[0].view(torch.int16)).view(torch.uint8))
        return _Rows(both)


def _with_second_poison(words: Int16[Tensor, " nwords"]) -> Int16[Tensor, " nwords"]:
    """Inputs of the second run, of those of the first.

    No number has 16 bits that are the first run's poison, all ones: either half of a NaN in float32, and the lower half
    of numbers of 24 significant bits, are the only places to find them, and no recipe draws either.
    """
    second = int.from_bytes(bytes([POISON_BYTES["finite"]]) * 2, "little")
    return words.masked_fill(words == -1, second)


def _equal(one: UInt8[Tensor, "..."], other: UInt8[Tensor, "..."]) -> bool:
    one, other = one.view(torch.int64), other.view(torch.int64)
    if one.is_cuda:
        return torch.equal(one, other)
    return np.array_equal(one.numpy(), other.numpy())  # takes half the time of torch


@functools.lru_cache(maxsize=64)
def _prefill_of_runs(dtype: torch.dtype, num_dims: int, device: torch.device) -> Shaped[Tensor, "runs ..."]:
    """What each run's elements of an output hold before they are written, as bits."""
    column = torch.empty((len(RUNS), *[1] * num_dims), dtype=dtype, device=device)
    for row, fill in zip(column, RUNS, strict=True):
        prefill_(row, fill)
    return bits(column)


@functools.lru_cache(maxsize=256)
def _plan_of(specs: tuple[tuple[str, Role, tuple[int, ...], str, str], ...]) -> Plan:
    inputs, others = Cursor(), Cursor()
    inputs.used = others.used = _MARGIN
    slots = {}
    for name, role, shape, dtype_name, strides in specs:
        dtype = getattr(torch, dtype_name)
        is_float_input = role == "input" and dtype in _FLOATS
        layout = strided_layout(shape, strides, dtype.itemsize)  # type: ignore[arg-type]  # a stride kind
        cursor = inputs if is_float_input else others
        place = cursor.place(shape, layout.strides, dtype.itemsize, layout.offset)
        slots[name] = _Slot(is_float_input, role, shape, layout.strides, dtype, place)
    return Plan(slots, aligned(inputs.used), aligned(others.used))


def plan_of(case: Case) -> Plan:
    """The plan for ``case``."""
    specs = tensor_specs(case).items()
    return _plan_of(tuple((name, spec.role, spec.shape, spec.dtype, strides_of(case, name)) for name, spec in specs))
