"""One row of measured weights: what it read, what it should have read, and what mistakes are replayed on."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.explaining.places import Places, key_slots
from attnfuzz.explaining.reruns import Reruns
from attnfuzz.explaining.row import AttentionRow, Query
from attnfuzz.explaining.weights import EXACT_RUNS, MAX_PLACES, MAX_WEIGHTS, Weights, measure, settle_keys
from attnfuzz.inputs.reference import row_weights
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.values import LogicalAttention
from attnfuzz.values.tokens import values_on

_VISIBLE = 8.0
"""A weight of less than so many error bounds says nothing."""
_MAX_DIMENSIONS = 1024
_TINY = 1e-12
"""Added to bounds, some of which are 0, where they divide."""


class ClearlyWrong(NamedTuple):
    """Positions that have ``lost`` all weight, and places that have ``gained`` some where none must be."""

    lost: list[int]
    gained: list[int]


def clearly_wrong(query: Query, places: Places, weights: Weights) -> ClearlyWrong:
    """Weights of a query that are wrong by themselves: of a token that is missing all others have a share."""
    got, expected, bound = (part[query.number] for part in (weights.got, weights.expected, weights.bound))
    own = places.of_query(query)
    lost = ((got.abs() <= bound) & (expected > _VISIBLE * bound))[own].nonzero()[:, 0]
    gained = ((got > bound) & (expected <= 0)).nonzero()[:, 0]
    return ClearlyWrong(lost.tolist(), gained.tolist())


@dataclass(frozen=True, slots=True)
class Reading:
    """What is wrong with one row, in numbers, and of ``what``. Of "scores" it points to no token and no place."""

    exact: str
    what: Literal["empty", "factor", "lse", "nan", "scores", "tokens"]

    @property
    def vague(self) -> bool:
        """Whether it says no more than that weights differ."""
        return self.what == "scores"


@dataclass(frozen=True, kw_only=True)
class MeasuredRow(Query):
    """A row of attention whose weights were measured. `keys` are those of every place, as the kernel finds them.

    Those of an 8-bit cache are multiplied with their scale.
    """

    places: Places
    weights: Weights
    values: LogicalAttention
    keys: Float64[Tensor, "places head_size"]

    @functools.cached_property
    def own(self) -> Int64[Tensor, " seq_len"]:
        """The places that it must read."""
        return self.places.of_query(self)

    @property
    def got(self) -> Float64[Tensor, " places"]:
        return self.weights.got[self.number]

    @property
    def expected(self) -> Float64[Tensor, " places"]:
        return self.weights.expected[self.number]

    @property
    def bound(self) -> Float64[Tensor, " places"]:
        return self.weights.bound[self.number]

    @property
    def scores(self) -> Float64[Tensor, " seq_len"]:
        """Of its own keys, before what a variant makes of them."""
        return self.case.scale * (self.keys[self.own] @ self.values.q[self.row, self.head].double())

    @property
    def final_scores(self) -> Float64[Tensor, " seq_len"]:
        """As the softmax takes them: with what a variant and a mask make of them."""
        if self.is_plain:
            return self.scores
        weights, lse = row_weights(self.case, self.row, self.head, self.scores)
        return weights.log() + lse

    @functools.cached_property
    def diagnosable(self) -> AttentionRow | None:
        """The row as mistakes are replayed on it, with a dimension for each token; None if that is too large.

        Each token's value is a basis vector then, so that an explanation must fit every weight. What dead memory holds
        is not known: no mistake is replayed that needs it, and none explains a row that gives weight to it. Nor does a
        row without any weight say which tokens have lost it.
        """
        case, heads = self.case, self.case.num_kv_heads
        by_token = [self.places.own(seq, head) for seq in range(case.num_seqs) for head in range(heads)]
        live, dims = torch.unique(torch.cat(by_token), return_inverse=True)
        takes_weight = self.weights.wrong[self.number].index_fill(0, live, False)
        is_telling = bool((self.got.abs() > self.bound).any()) and not bool(takes_weight.any())
        if not 0 < len(live) <= _MAX_DIMENSIONS or not is_telling:
            return None
        parts = torch.split(dims, [len(part) for part in by_token])
        rows = [torch.stack(parts[seq * heads : (seq + 1) * heads], -1) for seq in range(case.num_seqs)]
        size = max(len(live), case.value_size)
        v = torch.nn.functional.one_hot(torch.cat(rows), size).double()
        exact = self.values.dequantised()
        q, k = exact.q.double(), exact.k.double()
        got, bound = (torch.nn.functional.pad(part[live], (0, size - len(live))) for part in (self.got, self.bound))
        lse = self.weights.lse
        return AttentionRow(
            case=case,
            values=LogicalAttention(q, k, v, self.values.starts),
            row=self.row,
            head=self.head,
            got=got,
            got_lse=None if lse is None else float(lse[self.number]),
            bound=(bound + bound.amax()) / 2 + _TINY,  # also where nothing is right, of what is read instead
            lse_bound=float(self.weights.lse_bound[self.number]),
            poison=math.nan,
            kv_scales=self.values.kv_scales,
        )


_MOST_WRONG, _MOST_RIGHT = 16, 16


def weighed_rows(reruns: Reruns) -> list[AttentionRow]:
    """Rows with what the kernel gave to each token in place of an output, as far as that can be measured.

    Raises what `Reruns.run` raises.
    """
    case, places = reruns.case, Places.of(reruns)
    if not isinstance(case, AttentionCase) or case.scores_read_values or not is_measurable(reruns, places):
        return []
    if places.count > EXACT_RUNS * case.value_size:  # sums of groups tell no mistake from another
        return []
    settle_keys(reruns)
    weights = measure(reruns, places)
    wrong = set(weights.wrong_rows)
    numbers = [n for n in range(case.num_rows * case.num_q_heads) if case.row_lens[n // case.num_q_heads]]
    chosen = [n for n in numbers if n in wrong][:_MOST_WRONG] + [n for n in numbers if n not in wrong][:_MOST_RIGHT]
    values = values_on(reruns.values, "cpu")
    keys = read_from(reruns, places, values)
    rows = (
        MeasuredRow(**vars(Query.numbered(case, n)), places=places, weights=weights, values=values, keys=keys)
        for n in chosen
    )
    return [row for measured in rows if (row := measured.diagnosable) is not None]


def is_measurable(reruns: Reruns, places: Places) -> bool:
    """Whether the weights of all rows are few enough for that."""
    rows = reruns.case.num_rows * reruns.case.num_q_heads
    return places.count <= MAX_PLACES and places.count * rows <= MAX_WEIGHTS


def read_from(reruns: Reruns, places: Places, values: LogicalAttention) -> Float64[Tensor, "places head_size"]:
    """The key of every place, times its scale in an 8-bit cache."""
    keys = key_slots(reruns.reset()).reshape(places.count, reruns.case.head_size).double().cpu()
    if values.kv_scales is not None:
        keys *= values.kv_scales[0].repeat(places.count // places.shape[2])[:, None]
    return keys
