"""What a compiled Triton kernel computes, read from the text of its TTIR: the compiler's first form of it.

TTIR is in single assignment: each line names its result, its operands, its type and where in the source it comes from.
Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from attnfuzz.explaining.operations import Kind, Operation, SourcePlace, first_of_users

__all__ = ["Locations", "operations_of_ttir"]

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
_TF32 = ("inputPrecision = tf32",)
_EXPONENTIAL = re.compile(r"ex2\.approx|__nv_exp2?f?\b")


def operations_of_ttir(text: str, launch: int = 0) -> list[Operation]:
    """The operations on floating-point numbers of all functions of a module; those that are not known are left out."""
    return _Reader(text.splitlines(), launch).operations


@dataclass
class _Block:
    """Lines between braces: of a loop, a choice, a reduction or a function. ``results`` are those of the whole."""

    name: str
    results: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    within: set[str] = field(default_factory=set)


class _Reader:
    def __init__(self, lines: list[str], launch: int) -> None:
        self.operations: list[Operation] = []
        self._launch = launch
        self._locations = Locations(lines)
        self._values: dict[str, Operation] = {}
        blocks: list[_Block] = []
        for line in map(str.strip, lines):
            if line.startswith(("} else {", "} do {", "^")) or not line or line.startswith("#"):
                continue
            if line.startswith("}"):
                if blocks:
                    self._close(blocks.pop(), line)
            elif line.endswith(("{", "({")):
                blocks.append(self._open(line))
            elif line.startswith(("scf.yield", "scf.condition")):
                self._yield(blocks, line)
            else:
                self._read(line, blocks[-1].within if blocks else set())

    def _open(self, line: str) -> _Block:
        match = _RESULTS.fullmatch(line)
        rest = match["rest"] if match else line
        operation = _OPERATION.match(rest)
        block = _Block(name="" if operation is None else operation["name"])
        if match:
            block.results = _numbered(match["name"], match["count"])
        if block.name.startswith("tt.func"):  # what it is called with
            return block
        if block.name in _REDUCTIONS:
            block.operands = _VALUE.findall(rest.partition("<{")[0])
            return block
        for carried in _CARRIED.finditer(rest):
            initial = self._values.get(carried["initial"])
            if block.name in ("scf.for", "scf.while") and carried["name"] + " = " in rest:
                block.carried.append(carried["name"])
            if initial is not None:
                self._make(carried["name"], "move", initial.dtype, None, [initial])
        if block.name == "scf.for":  # the first is the loop's own variable
            block.carried = block.carried[1:] if len(block.carried) > len(block.results) else block.carried
        return block

    def _yield(self, blocks: list[_Block], line: str) -> None:
        block = blocks[-1] if blocks else _Block("")
        values = _VALUE.findall(line.partition(" : ")[0])
        if line.startswith("scf.condition"):
            values = values[1:]
        for i, value in enumerate(values):
            made = self._values.get(value)
            if made is None:
                continue
            if i < len(block.carried) and (argument := self._values.get(block.carried[i])) is not None:
                argument.operands.append(made)
            if i < len(block.results):
                known = self._values.get(block.results[i])
                if known is None:
                    self._make(block.results[i], "move", made.dtype, None, [made])
                else:
                    known.operands.append(made)

    def _close(self, block: _Block, line: str) -> None:
        if block.name not in _REDUCTIONS:
            for result, carried in zip(block.results, block.carried, strict=False):  # of a loop that never runs
                if result in self._values and carried in self._values:
                    self._values[result].operands.append(self._values[carried])
            return
        kinds = {_KINDS.get(name) for name in block.within}
        kind: Kind = "sum" if "add" in kinds else "max" if "max" in kinds or "arith.cmpf" in block.within else "other"
        line, place = self._locations.split(line)
        types = _split_types(line.rpartition("->")[2])
        for result, of_type in zip(block.results, types, strict=False):
            self._make(result, kind, _element(of_type)[0], place, self._known(block.operands))

    def _read(self, line: str, within: set[str]) -> None:
        line, place = self._locations.split(line)
        match = _RESULTS.fullmatch(line)
        rest = match["rest"] if match else line
        operation = _OPERATION.match(rest)
        if operation is None:
            return
        name = operation["name"]
        within.add(name)
        said, _, types = rest.rpartition(" : ")
        operands = self._known(_VALUE.findall(said))
        if match is None:
            if "store" in name or "atomic" in name:
                self.operations.append(Operation("store", "float32", place, self._launch, operands))
            return
        results = _numbered(match["name"], match["count"])
        last = re.split(r" -> | to ", types)[-1] if "->" in types or " to " in types else types
        parts = _split_types(last)
        for result, of_type in zip(results, parts if len(results) > 1 else parts[-1:], strict=False):
            dtype, is_pointer = _element(of_type)
            if is_pointer and name != "tt.load":
                continue
            self._make(result, self._kind(name, said, operands), dtype, place, [] if "load" in name else operands)

    def _kind(self, name: str, said: str, operands: list[Operation]) -> Kind:
        if "load" in name:
            return "load"
        if (
            name == "tt.dot"
            and any(mode in said for mode in _TF32)
            and any(one.dtype == "float32" for one in operands[:2])
        ):
            return "tf32_dot"
        if _EXPONENTIAL.search(said):
            return "exp"
        return _KINDS.get(name, "other")

    def _make(self, name: str, kind: Kind, dtype: str, place: SourcePlace | None, operands: list[Operation]) -> None:
        if dtype:
            self._values[name] = Operation(kind, dtype, place, self._launch, operands)
            self.operations.append(self._values[name])

    def _known(self, names: Iterable[str]) -> list[Operation]:
        return [self._values[name] for name in names if name in self._values]


class Locations:
    """What TTIR says of where in the source a line comes from, under the names of a module."""

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


def _numbered(name: str, count: str | None) -> list[str]:
    return [name] if count is None else [f"{name}#{i}" for i in range(int(count))]


def _split_types(types: str) -> list[str]:
    """Of "(f32, tensor<4x!tt.ptr<f16>>)" its two."""
    parts, depth = [""], 0
    for character in types.strip().removeprefix("(").removesuffix(")"):
        depth += (character == "<") - (character == ">")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _element(of_type: str) -> tuple[str, bool]:
    """The format of its floating-point numbers, empty if it has none, and whether these are what it points to."""
    is_pointer = "!tt.ptr<" in of_type
    match = _ELEMENT.fullmatch(of_type)
    return ("", is_pointer) if match is None else (_FORMATS.get(match["element"], ""), is_pointer)
