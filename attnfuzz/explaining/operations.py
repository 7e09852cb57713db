"""What a kernel computed, as a graph: each operation on floating-point numbers, where in the source it is, and of what.

`attnfuzz.triton_compat.interpreter_operations`, `attnfuzz.explaining.torch_operations` and
`attnfuzz.explaining.ttir` make one of what ran; `attnfuzz.explaining.cause_lines` looks for a mistake in it.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["BITS", "Kind", "Operation", "Operations", "Recording", "SourcePlace", "first_of_users"]

Kind = Literal[
    "add", "argument", "convert", "div", "dot", "exp", "load", "log", "max", "move", "mul", "other", "softmax", "store",
    "sum", "tf32_dot",
]  # fmt: skip
"""``move`` leaves numbers as they are (a shape, a choice, a loop's variable); ``add`` subtracts, too, and ``max`` is
also the minimum. ``argument`` is a number that was given as such, ``load`` numbers from memory."""

SourcePlace = tuple[str, int]
"""A file, as the code says, and a line in it, from 1 on."""

BITS = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "float8": 8,
}  # fmt: skip
"""Of a number in each format; ``float8`` stands for those that attnfuzz has no cases of."""

_TRITONS = ("/triton/language/", "/triton/runtime/")


@dataclass(eq=False, slots=True)
class Operation:
    """``dtype`` is that of the result, of the names in `BITS`. ``launch`` tells kernels apart that ran."""

    kind: Kind
    dtype: str
    place: SourcePlace | None = None
    launch: int = 0
    operands: list[Operation] = field(default_factory=list)

    @property
    def rounds(self) -> bool:
        """Whether numbers of 16 or 8 bits are made here that were not there before."""
        bits = BITS[self.dtype]
        if bits > BITS["float16"] or self.kind in ("argument", "load", "max", "move", "store"):
            return False
        if self.kind != "convert":
            return True
        return any(other.dtype != self.dtype and BITS[other.dtype] >= bits for other in self.operands)


class Operations:
    """A graph of operations, which a loop may make cyclic."""

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self._all = list(operations)
        self._users: dict[Operation, list[Operation]] = {one: [] for one in self._all}
        for user in self._all:
            for operand in user.operands:
                self._users.setdefault(operand, []).append(user)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._all)

    def of_kind(self, *kinds: Kind) -> set[Operation]:
        """All operations of these kinds."""
        return {one for one in self._all if one.kind in kinds}

    def after(
        self, starts: Collection[Operation], through: Callable[[Operation, Operation], bool] = lambda *_: True
    ) -> set[Operation]:
        """``starts`` and what is computed of them: by operations that ``through(user, operand)`` lets pass."""
        return _closure(starts, lambda one: [user for user in self._users[one] if through(user, one)])

    def before(
        self, ends: Collection[Operation], through: Callable[[Operation], bool] = lambda _: True
    ) -> set[Operation]:
        """``ends`` and what they are computed of: each operand that ``through`` lets pass, and so on."""
        return _closure(ends, lambda one: list(filter(through, one.operands)))


class Recording:
    """Writes operations down as they run.

    One that a loop does again, at the same ``place`` of the program and on numbers of the same origin, is the same one.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._known: dict[object, Operation] = {}
        self._origins: dict[Operation, frozenset[Operation]] = {}

    def add(
        self,
        kind: Kind,
        dtype: str,
        operands: Iterable[Operation] = (),
        *,
        calls: object = None,
        place: SourcePlace | None = None,
        launch: int = 0,
    ) -> Operation:
        """What ``kind`` makes of ``operands``. ``calls``: all that tells where in the program it is done."""
        given = list(dict.fromkeys(operands))
        origins = frozenset().union(*(self._origins[one] for one in given))
        key = calls, kind, dtype, launch, origins
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = Operation(kind, dtype, place, launch)
            self._origins[made] = frozenset({made}) if kind == "load" else origins
            self.operations.append(made)
        made.operands += [one for one in given if one not in made.operands]
        return made


def _closure(starts: Collection[Operation], following: Callable[[Operation], list[Operation]]) -> set[Operation]:
    found, open_ = set(starts), list(starts)
    while open_:
        more = [one for one in following(open_.pop()) if one not in found]
        found.update(more)
        open_.extend(more)
    return found


def first_of_users(places: Iterable[SourcePlace]) -> SourcePlace | None:
    """Of places that were called from one another, innermost first, the first that is not in Triton's own files."""
    return next((place for place in places if not any(part in place[0] for part in _TRITONS)), None)
