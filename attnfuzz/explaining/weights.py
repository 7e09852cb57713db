"""The weight that a kernel gave to each place, read off runs with basis vectors in place of the values.

The basis vectors lie in the places of interest, and 0 everywhere else.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from attnfuzz.explaining.places import Places, key_slots, value_tensors
from attnfuzz.explaining.reruns import Reruns, Results
from attnfuzz.explaining.row import Query
from attnfuzz.inputs.reference import row_weights
from attnfuzz.inputs.writing import placements
from attnfuzz.memory.patterns import bits
from attnfuzz.problems.block_table import freed_tokens
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase
from attnfuzz.trials.comparison import natural_lse
from attnfuzz.trials.expectations import expectations
from attnfuzz.values.tokens import token_table, values_on

_ONE = 64.0
"""The element of a basis vector that is not 0: keeps small weights above the smallest number of float16."""


@dataclass(frozen=True)
class Probe:
    """The output in the dimension of each chosen place, in weights: seen, right, and how far it may be off.

    `raw` is the output before splits are merged. `lse` is the right log-sum-exp of each row.
    """

    got: Float64[Tensor, "rows n"]
    expected: Float64[Tensor, "rows n"]
    bound: Float64[Tensor, "rows n"]
    raw: Float64[Tensor, "..."]
    lse: Float64[Tensor, " rows"]
    lse_bound: Float64[Tensor, " rows"]


def settle_keys(reruns: Reruns) -> None:
    """Let dead keys be copies of live ones, so that a dead place that is read has a weight that can be seen."""
    if isinstance(reruns.case, MergeStatesCase):
        return
    keys = bits(key_slots(reruns.inputs))
    live = torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device)
    slots = _slots(reruns)
    live[slots] = True
    if not len(slots[0]):
        keys.zero_()
    else:
        dead = (~live).nonzero()
        copied = torch.arange(len(dead), device=keys.device) % len(slots[0])
        keys[dead[:, 0], dead[:, 1]] = keys[slots[0][copied], slots[1][copied]].clone()
    reruns.keep()


def probe(
    reruns: Reruns,
    places: Places,
    chosen: Int64[Tensor, " n"],
    dims: Int64[Tensor, " n"],
    constant: Float64[Tensor, "rows v_head_size"],
) -> Probe:
    """One run. Places that share a dimension have the sum of their weights there. `constant`: the output without any.

    Raises what `Reruns.run` raises.
    """
    results = run_with(reruns, places, chosen, dims)
    out, _ = reruns.logical(results)
    request = (reruns.kernel.declaration, reruns.case, _logical_values(reruns))
    (right,) = expectations([request], tolerance="bound", one_copy=reruns.device == "cpu")
    unit = unit_of_rows(reruns)
    expected, bound = (part.flatten(0, 1)[:, dims] / unit for part in (right.expected.out, right.bound.out))
    raw = next(iter(results.values())).double().flatten(0, 1)[..., dims]
    roundoff = torch.finfo(getattr(torch, reruns.case.dtype)).eps
    return Probe(
        got=(out.flatten(0, 1) - constant)[:, dims] / unit,
        expected=expected,
        bound=bound + constant[:, dims].abs() * roundoff / unit,
        raw=raw / unit.view(-1, *[1] * (raw.dim() - 1)),
        lse=right.expected.lse.flatten(),
        lse_bound=right.bound.lse.flatten(),
    )


def unit_of_rows(reruns: Reruns) -> Float64[Tensor, "rows 1"]:
    """Give what each row has of a place with weight 1: in an 8-bit cache `_ONE` is its product with V's scale."""
    case = reruns.case
    if not isinstance(case, AttentionCase):
        return torch.full((case.num_rows * case.num_q_heads, 1), _ONE, dtype=torch.float64, device="cpu")
    of_head = torch.ones(case.num_kv_heads, dtype=torch.float64, device="cpu")
    if reruns.values.kv_scales is not None:
        of_head = reruns.values.kv_scales[1].cpu()
    return _ONE * of_head.repeat_interleave(case.gqa_ratio).repeat(case.num_rows)[:, None]


def run_with(reruns: Reruns, places: Places, chosen: Int64[Tensor, " n"], dims: Int64[Tensor, " n"] | None) -> Results:
    """A run in which the values of chosen places are basis vectors, or 1 in all dimensions, and all others 0."""
    tensors = value_tensors(reruns.reset())
    first = 0
    for tensor in tensors:
        tensor.zero_()
        size = places.count // len(tensors)
        mine = (chosen >= first) & (chosen < first + size)
        where = places.coordinates(chosen[mine].to(tensor.device))[4 - tensor.ndim :]  # of a merge, without the side
        one = bits(torch.tensor(_ONE, dtype=tensor.dtype, device="cpu")).item()
        if dims is None:
            bits(tensor)[where] = one
        else:
            bits(tensor)[(*where, dims[mine].to(tensor.device))] = one
        first += size
    return reruns.run()


def _logical_values(reruns: Reruns) -> Any:
    """The case's logical values with those that the memory now holds, on the host."""
    tensors, values = value_tensors(reruns.inputs), values_on(reruns.values, "cpu")
    if not isinstance(reruns.case, AttentionCase):
        prefix, suffix = (tensor.cpu().clone() for tensor in tensors)
        return dataclasses.replace(values, prefix_output=prefix, suffix_output=suffix)
    v = bits(tensors[0])[_slots(reruns)].view(tensors[0].dtype).cpu()
    for start, freed in zip(values.starts[:-1], freed_tokens(reruns.case), strict=True):
        v[start : start + freed] = values.v[start : start + freed]  # what lies there instead has no weight
    return dataclasses.replace(values, v=v)


def _slots(reruns: Reruns) -> tuple[Tensor, Tensor]:
    if not isinstance(reruns.case, AttentionCase):
        raise TypeError(f"{reruns.case.problem} has no tokens")
    (placement,) = placements([reruns.case], token_table([reruns.case], reruns.device))
    return placement.slots


MAX_PLACES = 1 << 16
MAX_WEIGHTS = 1 << 23
"""Of all rows. Beyond that a case takes too long: it is to be shrunk first."""

EXACT_RUNS = 24
_GROUP_RUNS = 8
_TINY = 1e-12
_UNCERTAIN = 0.2
_NONE = torch.zeros(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Weights:
    """Rows are (sequence, query head) or (token, head), one sequence or token after another. Everything in float64.

    `constant` is the output where all values are 0. `lse` is natural, None for a kernel that returns none.
    `dims_differ`: dimensions in which the output is made otherwise than in the rest, or all of them if the output is
    not a weighted sum of values. `by_split` and `split_lse`: of the partial states that split_decode returns.
    """

    got: Float64[Tensor, "rows places"]
    expected: Float64[Tensor, "rows places"]
    bound: Float64[Tensor, "rows places"]
    constant: Float64[Tensor, "rows v_head_size"]
    lse: Float64[Tensor, " rows"] | None
    expected_lse: Float64[Tensor, " rows"]
    lse_bound: Float64[Tensor, " rows"]
    dims_differ: Bool[Tensor, " v_head_size"]
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

    @property
    def has_constant(self) -> Bool[Tensor, " rows"]:
        """Rows of which a part does not come from the values."""
        return ~(self.constant == 0).all(-1)

    @property
    def wrong_rows(self) -> list[int]:
        """Rows with anything wrong."""
        wrong: Tensor = self.wrong.any(-1) | self.wrong_lse | self.has_constant
        return wrong.nonzero()[:, 0].tolist()


def measure(reruns: Reruns, places: Places) -> Weights:
    """Read off all weights: one run for as many places as the head has dimensions, and two or three to check them.

    Of many places, first the sums of groups that lie far apart are read off, then single ones where sums are wrong.
    Raises what `Reruns.run` raises.
    """
    empty = run_with(reruns, places, _NONE, _NONE)
    blank, lse = reruns.logical(empty)
    constant = blank.flatten(0, 1)
    is_large = places.count > EXACT_RUNS * reruns.case.value_size
    if is_large:
        found = weigh_in_groups(reruns, places, constant)
    else:  # each in a dimension of its own
        found = _weigh(reruns, places, torch.arange(places.count, device="cpu"), constant)
    has_splits = reruns.case.partial_states > 0 and not is_large
    of_splits = [*empty.values()][1:] if has_splits else []  # the LSE behind the output, if there is one
    split_lse = natural_lse(reruns.kernel.declaration, of_splits[0]).flatten(0, 1) if of_splits else None
    return Weights(
        got=found.got,
        expected=found.expected,
        bound=found.bound,
        constant=constant,
        lse=None if lse is None else lse.flatten(),
        expected_lse=found.lse,
        lse_bound=found.lse_bound,
        dims_differ=_dims_that_differ(reruns, places, None if is_large else found, constant),
        by_split=found.raw if has_splits else None,
        split_lse=split_lse,
    )


def without_keys(reruns: Reruns, places: Places) -> Float64[Tensor, "rows v_head_size"]:
    """The output where all values and all keys are 0. Raises what `Reruns.run` raises."""
    run_with(reruns, places, _NONE, _NONE)
    bits(key_slots(reruns.inputs)).zero_()
    out, _ = reruns.logical(reruns.run())
    return out.flatten(0, 1)


def weigh_in_groups(reruns: Reruns, places: Places, constant: Float64[Tensor, "rows v_head_size"]) -> Probe:
    """Groups of places, then the members of those groups that differ most from the others, relative to what is right.

    Members that are not looked at are taken to be off by the factor of their group, with an error that says how little
    that means.
    """
    size = reruns.case.value_size
    count = _GROUP_RUNS * size - 1 + _GROUP_RUNS * size % 2  # odd, as pages hold even numbers of places
    group = torch.arange(places.count, device="cpu") % count
    sums = _probe_groups(reruns, places, group, constant)
    factor = torch.where(sums.expected > sums.bound, sums.got / sums.expected, 1.0)
    usual = factor.median(-1, keepdim=True).values  # of a token that is missing all others have a share
    odd = ((sums.got - usual * sums.expected).abs() / (sums.bound + _TINY)).nan_to_num(torch.inf).amax(0)
    chosen = odd.argsort(descending=True, stable=True)[: EXACT_RUNS * size]
    chosen = chosen.sort().values
    expected = expected_weights(reruns, places)
    got, bound = expected * factor, expected * _UNCERTAIN + _TINY
    exact = _weigh(reruns, places, chosen, constant)
    got[:, chosen], expected[:, chosen], bound[:, chosen] = exact.got, exact.expected, exact.bound
    return dataclasses.replace(sums, got=got, expected=expected, bound=bound)


def expected_weights(reruns: Reruns, places: Places) -> Float64[Tensor, "rows places"]:
    """The right weight of every place, in float64."""
    case, values = reruns.case, values_on(reruns.values, "cpu")
    if not isinstance(case, AttentionCase):
        parts = torch.stack((values.prefix_lse, values.suffix_lse)).double().flatten(1)
        parts = torch.where(parts.isinf(), -torch.inf, parts * (math.log(2) if values.lse_base2 else 1.0))
        sides = parts.softmax(0).nan_to_num(0.0)
        return (torch.eye(sides.shape[1], dtype=torch.float64, device="cpu")[:, None] * sides).flatten(1)
    values = values.dequantised()
    found = torch.zeros((case.num_rows * case.num_q_heads, places.count), dtype=torch.float64, device="cpu")
    for number in range(len(found)):
        query = Query.numbered(case, number)
        keys = values.sequence(query.seq)[0][: query.num_tokens, query.kv_head].double()
        scores = case.scale * (keys @ values.q[query.row, query.head].double())
        found[number].index_add_(0, places.of_query(query), row_weights(case, query.row, query.head, scores)[0])
    return found


def _probe_groups(
    reruns: Reruns, places: Places, group: Int64[Tensor, " places"], constant: Float64[Tensor, "rows v_head_size"]
) -> Probe:
    """For each place what its group has in all."""
    size = reruns.case.value_size
    probes, order = [], []
    for start in range(0, int(group.max()) + 1, size):
        chosen = ((group >= start) & (group < start + size)).nonzero()[:, 0]
        probes.append(probe(reruns, places, chosen, group[chosen] - start, constant))
        order.append(chosen)
    return _joined(probes, torch.cat(order).argsort())


def _weigh(
    reruns: Reruns, places: Places, chosen: Int64[Tensor, " n"], constant: Float64[Tensor, "rows v_head_size"]
) -> Probe:
    size = reruns.case.value_size
    parts = torch.split(chosen, size)
    probes = [probe(reruns, places, part, torch.arange(len(part), device="cpu"), constant) for part in parts]
    return _joined(probes, torch.arange(len(chosen), device="cpu"))


def _joined(probes: list[Probe], order: Int64[Tensor, " n"]) -> Probe:
    """Probes side by side, their places in this order."""
    got, expected, bound, raw = (
        torch.cat([getattr(part, name) for part in probes], -1)[..., order]
        for name in ("got", "expected", "bound", "raw")
    )
    return Probe(got, expected, bound, raw, probes[0].lse, probes[0].lse_bound)


def _dims_that_differ(
    reruns: Reruns, places: Places, found: Probe | None, constant: Float64[Tensor, "rows v_head_size"]
) -> Bool[Tensor, " v_head_size"]:
    """Where every value is 1, each dimension must be the sum of the same weights: those `found`, if they are known."""
    out, _ = reruns.logical(run_with(reruns, places, torch.arange(places.count, device="cpu"), None))
    sums = (out.flatten(0, 1) - constant) / unit_of_rows(reruns)
    usual = sums.median(-1, keepdim=True).values
    total = usual if found is None else found.got.sum(-1, keepdim=True)
    slack = 4 * torch.finfo(getattr(torch, reruns.case.dtype)).eps * (total.abs() + sums.abs())
    if found is not None:
        slack = slack + 4 * found.bound.sum(-1, keepdim=True)
    differ = ((sums - usual).abs() > slack) | (sums.isnan() != usual.isnan())
    if reruns.case.value_size > 1 and bool(differ.any()):
        return differ.any(0)
    return ((sums - total).abs() > slack).any(0)
