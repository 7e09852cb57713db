"""Runs the programs of a launch in Triton's interpreter in another order, or side by side, as a GPU may.

The interpreter runs one after the other, from the first to the last, so that a program finds all that those before it
have written. On a GPU no program may count on that. Here each program has a thread of its own, of which one runs at a
time; who goes on is chosen before each access to memory, so that what two programs do may lie between one another. A
program that waits for others, in a loop of atomic operations or loads, gets what it waits for.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from attnfuzz.explaining.operations import SourcePlace
from attnfuzz.triton_compat.interpreter_accesses import ACCESSES, addresses_of, bits_of, operands, place_of_caller
from attnfuzz.triton_compat.patching import replaced

_MOST_RESIDENT = 64
"""Programs that have begun and are not done; a GPU has room for as many, at least."""
_BEYOND = 1 / 64
"""How often another one begins all the same: those that have begun may wait for it."""
_STAYS = 0.5
"""How often a program goes on behind an atomic operation, where all have begun."""
_MOST_ADDRESSES = 1 << 18
"""Touched in a launch, that are remembered."""

_CREATE = "create_"

Index = tuple[int, int, int]
Does = Literal["loads", "changes", "stores"]
_DOES: dict[str, Does] = {
    "masked_load": "loads", "atomic_rmw": "changes", "atomic_cas": "changes", "masked_store": "stores"
}  # fmt: skip
"""By what tells most of a conflict, the first."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """``is_reversed``: the last program begins, and each runs to its end, but for a stop behind each atomic operation,
    where the next one begins: what it was to announce may be read before the rest is done. Else they take turns, as the
    ``seed`` says."""

    is_reversed: bool
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Conflict:
    """One program stores where another one of its launch does something else, and nothing keeps them apart."""

    stores: SourcePlace
    others: SourcePlace
    does: Does
    storing: Index
    other: Index


@dataclass(slots=True)
class Scheduled:
    """``launches``: those of more than one program."""

    launches: list[_Launch] = field(default_factory=list)

    def conflict(self) -> Conflict | None:
        """The first, in any launch."""
        return next((found for one in self.launches if (found := one.conflict()) is not None), None)


@contextlib.contextmanager
def scheduled(schedule: Schedule) -> Iterator[Scheduled]:
    """Run kernels within as ``schedule`` says; as ever, and never counted, for an unknown Triton."""
    seen = Scheduled()
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not _is_known(interpreter):
        yield seen
        return
    executor, builder = (vars(interpreter)[name] for name in ("GridExecutor", "InterpreterBuilder"))
    launch, size, launching, running = executor.__call__, builder.set_grid_dim, list[Any](), list[_Launch]()

    @functools.wraps(launch)
    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        ordinary = self.fn
        launching.append(self)
        try:
            return launch(self, *args, **kwargs)
        finally:
            launching.pop()
            self.fn = ordinary

    @functools.wraps(size)
    def set_grid_dim(builder: Any, *sizes: int) -> None:
        """The last that a launch does before it calls its function for each program."""
        size(builder, *sizes)
        if math.prod(sizes) > 1:
            launching[-1].fn = _Collected(launching[-1].fn, builder, schedule, seen, running)

    handle = vars(interpreter)["TensorHandle"]
    turning = {
        f"{_CREATE}{name}": _turning(vars(builder)[f"{_CREATE}{name}"], name, handle, running) for name in ACCESSES
    }
    with replaced(executor, {"__call__": launched}), replaced(builder, {"set_grid_dim": set_grid_dim} | turning):
        yield seen


def _is_known(interpreter: ModuleType) -> bool:
    executor, builder = (getattr(interpreter, name, None) for name in ("GridExecutor", "InterpreterBuilder"))
    if not inspect.isclass(executor) or not inspect.isclass(builder) or not hasattr(interpreter, "TensorHandle"):
        return False
    methods = ("set_grid_idx", "set_grid_dim", *(f"{_CREATE}{name}" for name in ACCESSES))
    return all(inspect.isfunction(getattr(builder, name, None)) for name in methods)


def _turning(method: Callable[..., Any], name: str, handle: type, running: Sequence[_Launch]) -> Callable[..., Any]:
    @functools.wraps(method)
    def turning(builder: Any, *args: Any, **kwargs: Any) -> Any:
        if running:
            running[-1].before_access(name, operands(handle, args, kwargs))
        made = method(builder, *args, **kwargs)
        if running and _is_atomic(name):
            running[-1].after_atomic()
        return made

    return turning


def _is_atomic(name: str) -> bool:
    return name.startswith("atomic")


class _Collected:
    """Stands in for a kernel's function, which is called for one program after the other: runs all at the last call."""

    def __init__(
        self, function: Any, builder: Any, schedule: Schedule, seen: Scheduled, running: list[_Launch]
    ) -> None:
        self._function, self._builder, self._schedule = function, builder, schedule
        self._seen, self._running = seen, running
        self._indices: list[Index] = []

    def __call__(self, **arguments: Any) -> None:
        self._indices.append(self._builder.grid_idx)
        if len(self._indices) < math.prod(self._builder.grid_dim):
            return
        launch = _Launch(self._builder, functools.partial(self._function, **arguments), self._schedule)
        self._seen.launches.append(launch)
        self._running.append(launch)
        try:
            launch.run(self._indices)
        finally:
            self._running.pop()


@dataclass(frozen=True, slots=True)
class _Access:
    """``numbers``: the bits of what is stored. ``synced``: how many atomic operations the program had made."""

    program: _Program
    does: Does
    addresses: list[int]
    numbers: list[int]
    place: SourcePlace
    synced: int


@dataclass(slots=True, eq=False)
class _Program:
    index: Index
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    atomics: int = 0


class _Ended(BaseException):
    """Ends a program's thread once another program has raised."""


class _Launch:
    def __init__(self, builder: Any, function: Callable[[], None], schedule: Schedule) -> None:
        self._builder = builder
        self._function = function
        self._schedule = schedule
        self._random = random.Random(schedule.seed)
        self._waiting: list[_Program] = []
        self._resident: list[_Program] = []
        self._current: _Program | None = None
        self._is_over = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._accesses: list[_Access] = []
        self._room = _MOST_ADDRESSES
        self._threads: list[threading.Thread] = []
        self._context = contextvars.copy_context()

    def run(self, indices: Sequence[Index]) -> None:
        """All programs to their ends. Raises what the first of them raised."""
        self._waiting = [_Program(index) for index in indices]
        if not self._schedule.is_reversed:
            self._random.shuffle(self._waiting)
        self._give_turn(self._next())
        self._is_over.acquire()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def before_access(self, name: str, given: Sequence[Any]) -> None:
        """Let another program go on, perhaps, until it is the turn of the one that asks again."""
        mine = self._current
        if mine is None:
            return
        self._remember(mine, name, given)
        mine.atomics += _is_atomic(name)
        if not self._schedule.is_reversed:
            self._leave_to(mine, self._next())

    def after_atomic(self) -> None:
        """Have those that have not begun come as far, or perhaps let another one go on: it may be waited for."""
        mine = self._current
        if mine is not None and self._schedule.is_reversed:
            is_done = not (self._waiting and self._has_room)
            self._leave_to(mine, mine if is_done and self._random.random() < _STAYS else self._next())

    def _leave_to(self, mine: _Program, chosen: _Program) -> None:
        if chosen is not mine:
            self._give_turn(chosen)
            mine.turn.acquire()
            if self._error is not None:
                raise _Ended

    def _remember(self, program: _Program, name: str, given: Sequence[Any]) -> None:
        addresses = addresses_of(name, given).tolist()
        if self._room >= len(addresses) > 0 and (place := place_of_caller()) is not None:
            self._room -= len(addresses)
            numbers = bits_of(given) if _DOES[name] == "stores" else []
            self._accesses.append(_Access(program, _DOES[name], addresses, numbers, place, program.atomics))

    @property
    def _has_room(self) -> bool:
        return len(self._resident) < _MOST_RESIDENT or self._random.random() < _BEYOND

    def _next(self) -> _Program:
        """The program that goes on or begins; in reverse, one that begins if there is any."""
        beginning = self._waiting[-1:] if self._has_room else []
        if self._schedule.is_reversed and beginning:
            return beginning[0]
        return self._random.choice([*self._resident, *beginning])

    def _give_turn(self, program: _Program) -> None:
        self._current = program
        self._builder.grid_idx = program.index
        if program in self._resident:
            program.turn.release()
            return
        self._waiting.remove(program)
        self._resident.append(program)
        context = self._context.copy()
        self._threads.append(threading.Thread(target=context.run, args=(self._run_one, program), daemon=True))
        self._threads[-1].start()

    def _run_one(self, program: _Program) -> None:
        try:
            self._function()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where the kernel was launched, whatever it is
            self._error = self._error or error
        self._resident.remove(program)
        if self._error is not None:
            self._waiting.clear()
        if self._resident or self._waiting:
            self._give_turn(self._next())
        else:
            self._current = None
            self._is_over.release()

    def conflict(self) -> Conflict | None:
        """The first, of a kind that tells most; None if there is no such thing.

        Where both made an atomic operation in between, as those do that count who has arrived, it is none; nor where
        both store the same bits.
        """
        stored: dict[int, list[tuple[_Access, int]]] = {}
        for access in self._accesses:
            for address, number in zip(access.addresses, access.numbers, strict=False):
                stored.setdefault(address, []).append((access, number))
        for does in dict.fromkeys(_DOES.values()):
            for other in self._accesses:
                for i, address in enumerate(other.addresses if other.does == does else ()):
                    for store, number in stored.get(address, ()):
                        if store.program is other.program or _is_synced(store, other):
                            continue
                        if does != "stores" or other.numbers[i] != number:
                            indices = store.program.index, other.program.index
                            return Conflict(store.place, other.place, does, *indices)
        return None


def _is_synced(store: _Access, other: _Access) -> bool:
    """Whether the one that stores made an atomic operation after it, and the other one before."""
    return store.program.atomics > store.synced and other.synced > 0
