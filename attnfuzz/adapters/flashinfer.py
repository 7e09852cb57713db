"""FlashInfer's paged wrappers and its merges. Workspaces are kept from call to call, as servers do.

A window or a soft cap is another kernel, which FlashInfer builds when it is first asked for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.adapters.flashinfer_builds import FlashInferBuilds

__all__ = [
    "batch_attention_sinks",
    "batch_decode",
    "batch_decode_fixed_split",
    "batch_decode_graph",
    "batch_prefill",
    "batch_prefill_graph",
    "batch_prefill_mask",
    "merge_state",
    "merge_states",
]

FLASHINFER = attnfuzz.Engine("flashinfer-python", tried=("0.5.3", "0.7.2.post1"), builder=FlashInferBuilds())
_WORKSPACE_BYTES = 128 << 20
_KEPT_WRAPPERS = 8
"""Those that graphs are made of: each has 8 MB on the device and 8 MB on the host."""
_HEADERS = {"headers": ("flashinfer.jit.env:FLASHINFER_INCLUDE_DIR",)}
_DECODE = {"make": ("flashinfer:BatchDecodeWithPagedKVCacheWrapper",)}
_PREFILL = {"make": ("flashinfer:BatchPrefillWithPagedKVCacheWrapper",)}
_CACHES: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "layouts": ("NHD", "HND"),
    "head_sizes": (64, 128),
    "lse": "base2",
    "variants": ("window", "soft_cap"),
}
_QUANTISED: dict[str, Any] = {**_CACHES, "kv_dtypes": ("float8_e4m3fn", "float8_e5m2"), "kv_scales": ("tensor",)}
_NUMERICS = attnfuzz.Numerics(partials="input", tanh="approximate")  # `tmp_v` of decode.cuh has the output's dtype


def _dispatched(headers: Path, macro: str) -> tuple[int, ...]:
    """The numbers that FlashInfer has kernels for; it raises an error for all others.

    Raises ValueError if its headers do not say so as expected.
    """
    text = (Path(headers) / "flashinfer" / "utils.cuh").read_text(encoding="utf-8")
    lines = re.search(rf"#define {macro}\(.*\n(?:.*\\\n)*", text)
    if lines is None or not (found := re.findall(r"(?:== |case )(\d+)", lines.group())):
        raise ValueError(f"its utils.cuh has no {macro}")
    return tuple(sorted({int(number) for number in found}))


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _pages(i: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Its form of a block table: where each sequence's pages begin, all pages, and the tokens of each last page."""
    lengths = i.seq_lens.cpu()
    counts = (lengths + i.block_size - 1) // i.block_size
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    pages = torch.cat([row[:count] for row, count in zip(i.block_table, counts.tolist(), strict=True)])
    last = torch.where(lengths > 0, (lengths - 1) % i.block_size + 1, 0).int()
    return starts.to(i.q.device), pages, last.to(i.q.device)


def _heads(i: Any) -> tuple[int, int, int, int]:
    return i.q.shape[1], i.k_cache.shape[2 if i.layout == "NHD" else 1], i.q.shape[2], i.block_size


def _window_left(i: Any) -> int:
    """A window without the query itself, -1 for none."""
    window = getattr(i, "window", None)
    return -1 if window is None else window - 1


def _planned(wrapper: Any, i: Any, *first: Tensor, **others: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """``first``: what goes before the pages."""
    wrapper.plan(
        *first, *_pages(i), *_heads(i), sm_scale=i.scale, window_left=_window_left(i), logits_soft_cap=i.soft_cap,
        q_data_type=i.q.dtype, kv_data_type=i.k_cache.dtype, **others,
    )  # fmt: skip
    scales = {} if i.k_scale is None else {"k_scale": i.k_scale.item(), "v_scale": i.v_scale.item()}
    return lambda: wrapper.run(i.q, (i.k_cache, i.v_cache), out=i.out, lse=i.lse, return_lse=True, **scales)


def _decodes(headers: Path, **others: Any) -> attnfuzz.Supports:
    del others
    return attnfuzz.Supports(**_QUANTISED, gqa_ratios=_dispatched(headers, "DISPATCH_GQA_GROUP_SIZE"))


@FLASHINFER.kernel(
    "paged_decode",
    needs={**_DECODE, **_HEADERS},
    supports=_decodes,
    options={"use_tensor_cores": (False, True)},
    numerics=_NUMERICS,
    gpu_only=True,
)
def batch_decode(i: Any, *, make: Any, headers: Path, use_tensor_cores: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchDecodeWithPagedKVCacheWrapper`; with tensor cores that is its prefill kernel."""
    return _planned(make(_workspace(i.q.device), i.layout, use_tensor_cores=use_tensor_cores), i)


@FLASHINFER.kernel(
    "paged_decode",
    needs=_DECODE,
    supports=attnfuzz.Supports(**_CACHES, batch_invariant=True),
    options={"fixed_split_size": (1, 8)},
    numerics=_NUMERICS,
    gpu_only=True,
)
def batch_decode_fixed_split(i: Any, *, make: Any, fixed_split_size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """The same with splits of a fixed number of pages, with which it promises that no row depends on its batch."""
    wrapper = make(_workspace(i.q.device), i.layout, use_tensor_cores=True)
    return _planned(wrapper, i, fixed_split_size=fixed_split_size)


@FLASHINFER.kernel(
    "paged_attention",
    needs=_PREFILL,
    supports=attnfuzz.Supports(**_QUANTISED),
    numerics=_NUMERICS,
    gpu_only=True,
)
def batch_prefill(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchPrefillWithPagedKVCacheWrapper`, causal: prefill, decode and both in one batch."""
    return _planned(make(_workspace(i.q.device), i.layout), i, i.cu_seqlens_q, causal=True)


@FLASHINFER.kernel(
    "masked_attention",
    needs=_PREFILL,
    supports=attnfuzz.Supports(**{**_QUANTISED, "variants": ("soft_cap",)}),
    numerics=_NUMERICS,
    gpu_only=True,
)
def batch_prefill_mask(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """The same with `custom_mask`."""
    return _planned(make(_workspace(i.q.device), i.layout), i, i.cu_seqlens_q, custom_mask=i.mask)


def _shape(i: Any) -> tuple[Any, ...]:
    """All that a wrapper in CUDA-graph mode is made for, and keeps from one batch to the next."""
    variant = (i.scale, i.window, i.soft_cap)
    return (i.q.device, i.q.dtype, len(i.q), i.layout, _heads(i), tuple(i.block_table.shape), variant)


@functools.lru_cache(maxsize=_KEPT_WRAPPERS)
def _decode_of_graph(make: Any, shape: tuple[Any, ...], use_tensor_cores: bool) -> Any:
    device, _, _, layout, _, (num_seqs, columns), _ = shape
    starts, pages, last = _buffers(device, num_seqs + 1, num_seqs * columns, num_seqs)
    return make(_workspace(device), layout, True, use_tensor_cores, starts, pages, last)


@functools.lru_cache(maxsize=_KEPT_WRAPPERS)
def _prefill_of_graph(make: Any, shape: tuple[Any, ...]) -> Any:
    device, _, _, layout, _, (num_seqs, columns), _ = shape
    return make(
        _workspace(device), layout, True, *_buffers(device, num_seqs + 1, num_seqs + 1, num_seqs * columns, num_seqs)
    )


def _buffers(device: torch.device, *sizes: int) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]


@FLASHINFER.kernel(
    "paged_decode",
    needs={**_DECODE, **_HEADERS},
    supports=lambda headers, **others: attnfuzz.Supports(
        **_CACHES, gqa_ratios=_dispatched(headers, "DISPATCH_GQA_GROUP_SIZE"), graph_replay=True
    ),
    options={"use_tensor_cores": (False, True)},
    numerics=_NUMERICS,
    gpu_only=True,
)
def batch_decode_graph(
    i: Any, *, make: Any, headers: Path, use_tensor_cores: bool
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The same in CUDA-graph mode: launches are padded, and what is planned lies in buffers that a graph reads."""
    return _planned(_decode_of_graph(make, _shape(i), use_tensor_cores), i)


@FLASHINFER.kernel(
    "paged_attention",
    needs=_PREFILL,
    supports=attnfuzz.Supports(**_CACHES, graph_replay=True),
    numerics=_NUMERICS,
    gpu_only=True,
)
def batch_prefill_graph(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchPrefillWithPagedKVCacheWrapper` in CUDA-graph mode."""
    return _planned(_prefill_of_graph(make, _shape(i)), i, i.cu_seqlens_q, causal=True)


@FLASHINFER.kernel(
    "paged_attention",
    needs={"make": ("flashinfer.attention:BatchAttentionWithAttentionSinkWrapper",)},
    supports=attnfuzz.Supports(**{**_CACHES, "variants": ("window", "sinks")}),
    numerics=_NUMERICS,
    gpu_only=True,
)
def batch_attention_sinks(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchAttentionWithAttentionSinkWrapper`, causal; without sinks those of -inf, which take no weight."""
    num_q_heads, head_size = i.q.shape[1:]
    wrapper = make(
        _workspace(i.q.device), i.layout, q_data_type=i.q.dtype, kv_data_type=i.k_cache.dtype, head_dim_qk=head_size,
        head_dim_vo=head_size, window_left=_window_left(i),
    )  # fmt: skip
    _planned(wrapper, i, i.cu_seqlens_q, causal=True)
    sinks = i.q.new_full((num_q_heads,), -torch.inf, dtype=torch.float32) if i.sinks is None else i.sinks
    return lambda: wrapper.run(i.q, (i.k_cache, i.v_cache), sinks, i.scale, out=i.out, lse=i.lse, return_lse=True)


def _merges(headers: Path, **others: Any) -> attnfuzz.Supports:
    del others
    return attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        head_sizes=_dispatched(headers, "DISPATCH_HEAD_DIM"),
        empty_state_lse=("-inf",),
        lse="base2",
        lse_layout="TH",
        graph_replay=True,
    )


@FLASHINFER.kernel(
    "merge_states", needs={"merge": ("flashinfer:merge_state",), **_HEADERS}, supports=_merges, gpu_only=True
)
def merge_state(i: Any, *, merge: Any, headers: Path) -> tuple[Tensor, Tensor]:
    """The merge of two states, whose LSEs are to base 2."""
    out, lse = merge(i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse)
    return out, lse


@FLASHINFER.kernel(
    "merge_states", needs={"merge": ("flashinfer:merge_states",), **_HEADERS}, supports=_merges, gpu_only=True
)
def merge_states(i: Any, *, merge: Any, headers: Path) -> tuple[Tensor, Tensor]:
    """The merge of any number of states that lie side by side, of two."""
    outputs = torch.stack((i.prefix_output, i.suffix_output), dim=1)
    lses = torch.stack((i.prefix_lse, i.suffix_lse), dim=1)
    out, lse = merge(outputs, lses)
    return out, lse
