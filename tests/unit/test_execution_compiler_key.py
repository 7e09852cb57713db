"""Triton's key is computed before executors are forked, where kernels are compiled at all."""

from __future__ import annotations

import importlib

import pytest

from attnfuzz.execution.compiler_key import compute_compiler_key


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
    monkeypatch.setattr("attnfuzz.execution.compiler_key._HOMES", ("triton.runtime.driver",))
    assert not compute_compiler_key()
