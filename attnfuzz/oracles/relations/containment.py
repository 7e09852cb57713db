"""Numbers that are not finite stay where they belong.

A cache may hold them: a model overflowed, a page was corrupted, a mask was written into K. What is promised then:

* A score of -inf has weight 0, where a kernel promises it (`Supports.infinite_scores`). So a row gives the same bits
  whether scores are -inf or so low that exp gives 0 for them, as long as it sees another score. All tokens but the last
  of one sequence get such scores here: whole tiles and splits begin with them, where a maximum that is still -inf is
  easily subtracted from itself. Of partial states, that of a split which has no other score becomes an empty one.
* A row of nothing but scores of -inf is an empty row, if a kernel promises rows without keys, too
  (`Supports.empty_sequences`): its output is 0, and its LSE -inf or that of its sink.
* A key with NaN, a score of +inf or NaN, and a value that is not finite leave the rows of the sequences that have them,
  in the heads that read them, without a right result. Every other row and head keeps its bits: what shares a batch, a
  page, a tile or a program with them must not be told of it. Rows of the sequence itself that do not see the token yet
  may show it: 0 x inf is NaN, and so is NaN with a mask of -inf added, as torch's attention masks. Of a page that
  sequences share, one may have reached less than another: what lies behind its end it must not read at all.

An 8-bit cache holds such numbers too, but float8_e4m3fn has NaN alone. Under a soft cap no score is -inf.

Each law compares two runs, or a run with what an empty row gives. None needs a right result for a number that is not
finite, which is why cases hold finite numbers only, and references and error bounds need not know of others.

Of users' problems: `own_containment`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import Contents
from attnfuzz.mistake import WITHOUT_WEIGHT
from attnfuzz.numerics import attention_bound, error_ratio
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations import own_containment
from attnfuzz.oracles.relations.relation import (
    Changed,
    FurtherRuns,
    Relation,
    Results,
    as_it_is,
    one_by_one,
    results_of,
    unequal_bits,
    where_bits_differ,
)
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.trials.trial import Trial
from attnfuzz.values import LogicalAttention
from attnfuzz.verdict import Cause, Failure

_LOW = 2.0**15
"""An element of K that makes a score so low, in magnitude: every dtype has it."""
_LOW_IN_8_BITS = 2.0**12
"""Low score in an 8-bit cache, whose scale, at most 8, leaves it a float16."""
_FINITE = 3.0
_GAP = 256.0
"""Between a score and the largest one of its row: float32's exp gives 0 from 104 on, a 16-bit one earlier."""
_GAP_OF_SPLITS = 200.0
"""Gap between log-sum-exps of splits, of up to 2^24 tokens each."""
_LARGEST = 2.0**24
"""A score beside which no design overflows. Compilers make one instruction of sum x scale - maximum, which rounds once,
while the maximum was rounded before: the exponent is positive by up to 2^-24 of the score, and exp overflows at 88."""

_Masks = Mapping[str, Bool[Tensor, "..."]]


@dataclass(frozen=True, slots=True)
class _Law:
    """The results of run number `after` in every head of each row that `kept` names.

    `before`: what it should give, from the results of the run on the case as it is and of all others; `differing`:
    where it does not, of these two. `finite`: values of which the run must differ as little, with a number in place of
    the one that is not finite.
    """

    before: Callable[[Results, Sequence[Results]], Results]
    after: int
    kept: Bool[Tensor, "num_rows num_q_heads"]
    kind: str
    as_it_was: str
    why: str
    differing: Callable[[Results, Results], _Masks] = where_bits_differ
    rule: str = "the bits must be equal"
    finite: LogicalAttention | None = None


@dataclass(frozen=True, slots=True)
class _SpoiledToken:
    """A token of one sequence and KV head, and the rows and query heads that read it, or others of its sequence."""

    case: AttentionCase
    values: LogicalAttention
    seq: int
    position: int
    kv_head: int

    @classmethod
    def of(cls, case: AttentionCase, values: LogicalAttention) -> _SpoiledToken:
        """The last token of the longest sequence, or one on a shared page of which another sequence has reached less.

        That other one has the page in its row of the block table.
        """
        seq = max(dict.fromkeys(case.row_seqs), key=lambda seq: case.seq_lens[seq])
        length = case.seq_lens[seq]
        ends = [
            case.seq_lens[other] for other in case.row_seqs if case.seq_lens[other] < min(case.shared_tokens, length)
        ]
        within_a_page = [end for end in ends if case.page_size and end % case.page_size]
        return cls(case, values, seq, (*within_a_page, length - 1)[0], case.num_kv_heads - 1)

    @property
    def length(self) -> int:
        return self.case.seq_lens[self.seq]

    @property
    def rows(self) -> list[int]:
        return [row for row, seq in enumerate(self.case.row_seqs) if seq == self.seq]

    @property
    def heads(self) -> slice:
        return slice(self.kv_head * self.case.gqa_ratio, (self.kv_head + 1) * self.case.gqa_ratio)

    @property
    def where(self) -> str:
        return f"sequence {self.seq}, KV head {self.kv_head}"

    def readers(self, first: int) -> list[int]:
        """The rows of all sequences that have tokens of this one from position `first` on."""
        return [row for row, seq in enumerate(self.case.row_seqs) if self._held(seq) > first]

    def everywhere_but(self, rows: Iterable[int]) -> Bool[Tensor, "num_rows num_q_heads"]:
        """All rows and heads but those that read this KV head in `rows`."""
        kept = torch.ones(self.case.num_rows, self.case.num_q_heads, dtype=torch.bool, device="cpu")
        kept[list(rows), self.heads] = False
        return kept

    def with_number(self, name: str, number: float, positions: range, dims: slice = slice(None)) -> LogicalAttention:
        """The values with `number` in K or V at these positions, in every sequence that has them."""
        tensor: Tensor = (self.values.k if name == "K" else self.values.v).clone()
        for seq, start in enumerate(self.values.starts[:-1]):
            tokens = slice(start + positions.start, start + min(positions.stop, self._held(seq)))
            tensor[tokens, self.kv_head, dims] = number
        return replace(self.values, k=tensor) if name == "K" else replace(self.values, v=tensor)

    def _held(self, seq: int) -> int:
        """How many of the first tokens of its sequence are those of sequence `seq`, too."""
        return self.length if seq == self.seq else min(self.case.seq_lens[seq], self.length, self.case.shared_tokens)


def _applies(declaration: Declaration, case: Any) -> bool:
    if isinstance(case, OpenCase):
        is_torchs_own = any(one.dtype == "bfloat16" for one in tensor_specs(case).values()) and _products_leak()
        return declaration.supports.deterministic and not is_torchs_own and own_containment.applies(case)
    return declaration.supports.deterministic and any(case.seq_lens[seq] for seq in case.row_seqs)


def _further(declaration: Declaration, case: Any, contents: Contents) -> FurtherRuns | None:
    if isinstance(case, OpenCase):
        return own_containment.further(case, contents)
    place = _SpoiledToken.of(case, contents.values)
    runs, laws = list[Changed](), list[_Law]()

    def run(words: str, values: LogicalAttention) -> int:
        runs.append(Changed(words, case, values, contents.placement))
        return len(runs) - 1

    if declaration.supports.infinite_scores:
        laws += _of_infinite_scores(declaration, place, run)
    is_torchs_own = case.dtype == "bfloat16" and contents.values.k.device.type == "cpu" and _products_leak()
    for name, number in _numbers(case):
        if name == "K" and is_torchs_own:
            continue
        kept = place.everywhere_but(place.readers(place.position))
        if bool(kept.any()):
            at = range(place.position, place.position + 1)
            words = f"with {number} in {name} at token {place.position} of {place.where}"
            after = run(words, place.with_number(name, number, at))
            reader = (
                "a sequence that has this token" if place.position < case.shared_tokens else f"sequence {place.seq}"
            )
            why = f"only rows that read KV head {place.kv_head} of {reader} may show it"
            finite = place.with_number(name, _FINITE, at) if name == "V" else None
            laws.append(_Law(lambda one, _: one, after, kept, f"{number} in {name}", "originally", why, finite=finite))
    if not runs:
        return None

    objecting: list[_Law] = []

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        for law in laws:
            if (found := _objection(case, law, runs, one, others)) is not None:
                objecting.append(law)
                return found
        return None

    def refine(trial: Trial, failure: Failure) -> Failure:
        """Name the leak where NaN leaks with a weight of 0: a number in its place makes no difference then."""
        (law,) = objecting
        if law.finite is None:
            return failure
        after = results_of(trial, runs[law.after])
        leaks = where_bits_differ(as_it_is(trial), after)
        if any(bool((mask & _over(mask, law.kept) & ~after[name].isnan()).any()) for name, mask in leaks.items()):
            return failure  # not all that leaks shows as NaN
        plain = Changed("with a number there", case, law.finite, contents.placement)
        masks = where_bits_differ(as_it_is(trial), results_of(trial, plain))
        if any(bool((mask & _over(mask, law.kept)).any()) for mask in masks.values()):
            return failure
        words = "with a finite number there it is right, as where it has a weight of 0: 0 x inf and 0 x NaN are NaN"
        cause = Cause(mistake=WITHOUT_WEIGHT, words=words)
        return msgspec.structs.replace(failure, message=f"{failure.message}; {words}", causes=(cause,))

    return FurtherRuns(runs, compare, refine=refine)


@functools.cache
def _products_leak() -> bool:
    """Whether torch's own product of bfloat16 matrices gives NaN in a row beside one that holds NaN.

    With tiles of bfloat16 (AMX) numbers are multiplied in pairs: where the inner size is odd, the last of
    a row goes with the first of the next row, times 0. Seen with torch 2.11 and 2.13; in which shapes goes by the
    processor and by torch.
    """
    for rows, inner in itertools.product((2, 3, 5, 9, 17, 33), range(3, 130, 2)):
        left = torch.ones(rows, inner, dtype=torch.bfloat16, device="cpu")
        left[-1] = math.nan
        if bool((left @ torch.ones(inner, 16, dtype=torch.bfloat16, device="cpu"))[:-1].isnan().any()):
            return True
    return False


def _numbers(case: AttentionCase) -> tuple[tuple[str, float], tuple[str, float]]:
    """The numbers for K and V: NaN, infinity, or the other way round."""
    if case.kv is not None and case.kv.dtype == "float8_e4m3fn":
        return ("K", math.nan), ("V", math.nan)
    one, other = (math.nan, math.inf) if case.values.seed % 2 == 0 else (math.inf, math.nan)
    return ("K", one), ("V", other)


def _objection(
    case: AttentionCase, law: _Law, runs: Sequence[Changed], one: Results, others: Sequence[Results]
) -> Failure | None:
    before, after = law.before(one, others), others[law.after]
    masks = {name: mask & _over(mask, law.kept) for name, mask in law.differing(before, after).items()}
    words = runs[law.after].words
    found = unequal_bits(
        registry.CONTAINMENT,
        case,
        before,
        after,
        words,
        masks=masks,
        as_it_was=law.as_it_was,
        details=(law.why,),
        rule=law.rule,
    )
    return None if found is None else msgspec.structs.replace(found, kind=law.kind)


def _over(result: Tensor, kept: Bool[Tensor, "num_rows num_q_heads"]) -> Tensor:
    """`kept` along the axes of a result, whose rows may be followed by padding tokens, of which nothing is asked."""
    padded = torch.nn.functional.pad(kept, (0, 0, 0, len(result) - len(kept)))
    return padded.reshape(*padded.shape, *(1,) * (result.dim() - 2))


def _of_infinite_scores(
    declaration: Declaration, place: _SpoiledToken, run: Callable[[str, LogicalAttention], int]
) -> list[_Law]:
    """The laws of scores of -inf, and their runs: with one element of keys so low, or infinite, that it decides.

    A soft cap makes a number of -inf, and float8_e4m3fn has none.
    """
    case, kv = place.case, place.case.kv
    if case.variant.soft_cap is not None or (kv is not None and kv.dtype == "float8_e4m3fn"):
        return []
    q = place.values.q[place.rows][:, place.heads].double().cpu()  # [rows, heads, head_size]
    against = (torch.sign(q) * math.copysign(1.0, case.scale)).sum((0, 1))
    if case.values_in_keys:
        against[: case.value_size] = 0.0  # 0 times an infinite value is NaN
    dim = int(against.abs().argmax())
    sign = float(torch.sign(against[dim]))
    if not sign:
        return []
    is_low = q[..., dim] * sign * case.scale > 0
    dims, others = slice(dim, dim + 1), range(place.length - 1)
    infinite = -sign * math.inf
    low = place.with_number("K", -sign * (_LOW if kv is None else _LOW_IN_8_BITS), others, dims)
    settled = _settled(place, q, low) & is_low if others else torch.zeros_like(is_low)
    laws = []
    if bool(settled.any()):
        kept = place.everywhere_but(place.readers(0))
        kept[place.rows, place.heads] = settled
        which = f"{_tokens(others)} of {place.where}"
        before = run(f"with a very low score of {which}", low)
        after = run(f"with a score of -inf of {which}", place.with_number("K", infinite, others, dims))
        laws.append(
            _Law(
                lambda one, others: others[before],
                after,
                kept,
                "score of -inf",
                "where that score is finite and very low",
                "a score of -inf has weight 0, as one has whose exp is 0",
                _differing_states if case.partial_states else where_bits_differ,
            )
        )
    if declaration.supports.empty_sequences:
        every = range(place.length)
        kept = torch.zeros(case.num_rows, case.num_q_heads, dtype=torch.bool, device="cpu")
        kept[place.rows, place.heads] = is_low
        values = place.with_number("K", infinite, every, dims)
        laws.append(
            _of_empty_rows(
                declaration, place, kept, run(f"with a score of -inf of {_tokens(every)} of {place.where}", values)
            )
        )
    return laws


def _tokens(positions: range) -> str:
    return f"token {positions[0]}" if len(positions) == 1 else f"tokens {positions[0]}-{positions[-1]}"


def _settled(
    place: _SpoiledToken, q: Float64[Tensor, "rows group head_size"], low: LogicalAttention
) -> Bool[Tensor, "rows group"]:
    """Rows and heads that see the last token, beside whose score all others, `low` ones, have a weight of 0."""
    case = place.case
    start = low.starts[place.seq]
    k = low.dequantised().k[start : start + place.length, place.kv_head].double().cpu()
    scores = case.scale * (q @ k.T)  # [rows, group, length]
    last, others = scores[..., -1], scores[..., :-1]
    sees_last = torch.tensor([case.row_lens[row] == place.length for row in place.rows], dtype=torch.bool, device="cpu")
    apart = others.amax(-1) <= last - _GAP
    return sees_last[:, None] & apart & (scores.abs().amax(-1) < _LARGEST)


def _differing_states(before: Results, after: Results) -> _Masks:
    """Where partial states differ, but for those of splits that have become empty, and had next to no weight."""
    masks = where_bits_differ(before, after)
    if "partial_lse" not in before:  # a kernel without an LSE has no states to be told apart
        return masks
    lse = before["partial_lse"]
    emptied = after["partial_lse"].isneginf() & (lse <= lse.amax(-1, keepdim=True) - _GAP_OF_SPLITS)
    return {name: mask & ~emptied.reshape(*emptied.shape, *(1,) * (mask.dim() - 3)) for name, mask in masks.items()}


def _of_empty_rows(
    declaration: Declaration, place: _SpoiledToken, kept: Bool[Tensor, "num_rows num_q_heads"], after: int
) -> _Law:
    """The right results of a row in which no key has a weight; beside an empty partial LSE, anything."""
    lse, bound = _lse_of_empty_rows(declaration, place)
    if place.case.partial_states:
        lse, bound = lse[:, None], bound[:, None]

    def expected(one: Results, others: Sequence[Results]) -> Results:
        return {
            name: (lse if "lse" in name else torch.zeros((), dtype=torch.float64, device="cpu")).expand_as(part)
            for name, part in others[after].items()
        }

    def differing(before: Results, after: Results) -> _Masks:
        found = {}
        for name, part in after.items():
            if "lse" in name:
                found[name] = error_ratio(part, before[name], bound.expand_as(part)) > 1
            elif name != "partial_out":
                found[name] = part != 0
        return found

    return _Law(
        expected,
        after,
        kept,
        "only scores of -inf",
        "in a row without keys",
        "a row that has no score but -inf is an empty one",
        differing,
        "the row is an empty one",
    )


def _lse_of_empty_rows(
    declaration: Declaration, place: _SpoiledToken
) -> tuple[Float64[Tensor, " num_q_heads"], Float64[Tensor, " num_q_heads"]]:
    """The log-sum-exp of each head's sink, or -inf, as the kernel returns it, and how far it may be off."""
    case = place.case
    numbers = {
        name: torch.tensor(of_heads, dtype=torch.float64, device="cpu")
        for name, of_heads in case.variant.per_head_numbers(case.num_q_heads, case.values.seed).items()
    }
    size = max(case.head_size, case.value_size)
    zeros = torch.zeros(case.num_q_heads, case.num_kv_heads, size, dtype=torch.float64, device="cpu")
    dtype = getattr(torch, case.dtype)
    bound = attention_bound(
        zeros[:, 0, : case.head_size],
        zeros[:0, :, : case.head_size],
        zeros[:0, :, : case.value_size],
        case.scale,
        in_dtype=dtype,
        out_dtype=dtype,
        numerics=declaration.numerics,
        alibi_slopes=numbers.get("alibi_slopes"),
        sinks=numbers.get("sinks"),
        reach=place.length - 1,
    )
    unit = math.log2(math.e) if declaration.supports.lse == "base2" else 1.0
    return unit * numbers.get("sinks", torch.full_like(bound.lse, -math.inf)), unit * bound.lse


CONTAINMENT = Relation(
    registry.CONTAINMENT,
    _applies,
    one_by_one(_further),
    weight=lambda _, case: 3 if isinstance(case, OpenCase) else 1,  # to which little else applies
    further=_further,
    cases=AttentionCase,
    of_any_problem=True,
)
