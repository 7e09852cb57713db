"""Mistakes in the formula: scale, normalisation, a factor, an online softmax; a variant; scales of an 8-bit cache;
columns; a mask.

Of a variant: that it is left out, a window that is off by one, another head's slope or sink. Of the scales: that they
are left out, applied twice, or those of the other tensor or of another KV head. Of rows that are keys and values at
once: which of their columns are scored, and which are averaged. Of a mask: which of its rows is read, and how.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.explaining.low_precision import TILES, maxima_so_far, merged_states
from attnfuzz.explaining.mistakes import Family, Predicted, family
from attnfuzz.explaining.row import AttentionRow, AveragedRow, softmax_average
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.quantised_kv import KV_DTYPES, KvDtype
from attnfuzz.problems.reference import row_weights
from attnfuzz.problems.wording import number

__all__ = [
    "column_mistakes",
    "divisor_words",
    "fitted_scale",
    "is_written",
    "lse_bases",
    "lse_formulas",
    "mask_mistakes",
    "not_rescaled",
    "partial_bases",
    "rescaled_output",
    "rescaled_scores",
    "scale_mistakes",
    "variant_mistakes",
    "wrong_scales",
]

_LOG2_E = math.log2(math.e)
_SMALLEST_FACTOR = 1e-9
_SCALES = (0.25, 4.0)
_STEPS = 61
_ZOOMS = 6
_TINY = 1e-30


def rescaled_scores(row: AttentionRow) -> Iterator[Family]:
    """Scores multiplied by a wrong constant."""
    scale, size = row.case.scale, row.case.head_size
    padded = 1 << (size - 1).bit_length()
    mistakes = [
        (1 / scale, "the scale is left out"),
        (scale, "the scale is applied twice"),
        (1 / math.sqrt(size) / scale, f"the scale is 1/sqrt(head_size), expected {number(scale)}"),
        (1 / math.sqrt(padded) / scale, f"the scale is 1/sqrt({padded}), expected {number(scale)}"),
        (_LOG2_E, "the scores are multiplied by log2(e), but not exponentiated in base 2"),
        (1 / _LOG2_E, "the scores are exponentiated in base 2 without being multiplied by log2(e)"),
        (0.0, "all tokens have the same weight"),
        (-1.0, "the scores have the wrong sign"),
        (2.0, "the scores are doubled"),
        (0.5, "the scores are halved"),
    ]
    if row.case.v_head_size is not None:
        of_values = 1 / math.sqrt(row.case.v_head_size) / scale
        mistakes.append(
            (of_values, f"the scale is 1/sqrt({row.case.v_head_size}), V's head size, expected {number(scale)}")
        )
    factors = dict[float, str]()
    for factor, words in mistakes:  # with a scale of 2, halved scores are scores whose scale is left out
        if not math.isclose(factor, 1.0, rel_tol=1e-6):
            factors.setdefault(factor, words)
    scores = torch.tensor(list(factors), dtype=torch.float64, device="cpu")[:, None] * row.scores
    out, lse = softmax_average(scores, row.v.expand(len(factors), *row.v.shape))
    names = list(factors.values())
    yield Family("scale", out, lse, lambda i: names[i])
    yield Family("scale", out, None, lambda i: names[i])


def fitted_scale(row: AttentionRow) -> Iterator[Family]:
    """Scores multiplied by the constant that explains the row best, if somebody may have written it."""
    factor = _best_scale(row)
    if is_written(factor):
        out, lse = softmax_average(factor * row.scores[None], row.v[None])
        yield Family("scale", out, lse, lambda _: f"the scores are {number(factor)} x the right ones", is_fitted=True)


def is_written(factor: float) -> bool:
    """Whether a constant may stand in a program: few decimals, not nearly 1. Some constant always fits."""
    return abs(factor - 1) > 5e-3 and math.isclose(factor, round(factor, 3), rel_tol=1e-5)


def _best_scale(row: AttentionRow) -> float:
    low, high = _SCALES
    best = 1.0
    for _ in range(_ZOOMS):
        factors = torch.linspace(low, high, _STEPS, dtype=torch.float64, device="cpu")
        out, lse = softmax_average(factors[:, None] * row.scores, row.v.expand(_STEPS, *row.v.shape))
        missed = ((out - row.got) / (row.bound + _TINY)).abs().amax(-1)
        if row.got_lse is not None:
            missed += (lse - row.got_lse).abs() / (row.lse_bound + _TINY)
        best, width = float(factors[missed.argmin()]), 2 * (high - low) / _STEPS
        low, high = best - width, best + width
    return best


def not_rescaled(row: AttentionRow) -> Iterator[Family]:
    """Sums of an online softmax that are left as they are where a tile has a larger score than all tiles before.

    Both, those of the weights and of weights x V, are to be multiplied by exp(old maximum - new maximum): algorithm 1
    of FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    if not row.case.variant.has_weighty_sinks:
        own = getattr(row.case, "block_size", None)
        tiles = sorted({tile for tile in (own, *TILES) if tile is not None and tile < row.num_tokens})
        yield from family("not_rescaled", [one for tile in tiles for one in _left_as_they_are(row, tile)])


def _left_as_they_are(row: AttentionRow, tile: int) -> Iterator[Predicted]:
    scores, top = row.log_weights, row.log_weights.amax()
    right, left = (scores - top).exp(), (scores - maxima_so_far(scores, tile)).exp()
    total, left_total = right.sum(), left.sum()
    lse, left_lse = float(top + total.log()), float(top + left_total.log())
    when = "rescaled when the maximum grows"
    yield (left @ row.v) / total, lse, f"the sum of weights x V is not {when}"
    yield (right @ row.v) / left_total, left_lse, f"the sum of the weights is not {when}"
    if tile > 1:  # from token to token all would have the same weight, where scores rise
        words = f"neither the sum of the weights nor that of weights x V is {when}"
        yield (left @ row.v) / left_total, left_lse, words


def rescaled_output(row: AttentionRow) -> Iterator[Family]:
    """A right output times a constant, which is fitted."""
    norm = float(row.expected @ row.expected)
    if not norm or len(row.got) == 1:
        return
    factor = float(row.got @ row.expected) / norm
    total = float(row.weights.sum())
    if abs(factor) <= _SMALLEST_FACTOR:
        return
    out = (factor * row.expected)[None]
    words = divisor_words(factor, total, rel_tol=1e-3)
    if words is not None:
        yield Family("normalisation", out, None, lambda _: f"the output is {words} ({number(total)})")
    elif is_written(factor):
        yield Family(
            "normalisation", out, None, lambda _: f"the output is {number(factor)} x the right one", is_fitted=True
        )


def lse_bases(row: AveragedRow) -> Iterator[Family]:
    """Log-sum-exps in the base that was not declared."""
    for cause, lse, words in (
        ("lse_base2", row.lse * _LOG2_E, "lse is in base 2, but the kernel declares natural logarithms"),
        ("lse_natural", row.lse / _LOG2_E, "lse is natural, but the kernel declares base 2"),
    ):
        yield from family(cause, [(row.expected, lse, words)])


def lse_formulas(row: AttentionRow) -> Iterator[Family]:
    """Log-sum-exps by a wrong formula."""
    top, log_total = row.top, float(row.weights.sum().log())
    lses = {
        "lse is the logarithm of the sum, without the maximum": log_total,
        "lse is the maximum of the scores alone": top,
        "lse is the maximum minus the logarithm of the sum, not plus it": top - log_total,
        "lse is the maximum plus the sum itself, not its logarithm": top + math.exp(log_total),
        "lse is the sum of exp(score) itself, not its logarithm": math.exp(min(row.lse, 700.0)),
        "lse is that of the scores before they are scaled": float((row.scores / row.case.scale).logsumexp(0)),
        "lse adds a maximum in base 2 to a natural logarithm of the sum": top * _LOG2_E + log_total,
        "lse adds a natural maximum to a logarithm of the sum in base 2": top / _LOG2_E + log_total,
    }
    yield from lse_bases(row)
    yield from family("lse_formula", ((row.expected, lse, words) for words, lse in lses.items()))
    yield from family("treated_as_empty", [(row.expected, -math.inf, "the sequence is treated as empty")])


def partial_bases(row: AttentionRow) -> Iterator[Family]:
    """States whose log-sum-exps have one base, merged as if they had another; into how many parts is fitted."""
    out, lse = _merged_states(row, _LOG2_E)
    words = "partial log-sum-exps in base 2 are merged as natural ones"
    yield Family("partial_lse", out, lse, lambda _: words, is_fitted=True)
    out, lse = _merged_states(row, 1 / _LOG2_E)
    others = "natural partial log-sum-exps are merged as in base 2"
    yield Family("partial_lse", out, lse * _LOG2_E, lambda _: others, is_fitted=True)


def _merged_states(row: AttentionRow, factor: float) -> tuple[Tensor, Tensor]:
    outs, lses = zip(*merged_states(row, lambda lse: factor * lse), strict=True)
    return torch.stack(outs), torch.stack(lses)


def divisor_words(factor: float, total: float, *, rel_tol: float) -> str | None:
    """What makes an output `factor` times too large, where the weights exp(score - maximum) sum up to `total`."""
    if math.isclose(factor, total, rel_tol=rel_tol):
        return "not divided by the sum of the weights"
    if math.isclose(factor, 1 / total, rel_tol=rel_tol):
        return "divided twice by the sum of the weights"
    return None


def scale_mistakes(row: AttentionRow) -> Iterator[Family]:
    """All mistakes as one family, since there are few; nothing for a plain cache."""
    yield from family("kv_scales", (*_wrong_factors(row), *_another_format(row)))


def wrong_scales(row: AttentionRow) -> Iterator[Family]:
    """Those that look at no cached number: of a row whose V is not what its cache holds."""
    yield from family("kv_scales", _wrong_factors(row))


def _wrong_factors(row: AttentionRow) -> Iterator[Predicted]:
    """What K and V are multiplied with beside or instead of their scales."""
    if row.kv_scales is None:
        return
    k_scales, v_scales = row.kv_scales.tolist()
    own = row.kv_head
    k, v = k_scales[own], v_scales[own]
    if (k, v) != (1.0, 1.0):
        yield _with_scales(row, 1 / k, 1 / v, "the scales of K and V are left out")
        yield _with_scales(row, 1 / k, 1.0, "the scale of K is left out")
        yield _with_scales(row, 1.0, 1 / v, "the scale of V is left out")
        yield _with_scales(row, k, 1.0, "the scale of K is applied twice")
        yield _with_scales(row, 1.0, v, "the scale of V is applied twice")
        yield _with_scales(row, k, v, "the scales of K and V are applied twice")
        yield _with_scales(row, 1 / k**2, 1.0, "K is divided by its scale")
        yield _with_scales(row, 1.0, 1 / v**2, "V is divided by its scale")
    if k != v:
        yield _with_scales(row, v / k, k / v, "the scales of K and V are swapped")
        yield _with_scales(row, v / k, 1.0, "K is multiplied with the scale of V")
        yield _with_scales(row, 1.0, k / v, "V is multiplied with the scale of K")
    for head, (other_k, other_v) in enumerate(zip(k_scales, v_scales, strict=True)):
        if head != own:
            whose = f"KV head {own} is read with {{}} of KV head {head}"
            if row.head == head:
                whose += " (the query head's number)"
            yield _with_scales(row, other_k / k, other_v / v, whose.format("the scales"))
            yield _with_scales(row, other_k / k, 1.0, whose.format("the scale of K"))
            yield _with_scales(row, 1.0, other_v / v, whose.format("the scale of V"))


def _another_format(row: AttentionRow) -> Iterator[Predicted]:
    """The bytes of the cache taken for numbers of another 8-bit format."""
    if row.kv_scales is None or row.case.kv is None:
        return
    k_scale, v_scale = row.kv_scales[:, row.kv_head]
    for dtype in (*KV_DTYPES, "float8_e4m3fnuz"):
        if dtype != row.case.kv.dtype:
            k, v = (
                _reread(part / scale, row.case.kv.dtype, dtype) * scale
                for part, scale in ((row.k, k_scale), (row.v, v_scale))
            )
            dots = row.case.scale * (k @ row.q)
            if bool(dots.isfinite().all()) and bool(v.isfinite().all()):
                weights, lse = row_weights(row.case, row.row, row.head, dots)
                yield weights @ v, float(lse), f"the cache is read as {dtype}"


def _reread(cached: Float64[Tensor, "*shape"], held: KvDtype, read: str) -> Float64[Tensor, "*shape"]:
    codes = cached.float().to(getattr(torch, held)).view(torch.uint8)
    return codes.view(getattr(torch, read)).double()


def _with_scales(row: AttentionRow, k_factor: float, v_factor: float, words: str) -> Predicted:
    weights, lse = row_weights(row.case, row.row, row.head, row.scores * k_factor)
    return (weights @ row.v) * v_factor, float(lse), words


_LEFT_OUT = {
    "window": "the window is left out",
    "soft_cap": "the soft cap is left out",
    "alibi": "ALiBi is left out",
    "sinks": "the sink is left out",
}

_MOST_COUNTS = 8
"""Splits that may each add a sink."""


def variant_mistakes(row: AttentionRow) -> Iterator[Family]:
    """All mistakes as one family, since there are few; nothing for a plain case."""
    found = (*_left_out(row), *_other_windows(row), *_of_other_heads(row), *_other_formulas(row))
    yield from family("variant", found)


def mask_mistakes(row: AttentionRow) -> Iterator[Family]:
    """Those with the table of a mask; nothing without one."""
    if row.case.hides_keys:
        yield from family("mask", _wrong_masks(row, row.case))


def _wrong_masks(row: AttentionRow, case: Any) -> Iterator[Predicted]:
    """Other keys of the sequence that a row may see, as far as it then sees any."""
    rows, length = case.rows_of(row.seq), case.seq_lens[row.seq]
    count, query = len(rows), row.row - rows.start
    table = [case.rows_seen[i] for i in rows]
    flat = b"".join(table)
    wrong = {
        "the mask is not applied": b"\1" * length,
        "the mask is taken for a causal one": b"\1" * (length - count + query + 1),
        "the mask is read with keys before query tokens": flat[query::count],
        f"rows of the mask are taken to be {count} keys long, not {length}": flat[query * count :][:length],
    }
    beside = (other for other in (query - 1, query + 1) if 0 <= other < count)
    wrong |= {f"row {other} of the mask is read, not row {query}": table[other] for other in beside}
    unmasked = msgspec.structs.replace(case, mask=Mask(kind="full"))
    k, v = row.keys_of(row.seq, row.kv_head), row.values_of(row.seq, row.kv_head)
    named: dict[tuple[int, ...], list[str]] = {}
    for words, seen in wrong.items():
        named.setdefault(_ones(seen), []).append(words)
    for keys, mistakes in named.items():
        if keys not in ((), _ones(table[query])):
            weights, lse = row_weights(unmasked, row.row, row.head, case.scale * (k[list(keys)] @ row.q))
            yield weights @ v[list(keys)], float(lse), ", or ".join(mistakes)
    if not row.is_plain and case.variant.sinks is None:
        yield v.new_zeros(case.value_size), -math.inf, "the query is treated as if it saw no key"


def _ones(seen: bytes) -> tuple[int, ...]:
    return tuple(t for t, is_seen in enumerate(seen) if is_seen)


def column_mistakes(row: AttentionRow) -> Iterator[Family]:
    """Those with rows that are keys and values at once; nothing where V is a tensor of its own."""
    if not row.case.values_in_keys:
        return
    yield from family("score_columns", _wrong_columns_scored(row))
    size = row.case.value_size
    weights, _ = row_weights(row.case, row.row, row.head, row.scores)
    outs = (weights @ row.k).unfold(0, size, 1)[1:]
    if len(outs):
        yield Family("value_columns", outs, None, lambda i: f"V is read from columns {i + 1}-{i + size} of the cache")


def _wrong_columns_scored(row: AttentionRow) -> Iterator[Predicted]:
    """Part of the products, or a scale that goes by the size of that part."""
    scale, size, last = row.case.scale, row.case.value_size, row.case.head_size - 1
    of_values, of_rest = (scale * (row.k[:, part] @ row.q[part]) for part in (slice(size), slice(size, None)))
    wrong = {
        f"columns {size}-{last} of the cache are left out of the scores": of_values,
        f"columns 0-{size - 1} of the cache, those of V, are left out of the scores": of_rest,
        f"the scale is 1/sqrt({size}), V's head size, expected {number(scale)}": row.scores / scale / math.sqrt(size),
    }
    for words, dots in wrong.items():
        if not torch.allclose(dots, row.scores, rtol=1e-6, atol=0.0):
            yield _outcome(row, words, dots=dots)


def _left_out(row: AttentionRow) -> Iterator[Predicted]:
    for name in row.case.variant.names:
        yield _outcome(row, _LEFT_OUT[name], case=_with(row.case, **{name: None}))
        if name == "sinks":
            out, _, _ = _outcome(row, "")
            _, lse, _ = _outcome(row, "", case=_with(row.case, sinks=None))
            yield out, lse, "the LSE leaves out the sink"


def _other_windows(row: AttentionRow) -> Iterator[Predicted]:
    window = row.case.variant.window
    if window is None:
        return
    yield _outcome(row, "the window is one key too long", case=_with(row.case, window=window + 1))
    if window > 1:
        yield _outcome(row, "the window is one key too short", case=_with(row.case, window=window - 1))


def _of_other_heads(row: AttentionRow) -> Iterator[Predicted]:
    names = [name for name in ("alibi", "sinks") if getattr(row.case.variant, name) is not None]
    what = {"alibi": "slope", "sinks": "sink"}
    for head in range(row.case.num_q_heads) if names else ():
        if head != row.head:
            whose = f"query head {head}" + (" (the KV head's number)" if head == row.kv_head else "")
            yield _outcome(row, f"the {' and '.join(what[name] for name in names)} is that of {whose}", head=head)


def _other_formulas(row: AttentionRow) -> Iterator[Predicted]:
    cap = row.case.variant.soft_cap
    if cap is not None:
        before_scale = row.case.scale * cap * torch.tanh(row.scores / row.case.scale / cap)
        uncapped = _with(row.case, soft_cap=None)
        yield _outcome(row, "the soft cap is applied before the scale", case=uncapped, dots=before_scale)
    numbers = row.case.variant.per_head_numbers(row.case.num_q_heads, row.case.values.seed)
    if row.case.variant.has_weighty_sinks:
        yield from _wrong_sinks(row, numbers["sinks"][row.head])
    if "alibi_slopes" in numbers:
        slope, position = numbers["alibi_slopes"][row.head], len(row.scores) - 1
        out, lse, _ = _outcome(row, "")
        # FlashAttention 2 does so where it masks causally: a constant of a row, which softmax does not see.
        yield out, float(lse or 0.0) + slope * position, "ALiBi counts from the first key, not from the query"
        distance = torch.arange(-position, 1, dtype=torch.float64, device="cpu")
        yield _outcome(row, "ALiBi is subtracted", dots=row.scores - 2 * slope * distance)


def _wrong_sinks(row: AttentionRow, sink: float) -> Iterator[Predicted]:
    """Beyond float32, or counted often: with weight p, n times over it adds (n - 1) p to the denominator."""
    weights, lse = row_weights(row.case, row.row, row.head, row.scores)
    above = sink - float(row.log_weights.max())
    if above > math.log(torch.finfo(torch.float32).max):
        yield weights @ row.v, math.inf, "the sink is not in the maximum that is subtracted, and overflows"
    of_sink = 1 - float(weights.sum())
    for count in range(2, _MOST_COUNTS + 1):
        larger = 1 + (count - 1) * of_sink
        yield weights @ row.v / larger, float(lse) + math.log(larger), f"the sink is counted {count} times"


def _with(case: AttentionCase, **fields: object) -> AttentionCase:
    return msgspec.structs.replace(case, variant=msgspec.structs.replace(case.variant, **fields))


def _outcome(
    row: AttentionRow,
    words: str,
    *,
    case: AttentionCase | None = None,
    head: int | None = None,
    dots: Float64[Tensor, " length"] | None = None,
) -> Predicted:
    dots = row.scores if dots is None else dots
    weights, lse = row_weights(case or row.case, row.row, row.head if head is None else head, dots)
    return weights @ row.v, float(lse), words
