"""What Triton's interpreter gets wrong is repaired, and an unknown Triton is left alone."""

from __future__ import annotations

import math
import os
import sys
import types

import numpy as np
import pytest
import torch

from attnfuzz.triton_compat.interpreter_repairs import _to_bfloat16_bits, install_repairs
from tests.processes.interpreted_kernels import (
    annotated_kernel,
    arithmetic_kernel,
    constant_kernel,
    conversion_kernel,
    cutting_kernel,
    dot_kernel,
    rounding_kernel,
    scalar_mask_kernel,
)

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="this run compiles kernels for a GPU")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic(dtype: torch.dtype) -> None:
    """A correct kernel that multiplies bfloat16, with tl.dot or without, would be reported on every CPU."""
    assert install_repairs()
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    dot, product, larger = torch.empty(16, 16), torch.empty_like(a), torch.empty_like(a)
    less, total = torch.empty(16, 16, dtype=torch.int8), torch.empty(16)
    arithmetic_kernel[(1,)](a, b, dot, product, total, larger, less, TILE=16)
    torch.testing.assert_close(dot, a.float() @ b.float(), atol=1e-5, rtol=1e-5)
    assert torch.equal(product, a * b)
    assert torch.equal(larger, torch.maximum(a, b))
    assert torch.equal(less.bool(), a < b)
    torch.testing.assert_close(total, a.float().sum(1), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_constants(dtype: torch.dtype) -> None:
    """A correct kernel that adds a number to bfloat16 would be reported with an AttributeError on every CPU."""
    assert install_repairs()
    a, out = torch.arange(16, dtype=dtype), torch.empty(16, dtype=dtype)
    constant_kernel[(1,)](a, out, TILE=16)
    assert torch.equal(out, a + 1.0 + torch.tensor(1.01171875, dtype=dtype))


@pytest.mark.parametrize(("lse", "copied"), [(1.0, 5), (-math.inf, 0)])
def test_scalar_comparison_in_a_block_mask(lse: float, copied: int) -> None:
    """A correct kernel that guards a load by a scalar would be reported with a TypeError on every CPU."""
    assert install_repairs()
    out = torch.empty(16)
    scalar_mask_kernel[(1,)](torch.ones(16), torch.tensor([lse]), out, TILE=16)
    assert out.sum() == copied


@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float8_number_is_read_as_torch_reads_it(narrow: torch.dtype, wide: torch.dtype) -> None:
    """Dead memory of an 8-bit cache would not be NaN, and a correct kernel be reported for subnormal keys."""
    assert install_repairs()
    numbers = torch.arange(256, dtype=torch.uint8).view(narrow)
    out = torch.empty(256, dtype=wide)
    conversion_kernel[(1,)](numbers, out, TILE=256)
    expected = numbers.to(wide)
    expected[-1] = 0
    assert torch.equal(out.nan_to_num(999.0, 777.0, -777.0), expected.nan_to_num(999.0, 777.0, -777.0))


@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rounding_to_float8_is_that_of_torch(narrow: torch.dtype, wide: torch.dtype) -> None:
    """A kernel that rounds its weights to 8 bits, as its declaration says, would be reported on every CPU."""
    assert install_repairs()
    largest = torch.finfo(narrow).max
    held = torch.arange(128, dtype=torch.uint8).view(narrow).float()
    held = held[held.isfinite()]
    numbers = torch.cat((held, (held[1:] + held[:-1]) / 2, torch.rand(256) * largest, torch.tensor([math.nan, 1e30])))
    numbers = numbers[: -(len(numbers) % 2) or None].to(wide).nan_to_num(math.nan, torch.finfo(wide).max)
    numbers = torch.cat((numbers, -numbers, torch.zeros(1024 - 2 * len(numbers), dtype=wide)))
    out = torch.empty(1024, dtype=narrow)
    rounding_kernel[(1,)](numbers, out, TILE=1024)
    expected = numbers.float().clamp(-largest, largest).to(narrow)
    assert torch.equal(out.float().nan_to_num(999.0), expected.float().nan_to_num(999.0))


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_product_of_float8_matrices_is_that_of_their_numbers(narrow: torch.dtype) -> None:
    """A correct kernel that multiplies rounded weights with a cache of 8 bits would be told of subnormal values."""
    assert install_repairs()
    codes = torch.randint(0, 0x70, (2, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes[:, 0] = torch.arange(16)  # subnormal numbers among them
    a, b = codes.view(narrow)
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out, TILE=16)
    torch.testing.assert_close(out, a.float() @ b.float(), atol=0, rtol=1e-6)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_arguments_have_the_type_that_the_signature_gives_them(by_keyword: bool) -> None:
    """A correct kernel that declares its strides as 64 bits would be reported for offsets that wrap, on every CPU."""
    assert install_repairs()
    out = torch.empty(4, dtype=torch.int64)
    large = 1 << 16
    if by_keyword:
        annotated_kernel[(1,)](out, plain=large, named=large, wide=large, byte=200, TILE=16)
    else:
        annotated_kernel[(1,)](out, large, large, large, 200, 16)
    assert out.tolist() == [1 << 32, 1 << 32, 0, 400 - 256]


@pytest.mark.parametrize("wide", [torch.float16, torch.float32, torch.float64, torch.int32])
def test_conversion_to_bfloat16_is_that_of_torch(wide: torch.dtype) -> None:
    """Results that drop bits would need twice the bound, which then hides real truncation in kernels of eager torch."""
    assert install_repairs()
    drawn = torch.cat((torch.arange(16), 1000 * torch.randn(1008, generator=torch.Generator().manual_seed(3))))
    numbers, out = drawn.to(wide), torch.empty(1024, dtype=torch.bfloat16)
    rounding_kernel[(1,)](numbers, out, TILE=1024)
    assert torch.equal(out, numbers.to(torch.bfloat16))


def test_dropping_bits_can_still_be_asked_for() -> None:
    """A kernel that says `fp_downcast_rounding="rtz"` would be right on a CPU and wrong on a GPU."""
    assert install_repairs()
    numbers, out = torch.tensor([1.0, 1.0078124, -1.0078124, 3.0]), torch.empty(4, dtype=torch.bfloat16)
    cutting_kernel[(1,)](numbers, out, TILE=4)
    assert out.tolist() == [1.0, 1.0, -1.0, 3.0]


def test_every_bfloat16_number_is_read_as_torch_reads_it() -> None:
    """A correct kernel would be reported for subnormal numbers in its cache."""
    assert install_repairs()
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(1 << 16)
    rounding_kernel[(1,)](numbers, out, TILE=1 << 16)
    assert torch.equal(out.nan_to_num(999.0, 777.0, -777.0), numbers.float().nan_to_num(999.0, 777.0, -777.0))


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    """Products in bfloat16 would differ from a GPU's in the last bit."""
    special = [0.0, -0.0, math.inf, -math.inf, 1.00390625, 1.01171875, 3.3895314e38, 1e-40]
    values = torch.cat([torch.tensor(special), torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    expected = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(_to_bfloat16_bits(values.numpy()), expected)
    assert (int(_to_bfloat16_bits(np.array([np.nan], np.float32))[0]) & 0x7FFF) > 0x7F80


def test_unknown_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that has changed would be replaced blindly, and every kernel break."""
    unknown = types.ModuleType("triton.runtime.interpreter")
    vars(unknown)["InterpreterBuilder"] = type("InterpreterBuilder", (), {"create_dot": lambda self, a: a})
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", unknown)
    assert not install_repairs()
