"""Read what a compiled Triton kernel computes, loads and stores in the text of its TTIR: the compiler's first form.

TTIR is in single assignment: each line names its result, its operands, its type and where in the source it comes from.
Torch-free.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from attnfuzz.explaining.accesses import Access
from attnfuzz.explaining.operations import Kind, Operation, SourcePlace, first_of_users

_KINDS: dict[str, Kind] = {
    "arith.addf": "add", "arith.subf": "add", "arith.mulf": "mul", "arith.divf": "div", "math.fma": "add",
    "tt.precise_divf": "div", "tt.dot": "dot", "tt.dot_scaled": "dot", "math.exp": "exp", "math.exp2": "exp",
    "math.log": "log", "math.log2": "log", "arith.truncf": "convert", "arith.extf": "convert",
    "tt.fp_to_fp": "convert", "arith.sitofp": "argument", "arith.uitofp": "argument", "arith.constant": "argument",
    "arith.maxnumf": "max", "arith.maximumf": "max", "arith.minnumf": "max", "arith.minimumf": "max",
    "tt.clampf": "max", "arith.select": "move", "tt.reshape": "move", "tt.trans": "move", "tt.expand_dims": "move",
    "tt.broadcast": "move", "tt.splat": "move", "tt.unsplat": "move", "tt.cat": "move", "tt.join": "move",
    "tt.split": "move", "tt.gather": "move",
}  # fmt: skip
_FORMATS = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
}  # fmt: skip
_REDUCTIONS = ("tt.reduce", "tt.scan")

_ALIAS = re.compile(r"(?P<name>#\w+) = loc\((?P<what>.*)\)")
_FILE = re.compile(r'"(?P<file>(?:[^"\\]|\\.)*)":(?P<line>\d+)(?::\d+)?')
_NAME = re.compile(r'"(?P<name>[^"]*)"\(')
_NAMED = re.compile(r'"(?:[^"\\]|\\.)*"\((?P<what>.*)\)')
_CALLED = re.compile(r"callsite\((?P<callee>.*) at (?P<caller>.*)\)")
_LOCATION = re.compile(r" loc\((?P<what>(?:[^()\"]|\"(?:[^\"\\]|\\.)*\"|\((?:[^()]|\([^()]*\))*\))*)\)$")
_RESULTS = re.compile(r"(?P<name>%[\w$.-]+)(?::(?P<count>\d+))? = (?P<rest>.*)")
_OPERATION = re.compile(r'"?(?P<name>[\w.]+)"?')
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_ELEMENT = re.compile(r"(?:.*[x<]|^)(?P<name>!tt\.ptr<)?(?P<element>[a-z]+\d+\w*)(?:, *\d+)?>*$")
_CARRIED = re.compile(r"(?P<name>%[\w$.-]+) = (?P<initial>%[\w$.-]+(?:#\d+)?)")
_ARGUMENT = re.compile(r"(?P<name>%[\w$.-]+): !tt\.(?:ptr|tensordesc)<")
_TF32 = "inputPrecision = tf32"
_EXPONENTIAL = re.compile(r"ex2\.approx|__nv_exp2?f?\b")


@dataclass(eq=False, slots=True)
class Line:
    """An ``operation`` on values, by their names; empty where a loop or a choice only passes these on.

    ``types``: of each result. ``said``: all before the types. ``within``: what a reduction does.
    """

    operation: str
    operands: list[str] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    place: SourcePlace | None = None
    said: str = ""
    results: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    within: set[str] = field(default_factory=set)


class Module:
    """All ``lines`` of a module in their order, and by the names of what they give; what is not known is left out.

    ``arguments``: the names that pointers have in the source, by that of the value.
    """

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        self.lines: list[Line] = []
        self.values: dict[str, Line] = {}
        self.arguments: dict[str, str] = {}
        self._locations = _Locations(lines)
        blocks: list[Line] = []
        for line in map(str.strip, lines):
            if line.startswith(("} else {", "} do {", "^", "#")) or not line:
                continue
            if line.startswith("}"):
                if blocks:
                    self._close(blocks.pop(), line)
            elif line.startswith(("scf.yield", "scf.condition")):
                if blocks:
                    self._yield(blocks[-1], line)
            elif (read := self._read(line)) is not None:
                if blocks:
                    blocks[-1].within.add(read.operation)
                if line.endswith(("{", "({")):
                    blocks.append(read)

    def format_of(self, name: str) -> str:
        """The format of a value's floating-point numbers; empty if it has none."""
        seen = {name}
        while not self.values[name].operation:
            others = [one for one in self.values[name].operands if one in self.values and one not in seen]
            if not others:
                return ""
            name = others[0]
            seen.add(name)
        line = self.values[name]
        of_type = dict(zip(line.results, line.types, strict=False)).get(name, "")
        match = _ELEMENT.fullmatch(of_type)
        if match is None or ("!tt.ptr<" in of_type and line.operation != "tt.load"):
            return ""
        return _FORMATS.get(match["element"], "")

    def _read(self, line: str) -> Line | None:
        opens = line.endswith(("{", "({"))
        line, place = self._locations.split(line)
        match = _RESULTS.fullmatch(line)
        rest = match["rest"] if match else line
        operation = _OPERATION.match(rest)
        if operation is None:
            return None
        said, _, types = rest.rpartition(" : ")
        given = rest.partition("<{")[0] if opens else said
        read = Line(operation["name"], _VALUE.findall(given), place=place, said=said)
        if read.operation.startswith("tt.func"):
            self._read_arguments(line)
        if match is not None:
            name, count = match["name"], match["count"]
            read.results = [name] if count is None else [f"{name}#{i}" for i in range(int(count))]
        if read.operation.startswith("scf."):
            self._begin(read, rest)
        else:
            parts = _split_types(re.split(r" -> | to ", types)[-1])
            read.types = parts if len(read.results) > 1 else parts[-1:]
            self.values.update(dict.fromkeys(read.results, read))
            self.lines.append(read)
        return read

    def _read_arguments(self, line: str) -> None:
        for match in _ARGUMENT.finditer(line):
            name = self._locations.name_in(line[match.end() :].partition("loc(")[2])
            self.arguments[match["name"]] = name or match["name"].removeprefix("%")

    def _begin(self, block: Line, rest: str) -> None:
        """A loop or a choice: what it carries around, and what it gives, comes of what is yielded in it."""
        for one in _CARRIED.finditer(rest.partition("iter_args")[2] or (rest if "while" in block.operation else "")):
            block.carried.append(one["name"])
            self.values[one["name"]] = Line("", [one["initial"]])
        self.values.update((name, Line("")) for name in block.results)

    def _yield(self, block: Line, line: str) -> None:
        values = _VALUE.findall(line.partition(" : ")[0])[line.startswith("scf.condition") :]
        for names in (block.carried, block.results):
            for name, value in zip(names, values, strict=False):
                self.values[name].operands.append(value)

    def _close(self, block: Line, line: str) -> None:
        if block.operation in _REDUCTIONS:
            line, block.place = self._locations.split(line)
            block.types = _split_types(line.rpartition("->")[2])
        elif block.operation.startswith("scf."):
            for name, carried in zip(block.results, block.carried, strict=False):  # of a loop that never runs
                self.values[name].operands.append(carried)


def operations_of_ttir(text: str, launch: int = 0) -> list[Operation]:
    """The operations on floating-point numbers of all functions of a module; those that are not known are left out."""
    module = Module(text)
    made = {
        name: Operation(_kind(line, module), dtype, line.place, launch)
        for name, line in module.values.items()
        if (dtype := module.format_of(name))
    }
    for name, one in made.items():
        if one.kind != "load":
            one.operands += [made[operand] for operand in module.values[name].operands if operand in made]
    written = [one for one in module.lines if not one.results and re.search("store|atomic", one.operation)]
    return [
        *made.values(),
        *(
            Operation("store", "float32", one.place, launch, [made[name] for name in one.operands if name in made])
            for one in written
        ),
    ]


def _kind(line: Line, module: Module) -> Kind:
    if not line.operation:
        return "move"
    if "load" in line.operation:
        return "load"
    if line.operation in _REDUCTIONS:
        kinds = {_KINDS.get(name) for name in line.within}
        return "sum" if "add" in kinds else "max" if "max" in kinds or "arith.cmpf" in line.within else "other"
    if line.operation == "tt.dot" and _TF32 in line.said:
        factors = [one for one in line.operands[:2] if one in module.values]
        return "tf32_dot" if any(module.format_of(one) == "float32" for one in factors) else "dot"
    return "exp" if _EXPONENTIAL.search(line.said) else _KINDS.get(line.operation, "other")


class _Locations:
    """Places in the source that TTIR names for its lines, under the names of a module."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._aliases = {match["name"]: match["what"] for line in lines if (match := _ALIAS.fullmatch(line.strip()))}

    def split(self, line: str) -> tuple[str, SourcePlace | None]:
        """A line without its location, and the place in the source."""
        match = _LOCATION.search(line)
        if match is None:
            return line, None
        return line[: match.start()], first_of_users(self._places(match["what"]))

    def name_in(self, what: str) -> str:
        """The name that a location begins with, ``"q"(#loc)`` or ``#loc1``; empty if it has none."""
        what = next((self._aliases[one] for one in re.findall(r"^#\w+", what) if one in self._aliases), what)
        match = _NAME.match(what)
        return "" if match is None else match["name"]

    def _places(self, what: str) -> Iterator[SourcePlace]:
        """Innermost first."""
        if what in self._aliases:
            yield from self._places(self._aliases[what])
        elif match := _FILE.fullmatch(what):
            yield match["file"], int(match["line"])
        elif match := _CALLED.fullmatch(what):
            yield from self._places(match["callee"])
            yield from self._places(match["caller"])
        elif match := _NAMED.fullmatch(what):
            yield from self._places(match["what"])
        elif what.startswith("fused"):
            for part in what.rpartition("[")[2].rstrip("]").split(", "):
                yield from self._places(part)


def _split_types(types: str) -> list[str]:
    """Split "(f32, tensor<4x!tt.ptr<f16>>)" into its two types."""
    parts, depth = [""], 0
    for character in types.strip().removeprefix("(").removesuffix(")"):
        depth += (character == "<") - (character == ">")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


_LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather")
_STORES = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.atomic_rmw", "tt.atomic_cas")
_MOVES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans")


def accesses_of_ttir(text: str, tensors: Mapping[str, str]) -> list[Access]:
    """The accesses to tensors that are known: by the name of an argument of the kernel, that of its tensor.

    What a pointer points into is followed back through the arithmetic to an argument of the kernel. As narrow counts a
    product of numbers of 32 bits, neither of which is a constant, that an offset is computed of.
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
        is_narrow = any(one == "i32" or one.endswith("xi32>") for one in value.types)
        if value.place is not None and is_narrow and (is_product or value.operation == "arith.trunci"):
            yield value.place
        following = [one for one in value.operands if one not in seen]
        seen.update(following)
        open_ += following


def _is_constant(name: str, module: Module) -> bool:
    value = module.values.get(name)
    while value is not None and value.operation in _MOVES:
        value = module.values.get(value.operands[0])
    return value is not None and value.operation in ("arith.constant", "tt.make_range")
