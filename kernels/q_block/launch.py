"""Checked wrapper of the Q-Block kernels: paged attention for prefill, decode and mixed batches.

As in ``paged.launch``: results are allocated unless given, strides are honoured, nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_launch, check_positive, check_power_of_two
from attnfuzz.kernels.common.device import GpuLimits, gpu_at, on_device_of
from attnfuzz.kernels.common.matrix_units import LEAST_FOR_DOT, block_columns
from attnfuzz.kernels.common.prepare import PagedCall, prepare_paged
from attnfuzz.kernels.common.variants import Variants, sink_arguments
from attnfuzz.kernels.q_block.heuristics import MAX_SEGMENTS, Launch, choose, programs_per_sm
from attnfuzz.kernels.q_block.launch_hopper import is_for_hopper, launch_on_hopper
from attnfuzz.kernels.q_block.q_block import q_block_kernel
from attnfuzz.kernels.q_block.reduce_segments import reduce_segments_kernel

_SMS_OF_A_CPU = 2
"""In the interpreter, programs run one after the other."""
_ELEMENTS_PER_STEP = 8192
"""Segments' outputs that a program combines in one step, at most: 64 registers of each of 128 threads."""


def q_block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    *,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    block_m: int | None = None,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_segments: int | None = None,
    fill: int | None = None,
    tuned: bool = True,
    num_combined: int | None = None,
    static_grid: bool = False,
    num_programs: int | None = None,
    num_decodes: int = 0,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """Causal attention of the queries of all sequences over a paged KV cache that holds their keys already.

    Shapes: ``q [num_tokens, num_q_heads, head_size]``, those of sequence i from ``cu_seqlens_q[i]`` up to
    ``cu_seqlens_q[i + 1]``; ``k_cache, v_cache`` as ``layouts`` says for ``layout``, all in float16, bfloat16 or
    float32; ``block_table [num_seqs, max_blocks_per_seq]``, ``seq_lens [num_seqs]`` (with the queries) and
    ``cu_seqlens_q [num_seqs + 1]`` int32 or int64. ``block_size``: tokens per page. Query j of n of a sequence of
    length L sees tokens 0 to L - n + j; n may be 0. Later rows of q are nobody's, and those of the results are left as
    they are.

    ``max_query_len``, ``max_seq_len``: what the host knows of the longest. ``heuristics`` chooses by them what
    is not given; nothing else depends on them. ``block_m``: query tokens times heads of a program, a power of two of
    at least 16; ``tile``: keys per step, likewise; ``num_warps``, ``num_stages``: as in ``triton.Config``. All but the
    warps are lowered until they fit into registers and shared memory. ``num_segments``: ranges of each sequence that
    run in parallel, and are combined by a second kernel; 1 for none. ``fill``: where these are not given, how many
    programs a multiprocessor should get by them. ``tuned``: choose as it was measured on this GPU, if it was.
    ``num_combined``: segments that are combined in one step, a power of two, as far as registers hold them; all if not
    given. ``static_grid``: launch ``num_programs`` (by
    default as many as run at once) that share out the work on the device. ``num_decodes``: so many of the first
    sequences have one query token, as servers order their batches and know on the host (arXiv 2511.11581, §6.1); they
    get a launch of their own, with segments if they are few and long, which blocks made for a prompt do not have.
    ``variants``: as for ``paged.launch.paged_decode``, from the position of each query token.

    Returns ``out [num_tokens, num_q_heads, v_head_size]`` in q's dtype and ``lse [num_tokens, num_q_heads]`` float32,
    natural log: 0 and -inf (or the sink) for a query that sees nothing. Raises ValueError.
    """
    call = prepare_paged(
        q, k_cache, v_cache, block_table, seq_lens, block_size, layout, out, lse, variants, cu_seqlens_q
    )  # fmt: skip
    (out, lse), sizes, window = call.results, call.sizes, call.variant.window
    gpu = gpu_at(q.device)
    given = {
        "block_m": block_m, "tile": tile, "num_warps": num_warps, "num_stages": num_stages,
        "num_segments": num_segments, "fill": fill,
    }  # fmt: skip
    inputs = (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q)
    if num_decodes:
        _check_decodes(num_decodes, sizes)
    options = (*given.values(), num_combined, num_programs)
    is_chosen_here = tuned and not static_grid and all(value is None for value in options)
    if gpu is not None and is_chosen_here and is_for_hopper(gpu, call, inputs, scale, max_query_len, max_seq_len):
        launch_on_hopper(call, inputs, scale, layout, max_query_len, max_seq_len, gpu.processors)
        return out, lse
    if num_decodes:
        first, rest = slice(num_decodes), slice(num_decodes, None)
        starts = (cu_seqlens_q[: num_decodes + 1], cu_seqlens_q[num_decodes:] - num_decodes)
        for part, starts_of_part, longest in ((first, starts[0], 1), (rest, starts[1], max_query_len)):
            q_block_attention(
                q[part], k_cache, v_cache, block_table[part], seq_lens[part], starts_of_part, scale, block_size, layout,
                max_query_len=longest, max_seq_len=max_seq_len, out=out[part], lse=lse[part],
                block_m=block_m, tile=tile, num_warps=num_warps, num_stages=num_stages, num_segments=num_segments,
                fill=fill, tuned=tuned, num_combined=num_combined, static_grid=static_grid, num_programs=num_programs,
                **variants,
            )  # fmt: skip
        return out, lse
    num_sms = _SMS_OF_A_CPU if gpu is None else gpu.processors
    longest = max_seq_len if window is None else min(max_seq_len, window + max(1, max_query_len) - 1)
    launch = _launch(given, sizes, q.element_size(), max_query_len, longest, num_sms, gpu, tuned)
    resident = programs_per_sm(launch, head_size=_widest(sizes), itemsize=q.element_size(), gpu=gpu)
    programs = resident * num_sms if num_programs is None else num_programs
    check_positive("num_programs", programs)
    check_power_of_two("num_combined", MAX_SEGMENTS if num_combined is None else num_combined)
    if sizes["num_seqs"] == 0 or sizes["num_tokens"] == 0:
        return out, lse
    with on_device_of(q):
        if launch.num_segments == 1:
            results = (out, *out.stride()[:2], 0, out.stride(2), lse, *lse.stride(), 0, lse)
            _attend(call, inputs, results, scale, block_size, launch, static_grid, programs)
        else:
            acc, row_max, exp_sum = states = _empty_states(out, launch.num_segments)
            results = (acc, *acc.stride(), row_max, *row_max.stride(), exp_sum)
            partial = call._replace(variant=call.variant._replace(sinks=None))
            _attend(partial, inputs, results, scale, block_size, launch, static_grid, programs)
            _reduce(states, cu_seqlens_q, out, lse, sizes, call.variant.sinks, num_combined or MAX_SEGMENTS)
    return out, lse


def _attend(
    call: PagedCall,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    results: tuple[object, ...],
    scale: float,
    block_size: int,
    launch: Launch,
    static_grid: bool,
    num_programs: int,
) -> None:
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q = inputs
    sizes, (head_size, v_head_size) = call.sizes, call.head_sizes
    group = sizes["group_size"]
    block_d, block_dv = (block_columns(size, launch.block_m) for size in (head_size, v_head_size))
    heads = min(group, launch.block_m)
    num_blocks = sizes["num_tokens"] // (launch.block_m // heads) + sizes["num_seqs"]
    num_work = num_blocks * launch.num_segments * sizes["num_kv_heads"] * triton.cdiv(group, heads)
    is_worth_compiling = block_size % launch.tile == 0 or block_size & (block_size - 1) == 0
    q_block_kernel[(min(num_programs, num_work) if static_grid else num_work,)](
        q, *q.stride(), k_cache, *call.strides.k, v_cache, *call.strides.v,
        block_table, *block_table.stride(), seq_lens, *seq_lens.stride(), cu_seqlens_q, *cu_seqlens_q.stride(),
        *results,
        float(scale), sizes["num_seqs"], sizes["num_kv_heads"], launch.num_segments, block_size,
        head_size, v_head_size,
        GROUP=group, X=call.strides.x, BLOCK_M=launch.block_m, TILE=launch.tile, BLOCK_D=block_d, BLOCK_DV=block_dv,
        WHOLE_HEAD=block_d == head_size, WHOLE_V=block_dv == v_head_size,
        SAME_STRIDES=call.strides.k[:2] == call.strides.v[:2] and block_size % launch.tile > 0,
        BLOCK_SIZE=block_size if is_worth_compiling else 0, SEGMENTED=launch.num_segments > 1, STATIC=static_grid,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=False,  # see q_block_walk
        **call.variant.of_rows,
    )  # fmt: skip


def _reduce(
    states: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_q: Tensor,
    out: Tensor,
    lse: Tensor,
    sizes: Mapping[str, int],
    sinks: Tensor | None,
    num_combined: int,
) -> None:
    acc, row_max, exp_sum = states
    num_segments, v_head_size = acc.shape[2:]
    block_dv = triton.next_power_of_2(v_head_size)
    chunk = max(1, min(triton.next_power_of_2(num_segments), num_combined, _ELEMENTS_PER_STEP // block_dv))
    reduce_segments_kernel[(sizes["num_tokens"], sizes["num_q_heads"])](
        acc, *acc.stride(), row_max, exp_sum, *row_max.stride(), cu_seqlens_q, *cu_seqlens_q.stride(),
        out, *out.stride(), lse, *lse.stride(),
        num_seqs=sizes["num_seqs"], num_segments=num_segments, v_head_size=v_head_size,
        CHUNK=chunk, BLOCK_DV=block_dv, **sink_arguments(sinks),
    )  # fmt: skip


def _empty_states(out: Tensor, num_segments: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for ``acc``, ``row_max`` and ``exp_sum`` of each segment, float32."""
    num_tokens, num_q_heads, v_head_size = out.shape
    shape = (num_tokens, num_q_heads, num_segments)
    sums = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
    return torch.empty((*shape, v_head_size), dtype=torch.float32, device=out.device), next(sums), next(sums)


def _widest(sizes: Mapping[str, int]) -> int:
    """The larger heads of K and V: registers and shared memory are counted for these."""
    return max(sizes["head_size"], sizes["v_head_size"])


def _launch(
    given: Mapping[str, int | None],
    sizes: Mapping[str, int],
    itemsize: int,
    max_query_len: int,
    max_seq_len: int,
    num_sms: int,
    gpu: GpuLimits | None,
    tuned: bool,
) -> Launch:
    """The options that are given, and for the rest those that the heuristics choose. Raises ValueError."""
    wanted = {name: value for name, value in given.items() if value is not None}
    _check_given(wanted)
    return choose(
        num_seqs=sizes["num_seqs"],
        num_q_heads=sizes["num_q_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_size=_widest(sizes),
        itemsize=itemsize,
        max_query_len=max(1, max_query_len),
        max_seq_len=max_seq_len,
        num_sms=num_sms,
        gpu=gpu,
        tuned=tuned,
        **wanted,
    )


def _check_given(given: Mapping[str, int]) -> None:
    check_launch(given.get("num_warps", 4), given.get("num_stages", 1))
    for name in ("block_m", "tile"):
        _check_block(name, given.get(name, LEAST_FOR_DOT))
    for name in ("num_segments", "fill"):
        check_positive(name, given.get(name, 1))
    if (num_segments := given.get("num_segments", 1)) > MAX_SEGMENTS:
        raise ValueError(
            f"num_segments={num_segments} must be at most {MAX_SEGMENTS}, since one program combines all of a row; "
            "longer segments keep a GPU as busy"
        )


def _check_decodes(num_decodes: int, sizes: Mapping[str, int]) -> None:
    check_positive("num_decodes", num_decodes)
    most = min(sizes["num_seqs"], sizes["num_tokens"])
    if num_decodes > most:
        raise ValueError(
            f"num_decodes={num_decodes} must be at most {most}, since the batch has num_seqs={sizes['num_seqs']} "
            f"sequences and num_tokens={sizes['num_tokens']} query tokens; count those that come first"
        )


def _check_block(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 16 or value & (value - 1):
        raise ValueError(f"{name}={value!r} must be a power of two of at least 16, as tl.dot wants it; choose 16 or 64")
