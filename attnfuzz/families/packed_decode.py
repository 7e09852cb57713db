"""Decode over a paged cache of 4 or 8 bits with scales for each token and head (`attnfuzz.families.formats`).

What is in a cache has so few bits that its numbers are exact in float16 and bfloat16: a kernel rounds none as it reads.
Where K and V are stored rotated, the query is rotated before and the result after, and either may be rounded then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, TensorSpec
from attnfuzz.families.formats import FORMATS, PackedFormat, rotation

_ROTATED = attnfuzz.Numerics(query="scaled")
"""A rotated query is rounded to the dtype of q, as one times the scale is."""
_SUM_ERROR = 2.0**-20
"""Of a sum of up to 256 numbers in float32, against the sum of their sizes."""
_AXES = ("page", "offset", "head", "byte")


class PackedDecode(attnfuzz.PagedProblem):
    """``cache_format``: see `FORMATS`. ``k_cache`` and ``v_cache`` hold bytes, ``k_scales [pages, block_size,
    num_kv_heads, blocks]`` and ``v_scales`` their scales; ``k_zeros`` and ``v_zeros``, without blocks, the zero points
    of int4; ``k_global`` and ``v_global [1]`` the scale of a whole tensor of NVFP4. Where a format
    is rotated, K and V times `attnfuzz.families.formats.rotation` are stored.
    """

    head_size = Choice((32, 64, 128))
    layout = Choice(("NHD",))
    cache_format = Choice(("int4", "nvfp4", "mxfp4", "fp8", "int8", "int4_rotated"))

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """K and V alike."""
        form = FORMATS[case.cache_format]
        heads = (len(case.lengths), case.num_kv_heads * case.gqa_ratio, case.head_size)
        q, out = (TensorSpec(heads, case.dtype, role, axes=("seq", "head", "dim")) for role in ("input", "output"))
        found = {"q": q, **self.cache(case), "out": out}
        slots = found["k_cache"].shape[:3]
        for name in ("k", "v"):
            of_slots: Any = {"named_by": "block_table", "strides": case.cache_strides}
            packed = TensorSpec((*slots, case.head_size // form.numbers_in_one), form.dtype, axes=_AXES, **of_slots)
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
                            if form.zeros_in_scales:
                                new = (new.view(torch.int32) | drawn(16, *shape)).view(torch.float32)
                        else:
                            new = drawn(256 if what == "cache" else 16, *shape).to(torch.uint8)
                            if what == "cache" and form.dtype == "float8_e4m3fn":
                                new = torch.where(new & 127 == 127, 0, new)  # NaN
                        _bytes(into)[places] = _bytes(new).view(_bytes(into).dtype)

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """An empty sequence gives 0."""
        k, v = ([self._numbers(case, tensors, name, seq) for seq in range(len(case.lengths))] for name in ("k", "v"))
        q, scale, form = tensors["q"].double(), case.head_size**-0.5, FORMATS[case.cache_format]
        turn = rotation(case.head_size) if form.is_rotated else None
        if turn is not None:
            scale = scale / float(turn[0].square().sum())
            back = getattr(case, "back", turn).mT / turn[0].square().sum()
            q = q @ getattr(case, "turn", turn)
        numerics = _ROTATED if form.is_rotated else None
        found = attnfuzz.attention(q, k, v, scale=scale, dtype=case.dtype, numerics=numerics)["out"]
        out, bound = found.value, cast("Tensor", found.bound) + self._scaled_weights(case, tensors, v)
        if form.has_zeros or form.zeros_in_scales:
            bound = bound + self._folded_zeros(case, tensors, q * scale, k, v)
        if form.is_rotated:
            bound = (bound + _SUM_ERROR * out.abs()) @ back.abs()
            out = out @ back
            bound = bound + attnfuzz.rounding(out.abs() + bound, case.dtype)
        return {"out": Expected(out, found.where, bound)}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Codes, zero points and scales that are read by other rules, of K and V alike."""
        form = FORMATS[case.cache_format]

        def both(what: str, changed: Any) -> dict[str, Tensor]:
            return {name: changed(tensors[name]) for name in (f"k_{what}", f"v_{what}")}

        found: dict[str, dict[str, Any]] = {}
        if form.values or form.has_zeros or form.zeros_in_scales:
            found["the lower halves of all bytes are taken for the first half of a head"] = both(
                "cache", lambda one: form.packed(torch.cat((one & 15, one >> 4), -1))
            )
        if form.has_zeros:
            found["zero points are taken to be 8"] = both("zeros", lambda one: torch.full_like(one, 8))
        if form.zeros_in_scales:
            found["zero points are read without their highest bit"] = both(
                "scales", lambda one: (one.contiguous().view(torch.int32) & ~8).view(torch.float32)
            )
        if form.is_rotated:
            turn = rotation(case.head_size)
            for words, other in (
                ("the rotation's first row is taken for each of its rows", turn[:1].expand_as(turn)),
                ("the rotation is taken back without its random signs", turn * turn[:, :1]),
                ("the rotation is taken back by its transpose", turn.mT),
            ):
                found[words] = {"turn": other, "back": other}
            found["V is not rotated back"] = {"back": torch.eye(case.head_size, dtype=turn.dtype, device="cpu")}
            found["queries are not rotated as K is"] = {
                "turn": torch.eye(case.head_size, dtype=turn.dtype, device="cpu")
            }
        if form.scale_dtype == "uint8":
            found["exponents of scales are taken to have a bias of 128"] = both("scales", lambda one: one - 1)
        if form.block:
            codes = torch.tensor([*range(16)], dtype=torch.uint8, device="cpu")
            codes[[1, 9]] -= 1
            found["the smallest number, which is subnormal, is read as 0"] = both(
                "cache", lambda one: form.packed(codes[form.codes(one).int()])
            )
            if tensors["k_scales"].shape[1] % 4 == tensors["k_scales"].shape[3] % 4 == 0:
                for names in (("k",), ("v",), ("k", "v")):
                    read = {f"{name}_scales": _in_squares(tensors[f"{name}_scales"]) for name in names}
                    found[f"{' and '.join(read)} are read in squares of four tokens and four blocks"] = read
        if case.cache_format == "int8":
            found["int8 is read as uint8"] = both("cache", lambda one: one.contiguous().view(torch.uint8))
        return found

    def _scaled_weights(self, case: Any, tensors: Mapping[str, Tensor], v: Sequence[Tensor]) -> Tensor:
        """The error of what is lost below the smallest number of q's dtype, where scales of V are multiplied into the
        weights.

        The largest weight is 1 before they are divided by their sum, which is 1 at least.
        """
        form, found = FORMATS[case.cache_format], torch.zeros(tensors["out"].shape, dtype=torch.float64, device="cpu")
        if form.block:
            return found
        for seq, numbers in enumerate(v):
            scales = form.scale(tensors["v_scales"][self.places(case, tensors, seq)])
            found[seq] = (numbers / scales).abs().sum(0).repeat_interleave(case.gqa_ratio, 0)
        return found * float(attnfuzz.rounding(torch.zeros((), dtype=torch.float64, device="cpu"), case.dtype))

    def _folded_zeros(
        self, case: Any, tensors: Mapping[str, Tensor], q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor]
    ) -> Tensor:
        """The error of float32 where codes and zero points are summed apart, as vLLM's kernel does: one from the other.

        The two sums cancel, and each is as large as a code and its zero point are; ``q`` is scaled.
        """
        found = torch.zeros(tensors["out"].shape, dtype=torch.float64, device="cpu")
        for seq, parts in enumerate(zip(k, v, strict=True)):
            heads = [one.repeat_interleave(case.gqa_ratio, 1).transpose(0, 1) for one in parts]
            sizes = [
                (one.abs() + 2 * self._zeros(case, tensors, name, seq)).repeat_interleave(case.gqa_ratio, 1)
                for name, one in zip(("k", "v"), parts, strict=True)
            ]
            k_sizes, v_sizes = (one.transpose(0, 1) for one in sizes)
            weights = (heads[0] @ q[seq][..., None])[..., 0].softmax(-1)[:, None]
            shifted = weights * _SUM_ERROR * (k_sizes @ q[seq].abs()[..., None]).mT
            out = (weights @ heads[1]).abs()
            lost = shifted @ heads[1].abs() + shifted.sum(-1, keepdim=True) * out + _SUM_ERROR * weights @ v_sizes
            found[seq] = lost[:, 0]
        return found

    def _zeros(self, case: Any, tensors: Mapping[str, Tensor], name: str, seq: int) -> Tensor:
        """The numbers that zero points stand for, ``[length, num_kv_heads, 1]``."""
        nothing = dict(tensors) | {f"{name}_cache": torch.zeros_like(tensors[f"{name}_cache"])}
        return self._numbers(case, nothing, name, seq)[..., :1].abs()

    def _numbers(self, case: Any, tensors: Mapping[str, Tensor], name: str, seq: int) -> Tensor:
        places = self.places(case, tensors, seq)
        scales = tensors[f"{name}_scales"]
        stored = _bytes(scales)[places].view(scales.dtype)
        zeros = tensors[f"{name}_zeros"][places] if f"{name}_zeros" in tensors else None
        packed = _bytes(tensors[f"{name}_cache"])[places].view(tensors[f"{name}_cache"].dtype)
        return FORMATS[case.cache_format].read(packed, stored, zeros, tensors.get(f"{name}_global"))


def _in_squares(scales: Tensor) -> Tensor:
    """The scales that are read where they lie as tensor cores read them: of four tokens and four blocks, the block goes
    first."""
    pages, size, heads, blocks = scales.shape
    squares = _bytes(scales).view(pages, size // 4, 4, heads, blocks // 4, 4)
    return squares.transpose(2, 5).reshape(scales.shape).view(scales.dtype)


def _scales(form: PackedFormat, exponents: Tensor, fractions: Tensor) -> Tensor:
    """Between 1/8 and 2; of a format without fractions, powers of two."""
    if form.scale_dtype == "uint8":
        return (exponents + 124).to(torch.uint8)
    numbers = torch.exp2(exponents.float() - 3) * (1 + fractions.float() / 4)
    return numbers.to(getattr(torch, form.scale_dtype))


def _bytes(tensor: Tensor) -> Tensor:
    """torch has no indexed loads and stores of float8."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
