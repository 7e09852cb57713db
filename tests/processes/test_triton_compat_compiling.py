"""Listening to Triton's compilations, as it reports them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

from attnfuzz.triton_compat.compiling import CompileTimes, build_launcher, compute_compiler_key


class Times:
    """As Triton's `CompileTimes`, in microseconds."""

    total = 250_000


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Any:
    knobs = importlib.import_module("triton.knobs")
    monkeypatch.setattr(knobs.compilation, "listener", None)
    return knobs.compilation


def test_compilations_are_added_up(compilation: Any) -> None:
    """A campaign could not tell how much of its time goes into compiling."""
    times = CompileTimes()
    assert times.start_listening()
    for cache_hit in (False, True, False):
        compilation.listener(src=None, metadata={}, metadata_group={}, times=Times, cache_hit=cache_hit)
    assert times.total_s() == times.seconds == 0.5
    assert (times.compilations, times.cache_hits) == (2, 1)


def test_real_compiler_reports_what_is_expected(compilation: Any) -> None:
    """The installed Triton would report under other names, and compilation would look free."""
    compiler = importlib.import_module("triton.compiler.compiler")
    times = CompileTimes()
    times.start_listening()
    timer = compiler.CompileTimer()
    timer.finished_ir_initialization()
    timer.stage_finished("ttir")
    compilation.listener(src=None, metadata={}, metadata_group={}, times=timer.end(), cache_hit=False)
    assert times.compilations == 1
    assert 0 <= times.seconds < 60


def test_the_first_form_of_each_kernel_is_known(compilation: Any) -> None:
    """On a GPU no cause would come with its line: what was compiled would lie somewhere unknown."""
    times = CompileTimes()
    times.start_listening()
    files = {"decode.ttir": "/cache/decode.ttir", "decode.cubin": "/cache/decode.cubin"}
    for cache_hit in (False, True):
        compilation.listener(src=None, metadata={}, metadata_group=files, times=Times, cache_hit=cache_hit)
    compilation.listener(src=None, metadata={}, metadata_group=None, times=Times, cache_hit=True)
    assert times.ttir_files == ["/cache/decode.ttir"] * 2


def test_other_listeners_keep_hearing(compilation: Any) -> None:
    """A user's own listener would be silenced."""
    heard: list[bool] = []
    compilation.listener = lambda **report: heard.append(report["cache_hit"])
    times = CompileTimes()
    times.start_listening()
    times.start_listening()
    compilation.listener(src=None, metadata={}, metadata_group={}, times=Times, cache_hit=True)
    assert heard == [True]


def test_triton_without_listeners_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older Triton would keep executors from starting."""

    def fail(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    assert not CompileTimes().start_listening()


def test_no_triton_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without Triton could not be judged where it is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not CompileTimes().start_listening()


def test_key_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every executor on a GPU would start by hashing hundreds of megabytes."""
    monkeypatch.delenv("TRITON_INTERPRET")
    assert compute_compiler_key()
    assert importlib.import_module("triton.runtime.cache").triton_key.cache_info().currsize == 1


def test_interpreter_needs_none() -> None:
    """Executors on the CPU would wait for a hash of a compiler that they do not use."""
    assert not compute_compiler_key()


def test_unknown_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No executor could start with a Triton that keeps its key elsewhere."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("attnfuzz.triton_compat.compiling._HOMES", ("triton.runtime.driver",))
    assert not compute_compiler_key()


@pytest.mark.parametrize("there_is_a_compiler", [True, False])
def test_launcher_is_built(there_is_a_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each executor would have a C compiler build it before its first case; without one, none would start."""
    monkeypatch.delenv("TRITON_INTERPRET")
    built: list[str] = []

    def compile_launcher() -> None:
        if not there_is_a_compiler:
            raise RuntimeError("Failed to find C compiler")
        built.append("launcher")

    monkeypatch.setattr(importlib.import_module("triton.backends.nvidia.driver"), "CudaUtils", compile_launcher)
    assert build_launcher() == there_is_a_compiler
    assert built == ["launcher"] * there_is_a_compiler


def test_interpreter_needs_no_launcher() -> None:
    """The start on a CPU would wait for a C compiler."""
    assert not build_launcher()
