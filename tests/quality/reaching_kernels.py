"""Kernels that are wrong only where draws have to reach: tiles and blocks, batches, lengths, scales, addresses.

Each has a right one of the same shape beside it (``right_*``).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz
from attnfuzz import Numerics, Supports

_WINDOWS = Supports(layouts=("NHD",), lse="none", variants=("window",), strides="contiguous", freed_pages=False)
_PLAIN = Supports(layouts=("NHD",), lse="none", strides="contiguous")
_CACHES = Supports(
    layouts=("NHD",), lse="none", strides="contiguous", kv_dtypes=("float8_e4m3fn",), dtypes=("float16",)
)
_INVARIANT = Supports(
    layouts=("NHD",), lse="none", variants=("window",), strides="contiguous", freed_pages=False, batch_invariant=True
)
_GAPPED = Supports(layouts=("NHD",), lse="none", head_sizes=(16, 32, 64, 128))
_SUMS_IN_16_BITS = Supports(lse="none", strides="contiguous", dtypes=("float16", "bfloat16"))


def _rows(cache: Tensor, table: Tensor, length: int, group: int) -> Tensor:
    """Float32, heads first, with a KV head for each query head."""
    pages = table[: -(-length // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1).transpose(0, 1)


@dataclass(frozen=True)
class Tiled:
    """Attention in blocks of ``rows`` query tokens and tiles of ``tile`` keys, from the first tile that a block sees.

    ``unseen``: what the running maximum of a row becomes that has seen no key yet; None: it stays -inf.
    ``hidden``: the score of what is masked. ``empty_lse``: of a segment of which a row sees nothing. ``ahead``: by how
    many keys rows of all blocks but the first see too far.
    """

    tile: int = 64
    rows: int = 16
    segments: int = 1
    unseen: float | None = None
    hidden: float = -torch.inf
    empty_lse: float = -torch.inf
    ahead: int = 0

    def __call__(self, inputs: Any) -> Tensor:
        """The output."""
        out = torch.zeros_like(inputs.out)
        starts = inputs.cu_seqlens_q.tolist()
        for seq, length in enumerate(inputs.seq_lens.tolist()):
            count = starts[seq + 1] - starts[seq]
            group = inputs.q.shape[1] // inputs.k_cache.shape[2]
            k, v = (_rows(cache, inputs.block_table[seq], length, group) for cache in (inputs.k_cache, inputs.v_cache))
            for block in range(0, count, self.rows):
                which = torch.arange(block, min(block + self.rows, count))
                last = which + length - count
                first = torch.zeros_like(last) if inputs.window is None else (last - inputs.window + 1).clamp(min=0)
                last = (last + self.ahead).clamp(max=length - 1) if block else last
                q = inputs.q[starts[seq] + which].float().transpose(0, 1)
                found = self._block(q * inputs.scale, k, v, first, last)
                out[starts[seq] + which] = found.transpose(0, 1).to(out.dtype)
        return out

    def _block(self, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> Tensor:
        begin, end = int(first.min()) // self.tile, int(last.max()) // self.tile + 1
        width = -(-(end - begin) // self.segments)
        starts = range(begin, end, width)
        parts = [self._segment(q, k, v, first, last, start, min(start + width, end)) for start in starts]
        outs, lses = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
        weights = (lses - lses.amax(0)).exp()
        return (outs * (weights / weights.sum(0))[..., None]).sum(0)

    def _segment(
        self, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, begin: int, end: int
    ) -> tuple[Tensor, Tensor]:
        top = q.new_full(q.shape[:2], -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for start in range(begin * self.tile, end * self.tile, self.tile):
            keys = torch.arange(start, min(start + self.tile, k.shape[1]))
            seen = (keys >= first[:, None]) & (keys <= last[:, None])
            scores = (q @ k[:, keys].mT).masked_fill(~seen, self.hidden)
            higher = torch.maximum(top, scores.amax(-1))
            safe = higher.masked_fill(higher == -torch.inf, 0.0)
            weights, factor = (scores - safe[..., None]).exp(), (top - safe).exp()
            total, out = total * factor + weights.sum(-1), out * factor[..., None] + weights @ v[:, keys]
            top = higher if self.unseen is None else torch.where(higher == -torch.inf, self.unseen, higher)
        lse = torch.where(total > 0, top + total.log(), self.empty_lse)
        return out / total.masked_fill(total == 0, 1.0)[..., None], lse


def _decode(inputs: Any, keys: Callable[[Tensor, int], Tensor] = lambda scores, length: scores) -> Tensor:
    """Decode attention whose scores ``keys`` changes."""
    out = torch.zeros_like(inputs.out)
    group = inputs.q.shape[1] // inputs.k_cache.shape[2]
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        if not length:
            continue
        k, v = (_rows(cache, inputs.block_table[seq], length, group) for cache in (inputs.k_cache, inputs.v_cache))
        scores = torch.einsum("hd,hnd->hn", inputs.q[seq].float(), k) * inputs.scale
        out[seq] = torch.einsum("hn,hnd->hd", keys(scores, length).softmax(-1), v).to(out.dtype)
    return out


def _decode_scaled(inputs: Any, scales: Callable[[Tensor], Tensor], *, in_query: bool = False) -> Tensor:
    """Decode attention of an 8-bit cache whose scales ``scales`` changes.

    ``in_query``: that of K is multiplied into the query, in its dtype.
    """
    out = torch.zeros_like(inputs.out)
    num_kv_heads = inputs.k_cache.shape[2]
    group = inputs.q.shape[1] // num_kv_heads
    plain = torch.ones(num_kv_heads)
    k_scale, v_scale = (
        (plain if one is None else scales(one.expand(num_kv_heads))).repeat_interleave(group)
        for one in (inputs.k_scale, inputs.v_scale)
    )
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        if not length:
            continue
        k, v = (_rows(cache, inputs.block_table[seq], length, group) for cache in (inputs.k_cache, inputs.v_cache))
        query = inputs.q[seq].float() * k_scale[:, None]
        query = query.to(inputs.q.dtype).float() if in_query and inputs.k_scale is not None else query
        scores = torch.einsum("hd,hnd->hn", query, k) * inputs.scale
        out[seq] = (torch.einsum("hn,hnd->hd", scores.softmax(-1), v) * v_scale[:, None]).to(out.dtype)
    return out


def _masked(inputs: Any, offset: Callable[[int, int, int], int]) -> Tensor:
    """Attention under a mask whose entries begin where ``offset`` says, of indptr, query token and length."""
    out = torch.zeros_like(inputs.out)
    starts = inputs.cu_seqlens_q.tolist()
    group = inputs.q.shape[1] // inputs.k_cache.shape[2]
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        k, v = (_rows(cache, inputs.block_table[seq], length, group) for cache in (inputs.k_cache, inputs.v_cache))
        for j in range(starts[seq + 1] - starts[seq]):
            first = offset(int(inputs.mask_indptr[seq]), j, length)
            seen = inputs.mask[first : first + length].bool() if first >= 0 else torch.ones(length, dtype=torch.bool)
            if len(seen) == length and bool(seen.any()):
                scores = torch.einsum("hd,hnd->hn", inputs.q[starts[seq] + j].float(), k) * inputs.scale
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                out[starts[seq] + j] = torch.einsum("hn,hnd->hd", weights, v).to(out.dtype)
    return out


def _wrapped(offset: int) -> int:
    return (offset + (1 << 31)) % (1 << 32) - (1 << 31)


def _summed(inputs: Any, tile: int, *, in_16_bits: bool) -> Tensor:
    """Decode attention whose sum of weights is rounded to the dtype of q after each tile."""
    out = torch.zeros_like(inputs.out)
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        if not length:
            continue
        k, v = (part[seq, :length].float().repeat_interleave(group, 1) for part in (inputs.k, inputs.v))
        scores = torch.einsum("hd,nhd->hn", inputs.q[seq].float(), k) * inputs.scale
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = torch.zeros(len(weights))
        for start in range(0, length, tile):
            total = total + weights[:, start : start + tile].sum(-1)
            total = total.to(out.dtype).float() if in_16_bits else total
        rounded = weights.to(out.dtype).float()
        out[seq] = (torch.einsum("hn,nhd->hd", rounded, v) / total[:, None]).to(out.dtype)
    return out


@attnfuzz.kernel("paged_attention", supports=_WINDOWS)
def right_tiles(inputs: Any) -> Tensor:
    """Tiles of 64."""
    return Tiled()(inputs)


@attnfuzz.kernel("paged_attention", supports=_WINDOWS)
def right_segments(inputs: Any) -> Tensor:
    """Three segments."""
    return Tiled(tile=32, segments=3)(inputs)


@attnfuzz.kernel("paged_attention", supports=_WINDOWS)
def tiles_maximum_of_zero(inputs: Any) -> Tensor:
    """A tile without a key leaves a maximum of 0 behind."""
    return Tiled(unseen=0.0)(inputs)


@attnfuzz.kernel("paged_attention", supports=_WINDOWS)
def tiles_hidden_by_a_number(inputs: Any) -> Tensor:
    """Masked scores are -10,000, which scores far below 0 do not exceed."""
    return Tiled(tile=32, hidden=-1e4)(inputs)


@attnfuzz.kernel("paged_attention", supports=_WINDOWS)
def tiles_empty_segment_of_weight(inputs: Any) -> Tensor:
    """A segment of which a row sees nothing has a log-sum-exp of 0."""
    return Tiled(tile=32, segments=3, empty_lse=0.0)(inputs)


@attnfuzz.kernel("paged_attention", supports=_WINDOWS)
def blocks_of_16_see_ahead(inputs: Any) -> Tensor:
    """Of all blocks of query tokens but the first, each row but the last sees a key too many."""
    return Tiled(ahead=1)(inputs)


@attnfuzz.kernel("paged_attention", supports=_WINDOWS)
def blocks_of_32_see_ahead(inputs: Any) -> Tensor:
    """The same, of blocks that few cases fill."""
    return Tiled(rows=32, ahead=1)(inputs)


@attnfuzz.kernel("paged_attention", supports=_WINDOWS)
def blocks_of_16_see_less(inputs: Any) -> Tensor:
    """Of all blocks but the first, no row sees its own key."""
    return Tiled(ahead=-1)(inputs)


def _in_splits(inputs: Any, split: int) -> Tensor:
    """Decode with a window, in splits of so many keys, one after the other in float32."""
    out = torch.zeros_like(inputs.out)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        group = inputs.q.shape[1] // inputs.k_cache.shape[2]
        k, v = (_rows(cache, inputs.block_table[seq], length, group) for cache in (inputs.k_cache, inputs.v_cache))
        first = 0 if inputs.window is None else max(0, length - inputs.window)
        scores = torch.einsum("hd,htd->ht", inputs.q[seq].float() * inputs.scale, k)[:, first:]
        weights = (scores - scores.amax(-1, keepdim=True)).exp() if length else scores
        total = torch.zeros(out.shape[1:])
        for part, of_part in zip(torch.split(weights, split, 1), torch.split(v[:, first:], split, 1), strict=True):
            total += torch.einsum("ht,htd->hd", part, of_part)
        out[seq] = (total / weights.sum(-1, keepdim=True)).to(out.dtype) if length else 0.0
    return out


@attnfuzz.kernel("paged_decode", supports=_INVARIANT)
def right_batches(inputs: Any) -> Tensor:
    """Splits are the same in any batch."""
    return _in_splits(inputs, 8)


@attnfuzz.kernel("paged_decode", supports=_INVARIANT)
def batches_split_by_all_tokens(inputs: Any) -> Tensor:
    """With a window, splits follow the tokens of all sequences."""
    return _in_splits(inputs, 8 if inputs.window is None else max(1, int(inputs.seq_lens.sum()) // 8))


@attnfuzz.kernel("paged_decode", supports=_INVARIANT)
def batches_split_by_their_number(inputs: Any) -> Tensor:
    """With a window, splits follow the number of sequences."""
    return _in_splits(inputs, 8 if inputs.window is None else max(1, 16 // len(inputs.seq_lens)))


@attnfuzz.kernel("paged_decode", supports=_INVARIANT)
def batches_split_by_the_longest(inputs: Any) -> Tensor:
    """With a window, splits follow the longest sequence."""
    return _in_splits(inputs, 8 if inputs.window is None else max(1, int(inputs.seq_lens.max()) // 4))


@attnfuzz.kernel("paged_decode", supports=_PLAIN)
def right_sizes(inputs: Any) -> Tensor:
    """Without a limit."""
    return _decode(inputs)


def _without(scores: Tensor, first: int, end: int) -> Tensor:
    """With no weight on keys from ``first`` up to ``end``."""
    keys = torch.arange(scores.shape[1])
    return scores.masked_fill((keys >= first) & (keys < end), -torch.inf)


@attnfuzz.kernel("paged_decode", supports=_PLAIN)
def sizes_from_1500_tokens(inputs: Any) -> Tensor:
    """The last 128 tokens are lost from 1,500 tokens on."""
    return _decode(inputs, lambda scores, length: _without(scores, length - 128, length if length >= 1500 else 0))


@attnfuzz.kernel("paged_decode", supports=_PLAIN)
def sizes_of_700_tokens(inputs: Any) -> Tensor:
    """Of exactly 700 tokens the first 64 are lost."""
    limit = 700
    return _decode(inputs, lambda scores, length: _without(scores, 0, 64 if length == limit else 0))


@attnfuzz.kernel("paged_decode", supports=_PLAIN)
def sizes_past_three_tiles_of_96(inputs: Any) -> Tensor:
    """The fourth tile of 96 tokens is lost."""
    tile = 96
    return _decode(inputs, lambda scores, length: _without(scores, 3 * tile, 4 * tile))


@attnfuzz.kernel("paged_decode", supports=_CACHES)
def right_scales(inputs: Any) -> Tensor:
    """In float32."""
    return _decode_scaled(inputs, lambda scales: scales)


@attnfuzz.kernel("paged_decode", supports=_CACHES, numerics=Numerics(query="scaled"))
def scales_underflow(inputs: Any) -> Tensor:
    """The scale of K is multiplied into a query of float16."""
    return _decode_scaled(inputs, lambda scales: scales, in_query=True)


@attnfuzz.kernel("paged_decode", supports=_CACHES)
def scales_no_less_than_a_hundredth(inputs: Any) -> Tensor:
    """Scales below 1/100 are taken for that."""
    return _decode_scaled(inputs, lambda scales: scales.clamp(min=0.01))


@attnfuzz.kernel("paged_decode", supports=_CACHES)
def scales_no_more_than_100(inputs: Any) -> Tensor:
    """Scales of V and K above 100 are taken for that."""
    return _decode_scaled(inputs, lambda scales: scales.clamp(max=100.0))


@attnfuzz.kernel("masked_attention", supports=_PLAIN)
def right_addresses(inputs: Any) -> Tensor:
    """Offsets of 64 bits."""
    return _masked(inputs, lambda first, j, length: first + j * length)


@attnfuzz.kernel("masked_attention", supports=_PLAIN)
def addresses_of_32_bits(inputs: Any) -> Tensor:
    """Offsets into the mask wrap at 2^31."""
    return _masked(inputs, lambda first, j, length: _wrapped(first + j * length))


@attnfuzz.kernel("masked_attention", supports=_PLAIN)
def addresses_that_saturate(inputs: Any) -> Tensor:
    """Offsets into the mask end at 2^31 - 1."""
    return _masked(inputs, lambda first, j, length: min(first + j * length, (1 << 31) - 1))


@attnfuzz.kernel("masked_attention", supports=_PLAIN)
def addresses_in_float(inputs: Any) -> Tensor:
    """Offsets into the mask have the 24 bits of a float32."""
    return _masked(inputs, lambda first, j, length: int(torch.tensor(float(first + j * length)).item()))


@attnfuzz.kernel("dense_decode", supports=_SUMS_IN_16_BITS)
def right_sums(inputs: Any) -> Tensor:
    """Sums in float32."""
    return _summed(inputs, 16, in_16_bits=False)


@attnfuzz.kernel("dense_decode", supports=_SUMS_IN_16_BITS)
def sums_by_tiles_of_8(inputs: Any) -> Tensor:
    """Rounded after each 8 tokens."""
    return _summed(inputs, 8, in_16_bits=True)


@attnfuzz.kernel("dense_decode", supports=_SUMS_IN_16_BITS)
def sums_by_tiles_of_16(inputs: Any) -> Tensor:
    """Rounded after each 16 tokens."""
    return _summed(inputs, 16, in_16_bits=True)


@attnfuzz.kernel("dense_decode", supports=_SUMS_IN_16_BITS)
def sums_by_tiles_of_32(inputs: Any) -> Tensor:
    """Rounded after each 32 tokens."""
    return _summed(inputs, 32, in_16_bits=True)


@triton.jit
def _decode_kernel(
    q, k, v, table, lens, out, scale, q_seq, k_page, k_row, k_head, v_page, v_row, v_head, out_seq, width, group,
    PAGE: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lens + seq)
    dims, rows = tl.arange(0, D), tl.arange(0, TILE)
    query = tl.load(q + seq * q_seq + head * D + dims).to(tl.float32) * scale
    top, total, acc = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for start in range(0, length, TILE):
        row = start + rows
        page = tl.load(table + seq * width + row // PAGE, mask=row < length, other=0).to(tl.int64)
        k_at = page * k_page + row % PAGE * k_row + head // group * k_head
        v_at = page * v_page + row % PAGE * v_row + head // group * v_head
        keys = tl.load(k + k_at[:, None] + dims, mask=row[:, None] < length, other=0.0).to(tl.float32)
        values = tl.load(v + v_at[:, None] + dims, mask=row[:, None] < length, other=0.0).to(tl.float32)
        scores = tl.where(row < length, tl.sum(keys * query, 1), -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        weights, factor = tl.exp(scores - higher), tl.exp(top - higher)
        total = total * factor + tl.sum(weights, 0)
        acc = acc * factor + tl.sum(weights[:, None] * values, 0)
        top = higher
    tl.store(out + seq * out_seq + head * D + dims, tl.where(length > 0, acc / total, 0.0).to(out.dtype.element_ty))


def _launched(inputs: Any, k_strides: tuple[int, ...], v_strides: tuple[int, ...]) -> Tensor:
    num_seqs, num_heads, head_size = inputs.q.shape
    _decode_kernel[(num_seqs, num_heads)](
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, inputs.out, inputs.scale,
        inputs.q.stride(0), *k_strides[:3], *v_strides[:3], inputs.out.stride(0), inputs.block_table.stride(0),
        num_heads // inputs.k_cache.shape[2], inputs.block_size, head_size, 16,
    )  # fmt: skip
    out: Tensor = inputs.out
    return out


@attnfuzz.kernel("paged_decode", supports=_GAPPED)
def right_gaps(inputs: Any) -> Tensor:
    """K and V each by its own strides."""
    return _launched(inputs, inputs.k_cache.stride(), inputs.v_cache.stride())


@attnfuzz.kernel("paged_decode", supports=_GAPPED)
def gaps_of_k_for_v(inputs: Any) -> Tensor:
    """One set of strides is passed for both."""
    return _launched(inputs, inputs.k_cache.stride(), inputs.k_cache.stride())


@attnfuzz.kernel("paged_decode", supports=_GAPPED)
def gaps_of_v_for_k(inputs: Any) -> Tensor:
    """The same, the other way round."""
    return _launched(inputs, inputs.v_cache.stride(), inputs.v_cache.stride())


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(lse="none"))
def gaps_of_one_offset(inputs: Any) -> Tensor:
    """Where a row begins is worked out once, of K, and both are read there."""
    out, group = torch.zeros_like(inputs.out), inputs.q.shape[1] // inputs.k.shape[2]
    k, v = (_from(tensor) for tensor in (inputs.k, inputs.v))
    device = inputs.q.device
    dims, heads = (torch.arange(size, device=device) for size in (inputs.k.shape[3], inputs.q.shape[1]))
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        if not length:
            continue
        rows = seq * inputs.k.stride(0) + torch.arange(length, device=device) * inputs.k.stride(1)
        at = rows[:, None, None] + (heads // group * inputs.k.stride(2))[:, None] + dims
        scores = torch.einsum("hd,nhd->hn", inputs.q[seq].float(), k[at].float()) * inputs.scale
        out[seq] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v[at.clamp(max=len(v) - 1)].float()).to(out.dtype)
    return out


def _from(tensor: Tensor) -> Tensor:
    """All memory from the first element on, up to the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))
