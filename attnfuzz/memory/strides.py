"""How a tensor of a given shape lies in memory: the stride recipes of a case, in elements."""

from collections.abc import Sequence

from attnfuzz.problems.recipes import StrideKind

__all__ = ["contiguous_strides", "element_span", "placement"]


def placement(shape: tuple[int, ...], kind: StrideKind) -> tuple[tuple[int, ...], int]:
    """Strides, and how many elements past an aligned address the tensor starts.

    - `contiguous`: row-major, aligned.
    - `padded_rows`: 3 to 8 unused elements after each run of the last dimension.
    - `transposed`: the first two dimensions swapped in memory.
    - `offset`: row-major, one element past an aligned address.
    - `every_other`: every second element of the last dimension.

    A tensor with fewer than two dimensions has no rows to pad or to transpose and is contiguous. `ValueError` for any
    other kind.
    """
    if kind == "contiguous" or (kind in ("padded_rows", "transposed") and len(shape) < 2):
        return contiguous_strides(shape), 0
    if kind == "offset":
        return contiguous_strides(shape), 1
    if kind == "every_other":
        return tuple(2 * stride for stride in contiguous_strides(shape)), 0
    if kind == "padded_rows":
        return contiguous_strides((*shape[:-1], shape[-1] + 3 + shape[-1] % 6))[: len(shape)], 0
    if kind == "transposed":
        first, second, *inner = contiguous_strides((shape[1], shape[0], *shape[2:]))
        return (second, first, *inner), 0
    raise ValueError(f"strides={kind!r} must be contiguous, padded_rows, transposed, offset or every_other")


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides; as torch has them, a dimension of size 0 counts as 1."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def element_span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of the tensor, gaps between included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
