"""The guarded patch of Triton's interpreter."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from attnfuzz.triton_compat import interpreter
from attnfuzz.triton_compat import interpreter as interpreter_setup
from attnfuzz.triton_compat.interpreter_types import install_types
from tests.scripts import run_script

INSTALLERS = [name for name in vars(interpreter) if name.startswith("install_")]

COUNT_PATCHES = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import sys
import torch
import triton.language as tl
import triton.runtime.interpreter as runtime
from attnfuzz.triton_compat.interpreter import install_fast_patching
from attnfuzz.kernels.dense.launch import dense_decode

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

SHORTCUTS = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import sys
import torch
import triton.language as tl
import triton.runtime.interpreter as runtime
from triton.language.semantic import TritonSemantic
from attnfuzz.triton_compat.interpreter import install_shortcuts
from attnfuzz.kernels.dense.launch import dense_decode

checked = []
original = TritonSemantic.binary_op_sanitize_overflow_impl


def check(semantic, *arguments):
    checked.append(semantic.builder.options.sanitize_overflow)
    return original(semantic, *arguments)


TritonSemantic.binary_op_sanitize_overflow_impl = check
batches = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    tensors = [torch.ones(2, 2, 16, dtype=dtype), *(torch.rand(2, 20, 2, 16).to(dtype) for _ in "kv")]
    batches.append([*tensors, torch.tensor([20, 3], dtype=torch.int32)])
plain = [tensor.clone() for batch in batches for tensor in dense_decode(*batch, 0.25, tile=16)]
assert checked and all(checked)
checked.clear()
lookup = runtime._get_np_dtype
assert install_shortcuts() and install_shortcuts()
assert runtime._get_np_dtype is not lookup
fast = [tensor for batch in batches for tensor in dense_decode(*batch, 0.25, tile=16)]
assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))
assert checked and not any(checked), "integers are still checked for an assertion that nobody makes"
names = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5)
for one in names:
    for kind in (one, tl.block_type(one, [4]), tl.pointer_type(one), tl.block_type(tl.pointer_type(one), [4])):
        assert runtime._get_np_dtype(kind) == lookup(kind), kind
"""

TYPES = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import pytest
import torch
import triton.language as tl
from attnfuzz.triton_compat.interpreter_types import install_types
from attnfuzz.kernels.dense.launch import dense_decode

KINDS = [tl.int1, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.pointer_type(tl.float32)]


def described():
    made = [tl.block_type(kind, shape) for kind in KINDS for shape in ([4], [tl.constexpr(2), 8], tl.tuple([16]))]
    made += [one.with_element_ty(tl.float32) for one in made]
    tensors = [tl.tensor(None, one) for one in (*made, *KINDS)]
    return [
        (one.dtype, type(one.shape), [*map(repr, one.shape)], one.numel.value, one.type.name, one.type == tl.float32)
        for one in tensors
    ] + [([*one.shape], one.numel, one.name, str(one.scalar)) for one in made] + [[a == b for a in KINDS] for b in made]


batches = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    tensors = [torch.ones(2, 2, 16, dtype=dtype), *(torch.rand(2, 20, 2, 16).to(dtype) for _ in "kv")]
    batches.append([*tensors, torch.tensor([20, 3], dtype=torch.int32)])
plain, types = [tensor.clone() for batch in batches for tensor in dense_decode(*batch, 0.25, tile=16)], described()
assert install_types() and install_types()
for _ in range(2):
    assert described() == types
    fast = [tensor for batch in batches for tensor in dense_decode(*batch, 0.25, tile=16)]
    assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))
assert tl.block_type(tl.int32, [4]).shape is tl.block_type(tl.float32, [4]).shape, "types are made again"
for shape, error in (([4.0], TypeError), ([3], ValueError), ([], TypeError), ((4,), AssertionError)):
    with pytest.raises(error):
        tl.block_type(tl.int32, shape)
"""


def test_results_stay_the_same_and_patching_is_rare() -> None:
    """Kernels would give other results, or the interpreter would waste half its time, on every case on a CPU."""
    done = run_script(COUNT_PATCHES)
    assert done.returncode == 0, done.stderr


def test_work_without_effect_is_left_out() -> None:
    """Kernels would give other results, or a fifth of the time of every case on a CPU be spent for nothing."""
    done = run_script(SHORTCUTS)
    assert done.returncode == 0, done.stderr


def test_types_are_made_once() -> None:
    """Kernels would give other results, wrong shapes would pass, or a third of each case on a CPU go into types."""
    done = run_script(TYPES)
    assert done.returncode == 0, done.stderr


def test_unknown_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton whose interpreter has changed would be patched blindly and break every kernel."""
    unknown = types.ModuleType("triton.runtime.interpreter")
    unknown._patch_lang = lambda fn, scope: None  # type: ignore[attr-defined]  # a stand-in module has no stubs
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", unknown)
    before = dict(vars(unknown))
    assert not interpreter.install_fast_patching()
    assert not interpreter.install_shortcuts()
    assert not install_types()
    assert vars(unknown) == before


@pytest.mark.parametrize("options", [None, {"debug": True, "sanitize_overflow": True}, {"debug": False}])
def test_checks_that_somebody_makes_are_kept(monkeypatch: pytest.MonkeyPatch, options: dict[str, bool] | None) -> None:
    """A Triton that asserts, or whose options are others, would no longer tell of an overflow."""
    built = types.ModuleType("triton.runtime.interpreter")
    record = dataclasses.make_dataclass("InterpreterOptions", [(name, bool) for name in options or ()])
    given = None if options is None else record(**options)
    built._get_np_dtype = lambda tt_dtype: None  # type: ignore[attr-defined]  # a stand-in module has no stubs
    built.interpreter_builder = types.SimpleNamespace(options=given)  # type: ignore[attr-defined]  # likewise
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", built)
    before = dict(vars(built))
    assert not interpreter.install_shortcuts()
    assert vars(built) == before
    assert built.interpreter_builder.options is given


@pytest.mark.parametrize(("interpreted", "done"), [("1", len(INSTALLERS)), ("0", 0), (None, 0)])
def test_only_kernels_that_are_interpreted_need_it(
    interpreted: str | None, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors on a GPU would import the interpreter for nothing, or those on a CPU judge by one that is wrong."""
    called: list[str] = []
    for name in INSTALLERS:
        monkeypatch.setattr(interpreter_setup, name, lambda name=name: called.append(name))
    if interpreted is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    interpreter_setup.set_up_interpreter()
    assert len(set(called)) == done
