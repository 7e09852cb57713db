"""Kernels that Python would run otherwise than Triton's compiler means them."""

from __future__ import annotations

import ast
import math
import os
import sys
import types

import pytest
import torch

from attnfuzz.triton_compat.interpreter import install_fast_patching
from attnfuzz.triton_compat.interpreter_libdevice import install_libdevice
from attnfuzz.triton_compat.interpreter_objects import install_objects
from attnfuzz.triton_compat.interpreter_rewriting import install_rewriting
from tests.processes.interpreted_kernels import (
    block_operators_kernel,
    constexpr_kernel,
    counting_kernel,
    libdevice_kernel,
    named_function_kernel,
    relaunched_kernel,
    tuned_kernel,
    unknown_libdevice_kernel,
)

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="this run compiles kernels for a GPU")


@pytest.mark.parametrize("is_all", [False, True])
def test_operators_between_blocks(is_all: bool) -> None:
    """A correct kernel that writes `and` between masks would be reported for what the first one hides."""
    assert install_rewriting()
    out, o = torch.zeros(4, 16, dtype=torch.int8), torch.arange(16)
    block_operators_kernel[(1,)](out, 3, 9, TILE=16, IS_ALL=is_all)
    assert torch.equal(out[0].bool(), (o >= 3) & (o < 9))
    assert torch.equal(out[1].bool(), (o < 3) | (o >= 9))
    assert torch.equal(out[2].bool(), (o < 3) & is_all)
    assert out[3].sum() == (not is_all)


def test_numbers_of_loops_are_scalars_of_a_type() -> None:
    """A persistent kernel that widens its work item would be told to raise, and a narrow product not to overflow."""
    assert install_rewriting()
    out = torch.zeros(16, dtype=torch.int64)
    counting_kernel[(1,)](out, 2, 7, STEP=2)
    widened = [number * (2**31 - 1) for number in (2, 4, 6)]
    wrapped = [0, -(1 << 31), 0, -(1 << 31)]
    of_wide_bounds = [number << 30 for number in range(2, 7)]
    assert out.tolist() == [*widened, *wrapped, *of_wide_bounds, 0, 1, 0, 0]


def test_a_constant_leaves_arithmetic_to_a_block() -> None:
    """A correct kernel that begins a sum with a constant of its module would be told to raise."""
    assert install_objects()
    x, out = torch.arange(1, 17, dtype=torch.int32), torch.zeros(8, 16, dtype=torch.int32)
    constexpr_kernel[(1,)](x, out, TILE=16)
    expected: list[torch.Tensor] = [3 + x, 3 - x, 3 * x, 3 // x, 3 % x, x < 3, x == 3, (3 & x) + (3 << x) + 4]
    assert torch.equal(out, torch.stack([one.int() for one in expected]))


def test_tuning_takes_the_first_configuration() -> None:
    """An autotuned kernel would be told to raise, for want of a GPU that could time its configurations."""
    assert install_objects()
    out = torch.zeros(32)
    tuned_kernel[(1,)](out, 5)
    assert out.tolist() == [16.0] * 16 + [0.0] * 16


def test_a_launch_can_be_repeated_without_its_constants() -> None:
    """A kernel of an engine that asks for `constexprs`, or keeps what a launch returns, would be told to raise."""
    assert install_objects()
    out = torch.zeros(16)
    launched = relaunched_kernel[(1,)](out, 2.0, 5, TILE=16, FACTOR=3)
    assert out.tolist() == [6.0] * 16
    launched[(1,)](out, 4.0, 5)
    assert out.tolist() == [12.0] * 16
    assert relaunched_kernel.constexprs == [3, 4]
    assert [one.name for one in relaunched_kernel.params][:3] == ["p_out", "scale", "n"]
    with pytest.raises(NotImplementedError, match="n_regs"):
        _ = launched.n_regs


def test_functions_of_libdevice_are_those_of_torch() -> None:
    """A correct kernel that calls `libdevice.exp2` would be told to raise."""
    assert install_libdevice()
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    x[3], x[5] = math.nan, math.inf
    out = torch.zeros(8, 16)
    libdevice_kernel[(1,)](x, out, TILE=16)
    expected = [x.exp2(), x.tanh(), x**3, x * x + 1, x.isnan().float(), x + math.e, x.round(), x / 3]
    torch.testing.assert_close(out, torch.stack(expected), equal_nan=True)


def test_what_torch_has_no_function_for_says_so() -> None:
    """A kernel would be run with another rounding than the one it asks for."""
    assert install_libdevice()
    with pytest.raises(Exception, match="__nv_fdiv_rz") as raised:
        unknown_libdevice_kernel[(1,)](torch.zeros(16), TILE=16)
    assert isinstance(raised.value.__cause__, NotImplementedError)


@pytest.mark.parametrize("install", [install_rewriting, install_objects, install_libdevice])
def test_unknown_triton_is_left_alone(install: types.FunctionType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that has changed would be replaced blindly, and every kernel break."""
    unknown = types.ModuleType("triton.runtime.interpreter")
    vars(unknown)["ASTTransformer"] = type("ASTTransformer", (ast.NodeTransformer,), {"visit_Module": ast.parse})
    vars(unknown)["InterpretedFunction"] = type("InterpretedFunction", (), {"run": lambda self, grid: grid})
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", unknown)
    before = {name: dict(vars(one)) for name, one in vars(unknown).items() if isinstance(one, type)}
    assert not install()
    assert {name: dict(vars(one)) for name, one in vars(unknown).items() if isinstance(one, type)} == before


def test_a_function_of_triton_under_a_name_of_the_module() -> None:
    """A correct kernel of flash-linear-attention would be told to raise."""
    assert install_fast_patching()
    x, out = torch.arange(16.0), torch.zeros(16)
    named_function_kernel[(1,)](x, out, TILE=16)
    assert torch.allclose(out, x.exp())
