"""attnfuzz.adapters.flashinfer_builds: FlashInfer's modules are built as graphs, and none is built without need."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from attnfuzz.adapters.flashinfer_builds import FlashInferBuilds

_NINJA = """#!/usr/bin/env python3
import os, pathlib, sys, time
dry, folder, file = "-n" in sys.argv, pathlib.Path(sys.argv[-3]), pathlib.Path(sys.argv[-1])
lines = file.read_text().splitlines()
names = [pathlib.Path(line.split()[1]).parent.name for line in lines if line.startswith("subninja ")]
own = [line for line in lines if line.startswith("builddir = ")]
names = names or [file.parent.name]
log = folder / (names[0] if own else "") / ".ninja_log"
known = log.read_text() if log.exists() else ""
left = [name for name in names if f"{name}/{name}.so" not in known]
if not left:
    print("ninja: no work to do.")
elif not dry:
    with (folder / "ran").open("a") as ran:
        ran.write(f"{' '.join(left)}\\n")
    for name in left:
        while not (folder / f"may_build_{name}").exists():
            time.sleep(0.01)
        if name == "broken":
            sys.exit(1)
        with log.open("a") as written:
            written.write(f"0\\t1\\t2\\t{name}/{name}.so\\tabc\\n")
"""
_SOON_S = 20.0


class Lock:
    """A lock of a file, as `filelock` has it: whoever holds it has made the file."""

    def __init__(self, path: Path, thread_local: bool = True) -> None:
        self._path = path

    def acquire(self) -> None:
        self._path.touch(exist_ok=False)

    def release(self) -> None:
        self._path.unlink()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


class Spec:
    """A module as FlashInfer 0.5 describes it."""

    core: ClassVar[Any] = None

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def ninja_path(self) -> Path:
        return Path(self.core.jit_env.FLASHINFER_JIT_DIR) / self.name / "build.ninja"

    @property
    def lock_path(self) -> Path:
        return Path(self.core.jit_env.FLASHINFER_JIT_DIR) / f"{self.name}.lock"

    @property
    def is_ninja_generated(self) -> bool:
        return self.ninja_path.exists()

    def write_ninja(self) -> None:
        self.ninja_path.parent.mkdir(exist_ok=True)
        self.ninja_path.write_text(self.core.generate_ninja_build_for_op(name=self.name))

    def build(self, verbose: bool, need_lock: bool = True) -> None:
        assert not verbose
        assert not need_lock
        self.core.run_ninja(self.core.jit_env.FLASHINFER_JIT_DIR, self.ninja_path, verbose)

    def build_and_load(self) -> str:
        with Lock(self.lock_path):
            self.build(False, need_lock=False)
        return self.name


def _run_ninja(workdir: Path, ninja_file: Path, verbose: bool) -> None:
    if os.spawnlp(os.P_WAIT, "ninja", "ninja", "-v", "-C", str(workdir), "-f", str(ninja_file)):
        raise RuntimeError("Ninja build failed.")


def _build_jit_specs(core: Any, specs: list[Spec], verbose: bool = False) -> None:
    graph = Path(core.jit_env.FLASHINFER_JIT_DIR) / "graph.ninja"
    for spec in specs:
        if not spec.is_ninja_generated:
            with Lock(spec.lock_path):
                spec.write_ninja()
    graph.write_text("".join(f"subninja {spec.ninja_path}\n" for spec in specs))
    core.run_ninja(core.jit_env.FLASHINFER_JIT_DIR, graph, verbose)


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``flashinfer.jit.core`` of 0.5, whose modules take no compiler."""
    made: Any = ModuleType("flashinfer.jit.core")
    made.JitSpec = type("JitSpec", (Spec,), {"core": made, "build": Spec.build, "build_and_load": Spec.build_and_load})
    made.generate_ninja_build_for_op = "name = {name}\n".format
    made.jit_env = SimpleNamespace(FLASHINFER_JIT_DIR=tmp_path)
    made.FileLock, made.run_ninja = Lock, _run_ninja
    made.build_jit_specs = functools.partial(_build_jit_specs, made)
    for name, module in (("flashinfer", ModuleType("")), ("flashinfer.jit", ModuleType("")), (made.__name__, made)):
        monkeypatch.setitem(sys.modules, name, module)
    program = tmp_path / "bin" / "ninja"
    program.parent.mkdir()
    program.write_text(_NINJA)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return made


def _allow(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"may_build_{name}").touch()


def _until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _SOON_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def _calls(core: Any) -> list[Callable[[], object]]:
    """Two of three kernels share a module; what they do with the module itself is not run."""

    def decode() -> None:
        core.JitSpec("decode").build_and_load().plan(1, 2).run()

    def prefill() -> None:
        core.JitSpec("decode").build_and_load()
        core.JitSpec("prefill").build_and_load()
        raise RuntimeError("what a module gave that is not there is nothing to go on with")

    return [decode, prefill, lambda: core.JitSpec("merge").build_and_load()]


def test_modules_are_built_as_few_graphs_the_first_ones_first(core: Any, tmp_path: Path) -> None:
    """One after the other they would take minutes more, with most cores idle; of one graph all would be late."""
    builds = FlashInferBuilds()
    assert builds.begin(_calls(core)) == [["decode"], ["decode", "prefill"], ["merge"]]
    assert (builds.built, builds.is_over) == (0, False)
    _allow(tmp_path, "decode", "prefill", "merge")
    _until(lambda: builds.is_over)
    assert builds.built == 3
    assert (tmp_path / "ran").read_text() == "decode prefill\nmerge\n"


def test_a_module_can_be_used_before_the_others_are_built(core: Any, tmp_path: Path) -> None:
    """The search of a merge, built within seconds, would wait for prefill; or two compilers would write one file."""
    builds = FlashInferBuilds()
    builds.begin(_calls(core))
    assert (tmp_path / "decode.lock").exists()
    _allow(tmp_path, "decode")
    _until(lambda: not (tmp_path / "decode.lock").exists())
    assert (tmp_path / "prefill.lock").exists()
    assert builds.built == 1
    assert core.JitSpec("decode").build_and_load() == "decode"
    _allow(tmp_path, "prefill", "merge")
    _until(lambda: not (tmp_path / "merge.lock").exists())
    assert core.JitSpec("merge").build_and_load() == "merge"
    assert (tmp_path / "ran").read_text() == "decode prefill\nmerge\n"  # nothing was built again


def test_a_call_goes_on_from_a_part_of_a_plan_to_its_next_module(core: Any, tmp_path: Path) -> None:
    """POD, which hands a number of its decode's plan on, would have its own module built in the middle of a search."""

    def pod() -> None:
        planned = core.JitSpec("prefill").build_and_load().plan(1)
        core.JitSpec("pod").build_and_load().run(planned[0], *planned)

    _allow(tmp_path, "prefill", "pod")
    builds = FlashInferBuilds()
    assert builds.begin([pod]) == [["prefill", "pod"]]
    _until(lambda: builds.is_over)


def test_what_is_there_is_not_built_again(core: Any, tmp_path: Path) -> None:
    """Each campaign would begin with minutes of compilers."""
    _allow(tmp_path, "decode", "prefill", "merge")
    first = FlashInferBuilds()
    first.begin(_calls(core))
    _until(lambda: first.is_over and not list(tmp_path.glob("*.lock")))
    again = FlashInferBuilds()
    assert again.begin(_calls(core)) == [[], [], []]
    assert again.is_over
    assert (tmp_path / "ran").read_text() == "decode prefill\nmerge\n"


def test_a_module_that_cannot_be_built_keeps_nobody_waiting(core: Any, tmp_path: Path) -> None:
    """Whoever needs it, or another, would wait for a lock that nobody gives back."""
    builds = FlashInferBuilds()
    builds.begin([lambda: core.JitSpec("broken").build_and_load(), lambda: core.JitSpec("merge").build_and_load()])
    _allow(tmp_path, "broken", "merge")
    _until(lambda: builds.is_over and not list(tmp_path.glob("*.lock")))
    assert builds.built == 0
    assert core.JitSpec("merge").build_and_load() == "merge"
    with pytest.raises(RuntimeError, match="Ninja build failed"):
        core.JitSpec("broken").build_and_load()


def test_a_module_that_is_built_keeps_a_log_of_its_own(core: Any, tmp_path: Path) -> None:
    """Of two modules that are built at once, each would forget the other: minutes for the next process that asks."""
    _allow(tmp_path, "decode", "merge")
    assert FlashInferBuilds().keeps_apart
    for name in ("decode", "merge", "decode"):
        core.JitSpec(name).build_and_load()
    assert core.JitSpec("decode").ninja_path.read_text() == "name = decode\n\nbuilddir = $name\n"
    assert (tmp_path / "ran").read_text() == "decode\nmerge\n"
    assert "decode" not in (tmp_path / "merge" / ".ninja_log").read_text()


def test_a_module_that_is_up_to_date_is_left_alone(core: Any, tmp_path: Path) -> None:
    """What FlashInfer has built before would be built once more."""
    spec = core.JitSpec("decode")
    spec.write_ninja()
    (tmp_path / ".ninja_log").write_text("0\t1\t2\tdecode/decode.so\tabc\n")
    assert FlashInferBuilds().keeps_apart
    spec.build_and_load()
    assert spec.ninja_path.read_text() == "name = decode\n"
    assert not (tmp_path / "ran").exists()


def test_a_version_that_keeps_builds_apart_by_itself_is_not_changed(core: Any) -> None:
    """Its own way of building would be replaced by one that it does not know."""
    core.JitSpecNvcc = core.JitSpec
    build = core.JitSpec.build
    assert FlashInferBuilds().keeps_apart
    assert core.JitSpec.build is build


def test_a_version_that_builds_in_another_way_builds_one_after_the_other(core: Any) -> None:
    """Whether its modules may be built at once is not known."""
    core.JitSpec = type("JitSpec", (), {})
    builds = FlashInferBuilds()
    assert not builds.keeps_apart
    assert builds.begin([lambda: pytest.fail("nothing is called")]) == [[]]


@pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja")
def test_the_real_ninja_finds_nothing_to_do_by_the_log_that_a_module_is_given(
    core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After minutes for the graph, every process would build its module once more."""
    monkeypatch.setenv("PATH", os.environ["PATH"].removeprefix(f"{tmp_path / 'bin'}:"))
    rule = "ninja_required_version = 1.3\nname = {name}\nrule touch\n  command = echo $name >> ran && touch $out\n"
    core.generate_ninja_build_for_op = (rule + "build $name/$name.so: touch\n").format
    builds = FlashInferBuilds()
    builds.begin(_calls(core))
    _until(lambda: builds.is_over and not list(tmp_path.glob("*.lock")))
    assert builds.built == 3
    core.JitSpec("decode").build_and_load()
    assert sorted((tmp_path / "ran").read_text().split()) == ["decode", "merge", "prefill"]
    assert FlashInferBuilds().begin(_calls(core)) == [[], [], []]
