"""The first step of every wrapper: allocate the results it was not given, and check all tensors. Raises ValueError.

On a paged cache that gives a ``PagedCall``, which has all that a kernel is launched with; otherwise the two results and
the size of every axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import (
    ATTENTION,
    DENSE,
    MERGE,
    MERGE_MANY,
    PAGED,
    REDUCE,
    Specs,
    check_choice,
    check_grid,
    check_positive,
    check_tensors,
    group_size_of,
)
from attnfuzz.kernels.common.layouts import CacheStrides, cache_strides, check_paged, size_of_values
from attnfuzz.kernels.common.variants import MaskedVariants, Variant, Variants, check_variant

_PARTIAL_DTYPES = {"float32": "one rounding less", "input": "half the traffic"}

Prepared = tuple[Tensor, Tensor, dict[str, int]]


def prepare_dense(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, out: Tensor | None, lse: Tensor | None
) -> Prepared:
    """Prepare a call of ``dense_decode``."""
    out, lse = _results_unless_given(out, lse, q, v.shape[-1] if v.dim() else 0)
    sizes = check_tensors({"q": q, "k": k, "v": v, "seq_lens": seq_lens, "out": out, "lse": lse}, DENSE)
    return out, lse, {**sizes, "group_size": group_size_of(sizes["num_q_heads"], sizes["num_kv_heads"])}


class PagedCall(NamedTuple):
    """A call on a paged cache, checked: what a kernel gets beside the tensors that the wrapper was given."""

    out: Tensor
    lse: Tensor
    variant: Variant
    sizes: dict[str, int]
    """Sizes of every axis, and ``group_size``: query heads per KV head."""
    strides: CacheStrides

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """Results that the wrapper returns."""
        return self.out, self.lse

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Head sizes of q and K, and of V."""
        return self.sizes["head_size"], self.sizes["v_head_size"]

    @property
    def constants(self) -> dict[str, int]:
        """``X`` of the layout, and both head sizes rounded up to powers of two, as a kernel's blocks are."""
        head_size, v_head_size = self.head_sizes
        block_d, block_dv = triton.next_power_of_2(head_size), triton.next_power_of_2(v_head_size)
        return {"X": self.strides.x, "BLOCK_D": block_d, "BLOCK_DV": block_dv}


def prepare_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    block_size: int,
    layout: str,
    out: Tensor | None,
    lse: Tensor | None,
    variants: Variants | MaskedVariants,
    cu_seqlens_q: Tensor | None = None,
    masks: Mapping[str, Tensor] = MappingProxyType({}),
) -> PagedCall:
    """Prepare ``paged_decode``; with ``cu_seqlens_q`` ``paged_attention``, with ``masks`` ``masked_attention``."""
    variant = Variant(**variants)
    check_variant(variant)
    v_head_size = size_of_values(v_cache, layout)
    out, lse = _results_unless_given(out, lse, q, v_head_size)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    tensors |= {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q}
    tensors |= variant.tensors | {**masks} | {"out": out, "lse": lse}
    sizes = check_paged(tensors, layout, block_size, PAGED if cu_seqlens_q is None else ATTENTION)
    if cu_seqlens_q is not None and sizes["num_seqs_plus_1"] != sizes["num_seqs"] + 1:
        raise ValueError(
            f"cu_seqlens_q.shape=[{sizes['num_seqs_plus_1']}] must be [num_seqs + 1] with num_seqs={sizes['num_seqs']} "
            "as block_table has it; pass the running total that begins with 0"
        )
    return PagedCall(out, lse, variant, sizes, cache_strides(k_cache, v_cache, layout))


def prepare_split(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    block_size: int,
    layout: str,
    num_splits: int,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    variants: Variants,
) -> PagedCall:
    """Prepare a call of ``split_decode``, whose results are those of splits."""
    variant = Variant(**variants)
    check_variant(variant)
    if variant.sinks is not None:
        raise ValueError("sinks are added once for a row, not for each split; pass them to reduce_splits")
    check_positive("num_splits", num_splits)
    check_grid("num_splits", num_splits, "use 64")
    shape = (*q.shape[:-1], num_splits)
    partial_out = _empty_unless_given(partial_out, (*shape, size_of_values(v_cache, layout)), q.dtype, q)
    partial_lse = _empty_unless_given(partial_lse, shape, torch.float32, q)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    tensors |= variant.tensors | {"partial_out": partial_out, "partial_lse": partial_lse}
    sizes = check_paged(tensors, layout, block_size)
    if sizes["num_splits"] != num_splits:
        raise ValueError(f"num_splits={num_splits} must be partial_out.shape[2]={sizes['num_splits']}; pass equal ones")
    return PagedCall(partial_out, partial_lse, variant, sizes, cache_strides(k_cache, v_cache, layout))


def empty_partials(q: Tensor, num_splits: int, dtype: str, v_head_size: int) -> Tensor:
    """Room for partial outputs ``[num_seqs, num_q_heads, num_splits, v_head_size]``, float32 or q's dtype ("input")."""
    check_choice("partial_dtype", dtype, _PARTIAL_DTYPES)
    check_positive("num_splits", num_splits)
    shape = (*q.shape[:-1], num_splits, v_head_size)
    return _empty_unless_given(None, shape, torch.float32 if dtype == "float32" else q.dtype, q)


def prepare_reduce(
    partial_out: Tensor, partial_lse: Tensor, out: Tensor | None, lse: Tensor | None, sinks: Tensor | None = None
) -> Prepared:
    """Prepare a call of ``reduce_splits``."""
    shape = partial_out.shape[:2]
    out = _empty_unless_given(out, (*shape, *partial_out.shape[-1:]), partial_out.dtype, partial_out)
    lse = _empty_unless_given(lse, shape, torch.float32, partial_out)
    tensors = {"partial_out": partial_out, "partial_lse": partial_lse, "out": out, "lse": lse}
    tensors |= {} if sinks is None else {"sinks": sinks}
    return out, lse, check_tensors(tensors, REDUCE)


Wanted = Tensor | Literal["new"] | None
"""A result to be written: a given tensor, a new one, or none."""

PreparedMerge = tuple[Tensor, Tensor | None, dict[str, int]]


def prepare_merge(
    inputs: dict[str, Tensor], lse_layout: str, output: Tensor | None, output_lse: Wanted
) -> PreparedMerge:
    """Prepare ``merge_states``; ``inputs`` are prefix_output, prefix_lse, suffix_output and suffix_lse."""
    check_choice("lse_layout", lse_layout, MERGE)
    prefix, lse = inputs["prefix_output"], inputs["prefix_lse"]
    return _prepare_merge(inputs, MERGE[lse_layout], output, prefix.shape, output_lse, lse.shape)


def prepare_merge_many(
    outputs: Tensor, lses: Tensor, lse_layout: str, output: Tensor | None, output_lse: Wanted
) -> PreparedMerge:
    """Prepare a call of ``merge_many``."""
    check_choice("lse_layout", lse_layout, MERGE_MANY)
    inputs = {"outputs": outputs, "lses": lses}
    return _prepare_merge(inputs, MERGE_MANY[lse_layout], output, outputs.shape[1:], output_lse, lses.shape[1:])


def _prepare_merge(
    inputs: Mapping[str, Tensor],
    specs: Specs,
    output: Tensor | None,
    shape: tuple[int, ...],
    output_lse: Wanted,
    lse_shape: tuple[int, ...],
) -> PreparedMerge:
    like = next(iter(inputs.values()))
    output = _empty_unless_given(output, shape, like.dtype, like)
    if isinstance(output_lse, str):
        if output_lse != "new":
            raise ValueError(f'output_lse={output_lse!r} must be a tensor, None for no LSE, or "new"; leave it out')
        output_lse = _empty_unless_given(None, lse_shape, torch.float32, like)
    results = {"output": output} if output_lse is None else {"output": output, "output_lse": output_lse}
    return output, output_lse, check_tensors({**inputs, **results}, specs)


def _results_unless_given(out: Tensor | None, lse: Tensor | None, q: Tensor, v_head_size: int) -> tuple[Tensor, Tensor]:
    rows = q.shape[:-1]
    return _empty_unless_given(out, (*rows, v_head_size), q.dtype, q), _empty_unless_given(lse, rows, torch.float32, q)


def _empty_unless_given(given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device) if given is None else given
