"""How adapters call engines that run on GPUs only: stand-ins in plain torch take the place of their functions.

They have the parameters of the released functions (flash-attn 2.8.3.post2 and its version 3, vLLM 0.33.0,
flashinfer-python 0.5.3, sglang-kernel 0.4.10) and do what these are documented to do.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.adapters import engine
from attnfuzz.declaration import Absent, Kernel
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.arena import Arena
from attnfuzz.problems.cases import (
    Case,
    LatentDecodeCase,
    MaskedAttentionCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
)
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.recipes import Pages
from attnfuzz.problems.variants import Variant

PLAIN = """
import math
import torch

def attend(q, k, v, scale, first, left=-1, cap=0.0, slopes=None, sinks=None, seen=None):
    # q [n, heads, size] at positions first, first + 1, ...; k, v [length, kv_heads, size]
    n, heads, length = q.shape[0], q.shape[1], k.shape[0]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    distance = torch.arange(length) - (first + torch.arange(n))[:, None]
    if slopes is not None:
        scores = scores + slopes.double()[:, None] * distance[:, None]
    hidden = (distance > 0) | (distance < -left if left >= 0 else torch.zeros_like(distance, dtype=torch.bool))
    hidden = hidden if seen is None else ~seen
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    if sinks is not None:
        assert sinks.dtype in (torch.bfloat16, torch.float32)
        scores = torch.cat((scores, sinks.double()[:, None].expand(n, heads, 1)), -1)
    lse = scores.logsumexp(-1) if scores.shape[-1] else torch.full((n, heads), -math.inf, dtype=torch.float64)
    weights = (scores - lse[..., None]).exp().nan_to_num(0)[..., :length]
    return torch.einsum("qhk,khd->qhd", weights, v).to(q.dtype), lse.float()

def paged(q, k_cache, v_cache, table, lens, starts, **others):
    out = torch.full((q.shape[0], q.shape[1], v_cache.shape[-1]), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:2], math.nan)
    for seq, length in enumerate(lens.tolist()):
        begin, end = starts[seq].item(), starts[seq + 1].item()
        pages = table[seq][: -(-length // k_cache.shape[1])].long()
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        first = length - (end - begin)
        out[begin:end], lse[begin:end] = attend(q[begin:end], k, v, first=first, **others)
    return out, lse
"""
FLASH_ATTN = """
import torch
from plain import paged

def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0, return_softmax_lse=False):
    assert causal and return_softmax_lse and k_cache.shape[1] % 256 == 0 and window_size[1] in (-1, 0)
    out, lse = paged(q[:, 0], k_cache, v_cache, block_table, cache_seqlens, torch.arange(len(q) + 1),
                     scale=softmax_scale, left=window_size[0], cap=softcap, slopes=alibi_slopes)
    return out[:, None], lse[:, :, None]

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):
    assert causal and return_attn_probs and k.shape[1] % 256 == 0 and cu_seqlens_k.dtype == torch.int32
    out, lse = paged(q, k, v, block_table, cu_seqlens_k.diff(), cu_seqlens_q, scale=softmax_scale,
                     left=window_size[0], cap=softcap, slopes=alibi_slopes)
    return out, lse.mT, None
"""
FLASH_ATTN_3 = """
import torch
from plain import paged

def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False):
    assert causal and return_softmax_lse and (cu_seqlens_q is None) == (q.ndim == 4)
    rows, starts = (q[:, 0], torch.arange(len(q) + 1)) if cu_seqlens_q is None else (q, cu_seqlens_q)
    out, lse = paged(rows, k_cache, v_cache, page_table, cache_seqlens, starts, scale=softmax_scale,
                     left=window_size[0], cap=softcap)
    return (out[:, None], lse[:, :, None]) if cu_seqlens_q is None else (out, lse.mT)
"""
VLLM = """
import torch
from plain import paged

def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
                           has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    assert causal and page_size and batch_size == len(cache_seqlens) and cache_seqlens.max() <= max_seqlen_k
    return torch.tensor([max_seqlen_q, window_size[0], has_softcap, num_splits, *cache_seqlens], dtype=torch.int32)

def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
                           q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0,
                           alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
                           return_softmax_lse=False, out=None, scheduler_metadata=None, q_descale=None, k_descale=None,
                           v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None):
    assert causal and fa_version == 3 and return_softmax_lse and len(q) >= cu_seqlens_q[-1]
    if scheduler_metadata is not None:
        planned = [max_seqlen_q, window_size[0], softcap > 0, num_splits, *seqused_k.tolist()]
        assert scheduler_metadata.tolist() == planned
    assert s_aux is None or (s_aux.dtype == torch.bfloat16 and q.shape[1] <= 64)
    found, lse = paged(q, k, v, block_table, seqused_k, cu_seqlens_q, scale=softmax_scale, left=window_size[0],
                       cap=softcap, sinks=s_aux)
    out.copy_(found)
    return out, lse.mT
"""
TURBO_STORE = """
import math
import torch

def bytes_of(codes, bits):
    whole = sum(code << bits * i for i, code in enumerate(codes))
    return list(whole.to_bytes(math.ceil(len(codes) * bits / 8), "little"))

def half(*numbers):
    return torch.tensor(numbers).half().view(torch.uint8).tolist()

def triton_turboquant_store(key, value, kv_cache, slot_mapping, PiT, midpoints, mse_bits, key_packed_size,
                            value_quant_bits, key_fp8=False):
    tokens, heads, size = key.shape
    assert key.shape == value.shape and kv_cache.shape[2] == heads and kv_cache.dtype == torch.uint8
    assert slot_mapping.shape == (tokens,) and value_quant_bits in (3, 4)
    if key_fp8:
        assert key_packed_size == size
    else:
        assert key_packed_size == math.ceil(size * mse_bits / 8) + 2 and midpoints.shape == (2**mse_bits - 1,)
        assert PiT.shape == (size, size) and PiT.dtype == midpoints.dtype == torch.float32
    for token, slot in enumerate(slot_mapping.tolist()):
        for head in range(heads if slot >= 0 else 0):
            k, v = key[token, head].float(), value[token, head].float()
            row = k.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
            if not key_fp8:
                codes = torch.searchsorted(midpoints, k / (k.norm() + 1e-8) @ PiT, right=True)
                row = bytes_of(codes.tolist(), mse_bits) + half(k.norm())
            step = ((v.max() - v.min()) / (2**value_quant_bits - 1)).clamp(min=1e-8)
            codes = ((v - v.min()) / step + 0.5).int().clamp(0, 2**value_quant_bits - 1)
            row += bytes_of(codes.tolist(), value_quant_bits) + half(step, v.min())
            place = slot // kv_cache.shape[1], slot % kv_cache.shape[1], head
            kv_cache[place][: len(row)] = torch.tensor(row, dtype=torch.uint8)
"""
TURBO_DECODE = """
import math
import torch
from plain import attend

def codes_of(row, bits, size):
    whole = int.from_bytes(bytes(row.tolist()), "little")
    return [whole >> bits * i & 2**bits - 1 for i in range(size)]

def half(row):
    return row.contiguous().view(torch.float16).float()

def triton_turboquant_decode_attention(query, kv_cache, block_table, seq_lens, Pi, centroids, scale, mse_bits,
                                       key_packed_size, value_quant_bits, key_fp8=False, norm_correction=False,
                                       PiT=None, mid_o_buf=None, output_buf=None, lse_buf=None, buf_holder=None,
                                       max_num_kv_splits=32):
    seqs, _, size = query.shape
    assert len(block_table) == len(seq_lens) == seqs and kv_cache.dtype == torch.uint8 and max_num_kv_splits == 32
    packed = size if key_fp8 else math.ceil(size * mse_bits / 8) + 2
    assert key_packed_size == packed and kv_cache.shape[3] >= packed + math.ceil(size * value_quant_bits / 8) + 4
    assert key_fp8 or centroids.shape == (2**mse_bits,)
    if not key_fp8:
        PiT = Pi.T if PiT is None else PiT
    q, end = query.float() if key_fp8 else query.float() @ PiT, packed + math.ceil(size * value_quant_bits / 8)
    out = torch.empty_like(query)
    for seq, length in enumerate(seq_lens.tolist()):
        slots = [(int(block_table[seq, t // kv_cache.shape[1]]), t % kv_cache.shape[1]) for t in range(length)]
        k, v = torch.zeros(2, length, kv_cache.shape[2], size)
        for t, slot in enumerate(slots):
            for head, row in enumerate(kv_cache[slot]):
                if key_fp8:
                    k[t, head] = row[:size].view(torch.float8_e4m3fn).float()
                else:
                    found = centroids[codes_of(row[: packed - 2], mse_bits, size)]
                    found = found / found.norm() if norm_correction else found
                    k[t, head] = found * half(row[packed - 2 : packed])
                step, least = half(row[end : end + 4])
                v[t, head] = torch.tensor(codes_of(row[packed:end], value_quant_bits, size)) * step + least
        out[seq] = attend(q[seq, None], k, v, scale, first=length - 1)[0]
    return out
"""
FLASHINFER = """
import math
import torch
from plain import attend

class _Wrapper:
    buffers, sees_all = None, False

    def _plan(self, starts, indptr, indices, last, heads, kv_heads, size, page, *, causal=False,
              pos_encoding_mode="NONE", sm_scale=None, window_left=-1, logits_soft_cap=None,
              q_data_type="float16", kv_data_type=None, fixed_split_size=None, disable_split_kv=False,
              custom_mask=None):
        self.mask = custom_mask
        given = (starts, indptr, indices, last)
        assert all(tensor.dtype == torch.int32 for tensor in given)
        if self.buffers is None:
            self.planned = given
        else:
            assert len(last) == len(self.buffers[3]) and len(indices) <= len(self.buffers[2])
            for buffer, tensor in zip(self.buffers, given):
                buffer[: len(tensor)].copy_(tensor)
            self.planned = self.buffers
        scale = size**-0.5 if sm_scale is None else sm_scale
        self.said = {"scale": scale, "left": window_left, "cap": logits_soft_cap or 0.0}

    def _run(self, q, paged_kv_cache, sinks=None, out=None, lse=None):
        starts, indptr, indices, last = self.planned
        masked = 0
        k_cache, v_cache = (c if self.layout == "NHD" else c.transpose(1, 2) for c in paged_kv_cache)
        for seq in range(len(last)):
            begin, end, rows = indptr[seq], indptr[seq + 1], slice(starts[seq], starts[seq + 1])
            length = max(0, (end - begin - 1).item()) * k_cache.shape[1] + last[seq].item()
            k, v = (cache[indices[begin:end].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            first = length - (starts[seq + 1] - starts[seq]).item()
            seen = None
            if self.sees_all:
                seen = torch.ones(starts[seq + 1] - starts[seq], length, dtype=torch.bool)
            if self.mask is not None:
                size = (length - first) * length
                seen = self.mask[masked : masked + size].view(-1, length)
                masked += size
            out[rows], found = attend(q[rows], k, v, first=first, sinks=sinks, seen=seen, **self.said)
            if lse is not None:
                lse[rows] = found / math.log(2)
        return out, lse

class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
                 paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
                 backend="auto", jit_args=None):
        self.layout, self.tensor_cores = kv_layout, use_tensor_cores
        if use_cuda_graph:
            indptr = paged_kv_indptr_buffer
            starts = torch.zeros_like(indptr)
            self.buffers = (starts, indptr, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **others):
        assert others.get("fixed_split_size") is None or self.tensor_cores
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(starts, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **others)

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False):
        assert not args and return_lse == (lse is not None)
        return self._run(q, paged_kv_cache, out=out, lse=lse)

class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None):
        self.layout = kv_layout
        if use_cuda_graph:
            self.buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, **others):
        assert others.get("causal") or others["custom_mask"].dtype == torch.bool
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                   head_dim_qk, page_size, **others)

    run = BatchDecodeWithPagedKVCacheWrapper.run

def _merged(outputs, lses):
    lses = lses.double() * math.log(2)
    lse = lses.logsumexp(1)
    weights = (lses - lse[:, None]).exp().nan_to_num(0)
    return (outputs.double() * weights[..., None]).sum(1).to(outputs.dtype), (lse / math.log(2)).float()

def merge_state(v_a, s_a, v_b, s_b):
    return _merged(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))

def merge_states(v, s):
    assert v.is_contiguous() and s.is_contiguous() and v.shape[:3] == s.shape
    return _merged(v, s)

def merge_state_in_place(v, s, v_other, s_other, mask=None):
    assert v.is_contiguous() and s.is_contiguous()
    out, lse = merge_state(v, s, v_other, s_other)
    rows = slice(None) if mask is None else mask
    v[rows], s[rows] = out[rows], lse[rows]

def _slots(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, page_size):
    given = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in given)
    for request, position in zip(batch_indices.tolist(), positions.tolist()):
        begin, end = kv_indptr[request].item(), kv_indptr[request + 1].item()
        assert position < max(0, end - begin - 1) * page_size + kv_last_page_len[request]
        yield kv_indices[begin + position // page_size].item(), position % page_size

def append_paged_kv_cache(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
                          kv_last_page_len, kv_layout="NHD"):
    caches = [c if kv_layout == "NHD" else c.transpose(1, 2) for c in paged_kv_cache]
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, caches[0].shape[1])
    for token, (page, offset) in enumerate(slots):
        caches[0][page, offset], caches[1][page, offset] = append_key[token], append_value[token]

def append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices,
                              kv_indptr, kv_last_page_len):
    assert append_ckv.shape[1] == ckv_cache.shape[2] == 512 and append_kpe.shape[1] == kpe_cache.shape[2] == 64
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, ckv_cache.shape[1])
    for token, (page, offset) in enumerate(slots):
        ckv_cache[page, offset], kpe_cache[page, offset] = append_ckv[token], append_kpe[token]

class MultiLevelCascadeAttentionWrapper:
    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD"):
        self.levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(num_levels)
        ]

    def plan(self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, *heads,
             causal=False, window_left=-1, **others):
        assert causal and window_left == -1
        lists = zip(qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True)
        for level, (wrapper, given) in enumerate(zip(self.levels, lists, strict=True)):
            wrapper._plan(*given, *heads, causal=level == len(self.levels) - 1, **others)
            wrapper.sees_all = level < len(self.levels) - 1

    def run(self, q, paged_kv_cache):
        states = [wrapper._run(q, paged_kv_cache, out=torch.zeros_like(q), lse=torch.zeros(q.shape[:2]))
                  for wrapper in self.levels]
        return merge_state(*states[0], *states[1])[0]

class BatchAttention:
    def __init__(self, kv_layout="NHD", device="cuda"):
        assert device == "cpu"
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(None, kv_layout)

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
             page_size, causal=False, sm_scale=None, logits_soft_cap=None, q_data_type=None, kv_data_type=None):
        assert causal and head_dim_qk == head_dim_vo
        self.cap = logits_soft_cap or 0.0
        last = torch.where(kv_len_arr > 0, (kv_len_arr - 1) % page_size + 1, 0).int()
        self.wrapper._plan(qo_indptr, kv_indptr, kv_indices, last, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
                           sm_scale=sm_scale, logits_soft_cap=logits_soft_cap)

    def run(self, q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0):
        assert logits_soft_cap == self.cap
        return self.wrapper._run(q, kv_cache, out=out, lse=lse)

def single_decode_with_kv_cache(q, k, v, kv_layout="NHD", pos_encoding_mode="NONE", use_tensor_cores=False,
                                q_scale=None, k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None,
                                sm_scale=None, rope_scale=None, rope_theta=None, return_lse=False):
    assert all(tensor.is_contiguous() for tensor in (q, k, v)) and return_lse
    out, lse = attend(q[None], k, v, scale=sm_scale, first=len(k) - 1, left=window_left)
    return out[0], lse[0] / math.log(2)

def single_prefill_with_kv_cache(q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None,
                                 packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE",
                                 use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
                                 rope_scale=None, rope_theta=None, backend="auto", return_lse=False):
    assert causal and return_lse and backend in ("fa2", "fa3")
    out, lse = attend(q, k, v, scale=sm_scale, first=len(k) - len(q), left=window_left, cap=logits_soft_cap or 0.0)
    return out, lse / math.log(2)

class BatchPODWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        self.halves = [BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(2)]

    def plan(self, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, qo_indptr_d, kv_indptr_d, kv_indices_d,
             last_page_len_d, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE", window_left=-1,
             q_data_type="float16", kv_data_type=None, data_type=None, sm_scale=None):
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        assert len(last_page_len_p) and qo_indptr_d.tolist() == list(range(len(last_page_len_d) + 1))
        lists = ((qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p),
                 (qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d))
        for half, given in zip(self.halves, lists):
            half._plan(*given, *heads, sm_scale=sm_scale, window_left=window_left)

    def run(self, q_p, paged_kv_cache_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None,
            causal_p=False, q_scale=None, k_scale=None, v_scale=None, return_lse=False):
        assert causal_p and return_lse
        found = [half._run(q, cache, out=torch.zeros_like(q), lse=torch.zeros(q.shape[:2]))
                 for half, q, cache in zip(self.halves, (q_p, q_d), (paged_kv_cache_p, paged_kv_cache_d))]
        return tuple(zip(*found))

class PODWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        self.decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, q_data_type="float16", kv_data_type=None, data_type=None,
             sm_scale=None):
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self.decode._plan(starts, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                          sm_scale=sm_scale, window_left=window_left)

    def run(self, q_p, k_p, v_p, q_d, paged_kv_cache_d, custom_mask_p=None, packed_custom_mask_p=None, causal_p=False,
            kv_layout_p="NHD", pos_encoding_mode_p="NONE", sm_scale_p=None, window_left_p=-1):
        assert causal_p
        out, _ = attend(q_p, k_p, v_p, scale=sm_scale_p, first=len(k_p) - len(q_p), left=window_left_p)
        return out, self.decode._run(q_d, paged_kv_cache_d, out=torch.zeros_like(q_d))[0]
"""
XQA = """
import torch
from plain import paged

def xqa_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
                                   bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None, sinks=None,
                                   kv_layout="NHD", enable_pdl=None, q_len_per_req=1, o_scale=1.0):
    assert query.is_contiguous() and not workspace_buffer.any() and bmm2_scale == 1.0 and seq_lens.max() <= max_seq_len
    k, v = (c if kv_layout == "NHD" else c.transpose(1, 2) for c in kv_cache)
    assert k.shape[1] in (16, 32, 64, 128) and (sinks is None or sinks.dtype == torch.float32)
    return paged(query, k, v, block_tables, seq_lens, torch.arange(len(query) + 1), scale=bmm1_scale, left=window_left,
                 sinks=sinks)[0]

def trtllm_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
                                      bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None, out_dtype=None,
                                      o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND"):
    return xqa_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
                                          bmm1_scale, bmm2_scale, window_left, None, sinks, kv_layout)
"""
MLA = """
import math
import torch
from plain import attend

class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
                 kv_len_arr=None, backend="auto"):
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr) if use_cuda_graph else None

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
             causal, sm_scale, q_data_type, kv_data_type, use_profiler=False):
        assert all(tensor.dtype == torch.int32 for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        assert q_data_type == kv_data_type
        planned = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if self.buffers is not None:
            for buffer, given in zip(self.buffers, planned):
                assert len(given) == len(buffer) or given is kv_indices
                buffer[: len(given)].copy_(given)
            planned = self.buffers
        self.planned = (*planned, causal, sm_scale)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
            kv_len=None, page_table=None, return_lse_base_on_e=False):
        starts, indptr, indices, lengths, causal, scale = self.planned
        assert return_lse and return_lse_base_on_e
        q, rows = torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1)
        for seq, length in enumerate(lengths.tolist()):
            own = slice(starts[seq], starts[seq + 1])
            k = rows[indices[indptr[seq] : indptr[seq + 1]].long()].flatten(0, 1)[:length, None]
            first = length - len(q[own]) if causal else length
            out[own], lse[own] = attend(q[own], k, k[..., : ckv_cache.shape[-1]], scale=scale, first=first)
        return out, lse
"""
NEWER_MLA = """
import torch
from older import BatchMLAPagedAttentionWrapper as Older

class MLAPlanMetadata:
    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        made = cls()
        made.lists = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        return made

class BatchMLAPagedAttentionWrapper(Older):
    def plan(self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type,
             kv_data_type, use_profiler=False, query_layout="packed", kv_cache_layout="packed", lse_mode="none"):
        assert (query_layout, kv_cache_layout, lse_mode) == ("split", "split", "basee")
        super().plan(*metadata.lists, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type,
                     kv_data_type)

    def run(self, *, query, kv_cache, out=None, lse=None, return_lse=False, return_lse_base_on_e=False):
        return super().run(*query, *kv_cache, out, lse, return_lse, return_lse_base_on_e=return_lse_base_on_e)
"""
SINKS = """
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, q_data_type, kv_data_type, head_dim_qk, head_dim_vo,
                 window_left):
        super().__init__(float_workspace_buffer, kv_layout)
        self.window_left = window_left

    def run(self, q, paged_kv_cache, sink, sm_scale, *, out, lse, return_lse):
        assert sm_scale == self.said["scale"] and self.window_left == self.said["left"] and return_lse
        return self._run(q, paged_kv_cache, sink, out, lse)
"""
HEADER = """#define DISPATCH_GQA_GROUP_SIZE(group_size, GROUP_SIZE, ...) \\
  if (group_size == 1) {                                     \\
  } else if (group_size == 2) {                              \\
  }

#define DISPATCH_HEAD_DIM(head_dim, HEAD_DIM, ...) \\
  switch (head_dim) {                              \\
    case 64: {                                     \\
    }                                              \\
    case 256: {                                    \\
    }                                              \\
  }
"""
SGL_KERNEL = """
import torch

def merge_state_v2(v_a, s_a, v_b, s_b, v_merged=None, s_merged=None):
    s_merged.copy_(torch.logaddexp(s_a.double(), s_b.double()))
    weights = ((s - s_merged).double().exp().nan_to_num(0)[..., None] for s in (s_a, s_b))
    v_merged.copy_(sum(v.double() * weight for v, weight in zip((v_a, v_b), weights)))
    return v_merged, s_merged
"""
FLASH_MLA = """
import torch
from plain import paged

class FlashMLASchedMeta:
    have_initialized = False

def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None

def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
                           softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
                           extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
                           out=None, enable_batch_invariant=False):
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None and causal
    assert q.shape[1:2] + q.shape[3:] == (1, 576) and k_cache.shape[1:] == (64, 1, 576) and head_dim_v == 512
    found, lse = paged(q[:, 0], k_cache, k_cache[..., :head_dim_v], block_table, cache_seqlens,
                       torch.arange(len(q) + 1), scale=softmax_scale)
    return found[:, None], lse[:, :, None]
"""
SGLANG = """
def _supported_headdim(o):
    return o.shape[2] % (4 if o.dtype.itemsize == 4 else 8) == 0
"""
LMDEPLOY_DECODE = """
import torch
from plain import attend

def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q=None, max_seqlen_q=None,
                            softmax_scale=None, causal=False, window_size=None, softcap=None, alibi_slopes=None,
                            sinks=None, kv_layout="bshd"):
    assert max_seqlen_q == 1 and k_cache.shape[kv_layout.index("s")] >= 16
    out = torch.empty(q.shape[:-1] + v_cache.shape[-1:], dtype=q.dtype)
    left = window_size if window_size else -1
    for seq, length in enumerate(cache_seqlens.tolist()):
        k, v = (one if kv_layout == "bshd" else one.transpose(1, 2) for one in (k_cache, v_cache))
        k, v = (one[page_table[seq].long()].flatten(0, 1)[:length] for one in (k, v))
        out[seq], _ = attend(q[seq][None], k, v, softmax_scale or q.shape[-1] ** -0.5, length - 1, left, softcap or 0.0,
                             alibi_slopes, sinks)
    return out
"""
LMDEPLOY_FLATTEN = """
import torch

def flatten_kv_cache(k_caches, v_caches, seqlens, block_offsets, start_loc=None, out_size=None, out_dtype=None,
                     kv_layout="bshd", flatten_kv_layout="hsd"):
    assert flatten_kv_layout == "hsd" and out_size >= int(seqlens.sum())
    found = []
    for cache in (k_caches, v_caches):
        cache = cache if kv_layout == "bshd" else cache.transpose(1, 2)
        rows = torch.zeros(out_size, *cache.shape[2:], dtype=out_dtype)
        for start, length, pages in zip(start_loc.tolist(), seqlens.tolist(), block_offsets.long()):
            rows[start : start + length] = cache[pages].flatten(0, 1)[:length]
        found.append(rows.transpose(0, 1))
    return found
"""
LMDEPLOY_PREFILL = """
import torch
from plain import attend

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale=None, causal=False,
                           window_size=None, softcap=None, alibi_slopes=None, sinks=None, kv_layout="hsd"):
    assert causal and kv_layout == "hsd"
    out = torch.empty_like(q)
    for seq in range(len(cu_seqlens_q) - 1):
        own, keys = (slice(starts[seq], starts[seq + 1]) for starts in (cu_seqlens_q, cu_seqlens_k))
        first = int(keys.stop - keys.start) - len(q[own])
        assert len(q[own]) <= max_seqlen_q
        out[own], _ = attend(q[own], k[:, keys].transpose(0, 1), v[:, keys].transpose(0, 1),
                             softmax_scale or q.shape[-1] ** -0.5, first, window_size if window_size else -1,
                             softcap or 0.0, alibi_slopes, sinks)
    return out
"""
LMDEPLOY_FILL = """
def fill_kv_cache(k_states, v_states, k_caches, v_caches, q_start_loc, q_seq_length, kv_seq_length, max_q_seq_length,
                  block_offsets, kv_layout="bshd"):
    for states, cache in ((k_states, k_caches), (v_states, v_caches)):
        cache = cache if kv_layout == "bshd" else cache.transpose(1, 2)
        for seq, pages in enumerate(block_offsets.tolist()):
            start, count, length = (int(one[seq]) for one in (q_start_loc, q_seq_length, kv_seq_length))
            assert count <= max_q_seq_length
            for t in range(count):
                at = length - count + t
                cache[pages[at // cache.shape[1]], at % cache.shape[1]] = states[start + t]
"""
SGLANG_DECODE = """
import torch
from plain import attend

def decode_attention_fwd(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits,
                         max_kv_splits, sm_scale, k_scale, v_scale, logit_cap=0.0, sinks=None, xai_temperature_len=-1):
    assert (k_scale, v_scale) == (1.0, 1.0) and attn_logits.shape[2] == max_kv_splits
    for seq in range(len(q)):
        slots = kv_indices[kv_indptr[seq] : kv_indptr[seq + 1]]
        o[seq] = attend(q[seq : seq + 1], k_buffer[slots], v_buffer[slots], sm_scale, len(slots) - 1, cap=logit_cap,
                        sinks=sinks)[0][0]
"""
_LMDEPLOY = "lmdeploy/pytorch/kernels/cuda"
FILES = {
    f"{_LMDEPLOY}/pagedattention.py": LMDEPLOY_DECODE,
    f"{_LMDEPLOY}/flatten_kv_cache.py": LMDEPLOY_FLATTEN,
    f"{_LMDEPLOY}/flashattention.py": LMDEPLOY_PREFILL,
    f"{_LMDEPLOY}/fill_kv_cache.py": LMDEPLOY_FILL,
    "plain.py": PLAIN,
    "flash_attn.py": FLASH_ATTN,
    "flash_attn_interface.py": FLASH_ATTN_3,
    "vllm/vllm_flash_attn/flash_attn_interface.py": VLLM,
    "vllm/vllm_flash_attn/_vllm_fa3_C.py": "",
    "vllm/v1/attention/ops/triton_turboquant_store.py": TURBO_STORE,
    "vllm/v1/attention/ops/triton_turboquant_decode.py": TURBO_DECODE,
    "vllm/third_party/flashmla/flash_mla_interface.py": FLASH_MLA,
    "flashinfer/__init__.py": FLASHINFER,
    "flashinfer/attention.py": SINKS,
    "flashinfer/decode.py": XQA,
    "flashinfer/mla.py": MLA,
    "flashinfer/utils.py": "def is_sm90a_supported(device):\n    return True\n",
    "older.py": MLA,
    "flashinfer/jit/env.py": "import pathlib\nFLASHINFER_INCLUDE_DIR = pathlib.Path(__file__).parents[1]\n",
    "flashinfer/flashinfer/utils.cuh": HEADER,
    "sgl_kernel.py": SGL_KERNEL,
    "sglang/srt/layers/attention/merge_state.py": SGLANG,
    "sglang/kernels/ops/attention/decode_attention.py": SGLANG_DECODE,
}
SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 64, "scale": 0.25, "layout": "NHD"}
VARIANTS = {
    "plain": Variant(),
    "window": Variant(window=3),
    "soft_cap": Variant(soft_cap=5.0),
    "alibi": Variant(alibi="geometric"),
    "sinks": Variant(sinks="high"),
    "window and sinks": Variant(window=3, sinks="level"),
}
Names = dict[str, tuple[str, ...]]
ATTENTION: Names = {
    "flash_attn": ("with_kvcache", "varlen", "v3_with_kvcache", "v3_varlen"),
    "vllm": ("flash_attention_3", "flash_attention_3_sinks", "flash_attention_3_decode", "flash_mla"),
    "lmdeploy": ("paged_attention", "paged_attention_latent", "flash_attention"),
    "sglang": ("decode_attention", "decode_attention_mla"),
    "flashinfer": (
        "batch_decode", "batch_decode_graph", "batch_decode_fixed_split", "batch_prefill", "batch_prefill_graph",
        "batch_attention_sinks", "batch_prefill_mask", "batch_attention", "cascade", "pod", "pod_single",
        "single_prefill", "single_prefill_fa3", "xqa",
    ),
}  # fmt: skip
MERGES: Names = {"flashinfer": ("merge_state", "merge_states", "merge_state_in_place"), "sglang": ("merge_state_v2",)}
GRAPHS: Names = {
    "flashinfer": ("batch_decode_graph", "batch_prefill_graph", "mla_decode_graph"),
    "vllm": ("flash_attention_3", "flash_attention_3_decode"),
}


def named(kernels: Names) -> list[tuple[str, str]]:
    return [(place, name) for place, names in kernels.items() for name in names]


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapters of an engine, made anew where the stand-ins are installed and a GPU is supposed to be there."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    engines = {Path(name).parts[0].removesuffix(".py") for name in FILES}
    for module in [name for name in sys.modules if name.partition(".")[0] in engines]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(engine.Engine, "on_gpu", staticmethod(lambda: True))
    before = set(sys.modules)

    def load(place: str) -> ModuleType:
        file = Path(engine.__file__).with_name(f"{place}.py")
        spec = importlib.util.spec_from_file_location(f"adapters_of_{place}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "_WORKSPACE_BYTES"):  # the stand-ins use none of it, and each test would poison it anew
            monkeypatch.setattr(module, "_WORKSPACE_BYTES", 1 << 16)
        return module

    yield load
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[module]


def kernel_of(module: ModuleType, name: str) -> Kernel:
    found = getattr(module, name)
    assert isinstance(found, Kernel), found.why
    return found


def case_for(kernel: Kernel, variant: Variant, **others: Any) -> Case:
    sizes = kernel.declaration.supports.block_sizes
    shape = {**SHAPE, "block_size": sizes[0] if sizes else 16, "dtype": "float16", "variant": variant, **others}
    table = kernel.declaration.supports.combinations
    if table and "gqa_ratio" in table[0]:
        shape |= {
            "num_q_heads": 2 * table[0]["gqa_ratio"][0],
            "block_size": table[0]["block_size"][0],
            "head_size": 128,
        }
    if kernel.declaration.problem == "paged_decode":
        return PagedDecodeCase(**{"seq_lens": (5, 37), **shape})
    if kernel.declaration.problem == "latent_decode":
        mla = {"num_q_heads": 16, "num_kv_heads": 1, "head_size": 576, "v_head_size": 512}
        return LatentDecodeCase(**{"seq_lens": (5, 37), **shape, **mla})
    if kernel.declaration.problem == "masked_attention":
        mask = Mask(kind="bits", seqs=((4, 9), (2, 6, 0)))
        return MaskedAttentionCase(**{"seq_lens": (5, 37), "query_lens": (2, 3), "mask": mask, **shape})
    return PagedAttentionCase(**{"seq_lens": (5, 37), "query_lens": (2, 3), **shape})


@pytest.mark.parametrize(("place", "name"), named(ATTENTION))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.by_day(
    "plain-*", "window and sinks-vllm-*_sinks", "soft_cap-flash_attn-with_kvcache", "alibi-flash_attn-varlen"
)
def test_engines_are_called_as_they_are_documented(adapters: Any, place: str, name: str, variant: str) -> None:
    """A window would be one key too long, or a log-sum-exp turned, and the engine accused of it."""
    kernel = kernel_of(adapters(place), name)
    asked = VARIANTS[variant]
    if not set(asked.names) <= set(kernel.declaration.supports.variants):
        with pytest.raises(ValueError, match=r"the kernel declares|left out in masked_attention"):
            attnfuzz.check(kernel, case_for(kernel, asked), device="cpu", isolated=False)
        return
    attnfuzz.check(kernel, case_for(kernel, asked), device="cpu", isolated=False)
    if options := {option: choices[-1] for option, choices in kernel.declaration.options.items()}:
        attnfuzz.check(kernel, case_for(kernel, asked, options=options), device="cpu", isolated=False)


@pytest.mark.parametrize(("place", "name"), named(MERGES))
def test_merges_are_called_as_they_are_documented(adapters: Any, place: str, name: str) -> None:
    """Prefix and suffix would change places, or the base of the log-sum-exp."""
    kernel = kernel_of(adapters(place), name)
    case = MergeStatesCase(num_tokens=3, num_q_heads=2, head_size=64, dtype="float16", lse_layout="TH")
    attnfuzz.check(kernel, case, device="cpu", isolated=False)
    if options := {option: choices[-1] for option, choices in kernel.declaration.options.items()}:
        attnfuzz.check(kernel, msgspec.structs.replace(case, options=options), device="cpu", isolated=False)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize(
    "name",
    ["append", "append_mla", "merge_ranks", "mla_verify", "mla_decode", "mla_decode_graph", "single_decode", "history"],
)
def test_flashinfer_is_called_as_both_of_its_releases_are_documented(
    adapters: Any, tmp_path: Path, name: str, newer: bool
) -> None:
    """A token would be told to lie on another page, or a release be given what the other one takes."""
    if newer:
        (tmp_path / "flashinfer" / "mla.py").write_text(NEWER_MLA, encoding="utf-8")
    kernel = kernel_of(adapters("flashinfer"), name)

    @attnfuzz.fuzz(kernel, max_examples=6, device="cpu", isolated=False)
    def search() -> None:
        pass

    search()


def test_pages_are_given_to_varlen_attn_as_it_documents(adapters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would be accused of a window or a split that nobody has asked for."""

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int, max_k: int, *,
        scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
        num_splits: int,
    ) -> Tensor:  # fmt: skip
        assert (cu_seq_k, window_size, enable_gqa, num_splits) == (None, (-1, 0), True, 1)
        out: Tensor = importlib.import_module("plain").paged(
            query, key, value, block_table, seqused_k, cu_seq_q, scale=scale
        )[0]
        return out

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    kernel = kernel_of(adapters("torch"), "varlen_paged")
    attnfuzz.check(kernel, case_for(kernel, Variant()), device="cpu", isolated=False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key: None)
    assert "takes no block_table" in adapters("torch").varlen_paged.why


@pytest.mark.parametrize("lens", [(5, 0, 37), (130,)])
@pytest.mark.parametrize("variant", ["plain", "window", "alibi"])
def test_flex_decoding_is_asked_for_each_sequence(
    adapters: Any, monkeypatch: pytest.MonkeyPatch, variant: str, lens: tuple[int, ...]
) -> None:
    """What pads the sequences to a power of two would be taken for one of them."""
    module: Any = adapters("torch")
    monkeypatch.setattr(module, "_compiled", lambda attend, dynamic: attend)
    monkeypatch.setattr(module, "_compiling", module._uncompiled)
    kernel = kernel_of(module, "flex_decoding")
    as_defined = attnfuzz.Numerics(scores="input")
    plain = Kernel(kernel.function, msgspec.structs.replace(kernel.declaration, numerics=as_defined))
    case = case_for(kernel, VARIANTS[variant], seq_lens=lens, num_q_heads=8)
    attnfuzz.check(plain, case, device="cpu", isolated=False)


@pytest.mark.parametrize("name", ["turboquant_store", "turboquant_decode"])
def test_turboquant_gets_rows_that_are_laid_out_as_it_documents(adapters: Any, name: str) -> None:
    """Bits of K would be told for those of V, a row of 8 bits for one of codes, or a table for its transpose."""
    kernel = kernel_of(adapters("vllm"), name)

    @attnfuzz.fuzz(kernel, max_examples=16, device="cpu", isolated=False)
    def search() -> None:
        pass

    search()


@pytest.mark.parametrize("name", ["fill_kv_cache", "history"])
def test_lmdeploy_writes_and_reads_what_a_scheduler_has_it(adapters: Any, name: str) -> None:
    """A token would be told to lie in another page, or a batch of decode be taken for a prefill."""
    kernel = kernel_of(adapters("lmdeploy"), name)

    @attnfuzz.fuzz(kernel, max_examples=4, device="cpu", isolated=False)
    def search() -> None:
        pass

    search()


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("lens", [((200, 130), (2, 1)), ((5, 64, 0), (5, 0, 0)), ((40,), (1,))])
@pytest.mark.parametrize("name", ["cascade", "pod", "pod_single", "batch_attention", "single_prefill"])
@pytest.mark.by_day("cascade-*", "*-0")  # none of the others has a plan that knows of pages that are shared
def test_flashinfer_gets_batches_of_each_kind(
    adapters: Any, name: str, lens: tuple[tuple[int, ...], tuple[int, ...]], shared: int
) -> None:
    """A level without keys, a sequence without queries or one of queries alone would be planned wrongly."""
    kernel = kernel_of(adapters("flashinfer"), name)
    pages = Pages(order="shuffled", shared_blocks=shared)
    case = case_for(kernel, Variant(), seq_lens=lens[0], query_lens=lens[1], pages=pages)
    attnfuzz.check(kernel, case, device="cpu", isolated=False)


def test_sizes_are_those_that_engines_have_kernels_for(adapters: Any) -> None:
    """A release with more of them would not be searched there, and one with fewer be accused of its errors."""
    flashinfer = adapters("flashinfer")
    assert flashinfer.batch_decode.declaration.supports.gqa_ratios == (1, 2)
    assert flashinfer.merge_state.declaration.supports.head_sizes == (64, 256)
    half, _, single = adapters("sglang").merge_state_v2.declaration.supports.combinations
    assert (half["head_size"][:2], single["head_size"][:2]) == ((8, 16), (4, 8))


def test_headers_that_say_nothing_are_told_of(adapters: Any, tmp_path: Path) -> None:
    """All of FlashInfer's adapters would be lost to a header that has moved, without a reason."""
    (tmp_path / "flashinfer" / "flashinfer" / "utils.cuh").write_text("// moved", encoding="utf-8")
    merge = adapters("flashinfer").merge_state
    assert isinstance(merge, Absent)
    assert "does not state what it supports as expected: its utils.cuh has no DISPATCH_HEAD_DIM" in merge.why


@pytest.mark.parametrize(("place", "name"), named(GRAPHS))
def test_what_is_planned_again_lies_where_a_graph_reads_it(adapters: Any, place: str, name: str) -> None:
    """An engine's graph would be replayed with the lengths of another batch, and called wrong."""
    kernel = kernel_of(adapters(place), name)
    options = {option: choices[-1] for option, choices in kernel.declaration.options.items()}
    first = case_for(kernel, Variant(), seq_lens=(20, 37), options=options)
    problem = problem_of(first)
    inputs = problem.build(first, Arena("cpu", poison="nan", prefill="nan"), kernel.declaration.supports)
    captured = kernel.plan(inputs, **options)
    assert captured is not None
    inputs.seq_lens.copy_(torch.tensor([17, 8]))
    assert kernel.plan(inputs, **options) is not None
    replayed = [result.clone() for result in captured()]
    for result, right in zip(replayed, kernel(inputs, **options), strict=True):
        assert torch.equal(result, right)
