"""The weight that a kernel gave to each place, read off runs with basis vectors in place of the values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from attnfuzz.explaining.places import Places, key_slots, value_tensors
from attnfuzz.explaining.rig import Rig
from attnfuzz.oracles.comparison import natural_lse
from attnfuzz.oracles.expectations import expectations
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase, SplitDecodeCase
from attnfuzz.problems.placement import placements
from attnfuzz.values import LogicalAttention
from attnfuzz.values.token_table import token_table

__all__ = ["MAX_PLACES", "Weights", "measure", "settle_keys"]

MAX_PLACES = 1 << 14
"""Beyond that a case takes too long: it is to be shrunk first."""

_ONE = 64.0
"""The element of a basis vector that is not 0: keeps small weights above the smallest number of float16."""


@dataclass(frozen=True)
class Weights:
    """Rows are (sequence, query head) or (token, head), one sequence after another. Everything in float64.

    `constant` is the output where all values are 0. `lse` is natural, None for a kernel that returns none.
    `dims_differ`: dimensions in which the output is made otherwise than in the rest, or all of them if the output is
    not a weighted sum of values. `by_split` and `split_lse`: of the partial states that split_decode returns.
    """

    got: Float64[Tensor, "rows places"]
    expected: Float64[Tensor, "rows places"]
    bound: Float64[Tensor, "rows places"]
    constant: Float64[Tensor, "rows head_size"]
    lse: Float64[Tensor, " rows"] | None
    expected_lse: Float64[Tensor, " rows"]
    lse_bound: Float64[Tensor, " rows"]
    dims_differ: Bool[Tensor, " head_size"]
    by_split: Float64[Tensor, "rows num_splits places"] | None = None
    split_lse: Float64[Tensor, "rows num_splits"] | None = None

    @property
    def wrong(self) -> Bool[Tensor, "rows places"]:
        """Weights beyond their error bound."""
        return ~((self.got - self.expected).abs() <= self.bound)

    @property
    def wrong_lse(self) -> Bool[Tensor, " rows"]:
        """LSEs beyond their error bound."""
        if self.lse is None:
            return torch.zeros_like(self.expected_lse, dtype=torch.bool)
        same = self.lse == self.expected_lse
        return ~(same | ((self.lse - self.expected_lse).abs() <= self.lse_bound))

    def lse_error(self, row: int) -> float | None:
        """How much too large a row's LSE is; None without one, or where it is no number."""
        if self.lse is None:
            return None
        error = float(self.lse[row] - self.expected_lse[row])
        return error if math.isfinite(error) else None

    @property
    def has_constant(self) -> Bool[Tensor, " rows"]:
        """Rows of which a part does not come from the values."""
        return ~(self.constant == 0).all(-1)

    @property
    def wrong_rows(self) -> list[int]:
        """Rows with anything wrong."""
        wrong: Tensor = self.wrong.any(-1) | self.wrong_lse | self.has_constant
        return wrong.nonzero()[:, 0].tolist()


def settle_keys(rig: Rig) -> None:
    """Let dead keys be copies of live ones, so that a dead place that is read has a weight that can be seen."""
    if isinstance(rig.case, MergeStatesCase):
        return
    keys = key_slots(rig.inputs)
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


def measure(rig: Rig, places: Places) -> Weights:
    """Read off all weights: one run for as many places as the head has dimensions, and two or three to check them.

    Raises what `Rig.run` raises.
    """
    head_size = rig.case.head_size
    empty = _run(rig, places, _none(), _none())
    blank, lse = rig.logical(empty)
    constant = blank.flatten(0, 1)
    parts, splits = [], []
    for start in range(0, places.count, head_size):
        chosen = torch.arange(start, min(start + head_size, places.count))
        part, partial = _weights_of(rig, places, chosen, chosen - start, constant)
        parts.append(part)
        splits.append(partial)
    got, expected, bound = (torch.cat(part, -1) for part in zip(*(part[:3] for part in parts), strict=True))
    has_splits = isinstance(rig.case, SplitDecodeCase)
    return Weights(
        got=got,
        expected=expected,
        bound=bound,
        constant=constant,
        lse=None if lse is None else lse.flatten(),
        expected_lse=parts[0][3],
        lse_bound=parts[0][4],
        dims_differ=_dims_that_differ(rig, places, got, bound, constant),
        by_split=torch.cat(splits, -1) if has_splits else None,
        split_lse=_split_lse(rig, empty) if has_splits else None,
    )


def _weights_of(
    rig: Rig, places: Places, chosen: Int64[Tensor, " n"], dims: Int64[Tensor, " n"], constant: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Weights of the chosen places, each in a dimension of its own, what they should be and how far they may be off.

    Then those of the raw output, whose rows have splits if the case has.
    """
    results = _run(rig, places, chosen, dims)
    out, _ = rig.logical(results)
    got = (out.flatten(0, 1) - constant)[:, dims] / _ONE
    request = (rig.kernel.declaration, rig.case, _logical_values(rig))
    (right,) = expectations([request], tolerance="bound", interpreted=rig.device == "cpu")
    expected, bound = (part.flatten(0, 1)[:, dims] / _ONE for part in (right.expected.out, right.bound.out))
    bound += constant[:, dims].abs() * torch.finfo(getattr(torch, rig.case.dtype)).eps / _ONE
    raw = next(iter(results.values())).double().flatten(0, 1)[..., dims] / _ONE
    return (got, expected, bound, right.expected.lse.flatten(), right.bound.lse.flatten()), raw


def _split_lse(rig: Rig, results: dict[str, Tensor]) -> Float64[Tensor, "rows num_splits"] | None:
    _, *lse = results.values()
    return natural_lse(rig.kernel.declaration, lse[0]).flatten(0, 1) if lse else None


def _dims_that_differ(
    rig: Rig, places: Places, got: Tensor, bound: Tensor, constant: Tensor
) -> Bool[Tensor, " head_size"]:
    """Where every value is 1, each dimension must be the sum of the same weights."""
    head_size = rig.case.head_size
    everything = torch.arange(places.count)
    out, _ = rig.logical(_run(rig, places, everything, None))
    sums = (out.flatten(0, 1) - constant) / _ONE
    total = got.sum(-1, keepdim=True)
    roundoff = torch.finfo(getattr(torch, rig.case.dtype)).eps
    slack = 4 * bound.sum(-1, keepdim=True) + 4 * roundoff * (total.abs() + sums.abs())
    close = (sums - total).abs() <= slack
    usual = sums.median(-1, keepdim=True).values
    alike = (sums - usual).abs() <= slack
    same = sums.isnan() & usual.isnan()
    if head_size == 1 or bool((alike | same).all()):
        return (~close & ~sums.isnan()).any(0)
    return (~alike & ~same).any(0)


def _run(rig: Rig, places: Places, chosen: Int64[Tensor, " n"], dims: Int64[Tensor, " n"] | None) -> dict[str, Tensor]:
    """A run in which the values of chosen places are basis vectors, or 1 in all dimensions, and all others 0."""
    tensors = value_tensors(rig.reset())
    first = 0
    for tensor in tensors:
        tensor.zero_()
        size = places.count // len(tensors)
        mine = (chosen >= first) & (chosen < first + size)
        where = torch.unravel_index((chosen[mine] - first).to(tensor.device), tensor.shape[:-1])
        if dims is None:
            tensor[where] = _ONE
        else:
            tensor[(*where, dims[mine].to(tensor.device))] = _ONE
        first += size
    return rig.run()


def _logical_values(rig: Rig) -> Any:
    """The case's logical values with those that the memory now holds, on the host."""
    tensors = value_tensors(rig.inputs)
    if not isinstance(rig.case, AttentionCase):
        prefix, suffix = (tensor.cpu().clone() for tensor in tensors)
        lses = {name: getattr(rig.values, name).cpu() for name in ("prefix_lse", "suffix_lse")}
        return dataclasses.replace(rig.values, prefix_output=prefix, suffix_output=suffix, **lses)
    v = tensors[0][_slots(rig)].cpu()
    return LogicalAttention(rig.values.q.cpu(), rig.values.k.cpu(), v, rig.values.starts)


def _slots(rig: Rig) -> tuple[Tensor, Tensor]:
    if not isinstance(rig.case, AttentionCase):
        raise TypeError(f"{rig.case.problem} has no tokens")
    (placement,) = placements([rig.case], token_table([rig.case], rig.device))
    return placement.slots


def _none() -> Int64[Tensor, " n"]:
    return torch.zeros(0, dtype=torch.int64)
