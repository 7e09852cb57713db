"""Argument checks shared by the wrappers: each failure names the value, the rule and the remedy.

Kinds and axes of every tensor that the wrappers take and return stand here, by the names of their arguments.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "value": _FLOATS,  # all tensors of this kind have one dtype
    "cache": (*_FLOATS, *FLOAT8),  # likewise, and it is that of the values unless it has 8 bits
    "partial": _FLOATS,
    "lse": (torch.float32,),
    "per head": (torch.float32,),
    "scale": (torch.float32,),
    "index": (torch.int32, torch.int64),
    "mask": (torch.bool,),
}
MOST_PROGRAMS = 65535
"""CUDA's limit of a grid's second and third dimension."""
_NUM_WARPS = (1, 2, 4, 8, 16, 32)

Specs = Mapping[str, tuple[str, str]]
"""For each tensor its kind (a key of ``_DTYPES``) and its axes: ``("value", "num_seqs num_q_heads head_size")``."""

DENSE: Specs = {
    "q": ("value", "num_seqs num_q_heads head_size"),
    "k": ("value", "num_seqs max_seq_len num_kv_heads head_size"),
    "v": ("value", "num_seqs max_seq_len num_kv_heads v_head_size"),
    "seq_lens": ("index", "num_seqs"),
    "out": ("value", "num_seqs num_q_heads v_head_size"),
    "lse": ("lse", "num_seqs num_q_heads"),
}

_PAGED_COMMON: Specs = {
    "q": ("value", "num_seqs num_q_heads head_size"),
    "block_table": ("index", "num_seqs max_blocks_per_seq"),
    "seq_lens": ("index", "num_seqs"),
    "alibi_slopes": ("per head", "num_q_heads"),
    "sinks": ("per head", "num_q_heads"),
    "k_scale": ("scale", "num_kv_scales"),
    "v_scale": ("scale", "num_kv_scales"),
    "out": ("value", "num_seqs num_q_heads v_head_size"),
    "lse": ("lse", "num_seqs num_q_heads"),
    "partial_out": ("partial", "num_seqs num_q_heads num_splits v_head_size"),
    "partial_lse": ("lse", "num_seqs num_q_heads num_splits"),
}
_NHD_K = ("cache", "num_blocks block_size num_kv_heads head_size")
_NHD_V = ("cache", "num_blocks block_size num_kv_heads v_head_size")
_HND_K = ("cache", "num_blocks num_kv_heads block_size head_size")
_HND_V = ("cache", "num_blocks num_kv_heads block_size v_head_size")
_PACKED_K = ("cache", "num_blocks num_kv_heads head_chunks block_size x")
_PACKED_V = ("cache", "num_blocks num_kv_heads v_head_size block_size")

PAGED: dict[str, Specs] = {
    "NHD": {**_PAGED_COMMON, "k_cache": _NHD_K, "v_cache": _NHD_V},
    "HND": {**_PAGED_COMMON, "k_cache": _HND_K, "v_cache": _HND_V},
    "packed": {**_PAGED_COMMON, "k_cache": _PACKED_K, "v_cache": _PACKED_V},
    "interleaved": {**_PAGED_COMMON, "k_cache": _NHD_K, "v_cache": _NHD_K},
}
"""By layout."""

_QUERIES: Specs = {
    "q": ("value", "num_tokens num_q_heads head_size"),
    "cu_seqlens_q": ("index", "num_seqs_plus_1"),
    "mask_indptr": ("index", "num_seqs_plus_1"),
    "mask": ("mask", "mask_size"),
    "out": ("value", "num_tokens num_q_heads v_head_size"),
    "lse": ("lse", "num_tokens num_q_heads"),
}

ATTENTION: dict[str, Specs] = {layout: {**specs, **_QUERIES} for layout, specs in PAGED.items()}
"""Several query tokens per sequence, by layout."""

LATENT: Specs = {
    "q": ("value", "num_seqs num_q_heads head_size"),
    "kv_cache": ("value", "num_blocks block_size head_size"),
    "block_table": ("index", "num_seqs max_blocks_per_seq"),
    "seq_lens": ("index", "num_seqs"),
    "out": ("value", "num_seqs num_q_heads v_head_size"),
    "lse": ("lse", "num_seqs num_q_heads"),
}
"""A cache whose rows are keys, and in their first numbers values."""

REDUCE: Specs = {
    "partial_out": ("partial", "num_seqs num_q_heads num_splits head_size"),
    "partial_lse": ("lse", "num_seqs num_q_heads num_splits"),
    "sinks": ("per head", "num_q_heads"),
    "out": ("value", "num_seqs num_q_heads head_size"),
    "lse": ("lse", "num_seqs num_q_heads"),
}

_STATES: Specs = dict.fromkeys(
    ("prefix_output", "suffix_output", "output"), ("value", "num_tokens num_q_heads head_size")
)
_LSES = ("prefix_lse", "suffix_lse", "output_lse")

MERGE: dict[str, Specs] = {
    "HT": {**_STATES, **dict.fromkeys(_LSES, ("lse", "num_q_heads num_tokens"))},
    "TH": {**_STATES, **dict.fromkeys(_LSES, ("lse", "num_tokens num_q_heads"))},
}
"""By the axis order of the LSEs."""

_MANY: Specs = {
    "outputs": ("value", "num_states num_tokens num_q_heads head_size"),
    "output": ("value", "num_tokens num_q_heads head_size"),
}

MERGE_MANY: dict[str, Specs] = {
    "HT": {
        **_MANY,
        "lses": ("lse", "num_states num_q_heads num_tokens"),
        "output_lse": ("lse", "num_q_heads num_tokens"),
    },
    "TH": {
        **_MANY,
        "lses": ("lse", "num_states num_tokens num_q_heads"),
        "output_lse": ("lse", "num_tokens num_q_heads"),
    },
}
"""By the axis order of the LSEs."""

_PASSED: dict[Hashable, tuple[Specs, dict[str, int]]] = {}
"""Calls that have passed, with their sizes: a model repeats its calls, and the host must keep up with a GPU."""
_MOST_PASSED = 4096


def check_tensors(tensors: Mapping[str, Tensor], specs: Specs) -> dict[str, int]:
    """Check shapes, dtypes and devices against ``specs``; returns the size of every named axis. Raises ValueError."""
    facts = id(specs), *[(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()]
    passed = _PASSED.get(facts)
    if passed is not None and passed[0] is specs:
        return dict(passed[1])
    sizes = _check_all(tensors, specs)
    if len(_PASSED) >= _MOST_PASSED:
        _PASSED.clear()
    _PASSED[facts] = specs, sizes
    return dict(sizes)


def _check_all(tensors: Mapping[str, Tensor], specs: Specs) -> dict[str, int]:
    sizes = _bind_axes(tensors, specs)
    _check_same("device", tensors)
    has_float8 = any(specs[name][0] == "cache" and tensor.dtype in FLOAT8 for name, tensor in tensors.items())
    for alike in ({"value"}, {"cache"}) if has_float8 else ({"value", "cache"},):
        _check_same("dtype", {name: tensor for name, tensor in tensors.items() if specs[name][0] in alike})
    for name, tensor in tensors.items():
        allowed = _DTYPES[specs[name][0]]
        if tensor.dtype not in allowed:
            choices = " or ".join(map(str, allowed))
            raise ValueError(f"{name}.dtype={tensor.dtype} must be {choices}; convert it with {name}.to()")
    return sizes


def _bind_axes(tensors: Mapping[str, Tensor], specs: Specs) -> dict[str, int]:
    """Sizes of the axes; the first tensor that has an axis fixes its size."""
    sizes: dict[str, int] = {}
    givers: dict[str, str] = {}
    for name, tensor in tensors.items():
        axes, shape = specs[name][1].split(), list(tensor.shape)
        rule = f"{name}.shape={shape} must be [{', '.join(axes)}]"
        if len(shape) != len(axes):
            raise ValueError(f"{rule}; reshape {name}")
        for axis, size in zip(axes, shape, strict=True):
            giver = givers.setdefault(axis, name)
            if sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{rule} with {axis}={sizes[axis]} as {giver} has it, not {size}; "
                    f"pass the {name} that belongs to this {giver}"
                )
    return sizes


def _check_same(what: str, tensors: Mapping[str, Tensor]) -> None:
    first, reference = next(iter(tensors.items()))
    expected = getattr(reference, what)
    for name, tensor in tensors.items():
        value = getattr(tensor, what)
        if value != expected:
            raise ValueError(f"{name}.{what}={value} must be {expected}, that of {first}; convert it with {name}.to()")


def check_choice(name: str, value: str, choices: Mapping[str, object]) -> None:
    """Raise ValueError unless ``value`` is a key of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {tuple(choices)}; name the one that the tensors have")


def check_grid(name: str, value: int, remedy: str) -> None:
    """Raise ValueError unless ``value`` programs fit into the second or third dimension of CUDA's grid."""
    if value > MOST_PROGRAMS:
        raise ValueError(f"{name}={value} must be at most {MOST_PROGRAMS}, as a dimension of a grid; {remedy}")


def check_positive(name: str, value: int) -> None:
    """Raise ValueError unless ``value`` is an integer of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1; use 1 if in doubt")


def check_power_of_two(name: str, value: int) -> None:
    """Raise ValueError unless ``value`` is a power of two."""
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ValueError(f"{name}={value!r} must be a power of two, as Triton's block sizes are; choose 16, 32 or 64")


def check_launch(num_warps: int, num_stages: int) -> dict[str, int]:
    """Both by the names that a launch takes. Raises ValueError for what cannot be launched."""
    if not isinstance(num_warps, int) or num_warps not in _NUM_WARPS:
        raise ValueError(f"num_warps={num_warps!r} must be one of {_NUM_WARPS}, as GPUs launch them; use 4 if in doubt")
    check_positive("num_stages", num_stages)
    return {"num_warps": num_warps, "num_stages": num_stages}


def group_size_of(num_q_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head; raises ValueError unless it is a whole number."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads={num_q_heads} must be a multiple of num_kv_heads={num_kv_heads}, since each KV head serves "
            "equally many query heads; pad or drop query heads"
        )
    return num_q_heads // num_kv_heads
