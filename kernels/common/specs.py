"""Kinds and axes of every tensor the wrappers take and return, by the names of their arguments."""

from __future__ import annotations

from attnfuzz.kernels.common.checks import Specs

__all__ = ["ATTENTION", "DENSE", "LATENT", "MERGE", "MERGE_MANY", "PAGED", "REDUCE"]

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
