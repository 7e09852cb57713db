"""Memory of many cases for both of their runs: filled at one place, and copied to where kernels run and back as one.

Everything that the kernels of a batch get is laid out in areas, with red zones and poison as in an `Arena`. Inputs of
floating-point numbers are nearly all of it. They are the same in both runs but for the poison, and come back only if
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
from jaxtyping import Shaped, UInt8
from torch import Tensor

from attnfuzz.inputs.allocation import role_of
from attnfuzz.memory.arena import Arena, Cursor, Region, Span, aligned
from attnfuzz.memory.patterns import POISON_BYTES, Fill, bits, prefill_
from attnfuzz.problems.cases import Case
from attnfuzz.problems.shapes import Role, strided_layout, strides_of, tensor_specs


class Fetch:
    """Start copies, wait for the device, then look at them; what is at ``home`` already is not copied.

    ``home``: "cpu", or the GPU itself for what is to be looked at there.
    """

    def __init__(self, home: torch.device | str = "cpu") -> None:
        self.home = torch.device(home).type
        self._buffers: dict[int, UInt8[Tensor, " nbytes"]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def start_buffer(self, buffer: UInt8[Tensor, " nbytes"]) -> None:
        """Copy ``buffer``, which starts its storage: tensors in it are found in the copy from then on."""
        if buffer.device.type != self.home:
            copy = pinned(buffer.numel())
            self._buffers[buffer.untyped_storage().data_ptr()] = copy.copy_(buffer, non_blocking=True)

    def start_storage(self, tensor: Shaped[Tensor, "..."]) -> None:
        """Copy all of the storage that ``tensor`` is a part of, if that has not been started."""
        storage = tensor.untyped_storage()
        if tensor.device.type != self.home and storage.data_ptr() not in self._buffers:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.start_buffer(whole)

    def start(self, tensors: Sequence[Shaped[Tensor, "..."]]) -> None:
        """Copy those of ``tensors`` that are not part of a buffer already on its way: one copy for each dtype."""
        away = [
            tensor
            for tensor in tensors
            if tensor.device.type != self.home and tensor.untyped_storage().data_ptr() not in self._buffers
        ]
        for dtype in dict.fromkeys(tensor.dtype for tensor in away):
            chosen = [tensor for tensor in away if tensor.dtype == dtype]
            joined = torch.cat([tensor.reshape(-1) for tensor in chosen])
            copy = pinned(joined.nbytes).view(dtype).copy_(joined, non_blocking=True)
            parts = torch.split(copy, [tensor.numel() for tensor in chosen])
            for tensor, part in zip(chosen, parts, strict=True):
                self._tensors[id(tensor)] = tensor, part.view(tensor.shape)

    def at_home(self, tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The copy of ``tensor``; one that nobody asked for is made now."""
        if tensor.device.type == self.home:
            return tensor
        buffer = self._buffers.get(tensor.untyped_storage().data_ptr())
        if buffer is not None:
            return buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        _, copy = self._tensors.get(id(tensor), (None, None))
        return tensor.cpu() if copy is None else copy


def pinned(nbytes: int) -> UInt8[Tensor, " nbytes"]:
    """Host memory that a GPU reads and writes by itself; torch keeps what is given back for the next one to ask."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


RUNS: tuple[Fill, Fill] = ("nan", "finite")
"""Poison and pre-fill of the first and of the second run."""

_MARGIN = 1 << 14
"""Bytes between two cases, beyond their red zones, that count as the surroundings of both."""

_INPUT_WORDS = (torch.int16, torch.int32)
"""Integers as wide as the numbers in each area of inputs. The area of everything else comes after those."""

_AREA_OF_INPUT = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1}
_OTHERS = len(_INPUT_WORDS)


class _Slot(NamedTuple):
    """A tensor's place; ``place`` counts from the start of its case in the area."""

    area: int
    role: Role
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    place: Span


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a case's tensors go, and the bytes that one run takes in each area."""

    slots: dict[str, _Slot]
    area_bytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes for both runs together."""
        return len(RUNS) * sum(self.area_bytes)


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
    """One kind of memory of all cases: ``at_home``, what was ``sent``, and the ``memory`` that kernels get."""

    def __init__(self, sizes: Sequence[int], *, runs: int, home: torch.device, pin: bool) -> None:
        self.starts = list(itertools.accumulate(sizes, initial=0))
        shape = runs, self.starts[-1] + _MARGIN
        at_home = pinned(math.prod(shape)).view(shape) if pin else torch.empty(shape, dtype=torch.uint8, device=home)
        self.memory = self.sent = self.at_home = _Rows(at_home)

    def poison(self, part: slice) -> None:
        """Poison bytes at home."""
        for row, fill in zip(self.at_home.bytes, RUNS, strict=False):
            row[part].fill_(POISON_BYTES[fill])

    def around(self, case: int) -> slice:
        """A case with its surroundings."""
        return slice(self.starts[case], self.starts[case + 1] + _MARGIN)

    def tensor(self, rows: _Rows, case: int, slot: _Slot) -> Shaped[Tensor, "runs ..."]:
        """A tensor of a case in ``rows``."""
        return rows.tensor(slot, self.starts[case])

    def changes(self, rows: _Rows, expected: _Rows) -> list[tuple[bool, bool]] | None:
        """Whether the two ``rows`` of each case are not as ``expected``; None if they are for all cases."""
        if _equal(rows.bytes, expected.bytes):
            return None
        parts = [self.around(case) for case in range(len(self.starts) - 1)]
        first, second = (
            [not _equal(row[part], other[part]) for part in parts]
            for row, other in zip(rows.bytes, expected.bytes, strict=True)
        )
        return list(zip(first, second, strict=True))


class Image:
    """In order: write to `tensors`, `send`, run kernels, `start`, wait, look."""

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
        sizes = zip(*(plan.area_bytes for plan in plans), strict=True)
        self._areas = [
            _Area(of_cases, runs=1 if self._derives and i < _OTHERS else len(RUNS), home=home, pin=not self._at_home)
            for i, of_cases in enumerate(sizes)
        ]
        self._others = self._areas[_OTHERS]
        self._others.poison(slice(None))
        self._inputs_changed: Tensor | None = None
        self._only: dict[tuple[int, str], Tensor] = {}

    @property
    def _inputs(self) -> list[_Area]:
        return self._areas[:_OTHERS]

    def tensors(self, case: int) -> dict[str, Shaped[Tensor, "runs ..."]]:
        """The tensors of case number ``case`` at home, to be filled: poison, or pre-fill in outputs.

        Tensors have both runs, or only the first.
        """
        for area in self._inputs:  # not all cases at once: a case is written while its memory is still near by
            area.poison(slice(area.starts[case], area.starts[case + 1]))
        found = {}
        for name, slot in self._plans[case].slots.items():
            area = self._areas[slot.area]
            found[name] = area.tensor(area.at_home, case, slot)
            if slot.role == "output":
                bits(found[name]).copy_(_prefill_of_runs(slot.dtype, len(slot.shape), found[name].device))
        return found

    def only_changes(self, case: int, name: str, where: Tensor) -> None:
        """Forbid changes of the output ``name`` of a case but for elements of ``where``, of one run."""
        self._only[case, name] = where

    def send(self) -> None:
        """Copy everything to where kernels run, without waiting."""
        for area, words in zip(self._areas, _INPUT_WORDS, strict=False):
            area.poison(slice(area.starts[-1], None))
            area.sent = _both_runs(self._sent(area), words) if self._derives else _Rows(self._sent(area))
            area.memory = _Rows(area.sent.bytes.clone())
        others = self._sent(self._others)
        self._others.memory = _Rows(others.clone() if self._at_home else others)

    def on_device(self, case: int) -> dict[str, Shaped[Tensor, "runs ..."]]:
        """The tensors of case number ``case`` in both runs, for its kernel."""
        slots = self._plans[case].slots.items()
        return {name: (area := self._areas[slot.area]).tensor(area.memory, case, slot) for name, slot in slots}

    def start(self, fetch: Fetch) -> None:
        """Have everything copied back that is needed to look at."""
        if self.device.type != "cpu":
            words = ((area.memory.bytes.view(torch.int64), area.sent.bytes.view(torch.int64)) for area in self._inputs)
            self._inputs_changed = torch.stack([(memory != sent).any() for memory, sent in words]).any()
            fetch.start([self._inputs_changed])
        fetch.start_buffer(self._others.memory.bytes.view(-1))

    def arena(self, case: int, run: int, fetch: Fetch) -> Arena:
        """The part of one run's memory that came back: all but the inputs that `input_damage` looks at."""
        memory = _Rows(fetch.at_home(self._others.memory.bytes))
        regions = [
            Region(
                name,
                slot.role,
                0,
                *slot.place,
                self._others.tensor(memory, case, slot)[run],
                self._only.get((case, name)),
            )
            for name, slot in self._plans[case].slots.items()
            if slot.area == _OTHERS
        ]
        part, sent = self._others.around(case), self._others.at_home.bytes
        return Arena.sealed(memory.bytes[run, part], sent[run, part], regions, poison=RUNS[run], prefill=RUNS[run])

    def damage(self, fetch: Fetch) -> list[tuple[bool, bool]]:
        """For each case and run, whether a byte changed that is not an element of an output.

        A change between two cases counts against both.
        """
        area, memory = self._others, _Rows(fetch.at_home(self._others.memory.bytes))
        for case, plan in enumerate(self._plans):
            for name, slot in plan.slots.items():
                if slot.role == "output":
                    sent, back = (bits(area.tensor(rows, case, slot)) for rows in (area.at_home, memory))
                    where = self._only.get((case, name))
                    sent.copy_(back if where is None else torch.where(where, back, sent))
        return self._any([area.changes(memory, area.at_home), self.input_damage(fetch)])

    def input_damage(self, fetch: Fetch) -> list[tuple[bool, bool]]:
        """As `damage`, of inputs of floating-point numbers and what is around them."""
        if self._inputs_changed is not None and not fetch.at_home(self._inputs_changed):
            return self._any([])
        return self._any([area.changes(area.memory, area.sent) for area in self._inputs])

    def _any(self, found: Sequence[list[tuple[bool, bool]] | None]) -> list[tuple[bool, bool]]:
        """Whether any of ``found`` is true, for each case."""
        of_cases = zip(*(changes for changes in found if changes is not None), strict=True)
        together = [(any(first), any(second)) for first, second in (zip(*of_case, strict=True) for of_case in of_cases)]
        return together or [(False, False)] * len(self._plans)

    def _sent(self, area: _Area) -> UInt8[Tensor, "runs nbytes"]:
        return area.at_home.bytes if self._at_home else area.at_home.bytes.to(self.device, non_blocking=True)


def _both_runs(first: UInt8[Tensor, "1 nbytes"], dtype: torch.dtype) -> _Rows:
    """Inputs of the first run, and with the second one's poison.

    As a number of ``dtype``'s size the first run's poison, all ones, is a NaN: no input holds it.
    """
    both = first.new_empty((len(RUNS), first.shape[1]))
    both[0].copy_(first[0])
    words = first[0].view(dtype)
    poison = int.from_bytes(bytes([POISON_BYTES["finite"]]) * dtype.itemsize, "little")
    both[1].view(dtype).copy_(words.masked_fill(words == -1, poison))
    return _Rows(both)


def _equal(one: UInt8[Tensor, "..."], other: UInt8[Tensor, "..."]) -> bool:
    one, other = one.view(torch.int64), other.view(torch.int64)
    if one.is_cuda:
        return torch.equal(one, other)
    return np.array_equal(one.numpy(), other.numpy())  # takes half the time of torch


@functools.lru_cache(maxsize=64)
def _prefill_of_runs(dtype: torch.dtype, num_dims: int, device: torch.device) -> Shaped[Tensor, "runs ..."]:
    """The bits of each run's elements of an output before they are written."""
    column = torch.empty((len(RUNS), *[1] * num_dims), dtype=dtype, device=device)
    for row, fill in zip(column, RUNS, strict=True):
        prefill_(row, fill)
    return bits(column)


@functools.lru_cache(maxsize=256)
def _plan_of(specs: tuple[tuple[str, Role, tuple[int, ...], str, str], ...]) -> Plan:
    cursors: dict[int, Cursor] = {}
    slots = {}
    for name, role, shape, dtype_name, strides in specs:
        dtype = getattr(torch, dtype_name)
        area = _AREA_OF_INPUT.get(dtype, _OTHERS) if role == "input" else _OTHERS
        if area not in cursors:
            cursors[area] = Cursor()
            cursors[area].used = _MARGIN
        layout = strided_layout(shape, strides, dtype.itemsize)  # type: ignore[arg-type]  # a stride kind
        place = cursors[area].place(shape, layout.strides, dtype.itemsize, layout.offset)
        slots[name] = _Slot(area, role, shape, layout.strides, dtype, place)
    return Plan(slots, tuple(aligned(cursors[i].used) if i in cursors else 0 for i in range(_OTHERS + 1)))


def plan_of(case: Case) -> Plan:
    """The plan for ``case``."""
    specs = tensor_specs(case).items()
    return _plan_of(
        tuple((name, role_of(spec), spec.shape, spec.dtype, strides_of(case, name)) for name, spec in specs)
    )
