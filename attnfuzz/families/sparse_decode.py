"""Latent attention over the slots that lists of indices name: DeepSeek's sparse attention, after its indexer's top-k.

Query token t attends to the rows ``kv_cache[i]`` for those i in ``indices[t]`` that name a slot; what else stands in a
list (a sentinel) names none. Rows are keys and, in their first ``v_head_size`` numbers, values; in 8 bits these have
scales, and the rest, which carries positions, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Integers, Seed, TensorSpec
from attnfuzz.families.formats import latent_row_size, latent_rows, parts_of_latents

_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1


class SparseDecode(attnfuzz.Problem):
    """``named``: by query token, how many slots its list names. ``topk``: the length of a list. ``sentinel``: what
    fills it: -1, the number of slots, or the smallest or largest int32. ``scattered``: sentinels stand between indices,
    not behind them. ``has_lengths``: there is ``topk_length [tokens]``, and what stands in a list from there on is no
    part of it, whatever it names. ``repeats``: a slot may be named twice, and then counts twice. ``spare_slots``: no
    list names these, and they hold anything. ``cache``: "same", as queries are; or "fp8", bytes of rows as DeepSeek's
    sparse cache has them (`attnfuzz.families.formats.parts_of_latents`), with scales that are powers of two, so that a
    kernel rounds nothing. ``q_strides``: the query may be part of a wider tensor. ``lse``: of a kernel that gives none
    ``Choice((False,))``. ``empty_lse``: of a token whose list names no slot; of a kernel whose callers do not take it
    ``Choice(("any",))``.
    """

    named = Integers(0, 64, likely=(0, 1, 2, 15, 16, 17, 31, 33, 64), least=1, most=4)
    topk = Choice((64, 128))
    num_heads = Choice((1, 3, 8, 16, 24, 64))
    head_size = Choice((32, 96, 576))
    v_head_size = Choice((32, 512))
    sentinel = Choice(("-1", "slots", "smallest", "largest"))
    scattered = Choice((False, True))
    has_lengths = Choice((False, True))
    repeats = Choice((False, True))
    spare_slots = Integer(0, 8)
    cache = Choice(("same", "fp8"))
    q_strides = Choice(("contiguous", "outer_gap"))
    scores = Choice(("usual", "negative"))
    lse = Choice((True,))
    empty_lse = Choice(("-inf",))
    dtype = Choice(("bfloat16", "float16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """``v_head_size`` is at most ``head_size``, whatever its field says."""
        rows, slots, rank = len(case.named), self._slots(case), self._rank(case)
        axes = ("token", "head", "dim")
        size, dtype = case.head_size, case.dtype
        if case.cache == "fp8":
            size, dtype = latent_row_size(rank, case.head_size - rank), "uint8"
        found = {
            "q": TensorSpec((rows, case.num_heads, case.head_size), case.dtype, "input", case.q_strides, axes),
            "kv_cache": TensorSpec((slots, 1, size), dtype, axes=("slot", *axes[1:]), named_by="indices"),
            "indices": TensorSpec((rows, case.topk), "int32", axes=("token", "place")),
        }
        if case.has_lengths:
            found["topk_length"] = TensorSpec((rows,), "int32", axes=axes[:1])
        found["out"] = TensorSpec((rows, case.num_heads, rank), case.dtype, "output", axes=axes)
        lse = TensorSpec((rows, case.num_heads), "float32", "output", axes=axes[:2])
        return found | ({"lse": lse} if case.lse else {})

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """With ``scores`` "negative" every key points away from every query, so that all scores are far below 0.

        Behind ``topk_length`` stand names of slots, also of spare ones, and places that are never written.
        """
        generator = torch.Generator("cpu").manual_seed(case.seed)

        def shuffled(count: int) -> Tensor:
            return torch.randperm(count, generator=generator, device="cpu", dtype=torch.int64)

        q = attnfuzz.numbers(tuple(tensors["q"].shape), seed=case.seed, name="q")
        tensors["q"].copy_(q.abs() if case.scores == "negative" else q)
        slots = self._slots(case)
        sentinel = {"-1": -1, "slots": slots, "smallest": _INT_MIN, "largest": _INT_MAX}[case.sentinel]
        keys = attnfuzz.numbers((slots, 1, case.head_size), seed=case.seed, name="kv")
        keys = -keys.abs() if case.scores == "negative" else keys
        for token, (row, count) in enumerate(zip(tensors["indices"], case.named, strict=True)):
            chosen = shuffled(slots - case.spare_slots)[:count]
            if case.repeats and count > 1:
                chosen[-1] = chosen[0]
            length = case.topk
            if case.has_lengths:
                most = case.topk if case.scattered else min(case.topk, count + 3)
                length = tensors["topk_length"][token] = count + int(shuffled(most + 1 - count)[0])
                behind = row[length::2]
                behind.copy_(shuffled(max(slots, len(behind)))[: len(behind)] % slots)
            row[:length] = sentinel
            row[shuffled(length)[:count] if case.scattered else slice(count)] = chosen.int()
            self._store(case, tensors, chosen, keys[chosen])

    def _store(self, case: Any, tensors: Mapping[str, Tensor], slots: Tensor, keys: Tensor) -> None:
        if case.cache == "same":
            tensors["kv_cache"][slots] = keys.to(tensors["q"].dtype)
            return
        rank = self._rank(case)
        rows = torch.zeros((len(keys), 1, tensors["kv_cache"].shape[-1]), dtype=torch.uint8, device="cpu")
        latents, scales, ropes = parts_of_latents(rows, rank, tensors["q"].dtype)
        latents.copy_(keys[..., :rank])
        parts = torch.arange(scales.shape[-1], dtype=torch.int64, device="cpu")
        scales.copy_(torch.exp2(((slots[:, None, None] + 3 * parts) % 7 - 4).float()))
        ropes.copy_(keys[..., rank:])
        tensors["kv_cache"][slots] = rows

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """A token whose list names no slot gives 0 and -inf."""
        rank, cache = self._rank(case), tensors["kv_cache"]
        ends = tensors["topk_length"].tolist() if case.has_lengths else [case.topk] * len(case.named)
        lists = [row[:end] for row, end in zip(tensors["indices"], ends, strict=True)]
        keys = [cache[row[(row >= 0) & (row < len(cache))].long()] for row in lists]
        if case.cache == "fp8":
            keys = [latent_rows(*parts_of_latents(rows, rank, tensors["q"].dtype)) for rows in keys]
        first = case.head_size - rank if getattr(case, "values_last", False) else 0
        values = [of_token[..., first : first + rank] for of_token in keys]
        scale = getattr(case, "scale", case.head_size**-0.5)
        found = attnfuzz.attention(tensors["q"], keys, values, scale=scale, dtype=case.dtype, num_partials=64)
        if case.empty_lse == "any":
            lse = found["lse"]
            found["lse"] = Expected(lse.value, where=lse.value.isfinite(), bound=lse.bound)
        return found if case.lse else {"out": found["out"]}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Mistakes about indices that are none, repeats, lengths, and what a row's numbers are."""
        lists, slots = tensors["indices"], len(tensors["kv_cache"])
        is_valid = (lists >= 0) & (lists < slots)
        places = torch.arange(lists.shape[1], device="cpu")
        before = lists[:, :, None] == lists[:, None, :]
        is_repeated = (before & (places[:, None] > places)).any(-1)
        found: dict[str, dict[str, Any]] = {
            "-1 names the last slot": {"indices": torch.where(lists == -1, slots - 1, lists)},
            "an index past the last slot names the last one": {"indices": lists.clamp(max=slots - 1)},
            "an index that names no slot is taken for slot 0": {"indices": torch.where(is_valid, lists, 0)},
            "slot 0 is taken for none": {"indices": torch.where(lists == 0, -1, lists)},
            "a list ends at its first index that names no slot": {
                "indices": torch.where(is_valid.cummin(1).values, lists, -1)
            },
            "a slot that is named twice counts once": {"indices": torch.where(is_repeated, -1, lists)},
            "the first place of a list is left out": {"indices": torch.where(places > 0, lists, -1)},
            "the last place of a list is left out": {"indices": torch.where(places < len(places) - 1, lists, -1)},
            "values are the last numbers of a row": {"values_last": True},
            "the scale is that of the values' size": {"scale": self._rank(case) ** -0.5},
        }
        if case.has_lengths:
            ends = tensors["topk_length"]
            counted = (is_valid.cumsum(1) > ends[:, None]).logical_not() & is_valid
            found |= {
                "what stands behind topk_length is read, too": {"topk_length": torch.full_like(ends, case.topk)},
                "the place at topk_length is read, too": {"topk_length": ends.add(1).clamp(max=case.topk)},
                "the last place before topk_length is left out": {"topk_length": ends.sub(1).clamp(min=0)},
                "topk_length counts the slots that a list names, not its places": {
                    "indices": torch.where(counted, lists, -1),
                    "topk_length": torch.full_like(ends, case.topk),
                },
            }
        return found

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """How many slots the token's list names, of a result."""
        return f"its list names {case.named[index[0]]} slots" if name in ("out", "lse") else ""

    @staticmethod
    def _rank(case: Any) -> int:
        return int(min(case.head_size, case.v_head_size))

    @staticmethod
    def _slots(case: Any) -> int:
        return int(max(1, *case.named) + case.spare_slots)
