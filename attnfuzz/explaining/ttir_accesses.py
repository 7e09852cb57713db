"""The loads and stores of a compiled Triton kernel, read from its TTIR: of which tensors, and with offsets of how many
bits.

What a pointer points into is followed back through the arithmetic to an argument of the kernel. Torch-free.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from attnfuzz.explaining.accesses import Access
from attnfuzz.explaining.operations import SourcePlace
from attnfuzz.explaining.ttir import Locations

__all__ = ["accesses_of_ttir"]

_RESULTS = re.compile(r"(?P<name>%[\w$.-]+)(?::\d+)? = (?P<rest>.*)")
_OPERATION = re.compile(r'"?(?P<name>[\w.]+)"?')
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_CARRIED = re.compile(r"(?P<name>%[\w$.-]+) = (?P<initial>%[\w$.-]+(?:#\d+)?)")
_ARGUMENT = re.compile(r"(?P<name>%[\w$.-]+): !tt\.(?:ptr|tensordesc)<")
_LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather")
_STORES = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.atomic_rmw", "tt.atomic_cas")
_MOVES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans")


@dataclass(slots=True)
class _Value:
    """``is_narrow``: an integer of 32 bits, or several of them."""

    operation: str
    operands: list[str] = field(default_factory=list)
    place: SourcePlace | None = None
    is_narrow: bool = False


def accesses_of_ttir(text: str, tensors: Mapping[str, str]) -> list[Access]:
    """The accesses to tensors that are known: by the name of an argument of the kernel, that of its tensor.

    As narrow counts a product of numbers of 32 bits, neither of which is a constant, that an offset is computed of.
    """
    reader = _Reader(text.splitlines())
    arguments = {value: tensors[name] for value, name in reader.arguments.items() if name in tensors}
    found: dict[Access, None] = {}
    for line in reader.accesses:
        if line.place is None or not line.operands:
            continue
        bases, offsets = reader.addressed_by(line.operands[0])
        products: Sequence[SourcePlace | None] = tuple(dict.fromkeys(reader.products(offsets))) or (None,)
        kind: Literal["load", "store"] = "load" if line.operation in _LOADS else "store"
        for tensor, narrow in itertools.product(sorted({arguments[one] for one in bases & arguments.keys()}), products):
            found[Access(kind, tensor, line.place, narrow=narrow)] = None
    return list(found)


class _Reader:
    """``arguments`` are the names that pointers have in the source, by that of the value."""

    def __init__(self, lines: list[str]) -> None:
        self.accesses: list[_Value] = []
        self.arguments: dict[str, str] = {}
        self._locations = Locations(lines)
        self._values: dict[str, _Value] = {}
        blocks: list[tuple[str, list[str]]] = []  # the result of a loop or choice, and what it carries around
        for line in map(str.strip, lines):
            if line.startswith("tt.func"):
                self._read_arguments(line)
            if line.startswith("} else {"):
                continue
            if line.startswith("}"):
                blocks = blocks[:-1]
            elif line.startswith("scf.yield"):
                self._yield(blocks[-1] if blocks else ("", []), line)
            else:
                opened = self._read(line)
                if line.endswith(("{", "({")):
                    blocks.append(opened)

    def addressed_by(self, pointer: str) -> tuple[set[str], set[str]]:
        """The arguments that ``pointer`` may be made of, and the offsets that were added on the way."""
        bases, offsets, seen, open_ = set[str](), set[str](), {pointer}, [pointer]
        while open_:
            name = open_.pop()
            value = self._values.get(name)
            if value is None:
                bases.add(name)
                continue
            following = value.operands if value.operation in ("", "arith.select") else value.operands[:1]
            if value.operation == "tt.addptr":
                offsets.update(value.operands[1:2])
            elif value.operation == "tt.make_tensor_ptr":
                offsets.update(value.operands[1:])
            open_ += [one for one in following if one not in seen]
            seen.update(following)
        return bases, offsets

    def products(self, offsets: set[str]) -> Iterator[SourcePlace]:
        """Where products are computed in 32 bits that ``offsets`` come of, or numbers cut to 32 bits."""
        seen, open_ = set(offsets), sorted(offsets)
        while open_:
            value = self._values.get(open_.pop())
            if value is None or value.operation in _LOADS:  # an index that is read is what it is
                continue
            is_product = value.operation == "arith.muli" and not any(map(self._is_constant, value.operands))
            if value.place is not None and value.is_narrow and (is_product or value.operation == "arith.trunci"):
                yield value.place
            following = [one for one in value.operands if one not in seen]
            seen.update(following)
            open_ += following

    def _is_constant(self, name: str) -> bool:
        value = self._values.get(name)
        while value is not None and value.operation in _MOVES:
            value = self._values.get(value.operands[0])
        return value is not None and value.operation in ("arith.constant", "tt.make_range")

    def _read_arguments(self, line: str) -> None:
        found = list(_ARGUMENT.finditer(line))
        for match in found:
            name = self._locations.name_in(line[match.end() :].partition("loc(")[2])
            self.arguments[match["name"]] = name or match["name"].removeprefix("%")

    def _read(self, line: str) -> tuple[str, list[str]]:
        line, place = self._locations.split(line)
        match = _RESULTS.fullmatch(line)
        rest = match["rest"] if match else line
        operation = _OPERATION.match(rest)
        if operation is None:
            return "", []
        name = operation["name"]
        said, _, types = rest.rpartition(" : ")
        value = _Value(name, _VALUE.findall(said), place, _is_narrow(types))
        if name in (*_LOADS, *_STORES):
            self.accesses.append(value)
        if match is None:
            return "", []
        if not name.startswith("scf."):
            self._values[match["name"]] = value
            return match["name"], []
        carried = []
        for one in _CARRIED.finditer(rest.partition("iter_args")[2] or rest):
            carried.append(one["name"])
            self._values[one["name"]] = _Value("", [one["initial"]])
        return match["name"], carried

    def _yield(self, block: tuple[str, list[str]], line: str) -> None:
        result, carried = block
        values = _VALUE.findall(line.partition(" : ")[0])
        for i, value in enumerate(values):
            if i < len(carried):
                self._values[carried[i]].operands.append(value)
            for name in (result, f"{result}#{i}") if len(values) == 1 else (f"{result}#{i}",):
                self._values.setdefault(name, _Value("")).operands.append(value)


def _is_narrow(types: str) -> bool:
    last = types.rpartition("->")[2].rpartition(" to ")[2].strip()
    return last in ("i32",) or last.endswith("xi32>")
