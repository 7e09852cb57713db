"""Scores and weights that were rounded on the way: q and k multiplied, summed or scaled in 16 bits, or in TF32; exp.

Such a kernel is wrong everywhere by a little, so a mistake counts as found only if it gives all wrong rows of a case.
In which order a kernel sums cannot be known, and on a GPU several threads may each have a copy of a score, summed in an
order of its own: where sums are rounded too, several orders are replayed, and the result must lie among what they give.
A score that overflows makes whatever the kernel makes of infinities: NaN, for one, where it is alone in a split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from attnfuzz.oracles.diagnosis.row import AttentionRow
from attnfuzz.oracles.diagnosis.suspect import Diagnosis
from attnfuzz.problems.reference import row_log_weights, row_weights

__all__ = ["MOST_ROWS", "Rounding"]

MOST_ROWS = 8
"""Wrong rows that are replayed: each takes some milliseconds."""
_MOST_PRODUCTS = 1 << 17
"""Of a row: the tokens that weigh most are replayed."""
_MOST_TOLD = 2
"""Mistakes that are told where a case cannot tell them apart."""
_CHUNKS = (2, 4, 8)
"""How many neighbouring products a thread may add up before threads exchange their sums."""
_TF32_BITS = 10
_CUBIC_EXP2 = (0.077119089663028717, 0.227564394474029541, 0.695146143436431885, 1.0)

_BOUNDS = 2.0
_UNEXPLAINED = 0.25
"""Part of the error that one replay may leave open: other roundings act on the same scores."""
_FEW_WAYS = 4
_MOST_EXACT_WAYS = 12
_BESIDE = 0.5
"""By how much of their spread a result may lie beside those of several orders."""
_ROUNDINGS = 12
"""One after the other: eight in a thread, and as its sum meets those of others."""
_LARGEST_EXPONENT = 700.0

Scores = Float64[Tensor, " num_tokens"]
Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Mistake:
    """The results that a mistake may have, one for each way in which it may have been made.

    ``overflows``: a score is not finite in one of the ways. ``numerics``: what declares it, of a design's own rounding.
    """

    cause: str
    words: str
    out: Float64[Tensor, "ways v_head_size"]
    lse: Float64[Tensor, " ways"]
    overflows: bool
    numerics: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rounding:
    """What rounded scores have to do with the wrong ``rows`` of a case.

    ``interpreted``: by Triton's interpreter, where conversions to bfloat16 drop bits, and a score has no copies.
    """

    rows: Sequence[AttentionRow]
    interpreted: bool

    def exactly(self) -> Diagnosis | None:
        """The rounding that gives each wrong row, to within its error bound.

        Of a rounding that has many ways, one gives this or that number by chance.
        """
        return self._told(_is_exact)

    def nearly(self) -> Diagnosis | None:
        """The rounding among whose results, as several orders of summing give them, each wrong row lies."""
        return self._told(_is_near)

    def perhaps(self) -> Diagnosis | None:
        """Rounded scores, if they may give errors of such a size, in whatever order and with whatever copies."""
        if self.rows and self.rows[0].case.dtype != "float32" and all(map(_is_of_its_size, self.rows)):
            return Diagnosis("", "scores_rounded")
        return None

    def _told(self, fits: Callable[[AttentionRow, _Mistake], bool]) -> Diagnosis | None:
        found = [mistakes[0] for mistakes in self._replayed if all(map(fits, self.rows, mistakes))]
        if not found:
            return None
        words = ", or ".join(mistake.words for mistake in found[:_MOST_TOLD])
        if self.rows[0].case.dtype == "float16" and any(not bool(row.got.isfinite().all()) for row in self.rows):
            words += f" (float16 ends at {torch.finfo(torch.float16).max:.0f})"
        same = all(mistake.numerics == found[0].numerics for mistake in found)
        return Diagnosis(words, found[0].cause, numerics=found[0].numerics if same else {})

    @cached_property
    def _replayed(self) -> list[tuple[_Mistake, ...]]:
        return list(zip(*(_mistakes(row, interpreted=self.interpreted) for row in self.rows), strict=True))


def _mistakes(row: AttentionRow, *, interpreted: bool) -> Iterator[_Mistake]:
    """The simplest first. The same number for every row of a case."""
    if row.case.dtype == "float32":
        yield _in_tf32(row)
        return
    name = row.case.dtype
    dtype = getattr(torch, name)
    roundings: list[Round] = [lambda x: x.to(dtype).double()]
    if interpreted and dtype == torch.bfloat16:
        roundings.append(_truncated)
    scale = row.case.scale
    heaviest = row.weights.topk(min(row.num_tokens, max(1, _MOST_PRODUCTS // row.case.head_size))).indices
    q, k = row.q, row.k[heaviest]
    yield _of_scores(
        row,
        heaviest,
        "scores_rounded",
        f"the products of q and k are rounded to {name} before they are summed",
        [scale * rounded(q * k).sum(-1) for rounded in roundings],
    )
    yield _of_scores(
        row,
        heaviest,
        "scores_rounded",
        f"q x scale is rounded to {name} before it is multiplied with k",
        [k @ rounded(scale * q) for rounded in roundings],
        numerics={"query": "scaled"},
    )
    yield _of_scores(
        row,
        heaviest,
        "scores_rounded",
        f"q x scale x log2(e) is rounded to {name} before it is multiplied with k",
        [k @ rounded(scale * math.log2(math.e) * q) / math.log2(math.e) for rounded in roundings],
        numerics={"query": "scaled"},
    )
    root = math.sqrt(abs(scale))
    yield _of_scores(
        row,
        heaviest,
        "scores_rounded",
        f"q and k times the scale's root are rounded to {name} before they are multiplied",
        [math.copysign(1.0, scale) * (rounded(root * k) @ rounded(root * q)) for rounded in roundings],
        numerics={"query": "scaled_both"},
    )
    yield _of_scores(
        row,
        heaviest,
        "scores_rounded",
        f"the scores are rounded to {name}",
        [end for cut in roundings for end in (*_scaled(cut(k @ q), scale, cut), *_scaled(k @ q, scale, cut)[1:])],
    )
    yield _of_scores(
        row,
        heaviest,
        "scores_rounded",
        f"the products of q and k are rounded to {name}, and so are their sums",
        [end for rounded in roundings for total in _sums(q * k, rounded) for end in _scaled(total, scale, rounded)],
        copies=not interpreted,
    )
    yield _of_weights(
        row,
        "exponential_rounded",
        "exp2 is a polynomial of degree 3",
        _cubic_exp,
        numerics={"exponential": "cubic"},
    )
    yield _of_weights(
        row,
        "exponential_rounded",
        f"exp2 is taken of numbers in {name}",
        lambda x: roundings[0](torch.exp2(roundings[0](x * math.log2(math.e)))),
        numerics={"exponential": "input"},
    )
    yield _of_weights(
        row,
        "weights_rounded",
        "weights are rounded to float8_e4m3fn before they are multiplied with V",
        torch.exp,
        of_v=_to_e4m3,
        numerics={"probabilities": "float8_e4m3fn"},
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
    half = terms.shape[1] // 2
    for one, other in ((terms, terms), (exact, terms), (terms, exact)):  # with `fma`, the product of one is not rounded
        yield _of_neighbours(rounded(one[:, ::2] + other[:, 1::2]) if half else terms, rounded)
        yield _in_halves(rounded(one[:, :half] + other[:, half:]) if half else terms, rounded)
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


def _of_neighbours(terms: Tensor, rounded: Round) -> Scores:
    while terms.shape[1] > 1:
        terms = rounded(terms[:, ::2] + terms[:, 1::2])
    return terms[:, 0]


def _in_halves(terms: Tensor, rounded: Round) -> Scores:
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = rounded(terms[:, :half] + terms[:, half:])
    return terms[:, 0]


def _truncated(x: Tensor) -> Tensor:
    bits = x.float().view(torch.int32)
    kept = torch.where(x.float().isfinite(), bits & -(1 << 16), bits)
    return kept.view(torch.float32).double()


def _of_scores(
    row: AttentionRow,
    tokens: Int64[Tensor, " replayed"],
    cause: str,
    words: str,
    ways: list[Float64[Tensor, " replayed"]],
    *,
    copies: bool = False,
    numerics: Mapping[str, str] = MappingProxyType({}),
) -> _Mistake:
    """Of scores of some ``tokens``, while the others have theirs.

    ``copies``: the weights of the sum of values may come of another way than those of the sum that divides it.
    """
    overflows = not all(bool(scores.isfinite().all()) for scores in ways)
    found = [row_weights(row.case, row.head, row.scores.index_copy(0, tokens, scores)) for scores in ways]
    weights, lse = torch.stack([weights for weights, _ in found]), torch.stack([lse for _, lse in found])
    out = weights @ row.v
    if copies:
        numerators = (weights * (lse - row.lse).exp()[:, None]) @ row.v
        out = torch.cat([out, *(numerators / (end - row.lse).exp() for end in (lse.amin(), lse.amax()))])
    return _Mistake(cause, words, out, lse, overflows, numerics)


def _of_weights(
    row: AttentionRow, cause: str, words: str, exp: Round, *, of_v: Round = torch.clone, numerics: Mapping[str, str]
) -> _Mistake:
    """Of another ``exp``, and of weights that are rounded ``of_v`` before they multiply V, though not to be summed.

    As in a single tile: where the maximum rises on the way, roundings differ a little.
    """
    scores, lse = row_log_weights(row.case, row.head, row.scores)
    top = scores.max()
    weights = exp(scores - top).masked_fill(scores == -torch.inf, 0.0)
    sink = ((lse - top).exp() - (scores - top).exp().sum()).clamp(min=0.0)
    total = weights.sum() + sink
    out = (of_v(weights) @ row.v) / total
    return _Mistake(cause, words, out[None], (top + total.log())[None], overflows=False, numerics=numerics)


def _cubic_exp(x: Tensor) -> Tensor:
    """exp2 on the fraction by the polynomial of FlashAttention 4, which minimises the relative error."""
    whole = (x * math.log2(math.e)).clamp(min=-1000.0).floor()
    fraction = (x * math.log2(math.e)).clamp(min=-1000.0) - whole
    polynomial = torch.zeros_like(fraction)
    for coefficient in _CUBIC_EXP2:
        polynomial = polynomial * fraction + coefficient
    return torch.ldexp(polynomial, whole)


def _to_e4m3(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e4m3fn).double()


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
    declared = {"matmul": "tf32"}
    return _Mistake("tf32", words, torch.stack(outs), torch.stack(lses), overflows=False, numerics=declared)


def _to_tf32(x: Tensor, *, nearest: bool) -> Tensor:
    mantissa, exponent = x.frexp()
    steps = mantissa * 2.0 ** (_TF32_BITS + 1)
    return torch.ldexp((steps.round() if nearest else steps.trunc()) / 2.0 ** (_TF32_BITS + 1), exponent)


def _is_exact(row: AttentionRow, mistake: _Mistake) -> bool:
    """Whether one of the ways gives the row, and explains its error: at its worst, and in all of its elements.

    Of a small error, the worst element alone comes out by chance.
    """
    if not _is_finite(row):
        return False
    got, expected, bound, ways = _numbers(row, mistake)
    if len(ways) > _MOST_EXACT_WAYS:
        return False
    missed = (ways - got).abs().nan_to_num(torch.inf)
    worst = _worst(got, expected, bound)
    is_right = (missed <= _BOUNDS * bound).all(-1) & (missed[:, worst] <= _UNEXPLAINED * (got - expected)[worst].abs())
    slack = bound.clamp(min=torch.finfo(torch.float64).tiny)
    left, error = (missed / slack).square().sum(-1), ((got - expected) / slack).square().sum()
    return bool((is_right & (left <= _UNEXPLAINED * error)).any())


def _is_near(row: AttentionRow, mistake: _Mistake) -> bool:
    """Whether the row lies among what the ways give, or not far beside, where they err as much as it does.

    A score that overflows may have been made anything of.
    """
    if not _is_finite(row):
        return mistake.overflows
    got, expected, bound, ways = _numbers(row, mistake)
    worst = _worst(got, expected, bound)
    reach = (ways[:, worst] - expected[worst]).abs().nan_to_num(0.0, posinf=0.0).max()
    return _is_among(row, mistake) and bool(reach >= (1 - _BESIDE) * (got - expected)[worst].abs())


def _is_of_its_size(row: AttentionRow) -> bool:
    """Whether the row is no further off than scores may make it that were rounded wherever they can be.

    Products, sums and the scaled score are rounded, so score s_i errs by up to d_i = n u |scale| sum |q_d k_d| for n
    roundings one after the other. Its weight in the sum of values and in the sum that divides it may come of different
    copies, so that it is between exp(s_i - d_i) / sum exp(s + d) and exp(s_i + d_i) / sum exp(s - d).
    """
    dtype = getattr(torch, row.case.dtype)
    products = (row.k.abs() @ row.q.abs()).clamp(min=torch.finfo(torch.float64).tiny)
    if not _is_finite(row):
        return bool(products.max() > torch.finfo(dtype).max)
    errors = _ROUNDINGS * torch.finfo(dtype).eps * abs(row.case.scale) * products
    low, bottom = row_log_weights(row.case, row.head, row.scores - errors)
    high, top = row_log_weights(row.case, row.head, row.scores + errors)
    weights, _ = row_weights(row.case, row.head, row.scores)
    largest, smallest = (high - bottom).clamp(max=_LARGEST_EXPONENT).exp(), (low - top).exp()
    slack = torch.maximum(largest - weights, weights - smallest) @ row.v.abs()
    is_out = bool(((row.got - row.expected).abs() <= slack + _BOUNDS * row.bound).all())
    if row.got_lse is None:
        return is_out
    slack_of_lse = _BOUNDS * row.lse_bound
    return is_out and bool(bottom - slack_of_lse <= row.got_lse <= top + slack_of_lse)


def _is_among(row: AttentionRow, mistake: _Mistake) -> bool:
    """Whether the row lies among what the ways give, which are many, or not far beside."""
    got, _, bound, ways = _numbers(row, mistake)
    ways = ways[ways.isfinite().all(-1)]
    if len(ways) <= _FEW_WAYS:
        return False
    low, high = ways.amin(0), ways.amax(0)
    slack = _BOUNDS * bound + _BESIDE * (high - low)
    return bool(((low - slack <= got) & (got <= high + slack)).all())


def _is_finite(row: AttentionRow) -> bool:
    return bool(row.got.isfinite().all()) and (row.got_lse is None or math.isfinite(row.got_lse))


def _numbers(row: AttentionRow, mistake: _Mistake) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and LSE, if there is one, in one row: what came out, what should have, its bound, and what the ways give.

    Of the output there may be several ways for each of the LSE.
    """
    if row.got_lse is None:
        return row.got, row.expected, row.bound, mistake.out
    lse = torch.tensor([[row.got_lse], [row.lse], [row.lse_bound]], dtype=torch.float64, device="cpu")
    got, expected, bound = (torch.cat(pair) for pair in zip((row.got, row.expected, row.bound), lse, strict=True))
    repeated = mistake.lse.repeat(-(-len(mistake.out) // len(mistake.lse)))[: len(mistake.out), None]
    return got, expected, bound, torch.cat((mistake.out, repeated), 1)


def _worst(got: Tensor, expected: Tensor, bound: Tensor) -> int:
    return int(((got - expected).abs() / bound.clamp(min=torch.finfo(torch.float64).tiny)).argmax())
