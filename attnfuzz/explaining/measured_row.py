"""One row of measured weights: what mistakes are replayed on, and what the weights say in numbers by themselves.

Tokens without weight, places that must have none, a factor; of partial states, splits that overlap, or have a wrong
log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.explaining.places import Places, key_slots
from attnfuzz.explaining.reruns import Reruns
from attnfuzz.explaining.row import AttentionRow, Query
from attnfuzz.explaining.weights import EXACT_RUNS, MAX_PLACES, MAX_WEIGHTS, Weights, measure, settle_keys
from attnfuzz.explaining.words import weight
from attnfuzz.inputs.reference import row_weights
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.wording import number
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
    """A wrong row, in numbers, and what is wrong of ``what``. Of "scores" it points to no token and no place."""

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
        """Scores of its own keys, before what a variant makes of them."""
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


_SHOWN = 3
_LEAST = 2.0**-12
_BOUNDS = 8.0
_ROUNDOFF = 1e-5
_FACTOR_ROUNDOFF = 2.0**-7


def read_row(row: MeasuredRow) -> Reading | None:
    """Read what is wrong with a row; None if its weights and its LSE are right."""
    if row.num_tokens == 0:
        return _empty(row)
    if not bool(row.got.isfinite().all()):
        return Reading("weights are NaN or infinite", "nan")
    if not bool(row.weights.wrong[row.number].any()):
        return lse_alone(row.weights, row.number)
    if not bool((row.got.abs() > row.bound).any()):
        return _nothing_read(row)
    texts = list(_gained(row))
    if lost := clearly_wrong(row, row.places, row.weights).lost:
        texts.append(f"{_have(row, lost)} weight 0, expected {weight(row.expected[row.own[lost]].sum())}")
    return Reading("; ".join(texts), "tokens") if texts else _factor(row) or _largest_errors(row)


def _gained(row: MeasuredRow) -> Iterator[str]:
    """Weight that is where none must be: before a window, behind the query, past the end, or in places of others."""
    chosen = clearly_wrong(row, row.places, row.weights).gained
    whole = row.places.own(row.seq, row.kv_head).tolist()
    own = [position for position, place in enumerate(whole) if place in chosen]
    if own:
        yield f"{_have(row, own)} weight {weight(row.got[[whole[t] for t in own]].sum())}, expected 0"
    others = [place for place in chosen if place not in whole]
    shown = [f"{row.places.name(one, reader=row.seq)} has weight {weight(row.got[one])}" for one in others[:_SHOWN]]
    if others:
        yield f"{', '.join([*shown, '...'][: len(others)])}, expected 0"


def _have(row: MeasuredRow, positions: list[int]) -> str:
    return f"{row.tokens(positions)} {'has' if len(positions) == 1 else 'have'}"


def _factor(row: MeasuredRow) -> Reading | None:
    """All weights too large or too small by the same factor."""
    visible = row.expected > _BOUNDS * row.bound
    ratio = row.got[visible] / row.expected[visible]
    if not len(ratio) or float(ratio.max() - ratio.min()) > _FACTOR_ROUNDOFF * float(ratio.abs().max()):
        return None
    factor = float(ratio[row.expected[visible].argmax()])
    if bool(((row.got - factor * row.expected).abs() > _BOUNDS * row.bound)[~visible].any()):
        return None
    if row.values.kv_scales is not None:  # what V is multiplied with is a factor, too
        scales = row.values.kv_scales[1].tolist()
        of_v = scales[row.kv_head]
        for times, words in ((1 / of_v, "is left out"), (of_v, "is applied twice")):
            if math.isclose(factor, times, rel_tol=_FACTOR_ROUNDOFF) and times != 1:
                return Reading(f"the weights are right, but the scale of V, {number(of_v)}, {words}", "factor")
        for head, other in enumerate(scales):
            if other != of_v and math.isclose(factor, other / of_v, rel_tol=_FACTOR_ROUNDOFF):
                words = f"KV head {row.kv_head} is read with the scale of V of KV head {head}"
                return Reading(f"the weights are right, but {words}", "factor")
    told = weight(factor)
    return Reading(f"all weights are {told if told != weight(1.0) else f'{factor:.7g}'} x the right ones", "factor")


def _largest_errors(row: MeasuredRow) -> Reading:
    errors = (row.got - row.expected).abs()[row.own]
    worst = errors.argsort(descending=True)[:_SHOWN].sort().values.tolist()
    texts = [
        f"{row.tokens([t])} has weight {weight(row.got[row.own[t]])}, expected {weight(row.expected[row.own[t]])}"
        for t in worst
        if float(errors[t]) > float(row.bound[row.own[t]])
    ]
    return Reading("; ".join(texts), "scores")


def _empty(row: MeasuredRow) -> Reading | None:
    lse = row.weights.lse
    expected_lse = float(row.weights.expected_lse[row.number])
    right_lse = lse is None or not bool(row.weights.wrong_lse[row.number])
    constant = row.weights.constant[row.number]
    if right_lse and bool((constant == 0).all()) and not bool((row.got != 0).any()):
        return None
    seen = "" if lse is None else f" and lse = {number(float(lse[row.number]))}"
    out = number(float(constant[0])) if not bool((row.got > 0).any()) else "an average of slots that are not its own"
    what = "the sequence is empty" if row.case.seen(row.row) is None else "the query sees no key"
    return Reading(f"{what}: got out = {out}{seen}, expected 0 and {number(expected_lse)}", "empty")


def _nothing_read(row: MeasuredRow) -> Reading:
    tokens, lse = _have(row, list(range(row.first_seen, row.num_tokens))), row.weights.lse
    beside = 0.0 if row.case.variant.sinks is None else 1 - float(row.expected.sum())
    of_none = float(row.weights.expected_lse[row.number]) + math.log(beside) if beside > 0 else -math.inf  # or the sink
    as_empty = lse is not None and math.isclose(float(lse[row.number]), of_none, rel_tol=1e-4, abs_tol=1e-4)
    why = ", and lse is that of a row without keys" if as_empty else ""
    top = float(row.scores.max())
    scores = f" (its largest score is {number(top)})" if abs(top) > 80 else ""
    return Reading(f"{tokens} weight 0, expected {weight(row.expected.sum())}{why}{scores}", "tokens")


def lse_alone(weights: Weights, row: int) -> Reading | None:
    """Read what is wrong with the log-sum-exp of a row whose weights are right; None if nothing is."""
    if weights.lse is None or not bool(weights.wrong_lse[row]):
        return None
    got, expected = (number(float(part[row])) for part in (weights.lse, weights.expected_lse))
    return Reading(f"here only lse shows it: {got}, expected {expected}", "lse")


def split_mistakes(row: MeasuredRow) -> Iterator[str]:
    """One clause on each mistake that can be seen in a split by itself. Which split a token is in is free."""
    by_split, lse = row.weights.by_split, row.weights.split_lse
    if by_split is None:
        return
    mine = by_split[row.number][:, row.own] if row.num_tokens else by_split.new_zeros((by_split.shape[1], 0))
    read = mine > _LEAST
    several = (read.sum(0) > 1).nonzero()[:, 0].tolist()
    if several:
        splits = read[:, several[0]].nonzero()[:, 0].tolist()
        is_are = "is" if len(several) == 1 else "are"
        yield f"{row.tokens(several)} {is_are} in splits {' and '.join(map(str, splits))}"
    scores = row.final_scores
    for split, got in enumerate([] if lse is None else lse[row.number].tolist()):
        tokens = read[split].nonzero()[:, 0]
        if not len(tokens):
            if got != -math.inf:
                yield f"split {split} has no token, but lse = {number(got)}, expected -inf"
            continue
        expected = float(torch.logsumexp(scores[tokens], 0))
        slack = _BOUNDS * float(row.weights.lse_bound[row.number]) + _ROUNDOFF * (1 + abs(expected))
        if not abs(got - expected) <= slack:
            which = row.tokens(tokens.tolist())
            yield f"split {split} has {which}, but lse = {number(got)}, expected {number(expected)}"
