"""The loop that all parts share: inputs are tried in processes that may hang or die, and what happened is counted."""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import ClassVar

import msgspec

from tests.audit.yard import Fault, Seen, Yard
from tests.faults.families import Family

PARTS = {
    "regressions": "tests.audit.regressions:Regressions",
    "cases": "tests.audit.cases:Cases",
    "files": "tests.audit.files:Files",
    "links": "tests.audit.links:Links",
    "settings": "tests.audit.settings:Settings",
    "states": "tests.audit.states:States",
    "kills": "tests.audit.kills:Kills",
    "idle": "tests.audit.idle:Idle",
}

_CPU_S = 15.0
_GROWTH_BYTES = 1 << 30
"""That one input may add to the memory of the process that tries it."""


class Part(ABC):
    """A kind of inputs, numbered from 0. The first are those that are known to have done harm.

    ``batch`` inputs are tried together. ``patience_s`` is for a batch: after that it hangs.
    """

    inputs: ClassVar[int]
    batch: ClassVar[int] = 1
    patience_s: ClassVar[float] = 60.0

    def __init__(self, yard: Yard, seed: int, resources: ExitStack) -> None:
        """Set up whatever inputs share; ``resources`` are closed at the end."""
        self.yard = yard
        self.seed = seed

    @classmethod
    def begins_batch(cls, number: int) -> bool:
        """Whether this input is not tried together with the one before it."""
        return number % cls.batch == 0

    @abstractmethod
    def run(self, numbers: range, dice: random.Random) -> Seen:
        """Try these inputs. What it raises counts as a traceback."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A fault, and the number of the input that reproduces it alone."""

    part: str
    number: int
    fault: Fault


@dataclass(slots=True)
class Total:
    """What came of a part."""

    part: str
    inputs: int = 0
    seen: Seen = field(default_factory=Seen)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> tuple[object, ...]:
        """Part, inputs, refused, accepted, faults of each kind, seconds."""
        kinds = [violation.fault.kind for violation in self.violations]
        counts = [kinds.count(kind) for kind in ("traceback", "hang", "foreign", "code", "other")]
        return self.part, self.inputs, self.seen.refused, self.seen.accepted, *counts, round(self.seconds, 1)


def part_named(place: str) -> type[Part]:
    """The class at ``module:name``."""
    module, _, name = place.partition(":")
    found: type[Part] = getattr(import_module(module), name)
    return found


def batches(part: type[Part], numbers: Sequence[int]) -> list[range]:
    """Runs of consecutive ``numbers``, each of one batch at most."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number and not part.begins_batch(number):
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def audit(
    name: str,
    numbers: Sequence[int],
    *,
    seed: int,
    jobs: int = 1,
    place: str | None = None,
    tell: Callable[[Violation], None] = lambda violation: None,
) -> Total:
    """Try the inputs called ``numbers`` of a part, ``jobs`` batches at once."""
    place = place or PARTS[name]
    part = part_named(place)
    waiting: queue.SimpleQueue[range] = queue.SimpleQueue()
    for batch in batches(part, numbers):
        waiting.put(batch)
    total, lock, stopping, started = Total(name), threading.Lock(), threading.Event(), time.monotonic()

    def count(batch: range, seen: Seen) -> None:
        with lock:
            total.inputs += len(batch)
            total.seen.add(seen)
            for fault in seen.faults:
                violation = Violation(name, batch.start, fault)
                total.violations.append(violation)
                tell(violation)

    def work(trier: _Trier) -> None:
        while not stopping.is_set():
            try:
                batch = waiting.get_nowait()
            except queue.Empty:
                return
            seen = trier.tried(batch)
            if not stopping.is_set():
                count(batch, seen)

    with ExitStack() as stack:
        triers = [stack.enter_context(_Trier(place, seed, part.patience_s)) for _ in range(min(jobs, waiting.qsize()))]
        threads = [threading.Thread(target=work, args=(trier,)) for trier in triers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: what the threads wait for ends
            stopping.set()
            for trier in triers:
                trier.kill()
            raise
    total.seconds = time.monotonic() - started
    total.violations.sort(key=lambda violation: violation.number)
    return total


class _Trier:
    """A process that tries one batch after the other, and another one after it hung or died."""

    def __init__(self, place: str, seed: int, patience_s: float) -> None:
        self._place, self._seed, self._patience_s = place, seed, patience_s
        self._folder = tempfile.TemporaryDirectory(prefix="attnfuzz-audit-", ignore_cleanup_errors=True)
        self._mark = Family()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._line: Connection | None = None

    def tried(self, batch: range) -> Seen:
        """What came of ``batch``."""
        line = self._started()
        line.send_bytes(msgspec.json.encode((batch.start, batch.stop)))
        try:
            if line.poll(self._patience_s):
                return msgspec.json.decode(line.recv_bytes(), type=Seen)
            fault = Fault("hang", f"no end within {self._patience_s:.0f} s")
        except (EOFError, OSError):
            fault = Fault("other", f"the process that tried it ended with {self._ended()}")
        self.kill()
        return Seen(faults=[fault])

    def __enter__(self) -> _Trier:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._line is not None and self._process is not None:
            self._line.close()  # so that it ends in order
            self._process.join(20)
        self.kill()
        self._folder.cleanup()

    def _started(self) -> Connection:
        if self._line is None:
            context = multiprocessing.get_context("spawn")
            self._line, theirs = context.Pipe()
            folder = tempfile.mkdtemp(dir=self._folder.name)
            self._process = context.Process(target=_try_all, args=(theirs, self._place, self._seed, folder, self._mark))
            self._process.start()
            theirs.close()
        return self._line

    def _ended(self) -> str:
        process = self._process
        if process is None:  # killed by `kill` meanwhile
            return "the audit"
        process.join(5)
        return f"status {process.exitcode}"

    def kill(self) -> None:
        """End the process and all that it started."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()
        for member in self._mark.members():
            member.kill()
        self._process = self._line = None


def _try_all(line: Connection, place: str, seed: int, folder: str, mark: Family) -> None:
    """In a process of its own: answer each batch with what was seen."""
    os.environ.update(mark.environment())  # whatever is started from here on can be found and ended
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        # they are the parent's business; to ignore them, as nohup does, would have what is started ignore them too
        signal.signal(number, _disregard)
    with ExitStack() as resources:
        yard = Yard(Path(folder))
        yard.family = mark
        yard.clear()
        os.chdir(yard.project)
        part = part_named(place)(yard, seed, resources)
        while True:
            try:
                start, stop = msgspec.json.decode(line.recv_bytes(), type=tuple[int, int])
            except EOFError:
                return
            line.send_bytes(msgspec.json.encode(_guarded(part, place, range(start, stop))))


def _disregard(number: int, frame: FrameType | None) -> None:
    pass


def _guarded(part: Part, place: str, numbers: range) -> Seen:
    dice = random.Random(f"{part.seed}/{place}/{numbers.start}")
    part.yard.clear()
    os.chdir(part.yard.project)
    before_bytes, before_s = _forget_peak(), time.process_time()
    try:
        seen = part.run(numbers, dice)
    except Exception as error:  # noqa: BLE001 - whatever an input raises is what is looked for
        place_of = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:300]
        seen = Seen(faults=[Fault("traceback", f"{text!r} at {Path(place_of.filename).name}:{place_of.lineno}")])
    computing_s, grown = time.process_time() - before_s, _peak() - before_bytes
    if computing_s > _CPU_S:
        seen.faults.append(Fault("hang", f"computed for {computing_s:.0f} s"))
    if grown > _GROWTH_BYTES:
        seen.faults.append(Fault("other", f"took {grown / 2**30:.1f} GiB"))
    os.chdir("/")
    seen.faults += part.yard.look()
    return seen


def _forget_peak() -> int:
    """Begin to measure the largest memory of this process anew; what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def show_table(totals: Iterable[Total]) -> None:
    """Print a table of what came of each part."""
    from rich.console import Console
    from rich.table import Table

    counts = ("inputs", "refused", "accepted", "tracebacks", "hangs", "foreign files", "code run", "other", "seconds")
    table = Table("part", *counts)
    for total in totals:
        table.add_row(*map(str, total.row()))
    Console(file=sys.stdout, width=120).print(table)
