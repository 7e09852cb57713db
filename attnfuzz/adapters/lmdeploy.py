"""lmdeploy's Triton kernels: decode over pages, prefill over a copy of them, and its cache writer.

It decodes sequences of one token or more: rows that pad a CUDA graph have none, and what they give is dropped. Pages
behind a window are no longer in its tables once they are given away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import CacheWrite, History
from attnfuzz.families.history import steps_of

LMDEPLOY = attnfuzz.Engine("lmdeploy", tried=("0.18.0",))
_OPS = "lmdeploy.pytorch.kernels.cuda"
_DECODE = {"attend": (f"{_OPS}.pagedattention:flash_attn_with_kvcache",)}
_PREFILL = {
    "flatten": (f"{_OPS}.flatten_kv_cache:flatten_kv_cache",),
    "attend": (f"{_OPS}.flashattention:flash_attn_varlen_func",),
}
_WRITE = {"write": (f"{_OPS}.fill_kv_cache:fill_kv_cache",)}
_LAYOUTS = {"NHD": "bshd", "HND": "bhsd"}
_CACHES: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "block_sizes": (16, 32, 64, 128),  # a tile of keys is a page, of a power of two
    "layouts": ("NHD", "HND"),
    "head_sizes": (32, 64, 80, 96, 128, 192, 256),
    "lse": "none",
    "variants": ("window", "soft_cap", "alibi", "sinks"),
    "freed_pages": False,
    "empty_sequences": False,  # nor without query tokens: their rows of partial results are read and nobody wrote them
}
_GPU = {"multi_processor_count": 8, "compute_capability": (9, 0), "warps_per_sm": 64, "blocks_per_sm": 32}
"""What Triton's interpreter is told: few processors, so that there are few splits."""


@contextmanager
def _as_on_a_gpu(module: str) -> Iterator[None]:
    """In Triton's interpreter lmdeploy asks for the GPU's properties all the same."""
    if LMDEPLOY.on_gpu():
        yield
        return
    names = vars(sys.modules[f"{_OPS}.{module}"])
    before: dict[str, Any] = {name: names[name] for name in ("get_device_props", "is_cuda") if name in names}
    names |= {"get_device_props": lambda device=None: _GPU, "is_cuda": lambda: False}
    try:
        yield
    finally:
        names |= before


def _window_left(i: Any) -> int | None:
    """A window without the query itself."""
    return None if i.window is None else i.window - 1


@LMDEPLOY.kernel("paged_decode", needs=_DECODE, supports=attnfuzz.Supports(**_CACHES, graph_replay=True))
def paged_attention(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """Split-K decode, as many splits as the GPU has room for."""
    return lambda: _decoded(i, attend, i.k_cache, i.v_cache, alibi_slopes=i.alibi_slopes)


@LMDEPLOY.kernel(
    "latent_decode",
    needs=_DECODE,
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        block_sizes=(16, 32, 64),
        head_sizes=(576,),
        v_head_sizes=(512,),
        lse="none",
        variants=("soft_cap",),
        empty_sequences=False,
        graph_replay=True,
    ),
)
def paged_attention_latent(i: Any, *, attend: Any) -> Callable[[], Tensor]:
    """`paged_attention` on a cache of latent vectors: V is the front of K, and is not read again."""
    cache = i.kv_cache[:, :, None]
    return lambda: _decoded(i, attend, cache, cache[..., : i.v_head_size])


def _decoded(i: Any, attend: Any, k_cache: Tensor, v_cache: Tensor, **others: Any) -> Tensor:
    with _as_on_a_gpu("pagedattention"):
        out: Tensor = attend(
            i.q, k_cache, v_cache, cache_seqlens=i.seq_lens, page_table=i.block_table, max_seqlen_q=1,
            softmax_scale=i.scale, softcap=i.soft_cap, window_size=_window_left(i), sinks=i.sinks,
            kv_layout=_LAYOUTS[getattr(i, "layout", "NHD")], **others,
        )  # fmt: skip
    return out


@LMDEPLOY.kernel(
    "paged_attention",
    needs=_PREFILL,
    supports=attnfuzz.Supports(
        **{
            **_CACHES,
            "head_sizes": (32, 64, 80, 96, 128, 256),
        },  # K and V of 192 take more than a Hopper's shared memory
        graph_replay=False,
        padding_tokens=False,
    ),
)
def flash_attention(i: Any, *, flatten: Any, attend: Any) -> Callable[[], Tensor]:
    """Prefill, causal: pages are copied into rows of each head, which `flash_attn_varlen_func` reads."""
    asked = {
        "softmax_scale": i.scale, "softcap": i.soft_cap, "window_size": _window_left(i), "sinks": i.sinks,
        "alibi_slopes": i.alibi_slopes,
    }  # fmt: skip
    batch = _Batch(i.q, i.block_table, i.seq_lens, i.cu_seqlens_q, _LAYOUTS[i.layout])
    return _prefilled(batch, i.k_cache, i.v_cache, flatten, attend, asked)


class _Batch(NamedTuple):
    q: Tensor
    table: Tensor
    lens: Tensor
    starts: Tensor
    layout: str = "bshd"


def _prefilled(
    batch: _Batch, k_cache: Tensor, v_cache: Tensor, flatten: Any, attend: Any, asked: dict[str, Any]
) -> Callable[[], Tensor]:
    """As lmdeploy's backend calls both: the copy has room for one more page."""
    starts_k = torch.nn.functional.pad(batch.lens.cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(1, int(batch.starts.diff().max()))
    size = k_cache.shape[batch.layout.index("s")]
    rows = -(-int(starts_k[-1]) // size) * size + size

    def call() -> Tensor:
        k, v = flatten(
            k_cache, v_cache, batch.lens, batch.table, start_loc=starts_k[:-1], out_size=rows,
            out_dtype=batch.q.dtype, kv_layout=batch.layout, flatten_kv_layout="hsd",
        )  # fmt: skip
        with _as_on_a_gpu("flashattention"):
            out: Tensor = attend(
                batch.q, k, v, cu_seqlens_q=batch.starts, cu_seqlens_k=starts_k, max_seqlen_q=longest, causal=True,
                kv_layout="hsd", **asked,
            )  # fmt: skip
        return out

    return call


@LMDEPLOY.kernel(
    CacheWrite(
        cache=attnfuzz.Choice(("same",)),
        skipped=attnfuzz.Integer(0, 0),  # it has no number for a token that goes nowhere
        block_size=attnfuzz.Choice((16, 1)),
    ),
    needs=_WRITE,
    options={"decoding": (True, False)},
)
def fill_kv_cache(i: Any, *, write: Any, decoding: bool) -> Callable[[], None]:
    """`fill_kv_cache`: each token as that of a sequence of its own, whose last page is the one it goes into."""
    place = i.slot_mapping % i.block_size
    ones = torch.ones_like(place, dtype=torch.int32)
    starts, lens = torch.arange(len(place), device=place.device, dtype=torch.int32), (place + 1).int()
    table = (i.slot_mapping // i.block_size).int()[:, None]
    return lambda: write(
        i.key, i.value, i.k_cache, i.v_cache, starts, ones, lens, 1 if decoding else 2, table,
        kv_layout=_LAYOUTS[i.layout],
    )  # fmt: skip


@LMDEPLOY.kernel(
    History(block_size=attnfuzz.Choice((16,)), head_size=attnfuzz.Choice((64, 32))),
    needs={
        **_WRITE, "flatten": _PREFILL["flatten"], "prefill": _PREFILL["attend"], "decode": _DECODE["attend"],
    },
)  # fmt: skip
def history(i: Any, *, write: Any, flatten: Any, prefill: Any, decode: Any) -> None:
    """The batches of a scheduler over one cache, which it fills; those of one token for each sequence are decoded."""
    caches = torch.zeros_like(i.k_cache), torch.zeros_like(i.v_cache)  # as its engine makes them
    for step in steps_of(i):
        counts = step.starts.diff()
        longest = int(counts.max())
        write(step.k, step.v, *caches, step.starts[:-1], counts, step.lens, longest, step.table)
        if longest > 1:
            batch = _Batch(step.q, step.table, step.lens, step.starts)
            step.out.copy_(_prefilled(batch, *caches, flatten, prefill, {})())
        else:
            with _as_on_a_gpu("pagedattention"):
                found = decode(step.q, *caches, cache_seqlens=step.lens, page_table=step.table, max_seqlen_q=1)
            step.out.copy_(found)
        for whole, own in zip((i.k_cache, i.v_cache), caches, strict=True):
            whole.flatten(0, 1)[step.slots] = own.flatten(0, 1)[step.slots]
