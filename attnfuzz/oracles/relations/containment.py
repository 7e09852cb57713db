"""Numbers that are not finite stay where they belong.

A cache may hold them: a model overflowed, a page was corrupted, a mask was written into K. What is promised then:

* A score of -inf has weight 0, where a kernel promises it (`Supports.infinite_scores`). So a row gives the same bits
  whether scores are -inf or so low that exp gives 0 for them, as long as it sees another score. All tokens but the last
  of one sequence get such scores here: whole tiles and splits begin with them, where a maximum that is still -inf is
  easily subtracted from itself.
* A key with NaN, a score of +inf or NaN, and a value that is not finite leave the rows that read them, in the heads
  that do, without a right result. Every other row and head keeps its bits: what shares a batch, a tile or a program
  with them must not be told of it. Of a token that a row does not see yet the key must not matter, while the value may,
  since 0 x inf is NaN, and tiles of V are multiplied whole.

All scores of a row at -inf would make it an empty one; that is not asked here, nor are 8-bit caches, of which most have
no infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.relations.relation import FurtherRuns, Relation, one_by_one
from attnfuzz.oracles.relations.transformed import Changed, Results, unequal_bits, where_bits_differ
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.block_table import shared_tokens
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.registry import Contents
from attnfuzz.values import LogicalAttention

__all__ = ["CONTAINMENT"]

_LOW = 2.0**15
"""An element of K that makes a score so low, in magnitude: every dtype has it."""
_GAP = 256.0
"""Between a score and the largest one of its row: float32's exp gives 0 from 104 on, a 16-bit one earlier."""
_LARGEST = 2.0**24
"""A score beside which no design overflows. Compilers make one instruction of sum x scale - maximum, which rounds once,
while the maximum was rounded before: the exponent is positive by up to 2^-24 of the score, and exp overflows at 88."""
_AS_IT_IS = -1

_Attention = DenseDecodeCase | PagedDecodeCase | SplitDecodeCase | PagedAttentionCase


@dataclass(frozen=True, slots=True)
class _Law:
    """Two runs, by number, that give the same bits in `rows`: every head of each row that `kept` names."""

    before: int
    after: int
    kept: Bool[Tensor, "num_rows num_q_heads"]
    kind: str
    as_it_was: str
    why: str


@dataclass(frozen=True, slots=True)
class _Place:
    """The tokens of one sequence and KV head, and the rows and query heads that read them."""

    case: _Attention
    values: LogicalAttention
    seq: int
    kv_head: int

    @property
    def tokens(self) -> slice:
        return slice(self.values.starts[self.seq], self.values.starts[self.seq + 1])

    @property
    def rows(self) -> list[int]:
        return [row for row, seq in enumerate(self.case.row_seqs) if seq == self.seq]

    @property
    def heads(self) -> slice:
        return slice(self.kv_head * self.case.gqa_ratio, (self.kv_head + 1) * self.case.gqa_ratio)

    def everywhere_but(self, rows: Sequence[int]) -> Bool[Tensor, "num_rows num_q_heads"]:
        """All rows and heads but those that read this KV head in `rows`."""
        kept = torch.ones(self.case.num_rows, self.case.num_q_heads, dtype=torch.bool, device="cpu")
        kept[list(rows), self.heads] = False
        return kept


def _applies(declaration: Declaration, case: Case) -> bool:
    if isinstance(case, MergeStatesCase) or not declaration.supports.deterministic or case.kv is not None:
        return False
    if isinstance(case, PagedDecodeCase) and shared_tokens(case):
        return False
    return any(case.seq_lens[seq] for seq in case.row_seqs)


def _further(declaration: Declaration, case: Case, contents: Contents) -> FurtherRuns | None:
    if isinstance(case, MergeStatesCase) or not isinstance(contents.values, LogicalAttention):
        return None
    longest = max(dict.fromkeys(case.row_seqs), key=lambda seq: case.seq_lens[seq])
    place = _Place(case, contents.values, longest, case.num_kv_heads - 1)
    runs, laws = list[Changed](), list[_Law]()
    if declaration.supports.infinite_scores and (of_scores := _low_and_infinite(place, contents)) is not None:
        changes, law = of_scores
        runs += changes
        laws.append(law)
    for name, number in (("K", math.nan), ("V", math.inf)):
        reading = [row for row in place.rows if name == "V" or case.row_lens[row] == case.seq_lens[place.seq]]
        kept = place.everywhere_but(reading)
        if bool(kept.any()):
            why = f"only rows that read KV head {place.kv_head} of sequence {place.seq} may show it"
            laws.append(_Law(_AS_IT_IS, len(runs), kept, f"{number} in {name}", "originally", why))
            runs.append(_with_last(place, name, number, contents))
    if not runs:
        return None

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        return next((found for law in laws if (found := _objection(case, law, runs, one, others)) is not None), None)

    return FurtherRuns(runs, compare)


def _objection(
    case: _Attention, law: _Law, runs: Sequence[Changed], one: Results, others: Sequence[Results]
) -> Failure | None:
    before = one if law.before == _AS_IT_IS else others[law.before]
    after = others[law.after]
    masks = {name: mask & _over(mask, law.kept) for name, mask in where_bits_differ(before, after).items()}
    words = runs[law.after].words
    found = unequal_bits(
        "containment", case, before, after, words, masks=masks, as_it_was=law.as_it_was, details=(law.why,)
    )
    return None if found is None else msgspec.structs.replace(found, kind=law.kind)


def _over(result: Tensor, kept: Bool[Tensor, "num_rows num_q_heads"]) -> Tensor:
    """`kept` along the axes of a result, whose rows may be followed by padding tokens, of which nothing is asked."""
    padded = torch.nn.functional.pad(kept, (0, 0, 0, len(result) - len(kept)))
    return padded.reshape(*padded.shape, *(1,) * (result.dim() - 2))


def _with_last(place: _Place, name: str, number: float, contents: Contents) -> Changed:
    """The last token of the place with a key or a value of nothing but `number`."""
    token = place.tokens.stop - 1
    tensor = (place.values.k if name == "K" else place.values.v).clone()
    tensor[token, place.kv_head] = number
    values = replace(place.values, k=tensor) if name == "K" else replace(place.values, v=tensor)
    position = place.case.seq_lens[place.seq] - 1
    words = f"with {number} in {name} at token {position} of sequence {place.seq}, KV head {place.kv_head}"
    return Changed(words, place.case, values, contents.placement)


def _low_and_infinite(place: _Place, contents: Contents) -> tuple[list[Changed], _Law] | None:
    """Two runs in which all but the last token have scores that are very low, and -inf; None if there is no such token.

    A split's own state tells the two apart, and so does a soft cap, which makes a number of -inf.
    """
    case = place.case
    length = case.seq_lens[place.seq]
    if length < 2 or isinstance(case, SplitDecodeCase) or case.variant.soft_cap is not None:
        return None
    q = place.values.q[place.rows][:, place.heads].double().cpu()  # [rows, heads, head_size]
    against = (torch.sign(q) * math.copysign(1.0, case.scale)).sum((0, 1))
    dim = int(against.abs().argmax())
    sign = float(torch.sign(against[dim]))
    if not sign:
        return None
    low, infinite = (_keys(place, dim, -sign * number) for number in (_LOW, math.inf))
    settled = _settled(place, q, low) & (q[..., dim] * sign * case.scale > 0)
    if not bool(settled.any()):
        return None
    kept = place.everywhere_but(place.rows)
    kept[place.rows, place.heads] = settled
    which = f"token 0 of sequence {place.seq}" if length == 2 else f"tokens 0-{length - 2} of sequence {place.seq}"
    changes = [
        Changed(words, case, replace(place.values, k=k), contents.placement)
        for words, k in (
            (f"with a very low score of {which}, KV head {place.kv_head}", low),
            (f"with a score of -inf of {which}, KV head {place.kv_head}", infinite),
        )
    ]
    why = "a score of -inf has weight 0, as one has whose exp is 0"
    return changes, _Law(0, 1, kept, "score of -inf", "where that score is finite and very low", why)


def _keys(place: _Place, dim: int, number: float) -> Float[Tensor, "total_tokens num_kv_heads head_size"]:
    """All keys, those of all but the last token of the place with `number` in `dim`."""
    k = place.values.k.clone()
    k[place.tokens.start : place.tokens.stop - 1, place.kv_head, dim] = number
    return k


def _settled(
    place: _Place,
    q: Float64[Tensor, "rows group head_size"],
    low: Float[Tensor, "total_tokens num_kv_heads head_size"],
) -> Bool[Tensor, "rows group"]:
    """Rows and heads that see the last token, beside whose score all others have a weight of 0."""
    case, length = place.case, place.case.seq_lens[place.seq]
    k = low[place.tokens, place.kv_head].double().cpu()
    scores = case.scale * (q @ k.T)  # [rows, group, length]
    last, others = scores[..., -1], scores[..., :-1]
    sees_last = torch.tensor([case.row_lens[row] == length for row in place.rows], dtype=torch.bool, device="cpu")
    apart = others.amax(-1) <= last - _GAP
    return sees_last[:, None] & apart & (scores.abs().amax(-1) < _LARGEST)


CONTAINMENT = Relation("containment", _applies, one_by_one(_further), further=_further)
