"""How FlashInfer builds its modules: all that is known here of ``flashinfer.jit``, and nothing where it is otherwise.

A wrapper has its module built when it is first called, for each dtype, head size and variant another one. All modules
are in one folder, and up to 0.5 ninja has one log for it: of two that are built at once, each forgets what the other
one has built. Here a module that is built has a log of its own, as in later versions; one that is up to date by the log
of the folder stays as it is.

What many calls need is built as graphs: `build_jit_specs` writes one file for ninja, so that all cores have work and
none has twice. Its log is the folder's, and each module gets a copy when it is done: FlashInfer would else build
it again, as later versions do with what they have built so themselves. Until then it is locked, as by FlashInfer, so
that whoever needs it waits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attnfuzz.own_files import write_file

_OWN_LOG = "builddir = $name\n"
_LOGS = (".ninja_log", ".ninja_deps")
_LOOK_EVERY_S = 0.2
_LOCK_WITHIN_S = 10.0
_FIRST_WAVE = 2
_NICER = 5
"""The search of what is ready goes before."""


class FlashInferBuilds:
    """An engine's builder, as `attnfuzz.declaration.Builder` has it: for one process, which calls nothing else."""

    modules = "modules of FlashInfer"
    setting = "FLASHINFER_WORKSPACE_BASE"

    def __init__(self) -> None:
        self._building: dict[str, Any] = {}
        self._locks: dict[str, Any] = {}
        self._old: frozenset[str] = frozenset()
        self._are_locked = threading.Event()
        self._is_over = threading.Event()

    @functools.cached_property
    def _core(self) -> Any:
        """FlashInfer's module of what is built; None where it is not as expected."""
        try:
            core: Any = importlib.import_module("flashinfer.jit.core")
        except ImportError:
            return None
        spec = getattr(core, "JitSpecNvcc", None) or getattr(core, "JitSpec", None)
        parts = ("build", "build_and_load", "is_ninja_generated", "lock_path", "ninja_path", "write_ninja")
        functions = ("FileLock", "build_jit_specs", "generate_ninja_build_for_op", "jit_env")
        if any(not hasattr(spec, part) for part in parts) or any(not hasattr(core, one) for one in functions):
            return None
        return core

    @property
    def folder(self) -> str:
        """Where modules are kept."""
        return str(self._core.jit_env.FLASHINFER_JIT_DIR)

    @functools.cached_property
    def keeps_apart(self) -> bool:
        """Whether each module has a log of what was built of it, which is seen to where FlashInfer does not."""
        core = self._core
        if core is None:
            return False
        if hasattr(core, "JitSpecNvcc"):
            return True
        written, built = core.generate_ninja_build_for_op, core.JitSpec.build

        @functools.wraps(written)
        def write(*of: Any, **also: Any) -> str:
            return f"{written(*of, **also)}\n{_OWN_LOG}"

        @functools.wraps(built)
        def build(spec: Any, *how: Any, **also: Any) -> None:
            if spec.is_ninja_generated and self._is_up_to_date(spec):
                return
            spec.write_ninja()
            built(spec, *how, **also)

        core.generate_ninja_build_for_op, core.JitSpec.build = write, build
        return True

    def begin(self, calls: Sequence[Callable[[], object]]) -> list[list[str]]:
        """Begin to build all modules that ``calls`` would have built, in the background, the first ones first.

        Of each call the names of those that are not there yet. Nothing is run of a module: what calls it gets nothing.
        """
        if not self.keeps_apart:
            return [[] for _ in calls]
        noted = [self._modules_of(call) for call in calls]
        known: dict[str, bool] = {}
        for spec in (spec for specs in noted for spec in specs if spec.name not in known):
            known[spec.name] = self._is_there(spec)
            if not known[spec.name]:
                self._building[spec.name] = spec
        if self._building:
            self._old = frozenset(self._log_lines())
            threading.Thread(target=self._build, daemon=True).start()
            self._are_locked.wait(_LOCK_WITHIN_S)
        else:
            self._is_over.set()
        return [[spec.name for spec in specs if not known[spec.name]] for specs in noted]

    @property
    def built(self) -> int:
        """How many of the modules that were not there are now."""
        return len(self._building) - len(self._unbuilt())

    @property
    def is_over(self) -> bool:
        """Whether nothing is built any more; what is still missing could not be, as whoever calls it will be told."""
        return self._is_over.is_set()

    def _modules_of(self, call: Callable[[], object]) -> list[Any]:
        noted: list[Any] = []
        # The call is given modules that do nothing, and may raise whatever that leads to; a real one tells what fails.
        with self._noting(noted), contextlib.suppress(Exception):
            call()
        return list({spec.name: spec for spec in noted}.values())

    @contextlib.contextmanager
    def _noting(self, noted: list[Any]) -> Iterator[None]:
        core = self._core
        built_by_ninja = getattr(core, "JitSpecNvcc", core.JitSpec)
        loaded = core.JitSpec.build_and_load

        def note(spec: Any) -> _Nothing:
            if isinstance(spec, built_by_ninja):
                noted.append(spec)
            return _Nothing()

        core.JitSpec.build_and_load = note
        try:
            yield
        finally:
            core.JitSpec.build_and_load = loaded

    def _is_there(self, spec: Any) -> bool:
        if getattr(spec, "is_aot", False):
            return True
        if hasattr(spec, "try_load"):  # a version that writes its file each time
            with self._core.FileLock(spec.lock_path, thread_local=False):
                spec.write_ninja()
        return spec.is_ninja_generated and self._is_up_to_date(spec)

    def _is_up_to_date(self, spec: Any) -> bool:
        """Found out without writing any log."""
        folder = getattr(spec, "build_dir", self.folder)
        command = ["ninja", "-n", "-C", str(folder), "-f", str(spec.ninja_path)]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        return asked.returncode == 0 and "no work to do" in asked.stdout

    def _build(self) -> None:
        core = self._core
        lock = core.FileLock
        try:
            os.nice(_NICER)
            for name, spec in self._building.items():
                self._locks[name] = lock(spec.lock_path, thread_local=False)
                self._locks[name].acquire()
            self._are_locked.set()
            threading.Thread(target=self._hand_over, daemon=True).start()
            core.FileLock = _held
            for wave in _waves(list(self._building.values())):
                for spec in wave:
                    if not hasattr(spec, "try_load"):
                        spec.write_ninja()
                core.build_jit_specs(wave)
        except (OSError, RuntimeError):
            pass  # whoever needs what could not be built so has it built alone, and is told why that fails
        finally:
            core.FileLock = lock
            self._are_locked.set()
            self._is_over.set()

    def _hand_over(self) -> None:
        """Let each module be used as soon as it is built."""
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_LOOK_EVERY_S)
            unbuilt = self._unbuilt()
            for name in [name for name in self._locks if is_over or name not in unbuilt]:
                if name not in unbuilt:
                    self._give_log(name)
                self._locks.pop(name).release()

    def _give_log(self, name: str) -> None:
        folder = Path(self.folder)
        for log in _LOGS:
            if (folder / log).exists():
                write_file(folder / name / log, (folder / log).read_bytes())

    def _unbuilt(self) -> set[str]:
        built = {Path(parts[3]).name for line in self._log_lines() - self._old if len(parts := line.split("\t")) > 3}
        return {name for name in self._building if f"{name}.so" not in built}

    def _log_lines(self) -> set[str]:
        """The lines of ninja's log, one for each file that it has made, which is the fourth field."""
        try:
            return set((Path(self.folder) / _LOGS[0]).read_text(encoding="utf-8").splitlines())
        except OSError:
            return set()


def _held(*of: object, **also: object) -> contextlib.AbstractContextManager[None]:
    """In place of a lock that this process holds already."""
    del of, also
    return contextlib.nullcontext()


def _waves(modules: list[Any]) -> Iterator[list[Any]]:
    """Two of them, then four, and so on: of one graph all modules are done at about the same time, which is late."""
    begin, count = 0, _FIRST_WAVE
    while begin < len(modules):
        yield modules[begin : begin + count]
        begin, count = begin + count, 2 * count


class _Nothing:
    """A module of which nothing is built: whatever it has can be called, and gives the same, as do parts of it."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *of: object, **also: object) -> _Nothing:
        return self

    def __getitem__(self, key: object) -> _Nothing:
        return self

    def __iter__(self) -> Iterator[_Nothing]:
        return iter(())
