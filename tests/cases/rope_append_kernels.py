"""A problem that attnfuzz does not have, with right and wrong kernels: q and k are rotated, k and v put into a cache.

Fused RoPE and append, as servers launch it before attention. Every slot that no token of the step has stays as it is.
"""
# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz

MOST_POSITIONS = 1024


class RopeAppend(attnfuzz.Problem):
    """Padding tokens, at the end of the batch, have the slot -1: nothing is written for them, nor looked at."""

    num_tokens = attnfuzz.Integer(1, 64)
    padding_tokens = attnfuzz.Integer(0, 4)
    num_kv_heads = attnfuzz.Integer(1, 4)
    gqa_ratio = attnfuzz.Integer(1, 4)
    head_size = attnfuzz.Choice((16, 64, 128))
    block_size = attnfuzz.Integer(1, 32, likely=(1, 2, 3, 16))
    spare_blocks = attnfuzz.Integer(0, 4)
    dtype = attnfuzz.Choice(("float16", "bfloat16", "float32"))
    slots = attnfuzz.Choice(("in order", "reversed", "shuffled"))
    first_position = attnfuzz.Integer(0, 900)
    seed = attnfuzz.Seed()

    def slot_mapping(self, case: Any) -> list[int]:
        slots = list(range(self.num_blocks(case) * case.block_size))
        if case.slots == "reversed":
            slots.reverse()
        elif case.slots == "shuffled":
            order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(case.seed))
            slots = order.tolist()
        return [*slots[: case.num_tokens], *[-1] * case.padding_tokens]

    def num_blocks(self, case: Any) -> int:
        return int(-(-case.num_tokens // case.block_size) + case.spare_blocks)

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        spec, rows = attnfuzz.TensorSpec, case.num_tokens + case.padding_tokens
        q = rows, case.num_kv_heads * case.gqa_ratio, case.head_size
        kv = rows, case.num_kv_heads, case.head_size
        cache = self.num_blocks(case), case.block_size, case.num_kv_heads, case.head_size
        axes = "block", "offset", "head", "dim"
        return {
            "q": spec(q, case.dtype),
            "k": spec(kv, case.dtype),
            "v": spec(kv, case.dtype),
            "positions": spec((rows,), "int64"),
            "cos_sin": spec((MOST_POSITIONS, case.head_size), "float32"),
            "slot_mapping": spec((rows,), "int64"),
            "k_cache": spec(cache, case.dtype, "in_place", axes=axes),
            "v_cache": spec(cache, case.dtype, "in_place", axes=axes),
            "out": spec(q, case.dtype, "output", axes=("token", "head", "dim")),
        }

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        for name in ("q", "k", "v"):
            live = tensors[name][: case.num_tokens]
            live.copy_(attnfuzz.numbers(tuple(live.shape), seed=case.seed, name=name))
        tensors["positions"].copy_(torch.arange(len(tensors["positions"])) + case.first_position)
        half = case.head_size // 2
        rates = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(MOST_POSITIONS, dtype=torch.float64)[:, None] * rates
        tensors["cos_sin"].copy_(torch.cat((angles.cos(), angles.sin()), -1))
        tensors["slot_mapping"].copy_(torch.tensor(self.slot_mapping(case)))

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, attnfuzz.Expected]:
        count, slots = case.num_tokens, tensors["slot_mapping"][: case.num_tokens]
        cos, sin = tensors["cos_sin"].double()[tensors["positions"][:count]].chunk(2, -1)

        def rotated(x: Tensor) -> Tensor:
            one, other = x[:count].double().chunk(2, -1)
            return torch.cat((one * cos[:, None] - other * sin[:, None], other * cos[:, None] + one * sin[:, None]), -1)

        def appended(name: str, rows: Tensor) -> attnfuzz.Expected:
            value = torch.zeros(tensors[name].shape, dtype=torch.float64)
            where = torch.zeros(tensors[name].shape, dtype=torch.bool)
            value.flatten(0, 1)[slots], where.flatten(0, 1)[slots] = rows, True
            return attnfuzz.Expected(value, where)

        out = torch.zeros(tensors["out"].shape, dtype=torch.float64)
        out[:count] = rotated(tensors["q"])
        is_token = torch.zeros(out.shape, dtype=torch.bool)
        is_token[:count] = True
        return {
            "k_cache": appended("k_cache", rotated(tensors["k"])),
            "v_cache": appended("v_cache", tensors["v"][:count].double()),
            "out": attnfuzz.Expected(out, is_token),
        }

    def bound(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        return {"v_cache": 0.0}  # copied, not computed

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        if not name.endswith("_cache") or len(index) < 2:
            return ""
        slot, slots = index[0] * case.block_size + index[1], self.slot_mapping(case)
        return f"slot {slot} is that of token {slots.index(slot)}" if slot in slots else f"no token has slot {slot}"


def rotated(x: Tensor, inputs: Any, pairs: str) -> Tensor:
    cos, sin = (part[:, None] for part in inputs.cos_sin[inputs.positions].chunk(2, -1))
    one, other = x.float().chunk(2, -1) if pairs == "halves" else (x.float()[..., ::2], x.float()[..., 1::2])
    parts = one * cos - other * sin, other * cos + one * sin
    return torch.cat(parts, -1) if pairs == "halves" else torch.stack(parts, -1).flatten(-2)


def step(inputs: Any, *, pairs: str = "halves", left_out: int = 0, skips_padding: bool = True, reach: int = 1) -> None:
    inputs.out.copy_(rotated(inputs.q, inputs, pairs))
    k = rotated(inputs.k, inputs, pairs).to(inputs.k.dtype)
    k_slots, v_slots = inputs.k_cache.flatten(0, 1), inputs.v_cache.flatten(0, 1)
    slots = inputs.slot_mapping.tolist()
    tokens = [token for token, slot in enumerate(slots) if slot >= 0 or not skips_padding]
    for token in tokens[: len(tokens) - left_out]:
        k_slots[slots[token]] = k[token]
        v_slots[slots[token] : slots[token] + reach or None] = inputs.v[token]


@attnfuzz.kernel(RopeAppend())
def right(inputs: Any) -> None:
    step(inputs)


@attnfuzz.kernel(RopeAppend(first_position=attnfuzz.Integer(1, 900)))  # nothing is rotated at position 0
def wrong_pairs(inputs: Any) -> None:
    step(inputs, pairs="neighbours")


@attnfuzz.kernel(RopeAppend())
def last_token_left_out(inputs: Any) -> None:
    step(inputs, left_out=1)


@attnfuzz.kernel(RopeAppend(spare_blocks=attnfuzz.Integer(1, 4), slots=attnfuzz.Choice(("in order",))))
def writes_padding(inputs: Any) -> None:
    step(inputs, skips_padding=False)


@attnfuzz.kernel(RopeAppend(slots=attnfuzz.Choice(("in order",)), block_size=attnfuzz.Choice((3, 2, 16))))
def touches_the_next_slot(inputs: Any) -> None:
    step(inputs, reach=2)


@attnfuzz.kernel(RopeAppend())
def reads_beyond_the_end(inputs: Any) -> None:
    step(inputs)
    beyond = inputs.k.as_strided((1,), (1,), inputs.k.storage_offset() + inputs.k.numel())
    inputs.out[0] += 0 * beyond


@triton.jit
def append(
    q, k, v, positions, cos_sin, slots, k_cache, v_cache, out, NUM_Q_HEADS: tl.constexpr, RATIO: tl.constexpr,
    HALF: tl.constexpr, PEEKS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    if PEEKS:
        slot += (tl.load(slots + token + 1) == -7).to(tl.int64)  # no slot is -7
    dims = tl.arange(0, HALF)
    angle = cos_sin + tl.load(positions + token) * 2 * HALF + dims
    cos, sin = tl.load(angle), tl.load(angle + HALF)
    row = (token * NUM_Q_HEADS + head) * 2 * HALF + dims
    one, other = tl.load(q + row).to(tl.float32), tl.load(q + row + HALF).to(tl.float32)
    tl.store(out + row, one * cos - other * sin)
    tl.store(out + row + HALF, other * cos + one * sin)
    if head % RATIO == 0:
        kv_heads = NUM_Q_HEADS // RATIO
        row = (token * kv_heads + head // RATIO) * 2 * HALF + dims
        to = (slot * kv_heads + head // RATIO) * 2 * HALF + dims
        one, other = tl.load(k + row).to(tl.float32), tl.load(k + row + HALF).to(tl.float32)
        tl.store(k_cache + to, one * cos - other * sin)
        tl.store(k_cache + to + HALF, other * cos + one * sin)
        tl.store(v_cache + to, tl.load(v + row))
        tl.store(v_cache + to + HALF, tl.load(v + row + HALF))


def launch(inputs: Any, *, peeks: bool = False) -> None:
    rows, heads, head_size = inputs.q.shape
    append[rows, heads](
        inputs.q, inputs.k, inputs.v, inputs.positions, inputs.cos_sin, inputs.slot_mapping, inputs.k_cache,
        inputs.v_cache, inputs.out, heads, inputs.gqa_ratio, head_size // 2, peeks,
    )  # fmt: skip


FEW = RopeAppend(num_tokens=attnfuzz.Integer(1, 9))


@attnfuzz.kernel(FEW)
def in_triton(inputs: Any) -> None:
    launch(inputs)


@attnfuzz.kernel(FEW)
def peeks_at_the_next_slot(inputs: Any) -> None:
    """What it reads has no effect; behind the last token, there is nothing to read."""
    launch(inputs, peeks=True)
