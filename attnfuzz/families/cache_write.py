"""Writing new tokens into a paged KV cache, rotated and quantised or not: vLLM's ``reshape_and_cache_flash``.

Token i of ``key`` and ``value`` goes into slot ``slot_mapping[i]``: page ``slot // block_size``, place
``slot % block_size``. A slot of -1 stands for a padding token of a captured graph, which is written nowhere. Every byte
of the caches that no slot names stays as it is.

vLLM's writers launch a program for each token and tile, in no order: where two tokens have one slot, nothing says which
is kept, or that what is kept is of one token. Engines repeat a slot for prompts that begin alike, with equal tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Seed, TensorSpec
from attnfuzz.families.formats import FORMATS, LEAST_SCALE, SCALE_ERROR, Between, rotation
from attnfuzz.numerics.rounded import Rounded, exactly

_FORMATS = {"fp8": "float8_e4m3fn", "fp8_token": "float8_e4m3fn", "int8_token": "int8"}
_PACKED = {"int4_token": FORMATS["int4"], "int4_rotated": FORMATS["int4"], "nvfp4": FORMATS["nvfp4"]}
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
_POSITIONS = 64
_SUM_ERROR = 2.0**-20
"""Of a sum of up to 256 numbers in float32, against the sum of their sizes."""
_LOW_BITS = 2.0**-19
"""Of a float32 of which the lowest 4 bits hold a zero point."""


class CacheWrite(attnfuzz.Problem):
    """``cache``: "same", as the new tokens are; "fp8", divided by a scale for each tensor, which the kernel is given;
    "fp8_token" and "int8_token", by one for each token and head, ``max |x| / 448`` or ``/ 127``, which it works out and
    stores in ``k_scales`` and ``v_scales``; "int4_token" and "nvfp4", two codes in a byte, as
    `attnfuzz.families.formats` has them, with scales in these two, for each 16 numbers of "nvfp4", and zero points of
    "int4_token" in ``k_zeros`` and ``v_zeros``; "int4_rotated", as the first of these, of ``x @ rotation`` in the dtype
    of x; "nvfp4" is given ``k_global`` and ``v_global``.

    ``rotary``: of a kernel that rotates K, ``Choice(("none", "neox", "gptj"))``: pairs are halves of what is rotated,
    or neighbours. Token i is at ``positions[i]``, whose row of ``cos_sin``, float32, has the cosines of all pairs, then
    their sines. ``rotated``: how much of a head; the rest stays. K may be rounded to its dtype once it is rotated.

    ``repeats``: whether slots are named by several tokens, equal ones ("same"). Of a kernel that keeps a whole row of
    one of them, whichever, ``Choice(("none", "same", "other"))``, and its file imports `one_token_is_kept`.

    ``strides``: of the new tokens, which may be parts of q, k and v side by side. ``cache_strides``: of the caches,
    which may share pages with other layers. ``zeros``: the first token is 0. ``one_sided``: all numbers of the second
    token, times `rotation` if they are to be, lie on one side of 0.
    """

    num_tokens = Integer(1, 24)
    skipped = Integer(0, 3)
    num_kv_heads = Choice((1, 2, 3, 8))
    head_size = Choice((16, 64, 80, 128))
    block_size = Choice((1, 5, 16))
    spare_blocks = Integer(0, 2)
    layout = Choice(("NHD", "HND"))
    cache = Choice(("same", "fp8", "fp8_token", "int8_token", "int4_token", "nvfp4", "int4_rotated"))
    rotary = Choice(("none",))
    rotated = Choice(("whole", "half"))
    repeats = Choice(("none", "same"))
    strides = Choice(("contiguous", "outer_gap"))
    cache_strides = Choice(("contiguous", "outer_gap"))
    zeros = Choice((False, True))
    one_sided = Choice((False, True))
    dtype = Choice(("float16", "bfloat16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """Caches ``[blocks, block_size, num_kv_heads, head_size]``, or with places and heads exchanged."""
        rows, heads = case.num_tokens + case.skipped, case.num_kv_heads
        blocks = -(-case.num_tokens // case.block_size) + case.spare_blocks
        new = TensorSpec((rows, heads, case.head_size), case.dtype, "input", case.strides, ("token", "head", "dim"))
        if case.layout == "NHD":
            shape, axes = (blocks, case.block_size, heads, case.head_size), ("block", "offset", "head", "dim")
        else:
            shape, axes = (blocks, heads, case.block_size, case.head_size), ("block", "head", "offset", "dim")
        of_slots: Any = {"named_by": "slot_mapping", "places": case.block_size}
        form = _PACKED.get(case.cache)
        dtype = "uint8" if form else _FORMATS.get(case.cache, case.dtype)
        row = (case.head_size // 2,) if form else shape[3:]
        cache = TensorSpec((*shape[:3], *row), dtype, "in_place", case.cache_strides, axes, **of_slots)
        found = {"key": new, "value": new, "k_cache": cache, "v_cache": cache}
        found["slot_mapping"] = TensorSpec((rows,), "int64")
        if case.rotary != "none":
            found["positions"] = TensorSpec((rows,), "int64")
            found["cos_sin"] = TensorSpec((_POSITIONS, _rotated_size(case)), "float32", axes=("position", "number"))
        one = TensorSpec((1,), "float32")
        if case.cache == "fp8":
            found |= dict.fromkeys(("k_scale", "v_scale"), one)
        elif case.cache != "same":
            scales = TensorSpec(shape[:3], "float32", "in_place", axes=axes[:3], **of_slots)
            if form and form.block:
                blocks = (*shape[:3], case.head_size // form.block)
                scales = scales._replace(shape=blocks, dtype=form.scale_dtype, axes=(*axes[:3], "scale"))
            found |= dict.fromkeys(("k_scales", "v_scales"), scales)
            found |= dict.fromkeys(
                ("k_zeros", "v_zeros") if form and form.has_zeros else (), scales._replace(dtype="uint8")
            )
            found |= dict.fromkeys(("k_global", "v_global") if form and form.has_global else (), one)
        return found

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Slots in any order; of each four tokens, three have one if slots are repeated. Positions are no slots."""
        generator = torch.Generator("cpu").manual_seed(case.seed)
        for name in ("key", "value"):
            tensors[name].copy_(attnfuzz.numbers(tuple(tensors[name].shape), seed=case.seed, name=name))
            if case.one_sided:
                second = tensors[name][min(1, len(tensors[name]) - 1)]
                new = 0.5 + second.double().abs()
                if case.cache == "int4_rotated":
                    turn = rotation(case.head_size)
                    new = new @ turn.mT / turn[0].square().sum()
                second.copy_(new)
            if case.zeros:
                tensors[name][0] = 0
        slots = tensors["k_cache"].shape[0] * case.block_size
        order = torch.randperm(slots, generator=generator, device="cpu", dtype=torch.int64)[: case.num_tokens]
        rows = len(tensors["slot_mapping"])
        places = torch.randperm(rows, generator=generator, device="cpu", dtype=torch.int64)[: case.num_tokens]
        tensors["slot_mapping"].fill_(-1)
        tensors["slot_mapping"][places] = order
        if case.rotary != "none":
            drawn = torch.randint(0, _POSITIONS, (rows,), generator=generator, dtype=torch.int64, device="cpu")
            tensors["positions"].copy_(drawn)
            pairs = _rotated_size(case) // 2
            frequency = 10.0 ** -(4 * torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs)
            angle = torch.arange(_POSITIONS, dtype=torch.float64, device="cpu")[:, None] * frequency
            tensors["cos_sin"].copy_(torch.cat((angle.cos(), angle.sin()), dim=1))
        for i, place in enumerate(places.tolist() if case.repeats != "none" else ()):
            first = places[i - i % 4]
            if i % 4 in (1, 2):
                tensors["slot_mapping"][place] = tensors["slot_mapping"][first]
                for name in ("key", "value", "positions") if case.repeats == "same" else ():
                    if name in tensors:
                        tensors[name][place] = tensors[name][first]
        for name, number in (("k_scale", 0.03), ("v_scale", 0.5), ("k_global", 0.03), ("v_global", 0.01)):
            if name in tensors:
                tensors[name].fill_(number)

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """The right cache; for quantised numbers, those before they are rounded, and as their bound that rounding.

        Of tokens that share a slot, all numbers between theirs: `one_token_is_kept` tells the ones from the others.
        """
        return {name: _scattered(case, tensors, name, new) for name, new in _by_token(case, tensors).items()}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Mistakes about slots that are none, scales, and the rotation by positions."""
        found: dict[str, dict[str, Any]] = {}
        slots, last = tensors["slot_mapping"], len(tensors["k_cache"]) * case.block_size - 1
        if bool((slots < 0).any()):
            words = "a token whose slot is -1 is written into the last slot of the cache"
            found[words] = {"slot_mapping": torch.where(slots < 0, last, slots)}
            counted = ((slots >= 0).cumsum(0) - 1).clamp(min=0)
            for which, names in {"K": ("key",), "V": ("value",), "K and V": ("key", "value")}.items():
                words = f"tokens of {which} are counted without those whose slot is -1"
                found[words] = {name: tensors[name][counted] for name in names}
        if case.cache == "fp8":
            for which, names in {"K": ("k",), "V": ("v",), "K and V": ("k", "v")}.items():
                of, is_are = ("its scale", "is") if len(names) == 1 else ("their scales", "are")
                scales = {f"{name}_scale": tensors[f"{name}_scale"] for name in names}
                found[
                    f"{which} {is_are} multiplied with {of}, not divided by {'it' if len(names) == 1 else 'them'}"
                ] = {name: 1 / scale for name, scale in scales.items()}
                found[f"{which} {is_are} not divided by {of}"] = {
                    name: torch.ones_like(scale) for name, scale in scales.items()
                }
        if case.rotary != "none":
            table = tensors["cos_sin"]
            cos, sin = table.chunk(2, dim=-1)
            pairs = {"neox": "gptj", "gptj": "neox"}[case.rotary]
            of_pairs = {"neox": "halves", "gptj": "neighbours"}
            found |= {
                "K is rotated by its slot, not by its position": {"positions": slots.clamp(min=0) % len(table)},
                "K is rotated by the token's number, not by its position": {
                    "positions": torch.arange(len(slots), device="cpu") % len(table)
                },
                f"K is rotated in pairs of {of_pairs[pairs]}, not of {of_pairs[case.rotary]}": {"rotary": pairs},
                "K is not rotated": {"rotary": "none"},
                "K is rotated backwards": {"cos_sin": torch.cat((cos, -sin), -1)},
                "sines and cosines are exchanged": {"cos_sin": torch.cat((sin, cos), -1)},
            }
        return found

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """Which slot it is, of a cache."""
        if name not in ("k_cache", "v_cache", "k_scales", "v_scales", "k_zeros", "v_zeros"):
            return ""
        block, offset = index[0], index[1 if case.layout == "NHD" else 2]
        return f"slot {block * case.block_size + offset}"


@attnfuzz.oracle
def one_token_is_kept(run: Any) -> str | None:
    """Where several tokens have one slot, each head of K and of V holds what belongs to one of them, scales
    included."""
    case, tensors = run.case, vars(run.inputs)
    if getattr(case, "repeats", "") != "other":
        return None
    rows = _by_token(case, tensors)
    slots = tensors["slot_mapping"]
    for slot in slots[slots >= 0].unique().tolist():
        tokens = (slots == slot).nonzero().flatten()
        at = slot // case.block_size, slot % case.block_size
        for kind in ("k", "v") if len(tokens) > 1 else ():
            fits = torch.ones(len(tokens), case.num_kv_heads, dtype=torch.bool, device="cpu")
            for name, new in rows.items():
                if name[0] == kind:
                    result = run.results[name] if case.layout == "NHD" else run.results[name].transpose(1, 2)
                    off = (result.double()[at] - new.value[tokens]).abs() <= new.error[tokens]
                    fits &= off.flatten(2).all(-1) if off.dim() > 2 else off
            for head in (~fits.any(0)).nonzero().flatten().tolist():
                return f"slot {slot} of {kind}_cache, head {head}, holds a mixture of tokens {tokens.tolist()}"
    return None


def _rotated_size(case: Any) -> int:
    return int(case.head_size) // (1 if case.rotated == "whole" else 2)


def _rotated(case: Any, key: Rounded, tensors: Mapping[str, Tensor]) -> Rounded:
    """Pairs (x, y) become (x cos - y sin, y cos + x sin), and may be rounded then."""
    size, table = _rotated_size(case), tensors["cos_sin"][tensors["positions"]][:, None].double()
    cos, sin = exactly(table[..., : size // 2]), exactly(table[..., size // 2 :])

    is_halved = case.rotary == "neox"
    shape = (*key.value.shape[:2], *((2, size // 2) if is_halved else (size // 2, 2)))

    def part(number: Tensor, i: int) -> Tensor:
        return number[..., :size].reshape(shape).select(2 if is_halved else 3, i)

    def joined(x: Tensor, y: Tensor, whole: Tensor) -> Tensor:
        both = torch.cat((x, y), -1) if is_halved else torch.stack((x, y), -1).flatten(2)
        return torch.cat((both, whole[..., size:]), -1)

    x, y = (Rounded(part(key.value, i), part(key.error, i)) for i in range(2))
    x, y = ((x * cos) - (y * sin)).stored(case.dtype), ((y * cos) + (x * sin)).stored(case.dtype)
    return Rounded(joined(x.value, y.value, key.value), joined(x.error, y.error, key.error))


def _by_token(case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Rounded]:
    """The numbers of each token in each tensor that is written, ``[tokens, num_kv_heads, ...]``."""
    found: dict[str, Rounded] = {}
    for kind, name in (("k", "key"), ("v", "value")):
        new = exactly(tensors[name])
        if name == "key" and case.rotary != "none":
            new = _rotated(case, new, tensors)
        if form := _PACKED.get(case.cache):
            scale_error = SCALE_ERROR
            if case.cache == "int4_rotated":
                turn, scale_error = rotation(case.head_size), SCALE_ERROR + _LOW_BITS
                error = new.error @ turn.abs() + new.value.abs() @ turn.abs() * _SUM_ERROR
                new = Rounded(new.value @ turn, error).stored(case.dtype)
            written = form.write(new, tensors.get(f"{kind}_global"), scale_error)
            parts = {"cache": written.packed, "scales": written.scales, "zeros": written.zeros}
            found |= {f"{kind}_{what}": part.rounded() for what, part in parts.items() if part is not None}
            continue
        if case.cache != "same":
            format_ = _FORMATS[case.cache]
            if case.cache == "fp8":
                scales = tensors[f"{kind}_scale"].double().expand(new.value.shape[:2])
                off = torch.zeros_like(scales)
            else:
                scales, off = new.value.abs().amax(-1) / _LARGEST[format_], new.error.amax(-1) / _LARGEST[format_]
                loose = torch.where(scales < LEAST_SCALE, 2 * LEAST_SCALE, SCALE_ERROR * scales + off)
                found[f"{kind}_scales"] = Rounded(scales, loose)
            off = off[..., None]
            divisor = scales.clamp(min=LEAST_SCALE)[..., None]
            quotient = new.value / divisor
            error = (new.error + quotient.abs() * off) / (divisor - off)
            new = Rounded(quotient, error + attnfuzz.rounding(quotient.abs() + error, format_))
        found[f"{kind}_cache"] = new
    return found


def _scattered(case: Any, tensors: Mapping[str, Tensor], into: str, new: Rounded) -> Expected:
    """``new``, by token, at their slots."""
    shape = tuple(tensors[into].shape)
    turned = shape if case.layout == "NHD" else (shape[0], shape[2], shape[1], *shape[3:])
    slots = tensors["slot_mapping"]
    rows, is_written = turned[0] * turned[1], slots >= 0
    named = slots[is_written]
    low, high = (torch.zeros((rows, *turned[2:]), dtype=torch.float64, device="cpu") for _ in range(2))
    for limit, given, way in (
        (low, new.value - new.error, torch.minimum),
        (high, new.value + new.error, torch.maximum),
    ):
        limit[named] = given[is_written]
        for slot, row in zip(named, given[is_written], strict=True) if case.repeats == "other" else ():
            limit[slot] = way(limit[slot], row)
    where = torch.zeros(rows, dtype=torch.bool, device="cpu").index_fill_(0, named, True)
    value, bound = Between(low, high).rounded()
    found = (value, where.view(-1, *(1,) * (len(turned) - 2)).expand(low.shape), bound)
    laid = (part.reshape(turned) if case.layout == "NHD" else part.reshape(turned).transpose(1, 2) for part in found)
    return Expected(*(part.contiguous() for part in laid))
