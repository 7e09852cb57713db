"""Kernels that pass on any case by itself and that only a relation objects to; executors load them by this file's path.

Each changes the last bits of a bundled kernel's result: no bound is that tight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.kernels.dense import launch
from attnfuzz.kernels.merge import launch as launch_merge
from attnfuzz.kernels.paged import launch as launch_paged

_A_LITTLE = 2.0**-22
_INVARIANT = attnfuzz.Supports(batch_invariant=True)

_longest = [0]


def decode(inputs: Any) -> tuple[Tensor, Tensor]:
    return launch.dense_decode(
        inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale, out=inputs.out, lse=inputs.lse
    )


def decode_pages(inputs: Any) -> tuple[Tensor, Tensor]:
    caches = (inputs.k_cache, inputs.v_cache, inputs.block_table)
    sizes = (inputs.scale, inputs.block_size, inputs.layout)
    return launch_paged.paged_decode(inputs.q, *caches, inputs.seq_lens, *sizes, out=inputs.out, lse=inputs.lse)


def nudge(result: Tensor, where: Tensor) -> None:
    """A float32 result, changed by a unit or two in the last place ``where`` that is true."""
    result.mul_(1.0 + where.float() * _A_LITTLE)


@attnfuzz.kernel("paged_decode")
def looks_at_page_ids(inputs: Any) -> Any:
    out, lse = decode_pages(inputs)
    nudge(lse, inputs.block_table[2, 0] < inputs.block_table[2, 1])
    return out, lse


@attnfuzz.kernel("paged_decode")
def looks_at_unused_entries(inputs: Any) -> Any:
    out, lse = decode_pages(inputs)
    nudge(lse, (inputs.block_table[0, 1:] == 0).all())
    return out, lse


@attnfuzz.kernel("dense_decode", supports=_INVARIANT)
def counts_its_rows(inputs: Any) -> Any:
    out, lse = decode(inputs)
    return out, lse.mul_(1.0 + _A_LITTLE * (len(out) > 1))


@attnfuzz.kernel("dense_decode")
def adds_an_epsilon(inputs: Any) -> Any:
    out, lse = decode(inputs)
    return out.add_((out != 0) * 2e-7), lse


@attnfuzz.kernel("dense_decode")
def rounds_by_strides(inputs: Any) -> Any:
    """As a compiler may that fuses another product into a sum where a stride is no constant: not a bug."""
    out, lse = decode(inputs)
    are_wide = not all(one.is_contiguous() for one in (inputs.q, inputs.k, inputs.v))
    nudge(out, torch.full((1,), are_wide, device=out.device))
    return out, lse


@attnfuzz.kernel("merge_states")
def counts_empty_states(inputs: Any) -> Any:
    output, lse = launch_merge.merge_states(
        inputs.prefix_output, inputs.prefix_lse, inputs.suffix_output, inputs.suffix_lse,
        output=inputs.output, output_lse=inputs.output_lse,
    )  # fmt: skip
    nudge(output, inputs.suffix_lse.isneginf().T[..., None])
    return output, lse


@attnfuzz.kernel("dense_decode")
def remembers_the_longest(inputs: Any) -> Any:
    """As from a workspace that grows, and decides about the number of splits."""
    out, lse = decode(inputs)
    length = inputs.k.shape[1]
    _longest[0] = max(_longest[0], length)
    return out, lse.mul_(1.0 + _A_LITTLE * (length < _longest[0]))


@attnfuzz.kernel("dense_decode")
def without_triton(inputs: Any) -> tuple[Tensor, Tensor]:
    """Correct, and waits for nothing."""
    group = inputs.q.shape[1] // inputs.k.shape[2]
    live = torch.arange(inputs.k.shape[1], device=inputs.q.device) < inputs.seq_lens[:, None]
    k, v = (
        part.float().masked_fill(~live[..., None, None], 0.0).repeat_interleave(group, 2)
        for part in (inputs.k, inputs.v)
    )
    scores = (inputs.q.float()[:, None] * k).sum(-1) * inputs.scale
    scores = scores.masked_fill(~live[..., None], -torch.inf)
    lse = scores.logsumexp(1)
    weights = torch.where(live[..., None], (scores - lse[:, None]).exp(), 0.0)
    out = (weights[..., None] * v).sum(1)
    return out.to(inputs.q.dtype), lse
