"""The guarded patch of Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from attnfuzz.execution import interpreter

COUNT_PATCHES = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import sys
import torch
import triton.language as tl
import triton.runtime.interpreter as runtime
from attnfuzz.execution.interpreter import install_fast_patching
from attnfuzz.kernels.launch import dense_decode

searched = []
original = runtime._patch_builtin
runtime._patch_builtin = lambda *arguments: (searched.append(1), original(*arguments))
before = tl.load
inputs = [torch.ones(2, 2, 16), *(torch.ones(2, 20, 2, 16) for _ in "kv"), torch.tensor([20, 3], dtype=torch.int32)]
plain = [tensor.clone() for tensor in dense_decode(*inputs, 0.25, tile=16)]
slow = len(searched)
assert install_fast_patching() and install_fast_patching()
for _ in range(2):
    searched.clear()
    fast = dense_decode(*inputs, 0.25, tile=16)
    assert all(torch.equal(a, b) for a, b in zip(plain, fast))
    assert tl.load is before, "the language stays replaced after a launch"
    assert 0 < len(searched) < slow / 4, (len(searched), slow)
"""


def test_results_stay_the_same_and_patching_is_rare(tmp_path: Path) -> None:
    """Kernels would give other results, or the interpreter would waste half its time, on every case on a CPU."""
    script = tmp_path / "count_patches.py"
    script.write_text(COUNT_PATCHES)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_unknown_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton whose interpreter has changed would be patched blindly and break every kernel."""
    unknown = types.ModuleType("triton.runtime.interpreter")
    unknown._patch_lang = lambda fn, scope: None  # type: ignore[attr-defined]  # a stand-in module has no stubs
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", unknown)
    before = dict(vars(unknown))
    assert not interpreter.install_fast_patching()
    assert vars(unknown) == before
