"""The bundled kernels as attnfuzz knows them: what each declares, and how it is called on a problem's inputs.

All take any head size, page size, GQA ratio and, but for those called simple, any strides, never follow an unused
block-table entry, give empty sequences, splits and states their defined result. They multiply and add in float32
without matrix units, so nothing is rounded but results, and partial outputs where those are kept in the input dtype.
Those of ``q_block.launch`` and ``grouped.launch`` do use them: sums are truncated there, and weights rounded to the
input dtype.

The Triton kernels, but for those called simple, write into the results they are given. They compute each row alone; the
eager ones allocate their results, and those of attention pad rows to a common length, on which the order of additions
depends, and may wait for the device to take a number from the host. ``paged_attention_mixed`` asks the device what its
wrapper is told by a server. All others can be captured into a CUDA graph: the
host knows nothing of the lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.kernels import eager, eager_attention
from attnfuzz.kernels.dense import launch
from attnfuzz.kernels.grouped import launch as launch_grouped
from attnfuzz.kernels.latent import launch as launch_latent
from attnfuzz.kernels.masked import launch as launch_masked
from attnfuzz.kernels.merge import launch as launch_merge
from attnfuzz.kernels.paged import launch as launch_paged
from attnfuzz.kernels.paged import launch_attention, launch_partitioned
from attnfuzz.kernels.paged import paged_simple as simple
from attnfuzz.kernels.q_block import launch as launch_q_block
from attnfuzz.kernels.q_block import q_block_simple as simple_blocks

State = tuple[Tensor, Tensor]

_ROW_BY_ROW: dict[str, Any] = {"batch_invariant": True, "graph_replay": True}
_ANY_CACHE: dict[str, Any] = {
    "strides": "any",
    "v_head_sizes": "any",
    "unused_table_entries": "garbage",
    "variants": ("window", "soft_cap", "alibi", "sinks"),
    "kv_dtypes": ("float8_e4m3fn", "float8_e5m2"),
    "infinite_scores": True,
    "large_sizes": True,
}
_ANY_STATES: dict[str, Any] = {
    "strides": "any",
    "empty_state_outputs": "anything",
    "large_sizes": True,
    **_ROW_BY_ROW,
}
_STATES = attnfuzz.Supports(**_ANY_STATES)
_TOKENS_FIRST = attnfuzz.Supports(lse_layout="TH", **_ANY_STATES)
_ANY_DENSE: dict[str, Any] = {"strides": "any", "v_head_sizes": "any", "infinite_scores": True, "large_sizes": True}
_DENSE = attnfuzz.Supports(**_ANY_DENSE, **_ROW_BY_ROW)
_DENSE_PADDED = attnfuzz.Supports(**_ANY_DENSE)
_SIMPLE = attnfuzz.Supports(
    layouts=("NHD",),
    strides="contiguous",
    unused_table_entries="garbage",
    infinite_scores=True,
    large_sizes=True,
    **_ROW_BY_ROW,
)
_PAGED = attnfuzz.Supports(**_ANY_CACHE, **_ROW_BY_ROW)
_PAGED_ANY_MASK = attnfuzz.Supports(non_causal=True, **_ANY_CACHE, **_ROW_BY_ROW)
_PADDED_ANY_MASK = attnfuzz.Supports(non_causal=True, **_ANY_CACHE)
_UNDER_A_MASK: dict[str, Any] = _ANY_CACHE | {"variants": ("soft_cap", "sinks")}
# It could be captured, too, but no relation tries that under a mask: other lengths want a mask of another size.
_MASKED = attnfuzz.Supports(**_UNDER_A_MASK, batch_invariant=True)
_MASKED_PADDED = attnfuzz.Supports(**_UNDER_A_MASK)
_BY_SHAPE = attnfuzz.Supports(**_ANY_CACHE, graph_replay=True)
_PAGED_PADDED = attnfuzz.Supports(**_ANY_CACHE)
_PACKED = attnfuzz.Supports(layouts=("packed",), **_ANY_CACHE, **_ROW_BY_ROW)
_HALVES = attnfuzz.Supports(dtypes=("float16", "bfloat16"), **_ANY_CACHE, **_ROW_BY_ROW)
_HALVES_BY_SHAPE = attnfuzz.Supports(dtypes=("float16", "bfloat16"), **_ANY_CACHE, graph_replay=True)
_ANY_LATENT: dict[str, Any] = {
    "gqa_ratios": (1, 2, 3, 5, 8, 12, 16, 17, 24, 32, 40, 64, 128),
    "strides": "any",
    "unused_table_entries": "garbage",
    "infinite_scores": True,
}
_LATENT = attnfuzz.Supports(dtypes=("float16", "bfloat16"), variants=("soft_cap",), **_ANY_LATENT, **_ROW_BY_ROW)
_LATENT_BY_SHAPE = attnfuzz.Supports(
    dtypes=("float16", "bfloat16"), variants=("soft_cap",), **_ANY_LATENT, graph_replay=True
)
_LATENT_PADDED = attnfuzz.Supports(variants=("window", "soft_cap", "alibi", "sinks"), **_ANY_LATENT)
_FLOAT32 = attnfuzz.Numerics(probabilities="float32", partials="float32", matmul="ieee")
_MATRIX_UNITS = attnfuzz.Numerics(probabilities="input", row_sum="float32", partials="float32", matmul="tensor_core")
_SHORT_PARTIALS = attnfuzz.Numerics(probabilities="float32", partials="input", matmul="ieee")

_SPLITS = {"num_splits": (1, 2, 3, 8), "partials": ("float32", "input")}
# The sums of PagedAttention fill the registers: with large tiles and few warps it compiles for seconds.
_LANES = {"tile": (16, 32), "num_warps": (4, 8), "num_stages": (3, 1)}
_PARTITIONS = {"partition_size": (16, 40, 512, 12), "partials": ("float32", "input"), "num_combined": (4, 1, 2)}
_CACHE = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "scale", "block_size", "layout")
# What a launch takes by default comes first. One warp is left out: with a large tile it compiles for seconds.
_NUM_WARPS = {"num_warps": (4, 2, 8)}
_BLOCKS = {"block_elements": (4096, 16, 256), "block_tokens": (4, 1, 8), **_NUM_WARPS}
_TILED = {"tile": (16, 32, 64), **_NUM_WARPS, "num_stages": (3, 1)}
_GROUPED = {
    "num_splits": (3, 1, 2, 5),
    "tile": (64, 16),
    **_NUM_WARPS,
    "num_stages": (3, 2, 1),
    "pdl": (True, False),
    "block_m": (64, 16),
    "num_combined": (64, 1, 2, 4),
    "last_combines": (False, True),
}
# Rows of a latent cache are long: more of them would not fit into a GPU's shared memory.
_LATENT_BLOCKS = {
    "num_splits": (3, 1, 2, 5),
    "tile": (32, 16, 64),
    "block_m": (16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 1),
}
# What a wrapper chooses if it is not told: little to draw, and `bench tune` may name others.
_CHOSEN = {"tile": ("auto",), "num_warps": ("auto",), "num_stages": ("auto",), "fill": ("auto",)}
# All that the wrapper would choose by the batch is given, so that a row does not depend on it.
_Q_BLOCKS = {"block_m": (16, 32, 64), **_TILED}


@attnfuzz.kernel("dense_decode", supports=_DENSE, options=_TILED, numerics=_FLOAT32)
def dense_naive(inputs: Any, **options: Any) -> State:
    """One program per sequence and query head."""
    return launch.dense_decode(
        inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale, out=inputs.out, lse=inputs.lse, **options
    )


@attnfuzz.kernel("dense_decode", supports=_DENSE_PADDED, numerics=_FLOAT32)
def dense_eager(inputs: Any) -> State:
    """A loop over sequences."""
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)


@attnfuzz.kernel("paged_decode", supports=_SIMPLE, numerics=_FLOAT32)
def paged_simple(inputs: Any) -> State:
    """The algorithm and nothing else, on contiguous tensors: the one to read first."""
    return simple.paged_simple(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, inputs.scale
    )


@attnfuzz.kernel("paged_decode", supports=_PAGED, options=_TILED, numerics=_FLOAT32)
def paged_naive(inputs: Any, **options: Any) -> State:
    """One program per sequence and query head, over any layout."""
    return launch_paged.paged_decode(**_paged(inputs), sinks=inputs.sinks, out=inputs.out, lse=inputs.lse, **options)


@attnfuzz.kernel("paged_decode", supports=_PAGED, options={**_SPLITS, **_TILED}, numerics=_SHORT_PARTIALS)
def paged_split_k(inputs: Any, *, num_splits: int, partials: str, **options: Any) -> State:
    """Splits of each sequence in parallel, then their reduction."""
    return launch_paged.split_paged_decode(
        **_paged(inputs),
        sinks=inputs.sinks,
        num_splits=num_splits,
        out=inputs.out,
        lse=inputs.lse,
        partial_dtype=partials,
        **options,
    )


# "one_per_sm" was called "seed": a saved case with a choice that is not offered takes the first.
@attnfuzz.kernel(
    "paged_decode",
    supports=_BY_SHAPE,
    options={"num_splits": ("one_per_sm", "device"), "num_sms": (132, 8), "partials": ("float32", "input"), **_TILED},
    numerics=_SHORT_PARTIALS,
)
def paged_split_k_auto(inputs: Any, *, partials: str, **options: Any) -> State:
    """`paged_split_k` with as many splits as its shapes and a device call for, which need not be the one that runs
    it."""
    return launch_paged.split_paged_decode(
        **_paged(inputs), sinks=inputs.sinks, out=inputs.out, lse=inputs.lse, partial_dtype=partials, **options
    )


@attnfuzz.kernel("paged_decode", supports=_HALVES, options=_GROUPED, numerics=_MATRIX_UNITS)
def paged_grouped(inputs: Any, *, last_combines: bool = False, **options: Any) -> State:
    """All query heads of a KV head in one program, splits in parallel, then their combination."""
    counters = torch.zeros(inputs.q.shape[:2], dtype=torch.int32, device=inputs.q.device) if last_combines else None
    out, lse = launch_grouped.grouped_decode(
        **_packed(inputs),
        **_variants(inputs),
        layout=inputs.layout,
        out=inputs.out,
        lse=inputs.lse,
        counters=counters,
        **options,
    )
    if counters is not None:  # others call again with the same ones: what is left in them would spoil that call
        out.masked_fill_(counters.any(), torch.nan)
    return out, lse


@attnfuzz.kernel(
    "paged_decode",
    supports=_HALVES_BY_SHAPE,
    options={**_CHOSEN, "pdl": ("auto",), "balanced": ("auto", True, False), "tuned": (True, False)},
    numerics=_MATRIX_UNITS,
)
def paged_grouped_auto(inputs: Any, **options: Any) -> State:
    """`paged_grouped` as the wrapper plans it, by the size of the batch and of the GPU."""
    return launch_grouped.grouped_decode(
        **_packed(inputs),
        **_variants(inputs),
        layout=inputs.layout,
        out=inputs.out,
        lse=inputs.lse,
        **_given(options),
    )


@attnfuzz.kernel("paged_decode", supports=_PACKED, options=_LANES, numerics=_FLOAT32)
def paged_attention_v1(inputs: Any, **options: Any) -> State:
    """The softmax of a whole sequence after all its scores, on the packed cache."""
    return launch_partitioned.paged_attention_v1(
        **_packed(inputs), **_variants(inputs), out=inputs.out, lse=inputs.lse, **options
    )


@attnfuzz.kernel("paged_decode", supports=_PACKED, options={**_PARTITIONS, **_LANES}, numerics=_SHORT_PARTIALS)
def paged_attention_v2(inputs: Any, *, partials: str, **options: Any) -> State:
    """`paged_attention_v1` in partitions of a fixed number of tokens, then their reduction."""
    return launch_partitioned.paged_attention_v2(
        **_packed(inputs),
        **_variants(inputs),
        out=inputs.out,
        lse=inputs.lse,
        partial_dtype=partials,
        **options,
    )


@attnfuzz.kernel("paged_decode", supports=_PAGED_PADDED, numerics=_FLOAT32)
def paged_eager(inputs: Any) -> State:
    """A loop over sequences that gathers their pages."""
    return eager.paged_decode(**_paged(inputs), sinks=inputs.sinks)


@attnfuzz.kernel("paged_decode", supports=_PAGED_PADDED, options=_SPLITS, numerics=_SHORT_PARTIALS)
def paged_split_k_eager(inputs: Any, *, num_splits: int, partials: str) -> State:
    """A loop over sequences and splits, then the reduction of all."""
    return eager.split_paged_decode(**_paged(inputs), sinks=inputs.sinks, num_splits=num_splits, partial_dtype=partials)


@attnfuzz.kernel("split_decode", supports=_PAGED, options=_TILED, numerics=_SHORT_PARTIALS)
def split_k_partials(inputs: Any, **options: Any) -> State:
    """The first stage of ``paged_split_k`` alone."""
    return launch_paged.split_decode(
        **_paged(inputs),
        num_splits=inputs.num_splits,
        partial_out=inputs.partial_out,
        partial_lse=inputs.partial_lse,
        **options,
    )


@attnfuzz.kernel("split_decode", supports=_PAGED_PADDED, numerics=_SHORT_PARTIALS)
def split_k_partials_eager(inputs: Any) -> State:
    """The first stage of ``paged_split_k_eager`` alone."""
    return eager.split_decode(**_paged(inputs), num_splits=inputs.num_splits)


@attnfuzz.kernel("merge_states", supports=_STATES, options=_NUM_WARPS, numerics=_FLOAT32)
def merge_states_triton(inputs: Any, **options: Any) -> State:
    """One program per token and head, LSEs with heads first."""
    return launch_merge.merge_states(**_states(inputs), output=inputs.output, output_lse=inputs.output_lse, **options)


@attnfuzz.kernel("merge_states", supports=_TOKENS_FIRST, options=_NUM_WARPS, numerics=_FLOAT32)
def merge_states_triton_th(inputs: Any, **options: Any) -> State:
    """`merge_states_triton` with tokens first."""
    return launch_merge.merge_states(
        **_states(inputs), lse_layout="TH", output=inputs.output, output_lse=inputs.output_lse, **options
    )


@attnfuzz.kernel("merge_states", supports=_STATES, options=_BLOCKS, numerics=_FLOAT32)
def merge_states_wide(inputs: Any, **options: Any) -> State:
    """One program for a block of tokens and heads, LSEs with heads first."""
    return launch_merge.merge_states_wide(
        **_states(inputs), output=inputs.output, output_lse=inputs.output_lse, **options
    )


@attnfuzz.kernel("merge_states", supports=_TOKENS_FIRST, options=_BLOCKS, numerics=_FLOAT32)
def merge_states_wide_th(inputs: Any, **options: Any) -> State:
    """`merge_states_wide` with tokens first."""
    return launch_merge.merge_states_wide(
        **_states(inputs), lse_layout="TH", output=inputs.output, output_lse=inputs.output_lse, **options
    )


@attnfuzz.kernel("merge_states", supports=_STATES, options=_BLOCKS, numerics=_FLOAT32)
def merge_states_in_place(inputs: Any, **options: Any) -> State:
    """The suffix merged into a copy of the prefix: inputs must not change, and in place they would."""
    output, lse = inputs.output.copy_(inputs.prefix_output), inputs.output_lse.copy_(inputs.prefix_lse)
    return launch_merge.merge_states_in_place(output, lse, inputs.suffix_output, inputs.suffix_lse, **options)


@attnfuzz.kernel(
    "merge_states",
    supports=_TOKENS_FIRST,
    options={"num_states": (2, 3, 5), "side_by_side": (False, True), **_BLOCKS},
    numerics=_FLOAT32,
)
def merge_many_th(inputs: Any, *, num_states: int, side_by_side: bool = False, **options: Any) -> State:
    """The merge of any number of states, of the prefix, empty ones that nothing was written to, and the suffix.

    They lie one after another in memory, or those of a token side by side.
    """
    num_tokens, *rest = inputs.prefix_output.shape
    shape = (num_tokens, num_states, *rest) if side_by_side else (num_states, num_tokens, *rest)
    outputs = torch.empty(shape, dtype=inputs.prefix_output.dtype, device=inputs.prefix_output.device)
    lses = torch.full(shape[:-1], -torch.inf, dtype=torch.float32, device=inputs.prefix_lse.device)
    if side_by_side:
        outputs, lses = outputs.transpose(0, 1), lses.transpose(0, 1)
    outputs[0], lses[0] = inputs.prefix_output, inputs.prefix_lse
    outputs[-1], lses[-1] = inputs.suffix_output, inputs.suffix_lse
    return launch_merge.merge_many(
        outputs, lses, lse_layout="TH", output=inputs.output, output_lse=inputs.output_lse, **options
    )


@attnfuzz.kernel("merge_states", supports=_STATES, numerics=_FLOAT32)
def merge_states_eager(inputs: Any) -> State:
    """All tokens and heads at once."""
    return eager.merge_states(**_states(inputs))


@attnfuzz.kernel("paged_attention", supports=_PAGED_ANY_MASK, options=_TILED, numerics=_FLOAT32)
def paged_attention_naive(inputs: Any, **options: Any) -> State:
    """One program per query token and query head."""
    return launch_attention.paged_attention(
        **_queries(inputs), **_variants(inputs), causal=inputs.causal, out=inputs.out, lse=inputs.lse, **options
    )


@attnfuzz.kernel("paged_attention", supports=_SIMPLE, numerics=_MATRIX_UNITS)
def paged_attention_simple(inputs: Any) -> State:
    """Q-Blocks and nothing else, on contiguous tensors: the one to read before ``paged_attention_q_block``."""
    return simple_blocks.q_block_simple(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        inputs.seq_lens,
        inputs.cu_seqlens_q,
        inputs.scale,
    )


@attnfuzz.kernel("paged_attention", supports=_PADDED_ANY_MASK, numerics=_FLOAT32)
def paged_attention_eager(inputs: Any) -> State:
    """Each query token as a row of a decode batch."""
    return eager_attention.paged_attention(**_queries(inputs), **_variants(inputs), causal=inputs.causal)


@attnfuzz.kernel("paged_attention", supports=_PAGED, options=_Q_BLOCKS, numerics=_MATRIX_UNITS)
def paged_attention_q_block(inputs: Any, **options: Any) -> State:
    """Query tokens times the query heads of a KV head in one program, which share each tile of K and V."""
    return _q_block(inputs, num_segments=1, **options)


@attnfuzz.kernel(
    "paged_attention",
    supports=_PAGED,
    options={"num_splits": (2, 3, 5), "num_combined": (64, 1, 2), **_Q_BLOCKS},
    numerics=_MATRIX_UNITS,
)
def paged_attention_segments(inputs: Any, *, num_splits: int, **options: Any) -> State:
    """`paged_attention_q_block` over segments of each sequence in parallel, then their reduction."""
    return _q_block(inputs, num_segments=num_splits, **options)


@attnfuzz.kernel(
    "paged_attention", supports=_PAGED, options={"num_splits": (1, 3), **_Q_BLOCKS}, numerics=_MATRIX_UNITS
)
def paged_attention_static(inputs: Any, *, num_splits: int, **options: Any) -> State:
    """`paged_attention_segments` by a fixed number of programs that share out the work on the device."""
    return _q_block(inputs, num_segments=num_splits, static_grid=True, **options)


@attnfuzz.kernel(
    "paged_attention",
    supports=_BY_SHAPE,
    options={"block_m": ("auto", 128), **_CHOSEN, "tuned": (True, False)},
    numerics=_MATRIX_UNITS,
)
def paged_attention_auto(inputs: Any, **options: Any) -> State:
    """`paged_attention_segments` with blocks, tiles and segments that the wrapper chooses by the GPU and the shapes of
    the batch."""
    return _q_block(inputs, **_given(options))


@attnfuzz.kernel("paged_attention", supports=_PAGED_PADDED, numerics=_MATRIX_UNITS)
def paged_attention_mixed(inputs: Any) -> State:
    """`paged_attention_auto` with the decodes that come first in a launch of their own; a server knows on its host how
    many."""
    has_one = inputs.cu_seqlens_q.diff() == 1
    return _q_block(inputs, num_decodes=int(has_one.long().cumprod(0).sum()))


@attnfuzz.kernel("masked_attention", supports=_MASKED, options=_TILED, numerics=_FLOAT32)
def masked_attention_naive(inputs: Any, **options: Any) -> State:
    """One program per query token and query head, which loads its row of the mask."""
    return launch_masked.masked_attention(**_masked(inputs), out=inputs.out, lse=inputs.lse, **options)


@attnfuzz.kernel("masked_attention", supports=_MASKED_PADDED, numerics=_FLOAT32)
def masked_attention_eager(inputs: Any) -> State:
    """Each query token as a row of a decode batch, less the keys that the mask hides."""
    return eager_attention.masked_attention(**_masked(inputs))


@attnfuzz.kernel("latent_decode", supports=_LATENT, options=_LATENT_BLOCKS, numerics=_MATRIX_UNITS)
def latent_grouped(inputs: Any, **options: Any) -> State:
    """A block of query heads in one program, which loads each latent vector once, as key and as value."""
    return launch_latent.latent_decode(**_latent(inputs), **options)


@attnfuzz.kernel(
    "latent_decode",
    supports=_LATENT_BY_SHAPE,
    options={**_CHOSEN, "balanced": ("auto", True, False)},
    numerics=_MATRIX_UNITS,
)
def latent_grouped_auto(inputs: Any, **options: Any) -> State:
    """`latent_grouped` as the wrapper plans it, by the size of the batch and of the GPU."""
    return launch_latent.latent_decode(**_latent(inputs), **_given(options))


@attnfuzz.kernel("latent_decode", supports=_LATENT_PADDED, numerics=_FLOAT32)
def latent_eager(inputs: Any) -> State:
    """``paged_eager`` on K and V that are views of one cache."""
    kv_cache = inputs.kv_cache[:, :, None]
    return eager.paged_decode(
        inputs.q,
        kv_cache,
        kv_cache[..., : inputs.v_head_size],
        inputs.block_table,
        inputs.seq_lens,
        inputs.scale,
        inputs.block_size,
        "NHD",
        window=inputs.window,
        soft_cap=inputs.soft_cap,
        alibi_slopes=inputs.alibi_slopes,
        sinks=inputs.sinks,
    )


def _latent(inputs: Any) -> dict[str, Any]:
    names = ("q", "kv_cache", "block_table", "seq_lens", "scale", "v_head_size", "out", "lse", "soft_cap")
    return {name: getattr(inputs, name) for name in names}


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value != "auto"}


def _q_block(inputs: Any, **options: Any) -> State:
    return launch_q_block.q_block_attention(
        **_queries(inputs), **_variants(inputs), out=inputs.out, lse=inputs.lse, **options
    )


def _queries(inputs: Any) -> dict[str, Any]:
    names = (*_CACHE, "cu_seqlens_q", "max_query_len", "max_seq_len")
    return {name: getattr(inputs, name) for name in names}


def _masked(inputs: Any) -> dict[str, Any]:
    names = (*_CACHE, "cu_seqlens_q", "mask", "mask_indptr", "soft_cap", "sinks", "k_scale", "v_scale")
    return {name: getattr(inputs, name) for name in names}


def _paged(inputs: Any) -> dict[str, Any]:
    return {
        name: getattr(inputs, name) for name in (*_CACHE, "window", "soft_cap", "alibi_slopes", "k_scale", "v_scale")
    }


def _variants(inputs: Any) -> dict[str, Any]:
    names = ("window", "soft_cap", "alibi_slopes", "sinks", "k_scale", "v_scale")
    return {name: getattr(inputs, name) for name in names}


def _packed(inputs: Any) -> dict[str, Any]:
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "scale", "block_size")
    return {name: getattr(inputs, name) for name in names}


def _states(inputs: Any) -> dict[str, Any]:
    names = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")
    return {name: getattr(inputs, name) for name in names}
