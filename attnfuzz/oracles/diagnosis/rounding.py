"""Scores that were rounded on the way: q and k multiplied, summed or scaled in 16 bits, or in TF32.

Such a kernel is wrong everywhere by a little, so a mistake counts as found only if it gives all wrong rows of a case.
In which order a kernel sums cannot be known: where sums are rounded too, several orders are replayed, and the result
must lie among what they give, infinities and NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.oracles.diagnosis.row import AttentionRow
from attnfuzz.oracles.diagnosis.suspect import Diagnosis
from attnfuzz.problems.reference import row_weights

__all__ = ["MOST_ROWS", "explain_rounding"]

MOST_ROWS = 8
"""Wrong rows that are replayed: each takes some milliseconds."""
_MOST_PRODUCTS = 1 << 18
_MOST_TOLD = 2
"""Mistakes that are told where a case cannot tell them apart."""
_CHUNKS = (2, 4, 8)
"""How many neighbouring products a thread may add up before threads exchange their sums."""
_TF32_BITS = 10

_BOUNDS = 2.0
_UNEXPLAINED = 0.25
"""Part of the error that one replay may leave open: other roundings act on the same scores."""
_BESIDE = 0.5
"""By how much of their spread a result may lie beside those of several orders."""

Scores = Float64[Tensor, " num_tokens"]
Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Mistake:
    """The results that a mistake may have, one for each way in which it may have been made."""

    cause: str
    words: str
    out: Float64[Tensor, "ways v_head_size"]
    lse: Float64[Tensor, " ways"]


def explain_rounding(rows: Sequence[AttentionRow], *, truncates: bool) -> Diagnosis | None:
    """The rounding of scores that gives all ``rows``, which are those that are wrong; None if there is no such.

    ``truncates``: conversions to bfloat16 drop bits, as in Triton's interpreter.
    """
    small = [row for row in rows if row.num_tokens * row.case.head_size <= _MOST_PRODUCTS][:MOST_ROWS]
    found = [
        of_each_row[0]
        for of_each_row in zip(*(_mistakes(row, truncates=truncates) for row in small), strict=True)
        if all(_gives(row, mistake) for row, mistake in zip(small, of_each_row, strict=True))
    ]
    if not found:
        return None
    words = ", or ".join(mistake.words for mistake in found[:_MOST_TOLD])
    if small[0].case.dtype == "float16" and any(not bool(row.got.isfinite().all()) for row in small):
        words += f" (float16 ends at {torch.finfo(torch.float16).max:.0f})"
    return Diagnosis(words, found[0].cause)


def _mistakes(row: AttentionRow, *, truncates: bool) -> Iterator[_Mistake]:
    """The simplest first. The same number for every row of a case."""
    if row.case.dtype == "float32":
        yield _in_tf32(row)
        return
    name = row.case.dtype
    dtype = getattr(torch, name)
    roundings: list[Round] = [lambda x: x.to(dtype).double()]
    if truncates and dtype == torch.bfloat16:
        roundings.append(_truncated)
    q, k, scale = row.q, row.k, row.case.scale
    yield _of_scores(
        row,
        "scores_rounded",
        f"the products of q and k are rounded to {name} before they are summed",
        [scale * rounded(q * k).sum(-1) for rounded in roundings],
    )
    yield _of_scores(
        row,
        "scores_rounded",
        f"q x scale is rounded to {name} before it meets k",
        [k @ rounded(scale * q) for rounded in roundings],
    )
    yield _of_scores(
        row,
        "scores_rounded",
        f"q x scale x log2(e) is rounded to {name} before it meets k",
        [k @ rounded(scale * math.log2(math.e) * q) / math.log2(math.e) for rounded in roundings],
    )
    yield _of_scores(
        row,
        "scores_rounded",
        f"the scores are rounded to {name}",
        [end for rounded in roundings for end in _scaled(rounded(k @ q), scale, rounded)],
    )
    yield _of_scores(
        row,
        "scores_rounded",
        f"the products of q and k are rounded to {name}, and so are their sums",
        [end for rounded in roundings for total in _sums(q * k, rounded) for end in _scaled(total, scale, rounded)],
    )


def _scaled(dots: Scores, scale: float, rounded: Round) -> tuple[Scores, ...]:
    """Times the scale: in more bits, in as many, and with a scale of as many (Triton makes a tensor's type of it)."""
    of_its_type = float(rounded(torch.tensor(scale, dtype=torch.float64, device="cpu")))
    return scale * dots, rounded(scale * dots), rounded(of_its_type * dots)


def _sums(products: Float64[Tensor, "num_tokens head_size"], rounded: Round) -> Iterator[Scores]:
    """Of rounded products, rounded at the end or after each addition, in orders in which kernels add."""
    exact = torch.nn.functional.pad(products, (0, (1 << (products.shape[1] - 1).bit_length()) - products.shape[1]))
    terms = rounded(exact)
    yield rounded(terms.sum(-1))
    yield _in_order(terms, rounded)[:, 0]
    neighbours = terms
    while neighbours.shape[1] > 1:
        neighbours = rounded(neighbours[:, ::2] + neighbours[:, 1::2])
    yield neighbours[:, 0]
    yield _in_halves(terms, rounded)
    for chunk in _CHUNKS:
        if chunk < terms.shape[1]:
            yield _in_halves(_in_order(terms.reshape(len(terms), -1, chunk), rounded)[..., 0], rounded)
            yield _in_halves(_fused(exact.reshape(len(exact), -1, chunk), rounded), rounded)


def _in_order(terms: Tensor, rounded: Round) -> Tensor:
    total = terms[..., :1]
    for i in range(1, terms.shape[-1]):
        total = rounded(total + terms[..., i : i + 1])
    return total


def _fused(exact: Tensor, rounded: Round) -> Tensor:
    """Each product added before it is rounded, as `fma` does; but for the first."""
    total = rounded(exact[..., 0])
    for i in range(1, exact.shape[-1]):
        total = rounded(total + exact[..., i])
    return total


def _in_halves(terms: Tensor, rounded: Round) -> Scores:
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = rounded(terms[:, :half] + terms[:, half:])
    return terms[:, 0]


def _truncated(x: Tensor) -> Tensor:
    bits = x.float().view(torch.int32)
    kept = torch.where(x.float().isfinite(), bits & -(1 << 16), bits)
    return kept.view(torch.float32).double()


def _of_scores(row: AttentionRow, cause: str, words: str, ways: list[Scores]) -> _Mistake:
    found = [row_weights(row.case, row.head, scores) for scores in ways]
    return _Mistake(
        cause, words, torch.stack([weights @ row.v for weights, _ in found]), torch.stack([lse for _, lse in found])
    )


def _in_tf32(row: AttentionRow) -> _Mistake:
    """Both products with operands of 10 bits behind the point, rounded to nearest or cut off."""
    outs, lses = [], []
    for nearest in (True, False):
        q, k, v = (_to_tf32(part, nearest=nearest) for part in (row.q, row.k, row.v))
        weights, lse = row_weights(row.case, row.head, row.case.scale * (k @ q))
        largest = weights.max()
        outs.append(_to_tf32(weights / largest, nearest=nearest) @ v * largest)
        lses.append(lse)
    words = "the matrix products are computed in TF32 (for `tl.dot`, input_precision='ieee' is exact)"
    return _Mistake("tf32", words, torch.stack(outs), torch.stack(lses))


def _to_tf32(x: Tensor, *, nearest: bool) -> Tensor:
    mantissa, exponent = x.frexp()
    steps = mantissa * 2.0 ** (_TF32_BITS + 1)
    return torch.ldexp((steps.round() if nearest else steps.trunc()) / 2.0 ** (_TF32_BITS + 1), exponent)


def _gives(row: AttentionRow, mistake: _Mistake) -> bool:
    """Whether the row is what one of the ways gives, or lies among all of them."""
    found = [(row.got, row.expected, row.bound, mistake.out)]
    if row.got_lse is not None:
        numbers = (
            torch.tensor([number], dtype=torch.float64, device="cpu")
            for number in (row.got_lse, row.lse, row.lse_bound)
        )
        got, expected, bound = numbers
        found.append((got, expected, bound, mistake.lse[:, None]))
    joined = [torch.cat(parts, -1) for parts in zip(*found, strict=True)]
    return _is_among(*joined)


def _is_among(
    got: Float64[Tensor, " n"], expected: Float64[Tensor, " n"], bound: Float64[Tensor, " n"], ways: Tensor
) -> bool:
    if not bool(got.isfinite().all()):
        not_finite = ~ways.isfinite().all(-1)
        return bool((~ways[not_finite].isfinite() & ~got.isfinite()).any())
    ways = ways[ways.isfinite().all(-1)]
    if not len(ways):
        return False
    slack = _BOUNDS * bound
    low, high = ways.amin(0), ways.amax(0)
    beside = slack + _BESIDE * (high - low)
    if not bool(((low - beside <= got) & (got <= high + beside)).all()):
        return False
    worst = int(((got - expected).abs() / bound.clamp(min=torch.finfo(torch.float64).tiny)).argmax())
    error = float((got - expected)[worst].abs())
    missed = float((ways[:, worst] - got[worst]).abs().min())
    reach = float((ways[:, worst] - expected[worst]).abs().max())
    return missed <= _UNEXPLAINED * error or (len(ways) > 2 and reach >= error * (1 - _BESIDE))
