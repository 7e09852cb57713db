"""Latent attention of several query tokens of each sequence: what verifies draft tokens, or predicts several at once.

The new tokens' rows are in the cache already, behind those of the context. Query token t of a sequence attends to its
context and to the new tokens up to itself, or to all new tokens. Rows are keys and, in their first ``rank`` numbers,
values; in 8 bits, each 128 of these have a scale, and the rest, which carries positions, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Integers, Seed, TensorSpec
from attnfuzz.families.formats import FORMATS, latent_row_size, latent_rows, parts_of_latents

_MOST_PARTIALS = 32
_DEQUANTISED = attnfuzz.Numerics(dequantised="input")
_SMALLEST = (2.0**-13, 2.0**-13)
"""The smallest number of float8, times the smallest scale."""


class LatentVerify(attnfuzz.Problem):
    """``contexts``: cached tokens before the new ones. ``query_len``: new tokens of each sequence; ``ragged``: of the
    last one fewer, where there are several. ``rank``, ``rope_size``: numbers of a row that are values, and that are
    not. ``latents``: "same", as queries are, in ``kv_cache [slots, 1, rank + rope_size]``; "fp8", in
    ``latent_cache``, ``latent_scales`` and ``rope_cache``; or "fp8_rows", the three in the bytes of ``kv_cache``, as
    DeepSeek's sparse cache has them (`attnfuzz.families.formats.parts_of_latents`). ``latent_scaling``: scales are
    "powers" of two, so that a kernel rounds nothing, or "any", and it may round what a number stands for to the dtype
    of q. ``spare_blocks``: of the cache, which hold anything, as do places of a last page behind its tokens.
    ``causal``: whether a new token sees none of those after it. ``lse``: of a kernel that gives none
    ``Choice((False,))``.
    """

    contexts = Integers(0, 160, likely=(0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 128, 160), least=1, most=4)
    query_len = Choice((1, 2, 3, 4, 6))
    ragged = Choice((False, True))
    num_heads = Choice((1, 2, 4, 6, 16, 20))
    rank = Choice((16, 64, 256, 512))
    rope_size = Choice((16, 64))
    block_size = Choice((1, 16, 64))
    spare_blocks = Integer(0, 2)
    causal = Choice((True, False))
    latents = Choice(("same", "fp8", "fp8_rows"))
    latent_scaling = Choice(("powers", "any"))
    q_strides = Choice(("contiguous", "outer_gap"))
    scores = Choice(("usual", "negative"))
    lse = Choice((True,))
    dtype = Choice(("bfloat16", "float16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """``block_table`` is as wide as the longest sequence."""
        tokens, sequences, size = sum(self._new(case)), len(case.contexts), case.rank + case.rope_size
        slots = self._num_blocks(case) * case.block_size
        pages = max(-(-length // case.block_size) for length in self._lengths(case))
        axes = ("token", "head", "dim")
        found = {"q": TensorSpec((tokens, case.num_heads, size), case.dtype, "input", case.q_strides, axes)}
        if case.latents == "same":
            found["kv_cache"] = TensorSpec((slots, 1, size), case.dtype, axes=("slot", *axes[1:]))
        elif case.latents == "fp8_rows":
            row_size = latent_row_size(case.rank, case.rope_size)
            found["kv_cache"] = TensorSpec((slots, 1, row_size), "uint8", axes=("slot", *axes[1:]))
        else:
            found["latent_cache"] = TensorSpec((slots, 1, case.rank), "float8_e4m3fn", axes=("slot", *axes[1:]))
            found["latent_scales"] = TensorSpec(
                (slots, -(-case.rank // FORMATS["fp8_latent"].block)), "float32", axes=("slot", "block")
            )
            found["rope_cache"] = TensorSpec((slots, 1, case.rope_size), case.dtype, axes=("slot", *axes[1:]))
        found["block_table"] = TensorSpec((sequences, pages), "int32", axes=("sequence", "page"))
        found["seq_lens"] = TensorSpec((sequences,), "int32")
        found["cu_seqlens_q"] = TensorSpec((sequences + 1,), "int32")
        found["out"] = TensorSpec((tokens, case.num_heads, case.rank), case.dtype, "output", axes=axes)
        lse = TensorSpec((tokens, case.num_heads), "float32", "output", axes=axes[:2])
        return found | ({"lse": lse} if case.lse else {})

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """With ``scores`` "negative" every key points away from every query, so that all scores are far below 0."""
        generator = torch.Generator("cpu").manual_seed(case.seed)
        lengths = self._lengths(case)
        tensors["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32, device="cpu"))
        starts = torch.tensor([0, *self._new(case)], dtype=torch.int64, device="cpu").cumsum(0)
        tensors["cu_seqlens_q"].copy_(starts)
        q = attnfuzz.numbers(tuple(tensors["q"].shape), seed=case.seed, name="q")
        tensors["q"].copy_(q.abs() if case.scores == "negative" else q)
        order = torch.randperm(self._num_blocks(case), generator=generator, device="cpu").int().tolist()
        for i, length in enumerate(lengths):
            for page in range(-(-length // case.block_size)):
                tensors["block_table"][i, page] = order.pop()
            slots = self._slots(case, tensors, i)
            rows = attnfuzz.numbers((length, 1, case.rank + case.rope_size), seed=case.seed, name=f"kv{i}")
            rows = -rows.abs() if case.scores == "negative" else rows
            if case.latents == "same":
                tensors["kv_cache"][slots] = rows.to(tensors["q"].dtype)
                continue
            stored = torch.zeros(
                (length, 1, latent_row_size(case.rank, case.rope_size)), dtype=torch.uint8, device="cpu"
            )
            latents, scales, ropes = parts_of_latents(stored, case.rank, tensors["q"].dtype)
            latents.copy_(rows[..., : case.rank])
            drawn = torch.randint(-4, 3, scales.shape, generator=generator, dtype=torch.int32, device="cpu")
            if case.latent_scaling == "any":
                fractions = torch.rand(scales.shape, generator=generator, dtype=torch.float32, device="cpu")
                drawn = drawn + fractions
            scales.copy_(torch.exp2(drawn.float()))
            ropes.copy_(rows[..., case.rank :])
            if case.latents == "fp8_rows":
                tensors["kv_cache"][slots] = stored
                continue
            tensors["latent_cache"].view(torch.uint8)[slots] = latents.view(torch.uint8)  # no indexed store of float8
            tensors["latent_scales"][slots] = scales[:, 0]
            tensors["rope_cache"][slots] = ropes

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """Row by row, of the keys that it sees."""
        keys = []
        for i, new in enumerate(self._new(case)):
            slots = self._slots(case, tensors, i)
            if case.latents == "fp8":
                latents = tensors["latent_cache"].view(torch.uint8)[slots].view(torch.float8_e4m3fn)
                rows = latent_rows(latents, tensors["latent_scales"][slots][:, None], tensors["rope_cache"][slots])
            else:
                rows = tensors["kv_cache"][slots]
            if case.latents == "fp8_rows":
                rows = latent_rows(*parts_of_latents(rows, case.rank, tensors["q"].dtype))
            context = getattr(case, "limits", case.contexts)[i]
            keys += [rows[: max(0, context + t + 1)] if case.causal else rows for t in range(new)]
        first = getattr(case, "first_value", 0)
        values = [rows[..., first : first + case.rank] for rows in keys]
        scale = getattr(case, "scale", (case.rank + case.rope_size) ** -0.5)
        rounds = case.latents != "same" and case.latent_scaling == "any"
        found = attnfuzz.attention(
            tensors["q"], keys, values, scale=scale, dtype=case.dtype, num_partials=_MOST_PARTIALS,
            numerics=_DEQUANTISED if rounds else None, smallest_kv=_SMALLEST if rounds else None,
        )  # fmt: skip
        return found if case.lse else {"out": found["out"]}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Mistakes about what new tokens see, and about the parts of a row."""
        rope = torch.arange(tensors["q"].shape[-1], device="cpu") >= case.rank
        found: dict[str, dict[str, Any]] = {
            "scores leave out the rotary part": {"q": tensors["q"].masked_fill(rope, 0)},
            "the scale is that of the rank": {"scale": case.rank**-0.5},
            "values are the last numbers of a row": {"first_value": case.rope_size},
        }
        if not case.causal:
            return found | {"a new token does not see those after it": {"causal": True}}
        lengths = [context + int(case.query_len) for context in case.contexts]
        limits = {
            "the mask is that of new tokens at the start of a sequence": [0] * len(case.contexts),
            "a new token does not see itself": [context - 1 for context in case.contexts],
            "a new token sees the one after it": [context + 1 for context in case.contexts],
            "new tokens are masked as if each sequence had query_len of them": [
                length - 2 * int(case.query_len) + new for length, new in zip(lengths, self._new(case), strict=True)
            ],
        }
        found |= {words: {"limits": of_sequences} for words, of_sequences in limits.items()}
        return found | {"a new token sees those after it": {"causal": False}}

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """Which new token of which sequence it is, of a result."""
        if name not in ("out", "lse"):
            return ""
        first = 0
        for i, new in enumerate(self._new(case)):
            if index[0] < first + new:
                return f"new token {index[0] - first} of sequence {i}, which has {case.contexts[i]} before them"
            first += new
        return ""

    @staticmethod
    def _new(case: Any) -> list[int]:
        """New tokens of each sequence."""
        counts = [int(case.query_len)] * len(case.contexts)
        if case.ragged:
            counts[-1] = max(1, counts[-1] - 1)
        return counts

    def _lengths(self, case: Any) -> list[int]:
        return [context + new for context, new in zip(case.contexts, self._new(case), strict=True)]

    def _num_blocks(self, case: Any) -> int:
        return sum(-(-length // int(case.block_size)) for length in self._lengths(case)) + int(case.spare_blocks)

    def _slots(self, case: Any, tensors: Mapping[str, Tensor], sequence: int) -> Tensor:
        """The slots of all tokens of a sequence, in their order."""
        positions = torch.arange(self._lengths(case)[sequence], dtype=torch.int64, device="cpu")
        pages = tensors["block_table"][sequence].long()[positions // case.block_size]
        return pages * int(case.block_size) + positions % int(case.block_size)
