"""Tensors as lines of Python that make them again, short ones first: for scripts that people paste into issues.

Where a few numbers say all of a tensor they are written out, else its bytes are packed. Lines rest on names that a
script has: ``torch``, and those that `NAMES` says how to get.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

NAMES = ("inf", "nan", "unpack")
"""Names that lines may use beside ``torch``: the numbers, from ``math``, and the function that `UNPACK` defines."""
UNPACK = (
    "def unpack(text, dtype, *shape):  # a tensor of these bytes",
    "    data = bytearray(zlib.decompress(base64.b64decode(text)))",
    "    return torch.frombuffer(data, dtype=dtype).view(shape).to(DEVICE)",
)
"""It takes the modules ``base64`` and ``zlib``, and ``DEVICE``."""

_MOST_NUMBERS = 128
"""That are written out."""
_MOST_LINES = (4, 2, 1)
"""Most lines of numbers of a tensor, whose bytes are packed if they take more; fewer where all tensors take many."""
_ROOM = 11
"""Lines for all tensors of a case."""
_FEW_LINES = 3
"""Lines of numbers to compare with; more are packed."""
_SHORT = 8
"""Elements that are as short as a name."""
_WIDTH = 116


def names_used(lines: Sequence[str]) -> list[str]:
    """The `NAMES` that ``lines`` use, in their order."""
    words = {word for line in lines for word in re.findall(r"[a-z_]+", re.sub(r'"[^"]*"', "", line))}
    return [name for name in NAMES if name in words]


def number_text(value: float) -> str:
    """The number, as Python reads it once `NAMES` are there."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    is_negative_zero = value == 0 and math.copysign(1.0, value) < 0
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 and not is_negative_zero else repr(value)


def definitions(tensors: Mapping[str, Shaped[Tensor, "..."]], *, room: int = _ROOM) -> list[str]:
    """Lines that define each of ``tensors``, which lie on a CPU, with its dtype, strides and what lies between.

    Those that share memory share it again. Not more than fit into ``room``, if packing what is long helps.
    """
    ways = (_definitions(tensors, most) for most in _MOST_LINES)
    return next((lines for lines in ways if len(lines) <= room), _definitions(tensors, _MOST_LINES[-1]))


def _definitions(tensors: Mapping[str, Tensor], most: int) -> list[str]:
    """With at most so many lines of numbers for each."""
    lines: list[str] = []
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (same := next((one for one in made if _holds_the_same(made[one], tensor)), None)) is not None:
            lines.append(f"{name} = {same}.view{tuple(tensor.shape)}.clone()")
            made[name] = tensor
        elif (base := next((one for one in made if _shares(made[one], tensor)), None)) is not None:
            lines.append(f"{name} = {placed(tensor, base, made[base])}")
        elif others := [one for one in tensors if one not in made and _touches(tensors[one], tensor)]:
            parts = [name, *others]
            whole = _around([tensors[one] for one in parts])  # the one tensor of which these are views
            made[base := "_and_".join(parts)] = whole
            lines += _defined(base, whole, most)
            lines.append(f"{name} = {placed(tensor, base, whole)}")
        else:
            is_dense = tensor.is_contiguous()
            whole = tensor if is_dense else _around([tensor])
            lines += _defined(name, whole, most)
            if not is_dense:
                lines.append(f"{name} = {name}.as_strided({tuple(tensor.shape)}, {tensor.stride()})")
            made[name] = tensor
    return lines


def _holds_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes of two dense tensors, of which there are some, are equal, each in memory of its own."""
    if one.dtype != other.dtype or one.numel() != other.numel() or other.numel() < _SHORT or _shares(one, other):
        return False
    if not (one.is_contiguous() and other.is_contiguous()):
        return False
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)) and len(set(_numbers(one))) > 1


def listed(tensor: Shaped[Tensor, "..."]) -> str:
    """The numbers of ``tensor`` in nested lists that broadcast to it; one number where all are the same."""
    numbers, shape = _numbers(tensor), tuple(tensor.shape)
    if len(set(numbers)) == 1:
        return numbers[0]
    while len(shape) > 1 and numbers == numbers[: (step := len(numbers) // shape[0])] * shape[0]:
        numbers, shape = numbers[:step], shape[1:]
    if len(shape) == 1 and (period := _period(numbers)) < len(numbers):
        return f"[{', '.join(numbers[:period])}] * {len(numbers) // period}"
    return _nested(numbers, shape)


def compared(name: str, result: str, should_be: Tensor, within: Tensor) -> list[str]:
    """Lines that note in ``failed`` whether the expression ``result`` differs by more than ``within``, in float64.

    They take a function ``differs``.
    """
    exact, near = _rounded(should_be, 9).contiguous(), _rounded(within * 1.005, 3).contiguous()
    line = f'failed |= differs("{name}", {result}, {listed(exact)}, {listed(near)})'
    told = textwrap.wrap(line, _WIDTH - 8, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    if len(told) <= _FEW_LINES:
        return told
    return [f'failed |= differs("{name}", {result}, {packed(exact)}, {packed(near)})']


def _rounded(numbers: Tensor, digits: int) -> Tensor:
    flat = [float(f"{number:.{digits}g}") for number in numbers.reshape(-1).tolist()]
    return torch.tensor(flat, dtype=torch.float64, device="cpu").view(numbers.shape)


def placed(tensor: Tensor, base: str, of: Tensor) -> str:
    """``tensor`` as a part of ``of``, which is called ``base``."""
    offset = tensor.storage_offset() - of.storage_offset()
    same = tensor.dtype == of.dtype and offset == 0
    if same and tensor.shape == of.shape and tensor.stride() == of.stride():
        return base
    if same and tensor.is_contiguous() and of.is_contiguous() and tensor.numel() == of.numel():
        return f"{base}.view{tuple(tensor.shape)}"
    view = base if tensor.dtype == of.dtype else f"{base}.view({tensor.dtype})"
    behind = f", {view}.storage_offset() + {offset}" if offset else ""
    return f"{view}.as_strided({tuple(tensor.shape)}, {tensor.stride()}{behind})"


def _shares(base: Tensor, tensor: Tensor) -> bool:
    """Whether ``tensor`` lies within the memory of ``base``."""
    if base.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not base.numel():
        return False
    first, last = base.data_ptr(), base.data_ptr() + _span(base) * base.element_size()
    return first <= tensor.data_ptr() and tensor.data_ptr() + _span(tensor) * tensor.element_size() <= last


def _touches(one: Tensor, other: Tensor) -> bool:
    """Whether ``one`` lies among another's elements but not within them, or right behind: as views of one tensor do."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or one.dtype != other.dtype:
        return False
    if _shares(other, one):
        return False
    first, last = sorted((one, other), key=lambda tensor: tensor.storage_offset())
    return bool(one.numel() and other.numel()) and last.storage_offset() <= first.storage_offset() + _span(first)


def _around(tensors: Sequence[Tensor]) -> Tensor:
    """All elements from the first to the last one of views of one tensor, those between included."""
    start = min(one.storage_offset() for one in tensors)
    end = max(one.storage_offset() + _span(one) for one in tensors)
    return tensors[0].as_strided((end - start,), (1,), start)


def _span(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _defined(name: str, tensor: Tensor, most: int) -> list[str]:
    """The way to write a dense tensor that takes the fewest lines, and of several the shortest.

    Its bytes are packed only where numbers take too many.
    """
    ways = [[f"{name} = {text}"] for text in _expressions(tensor)]
    if in_rows := list(_in_rows(name, tensor)):
        ways.append(in_rows)
    broken = [[part for line in lines for part in _broken(line)] for lines in ways]
    best = min(broken, key=lambda lines: (len(lines), sum(map(len, lines))), default=[])
    if best and len(best) <= most:
        return best
    return [f"{name} = {packed(tensor)}"]


def _broken(line: str) -> Iterator[str]:
    """The line, broken after commas where it is too long; packed bytes stay whole."""
    rest = line
    while len(rest) > _WIDTH and '"' not in rest:
        cut = rest.rfind(", ", 0, _WIDTH)
        if cut < 0:
            break
        yield rest[: cut + 1]
        rest = f"    {rest[cut + 2 :]}"
    yield rest


def _expressions(tensor: Tensor) -> Iterator[str]:
    """Expressions that give ``tensor``."""
    if tensor.dtype in _BY_BYTES:
        for text in _expressions(tensor.view(torch.uint8)):
            yield f"{text}.view({tensor.dtype})"
        return
    shape, kind = tuple(tensor.shape), f"dtype={tensor.dtype}"
    if not tensor.numel():
        yield f"torch.zeros({shape}, {kind})"
        return
    numbers = _numbers(tensor)
    if len(set(numbers)) == 1:
        zero = numbers[0] == "0" or (tensor.dtype == torch.bool and numbers[0] == "False")
        yield f"torch.zeros({shape}, {kind})" if zero else f"torch.full({shape}, {numbers[0]}, {kind})"
        return
    if len(numbers) <= _MOST_NUMBERS:
        yield f"torch.tensor({_nested(numbers, shape)}, {kind})"
    period = _period(numbers)
    if period < len(numbers) and period <= _MOST_NUMBERS:
        yield f"torch.tensor([{', '.join(numbers[:period])}] * {len(numbers) // period}, {kind}).view{shape}"


_BY_BYTES = frozenset(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)


def _in_rows(name: str, tensor: Tensor) -> Iterator[str]:
    """A tensor that holds one number but for some rows: most of a cache is dead memory."""
    if tensor.dtype in _BY_BYTES or tensor.dim() < 2 or not tensor.numel():
        return
    numbers, width = _numbers(tensor), tensor.shape[-1]
    rows = [tuple(numbers[start : start + width]) for start in range(0, len(numbers), width)]
    plain = [row[0] for row in rows if len(set(row)) == 1]
    if not plain:
        return
    fill = max(plain, key=plain.count)
    yield f"{name} = torch.full({tuple(tensor.shape)}, {fill}, dtype={tensor.dtype})"
    for is_fill, stretch in itertools.groupby(enumerate(rows), key=lambda row: set(row[1]) == {fill}):
        if not is_fill:
            (first, _), *_ = found = list(stretch)
            yield f"{name}.view(-1, {width})[{first}:{first + len(found)}] = {_rows_text([row for _, row in found])}"


def _rows_text(rows: list[tuple[str, ...]]) -> str:
    """Rows as a tensor that broadcasts to them."""
    width = len(rows[0])
    if len(set(rows)) == 1:
        rows = rows[:1]
    if len(rows) == 1 and len(set(rows[0])) == 1:
        return rows[0][0]
    period = max(_period(row) for row in rows) if all(width % _period(row) == 0 for row in rows) else width
    period = period if all(row == row[:period] * (width // period) for row in rows) else width
    text = ", ".join(f"[{', '.join(row[:period])}]" for row in rows)
    return f"torch.tensor([{text}])" + (f".repeat(1, {width // period})" if period < width else "")


def _numbers(tensor: Tensor) -> list[str]:
    """All elements in order, each as short as it can be said exactly."""
    flat = tensor.reshape(-1)
    if tensor.dtype in (torch.bool, torch.uint8) or not tensor.dtype.is_floating_point:
        return [str(one) for one in flat.tolist()]
    kind = {torch.float16: np.float16, torch.float64: np.float64}.get(tensor.dtype, np.float32)
    values = flat.double().numpy().astype(kind)  # exact: float32 holds bfloat16
    return [number_text(float(one)) if not math.isfinite(one) or one == int(one) else str(one) for one in values]


def _nested(numbers: Sequence[str], shape: tuple[int, ...]) -> str:
    if not shape:
        return numbers[0]
    step = len(numbers) // shape[0]
    parts = (_nested(numbers[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))
    return f"[{', '.join(parts)}]"


def _period(numbers: Sequence[str]) -> int:
    """The shortest beginning that repeats to the end."""
    count = len(numbers)
    for period in range(1, count // 2 + 1):
        if count % period == 0 and all(numbers[i] == numbers[i - period] for i in range(period, count)):
            return period
    return count


def packed(tensor: Shaped[Tensor, "..."]) -> str:
    """An expression that makes ``tensor``, contiguous, of its bytes."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    text = base64.b64encode(zlib.compress(data, 9)).decode()
    return f'unpack("{text}", {tensor.dtype}, {", ".join(map(str, tensor.shape)) or "()"})'


def packed_together(tensors: Mapping[str, Shaped[Tensor, "..."]]) -> str:
    """One line that makes all of ``tensors`` of their bytes, sharing memory as they do.

    It takes the modules ``base64``, ``io`` and ``zlib``, and ``DEVICE``.
    """
    file = io.BytesIO()
    torch.save(list(tensors.values()), file)
    text = base64.b64encode(zlib.compress(file.getvalue(), 9)).decode()
    made = f'torch.load(io.BytesIO(zlib.decompress(base64.b64decode("{text}"))), DEVICE)'
    return f"{', '.join(tensors)}{',' if len(tensors) == 1 else ''} = {made}"
