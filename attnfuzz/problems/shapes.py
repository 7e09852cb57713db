"""Shape, dtype and role of every tensor that a case consists of. Torch-free, computed from integers only."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from attnfuzz.problems.module import Case, module_of
from attnfuzz.problems.open_cases import OpenCase, ProblemError, implementation_of
from attnfuzz.problems.recipes import STRIDE_KINDS, StrideKind

_ALIGNMENT = 16
"""Bytes: of the widest load of one thread, and of the addresses that kernels written with it ask for."""


class StridedLayout(NamedTuple):
    """Strides, the storage they span and the first element's place in it, all counted in elements.

    The storage starts at an aligned address and ends with the tensor's last element.
    """

    strides: tuple[int, ...]
    storage_elements: int
    offset: int


def strided_layout(shape: tuple[int, ...], kind: StrideKind, itemsize: int) -> StridedLayout:
    """Place a tensor of ``shape`` as ``kind`` says.

    * ``outer_gap``: a slice of a tensor that is longer in its second dimension, as q is of the projection of q, k and
      v, and a page of a cache that several layers share: the outermost dimension's indices are further apart than they
      need be, by a multiple of 16 bytes; everything inside is contiguous.
    * ``padded_rows``: the rows (last dimension) are 3 or 4 elements further apart than they are long.
    * ``transposed``: the two outermost dimensions swap their places in memory.
    * ``offset``: contiguous, but one element after an aligned address.
    * ``every_other``: the last dimension has stride 2.

    A vector has no rows and nothing to swap: these kinds leave it contiguous. ``itemsize`` (bytes) decides about the
    gaps: that of ``outer_gap`` keeps the alignment that vector loads need, that of ``padded_rows`` breaks it.
    """
    if kind not in STRIDE_KINDS:
        raise ValueError(f"stride kind {kind!r} must be one of {STRIDE_KINDS}")
    return _strided_layout(shape, kind, itemsize)


@lru_cache(maxsize=1 << 12)  # asked for several times for each tensor of a case
def _strided_layout(shape: tuple[int, ...], kind: StrideKind, itemsize: int) -> StridedLayout:
    strides = _strides(shape, kind, itemsize)
    offset = 1 if kind == "offset" else 0
    if math.prod(shape) == 0:
        return StridedLayout(strides, offset, offset)
    last_element = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return StridedLayout(strides, offset + last_element + 1, offset)


def last_dim_contiguous(shape: tuple[int, ...], kind: StrideKind) -> bool:
    """Whether ``kind`` leaves the last dimension of a tensor of ``shape`` with stride 1."""
    return strided_layout(shape, kind, 2).strides[-1] == 1


def outer_gap(entry: int, itemsize: int) -> int:
    """The fewest entries of so many elements, at least one, that are a multiple of 16 bytes; counted in elements."""
    return math.lcm(max(1, entry) * itemsize, _ALIGNMENT) // itemsize


def _strides(shape: tuple[int, ...], kind: StrideKind, itemsize: int) -> tuple[int, ...]:
    if kind == "every_other":
        return tuple(2 * stride for stride in _contiguous(shape))
    if kind == "outer_gap" and len(shape) > 1:
        strides = _contiguous(shape)
        return (strides[0] + outer_gap(math.prod(shape[2:]), itemsize), *strides[1:])
    if kind == "padded_rows" and len(shape) > 1:
        return (*_contiguous((*shape[:-1], shape[-1] + _row_gap(shape[-1], itemsize)))[:-1], 1)
    if kind == "transposed" and len(shape) > 1:
        first, second, *rest = _contiguous((shape[1], shape[0], *shape[2:]))
        return (second, first, *rest)
    return _contiguous(shape)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(1, shape[i])
    return tuple(strides)


def _row_gap(row: int, itemsize: int) -> int:
    """Elements between rows, at least 3, after which the next row is not aligned to 8 bytes."""
    return 3 if (row + 3) * itemsize % 8 else 4


Role = Literal["input", "output"]
ITEMSIZE = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip


class TensorSpec(NamedTuple):
    """``dtype`` is a torch dtype's name, one of `ITEMSIZE`. "in_place": it holds something, and is written in part.

    ``strides`` and ``axes``, the names of its dimensions for messages, are those of open problems: bundled ones have
    theirs from the case. ``named_by``: the tensor of integers whose numbers, from 0 on, name entries of the first
    dimension, or ``places`` in each of them; then it is tried as a part of a tensor that is far larger.
    """

    shape: tuple[int, ...]
    dtype: str
    role: Role | Literal["in_place"] = "input"
    strides: StrideKind = "contiguous"
    axes: tuple[str, ...] = ()
    named_by: str = ""
    places: int = 1


Specs = dict[str, TensorSpec]
_ROLES = ("input", "output", "in_place")
_OF_IDS = ("int32", "int64")


def tensor_specs(case: Case) -> Specs:
    """The tensors of ``case`` by name, in the order in which they are allocated.

    The interleaved layout has one tensor ``kv_cache`` in place of ``k_cache`` and ``v_cache``, as latent_decode does.
    """
    return _open_specs(case) if isinstance(case, OpenCase) else module_of(case.problem).tensors(case)


def strides_of(case: Case, name: str) -> StrideKind:
    """The stride recipe of tensor ``name`` of ``tensor_specs``."""
    if isinstance(case, OpenCase):
        return tensor_specs(case)[name].strides
    return case.strides.get(named_in_strides(case, name), "contiguous")


def named_in_strides(case: Case, name: str) -> str:
    """The name by which ``case.strides`` calls tensor ``name``: in the interleaved layout K stands for both."""
    return "k_cache" if name == "kv_cache" and name not in case.tensor_names else name


def _open_specs(case: OpenCase) -> Specs:
    """As its problem has them, in a process that has imported it; asked once for a case that is judged."""
    problem = implementation_of(case.problem)
    known, asked, specs = _LATEST.get(id(case), (None, None, {}))
    if known is not case or asked is not problem:
        specs = _asked(problem, case)
        _LATEST[id(case)] = case, problem, specs
        if len(_LATEST) > _MOST_KEPT:
            del _LATEST[next(iter(_LATEST))]
    return dict(specs)


_LATEST: dict[int, tuple[OpenCase, Any, Specs]] = {}
"""Specs by the case's id, which nothing else has as long as the case is held here."""
_MOST_KEPT = 512


def _asked(problem: Any, case: OpenCase) -> Specs:
    try:
        specs: Specs = dict(problem.tensors(case))
    except Exception as error:
        raise ProblemError.raised("tensors", case, error) from error
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec) or spec.dtype not in ITEMSIZE or spec.role not in _ROLES:
            raise ProblemError(
                f"{case.problem}.tensors: {name}={spec!r:.200} must be an attnfuzz.TensorSpec with a dtype of "
                f"{', '.join(ITEMSIZE)} and a role of {', '.join(_ROLES)}"
            )
        if spec.named_by and (spec.named_by not in specs or specs[spec.named_by].dtype not in _OF_IDS):
            raise ProblemError(
                f"{case.problem}.tensors: {name} is named_by={spec.named_by!r:.80}, which must be one of its "
                f"tensors of {' or '.join(_OF_IDS)}"
            )
    return specs
