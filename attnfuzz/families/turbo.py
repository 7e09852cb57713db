"""vLLM's TurboQuant: a paged cache in which one row of bytes holds K and V of a token and head, and what writes it.

K is in float8, or it is divided by its length, turned, and each number told by the 3 or 4 bits of the nearest centroid,
with the length in float16 behind these. V has 3 or 4 bits a number, from its least number on in equal steps; behind
these lie a step and the least number, both in float16. Bits lie in their order, the lowest first, across bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Seed, TensorSpec
from attnfuzz.families.formats import rotation

_ERROR = 2.0**-19
"""Of what a kernel works out in float32 of a row, against the sum of its sizes."""
_LEAST_STEP = 1e-8


def codes_of(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes of ``bits`` each in rows of bytes."""
    place = torch.arange(count, dtype=torch.int32, device=packed.device) * bits
    wide = torch.nn.functional.pad(packed.int(), (0, 1))
    return (wide[..., place // 8] | wide[..., place // 8 + 1] << 8) >> place % 8 & (1 << bits) - 1


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """The bytes that hold ``codes``, whose number is a multiple of 8."""
    single = codes.int()[..., None] >> torch.arange(bits, dtype=torch.int32, device=codes.device) & 1
    of_bytes = single.reshape(*codes.shape[:-1], -1, 8) << torch.arange(8, dtype=torch.int32, device=codes.device)
    return of_bytes.sum(-1).to(torch.uint8)


def row_parts(case: Any) -> list[int]:
    """Bytes of the codes of K, its length, the codes of V, its step and least number, and what is behind a row."""
    size = case.head_size
    of_keys = [size, 0] if case.key_bits == 8 else [size * case.key_bits // 8, 2]
    return [*of_keys, size * case.value_bits // 8, 4, case.padding]


def split_row(rows: Tensor, case: Any) -> tuple[Tensor, ...]:
    """The parts of rows that `row_parts` counts."""
    ends = tuple(itertools.accumulate(row_parts(case)[:-1]))
    return torch.tensor_split(rows, ends, dim=-1)


def _centroids(case: Any) -> Tensor:
    """Where a number of a turned row of length 1 lies as often below as above, in parts that are as frequent."""
    count = 1 << int(case.key_bits)
    places = (2 * torch.arange(count, dtype=torch.float64, device="cpu") + 1) / count - 1
    found: Tensor = torch.special.erfinv(places) * (2 / case.head_size) ** 0.5
    return found.float()


def _turn(case: Any) -> Tensor:
    """The matrix that a row is multiplied with before it is told by centroids; its length stays."""
    turn = rotation(case.head_size)
    return turn.div(turn[0].square().sum().sqrt()).float()


class TurboDecode(attnfuzz.PagedProblem):
    """``key_bits``: of a number of K, 8 for float8; ``value_bits``: of one of V. ``padding``: bytes between rows.
    ``corrected``: centroids that a row names are divided by the length of them all. ``cache_rows [pages, block_size,
    num_kv_heads, bytes]``; a query times ``turn`` is to be multiplied with ``centroids``.
    """

    head_size = Choice((32, 64, 80, 128))
    layout = Choice(("NHD",))
    key_bits = Choice((8, 4, 3))
    value_bits = Choice((4, 3))
    padding = Choice((0, 6))
    corrected = Choice((False, True))

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """The cache of K and V is one."""
        heads = (len(case.lengths), case.num_kv_heads * case.gqa_ratio, case.head_size)
        q, out = (TensorSpec(heads, case.dtype, role, axes=("seq", "head", "dim")) for role in ("input", "output"))
        cached = self.cache(case)
        of_rows = (*cached.pop("k_cache").shape[:3], sum(row_parts(case)))
        del cached["v_cache"]
        axes: Any = {"axes": ("page", "offset", "head", "byte"), "named_by": "block_table"}
        found = {"q": q, "cache_rows": TensorSpec(of_rows, "uint8", strides=case.cache_strides, **axes), **cached}
        if case.key_bits < 8:
            found["centroids"] = TensorSpec((1 << case.key_bits,), "float32")
            found["turn"] = TensorSpec((case.head_size, case.head_size), "float32")
        return found | {"out": out}

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Codes of all kinds; what lies in a row behind its parts is never written."""
        tensors["q"].copy_(attnfuzz.numbers(tuple(tensors["q"].shape), seed=case.seed, name="q"))
        self.write_table(case, tensors)
        if case.key_bits < 8:
            tensors["centroids"].copy_(_centroids(case))
            tensors["turn"].copy_(_turn(case))
        generator = torch.Generator("cpu").manual_seed(case.seed)
        of_keys, of_length, of_values, _, _ = row_parts(case)
        for seq, length in enumerate(case.lengths):
            if not length:
                continue
            shape = (length, case.num_kv_heads)

            def drawn(size: int, shape: tuple[int, ...] = shape) -> Tensor:
                return torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.int32, device="cpu")

            keys = drawn(of_keys)
            if case.key_bits == 8:
                keys = torch.where(keys & 127 == 127, 0, keys) & ~64  # no NaN, and none above 2
            lengths = (1 + drawn(1) / 256) * case.head_size**0.5
            steps, least = (drawn(1) + 1) / 1024, -drawn(1) / 128
            of_k = (keys.to(torch.uint8), _bytes(lengths)[..., :of_length])
            row = torch.cat((*of_k, drawn(of_values).to(torch.uint8), _bytes(steps), _bytes(least)), -1)
            pages, offsets = self.places(case, tensors, seq)
            tensors["cache_rows"][pages, offsets, :, : row.shape[-1]] = row

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """An empty sequence gives 0. A query that is turned may be rounded."""
        rows = [tensors["cache_rows"][self.places(case, tensors, seq)] for seq in range(len(case.lengths))]
        both = [self._numbers(case, tensors, row) for row in rows]
        q, numerics = tensors["q"].double(), None
        if case.key_bits < 8:
            q, numerics = q @ tensors["turn"].double(), attnfuzz.Numerics(query="scaled")
        k, v = ([one[i] for one in both] for i in range(2))
        scale = case.head_size**-0.5
        found = attnfuzz.attention(q, k, v, scale=scale, dtype=case.dtype, numerics=numerics, num_partials=32)
        return {"out": found["out"]}

    @staticmethod
    def _numbers(case: Any, tensors: Mapping[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        keys, length, values, others, _ = split_row(rows, case)
        if case.key_bits == 8:
            k = keys.contiguous().view(torch.float8_e4m3fn).double()
        else:
            k = tensors["centroids"].double()[codes_of(keys, case.key_bits, case.head_size)]
            if case.corrected:
                k = k / k.square().sum(-1, keepdim=True).sqrt()
            k = k * length.contiguous().view(torch.float16).double()
        of_values = others.contiguous().view(torch.float16).double()
        codes = codes_of(values, case.value_bits, case.head_size)
        return k, codes * of_values[..., :1] + of_values[..., 1:]

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Parts of rows that are read by other rules."""
        rows = tensors["cache_rows"]
        keys, length, values, others, rest = split_row(rows, case)
        swapped = torch.cat((keys, length, values, others[..., 2:], others[..., :2], rest), -1)
        found: dict[str, dict[str, Any]] = {"the step of V is taken for its least number": {"cache_rows": swapped}}
        if case.key_bits < 8:
            found |= {
                "the query is turned the other way": {"turn": tensors["turn"].mT.contiguous()},
                "the query is not turned": {"turn": torch.eye(case.head_size, dtype=torch.float32, device="cpu")},
                "centroids are divided by their length where they should not be, or are not": {
                    "corrected": not case.corrected
                },
            }
        return found


class TurboWrite(attnfuzz.Problem):
    """New tokens into such a cache: token i goes into slot ``slot_mapping[i]``, and nowhere if that is -1.

    ``midpoints``: between the centroids. ``zeros``: the first token is 0. ``even``: all numbers of the second are one.
    """

    num_tokens = Integer(1, 24)
    skipped = Integer(0, 3)
    num_kv_heads = Choice((1, 2, 3, 8))
    head_size = Choice((32, 64, 80, 128))
    block_size = Choice((1, 5, 16))
    spare_blocks = Integer(0, 2)
    key_bits = Choice((8, 4, 3))
    value_bits = Choice((4, 3))
    padding = Choice((0, 6))
    strides = Choice(("contiguous", "outer_gap"))
    cache_strides = Choice(("contiguous", "outer_gap"))
    zeros = Choice((False, True))
    even = Choice((False, True))
    dtype = Choice(("float16", "bfloat16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """``cache_rows`` as `TurboDecode` has it."""
        rows, heads = case.num_tokens + case.skipped, case.num_kv_heads
        blocks = -(-case.num_tokens // case.block_size) + case.spare_blocks
        new = TensorSpec((rows, heads, case.head_size), case.dtype, "input", case.strides, ("token", "head", "dim"))
        of_rows = (blocks, case.block_size, heads, sum(row_parts(case)))
        of_slots: Any = {"named_by": "slot_mapping", "places": case.block_size}
        axes = ("block", "offset", "head", "byte")
        found = {"key": new, "value": new, "slot_mapping": TensorSpec((rows,), "int64")}
        found["cache_rows"] = TensorSpec(of_rows, "uint8", "in_place", case.cache_strides, axes, **of_slots)
        if case.key_bits < 8:
            found["midpoints"] = TensorSpec(((1 << case.key_bits) - 1,), "float32")
            found["turn"] = TensorSpec((case.head_size, case.head_size), "float32")
        return found

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Slots in any order."""
        generator = torch.Generator("cpu").manual_seed(case.seed)
        for name in ("key", "value"):
            tensors[name].copy_(attnfuzz.numbers(tuple(tensors[name].shape), seed=case.seed, name=name))
            if case.even:
                tensors[name][min(1, len(tensors[name]) - 1)] = 1.25
            if case.zeros:
                tensors[name][0] = 0
        slots, rows = tensors["cache_rows"].shape[0] * case.block_size, len(tensors["slot_mapping"])
        order, places = (
            torch.randperm(count, generator=generator, device="cpu", dtype=torch.int64)[: case.num_tokens]
            for count in (slots, rows)
        )
        tensors["slot_mapping"].fill_(-1)
        tensors["slot_mapping"][places] = order
        if case.key_bits < 8:
            centroids = _centroids(case)
            tensors["midpoints"].copy_((centroids[1:] + centroids[:-1]) / 2)
            tensors["turn"].copy_(_turn(case))

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """The bytes; of one that holds what may be rounded either way, any."""
        low, high = (self._rows(case, tensors, way) for way in (-1, 1))
        slots = tensors["slot_mapping"]
        shape, named = tuple(tensors["cache_rows"].shape), slots[slots >= 0]
        value, bound = (torch.zeros(shape, dtype=torch.float64, device="cpu").flatten(0, 1) for _ in range(2))
        where = torch.zeros(value.shape, dtype=torch.bool, device="cpu")
        size = low.shape[-1]
        value[named, :, :size] = low[slots >= 0].double()
        bound[named, :, :size] = torch.where(low == high, 0.0, 255.0)[slots >= 0].double()
        where[named, :, :size] = True
        return {"cache_rows": Expected(value.view(shape), where.view(shape), bound.view(shape))}

    @staticmethod
    def _rows(case: Any, tensors: Mapping[str, Tensor], way: int) -> Tensor:
        """Rows of all tokens, with all that is rounded a little above or below."""
        key, value = tensors["key"].double(), tensors["value"].double()
        if case.key_bits == 8:
            parts = [tensors["key"].float().to(torch.float8_e4m3fn).view(torch.uint8)]
        else:
            length, turn = key.square().sum(-1, keepdim=True).sqrt(), tensors["turn"].double()
            unit = key / (length + 1e-8)
            turned = unit @ turn + way * _ERROR * (unit.abs() @ turn.abs())
            codes = torch.bucketize(turned, tensors["midpoints"].double(), right=True)
            parts = [packed_codes(codes, case.key_bits), _bytes(length * (1 + way * _ERROR))]
        least, most = value.amin(-1, keepdim=True), (1 << case.value_bits) - 1
        step = ((value.amax(-1, keepdim=True) - least) / most).clamp(min=_LEAST_STEP)
        steps = (value - least) / step
        codes = (steps + 0.5 + way * _ERROR * (steps + 1)).floor().clamp(0, most)
        return torch.cat(
            (*parts, packed_codes(codes, case.value_bits), _bytes(step * (1 + way * _ERROR)), _bytes(least)), -1
        )

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """Which slot, and which part of a row, it is."""
        if name != "cache_rows":
            return ""
        names = ("codes of K", "length of K", "codes of V", "step and least number of V", "behind the row")
        ends = torch.tensor(row_parts(case), dtype=torch.int64, device="cpu").cumsum(0)
        return f"slot {index[0] * case.block_size + index[1]}, {names[int((ends <= index[3]).sum())]}"


def _bytes(numbers: Tensor) -> Tensor:
    """The bytes of each as float16; torch rounds a double to it by way of float32, as kernels do."""
    return numbers.float().half().contiguous().view(torch.uint8)
