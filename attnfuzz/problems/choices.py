"""The values that a kernel's ``Supports`` leaves for each field of a case, simplest first. Torch-free.

Strategies draw from these sequences and the minimiser walks down them, so both mean the same by "simplest".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from attnfuzz.problems.attention import packed_width
from attnfuzz.problems.masks import MASK_KINDS, MaskKind
from attnfuzz.problems.module import Problem, module_of
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_SCALE_TENSORS, KvDtype
from attnfuzz.problems.recipes import STRIDE_KINDS, LseKind, Padding, StrideKind
from attnfuzz.problems.shapes import last_dim_contiguous
from attnfuzz.problems.supports import (
    DTYPES,
    EMPTY_STATE_LSES,
    LAYOUTS,
    MAX_HEADS,
    Dtype,
    Layout,
    OptionValue,
    Strides,
    Supports,
)
from attnfuzz.problems.variants import VARIANT_TENSORS, VARIANTS, VariantName

HEAD_SIZES = (16, 13, 40, 64, 72, 80, 96, 128, 192, 256)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 3, 5, 7, 12, 17, 24, 48, 80, 100, 144)
GQA_RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24)
LARGE_HEAD_SIZES = (512, 576, 1024)
LARGE_BLOCK_SIZES = (272, 528)
LARGE_GQA_RATIOS = (32, 64, 71, 128)
"""Of models: DeepSeek's latent heads and 128 query heads on one, Falcon's 71 on one, pages of hybrid Mamba models."""
KV_HEADS = (1, 2, 3, 4, 5, 7, 8, 16)
NUM_SPLITS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32)

CACHE_TENSORS: tuple[tuple[str, ...], ...] = (("k", "v"), ("k_cache", "v_cache"), ("kv_cache",))
"""Names of K and V by problem; of what holds both, where V is a part of K."""

_VECTORS = frozenset({"seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks", *KV_SCALE_TENSORS})
_MATRICES = frozenset({"block_table", "lse", "prefix_lse", "suffix_lse", "output_lse"})
_GAPPED_BY_ENGINES = frozenset({"q", "out", "k", "v", "k_cache", "v_cache", "kv_cache"})
"""What is a part of a larger tensor: of a fused projection, of a cache for all layers, of a buffer for more tokens.
Partial and merged results are buffers of an engine's own."""
_PADDINGS: dict[str, tuple[Padding, ...]] = {
    "zero": ("zero",),
    "valid": ("zero", "wrong_page"),
    "garbage": ("zero", "wrong_page", "garbage"),
}
_RETURNED_LSE = frozenset({"lse", "partial_lse", "output_lse"})


def is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


def head_size_rank(head_size: int) -> tuple[int, bool]:
    """Ascending, except that up to 16 a power of two precedes the odd sizes that a kernel would pad to it."""
    padded = 1 << (head_size - 1).bit_length()
    return (padded if head_size <= 16 else head_size, not is_power_of_two(head_size))


def block_size_rank(block_size: int) -> tuple[bool, int]:
    """Powers of two first."""
    return (not is_power_of_two(block_size), block_size)


def default_scale(head_size: int) -> float:
    """``1/sqrt(head_size)`` as a float32 holds it."""
    return float(struct.unpack("f", struct.pack("f", 1.0 / math.sqrt(head_size)))[0])


def _values(supports: Supports, name: str, declared: tuple[Any, ...] | None, usual: tuple[Any, ...] = ()) -> set[Any]:
    """The values that some combination of ``where`` leaves of the field ``name``, of which ``declared`` may occur.

    Where any value may (None), those that ``where`` names are drawn, and ``usual`` ones where it names none.
    """
    drawn = usual if declared is None else declared
    found: set[Any] = set()
    for combination in supports.combinations or ({},):
        named = combination.get(name)
        if named is None:
            found.update(drawn)
        else:
            found.update(value for value in named if declared is None or value in declared)
    return found


def _usual(supports: Supports, sizes: tuple[int, ...], large: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes, *large) if supports.large_sizes else sizes


def _named(supports: Supports, name: str) -> set[Any] | None:
    """The values of ``name`` in all combinations; None if one of them, or no table, leaves that open."""
    found = [combination.get(name) for combination in supports.combinations]
    return None if not found or None in found else {value for values in found for value in values or ()}


def offers(choices: tuple[OptionValue, ...], value: object) -> bool:
    """Membership that tells True from 1 and 1 from 1.0, as keyword arguments do."""
    return any(type(choice) is type(value) and choice == value for choice in choices)


def options_of(
    supports: Supports, options: Mapping[str, tuple[OptionValue, ...]]
) -> dict[str, tuple[OptionValue, ...]]:
    """The choices of ``options`` that some combination of ``where`` permits."""
    tables = supports.combinations or ({},)
    return {
        name: tuple(one for one in choices if any(name not in table or offers(table[name], one) for table in tables))
        for name, choices in options.items()
    }


def dtypes_of(supports: Supports) -> tuple[Dtype, ...]:
    found = _values(supports, "dtype", supports.dtypes)
    return tuple(dtype for dtype in DTYPES if dtype in found)


def layouts_of(supports: Supports) -> tuple[Layout, ...]:
    found = _values(supports, "layout", supports.layouts)
    return tuple(layout for layout in LAYOUTS if layout in found)


def head_sizes_of(supports: Supports, dtype: Dtype | KvDtype, layout: Layout | None = None) -> tuple[int, ...]:
    """Empty if the packed layout can hold none of the supported sizes. ``layout=None``: no cache, hence no packing.

    ``dtype``: of the cache. In the interleaved layout heads of V have K's size, which must be supported for them too.
    """
    width = packed_width(dtype) if layout == "packed" else 1
    usual = _usual(supports, HEAD_SIZES, LARGE_HEAD_SIZES)
    sizes = {size for size in _values(supports, "head_size", supports.head_sizes, usual) if size % width == 0}
    if layout == "interleaved" and isinstance(supports.v_head_sizes, tuple):
        sizes &= set(supports.v_head_sizes)
    of_values = _named(supports, "v_head_size")
    if of_values is not None and (layout == "interleaved" or supports.v_head_sizes == "equal"):
        sizes &= of_values
    return tuple(sorted(sizes, key=head_size_rank))


def v_head_sizes_of(supports: Supports, head_size: int, layout: Layout | None = None) -> tuple[int, ...]:
    """Sizes of V's heads beside ``head_size``, one of ``head_sizes_of``: that itself first, where it is supported."""
    if supports.v_head_sizes == "equal" or layout == "interleaved":
        return (head_size,)
    declared = supports.v_head_sizes if isinstance(supports.v_head_sizes, tuple) else None
    sizes = _values(supports, "v_head_size", declared, (head_size, *HEAD_SIZES))
    return tuple(sorted(sizes, key=lambda size: (size != head_size, head_size_rank(size))))


def block_sizes_of(supports: Supports) -> tuple[int, ...]:
    usual = _usual(supports, BLOCK_SIZES, LARGE_BLOCK_SIZES)
    return tuple(sorted(_values(supports, "block_size", supports.block_sizes, usual), key=block_size_rank))


def gqa_ratios_of(supports: Supports) -> tuple[int, ...]:
    usual = _usual(supports, GQA_RATIOS, LARGE_GQA_RATIOS)
    return tuple(sorted(_values(supports, "gqa_ratio", supports.gqa_ratios, usual)))


def head_counts_of(supports: Supports) -> tuple[tuple[int, int], ...] | None:
    """Numbers of query and KV heads that ``where`` leaves, the fewest first; None if it does not name them."""
    if not any({"num_q_heads", "num_kv_heads"} & one.keys() for one in supports.combinations):
        return None
    found: set[tuple[int, int]] = set()
    for one in supports.combinations:
        own: Any = one.get("num_q_heads", ())
        of_kv: Any = one.get("num_kv_heads", range(1, max(own) + 1) if own else KV_HEADS)
        for num_kv_heads in of_kv:
            counts = own or tuple(ratio * num_kv_heads for ratio in gqa_ratios_of(supports))
            found |= {(count, num_kv_heads) for count in counts if _are_heads(supports, one, count, num_kv_heads)}
    return tuple(sorted(found, key=lambda heads: (heads[1], heads[0])))


def merge_heads_of(supports: Supports) -> tuple[int, ...] | None:
    """Numbers of heads of merge_states that ``where`` leaves; None if it does not name them."""
    named = _named(supports, "num_q_heads")
    return None if named is None else tuple(sorted(named))


def _are_heads(supports: Supports, combination: Mapping[str, Any], num_q_heads: int, num_kv_heads: int) -> bool:
    ratio, rest = divmod(num_q_heads, num_kv_heads)
    permitted = (supports.gqa_ratios, combination.get("gqa_ratio"))
    return 0 < num_q_heads <= MAX_HEADS and not rest and all(one is None or ratio in one for one in permitted)


def split_counts_of(supports: Supports) -> tuple[int, ...]:
    most = supports.max_num_splits
    usual = NUM_SPLITS if most is None else (*(count for count in NUM_SPLITS if count < most), most)
    found = _values(supports, "num_splits", None, usual)
    return tuple(sorted(count for count in found if most is None or count <= most))


def min_seq_len(supports: Supports) -> int:
    return 0 if supports.empty_sequences else 1


def paddings_of(supports: Supports) -> tuple[Padding, ...]:
    return _PADDINGS[supports.unused_table_entries]


def variants_of(problem: Problem, supports: Supports) -> tuple[VariantName, ...]:
    """Variants that a case of ``problem`` may ask for."""
    names = () if isinstance(problem, OpenProblem) else module_of(problem).case_type.variant_names
    tables = supports.combinations or ({},)
    permitted = (name for name in supports.variants if any(True in one.get(name, (True,)) for one in tables))
    return tuple(name for name in permitted if name in names)


def needed_variants(supports: Supports) -> tuple[VariantName, ...]:
    """Variants that a case must ask for to fit any combination."""
    tables = supports.combinations or ({},)
    return tuple(name for name in VARIANTS if all(one.get(name) == (True,) for one in tables))


def masks_of(supports: Supports) -> tuple[MaskKind, ...]:
    """The simplest first."""
    return tuple(kind for kind in MASK_KINDS if kind in supports.masks)


def kv_dtypes_of(problem: Problem, supports: Supports) -> tuple[KvDtype, ...]:
    """8-bit formats that the cache of a case of ``problem`` may have: none where no scales go with it."""
    if isinstance(problem, OpenProblem):
        return ()
    has_cache = set(KV_SCALE_TENSORS) <= set(module_of(problem).case_type.tensor_names)
    found = _values(supports, "kv_dtype", supports.kv_dtypes)
    return tuple(dtype for dtype in KV_DTYPES if dtype in found) if has_cache else ()


def caches_of(problem: Problem, supports: Supports, dtype: Dtype) -> tuple[KvDtype | None, ...]:
    """Formats of the cache of a case whose q has ``dtype``; None for a plain one, which ``where`` may exclude."""
    named = _named(supports, "kv_dtype")
    plain: tuple[None, ...] = (None,) if named is None or dtype in named else ()
    return (*plain, *kv_dtypes_of(problem, supports))


def lse_kinds_of(supports: Supports) -> tuple[LseKind, ...]:
    """Kinds of input LSE; an infinite one stands for a state without keys."""
    empty: tuple[str, ...] = supports.empty_state_lse if supports.empty_sequences else ()
    return tuple(kind for kind in get_args(LseKind) if kind not in EMPTY_STATE_LSES or kind in empty)


def without_lse(problem: Problem, supports: Supports) -> Supports:
    """``supports`` of a kernel whose output alone is looked at; partial states need their LSE, to be merged by."""
    return supports if problem == "split_decode" else msgspec.structs.replace(supports, lse="none")


def strided_tensors_of(problem: Problem, supports: Supports, layout: Layout | None = None) -> tuple[str, ...]:
    """Tensors whose strides matter to the kernel: an LSE that it never writes is left out, as is one of two views.

    Of a variant that it supports the tensors are named, although only some cases have them; so are scales of a cache.
    """
    unused = set(_RETURNED_LSE if supports.lse == "none" else ())
    unused |= {name for name, variant in VARIANT_TENSORS.items() if variant not in variants_of(problem, supports)}
    unused |= set(() if kv_dtypes_of(problem, supports) else KV_SCALE_TENSORS)
    names = () if isinstance(problem, OpenProblem) else module_of(problem).case_type.tensor_names
    return tuple(name for name in names if name not in unused and not (layout == "interleaved" and name == "v_cache"))


def stride_kinds_of(allowed: Strides, tensor: str) -> tuple[StrideKind, ...]:
    """Kinds that change how ``tensor`` lies in memory and that ``Supports(strides=allowed)`` permits."""
    if tensor in _VECTORS:
        kinds: tuple[StrideKind, ...] = ("contiguous", "offset", "every_other")
    elif tensor in _MATRICES:  # whose rows padded ones move apart as well
        kinds = tuple(kind for kind in STRIDE_KINDS if kind != "outer_gap")
    else:
        kinds = STRIDE_KINDS
    shape = (2, 2) if tensor in _MATRICES else (2, 2, 2)
    return tuple(kind for kind in kinds if permits_stride(allowed, tensor, kind, shape))


def permits_stride(allowed: Strides, tensor: str, kind: StrideKind, shape: tuple[int, ...]) -> bool:
    """Whether ``Supports(strides=allowed)`` permits that ``tensor``, of ``shape``, lies in memory as ``kind`` says."""
    if allowed == "any" or kind == "contiguous":
        return True
    if allowed == "last_contiguous":
        return last_dim_contiguous(shape, kind)
    return lies_as_served(allowed) and kind == "outer_gap" and permits_gap(allowed, tensor, 0, len(shape))


def lies_as_served(allowed: Strides) -> bool:
    """Whether ``Supports(strides=allowed)`` names what engines hand over, which kinds of strides do not tell."""
    return allowed in ("hybrid", "serving")


def lying_alike(allowed: Strides, tensor: str) -> tuple[str, ...]:
    """``tensor``, with the one that has the same strides wherever ``Supports(strides=allowed)`` holds.

    Most engines make K and V alike, or as parts of one tensor, and kernels take one set of strides for both.
    """
    own = (tensor,)
    return next((pair for pair in CACHE_TENSORS if tensor in pair), own) if allowed == "serving" else own


def permits_gap(allowed: Strides, tensor: str, axis: int, dims: int) -> bool:
    """Whether entries along ``axis`` of ``tensor``, which has so many dimensions, may be further apart than need be."""
    if lies_as_served(allowed):
        return axis == 0 and tensor in _GAPPED_BY_ENGINES
    return allowed == "any" or (allowed == "last_contiguous" and axis < dims - 1)
