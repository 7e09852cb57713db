"""Kernels that are right on a GPU and that Triton's interpreter gets wrong unless it is repaired."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

__all__ = [
    "annotated_kernel",
    "arithmetic_kernel",
    "block_operators_kernel",
    "constant_kernel",
    "conversion_kernel",
    "scalar_mask_kernel",
]


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
