"""Decode over a paged cache of 4 bits: int4 with zero points, NVFP4 and MXFP4 (`attnfuzz.families.formats`).

What is in a cache has so few bits that its numbers are exact in float16 and bfloat16: a kernel rounds none as it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, TensorSpec
from attnfuzz.families.formats import FORMATS, PackedFormat

__all__ = ["PackedDecode"]

_AXES = ("page", "offset", "head", "byte")


class PackedDecode(attnfuzz.PagedProblem):
    """``cache``: the format. ``k_cache`` and ``v_cache`` hold bytes, ``k_scales [pages, block_size, num_kv_heads,
    blocks]`` and ``v_scales`` their scales; ``k_zeros`` and ``v_zeros``, without blocks, the zero points of int4;
    ``k_global`` and ``v_global [1]`` the scale of a whole tensor of NVFP4.
    """

    head_size = Choice((32, 64, 128))
    layout = Choice(("NHD",))
    cache_format = Choice(("int4", "nvfp4", "mxfp4"))

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """K and V alike."""
        form = FORMATS[case.cache_format]
        heads = (len(case.lengths), case.num_kv_heads * case.gqa_ratio, case.head_size)
        q, out = (TensorSpec(heads, case.dtype, role, axes=("seq", "head", "dim")) for role in ("input", "output"))
        found = {"q": q, **self.cache(case), "out": out}
        slots = found["k_cache"].shape[:3]
        for name in ("k", "v"):
            of_slots: Any = {"named_by": "block_table", "strides": case.cache_strides}
            packed = TensorSpec((*slots, case.head_size // 2), "uint8", axes=_AXES, **of_slots)
            blocks = case.head_size // form.block if form.block else 1
            scales = TensorSpec((*slots, blocks), form.scale_dtype, axes=(*_AXES[:3], "block"), **of_slots)
            found |= {f"{name}_cache": packed, f"{name}_scales": scales}
            if form.has_zeros:
                found[f"{name}_zeros"] = TensorSpec(slots, "uint8", axes=_AXES[:3], named_by="block_table")
            if form.has_global:
                found[f"{name}_global"] = TensorSpec((1,), "float32")
        return found

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Codes of all kinds, scales with up to four bits, and others of V than of K."""
        form = FORMATS[case.cache_format]
        tensors["q"].copy_(attnfuzz.numbers(tuple(tensors["q"].shape), seed=case.seed, name="q"))
        self.write_table(case, tensors)
        generator = torch.Generator("cpu").manual_seed(case.seed)

        def drawn(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=generator, dtype=torch.int32, device="cpu")

        for name in ("k", "v"):
            if form.has_global:
                tensors[f"{name}_global"].fill_(0.25 if name == "k" else 0.125)
            for seq, length in enumerate(case.lengths):
                places = self.places(case, tensors, seq)
                for what in ("cache", "scales", "zeros"):
                    if (into := tensors.get(f"{name}_{what}")) is not None:
                        shape = (length, *into.shape[2:])
                        if what == "scales":
                            new = _scales(form, drawn(4, *shape), drawn(4, *shape))
                        else:
                            new = drawn(256 if what == "cache" else 16, *shape).to(torch.uint8)
                        _bytes(into)[places] = _bytes(new)

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """An empty sequence gives 0."""
        k, v = ([self._numbers(case, tensors, name, seq) for seq in range(len(case.lengths))] for name in ("k", "v"))
        found = attnfuzz.attention(tensors["q"], k, v, scale=case.head_size**-0.5, dtype=case.dtype)
        return {"out": found["out"]}

    def _numbers(self, case: Any, tensors: Mapping[str, Tensor], name: str, seq: int) -> Tensor:
        places = self.places(case, tensors, seq)
        scales = tensors[f"{name}_scales"]
        stored = _bytes(scales)[places].view(scales.dtype)
        zeros = tensors[f"{name}_zeros"][places] if f"{name}_zeros" in tensors else None
        packed = tensors[f"{name}_cache"][places]
        return FORMATS[case.cache_format].read(packed, stored, zeros, tensors.get(f"{name}_global"))


def _scales(form: PackedFormat, exponents: Tensor, fractions: Tensor) -> Tensor:
    """Between 1/8 and 2; of a format without fractions, powers of two."""
    if form.scale_dtype == "uint8":
        return (exponents + 124).to(torch.uint8)
    numbers = torch.exp2(exponents.float() - 3) * (1 + fractions.float() / 4)
    return numbers.to(getattr(torch, form.scale_dtype))


def _bytes(tensor: Tensor) -> Tensor:
    """torch has no indexed loads and stores of float8."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
