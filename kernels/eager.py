"""The bundled kernels once more, in plain PyTorch: padded rows, float32 arithmetic, no Triton.

Same arguments, results and errors as the wrappers in ``launch`` of each folder, less the tile. A row is one
sequence, or one split of one; all rows are padded to the length of the longest that the shapes allow, so that nothing
waits for the device to tell a length. Products are multiply-and-sum, because matrix products follow the process's TF32
and reduced-precision switches. Padding adds zeros to a row's sums, and may so change the order of its additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, Unpack, cast

import torch
from torch import Tensor

from attnfuzz.kernels.common.layouts import gather_pages, size_of_values
from attnfuzz.kernels.common.prepare import (
    PagedCall,
    empty_partials,
    prepare_dense,
    prepare_merge,
    prepare_paged,
    prepare_reduce,
    prepare_split,
)
from attnfuzz.kernels.common.variants import Variant, Variants

_LARGEST_PRODUCT = 1 << 24
"""Elements: 64 MiB of float32."""


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``dense.launch.dense_decode``."""
    out, lse, sizes = prepare_dense(q, k, v, seq_lens, out, lse)
    is_live = _is_live(seq_lens, k.shape[1])
    for rows in _chunks(is_live, sizes):
        out[rows], lse[rows] = _attend(q[rows], k[rows], v[rows], is_live[rows], scale)
    return out, lse


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """See ``paged.launch.paged_decode``."""
    call = prepare_paged(q, k_cache, v_cache, block_table, seq_lens, block_size, layout, out, lse, variants)
    return attend_rows(call, q, k_cache, v_cache, block_table, seq_lens, scale, layout)


def attend_rows(
    call: PagedCall,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    layout: str,
    sees: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The results of ``call``, each row of q with pages and a length of its own.

    ``sees [rows, max_blocks_per_seq * block_size]``: which of the tokens there a row attends to; all if left out.
    """
    (out, lse), sizes, variant = call.results, call.sizes, call.variant
    block_size = sizes["block_size"]
    is_live = _is_live(seq_lens, block_table.shape[1] * block_size)
    pages = block_table.where(is_live[:, ::block_size], 0)  # of a page in use, the first token is live
    position = torch.arange(is_live.shape[1], device=q.device).expand_as(is_live)
    scoring = _Scoring.of(variant, position, is_live if sees is None else is_live & sees, seq_lens)
    of_heads = variant.kv_scales_of_heads(sizes["num_kv_heads"])
    for rows in _chunks(is_live, sizes):
        k, v = gather_pages(k_cache, v_cache, layout, pages[rows])
        states = _attend(q[rows], k, v, scoring.is_live[rows], scale, scoring.part(rows), of_heads)
        out[rows], lse[rows] = _with_sinks(*states, variant.sinks)
    return out, lse


def split_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    num_splits: int,
    *,
    partial_out: Tensor | None = None,
    partial_lse: Tensor | None = None,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """See ``paged.launch.split_decode``."""
    call = prepare_split(
        q, k_cache, v_cache, block_table, seq_lens, block_size, layout, num_splits, partial_out, partial_lse, variants
    )  # fmt: skip
    (partial_out, partial_lse), sizes, variant = call.results, call.sizes, call.variant
    tokens = block_table.shape[1] * block_size
    pages = block_table.where(_is_live(seq_lens, tokens)[:, ::block_size], 0)
    position, is_live = _split_positions(seq_lens, tokens, num_splits)
    scoring = _Scoring.of(variant, position, is_live, seq_lens)
    of_heads = variant.kv_scales_of_heads(sizes["num_kv_heads"])
    for rows in _chunks(is_live.flatten(1), sizes):
        k, v = (_split(x, position[rows]) for x in gather_pages(k_cache, v_cache, layout, pages[rows]))
        queries = q[rows].repeat_interleave(num_splits, dim=0)
        visible = scoring.is_live[rows].flatten(0, 1)
        parts = _attend(queries, k, v, visible, scale, scoring.part(rows), of_heads)
        for partial, part in zip((partial_out, partial_lse), parts, strict=True):
            partial[rows] = part.view(-1, num_splits, *part.shape[1:]).transpose(1, 2)
    return partial_out, partial_lse


def reduce_splits(
    partial_out: Tensor,
    partial_lse: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``paged.launch.reduce_splits``."""
    out, lse, _ = prepare_reduce(partial_out, partial_lse, out, lse, sinks)
    merged, merged_lse = _with_sinks(*_merge(partial_out, partial_lse), sinks)
    return out.copy_(merged), lse.copy_(merged_lse)


def split_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    num_splits: int,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    partial_dtype: str = "float32",
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """See ``paged.launch.split_paged_decode``."""
    sinks = variants.pop("sinks", None)
    v_head_size = size_of_values(v_cache, layout)
    partial_out = empty_partials(q, num_splits, partial_dtype, v_head_size)
    out = torch.empty((*q.shape[:-1], v_head_size), dtype=q.dtype, device=q.device) if out is None else out
    partial_out, partial_lse = split_decode(
        q, k_cache, v_cache, block_table, seq_lens, scale, block_size, layout, num_splits,
        partial_out=partial_out, **variants,
    )  # fmt: skip
    return reduce_splits(partial_out, partial_lse, out=out, lse=lse, sinks=sinks)


def merge_states(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    *,
    lse_layout: str = "HT",
    output: Tensor | None = None,
    output_lse: Tensor | Literal["new"] = "new",
) -> tuple[Tensor, Tensor]:
    """See ``merge.launch.merge_states``; with an LSE always."""
    inputs = {"prefix_output": prefix_output, "prefix_lse": prefix_lse}
    inputs |= {"suffix_output": suffix_output, "suffix_lse": suffix_lse}
    output, lse, _ = prepare_merge(inputs, lse_layout, output, output_lse)
    lses = torch.stack((prefix_lse, suffix_lse), dim=-1)
    lses = lses.transpose(0, 1) if lse_layout == "HT" else lses  # [num_tokens, num_q_heads, 2]
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    merged, merged_lse = _merge(torch.stack((prefix_output, suffix_output), dim=-2), lses)
    return output.copy_(merged), cast("Tensor", lse).copy_(merged_lse.t() if lse_layout == "HT" else merged_lse)


def _is_live(seq_lens: Tensor, padded_len: int) -> Tensor:
    """Which positions hold a token, ``[num_seqs, padded_len]``."""
    return torch.arange(padded_len, device=seq_lens.device) < seq_lens[:, None]


def _split_positions(seq_lens: Tensor, padded_len: int, num_splits: int) -> tuple[Tensor, Tensor]:
    """The position of each token of each split, 0 for one that is not live, and which are.

    Both are ``[num_seqs, num_splits, padded_len / num_splits, rounded up]``.
    """
    lens = seq_lens.long()[:, None, None]
    per_split = (lens + num_splits - 1) // num_splits
    offset = torch.arange(-(-padded_len // num_splits), device=lens.device)
    position = torch.arange(num_splits, device=lens.device)[:, None] * per_split + offset
    is_live = (offset < per_split) & (position < lens)
    return position * is_live, is_live


def _split(tokens: Tensor, position: Tensor) -> Tensor:
    """``tokens [num_seqs, padded_len, num_kv_heads, head_size]`` at ``position``, a row for each split of each."""
    seq = torch.arange(position.shape[0], device=position.device)[:, None, None]
    return tokens[seq, position].flatten(0, 1)


def _chunks(is_live: Tensor, sizes: dict[str, int]) -> Iterator[slice]:
    """All sequences, a few at a time where their products would fill too much memory."""
    num_seqs, padded_len = is_live.shape
    row = padded_len * sizes["num_q_heads"] * max(sizes["head_size"], sizes["v_head_size"])
    at_once = max(1, _LARGEST_PRODUCT // max(1, row))
    return (slice(start, start + at_once) for start in range(0, num_seqs, at_once))


class _Scoring(NamedTuple):
    """The changes of variants to the scores. ``is_live``: tokens that the query sees, of the positions' shape.

    ``distance``: token minus query, of that shape.
    """

    is_live: Tensor
    distance: Tensor
    soft_cap: float | None
    alibi_slopes: Tensor | None

    @classmethod
    def of(cls, variant: Variant, position: Tensor, is_live: Tensor, seq_lens: Tensor) -> _Scoring:
        """``position``, ``is_live``: ``[num_seqs, ...]``, for each token."""
        distance = position + 1 - seq_lens.long().view(-1, *[1] * (position.dim() - 1))
        if variant.window is not None:
            is_live = is_live & (distance > -variant.window)
        return cls(is_live, distance, variant.soft_cap, variant.alibi_slopes)

    def part(self, rows: slice) -> _Scoring:
        """The scoring of some sequences, a row for each split of each."""
        is_live, distance = (of[rows].flatten(0, -2) for of in (self.is_live, self.distance))
        return self._replace(is_live=is_live, distance=distance)

    def applied(self, scores: Tensor) -> Tensor:
        """``scores [rows, padded_len, num_kv_heads, group_size]``, of tokens that are not live -inf."""
        if self.soft_cap is not None:
            capped = self.soft_cap * (scores / self.soft_cap).tanh()
            scores = capped.masked_fill(~self.is_live[:, :, None, None], -math.inf)
        if self.alibi_slopes is not None:
            scores = scores + self.alibi_slopes.view(scores.shape[2:]) * self.distance[:, :, None, None]
        return scores


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_live: Tensor,
    scale: float,
    scoring: _Scoring | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``out [rows, num_q_heads, v_head_size]`` and ``lse [rows, num_q_heads]`` in float32.

    Shapes: ``q [rows, num_q_heads, head_size]``, ``k [rows, padded_len, num_kv_heads, head_size]``, ``v`` likewise,
    ``is_live [rows, padded_len]``, ``kv_scales [num_kv_heads]`` of K and V.
    """
    k, v = k.float(), v.float()
    if kv_scales is not None:
        k, v = (part * scale[:, None] for part, scale in zip((k, v), kv_scales, strict=True))
    live = is_live[:, :, None, None]
    # query heads are [num_kv_heads, group_size]
    queries = q.float().reshape(q.shape[0], 1, k.shape[2], -1, q.shape[2])
    products = queries * k.unsqueeze(3)
    scores = (products.sum(-1) * scale).masked_fill(~live, -math.inf)  # [rows, padded_len, num_kv_heads, group_size]
    scores = scores if scoring is None else scoring.applied(scores)
    p = scores.softmax(1).masked_fill(scores == -math.inf, 0.0)  # a row with no other score has NaN
    values = v.masked_fill(~live, 0.0).unsqueeze(3)
    return (p[..., None] * values).sum(1).flatten(1, 2), scores.logsumexp(1).flatten(1, 2)


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states ``outs [..., num_states, head_size]``, ``lses [..., num_states]`` into one, in float32."""
    empty = lses == -math.inf
    row_max = lses.amax(-1, keepdim=True)
    ref = row_max.masked_fill(row_max == -math.inf, 0.0)  # so that no exponent is -inf - -inf
    weights = (lses - ref).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights[..., None] * outs.float().masked_fill(empty[..., None], 0.0)).sum(-2)
    return out / total.masked_fill(total == 0.0, 1.0), (ref + total.log()).squeeze(-1)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """``out [rows, num_q_heads, head_size]`` and its LSE, with a logit more in each head's denominator."""
    if sinks is None:
        return out, lse
    share = (lse - sinks).sigmoid().where(lse != float("-inf"), 0.0)  # a sink may be -inf as well
    return out * share[..., None], lse.logaddexp(sinks)
