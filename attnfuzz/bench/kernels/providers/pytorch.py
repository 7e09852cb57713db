"""PyTorch's own: SDPA and FlexAttention on dense K and V, its varlen attention, and the formula of a merge."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attnfuzz.bench.kernels.calls import Prepared, Result, Unsupported
from attnfuzz.bench.kernels.providers.provider import (
    Options,
    Provider,
    as_rows,
    attention_of,
    merge_of,
    output_only,
    require_even,
)
from attnfuzz.bench.kernels.tensors import AttentionTensors, MergeTensors

__all__ = ["PYTORCH"]

_BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def _sdpa(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    attention = attention_of(tensors)
    require_even(attention)
    q, k, v = _heads_first(attention)
    backend = _backend(str(options["backend"]))

    def call() -> Tensor:
        with backend():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, scale=attention.shape.scale, enable_gqa=True
            )

    return Prepared(call, as_rows)


def _backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """A fresh context for each call: it cannot be entered twice."""
    if name == "default":
        return nullcontext
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return functools.partial(sdpa_kernel, getattr(SDPBackend, _BACKENDS[name]))


def _flex(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    del options
    attention = attention_of(tensors)
    if attention.shape.kind == "mixed":
        return _flex_mixed(attention)
    require_even(attention)
    q, k, v = _heads_first(attention)
    flex = _compiled_flex()
    return Prepared(lambda: flex(q, k, v, scale=attention.shape.scale, enable_gqa=True), as_rows)


def _flex_mixed(attention: AttentionTensors) -> Prepared:
    """All sequences in a row: a query sees the keys of its own sequence up to its own position."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = attention.q.device
    seq_of_q, position_of_q = _owners(attention.shape.queries, attention.shape.seq_lens, device)
    seq_of_k, position_of_k = _owners(attention.shape.seq_lens, attention.shape.seq_lens, device)

    def visible(b: Tensor, h: Tensor, i_q: Tensor, i_k: Tensor) -> Tensor:
        del b, h
        return (seq_of_q[i_q] == seq_of_k[i_k]) & (position_of_k[i_k] <= position_of_q[i_q])

    mask = create_block_mask(visible, None, None, len(seq_of_q), len(seq_of_k), device=device, _compile=True)
    k, v = (part.transpose(0, 1)[None].contiguous() for part in attention.packed)
    q = attention.q.transpose(0, 1)[None].contiguous()
    flex = _compiled_flex()
    scale = attention.shape.scale
    return Prepared(lambda: flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=True), _in_a_row)


def _in_a_row(returned: object) -> Result:
    out, _ = output_only(returned)
    return out[0].transpose(0, 1), None


def _owners(lengths: tuple[int, ...], ends: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The sequence and the position of each of the last ``lengths`` tokens of sequences of ``ends`` tokens."""
    seqs = [torch.full((length,), i, dtype=torch.int64, device="cpu") for i, length in enumerate(lengths)]
    places = [torch.arange(end - length, end, device="cpu") for length, end in zip(lengths, ends, strict=True)]
    return torch.cat(seqs).to(device), torch.cat(places).to(device)


@functools.cache
def _compiled_flex() -> Callable[..., object]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.cache_size_limit = 256  # one entry for each shape
    compiled: Callable[..., object] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _varlen(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    del options
    attention = attention_of(tensors)
    if attention.shape.room:
        raise Unsupported("its lengths are known to the host")
    from torch.nn.attention.varlen import varlen_attn

    k, v = attention.packed
    lens = torch.tensor([0, *attention.shape.seq_lens], dtype=torch.int32, device=k.device)
    ends = lens.cumsum(0, dtype=torch.int32)
    longest_q, longest = max(attention.shape.queries), attention.shape.longest
    known = inspect.signature(varlen_attn).parameters
    extra: dict[str, Any] = {"scale": attention.shape.scale}
    extra |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        extra["enable_gqa"] = True
    return Prepared(
        lambda: varlen_attn(attention.q, k, v, attention.cu_seqlens_q, ends, longest_q, longest, **extra), output_only
    )


def _heads_first(attention: AttentionTensors) -> tuple[Tensor, Tensor, Tensor]:
    """q, K and V with axes (sequence, head, token, d), as SDPA takes them."""
    if attention.shape.kind != "decode":
        raise Unsupported("takes one query a sequence here")
    k, v = (part.transpose(1, 2).contiguous() for part in attention.dense)
    return attention.q[:, :, None], k, v


def _merge(tensors: AttentionTensors | MergeTensors, options: Options) -> Prepared:
    """The formula, as it is written down in most model code."""
    del options
    states = merge_of(tensors)
    p_out, s_out, p_lse, s_lse = states.prefix_output, states.suffix_output, states.prefix_lse, states.suffix_lse

    def call() -> tuple[Tensor, Tensor]:
        p_clean = torch.where(p_lse == torch.inf, -torch.inf, p_lse)
        s_clean = torch.where(s_lse == torch.inf, -torch.inf, s_lse)
        most = torch.maximum(p_clean, s_clean)
        p_weight, s_weight = torch.exp(p_clean - most), torch.exp(s_clean - most)
        total = p_weight + s_weight
        out = p_out * (p_weight / total)[..., None] + s_out * (s_weight / total)[..., None]
        return out.to(p_out.dtype), torch.log(total) + most

    return Prepared(call, _both)


def _both(returned: object) -> tuple[Tensor, Tensor]:
    if not isinstance(returned, tuple):
        raise TypeError(f"returned {type(returned).__name__}, where output and LSE were expected")
    return returned[0], returned[1]


PYTORCH = (
    Provider(
        "torch_sdpa",
        "scaled_dot_product_attention(enable_gqa=True) on dense K and V",
        "torch",
        ("decode",),
        _sdpa,
        options={"backend": ("default", "flash", "cudnn")},
    ),
    Provider("torch_varlen", "torch.nn.attention.varlen, sequences in a row", "torch", ("decode", "mixed"), _varlen),
    # Last of those on attention: it compiles for seconds, at each shape.
    Provider("torch_flex", "compiled FlexAttention on dense K and V", "torch", ("decode", "mixed"), _flex),
    Provider("torch_merge", "the formula in PyTorch", "torch", ("merge",), _merge),
)
