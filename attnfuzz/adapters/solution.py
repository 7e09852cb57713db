"""A FlashInfer-Bench solution as a kernel: `attnfuzz.corpus.solution` writes the file that calls `kernel_of`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnfuzz.declaration import Kernel, kernel
from attnfuzz.problems.supports import Supports


def kernel_of(
    owner: str,
    *,
    module: str,
    function: str,
    name: str,
    prefill: bool,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    page_size: int,
    writes_outputs: bool,
) -> Kernel:
    """The kernel that ``function`` of ``module`` is, of the definition with these sizes, for the module ``owner``.

    What the definition says is its contract: bfloat16, these heads, contiguous tensors, a log-sum-exp to base 2.
    ``writes_outputs``: it gets output and lse as its last arguments. Imports the module.
    """
    run: Callable[..., Any] = getattr(importlib.import_module(module), function)
    supports = Supports(
        dtypes=("bfloat16",),
        head_sizes=(head_size,),
        block_sizes=(page_size,),
        layouts=("NHD",),
        strides="contiguous",
        padding_tokens=False,
        lse="base2",
        where=({"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads},),
    )

    def solution(inputs: Any) -> Any:
        arguments = _arguments(inputs, prefill=prefill)
        if writes_outputs:
            run(*arguments, inputs.out, inputs.lse)
            return None
        returned = run(*arguments)
        return (returned["output"], returned["lse"]) if isinstance(returned, Mapping) else returned

    solution.__module__ = owner  # what is imported anew for a fresh copy of it
    problem = kernel("paged_attention" if prefill else "paged_decode", supports=supports, name=name)
    return problem(solution)


def _arguments(inputs: Any, *, prefill: bool) -> list[Any]:
    """As the definitions order them; the lengths of last pages are there where a page has more than one token."""
    starts, pages, last = _pages(inputs)
    queries = [inputs.cu_seqlens_q] if prefill else []
    lengths = [last] if inputs.block_size > 1 else []
    return [inputs.q, inputs.k_cache, inputs.v_cache, *queries, starts, pages, *lengths, inputs.scale]


def _pages(inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Where each sequence's pages begin, all pages, and the tokens of each last page."""
    size, lengths = inputs.block_size, inputs.seq_lens
    counts = (lengths + size - 1) // size
    starts = pad(counts.cumsum(0, dtype=lengths.dtype), (1, 0))
    table = inputs.block_table
    pages = table[torch.arange(table.shape[1], device=table.device) < counts[:, None]]
    return starts, pages, ((lengths - 1) % size + 1) * (lengths > 0)
