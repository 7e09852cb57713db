"""Decode over a cache of 4 bits that another kernel has written: `--compose WRITER+READER` searches the two as one.

``k_cache`` and ``v_cache`` hold the tokens as the writer gets them; in which bytes the two agree, nobody looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, TensorSpec
from attnfuzz.families.formats import FORMATS
from attnfuzz.numerics.rounded import Rounded, exactly


class WrittenDecode(attnfuzz.PagedProblem):
    """``cache_format``: in which the tokens are written and read. ``k_global`` and ``v_global [1]``: of NVFP4."""

    head_size = Choice((32, 64, 128))
    layout = Choice(("NHD",))
    cache_format = Choice(("int4", "nvfp4"))

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """Tokens in pages, which are not what a reader gets."""
        heads = (len(case.lengths), case.num_kv_heads * case.gqa_ratio, case.head_size)
        q, out = (TensorSpec(heads, case.dtype, role, axes=("seq", "head", "dim")) for role in ("input", "output"))
        of_all = dict.fromkeys(("k_global", "v_global"), TensorSpec((1,), "float32"))
        return {"q": q, **self.cache(case), **(of_all if FORMATS[case.cache_format].has_global else {}), "out": out}

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """V's scale is another one than K's."""
        tensors["q"].copy_(attnfuzz.numbers(tuple(tensors["q"].shape), seed=case.seed, name="q"))
        self.write_cache(case, tensors)
        for name, number in (("k_global", 0.03), ("v_global", 0.01)):
            if name in tensors:
                tensors[name].fill_(number)

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """Over the numbers that a right writer stores. Where it may round a near thing either way, results may differ.

        Scores that are each off by at most d change no weight by more than the factor exp(2 d).
        """
        form, scale = FORMATS[case.cache_format], case.head_size**-0.5
        k, v = (
            [form.write(exactly(rows), tensors.get(f"{name}_global")).numbers.rounded() for rows in of_seqs]
            for name, of_seqs in zip("kv", self.cached(case, tensors), strict=True)
        )
        of_rows: tuple[list[Tensor], list[Tensor]] = [one.value for one in k], [one.value for one in v]
        found = attnfuzz.attention(tensors["q"], *of_rows, scale=scale, dtype=case.dtype)["out"]
        pairs = zip(tensors["q"].double() * scale, k, v, strict=True)
        off = torch.stack([_off(q, keys, values, case.gqa_ratio) for q, keys, values in pairs])
        bound = torch.as_tensor(found.bound, dtype=torch.float64, device="cpu") + off * (
            1 + 2.0**-6
        )  # it is rounded as well
        return {"out": Expected(found.value, found.where, bound)}


def _off(q: Tensor, k: Rounded, v: Rounded, group: int) -> Tensor:
    """How far the output of a sequence may be off ``[num_q_heads, head_size]``."""
    if not len(k.value):
        return torch.zeros_like(q)
    keys, key_errors, values, value_errors = (part.repeat_interleave(group, dim=1) for part in (*k, *v))
    weights = torch.einsum("hd,thd->ht", q, keys).softmax(-1)
    factor = torch.exp(2 * torch.einsum("hd,thd->ht", q.abs(), key_errors).amax(-1))[:, None]
    sizes, errors = (torch.einsum("ht,thd->hd", weights, part) for part in (values.abs(), value_errors))
    return (factor - 1) * sizes + factor * errors
