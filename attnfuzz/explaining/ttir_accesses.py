"""The loads and stores of a compiled Triton kernel, read from its TTIR: of which tensors, and with offsets of how many
bits.

What a pointer points into is followed back through the arithmetic to an argument of the kernel. Torch-free.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from attnfuzz.explaining.accesses import Access
from attnfuzz.explaining.operations import SourcePlace
from attnfuzz.explaining.ttir import Line, Module

_LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather")
_STORES = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.atomic_rmw", "tt.atomic_cas")
_MOVES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans")


def accesses_of_ttir(text: str, tensors: Mapping[str, str]) -> list[Access]:
    """The accesses to tensors that are known: by the name of an argument of the kernel, that of its tensor.

    As narrow counts a product of numbers of 32 bits, neither of which is a constant, that an offset is computed of.
    """
    module = Module(text)
    arguments = {value: tensors[name] for value, name in module.arguments.items() if name in tensors}
    found: dict[Access, None] = {}
    for line in module.lines:
        if line.operation not in (*_LOADS, *_STORES) or line.place is None or not line.operands:
            continue
        bases, offsets = _addressed_by(line.operands[0], module)
        products: Sequence[SourcePlace | None] = tuple(dict.fromkeys(_products(offsets, module))) or (None,)
        kind: Literal["load", "store"] = "load" if line.operation in _LOADS else "store"
        for tensor, narrow in itertools.product(sorted({arguments[one] for one in bases & arguments.keys()}), products):
            found[Access(kind, tensor, line.place, narrow=narrow)] = None
    return list(found)


def _addressed_by(pointer: str, module: Module) -> tuple[set[str], set[str]]:
    """The arguments that ``pointer`` may be made of, and the offsets that were added on the way."""
    bases, offsets, seen, open_ = set[str](), set[str](), {pointer}, [pointer]
    while open_:
        name = open_.pop()
        value = module.values.get(name)
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


def _products(offsets: set[str], module: Module) -> Iterator[SourcePlace]:
    """Where products are computed in 32 bits that ``offsets`` come of, or numbers cut to 32 bits."""
    seen, open_ = set(offsets), sorted(offsets)
    while open_:
        value = module.values.get(open_.pop())
        if value is None or value.operation in _LOADS:  # an index that is read is what it is
            continue
        is_product = value.operation == "arith.muli" and not any(_is_constant(one, module) for one in value.operands)
        if value.place is not None and _is_narrow(value) and (is_product or value.operation == "arith.trunci"):
            yield value.place
        following = [one for one in value.operands if one not in seen]
        seen.update(following)
        open_ += following


def _is_constant(name: str, module: Module) -> bool:
    value = module.values.get(name)
    while value is not None and value.operation in _MOVES:
        value = module.values.get(value.operands[0])
    return value is not None and value.operation in ("arith.constant", "tt.make_range")


def _is_narrow(value: Line) -> bool:
    """Whether it is an integer of 32 bits, or several of them."""
    return any(one == "i32" or one.endswith("xi32>") for one in value.types)
