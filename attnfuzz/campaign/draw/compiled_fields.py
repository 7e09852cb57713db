"""Which fields of an open problem a kernel is compiled for, learned from its cases, so that most find it compiled.

Nobody declares these fields: they are the kernel's own. A case that had nothing compiled clears all in which it is
unlike one before it, and one that had, and is unlike in a single field, blames that one. Where any worker had something
compiled, all find it in Triton's cache, and learn of it: a case that is like one of those in all fields that may decide
clears nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.problems.combinations import fits
from attnfuzz.problems.fields import Integers, Seed
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.supports import OptionValue

_KEPT = 32
_VERY_FEW, _FEW = 3, 8
_SHARE_AT_FIRST, _SHARE_WHILE_FEW, _SHARE_OF_COMPILING = 0.9, 0.5, 0.2
"""Parts of a worker's time with a kernel that compilers may take, by how many cases had something compiled."""
_CLEARED_BY = 4
"""Cases in a row that had nothing compiled; twice as many after each that had."""
_MOST_BLAMED = 6
_MOST_DRAWN = 1024
_WEIGHT_OF_NEWEST = 0.1

_Values = tuple[OptionValue, ...]


class CompiledValues(NamedTuple):
    """For a case of ``values`` something was compiled, which one of the fields with these numbers decides, if any."""

    values: _Values
    doubtful: tuple[int, ...] = ()


@dataclass(slots=True)
class _Field:
    """``cleared``: in so many cases it was another and nothing was compiled, since one in which something was."""

    cleared: int = 0
    blamed: int = 0

    @property
    def is_free(self) -> bool:
        return self.cleared >= _CLEARED_BY << self.blamed


class CompiledFields:
    """The fields of which one kernel is compiled anew, in one worker.

    While compilers have had their share of the time, a drawn case gets values that were there before in the fields that
    may decide, all but one of which nothing is known. The share is that of all ``workers`` together; ``turn`` is as
    `WorkingSets` has it.
    """

    def __init__(self, declaration: Declaration, *, turn: float = 0.0, workers: int = 1) -> None:
        problem = cast("OpenProblem", declaration.problem)
        fields = [name for name, field in problem.fields.items() if not isinstance(field, Integers | Seed)]
        self._names, self._options = tuple(fields), tuple(declaration.options)
        self._combinations = declaration.supports.combinations
        self._fields = [_Field() for _ in (*self._names, *self._options)]
        self._active: deque[_Values] = deque(maxlen=_KEPT)
        self._drawn: dict[_Values, _Values | None] = {}
        self._wait, self._workers = turn, workers
        self._turn = self._compiled = 0
        self._seconds = self._compiling_s = self._new_s = 0.0

    def joins(self, declaration: Declaration) -> None:
        """It is known now what the kernel takes; compilers have as much of the time as at first."""
        self._combinations = declaration.supports.combinations
        self._seconds = self._compiling_s = 0.0

    def fitted(self, case: OpenCase) -> OpenCase:
        """``case``, with other values in the fields that may decide unless it is time to compile something."""
        waiting = sum(base is None for base in self._drawn.values())
        if not self._active or self._left_s > (waiting + self._wait) * self._new_s:
            self._draw(self._values_of(case), None)
            return case
        for _ in self._active:
            self._turn += 1
            base = self._active[self._turn % len(self._active)]
            unknown = [i for i, field in enumerate(self._fields) if not field.is_free and not field.blamed]
            probe = unknown[self._turn % len(unknown)] if unknown else -1
            held = [i for i, field in enumerate(self._fields) if i != probe and not field.is_free]
            other = self._with(case, base, held)
            if not self._combinations or any(fits(other, one) for one in self._combinations):
                self._draw(self._values_of(other), base)
                return other
        return case

    def judged(self, case: OpenCase, seconds: float, compile_s: float) -> CompiledValues | None:
        """Note that ``case`` took ``seconds``, ``compile_s`` of these for compilers; what others are to know of it."""
        self._seconds += seconds
        values = self._values_of(case)
        base = self._drawn.pop(values, None)
        is_new = not self._is_compiled(values)
        if not compile_s:
            if base is None:
                self._new_s *= 1.0 - _WEIGHT_OF_NEWEST
                self._active.append(values)
            elif is_new:
                for i in self._unlike(values, base):
                    self._fields[i].cleared += 1
            return None
        doubtful: tuple[int, ...] = ()
        if base is not None:
            unlike = self._unlike(values, base)
            doubtful = tuple(i for i in unlike if self._fields[i].is_free != is_new) or unlike
        learned = CompiledValues(values, doubtful)
        self.learn(learned, compile_s)
        return learned

    def learn(self, compiled: CompiledValues, compile_s: float) -> None:
        """Take up what this worker or another one found, which compilers took ``compile_s`` for."""
        self._compiling_s += compile_s / self._workers
        self._compiled += 1
        self._new_s += (compile_s - self._new_s) * (_WEIGHT_OF_NEWEST if self._compiled > 1 else 1.0)
        self._active.append(compiled.values)
        for i in compiled.doubtful:
            field = self._fields[i]
            field.cleared = 0
            field.blamed = min(field.blamed + (len(compiled.doubtful) == 1), _MOST_BLAMED)

    def _is_compiled(self, values: _Values) -> bool:
        """Whether something was compiled for values that are the same in all fields that may decide."""
        held = [i for i, field in enumerate(self._fields) if not field.is_free]
        return any(all(values[i] == one[i] for i in held) for one in self._active)

    @staticmethod
    def _unlike(values: _Values, base: _Values) -> tuple[int, ...]:
        return tuple(i for i, (one, other) in enumerate(zip(values, base, strict=True)) if one != other)

    def _draw(self, values: _Values, base: _Values | None) -> None:
        self._drawn[values] = base
        if len(self._drawn) > _MOST_DRAWN:
            del self._drawn[next(iter(self._drawn))]

    @property
    def _left_s(self) -> float:
        """Seconds that compilers may take now."""
        few = self._compiled
        share = _SHARE_AT_FIRST if few < _VERY_FEW else _SHARE_WHILE_FEW if few < _FEW else _SHARE_OF_COMPILING
        return share * self._seconds - self._compiling_s

    def _values_of(self, case: OpenCase) -> _Values:
        return (*(getattr(case, name) for name in self._names), *(case.options.get(name, "") for name in self._options))

    def _with(self, case: OpenCase, values: _Values, held: list[int]) -> OpenCase:
        """``case`` with those of ``values`` that are held."""
        count = len(self._names)
        fields = {self._names[i]: values[i] for i in held if i < count}
        options = {self._options[i - count]: values[i] for i in held if i >= count}
        return msgspec.structs.replace(case, **fields, options={**case.options, **options})
