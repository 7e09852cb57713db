"""Runs with chosen values: basis vectors in the places of interest, 0 everywhere else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.explaining.places import Places, key_slots, value_tensors
from attnfuzz.explaining.rig import Results, Rig
from attnfuzz.judging.expectations import expectations
from attnfuzz.memory.patterns import bits
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase
from attnfuzz.problems.freed import freed_tokens
from attnfuzz.problems.placement import placements
from attnfuzz.values import LogicalAttention
from attnfuzz.values.token_table import token_table

__all__ = ["Probe", "probe", "run_with", "settle_keys", "unit_of_rows"]

_ONE = 64.0
"""The element of a basis vector that is not 0: keeps small weights above the smallest number of float16."""


@dataclass(frozen=True)
class Probe:
    """What the output holds in the dimension of each chosen place, in weights: seen, right, and how far it may be off.

    `raw` is the output before splits are merged. `lse` is the right log-sum-exp of each row.
    """

    got: Float64[Tensor, "rows n"]
    expected: Float64[Tensor, "rows n"]
    bound: Float64[Tensor, "rows n"]
    raw: Float64[Tensor, "..."]
    lse: Float64[Tensor, " rows"]
    lse_bound: Float64[Tensor, " rows"]


def settle_keys(rig: Rig) -> None:
    """Let dead keys be copies of live ones, so that a dead place that is read has a weight that can be seen."""
    if isinstance(rig.case, MergeStatesCase):
        return
    keys = bits(key_slots(rig.inputs))
    live = torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device)
    slots = _slots(rig)
    live[slots] = True
    if not len(slots[0]):
        keys.zero_()
    else:
        dead = (~live).nonzero()
        copied = torch.arange(len(dead), device=keys.device) % len(slots[0])
        keys[dead[:, 0], dead[:, 1]] = keys[slots[0][copied], slots[1][copied]].clone()
    rig.keep()


def probe(
    rig: Rig,
    places: Places,
    chosen: Int64[Tensor, " n"],
    dims: Int64[Tensor, " n"],
    constant: Float64[Tensor, "rows v_head_size"],
) -> Probe:
    """One run. Places that share a dimension have the sum of their weights there. `constant`: the output without any.

    Raises what `Rig.run` raises.
    """
    results = run_with(rig, places, chosen, dims)
    out, _ = rig.logical(results)
    request = (rig.kernel.declaration, rig.case, _logical_values(rig))
    (right,) = expectations([request], tolerance="bound", one_copy=rig.device == "cpu")
    unit = unit_of_rows(rig)
    expected, bound = (part.flatten(0, 1)[:, dims] / unit for part in (right.expected.out, right.bound.out))
    raw = next(iter(results.values())).double().flatten(0, 1)[..., dims]
    roundoff = torch.finfo(getattr(torch, rig.case.dtype)).eps
    return Probe(
        got=(out.flatten(0, 1) - constant)[:, dims] / unit,
        expected=expected,
        bound=bound + constant[:, dims].abs() * roundoff / unit,
        raw=raw / unit.view(-1, *[1] * (raw.dim() - 1)),
        lse=right.expected.lse.flatten(),
        lse_bound=right.bound.lse.flatten(),
    )


def unit_of_rows(rig: Rig) -> Float64[Tensor, "rows 1"]:
    """What each row has of a place with weight 1: in an 8-bit cache `_ONE` stands for its product with V's scale."""
    case = rig.case
    if isinstance(case, MergeStatesCase):
        return torch.full((case.num_tokens * case.num_q_heads, 1), _ONE, dtype=torch.float64, device="cpu")
    of_head = torch.ones(case.num_kv_heads, dtype=torch.float64, device="cpu")
    if rig.values.kv_scales is not None:
        of_head = rig.values.kv_scales[1].cpu()
    return _ONE * of_head.repeat_interleave(case.gqa_ratio).repeat(case.num_rows)[:, None]


def run_with(rig: Rig, places: Places, chosen: Int64[Tensor, " n"], dims: Int64[Tensor, " n"] | None) -> Results:
    """A run in which the values of chosen places are basis vectors, or 1 in all dimensions, and all others 0."""
    tensors = value_tensors(rig.reset())
    first = 0
    for tensor in tensors:
        tensor.zero_()
        size = places.count // len(tensors)
        mine = (chosen >= first) & (chosen < first + size)
        where = torch.unravel_index((chosen[mine] - first).to(tensor.device), tensor.shape[:-1])
        one = bits(torch.tensor(_ONE, dtype=tensor.dtype, device="cpu")).item()
        if dims is None:
            bits(tensor)[where] = one
        else:
            bits(tensor)[(*where, dims[mine].to(tensor.device))] = one
        first += size
    return rig.run()


def _logical_values(rig: Rig) -> Any:
    """The case's logical values with those that the memory now holds, on the host."""
    tensors = value_tensors(rig.inputs)
    if not isinstance(rig.case, AttentionCase):
        prefix, suffix = (tensor.cpu().clone() for tensor in tensors)
        lses = {name: getattr(rig.values, name).cpu() for name in ("prefix_lse", "suffix_lse")}
        return dataclasses.replace(rig.values, prefix_output=prefix, suffix_output=suffix, **lses)
    v = bits(tensors[0])[_slots(rig)].view(tensors[0].dtype).cpu()
    for start, freed in zip(rig.values.starts[:-1], freed_tokens(rig.case), strict=True):
        v[start : start + freed] = rig.values.v[start : start + freed].cpu()  # what lies there instead has no weight
    scales = None if rig.values.kv_scales is None else rig.values.kv_scales.cpu()
    return LogicalAttention(rig.values.q.cpu(), rig.values.k.cpu(), v, rig.values.starts, scales)


def _slots(rig: Rig) -> tuple[Tensor, Tensor]:
    if not isinstance(rig.case, AttentionCase):
        raise TypeError(f"{rig.case.problem} has no tokens")
    (placement,) = placements([rig.case], token_table([rig.case], rig.device))
    return placement.slots
