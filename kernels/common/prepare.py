"""What every wrapper does first: allocate the results it was not given, and check all tensors.

Each function returns the two results and the size of every axis, and raises ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnfuzz.kernels.common.checks import check_choice, check_positive, check_tensors, group_size_of
from attnfuzz.kernels.common.layouts import check_paged, size_of_values
from attnfuzz.kernels.common.specs import ATTENTION, DENSE, MERGE, MERGE_MANY, REDUCE

__all__ = [
    "empty_partials",
    "prepare_attention",
    "prepare_dense",
    "prepare_merge",
    "prepare_merge_many",
    "prepare_paged",
    "prepare_reduce",
    "prepare_split",
]

_PARTIAL_DTYPES = {"float32": "one rounding less", "input": "half the traffic"}

Prepared = tuple[Tensor, Tensor, dict[str, int]]


def prepare_dense(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, out: Tensor | None, lse: Tensor | None
) -> Prepared:
    """Of ``dense_decode``."""
    out, lse = _results_unless_given(out, lse, q, v.shape[-1] if v.dim() else 0)
    sizes = check_tensors({"q": q, "k": k, "v": v, "seq_lens": seq_lens, "out": out, "lse": lse}, DENSE)
    return out, lse, {**sizes, "group_size": group_size_of(sizes["num_q_heads"], sizes["num_kv_heads"])}


def prepare_paged(
    inputs: dict[str, Tensor], layout: str, block_size: int, out: Tensor | None, lse: Tensor | None
) -> Prepared:
    """Of ``paged_decode``; ``inputs`` are q, k_cache, v_cache, block_table and seq_lens."""
    q = inputs["q"]
    out, lse = _results_unless_given(out, lse, q, size_of_values(inputs["v_cache"], layout))
    return out, lse, check_paged({**inputs, "out": out, "lse": lse}, layout, block_size)


def prepare_attention(
    inputs: dict[str, Tensor], layout: str, block_size: int, out: Tensor | None, lse: Tensor | None
) -> Prepared:
    """Of ``paged_attention``; ``inputs`` are q, k_cache, v_cache, block_table, seq_lens and cu_seqlens_q."""
    q = inputs["q"]
    out, lse = _results_unless_given(out, lse, q, size_of_values(inputs["v_cache"], layout))
    sizes = check_paged({**inputs, "out": out, "lse": lse}, layout, block_size, ATTENTION)
    if sizes["num_seqs_plus_1"] != sizes["num_seqs"] + 1:
        raise ValueError(
            f"cu_seqlens_q.shape=[{sizes['num_seqs_plus_1']}] must be [num_seqs + 1] with num_seqs={sizes['num_seqs']} "
            "as block_table has it; pass the running total that begins with 0"
        )
    return out, lse, sizes


def prepare_split(
    inputs: dict[str, Tensor],
    layout: str,
    block_size: int,
    num_splits: int,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
) -> Prepared:
    """Of ``split_decode``."""
    check_positive("num_splits", num_splits)
    q = inputs["q"]
    shape = (*q.shape[:-1], num_splits)
    partial_out = _empty_unless_given(partial_out, (*shape, size_of_values(inputs["v_cache"], layout)), q.dtype, q)
    partial_lse = _empty_unless_given(partial_lse, shape, torch.float32, q)
    sizes = check_paged({**inputs, "partial_out": partial_out, "partial_lse": partial_lse}, layout, block_size)
    if sizes["num_splits"] != num_splits:
        raise ValueError(f"num_splits={num_splits} must be partial_out.shape[2]={sizes['num_splits']}; pass equal ones")
    return partial_out, partial_lse, sizes


def empty_partials(q: Tensor, num_splits: int, dtype: str, v_head_size: int) -> Tensor:
    """Room for partial outputs ``[num_seqs, num_q_heads, num_splits, v_head_size]``, float32 or q's dtype ("input")."""
    check_choice("partial_dtype", dtype, _PARTIAL_DTYPES)
    check_positive("num_splits", num_splits)
    shape = (*q.shape[:-1], num_splits, v_head_size)
    return _empty_unless_given(None, shape, torch.float32 if dtype == "float32" else q.dtype, q)


def prepare_reduce(
    partial_out: Tensor, partial_lse: Tensor, out: Tensor | None, lse: Tensor | None, sinks: Tensor | None = None
) -> Prepared:
    """Of ``reduce_splits``."""
    shape = partial_out.shape[:2]
    out = _empty_unless_given(out, (*shape, *partial_out.shape[-1:]), partial_out.dtype, partial_out)
    lse = _empty_unless_given(lse, shape, torch.float32, partial_out)
    tensors = {"partial_out": partial_out, "partial_lse": partial_lse, "out": out, "lse": lse}
    tensors |= {} if sinks is None else {"sinks": sinks}
    return out, lse, check_tensors(tensors, REDUCE)


def prepare_merge(
    inputs: dict[str, Tensor], lse_layout: str, output: Tensor | None, output_lse: Tensor | None
) -> Prepared:
    """Of ``merge_states``; ``inputs`` are prefix_output, prefix_lse, suffix_output and suffix_lse."""
    check_choice("lse_layout", lse_layout, MERGE)
    prefix, lse = inputs["prefix_output"], inputs["prefix_lse"]
    output = _empty_unless_given(output, prefix.shape, prefix.dtype, prefix)
    output_lse = _empty_unless_given(output_lse, lse.shape, torch.float32, lse)
    sizes = check_tensors({**inputs, "output": output, "output_lse": output_lse}, MERGE[lse_layout])
    return output, output_lse, sizes


def prepare_merge_many(
    outputs: Tensor, lses: Tensor, lse_layout: str, output: Tensor | None, output_lse: Tensor | None
) -> Prepared:
    """Of ``merge_many``."""
    check_choice("lse_layout", lse_layout, MERGE_MANY)
    output = _empty_unless_given(output, outputs.shape[1:], outputs.dtype, outputs)
    output_lse = _empty_unless_given(output_lse, lses.shape[1:], torch.float32, lses)
    tensors = {"outputs": outputs, "lses": lses, "output": output, "output_lse": output_lse}
    return output, output_lse, check_tensors(tensors, MERGE_MANY[lse_layout])


def _results_unless_given(out: Tensor | None, lse: Tensor | None, q: Tensor, v_head_size: int) -> tuple[Tensor, Tensor]:
    rows = q.shape[:-1]
    return _empty_unless_given(out, (*rows, v_head_size), q.dtype, q), _empty_unless_given(lse, rows, torch.float32, q)


def _empty_unless_given(given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device) if given is None else given
