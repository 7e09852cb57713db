"""xFormers' split-K attention in Triton, over pages. Its other operators call kernels of other projects.

What `memory_efficient_attention_forward` asks of inputs before it takes this operator is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import attnfuzz

XFORMERS = attnfuzz.Engine("xformers", tried=("0.0.35",))
_FMHA = "xformers.ops.fmha"
_NEEDS = {
    "make": (f"{_FMHA}.triton_splitk:FwOp",),
    "inputs": (f"{_FMHA}.common:Inputs",),
    "padded": (f"{_FMHA}.attn_bias:BlockDiagonalCausalWithOffsetPaddedKeysMask",),
    "paged": (f"{_FMHA}.attn_bias:PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",),
}
_CACHES: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "head_sizes": (16, 32, 64, 128, 256),
    "block_sizes": (64, 128, 256),  # multiples of a tile of keys
    "layouts": ("NHD",),
    "strides": "contiguous",  # keys and values of all pages are one row
    "empty_sequences": False,
    "graph_replay": False,  # its mask has the lengths on the host, too, and chooses the splits by them
}
_OPTIONS = {"split_k": (0, 1, 4)}
_NUMERICS = attnfuzz.Numerics(row_sum="float32")


@XFORMERS.kernel(
    "paged_decode", needs=_NEEDS, supports=attnfuzz.Supports(**_CACHES), options=_OPTIONS, numerics=_NUMERICS
)
def splitk(i: Any, *, split_k: int, **needs: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`triton_splitk.FwOp` under a causal mask over pages, with 1, 4 or (0) as many splits as it finds best."""
    return _called(i, [1] * len(i.q), split_k, **needs)


@XFORMERS.kernel(
    "paged_attention",
    needs=_NEEDS,
    supports=attnfuzz.Supports(
        **_CACHES,
        padding_tokens=False,
        max_query_len=16,
        where=({"equal_queries": True},),  # it refuses others under a causal mask
    ),
    options=_OPTIONS,
    numerics=_NUMERICS,
)
def splitk_queries(i: Any, *, split_k: int, **needs: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`splitk` for several query tokens, as many for each sequence."""
    return _called(i, i.cu_seqlens_q.diff().tolist(), split_k, **needs)


def _called(
    i: Any, counts: list[int], split_k: int, *, make: Any, inputs: Any, padded: Any, paged: Any
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Query heads of one KV head are a group, to which its K and V are broadcast."""
    kv_heads, size = i.k_cache.shape[2:]
    group = i.q.shape[1] // kv_heads
    lengths, room = i.seq_lens.tolist(), i.block_table.shape[1] * i.block_size
    bias = padded.from_seqlens(q_seqlen=counts, kv_padding=room, kv_seqlen=lengths, device=i.q.device)
    bias = bias.make_paged(i.block_table, i.block_size, paged)
    q = i.q.view(1, -1, kv_heads, group, size)
    k, v = (one.view(1, -1, kv_heads, 1, size).expand(-1, -1, -1, group, -1) for one in (i.k_cache, i.v_cache))
    given = inputs(query=q, key=k, value=v, attn_bias=bias, scale=i.scale)
    operator = make.get_operator(split_k) if split_k else make

    def call() -> tuple[Tensor, Tensor]:
        with _as_on_a_gpu():
            out, context = operator.apply(given, needs_gradient=True)
        return out.reshape(i.q.shape), context.lse.reshape(kv_heads * group, -1).T

    return call


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """In Triton's interpreter xFormers asks for the GPU's capability all the same."""
    if XFORMERS.on_gpu():
        yield
        return
    cuda: Any = torch.cuda
    before = cuda.get_device_capability
    cuda.get_device_capability = lambda device=None: (9, 0)
    try:
        yield
    finally:
        cuda.get_device_capability = before
