"""Kernels that are right on a GPU and that Triton's interpreter gets wrong unless it is repaired."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice


@triton.jit
def arithmetic_kernel(p_a, p_b, p_dot, p_product, p_sum, p_larger, p_less, TILE: tl.constexpr):
    """All on ``[TILE, TILE]`` tiles of the inputs' dtype; only ``p_dot`` and ``p_sum`` are float32."""
    o = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    a, b = tl.load(p_a + o), tl.load(p_b + o)
    tl.store(p_dot + o, tl.dot(a, b))
    tl.store(p_product + o, a * b)
    tl.store(p_larger + o, tl.maximum(a, b))
    tl.store(p_less + o, a < b)
    tl.store(p_sum + tl.arange(0, TILE), tl.sum(a, axis=1).to(tl.float32))


@triton.jit
def constant_kernel(p_in, p_out, TILE: tl.constexpr):
    """Add two constants of the inputs' dtype, of which the second has to be rounded to be one of bfloat16."""
    o = tl.arange(0, TILE)
    tl.store(p_out + o, tl.load(p_in + o) + tl.full([TILE], 1.0, p_in.dtype.element_ty) + 1.01171875)


@triton.jit
def scalar_mask_kernel(p_in, p_lse, p_out, TILE: tl.constexpr):
    """Copy 5 numbers if the LSE is that of a live row."""
    o = tl.arange(0, TILE)
    live = (o < 5) & (tl.load(p_lse) > float("-inf"))
    tl.store(p_out + o, tl.load(p_in + o, mask=live, other=0.0))


@triton.jit
def block_operators_kernel(p_out, first, end, TILE: tl.constexpr, IS_ALL: tl.constexpr):
    """Mark what lies between ``first`` and ``end``, what does not, and, of everything or nothing, what lies before."""
    o = tl.arange(0, TILE)
    inside = o >= first and o < end and end < 100
    tl.store(p_out + o, inside)
    tl.store(p_out + TILE + o, o < first or not o < end)
    tl.store(p_out + 2 * TILE + o, o < first and IS_ALL)
    if first > 0 and not IS_ALL:
        tl.store(p_out + 3 * TILE, 1)


@triton.jit
def conversion_kernel(p_in, p_out, TILE: tl.constexpr):
    """Copy numbers, one past the end left out, into another dtype."""
    o = tl.arange(0, TILE)
    tl.store(p_out + o, tl.load(p_in + o, mask=o < TILE - 1, other=0.0).to(p_out.dtype.element_ty))


@triton.jit
def rounding_kernel(p_in, p_out, TILE: tl.constexpr):
    """Copy numbers into another dtype."""
    o = tl.arange(0, TILE)
    tl.store(p_out + o, tl.load(p_in + o).to(p_out.dtype.element_ty))


@triton.jit
def cutting_kernel(p_in, p_out, TILE: tl.constexpr):
    """Copy numbers into another dtype that has fewer bits, of which the others are dropped."""
    o = tl.arange(0, TILE)
    tl.store(p_out + o, tl.load(p_in + o).to(p_out.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def dot_kernel(p_a, p_b, p_out, TILE: tl.constexpr):
    """The product of two matrices [TILE TILE], added up in float32."""
    o = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(p_out + o, tl.dot(tl.load(p_a + o), tl.load(p_b + o)))


@triton.jit
def annotated_kernel(p_out, wide: tl.int64, named: "tl.int64", plain, byte: tl.uint8, TILE: tl.constexpr):
    """What each of four arguments becomes if it is multiplied by 2^16."""
    factor = tl.full([], 1 << 16, tl.int32)
    tl.store(p_out, (factor * wide).to(tl.int64))
    tl.store(p_out + 1, (factor * named).to(tl.int64))
    tl.store(p_out + 2, (factor * plain).to(tl.int64))
    tl.store(p_out + 3, (byte + byte).to(tl.int64))


BIAS = tl.constexpr(3)
"""A constant of a module, which kernels read as such."""


@triton.jit
def counting_kernel(p_out, first, last, STEP: tl.constexpr):
    """Write numbers of loops, as 64 bits, and a product of one that passes 2^31."""
    i = 0
    for n in range(first, last, STEP):
        tl.store(p_out + i, n.to(tl.int64) * 2147483647)
        i += 1
    for n in tl.range(last, step=STEP, num_stages=2):
        tl.store(p_out + i, (n * 1073741824).to(tl.int64))
        i += 1
    for n in range(first.to(tl.int64), last):
        tl.store(p_out + i, n * 1073741824)
        i += 1
    for n in tl.static_range(2):
        tl.store(p_out + i + n, 1 if n == 1 else 0)


@triton.jit
def constexpr_kernel(p_in, p_out, TILE: tl.constexpr):
    """Each operator between a constant of a module and a block of integers, the constant first."""
    o = tl.arange(0, TILE)
    x = tl.load(p_in + o)
    tl.store(p_out + o, BIAS + x)
    tl.store(p_out + TILE + o, BIAS - x)
    tl.store(p_out + 2 * TILE + o, BIAS * x)
    tl.store(p_out + 3 * TILE + o, BIAS // x)
    tl.store(p_out + 4 * TILE + o, BIAS % x)
    tl.store(p_out + 5 * TILE + o, (BIAS > x).to(tl.int32))  # noqa: SIM300 - the constant is asked first
    tl.store(p_out + 6 * TILE + o, (BIAS == x).to(tl.int32))  # noqa: SIM300 - likewise
    tl.store(p_out + 7 * TILE + o, (BIAS & x) + (BIAS << x) + (BIAS + 1))


@triton.autotune(configs=[triton.Config({"TILE": 16}), triton.Config({"TILE": 32}, num_warps=8)], key=["n"])
@triton.jit
def tuned_kernel(p_out, n, TILE: tl.constexpr):
    """Write the size of the tile."""
    tl.store(p_out + tl.arange(0, TILE), TILE)


@triton.jit
def static_assert_kernel(p_out, TILE: tl.constexpr):
    """Refuse all tiles but one of 32."""
    tl.static_assert(TILE == 32)
    tl.store(p_out + tl.arange(0, TILE), TILE)


@triton.jit
def relaunched_kernel(p_out, scale, n: tl.int64, TILE: tl.constexpr, FACTOR: tl.constexpr):
    """Write multiples of a scale."""
    tl.store(p_out + tl.arange(0, TILE), scale * FACTOR)


@triton.jit
def libdevice_kernel(p_in, p_out, TILE: tl.constexpr):
    """Functions of one, two and three floats, one that gives an integer, and one of a scalar."""
    o = tl.arange(0, TILE)
    x = tl.load(p_in + o)
    tl.store(p_out + o, libdevice.exp2(x))
    tl.store(p_out + TILE + o, libdevice.tanh(x))
    tl.store(p_out + 2 * TILE + o, libdevice.pow(x, 3.0))
    tl.store(p_out + 3 * TILE + o, libdevice.fma(x, x, 1.0))
    tl.store(p_out + 4 * TILE + o, libdevice.isnan(x).to(tl.float32))
    tl.store(p_out + 5 * TILE + o, x + libdevice.fast_expf(1.0))
    tl.store(p_out + 6 * TILE + o, cuda_libdevice.rint(x))
    tl.store(p_out + 7 * TILE + o, libdevice.div_rn(x, 3.0))


@triton.jit
def unknown_libdevice_kernel(p_out, TILE: tl.constexpr):
    """What is rounded towards zero."""
    tl.store(p_out + tl.arange(0, TILE), libdevice.div_rz(tl.full([TILE], 1.0, tl.float32), 3.0))


exp = tl.exp


@triton.jit
def named_function_kernel(p_in, p_out, TILE: tl.constexpr):
    """exp of 16 numbers, by a name of this module."""
    o = tl.arange(0, TILE)
    tl.store(p_out + o, exp(tl.load(p_in + o)))
