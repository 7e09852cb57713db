"""FlashInfer's attention over paged and plain caches, its merges and its cache writers.

Workspaces are kept from call to call, as servers do, but for XQA's, whose semaphores must be zero at first.

A window or a soft cap is another kernel, which FlashInfer builds when it is first asked for it.

What CUDA graphs capture has to be in its CUDA-graph mode, in which plans go to buffers that stay: all else plans
into memory of its own.
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
from attnfuzz.adapters.tokens import flat, slots_of
from attnfuzz.families import CacheWrite, History, LatentVerify, MergeRanks
from attnfuzz.families.history import steps_of

FLASHINFER = attnfuzz.Engine(
    "flashinfer-python", tried=("0.5.3", "0.7.2.post1"), gpu_only=True, builder=FlashInferBuilds()
)
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
    "graph_replay": False,
}
_IN_GRAPHS: dict[str, Any] = {**_CACHES, "graph_replay": True}
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
    return _listed(i.block_table, i.seq_lens, i.block_size)


def _listed(table: Tensor, lengths: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths = lengths.cpu()
    counts = (lengths + block_size - 1) // block_size
    pages = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    last = torch.where(lengths > 0, (lengths - 1) % block_size + 1, 0).int()
    return _starts(counts).to(table.device), pages, last.to(table.device)


def _starts(counts: Tensor) -> Tensor:
    """Where each begins of parts of so many in a row, and where the last one ends."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


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
)
def batch_decode_fixed_split(i: Any, *, make: Any, fixed_split_size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """`batch_decode` with splits of a fixed number of pages, with which it promises that no row depends on its
    batch."""
    wrapper = make(_workspace(i.q.device), i.layout, use_tensor_cores=True)
    return _planned(wrapper, i, fixed_split_size=fixed_split_size)


@FLASHINFER.kernel("paged_attention", needs=_PREFILL, supports=attnfuzz.Supports(**_QUANTISED), numerics=_NUMERICS)
def batch_prefill(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchPrefillWithPagedKVCacheWrapper`, causal: prefill, decode and both in one batch."""
    return _planned(make(_workspace(i.q.device), i.layout), i, i.cu_seqlens_q, causal=True)


@FLASHINFER.kernel(
    "masked_attention",
    needs=_PREFILL,
    supports=attnfuzz.Supports(**{**_QUANTISED, "variants": ("soft_cap",)}),
    numerics=_NUMERICS,
)
def batch_prefill_mask(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`batch_prefill` with `custom_mask`."""
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
        **_IN_GRAPHS, gqa_ratios=_dispatched(headers, "DISPATCH_GQA_GROUP_SIZE")
    ),
    options={"use_tensor_cores": (False, True)},
    numerics=_NUMERICS,
)
def batch_decode_graph(
    i: Any, *, make: Any, headers: Path, use_tensor_cores: bool
) -> Callable[[], tuple[Tensor, Tensor]]:
    """`batch_decode` in CUDA-graph mode: launches are padded, and what is planned lies in buffers that a graph
    reads."""
    return _planned(_decode_of_graph(make, _shape(i), use_tensor_cores), i)


@FLASHINFER.kernel("paged_attention", needs=_PREFILL, supports=attnfuzz.Supports(**_IN_GRAPHS), numerics=_NUMERICS)
def batch_prefill_graph(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchPrefillWithPagedKVCacheWrapper` in CUDA-graph mode."""
    return _planned(_prefill_of_graph(make, _shape(i)), i, i.cu_seqlens_q, causal=True)


@FLASHINFER.kernel(
    "paged_attention",
    needs={"make": ("flashinfer.attention:BatchAttentionWithAttentionSinkWrapper",)},
    supports=attnfuzz.Supports(**{**_CACHES, "variants": ("window", "sinks")}),
    numerics=_NUMERICS,
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


@FLASHINFER.kernel("merge_states", needs={"merge": ("flashinfer:merge_state",), **_HEADERS}, supports=_merges)
def merge_state(i: Any, *, merge: Any, headers: Path) -> tuple[Tensor, Tensor]:
    """The merge of two states, whose LSEs are to base 2."""
    out, lse = merge(i.prefix_output, i.prefix_lse, i.suffix_output, i.suffix_lse)
    return out, lse


@FLASHINFER.kernel("merge_states", needs={"merge": ("flashinfer:merge_states",), **_HEADERS}, supports=_merges)
def merge_states(i: Any, *, merge: Any, headers: Path) -> tuple[Tensor, Tensor]:
    """The merge of any number of states that lie side by side, of two."""
    outputs = torch.stack((i.prefix_output, i.suffix_output), dim=1)
    lses = torch.stack((i.prefix_lse, i.suffix_lse), dim=1)
    out, lse = merge(outputs, lses)
    return out, lse


@FLASHINFER.kernel(
    "merge_states", needs={"merge": ("flashinfer:merge_state_in_place",), **_HEADERS}, supports=_merges,
    options={"masked": (False, True)},
)  # fmt: skip
def merge_state_in_place(i: Any, *, merge: Any, headers: Path, masked: bool) -> tuple[Tensor, Tensor]:
    """The merge of a second state into the first; or of every other token, and of the rest in another call."""
    del headers
    out, lse = (given.clone(memory_format=torch.contiguous_format) for given in (i.prefix_output, i.prefix_lse))
    if not masked:
        merge(out, lse, i.suffix_output, i.suffix_lse)
        return out, lse
    mask = torch.arange(len(out), device=out.device) % 2 == 0
    for part in (mask, ~mask):
        merge(out, lse, i.suffix_output, i.suffix_lse, part)
    return out, lse


@FLASHINFER.kernel(
    MergeRanks(
        num_ranks=attnfuzz.Choice((2, 1, 3, 4, 8)),
        head_size=attnfuzz.Choice((64, 128, 512)),
        empty=attnfuzz.Choice(("-inf",)),
        empty_outputs=attnfuzz.Choice(("zeros",)),
        base=attnfuzz.Choice(("2",)),
        parts=attnfuzz.Choice(("input",)),  # attention/cascade.cuh keeps states between threads in the dtype of outputs
        padded=attnfuzz.Integer(0, 0),
        strides=attnfuzz.Choice(("contiguous",)),
    ),
    needs={"merge": ("flashinfer:merge_states",)},
)
def merge_ranks(i: Any, *, merge: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`merge_states` of one to eight states of each token, which lie side by side."""
    outs, lses = i.outs.transpose(0, 1).contiguous(), i.lses.transpose(0, 1).contiguous()

    def call() -> tuple[Tensor, Tensor]:
        out, lse = merge(outs, lses)
        return out, lse

    return call


def _appended(i: Any) -> tuple[Tensor, ...]:
    """Tokens as those of two requests, which share the pages of the cache, the last page first.

    Of each token its request and its position there; then all pages, where each request's begin, and the tokens of each
    last page.
    """
    num_pages = i.k_cache.shape[0]
    first = num_pages // 2
    device = i.slot_mapping.device
    place = num_pages - 1 - i.slot_mapping // i.block_size
    request = place >= first
    position = (place - first * request) * i.block_size + i.slot_mapping % i.block_size
    pages = torch.arange(num_pages, device=device).flip(0)
    starts = torch.tensor([0, first, num_pages], dtype=torch.int32, device=device)
    last = torch.tensor([i.block_size if first else 0, i.block_size], dtype=torch.int32, device=device)
    return tuple(part.int() for part in (request, position, pages, starts, last))


_PLAIN_WRITES: dict[str, Any] = {
    "cache": attnfuzz.Choice(("same",)),
    "skipped": attnfuzz.Integer(0, 0),  # it has no number for a token that goes nowhere
}


@FLASHINFER.kernel(
    CacheWrite(head_size=attnfuzz.Choice((64, 128)), **_PLAIN_WRITES),
    needs={"write": ("flashinfer:append_paged_kv_cache",)},
)
def append(i: Any, *, write: Any) -> Callable[[], None]:
    """`append_paged_kv_cache`, of the head sizes that its dispatch has."""
    request, position, *pages = _appended(i)
    return functools.partial(write, i.key, i.value, request, position, (i.k_cache, i.v_cache), *pages, i.layout)


@FLASHINFER.kernel(
    History(block_size=attnfuzz.Choice((16, 4)), head_size=attnfuzz.Choice((64,))),
    needs={
        "write": ("flashinfer:append_paged_kv_cache",),
        "make_decode": _DECODE["make"],
        "make_prefill": _PREFILL["make"],
    },
    supports=attnfuzz.Supports(graph_replay=False),
    options={"tensor_cores": (False, True)},
)
def history(i: Any, *, write: Any, make_decode: Any, make_prefill: Any, tensor_cores: bool) -> None:
    """The batches of a scheduler over one cache, which `append_paged_kv_cache` fills, with two wrappers that are kept.

    Batches of one new token each are decoded in CUDA-graph mode, by a wrapper for each size, as servers have them.
    """
    device, caches = i.k_cache.device, (i.k_cache, i.v_cache)
    heads, dtype = (i.num_kv_heads * i.gqa_ratio, i.num_kv_heads, i.head_size, i.block_size), i.k_cache.dtype
    types = {"q_data_type": dtype, "kv_data_type": dtype}
    prefill = make_prefill(_workspace(device), "NHD")
    decoders: dict[int, Any] = {}
    for step in steps_of(i):
        counts = step.starts.diff()
        indptr, pages, last = listed = _listed(step.table, step.lens, i.block_size)
        request = torch.arange(len(counts), dtype=torch.int32, device=device).repeat_interleave(counts)
        before = (step.lens - counts - step.starts[:-1]).repeat_interleave(counts)
        position = before + torch.arange(len(request), dtype=torch.int32, device=device)
        write(step.k, step.v, request, position.int(), caches, pages, indptr, last, "NHD")
        if int(counts.max()) > 1:
            prefill.plan(step.starts, *listed, *heads, causal=True, **types)
            prefill.run(step.q, caches, out=step.out)
            continue
        if len(counts) not in decoders:
            room = _buffers(device, len(counts) + 1, len(i.k_cache) * len(counts), len(counts))
            decoders[len(counts)] = make_decode(_workspace(device), "NHD", True, tensor_cores, *room)
        decode = decoders[len(counts)]
        decode.plan(*listed, *heads, **types)
        decode.run(step.q, caches, out=step.out)


_CKV, _KPE = 512, 64
"""The only sizes that `append_paged_mla_kv_cache` takes."""


@FLASHINFER.kernel(
    CacheWrite(
        num_kv_heads=attnfuzz.Choice((1,)),
        head_size=attnfuzz.Choice((_CKV,)),
        layout=attnfuzz.Choice(("NHD",)),
        **_PLAIN_WRITES,
    ),
    needs={"write": ("flashinfer:append_paged_mla_kv_cache",)},
)
def append_mla(i: Any, *, write: Any) -> Callable[[], None]:
    """`append_paged_mla_kv_cache`: K is the latent vector; V is eight rotated parts, written one after the other."""
    request, position, *pages = _appended(i)

    def call() -> None:
        for at in range(0, _CKV, _KPE):
            part = slice(at, at + _KPE)
            write(
                i.key[:, 0], i.value[:, 0, part], request, position, i.k_cache[:, :, 0], i.v_cache[:, :, 0, part],
                *pages,
            )  # fmt: skip

    return call


_MLA = {
    "make": ("flashinfer.mla:BatchMLAPagedAttentionWrapper",),
    "metadata": ("flashinfer.mla:MLAPlanMetadata", "flashinfer.mla:BatchMLAPagedAttentionWrapper"),  # 0.5 has none
}


def _latent(
    i: Any, wrapper: Any, metadata: Any, cache: Tensor, rank: int, starts: Tensor, causal: bool, scale: float
) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchMLAPagedAttentionWrapper` with logarithms to base e; ``cache`` is ``[blocks, block_size, head_size]``."""
    page_starts, pages, _ = _pages(i)
    size = cache.shape[-1]
    shape = (i.q.shape[1], rank, size - rank, i.block_size, causal, scale, i.q.dtype, cache.dtype)
    lists = (starts, page_starts, pages, i.seq_lens)
    q, rows = i.q.tensor_split((rank,), dim=-1), cache.tensor_split((rank,), dim=-1)
    if not hasattr(metadata, "csr"):
        wrapper.plan(*lists, *shape)
        return lambda: wrapper.run(*q, *rows, out=i.out, lse=i.lse, return_lse=True, return_lse_base_on_e=True)
    names = ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale", "q_data_type")
    wrapper.plan(
        metadata=metadata.csr(*lists), **dict(zip((*names, "kv_data_type"), shape, strict=True)), query_layout="split",
        kv_cache_layout="split", lse_mode="basee",
    )  # fmt: skip
    return lambda: wrapper.run(query=q, kv_cache=rows, out=i.out, lse=i.lse, return_lse=True, return_lse_base_on_e=True)


_LATENT: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "head_sizes": (_CKV + _KPE,),
    "v_head_sizes": (_CKV,),
    "gqa_ratios": (1, 2, 4, 8, 16, 32, 64, 128),
    "strides": "serving",
    "empty_sequences": False,
}


def _one_each(i: Any) -> Tensor:
    return torch.arange(len(i.q) + 1, dtype=torch.int32, device=i.q.device)


@FLASHINFER.kernel(
    "latent_decode",
    needs=_MLA,
    supports=attnfuzz.Supports(**_LATENT, graph_replay=False),
    numerics=_NUMERICS,
)
def mla_decode(i: Any, *, make: Any, metadata: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchMLAPagedAttentionWrapper` for one query token of each sequence; on sm_90 its backend is fa3."""
    wrapper = make(_workspace(i.q.device))
    return _latent(i, wrapper, metadata, i.kv_cache, i.v_head_size, _one_each(i), False, i.scale)


@FLASHINFER.kernel(
    "latent_decode",
    needs=_MLA,
    supports=attnfuzz.Supports(**_LATENT, graph_replay=True),
    numerics=_NUMERICS,
)
def mla_decode_graph(i: Any, *, make: Any, metadata: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`mla_decode` in CUDA-graph mode."""
    shape = (i.q.device, i.q.dtype, i.q.shape[1], i.block_size, tuple(i.block_table.shape), i.scale)
    wrapper = _latent_of_graph(make, shape)
    return _latent(i, wrapper, metadata, i.kv_cache, i.v_head_size, _one_each(i), False, i.scale)


@functools.lru_cache(maxsize=_KEPT_WRAPPERS)
def _latent_of_graph(make: Any, shape: tuple[Any, ...]) -> Any:
    device, _, _, _, (num_seqs, columns), _ = shape
    starts, page_starts, pages, lengths = _buffers(device, num_seqs + 1, num_seqs + 1, num_seqs * columns, num_seqs)
    return make(_workspace(device), True, starts, page_starts, pages, lengths)


@FLASHINFER.kernel(
    LatentVerify(
        num_heads=attnfuzz.Choice((1, 2, 4, 16)),  # 0.7 refuses some cases of numbers that 64 is no multiple of
        rank=attnfuzz.Choice((_CKV,)),
        rope_size=attnfuzz.Choice((_KPE,)),
        latents=attnfuzz.Choice(("same",)),
    ),
    needs=_MLA,
    supports=attnfuzz.Supports(graph_replay=False),
)
def mla_verify(i: Any, *, make: Any, metadata: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`mla_decode` for several query tokens of each sequence, causal or not."""
    size = i.kv_cache.shape[-1]
    cache = i.kv_cache.view(-1, i.block_size, size)
    wrapper = make(_workspace(i.q.device))
    return _latent(i, wrapper, metadata, cache, i.rank, i.cu_seqlens_q, i.causal, size**-0.5)


@FLASHINFER.kernel(
    "paged_attention",
    needs={"make": ("flashinfer:MultiLevelCascadeAttentionWrapper",)},
    supports=attnfuzz.Supports(**{**_CACHES, "lse": "none", "variants": ("soft_cap",), "strides": "serving"}),
    numerics=_NUMERICS,
)
def cascade(i: Any, *, make: Any) -> Callable[[], Tensor]:
    """`MultiLevelCascadeAttentionWrapper` of two levels: half of the pages that lie before a sequence's first query.

    These are one request of all query tokens if all sequences begin with them, else one request of each sequence. A
    window counts from the end of its own level, so none is asked for.
    """
    counts = i.cu_seqlens_q.diff()
    full = (i.seq_lens - counts) // i.block_size
    shared = _shared_pages(i.block_table, full)
    before = torch.full_like(full, shared) if shared else full // 2
    if shared:
        over = i.cu_seqlens_q[[0, -1]].contiguous()
        first = _listed(i.block_table[:1], before[:1] * i.block_size, i.block_size)
    else:
        over, first = i.cu_seqlens_q, _listed(i.block_table, before * i.block_size, i.block_size)
    columns = torch.arange(i.block_table.shape[1], device=i.q.device)
    moved = (columns + before[:, None]).clamp(max=i.block_table.shape[1] - 1)
    rest = _listed(i.block_table.gather(1, moved.long()), i.seq_lens - before * i.block_size, i.block_size)
    levels = zip((over, *first), (i.cu_seqlens_q, *rest), strict=True)
    wrapper = make(2, _workspace(i.q.device), i.layout)
    wrapper.plan(
        *map(list, levels), *_heads(i), causal=True, sm_scale=i.scale, logits_soft_cap=i.soft_cap,
        q_data_type=i.q.dtype, kv_data_type=i.k_cache.dtype,
    )  # fmt: skip
    return functools.partial(wrapper.run, i.q, (i.k_cache, i.v_cache))


def _shared_pages(table: Tensor, full: Tensor) -> int:
    """How many pages all sequences begin with, of those that are full and lie before their queries."""
    same = (table == table[:1]).all(0).cpu().tolist()
    most = int(full.min())
    return next((at for at, is_same in enumerate(same[:most]) if not is_same), most) if len(table) > 1 else 0


@FLASHINFER.kernel(
    "paged_attention",
    needs={"make": ("flashinfer:BatchAttention",)},
    supports=attnfuzz.Supports(**{**_CACHES, "variants": ("soft_cap",), "strides": "serving"}),
    numerics=_NUMERICS,
)
def batch_attention(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchAttention`, causal: one persistent kernel for prefill and decode."""
    wrapper = _persistent(make, i.layout, i.q.device)
    starts, pages, _ = _pages(i)
    heads, kv_heads, size, block_size = _heads(i)
    wrapper.plan(
        i.cu_seqlens_q, starts, pages, i.seq_lens, heads, kv_heads, size, size, block_size, causal=True,
        sm_scale=i.scale, logits_soft_cap=i.soft_cap, q_data_type=i.q.dtype, kv_data_type=i.k_cache.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(i.q, (i.k_cache, i.v_cache), out=i.out, lse=i.lse, logits_soft_cap=i.soft_cap or 0.0)


@functools.cache
def _persistent(make: Any, layout: str, device: torch.device) -> Any:
    """Kept: each has 384 MB of its own."""
    return make(layout, str(device))


_SINGLE: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "head_sizes": (64, 128),
    "lse": "base2",
    "graph_replay": False,
}


@FLASHINFER.kernel(
    "dense_decode",
    needs={"decode": ("flashinfer:single_decode_with_kv_cache",), **_HEADERS},
    supports=lambda headers, **others: attnfuzz.Supports(
        **_SINGLE, gqa_ratios=_dispatched(headers, "DISPATCH_GQA_GROUP_SIZE"), empty_sequences=False
    ),
    options={"use_tensor_cores": (False, True)},
    numerics=_NUMERICS,
)
def single_decode(i: Any, *, decode: Any, headers: Path, use_tensor_cores: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    """`single_decode_with_kv_cache`, called for each sequence: it takes tensors without gaps only."""
    del headers
    parts = [
        (i.q[seq].contiguous(), i.k[seq, :length].contiguous(), i.v[seq, :length].contiguous())
        for seq, length in enumerate(i.seq_lens.tolist())
    ]

    def call() -> tuple[Tensor, Tensor]:
        found = [decode(*part, use_tensor_cores=use_tensor_cores, sm_scale=i.scale, return_lse=True) for part in parts]
        out, lse = (torch.stack(rows) for rows in zip(*found, strict=True))
        return out, lse

    return call


_SINGLE_PREFILL = {"prefill": ("flashinfer:single_prefill_with_kv_cache",)}
_SINGLE_PREFILLS: dict[str, Any] = {**_SINGLE, "layouts": ("NHD",), "variants": ("window", "soft_cap")}


@FLASHINFER.kernel(
    "paged_attention",
    needs=_SINGLE_PREFILL,
    supports=attnfuzz.Supports(**_SINGLE_PREFILLS),
    numerics=_NUMERICS,
)
def single_prefill(i: Any, *, prefill: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`single_prefill_with_kv_cache`, fa2, called for each sequence on its keys and values, copied out of the cache."""
    return _one_by_one(i, prefill, "fa2")


def _of_hopper(is_hopper: Any, **others: Any) -> attnfuzz.Supports:
    del others
    if not is_hopper(torch.device("cuda")):
        raise ValueError("its fa3 is for sm_90")
    return attnfuzz.Supports(**_SINGLE_PREFILLS)


@FLASHINFER.kernel(
    "paged_attention",
    needs={**_SINGLE_PREFILL, "is_hopper": ("flashinfer.utils:is_sm90a_supported",)},
    supports=_of_hopper,
    numerics=_NUMERICS,
)
def single_prefill_fa3(i: Any, *, prefill: Any, is_hopper: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`single_prefill` with fa3, for sm_90."""
    del is_hopper
    return _one_by_one(i, prefill, "fa3")


def _one_by_one(i: Any, prefill: Any, backend: str) -> Callable[[], tuple[Tensor, Tensor]]:
    parts = _prompts(i)

    def call() -> tuple[Tensor, Tensor]:
        for own, *part in parts:
            i.out[own], i.lse[own] = prefill(
                *part, causal=True, sm_scale=i.scale, window_left=_window_left(i), logits_soft_cap=i.soft_cap,
                backend=backend, return_lse=True,
            )  # fmt: skip
        return i.out, i.lse

    return call


def _prompts(i: Any) -> list[tuple[slice, Tensor, Tensor, Tensor]]:
    """Each sequence that has query tokens: which rows are its own, these, and its keys and values in a row."""
    starts, slots = slots_of(i, torch.zeros_like(i.seq_lens), i.seq_lens)
    k, v = flat(i.k_cache)[slots], flat(i.v_cache)[slots]
    rows, keys = i.cu_seqlens_q.tolist(), starts.tolist()
    owned = [(slice(rows[seq], rows[seq + 1]), slice(keys[seq], keys[seq + 1])) for seq in range(len(i.seq_lens))]
    return [(own, i.q[own], k[seen], v[seen]) for own, seen in owned if own.start < own.stop]


@FLASHINFER.kernel(
    "paged_attention",
    needs={"make": ("flashinfer:PODWithPagedKVCacheWrapper",)},
    supports=attnfuzz.Supports(
        **{**_CACHES, "layouts": ("NHD",), "variants": ("window",), "strides": "serving", "lse": "none"}
    ),
    numerics=_NUMERICS,
)
def pod_single(i: Any, *, make: Any) -> Callable[[], Tensor]:
    """`PODWithPagedKVCacheWrapper`, called for each sequence as the one that is filled in, beside all last tokens.

    These are decoded in each call; of a last token the decode's result is taken. It returns no log-sum-exp.
    """
    parts = _prompts(i)
    if not parts:
        return lambda: i.out
    has_queries = i.cu_seqlens_q.diff() > 0
    last = i.cu_seqlens_q[1:][has_queries].long() - 1
    pages = _listed(i.block_table[has_queries], i.seq_lens[has_queries], i.block_size)
    wrapper = make(_workspace(i.q.device), i.layout)
    wrapper.plan(
        *pages, *_heads(i), window_left=_window_left(i), q_data_type=i.q.dtype, kv_data_type=i.k_cache.dtype,
        sm_scale=i.scale,
    )  # fmt: skip
    q_last = i.q[last]

    def call() -> Tensor:
        for own, *part in parts:
            i.out[own], decoded = wrapper.run(
                *part, q_last, (i.k_cache, i.v_cache), causal_p=True, sm_scale_p=i.scale, window_left_p=_window_left(i)
            )
        i.out[last] = decoded
        out: Tensor = i.out
        return out

    return call


@FLASHINFER.kernel(
    "paged_attention",
    needs={"make": ("flashinfer:BatchPODWithPagedKVCacheWrapper",)},
    supports=attnfuzz.Supports(**{**_CACHES, "variants": ("window",), "strides": "serving"}),
    numerics=_NUMERICS,
)
def pod(i: Any, *, make: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """`BatchPODWithPagedKVCacheWrapper`: all query tokens as prefill, and each sequence's last one as decode, too.

    It takes no batch without one of them. Of a last token the decode's result is taken.
    """
    has_queries = i.cu_seqlens_q.diff() > 0
    if not bool(has_queries.any()):
        return lambda: (i.out, i.lse)
    last = i.cu_seqlens_q[1:][has_queries].long() - 1
    counts = i.cu_seqlens_q.diff()[has_queries]
    pages = _listed(i.block_table[has_queries], i.seq_lens[has_queries], i.block_size)
    ones = torch.arange(len(last) + 1, dtype=torch.int32, device=i.q.device)
    wrapper = make(_workspace(i.q.device), i.layout)
    wrapper.plan(
        _starts(counts), *pages, ones, *pages, *_heads(i), window_left=_window_left(i), q_data_type=i.q.dtype,
        kv_data_type=i.k_cache.dtype, sm_scale=i.scale,
    )  # fmt: skip
    total = int(counts.sum())
    caches = (i.k_cache, i.v_cache)

    def call() -> tuple[Tensor, Tensor]:
        outs, lses = wrapper.run(i.q[:total], caches, i.q[last], caches, causal_p=True, return_lse=True)
        for result, (prefilled, decoded) in ((i.out, outs), (i.lse, lses)):
            result[:total] = prefilled
            result[last] = decoded
        return i.out, i.lse

    return call


@FLASHINFER.kernel(
    "paged_decode",
    needs={
        "attend": ("flashinfer.decode:xqa_batch_decode_with_kv_cache",),
        "choose": ("flashinfer.decode:trtllm_batch_decode_with_kv_cache",),
    },
    supports=attnfuzz.Supports(
        dtypes=("float16", "bfloat16"),
        layouts=("NHD", "HND"),
        head_sizes=(128,),  # and a page and a group of two sizes: each is a module of its own, and so is a window
        where=({"block_size": 16, "gqa_ratio": 8}, {"block_size": 64, "gqa_ratio": 4}),
        variants=("window", "sinks"),
        strides="serving",
        empty_sequences=False,
        lse="none",
        graph_replay=False,  # its workspace is made anew for each plan
    ),
    options={"through": ("xqa", "trtllm")},
    numerics=_NUMERICS,
)
def xqa(i: Any, *, attend: Any, choose: Any, through: str) -> Callable[[], Tensor]:
    """XQA, by its own entry point and by `trtllm_batch_decode_with_kv_cache`, which takes it on sm_90."""
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=i.q.device)
    q = i.q.contiguous()
    longest = i.block_table.shape[1] * i.block_size

    def call() -> Tensor:
        out: Tensor = (attend if through == "xqa" else choose)(
            q, (i.k_cache, i.v_cache), workspace, i.block_table, i.seq_lens, longest, bmm1_scale=i.scale,
            bmm2_scale=1.0, window_left=_window_left(i), sinks=i.sinks, kv_layout=i.layout,
        )  # fmt: skip
        return out

    return call
