"""Autotuned decode kernels, right with all configurations or wrong with one that is not the first."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl

import attnfuzz
from tests.planted import planted

__all__ = [
    "of_many",
    "pruned",
    "right",
    "skips_a_tile",
    "static_assert",
    "two_stages",
    "unmasked_in_one",
    "wrong_with_the_first",
]

CONFIGS = [triton.Config({"BLOCK_N": size}, num_warps=warps) for size in (16, 32, 64) for warps in (4, 8)]


@triton.jit
def _attend(p_q, p_k, p_v, p_lens, p_out, p_lse, stride_s, stride_t, scale, HEADS: tl.constexpr, D: tl.constexpr,
            WRONG: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """One row. ``WRONG`` says what is wrong where BLOCK_N is 64."""
    if WRONG == "static_assert":
        tl.static_assert(BLOCK_N < 64)
    i_row, i_d = tl.program_id(0), tl.arange(0, D)
    q = tl.load(p_q + i_row * D + i_d).to(tl.float32)
    length = tl.load(p_lens + i_row // HEADS)
    start = (i_row // HEADS) * stride_s + (i_row % HEADS) * D
    most = float("-inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    end = length
    if WRONG == "tile" and BLOCK_N == 64:
        end = (length // 2) * 2
    for i in range(0, end, BLOCK_N):
        i_n = i + tl.arange(0, BLOCK_N)
        live = i_n < end
        o = start + i_n[:, None] * stride_t + i_d[None, :]
        k = tl.load(p_k + o, mask=live[:, None], other=0.0).to(tl.float32)
        if WRONG == "mask" and BLOCK_N == 64:
            v = tl.load(p_v + o, mask=i_n[:, None] * stride_t < stride_s, other=0.0).to(tl.float32)
        else:
            v = tl.load(p_v + o, mask=live[:, None], other=0.0).to(tl.float32)
        scores = tl.where(live, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 0))
        weights = tl.exp(scores - highest)
        factor = tl.exp(most - highest)
        total = total * factor + tl.sum(weights, 0)
        acc = acc * factor + tl.sum(weights[:, None] * v, 0)
        most = highest
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(p_out + i_row * D + i_d, acc / divisor)
    tl.store(p_lse + i_row, tl.where(total > 0, tl.log(divisor) + most, float("-inf")))


def _smallest(configs, named_args, **kwargs):
    del named_args, kwargs
    return configs[:2]


attend = triton.autotune(configs=CONFIGS, key=["stride_s"])(_attend)
attend_pruned = triton.autotune(configs=CONFIGS, key=["stride_s"], prune_configs_by={"early_config_prune": _smallest})(
    _attend
)
attend_wrongly = triton.autotune(configs=CONFIGS[4:1:-1], key=["stride_s"])(_attend)
attend_of_many = triton.autotune(
    configs=[triton.Config({"BLOCK_N": size}, num_stages=stages) for size in (16, 64) for stages in range(1, 25)],
    key=["stride_s"],
    prune_configs_by={"early_config_prune": lambda configs, named_args, **kwargs: configs[:25]},
)(_attend)


@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (1, 2)], key=["n"])
@triton.jit
def scaled(p_out, p_in, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows; with blocks of two every second one is left out."""
    i_d = tl.arange(0, D)
    for i in range(BLOCK - 1, n, BLOCK):
        tl.store(p_out + i * D + i_d, tl.load(p_in + i * D + i_d))


@triton.jit
def _counted(p_out, p_in, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """Adds rows to what is there."""
    i_d = tl.arange(0, D)
    for i in range(0, n):
        tl.store(p_out + i * D + i_d, tl.load(p_out + i * D + i_d) + tl.load(p_in + i * D + i_d))


HALVES = [triton.Config({"BLOCK": size}) for size in (1, 2)]
added = triton.autotune(configs=HALVES, key=["n"])(_counted)
added_anew = triton.autotune(configs=HALVES, key=["n"], reset_to_zero=["p_out"])(_counted)
added_again = triton.autotune(configs=HALVES, key=["n"], restore_value=["p_out"])(_counted)


SUPPORTS = attnfuzz.Supports(
    dtypes=("float32",), layouts=("NHD",), head_sizes=(16,), gqa_ratios=(1,), strides="contiguous", empty_sequences=True
)


def _launched(i: Any, function: Any, wrong: str) -> tuple[torch.Tensor, torch.Tensor]:
    (num_seqs, heads, size), k = i.q.shape, i.k
    out, lse = torch.empty_like(i.q), torch.empty(num_seqs, heads, device=i.q.device)
    if num_seqs:
        function[(num_seqs * heads,)](
            i.q, k, i.v, i.seq_lens, out, lse, k.stride(0), k.stride(1), i.scale, HEADS=heads, D=size, WRONG=wrong
        )
    return out, lse


right = planted("right", lambda i: _launched(i, attend, ""), supports=SUPPORTS)
"""As it should be."""
skips_a_tile = planted("skips_a_tile", lambda i: _launched(i, attend, "tile"), supports=SUPPORTS)
"""Leaves out the last token of odd sequences with the largest blocks."""
unmasked_in_one = planted("unmasked_in_one", lambda i: _launched(i, attend, "mask"), supports=SUPPORTS)
"""Multiplies dead values by zero with the largest blocks."""
pruned = planted("pruned", lambda i: _launched(i, attend_pruned, "tile"), supports=SUPPORTS)
"""Wrong with blocks that its pruning leaves out."""
static_assert = planted("static_assert", lambda i: _launched(i, attend, "static_assert"), supports=SUPPORTS)
"""Refuses the largest blocks where it is compiled."""


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def two_stages(i: Any) -> Any:
    """The second of two autotuned functions is wrong with one of its configurations."""
    part, lse = _launched(i, attend, "")
    out = torch.empty_like(part)
    scaled[(1,)](out, part, part.shape[0] * part.shape[1], D=part.shape[2])
    return out, lse


of_many = planted("of_many", lambda i: _launched(i, attend_of_many, "tile"), supports=SUPPORTS)
"""Wrong with one of 25 configurations."""
wrong_with_the_first = planted(
    "wrong_with_the_first", lambda i: _launched(i, attend_wrongly, "tile"), supports=SUPPORTS
)
"""Wrong with the configuration that the interpreter takes."""


def _added(i: Any, function: Any) -> Any:
    part, lse = _launched(i, attend, "")
    out = torch.zeros_like(part)
    if len(part):
        function[(1,)](out, part, part.shape[0] * part.shape[1], D=part.shape[2])
    return out, lse


adds_in_place = planted("adds_in_place", lambda i: _added(i, added), supports=SUPPORTS)
"""Right but for its first call, in which the tuner adds to what is there as often as it times."""
resets = planted("resets", lambda i: _added(i, added_anew), supports=SUPPORTS)
"""The same, told to the tuner."""
restores = planted("restores", lambda i: _added(i, added_again), supports=SUPPORTS)
"""The same, told in another way."""
