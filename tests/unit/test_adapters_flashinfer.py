"""attnfuzz.adapters.flashinfer: several modules of FlashInfer can be built at once, and none is built without need."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from attnfuzz.adapters.flashinfer import builds_apart

_NINJA = """#!/bin/sh
printf "%s\\n" "$*" >> {log}
[ -e {folder}/is_up_to_date ] && echo "ninja: no work to do."
exit 0
"""


class Spec:
    """A module as FlashInfer 0.5 describes it."""

    core: Any = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.built: list[str] = []

    @property
    def ninja_path(self) -> Path:
        return self._folder / "build.ninja"

    @property
    def is_ninja_generated(self) -> bool:
        return self.ninja_path.exists()

    def write_ninja(self) -> None:
        self.ninja_path.write_text(self.core.generate_ninja_build_for_op(name="decode"))

    def build(self, verbose: bool, need_lock: bool = True) -> None:
        assert not verbose
        assert not need_lock
        self.built.append(self.ninja_path.read_text())


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("flashinfer.jit.core")
    made.generate_ninja_build_for_op = "name = {name}\n".format
    made.jit_env = SimpleNamespace(FLASHINFER_JIT_DIR=tmp_path)
    for name, module in (("flashinfer", ModuleType("")), ("flashinfer.jit", ModuleType("")), (made.__name__, made)):
        monkeypatch.setitem(sys.modules, name, module)
    program = tmp_path / "ninja"
    program.write_text(_NINJA.format(log=tmp_path / "asked", folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    builds_apart.cache_clear()
    return made


def test_a_module_that_is_built_keeps_a_log_of_its_own(core: Any, tmp_path: Path) -> None:
    """Of two modules that are built at once, each would forget the other: minutes for the next process that asks."""
    core.JitSpec = type("JitSpec", (Spec,), {"core": core})
    assert builds_apart()
    spec = core.JitSpec(tmp_path)
    for _ in range(2):
        spec.build(False, need_lock=False)
    own = "name = decode\n\nbuilddir = $name\n"
    assert spec.built == [own, own]
    assert (tmp_path / "asked").read_text().startswith("-n -C ")


def test_a_module_that_is_up_to_date_is_left_alone(core: Any, tmp_path: Path) -> None:
    """What FlashInfer has built before would be built once more."""
    core.JitSpec = type("JitSpec", (Spec,), {"core": core})
    assert builds_apart()
    spec = core.JitSpec(tmp_path)
    spec.ninja_path.write_text("name = decode\n")
    (tmp_path / "is_up_to_date").touch()
    spec.build(False, need_lock=False)
    assert spec.built == []
    assert spec.ninja_path.read_text() == "name = decode\n"


def test_a_version_that_keeps_builds_apart_by_itself_is_not_changed(core: Any) -> None:
    """Its own way of building would be replaced by one that it does not know."""
    core.JitSpec, core.JitSpecNvcc = type("JitSpec", (), {}), Spec
    build = Spec.build
    assert builds_apart()
    assert Spec.build is build


def test_a_version_that_builds_in_another_way_builds_one_after_the_other(core: Any) -> None:
    """Whether its modules may be built at once is not known."""
    core.JitSpec = type("JitSpec", (), {})
    assert not builds_apart()
