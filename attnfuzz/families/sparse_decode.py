"""Latent attention over the slots that lists of indices name: DeepSeek's sparse attention, after its indexer's top-k.

Query token t attends to the rows ``kv_cache[i]`` for those i in ``indices[t]`` that name a slot; what else stands in a
list (a sentinel) names none. Rows are keys and, in their first ``v_head_size`` numbers, values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Integers, Seed, TensorSpec

__all__ = ["SparseDecode"]

_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1


class SparseDecode(attnfuzz.Problem):
    """``named``: by query token, how many slots its list names. ``topk``: the length of a list. ``sentinel``: what
    fills it: -1, the number of slots, or the smallest or largest int32. ``scattered``: sentinels stand between indices,
    not behind them. ``repeats``: a slot may be named twice, and then counts twice. ``spare_slots``: no list names
    these, and they hold anything. ``q_strides``: the query may be part of a wider tensor. ``lse``: of a kernel that
    gives none ``Choice((False,))``.
    """

    named = Integers(0, 64, likely=(0, 1, 2, 15, 16, 17, 31, 33, 64), least=1, most=4)
    topk = Choice((64, 128))
    num_heads = Choice((1, 3, 8, 16, 24, 64))
    head_size = Choice((32, 96, 576))
    v_head_size = Choice((32, 512))
    sentinel = Choice(("-1", "slots", "smallest", "largest"))
    scattered = Choice((False, True))
    repeats = Choice((False, True))
    spare_slots = Integer(0, 8)
    q_strides = Choice(("contiguous", "outer_gap"))
    scores = Choice(("usual", "negative"))
    lse = Choice((True,))
    dtype = Choice(("bfloat16", "float16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """``v_head_size`` is at most ``head_size``, whatever its field says."""
        rows, slots = len(case.named), self._slots(case)
        heads, value_size = case.num_heads, min(case.head_size, case.v_head_size)
        axes = ("token", "head", "dim")
        found = {
            "q": TensorSpec((rows, heads, case.head_size), case.dtype, "input", case.q_strides, axes),
            "kv_cache": TensorSpec(
                (slots, 1, case.head_size), case.dtype, axes=("slot", *axes[1:]), named_by="indices"
            ),
            "indices": TensorSpec((rows, case.topk), "int32", axes=("token", "place")),
            "out": TensorSpec((rows, heads, value_size), case.dtype, "output", axes=axes),
        }
        return found | ({"lse": TensorSpec((rows, heads), "float32", "output", axes=axes[:2])} if case.lse else {})

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """With ``scores`` "negative" every key points away from every query, so that all scores are far below 0."""
        generator = torch.Generator("cpu").manual_seed(case.seed)
        q = attnfuzz.numbers(tuple(tensors["q"].shape), seed=case.seed, name="q")
        tensors["q"].copy_(q.abs() if case.scores == "negative" else q)
        slots = self._slots(case)
        sentinel = {"-1": -1, "slots": slots, "smallest": _INT_MIN, "largest": _INT_MAX}[case.sentinel]
        tensors["indices"].fill_(sentinel)
        for token, count in enumerate(case.named):
            order = torch.randperm(slots - case.spare_slots, generator=generator, device="cpu", dtype=torch.int64)
            chosen = order[:count]
            if case.repeats and count > 1:
                chosen[-1] = chosen[0]
            places = torch.randperm(case.topk, generator=generator, device="cpu", dtype=torch.int64)[:count]
            tensors["indices"][token, places if case.scattered else slice(count)] = chosen.int()
            keys = attnfuzz.numbers((slots, 1, case.head_size), seed=case.seed, name="kv")[chosen]
            tensors["kv_cache"][chosen] = (-keys.abs() if case.scores == "negative" else keys).to(tensors["q"].dtype)

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """A token whose list names no slot gives 0 and -inf."""
        lists = [row[(row >= 0) & (row < len(tensors["kv_cache"]))].long() for row in tensors["indices"]]
        keys = [tensors["kv_cache"][named] for named in lists]
        values = [of_token[..., : min(case.head_size, case.v_head_size)] for of_token in keys]
        scale = case.head_size**-0.5
        found = attnfuzz.attention(tensors["q"], keys, values, scale=scale, dtype=case.dtype, num_partials=64)
        return found if case.lse else {"out": found["out"]}

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """How many slots the token's list names, of a result."""
        return f"its list names {case.named[index[0]]} slots" if name in ("out", "lse") else ""

    @staticmethod
    def _slots(case: Any) -> int:
        return int(max(1, *case.named) + case.spare_slots)
