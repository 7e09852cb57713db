"""PyTorch's own attention: scaled_dot_product_attention, the varlen call on sequences in a row, and FlexAttention.

FlexAttention is compiled on a GPU, for each head size, group and variant anew, which takes seconds; on a CPU it runs as
the definition that it is compiled from.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import attnfuzz

TORCH = attnfuzz.Engine("torch", tried=("2.11.0", "2.13.0"))
_SDPAS: dict[str, Any] = {"lse": "none", "graph_replay": False}  # what is cut to lengths is made anew for each plan
_SDPA = {"attend": ("torch.nn.functional:scaled_dot_product_attention",)}


@TORCH.kernel("dense_decode", needs=_SDPA, supports=attnfuzz.Supports(**_SDPAS, dtypes=("float16", "bfloat16")))
def sdpa(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """With the backend that it chooses."""
    return _attending(i, attend)


@TORCH.kernel(
    "dense_decode",
    needs={**_SDPA, "choose": ("torch.nn.attention:sdpa_kernel",), "backend": ("torch.nn.attention:SDPBackend.MATH",)},
    supports=attnfuzz.Supports(**_SDPAS),
    numerics=attnfuzz.Numerics(query="scaled_both"),
)
def sdpa_math(i: Any, *, attend: Any, choose: Any, backend: Any) -> Callable[[], Tensor]:
    """With the backend of plain matrix products, which has the scale's root in q and in k."""
    return _attending(i, attend, lambda: choose(backend))


_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION") if TORCH.on_gpu() else ("FLASH_ATTENTION",)
_TAKEN: dict[str, dict[str, Any]] = {
    "FLASH_ATTENTION": {"head_size": tuple(range(8, 257, 8))},
    "EFFICIENT_ATTENTION": {"head_size": tuple(range(8, 257, 8)), "gqa_ratio": 1},
}
"""Abilities of each backend; torch raises an error for the rest."""


@TORCH.kernel(
    "dense_decode",
    needs={**_SDPA, "choose": ("torch.nn.attention:sdpa_kernel",), "backends": ("torch.nn.attention:SDPBackend",)},
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        where=tuple({"backend": name, **_TAKEN[name]} for name in _BACKENDS),
        empty_sequences=False,
        lse="none",
    ),
    options={"backend": _BACKENDS},
)
def sdpa_backend(i: Any, *, attend: Any, choose: Any, backends: Any, backend: str) -> Callable[[], Tensor]:
    """With each of two other backends alone, and no empty sequences, which FlashAttention does not take.

    cuDNN's has no kernel for some shapes and strides, and does not say which.
    """
    return _attending(i, attend, lambda: choose(getattr(backends, backend)))


def _attending(
    i: Any, attend: Any, within: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], Tensor]:
    """One call for sequences of one length, which need no mask; else one for each sequence."""
    lengths = i.seq_lens.tolist()
    if len(set(lengths)) == 1:
        parts = [(slice(None), lengths[0])]
    else:
        parts = [(slice(seq, seq + 1), length) for seq, length in enumerate(lengths)]
    cut = [
        (seqs, i.q[seqs, :, None], *(part[seqs, :length].transpose(1, 2) for part in (i.k, i.v)))
        for seqs, length in parts
    ]

    def call() -> Tensor:
        with within():
            for seqs, q, k, v in cut:
                i.out[seqs] = attend(q, k, v, scale=i.scale, enable_gqa=True)[:, :, 0]
        out: Tensor = i.out
        return out

    return call


def _out_of_pages(i: Any, cache: Tensor) -> list[Tensor]:
    """The keys or values of each sequence in a row: ``[length, num_kv_heads, head_size]``."""
    lengths = i.seq_lens.tolist()
    counts = [-(-length // i.block_size) for length in lengths]
    return [
        cache[i.block_table[seq, :count].long()].flatten(0, 1)[:length]
        for seq, (count, length) in enumerate(zip(counts, lengths, strict=True))
    ]


@TORCH.kernel(
    "paged_attention",
    needs={"attend": ("torch.nn.attention.varlen:varlen_attn",)},
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        head_sizes=(16, 32, 40, 64, 72, 80, 96, 128, 192, 256),  # multiples of 8
        layouts=("NHD",),
        lse="none",
        graph_replay=False,
    ),
    gpu_only=True,
)
def varlen(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """`varlen_attn`, causal, on the keys and values of all sequences in a row: they are copied out of their pages."""
    k, v = (torch.cat(_out_of_pages(i, cache)) for cache in (i.k_cache, i.v_cache))
    ends = torch.nn.functional.pad(i.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    longest_q, longest = i.max_query_len, i.max_seq_len
    takes_switch = "enable_gqa" in inspect.signature(attend).parameters  # torch 2.11 has none and takes grouped heads
    more = {"enable_gqa": True} if takes_switch else {}
    return lambda: attend(
        i.q, k, v, i.cu_seqlens_q, ends, longest_q, longest, scale=i.scale, window_size=(-1, 0), **more
    )


def _paged(attend: Any) -> attnfuzz.Supports:
    if "block_table" not in inspect.signature(attend).parameters:
        raise ValueError("its varlen_attn takes no block_table")
    return attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        head_sizes=(64, 128),
        block_sizes=(256,),  # of FlashAttention 2, whose pages are multiples of it
        layouts=("NHD",),
        lse="none",
        batch_invariant=True,
    )


@TORCH.kernel(
    "paged_attention", needs={"attend": ("torch.nn.attention.varlen:varlen_attn",)}, supports=_paged, gpu_only=True
)
def varlen_paged(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """`varlen_attn`, causal, over pages, without splits: with these it promises the same bits in any batch."""
    return lambda: attend(
        i.q, i.k_cache, i.v_cache, i.cu_seqlens_q, None, i.max_query_len, i.max_seq_len, scale=i.scale,
        window_size=(-1, 0), enable_gqa=True, seqused_k=i.seq_lens, block_table=i.block_table, num_splits=1,
    )  # fmt: skip


_FLEX = "torch.nn.attention.flex_attention"
_FLEX_NEEDS = {
    "attend": (f"{_FLEX}:flex_attention",),
    "mask": (f"{_FLEX}:create_block_mask",),
    "aux": (f"{_FLEX}:AuxRequest",),
}
_FLEX_CACHES: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "head_sizes": (64, 128),
    "gqa_ratios": (1, 4),
    "layouts": ("NHD",),
    "variants": ("window", "soft_cap", "alibi"),
    "freed_pages": False,  # pages behind a window are copied, or mapped, like all others
    "graph_replay": False,
}
_COMPILED = attnfuzz.Numerics(row_sum="float32", partials="float32")
_DEFINED = attnfuzz.Numerics(scores="input")
"""Where it is not compiled, q times k is a product of matrices in 16 bits."""
_MANY = 1 << 16
Modify = Callable[..., Tensor]


@functools.cache
def _compiled(attend: Any, *, dynamic: bool = True) -> Any:
    return torch.compile(attend, dynamic=dynamic, fullgraph=True)


@contextmanager
def _compiling() -> Iterator[None]:
    """For any number of shapes, and in this process: an executor's children would outlive it."""
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    with (
        dynamo.patch(recompile_limit=_MANY, accumulated_recompile_limit=_MANY),
        inductor.patch(compile_threads=1),
    ):
        yield


@contextmanager
def _uncompiled() -> Iterator[None]:
    """As its own warning says: otherwise it would be traced anew for each case, which takes seconds."""
    module: Any = importlib.import_module(_FLEX)
    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _rows(i: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Which sequence and which of its query tokens each row of q is, and the position of each sequence's first one."""
    lengths = i.cu_seqlens_q.diff().long()
    seqs = torch.arange(len(lengths), device=i.q.device).repeat_interleave(lengths)
    tokens = torch.arange(len(seqs), device=i.q.device) - i.cu_seqlens_q[:-1].long()[seqs]
    return seqs, tokens, i.seq_lens.long() - lengths


def _mask_of(i: Any, first: Tensor) -> Modify:
    lengths = i.seq_lens.long()
    window = torch.tensor(1 << 30 if i.window is None else i.window, dtype=torch.int64, device=i.q.device)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        del h
        position = first[b] + q_idx
        seen: Tensor = (kv_idx < lengths[b]) & (kv_idx <= position) & (kv_idx > position - window)
        return seen

    return mask


def _scores_of(i: Any, first: Tensor) -> Modify | None:
    if i.soft_cap is not None:
        cap = torch.tensor(i.soft_cap, dtype=torch.float32, device=i.q.device)

        def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            del b, h, q_idx, kv_idx
            return cap * torch.tanh(score / cap)

        return capped
    if i.alibi_slopes is not None:
        slopes = i.alibi_slopes

        def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            with_bias: Tensor = score + slopes[h] * (kv_idx - first[b] - q_idx)
            return with_bias

        return biased
    return None


def _flexible(
    i: Any, attend: Any, aux: Any, k: Tensor, v: Tensor, block_mask: Any, scores: Modify | None
) -> Callable[[], tuple[Tensor, Tensor]]:
    """``k``, ``v``: ``[num_seqs or 1, num_kv_heads, slots, head_size]``. q's rows go to a rectangle, and back."""
    seqs, tokens, _ = _rows(i)
    within, run = (_compiling, _compiled(attend)) if TORCH.on_gpu() else (_uncompiled, attend)
    q = i.q.new_zeros(len(i.seq_lens), i.max_query_len, *i.q.shape[1:])
    q[seqs, tokens] = i.q[: len(seqs)]
    q = q.transpose(1, 2)

    def call() -> tuple[Tensor, Tensor]:
        with within():
            out, found = run(q, k, v, scores, block_mask, i.scale, i.q.shape[1] != k.shape[1], return_aux=aux(lse=True))
        i.out[: len(seqs)] = out[seqs, :, tokens]
        i.lse[: len(seqs)] = found.lse[seqs, :, tokens]
        return i.out, i.lse

    return call


@TORCH.kernel(
    "paged_attention",
    needs=_FLEX_NEEDS,
    supports=attnfuzz.Supports(**_FLEX_CACHES),
    numerics=_COMPILED if TORCH.on_gpu() else _DEFINED,
)
def flex_attention(i: Any, *, attend: Any, mask: Any, aux: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flex_attention` with a block mask of lengths, causality and window, on a rectangle of keys and of values.

    They are copied there out of their pages; what is left of the rectangle is zero.
    """
    num_seqs, longest = len(i.seq_lens), max(1, i.max_seq_len)
    k, v = (i.k_cache.new_zeros(num_seqs, longest, *i.k_cache.shape[2:]) for _ in range(2))
    for whole, cache in ((k, i.k_cache), (v, i.v_cache)):
        for seq, part in enumerate(_out_of_pages(i, cache)):
            whole[seq, : len(part)] = part
    _, _, first = _rows(i)
    block_mask = mask(_mask_of(i, first), num_seqs, None, i.max_query_len, longest, device=str(i.q.device))
    return _flexible(i, attend, aux, k.transpose(1, 2), v.transpose(1, 2), block_mask, _scores_of(i, first))


_LEAST_KEYS = 128


@TORCH.kernel(
    "paged_decode",
    needs=_FLEX_NEEDS,
    supports=attnfuzz.Supports(**_FLEX_CACHES),
    numerics=_COMPILED,
    gpu_only=True,
)
def flex_decoding(i: Any, *, attend: Any, mask: Any, aux: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flex_attention` for one query token of each sequence, compiled for a fixed number of them: Flex decoding.

    There are powers of two of them and of keys, so that few are compiled; the rest of the rectangle is zero.
    """
    num_seqs, size = len(i.seq_lens), _power_of_two(len(i.seq_lens))
    longest = max(_LEAST_KEYS, _power_of_two(int(i.seq_lens.max())))
    lengths = torch.nn.functional.pad(i.seq_lens, (0, size - num_seqs))
    padded = SimpleNamespace(seq_lens=lengths, q=i.q, window=i.window, soft_cap=i.soft_cap, alibi_slopes=i.alibi_slopes)
    k, v = (i.k_cache.new_zeros(size, longest, *i.k_cache.shape[2:]) for _ in range(2))
    for whole, cache in ((k, i.k_cache), (v, i.v_cache)):
        for seq, part in enumerate(_out_of_pages(i, cache)):
            whole[seq, : len(part)] = part
    q = torch.nn.functional.pad(i.q, (0, 0, 0, 0, 0, size - num_seqs))[:, :, None]
    first = lengths.long() - 1
    block_mask = mask(_mask_of(padded, first), size, None, 1, longest, device=str(i.q.device))
    run, scores, grouped = _compiled(attend, dynamic=False), _scores_of(padded, first), i.q.shape[1] != k.shape[2]

    def call() -> tuple[Tensor, Tensor]:
        with _compiling():
            out, found = run(
                q, k.transpose(1, 2), v.transpose(1, 2), scores, block_mask, i.scale, grouped, return_aux=aux(lse=True)
            )
        return out[:num_seqs, :, 0], found.lse[:num_seqs, :, 0]

    return call


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


@TORCH.kernel(
    "paged_attention",
    needs={**_FLEX_NEEDS, "paging": ("torch.nn.attention.experimental._paged_attention:PagedAttention",)},
    supports=attnfuzz.Supports(**_FLEX_CACHES, block_sizes=(128, 256)),  # whole blocks of keys, of which a tile is one
    numerics=_COMPILED,
    gpu_only=True,
)
def flex_paged(i: Any, *, attend: Any, mask: Any, aux: Any, paging: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`flex_attention` with a page table: PyTorch's `PagedAttention` turns a mask of positions into one of pages."""
    num_seqs, num_pages, page = len(i.seq_lens), len(i.k_cache), i.block_size
    pages = paging(num_pages, page, num_seqs, str(i.q.device))
    counts = (-(-i.seq_lens // page)).tolist()
    for seq, count in enumerate(counts):
        physical = i.block_table[seq, :count].long()
        pages.page_table[seq, :count] = physical
        pages.physical_to_logical[seq, physical] = torch.arange(count, device=i.q.device)
    _, _, first = _rows(i)
    longest = max(1, *counts) * page
    logical = mask(
        _mask_of(i, first), num_seqs, None, i.max_query_len, longest, device=str(i.q.device), BLOCK_SIZE=(128, page)
    )
    block_mask = pages.convert_logical_block_mask(logical, kv_len=i.seq_lens)
    scores = pages.get_score_mod(_scores_of(i, first), kv_len=i.seq_lens)
    k, v = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (i.k_cache, i.v_cache))
    return _flexible(i, attend, aux, k, v, block_mask, scores)
