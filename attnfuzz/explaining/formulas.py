"""Mistakes in the formula: scale, normalisation, a factor, an online softmax; a variant; scales of an 8-bit cache;
columns; a mask; partial states.

Of a variant: that it is left out, a window that is off by one, another head's slope or sink, an order that matters. Of
the scales: that they are left out, applied twice, or those of the other tensor or of another KV head. Of rows that are
keys and values at once: which of their columns are scored, and which are averaged. Of a mask: which of its rows is
read, and how. Of partial states: in which base they are merged, and whose log-sum-exps they are weighed with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from attnfuzz.explaining.low_precision import (
    LOWEST_EXPONENT,
    TILES,
    Scores,
    in_parts,
    maxima_so_far,
    outputs_of,
    tiles_of,
)
from attnfuzz.explaining.mistakes import Family, Predicted, family
from attnfuzz.explaining.row import AttentionRow, AveragedRow, Query
from attnfuzz.mistake import K_SCALE, KV_SCALES, V_SCALE
from attnfuzz.problems.cases import AttentionCase, has_query_lens
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.quantised_kv import KV_DTYPES
from attnfuzz.problems.wording import number

_LOG2_E = math.log2(math.e)
_WHEN_IT_GROWS = "when the maximum grows"
_NOT_AT_ALL_STEPS = ", at some steps"
_MOST_STEPS = 8
"""In which the maximum grows, the largest ones, of which one alone may be missed."""
_SHORT_TILES = (4, 8)
"""Beside the usual ones, of kernels that keep no more than one number for some keys."""
_SMALLEST_FACTOR, _LARGEST_FACTOR = 1e-9, 1e3
_POISONED = 128
"""Bytes behind a tensor that hold nothing else."""
_SCALES = (0.25, 4.0)
_VECTORS = (16, 32, 64, 128)
"""Numbers of q and k that kernels multiply at a time."""
_STEPS = 61
_ZOOMS = 6
_TINY = 1e-30
_LOWEST = torch.finfo(torch.float64).min


def rescaled_scores(row: AttentionRow) -> Iterator[Predicted]:
    """Scores multiplied by a wrong constant."""
    scale, size = row.case.scale, row.case.head_size
    padded = 1 << (size - 1).bit_length()
    mistakes = [
        ("left out", 1 / scale, "the scale is left out"),
        ("twice", scale, "the scale is applied twice"),
        ("head size", 1 / math.sqrt(size) / scale, f"the scale is 1/sqrt(head_size), expected {number(scale)}"),
        ("padded head size", 1 / math.sqrt(padded) / scale, f"the scale is 1/sqrt({padded}), expected {number(scale)}"),
        ("log2(e)", _LOG2_E, "the scores are multiplied by log2(e), but not exponentiated in base 2"),
        ("base 2", 1 / _LOG2_E, "the scores are exponentiated in base 2 without being multiplied by log2(e)"),
        ("none", 0.0, "all tokens have the same weight"),
        ("negated", -1.0, "the scores have the wrong sign"),
        ("doubled", 2.0, "the scores are doubled"),
        ("halved", 0.5, "the scores are halved"),
    ]
    if row.case.v_head_size is not None:
        of_values = 1 / math.sqrt(row.case.v_head_size) / scale
        words = f"the scale is 1/sqrt({row.case.v_head_size}), V's head size, expected {number(scale)}"
        mistakes.append(("V's head size", of_values, words))
    if padded != size:
        words = f"the scale is that of heads of {padded}, to which they are padded, not of {size}"
        mistakes.append(("of padded heads", math.sqrt(size / padded), words))
    for way, factor, words in mistakes:
        if not math.isclose(factor, 1.0, rel_tol=1e-6):
            yield Predicted(*row.given(factor * row.scores), way, words)
    if row.is_plain:
        out, lse = row.given(row.scores / _LOG2_E)
        words = "the weights are powers of 2, not of e, of scores less their maximum"
        yield Predicted(out, lse + row.top * (1 - 1 / _LOG2_E), "base 2 beside the maximum", words)
    yield from _clipped(row)
    fitted = _best_scale(row)
    if is_written(fitted) and not any(math.isclose(fitted, factor, rel_tol=1e-3) for _, factor, _ in mistakes):
        words = f"the scores are {number(fitted)} x the right ones"
        yield Predicted(*row.given(fitted * row.scores), f"x {number(fitted)}", words)


def _clipped(row: AttentionRow) -> Iterator[Predicted]:
    """Scores that are kept within a number that is usual."""
    largest = float(row.scores.abs().max())
    for limit in _LIMITS:
        if limit < largest:
            words = f"scores beyond {number(limit)} are clipped to that"
            yield Predicted(*row.given(row.scores.clamp(-limit, limit)), f"clipped at {number(limit)}", words)


def is_written(factor: float) -> bool:
    """Whether a constant may stand in a program: few digits, not nearly 1. Some constant always fits."""
    written = round(float(f"{factor:.4g}"), 3)
    return abs(factor - 1) > 5e-3 and abs(factor) < _LARGEST_FACTOR and math.isclose(factor, written, rel_tol=1e-5)


def _best_scale(row: AttentionRow) -> float:
    """The factor of all scores that explains the row best."""
    low, high = _SCALES
    best = 1.0
    is_seen = row.num_tokens > 1 or row.got_lse is not None
    if not row.is_finite or not is_seen or row.case.variant.soft_cap is not None:
        return best
    beside = row.final(torch.zeros_like(row.scores))  # a bias, and -inf for what is hidden
    for _ in range(_ZOOMS):
        factors = torch.linspace(low, high, _STEPS, dtype=torch.float64, device="cpu")
        out, lse = row.average(factors[:, None] * row.scores + beside, row.v)
        missed = ((out - row.got) / (row.bound + _TINY)).abs().amax(-1)
        if row.got_lse is not None:
            missed += (lse - row.got_lse).abs() / (row.lse_bound + _TINY)
        best, width = float(factors[missed.argmin()]), 2 * (high - low) / _STEPS
        low, high = best - width, best + width
    return best


def not_rescaled(row: AttentionRow) -> Iterator[Family]:
    """Sums of an online softmax that are not rescaled, or the wrong way round, where a tile has a larger score.

    Both, those of the weights and of weights x V, are to be multiplied by exp(old maximum - new maximum): algorithm 1
    of FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    if row.case.variant.has_weighty_sinks:
        yield from family("not_rescaled", _begun_with_the_sink(row))
        return
    tiles = sorted(tiles_of(row))
    whole = row.num_tokens  # to which a longer tile is the same
    rescaled = functools.cache(lambda tile: _rescaled_with_the_rest(row, tile))
    stale = functools.cache(lambda tile: _stale_maxima(row, tile))
    for made in (
        (
            Predicted(rescaled(min(tile, whole)), None, f"V, with the rest, {unit}", _WITH_THE_REST)
            for tile in tiles
            for unit in _units(row, tile)
        ),
        (
            Predicted(
                *given,
                f"maximum of every {which} one, {unit}",
                f"the running maximum is not kept after every {which} tile of {tile} keys",
            )
            for tile in (*tiles, *_SHORT_TILES)
            for which, given in stale(min(tile, whole))
            for unit in _units(row, tile)
        ),
    ):
        yield from family("not_rescaled", made)
    so_far = {tile: maxima_so_far(row.log_weights, tile) for tile in tiles if tile < whole}
    every = {tile: _steps(tops.diff(prepend=tops[:1]), tile) for tile, tops in so_far.items()}
    for which in ("", ", from the third on", *_EVERY_OTHER, _NOT_AT_ALL_STEPS):
        for tile, steps in every.items():
            if which in steps:
                yield from _left_as_they_are(row, tile, which, steps[which])


def _begun_with_the_sink(row: AttentionRow) -> Iterator[Predicted]:
    """A sum of the weights that begins with the sink as the maximum, and stays as it is where a score is larger."""
    words = "the sum of the weights, which begins with that of the sink, is not rescaled when the maximum grows"
    weighted = (row.log_weights - row.top).exp() @ row.v
    for tile in sorted(tiles_of(row)):
        so_far = torch.maximum(maxima_so_far(row.log_weights, min(tile, row.num_tokens)), row.sink)
        total = 1 + float((row.log_weights - so_far).exp().sum())
        for unit in _units(row, tile):
            yield Predicted(weighted / total, row.top + math.log(total), f"sum, from the sink on, {unit}", words)


def _units(row: AttentionRow, tile: int) -> list[str]:
    """Name what has so many keys: pages of other cases have other sizes."""
    return [f"tile of {tile}", *(["a page"] if tile == row.case.page_size else [])]


_WITH_THE_REST = "what a tile adds to the sum of weights x V is multiplied by exp(old - new maximum), too"


def _rescaled_with_the_rest(row: AttentionRow, tile: int) -> Float64[Tensor, " v_head_size"]:
    """Multiply what each tile adds, the first one's by exp(-inf) = 0, by what only the sum so far has to be."""
    so_far = maxima_so_far(row.log_weights, tile)
    before = torch.cat((so_far.new_full((min(tile, len(so_far)),), -torch.inf), so_far[:-tile]))
    factors = torch.where(so_far.isneginf(), 0.0, (before - so_far).exp())
    return (row.shares * factors) @ row.v


def _stale_maxima(row: AttentionRow, tile: int) -> list[tuple[str, tuple[Tensor, float]]]:
    """The sums are relative to the maximum of the tile at hand and those before, which only each second tile stores."""
    scores = row.log_weights
    tops = torch.nn.functional.pad(scores, (0, -len(scores) % tile), value=-torch.inf).reshape(-1, tile).amax(1)
    found = []
    for first, which in ((0, "second"), (1, "other, from the first on,")):
        is_stored = torch.arange(len(tops), device="cpu") % 2 == first
        stored = tops.where(is_stored, -torch.inf).cummax(0).values
        before = torch.cat((stored.new_full((1,), -torch.inf), stored[:-1]))
        largest = torch.maximum(before, tops)
        rescaled = (before - largest).where(~largest.isneginf(), 0.0).flip(0).cumsum(0).flip(0)  # from each tile on
        later = torch.cat((rescaled[1:], rescaled.new_zeros(1))) + largest[-1] - largest.clamp(min=_LOWEST)
        found.append((which, row.averaged(scores + later.repeat_interleave(tile)[: len(scores)])))
    return found


_EVERY_OTHER = ", at every other tile from the second on", ", at every other tile from the third on"
_Steps = list[tuple[str, Scores]]
"""When the sums so far are not rescaled, in words, and by how much the maximum grows before each token then."""


def _steps(growth: Scores, tile: int) -> dict[str, _Steps]:
    """All; those behind the second tile, which is often dealt with apart; every other tile, as two take turns; or some,
    which a wrong condition chooses.

    Of some, one alone or those in which the maximum grows most.
    """
    found: dict[str, _Steps] = {"": [(_WHEN_IT_GROWS, growth)]}
    if 2 * tile < len(growth):
        behind = torch.cat((torch.zeros_like(growth[: 2 * tile]), growth[2 * tile :]))
        found[", from the third on"] = [(f"{_WHEN_IT_GROWS}, from the third tile on", behind)]
        tiles = torch.arange(len(growth), device="cpu") // tile
        for first, which in zip((1, 2), _EVERY_OTHER, strict=True):
            missed = growth.where((tiles >= first) & (tiles % 2 == first % 2), 0.0)
            found[which] = [(f"{_WHEN_IT_GROWS}{which}", missed)]
    steps = [step for step in growth.argsort(descending=True).tolist() if growth[step] > 0]
    largest = steps[:_MOST_STEPS]
    chosen = [*([step] for step in largest), *(largest[:count] for count in range(2, len(largest) + 1)), steps]
    for some in chosen if steps else ():
        missed = torch.zeros_like(growth)
        missed[some] = growth[some]
        words = _WHEN_IT_GROWS if len(some) == len(steps) else "in some of the steps in which the maximum grows"
        found.setdefault(_NOT_AT_ALL_STEPS, []).append((words, missed))
    return found


def _left_as_they_are(row: AttentionRow, tile: int, which: str, steps: _Steps) -> Iterator[Family]:
    exponents, top = row.log_weights - row.log_weights.amax(), row.log_weights.amax()
    missed = torch.stack([of_step for _, of_step in steps])
    behind = missed.sum(1, keepdim=True) - missed.cumsum(1)  # by which all that lies before is too large
    left, inverted = (
        torch.where(exponents.isneginf(), 0.0, (exponents + times * behind).clamp(max=700.0).exp()) for times in (1, 2)
    )
    right = exponents.exp().expand_as(left)
    of_v, of_sum = "the sum of weights x V", "the sum of the weights"
    turned = "multiplied by exp(new - old maximum), not exp(old - new),"
    ways = [
        ("V", f"{of_v} is not rescaled", left, right),
        ("sum", f"{of_sum} is not rescaled", right, left),
        ("both", f"neither {of_sum} nor that of weights x V is rescaled", left, left),
        ("V, inverted", f"{of_v} is {turned}", inverted, right),
        ("sum, inverted", f"{of_sum} is {turned}", right, inverted),
        ("both, inverted", f"the sums so far are {turned}", inverted, inverted),
    ]
    for way, words, weights, summed in ways[: 3 if which == _NOT_AT_ALL_STEPS else None]:
        if way == "both" and tile == 1:  # from token to token all would have the same weight, where scores rise
            continue
        total = summed.sum(1)
        told = [f"{words} {when}" for when, _ in steps]
        out, lse = weights @ row.v / total[:, None], top + total.log()
        for unit in _units(row, tile):
            yield Family("not_rescaled", out, lse, [f"{way}, {unit}{which}"] * len(steps), told.__getitem__)


_NOT_DIVIDED = "a sum of values times exp(score), not divided by the sum of these"


def rescaled_output(row: AttentionRow) -> Iterator[Predicted]:
    """A right output times a constant, which is fitted."""
    norm = float(row.expected @ row.expected)
    if not norm or len(row.got) == 1 or not bool(row.got.isfinite().all()):
        return
    factor = float(row.got @ row.expected) / norm
    total = row.total
    if abs(factor) <= _SMALLEST_FACTOR:
        return
    for way, words, divisor in (
        ("not divided", "not divided by the sum of the weights", total),
        ("divided twice", "divided twice by the sum of the weights", 1 / total),
        ("of bare exponentials", _NOT_DIVIDED, math.exp(min(row.lse, _LARGEST_EXPONENT))),
    ):
        if not math.isclose(divisor, 1.0, rel_tol=1e-3):
            of = number(divisor if words == _NOT_DIVIDED else total)
            yield Predicted(divisor * row.expected, None, way, f"the output is {words} ({of})")
    words = "values are multiplied with exp(score), as if the log-sum-exp were 0"
    yield Predicted(math.exp(min(row.lse, _LARGEST_EXPONENT)) * row.expected, 0.0, "a log-sum-exp of 0", words)
    in_lse = row.got_lse is not None and row.lse + _FEWEST_BOUNDS * row.lse_bound < row.got_lse < math.inf
    more = total / factor - total
    if in_lse and row.got_lse is not None:
        more = math.exp(min(row.got_lse - row.top, _LARGEST_EXPONENT)) - total
    if more > _LEAST_EPSILON * total:
        words = f"{more:.2g} is added to the sum of the weights"
        lse = row.got_lse if in_lse else None
        yield Predicted(total / (total + more) * row.expected, lse, f"{more:.2g} added", words)
    if is_written(factor):
        words = f"the output is {number(factor)} x the right one"
        yield Predicted(factor * row.expected, None, f"x {number(factor)}", words)


def lse_bases(row: AveragedRow) -> Iterator[Family]:
    """Log-sum-exps in a base that was not asked for."""
    for cause, factor, words in (
        ("lse_base2", _LOG2_E, "lse is in base 2, not a natural logarithm"),
        ("lse_natural", 1 / _LOG2_E, "lse is a natural logarithm, not one in base 2"),
        ("lse_base10", 1 / math.log(10), "lse is in base 10, not a natural logarithm"),
    ):
        yield from family(cause, [Predicted(row.expected, row.lse * factor, "lse", words)])


def lse_formulas(row: AttentionRow) -> Iterator[Family]:
    """Log-sum-exps by a wrong formula."""
    top, log_total = row.top, math.log(row.total)
    lses = {
        "lse is the logarithm of the sum, without the maximum": log_total,
        "lse is the maximum of the scores alone": top,
        "lse is the maximum minus the logarithm of the sum, not plus it": top - log_total,
        "lse is the maximum plus the sum itself, not its logarithm": top + row.total,
        "lse is the sum of exp(score) itself, not its logarithm": math.exp(min(row.lse, 700.0)),
        "lse is that of the scores before they are scaled": row.given(row.scores / row.case.scale)[1],
        "lse adds a maximum in base 2 to a natural logarithm of the sum": top * _LOG2_E + log_total,
        "lse adds a natural maximum to a logarithm of the sum in base 2": top + log_total * _LOG2_E,
        "lse adds a natural maximum that is taken for one in base 2 to a natural logarithm of the sum": top / _LOG2_E
        + log_total,
        "lse adds a natural maximum to a natural logarithm of the sum that is taken for one in base 2": top
        + log_total / _LOG2_E,
        "lse adds a natural maximum to a logarithm of the sum in base 10": top + log_total / math.log(10),
        "lse is multiplied by the scale": row.lse * row.case.scale,
        "lse is the logarithm of the mean of exp(score), not of the sum": row.lse - math.log(max(len(row.seen), 1)),
    }
    for name in ("float16", "bfloat16"):
        rounded = torch.tensor(row.lse, dtype=torch.float64, device="cpu").to(getattr(torch, name))
        lses[f"lse is rounded to {name}"] = float(rounded)
    if row.case.variant.has_weighty_sinks:
        lses["the LSE leaves out the sink"] = float(row.log_weights.logsumexp(0))
    if row.kv_scales is not None and row.is_plain:
        lses["the maximum in lse lacks the scale of K"] = top / float(row.kv_scales[0, row.kv_head]) + log_total
    for tile in TILES:
        if (first := float(row.log_weights[:tile].max())) > -math.inf:
            keys = f"the largest of the first {tile} keys" if tile > 1 else "that of the first key"
            lses[f"lse adds the largest score to a sum that is still relative to {keys}"] = row.lse + top - first
    yield from lse_bases(row)
    yield from family("lse_formula", (Predicted(row.expected, lse, words, words) for words, lse in lses.items()))
    yield from family("lse_formula", _sums_of_parts(row))
    yield from family("lse_formula", _without_a_part(row))


def _sums_of_parts(row: AttentionRow) -> Iterator[Predicted]:
    """Log-sum-exps that add the sums of parts as if all of them were relative to one maximum."""
    words = "lse adds the sums of parts of the keys without rescaling them to one maximum"
    for part_of, names in _partitions(row).items():
        scores = in_parts(row.log_weights, part_of)
        sums = (scores - scores.amax(1, keepdim=True).clamp(min=_LOWEST)).exp().sum()
        lse = row.top + math.log(float(sums))
        yield from (Predicted(row.expected, lse, f"sums of {name}", words) for name in names)


_SPLITS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
_MOST_PARTS = 64


def partial_states(row: AttentionRow) -> Iterator[Predicted]:
    """States of parts of the keys, weighed with log-sum-exps of another base, of another head, or with none."""
    top = row.log_weights.amax()
    formulas = (  # what a part is weighed with: of its log-sum-exp, and of its maximum
        ("base 2 as natural", "partial log-sum-exps in base 2 are merged as natural ones", _LOG2_E, 0.0),
        ("natural as base 2", "natural partial log-sum-exps are merged as in base 2", 1 / _LOG2_E, 0.0),
        ("equal", "partial states are merged with equal weights", 0.0, 0.0),
        ("exchanged", "partial states are merged with weights of the wrong sign", -1.0, 0.0),
        (
            "maxima, base 2 as natural",
            "partial sums are rescaled with powers of 2 of natural maxima",
            1.0,
            math.log(2) - 1,
        ),
        ("maxima, natural as base 2", "partial sums are rescaled with exponentials of base-2 maxima", 1.0, _LOG2_E - 1),
        ("maxima, not rescaled", "partial sums are added without being rescaled to one maximum", 1.0, -1.0),
    )
    orders = (("in pairs", _merges_in_pairs), ("one by one", _merges_one_by_one))
    told = [(way, words) for way, words, _, _ in formulas]
    told += [(f"equal, {how}", f"partial states are merged {how}, each time with equal weights") for how, _ in orders]
    given = list[_Given]()
    for part_of, names in _partitions(row).items():
        scores = in_parts(row.log_weights, part_of)
        lses, maxima = scores.logsumexp(1), scores.amax(1).clamp(min=_LOWEST) - top
        halved = torch.tensor([merges(len(lses)) for _, merges in orders], dtype=torch.float64, device="cpu")
        changed = [of_lse * lses + of_maximum * maxima for *_, of_lse, of_maximum in formulas]
        weighed = torch.where(lses.isneginf(), lses, torch.cat((torch.stack(changed), -math.log(2) * halved)))
        given.append((names, row.average(weighed, outputs_of(row, scores))))
    yield from _of_each(told, given)
    if heads := list(row.other_heads()):
        told = [
            (which, f"partial states of query head {row.head} are weighed with the log-sum-exps of query head {head}")
            for which, head in heads
        ]
        queries = (Query(case=row.case, row=row.row, head=head) for _, head in heads)
        others = torch.stack([row.final(row.scores_of(query)) for query in queries])[:, None]
        given = [  # even one part is NaN if the other head's is
            (
                names,
                row.average(
                    in_parts(others, part_of).logsumexp(-1), outputs_of(row, in_parts(row.log_weights, part_of))
                ),
            )
            for part_of, names in _partitions(row, fewest=1).items()
        ]
        yield from _of_each(told, given)


def _without_a_part(row: AttentionRow) -> Iterator[Predicted]:
    """Log-sum-exps of all parts but one, or of one alone, beside an output of all."""
    for part_of, names in _partitions(row).items():
        lses = in_parts(row.log_weights, part_of).logsumexp(1)
        end = len(lses) - 1
        positions = [[t for t, part in enumerate(part_of) if part == which] for which in (0, end)]
        for which, part, chosen in zip(("first", "last"), (0, end), positions, strict=True):
            others = torch.cat((lses[:part], lses[part + 1 :], row.sink[None])).logsumexp(0)
            alone = torch.stack((lses[part], row.sink)).logsumexp(0)
            tokens = f"{row.tokens(chosen)} of sequence {row.seq}"
            for name in names:
                rule = f"the {which} of {name}"
                yield Predicted(row.expected, float(others), f"without {rule}", f"lse leaves out {tokens}", rule)
                if end > 1:  # or it is that without the other one
                    yield Predicted(row.expected, float(alone), f"of {rule}", f"lse is that of {tokens} alone", rule)


_Given = tuple[list[str], tuple[Tensor, Tensor]]
"""By what names keys are split, and outputs and log-sum-exps that come of it in each of several ways."""


def _of_each(told: Sequence[tuple[str, str]], given: Sequence[_Given]) -> Iterator[Predicted]:
    """Pair what is ``given`` with how it is ``told``, way by way."""
    every = [(names, out, lse.tolist()) for names, (out, lse) in given]
    for i, (way, words) in enumerate(told):
        yield from (Predicted(out[i], lse[i], f"{way}, {name}", words) for names, out, lse in every for name in names)


def _merges_in_pairs(count: int) -> list[int]:
    """How many merges each of ``count`` states goes through where neighbours are merged until one is left."""
    through, groups = [0] * count, [[i] for i in range(count)]
    while len(groups) > 1:
        pairs = [groups[i : i + 2] for i in range(0, len(groups), 2)]
        for one in (one for pair in pairs if len(pair) > 1 for group in pair for one in group):
            through[one] += 1
        groups = [[one for group in pair for one in group] for pair in pairs]
    return through


def _merges_one_by_one(count: int) -> list[int]:
    """Likewise where each is merged with all before it."""
    return [count - max(i, 1) for i in range(count)] if count > 1 else [0] * count


def _partitions(row: AttentionRow, *, fewest: int = 2) -> dict[tuple[int, ...], list[str]]:
    """For each way in which kernels split keys, into which part each goes; by what ways that comes about.

    ``fewest``: parts that there must be.
    """
    length, page = row.num_tokens, max(row.case.page_size, 1)
    pages = -(-length // page)
    named: dict[str, list[int]] = {}
    for splits in _SPLITS:
        size = -(-length // splits)
        named[f"{splits} parts"] = [t // size for t in range(length)]
        of_pages = -(-pages // splits)
        named[f"{splits} parts of whole pages"] = [t // page // of_pages for t in range(length)]
        named[f"{splits} parts, page by page"] = [t // page % splits for t in range(length)]
    for tile in (page, *TILES):
        named[f"parts of {tile}"] = [t // tile for t in range(length)]
    found: dict[tuple[int, ...], list[str]] = {}
    for name, part_of in named.items():
        if fewest <= max(part_of, default=0) + 1 <= _MOST_PARTS:
            found.setdefault(tuple(part_of), []).append(name)
    return found


def kv_scales(row: AttentionRow) -> Iterator[Family]:
    """Replay mistakes of an 8-bit cache: K and V times something beside or instead of their scales, or another format.

    What is wrong with both is another mistake than what is wrong with either alone.
    """
    if row.kv_scales is None:
        return
    k_scales, v_scales = row.kv_scales.tolist()
    own = row.kv_head
    k, v = k_scales[own], v_scales[own]
    found: dict[str, list[Predicted]] = {KV_SCALES: [], K_SCALE: [], V_SCALE: []}

    def replay(of_k: float | None, of_v: float | None, words: str, way: str = "") -> None:
        mistake = K_SCALE if of_v is None else V_SCALE if of_k is None else KV_SCALES
        scores, values = (part if of is None else part * of for part, of in ((row.scores, of_k), (row.v, of_v)))
        found[mistake].append(Predicted(*row.given(scores, values), way or words, words))

    if (k, v) != (1.0, 1.0):
        replay(1 / k, 1 / v, "the scales of K and V are left out")
        replay(1 / k, None, "the scale of K is left out")
        replay(None, 1 / v, "the scale of V is left out")
        replay(k, None, "the scale of K is applied twice")
        replay(None, v, "the scale of V is applied twice")
        replay(k, v, "the scales of K and V are applied twice")
        replay(1 / k**2, None, "K is divided by its scale")
        replay(None, 1 / v**2, "V is divided by its scale")
    if k != v:
        replay(v / k, k / v, "the scales of K and V are swapped")
        replay(v / k, None, "K is multiplied with the scale of V")
        replay(None, k / v, "V is multiplied with the scale of K")
    for rule, head in row.other_kv_heads():
        a, b = k_scales[head] / k, v_scales[head] / v
        number_of = " (the query head's number)" if row.head == head else ""
        for which, of_k, of_v in (("the scales", a, b), ("the scale of K", a, None), ("the scale of V", None, b)):
            words = f"KV head {own} is read with {which} of KV head {head}{number_of}"
            replay(of_k, of_v, words, f"{which} of KV head {rule}")
    found[KV_SCALES] += _another_format(row)
    for mistake, predicted in found.items():
        yield from family(mistake, predicted)


def _another_format(row: AttentionRow) -> Iterator[Predicted]:
    """The bytes of the cache taken for numbers of another 8-bit format."""
    if row.kv_scales is None or row.case.kv is None:
        return
    held = getattr(torch, row.case.kv.dtype)
    pairs = list(zip((row.k, row.v), row.kv_scales[:, row.kv_head], strict=True))
    for dtype in (*KV_DTYPES, "float8_e4m3fnuz"):
        if dtype != row.case.kv.dtype:
            k, v = (
                (part / scale).float().to(held).view(getattr(torch, dtype)).double() * scale for part, scale in pairs
            )
            dots = row.case.scale * (k @ row.q)
            if bool(dots.isfinite().all()) and bool(v.isfinite().all()):
                yield Predicted(*row.given(dots, v), f"as {dtype}", f"the cache is read as {dtype}")


_FIRST_TOKENS = (1, 2, 4, 8, 16)
"""That some caches keep beside a window: https://arxiv.org/abs/2309.17453 has four."""
_MOST_COUNTS = 8
"""Splits that may each add a sink."""


def variants(row: AttentionRow) -> Iterator[Family]:
    """Mistakes in what the case asks for beyond plain attention, by the field that they are about."""
    for mistake, what, made in (
        ("window", "the window", _wrong_windows),
        ("soft_cap", "the soft cap", _wrong_caps),
        ("alibi", "ALiBi", _wrong_biases),
        ("sinks", "the sink", _wrong_sinks),
    ):
        if getattr(row.case.variant, mistake) is not None:
            without = row.given(row.scores, case=_with(row.case, **{mistake: None}))
            yield from family(mistake, [Predicted(*without, "left out", f"{what} is left out"), *made(row)])


_BLOCKS_OF_QUERIES = (*range(3, 17), 32, 64, 128)
"""Whose keys are gone through together; of two, the window of a single query would look one key too short."""


def _wrong_windows(row: AttentionRow) -> Iterator[Predicted]:
    window = row.case.variant.window
    if window is None:
        return
    for more, way in ((1, "one key too long"), (-1, "one key too short")):
        if window + more >= 1:
            widened = _with(row.case, window=window + more)
            yield Predicted(*row.given(row.scores, case=widened), way, f"the window is {way}")
    plain, positions = row.final(row.scores, _with(row.case, window=None)), torch.arange(row.num_tokens, device="cpu")
    words = f"the window lies at the first key of the sequence, not at the last (window {window})"
    yield Predicted(*row.averaged(plain.masked_fill(positions >= window, -torch.inf)), "from the first key", words)
    yield from _widened_windows(row, plain, row.num_tokens - window)
    if window < row.num_tokens:
        for unit, size in _sizes_of_units(row).items():
            if window % size:
                widened = _with(row.case, window=-(-window // size) * size)
                words = f"the window is rounded up to a multiple of a {unit}"
                yield Predicted(*row.given(row.scores, case=widened), f"rounded up to a {unit}", words)
    rows = row.case.rows_of(row.seq)
    for which, query in (("last", rows[-1]), ("first", rows[0])):
        first = max(row.num_tokens + query - row.row - window, 0)
        if query != row.row and window < row.num_tokens and first < row.num_tokens:
            scores, way = plain.masked_fill(positions < first, -torch.inf), f"from the {which} query token"
            yield Predicted(*row.averaged(scores), way, f"the window counts {way}, not from each")
    if not has_query_lens(row.case.problem):
        yield from _windows_of_other_sequences(row, plain)
        return
    number, zero = row.row - rows[0], torch.zeros_like(row.expected)
    for block in _BLOCKS_OF_QUERIES:
        for which, off in (("last", block - 1 - number % block), ("first", -(number % block))):
            first = max(row.num_tokens + off - window, 0)
            if off and (first or window < row.num_tokens):
                scores = plain.masked_fill(positions < first, -torch.inf)
                given = row.averaged(scores) if bool(scores.isfinite().any()) else (zero, float(row.sink))
                way = f"from the {which} query of a block of {block}"
                yield Predicted(*given, way, f"the window counts {way}, not from each")


def _windows_of_other_sequences(row: AttentionRow, plain: Float64[Tensor, " seq_len"]) -> Iterator[Predicted]:
    """One offset for the whole batch, say of the longest sequence, in front of which shorter ones may have no key."""
    lengths, window, positions = row.case.seq_lens, row.case.variant.window, torch.arange(row.num_tokens, device="cpu")
    for which, other in (("the longest", lengths.index(max(lengths))), *row.other_seqs()):
        if window is None or lengths[other] == row.num_tokens:
            continue
        seen = plain.masked_fill(positions < lengths[other] - window, -torch.inf)
        given = row.averaged(seen) if bool(seen.isfinite().any()) else (torch.zeros_like(row.expected), float(row.sink))
        words = f"the window counts from the end of sequence {other}, not from that of each"
        yield Predicted(*given, f"from the end of {which} sequence", words, f"{which} sequence")


def _widened_windows(row: AttentionRow, plain: Float64[Tensor, " seq_len"], begins: int) -> Iterator[Predicted]:
    """Widen a window that ``begins`` with some key: from the beginning of a tile on, or with the first keys beside it.

    Where that is all keys, and all take weight, it may as well be left out, and nothing follows.
    """
    positions = torch.arange(row.num_tokens, device="cpu")
    ways = []
    for tile in sorted({*TILES[1:], max(row.case.page_size, 2)}):
        if begins % tile:
            words = f"the window begins with the tile of {tile} in which its first key lies"
            ways.append((f"from a tile of {tile}", words, positions < begins // tile * tile))
    if begins % (page := max(row.case.page_size, 1)):
        words = "the window begins with the page in which its first key lies"
        ways.append(("from a page", words, positions < begins // page * page))
    for count in _FIRST_TOKENS:
        first = f"{count} tokens are" if count > 1 else "token is"
        words = f"the first {first} seen beside the window"
        ways.append((f"and the first {count}", words, (positions < begins) & (positions >= count)))
    for way, words, hidden in ways if begins > 0 else ():
        out, lse = row.averaged(plain.masked_fill(hidden, -torch.inf))
        is_told = bool(hidden.any()) or not row.nearly_got(out)
        yield Predicted(out if is_told else out * math.nan, lse if is_told else math.nan, way, words)


def _wrong_caps(row: AttentionRow) -> Iterator[Predicted]:
    cap = row.case.variant.soft_cap
    if cap is None:
        return
    uncapped = _with(row.case, soft_cap=None)
    ways = [  # between the scores and what the cap is applied to
        ("before the scale", "the soft cap is applied before the scale", 1 / row.case.scale),
        ("in base 2", "the soft cap is applied to scores that are already multiplied by log2(e)", _LOG2_E),
    ]
    if row.kv_scales is not None:
        of_k = float(row.kv_scales[0, row.kv_head])
        ways.append(("before the scale of K", "the soft cap is applied before the scale of K", 1 / of_k))
    for way, words, factor in ways:
        capped = cap * torch.tanh(factor * row.scores / cap) / factor
        yield Predicted(*row.given(capped, case=uncapped), way, words)
    clamped = row.given(row.scores.clamp(-cap, cap), case=uncapped)
    yield Predicted(*clamped, "clamped", "scores are clamped to the soft cap")


def _wrong_biases(row: AttentionRow) -> Iterator[Predicted]:
    case = row.case
    numbers = case.variant.per_head_numbers(case.num_q_heads, case.values.seed)
    if "alibi_slopes" not in numbers:
        return
    slope, position = numbers["alibi_slopes"][row.head], len(row.scores) - 1
    out, lse = row.expected, row.lse
    # FlashAttention 2 does so where it masks causally: a constant of a row, which softmax does not see.
    words = "ALiBi counts from the first key, not from the query"
    yield Predicted(out, float(lse) + slope * position, "from the first key", words)
    if behind := case.rows_of(row.seq)[-1] - row.row:
        words = "ALiBi counts from the last query token, not from each"
        yield Predicted(out, float(lse) - slope * behind, "from the last query token", words)
    distance = torch.arange(-position, 1, dtype=torch.float64, device="cpu")
    for way, words, factor in (
        ("subtracted", "ALiBi is subtracted", -1.0),
        ("times the scale", "ALiBi is multiplied by the scale", case.scale),
        ("divided by the scale", "ALiBi is divided by the scale", 1 / case.scale),
        ("times log2(e)", "ALiBi is multiplied by log2(e)", _LOG2_E),
        ("divided by log2(e)", "ALiBi is not multiplied by log2(e), as the scores are", 1 / _LOG2_E),
    ):
        yield Predicted(*row.given(row.scores + (factor - 1) * slope * distance), way, words)
    yield Predicted(*row.given(row.scores - slope), "one key off", "ALiBi counts one key too many")
    for tile in sorted({*TILES[1:], row.case.page_size} - {0}):
        if tile <= position:  # the query lies behind the first
            within = torch.arange(position + 1, device="cpu") % tile
            for off, of_query in ((0, ""), (position - position % tile, ", and the query, too")):
                if of_query and row.got_lse is None:  # they differ by a constant, which softmax does not see
                    continue
                out, lse = row.given(row.scores + slope * (within - position + off - distance))
                for unit in _units(row, tile):
                    words = f"ALiBi counts each key from the beginning of its {unit.removeprefix('a ')}{of_query}"
                    yield Predicted(out, lse, f"within {unit}{of_query}", words)
    for rule, head in row.other_heads():
        shifted = row.scores + (numbers["alibi_slopes"][head] - slope) * distance
        yield Predicted(*row.given(shifted), rule, f"the slope is that of query head {head}", rule)


def _wrong_sinks(row: AttentionRow) -> Iterator[Predicted]:
    """Another's, scaled, beyond float32, or counted often: with weight p, n times over it adds (n - 1) p in all."""
    case = row.case
    numbers = case.variant.per_head_numbers(case.num_q_heads, case.values.seed)["sinks"]
    for rule, head in row.other_heads():
        if numbers[head] != numbers[row.head]:
            words = f"the sink is that of query head {head}"
            yield Predicted(*row.averaged(row.log_weights, sink=numbers[head]), rule, words, rule)
    if not case.variant.has_weighty_sinks:
        return
    sink = numbers[row.head]
    for way, words, factor in (
        ("times the scale", "the sink is multiplied by the scale", case.scale),
        ("times log2(e)", "the sink is multiplied by log2(e)", _LOG2_E),
        ("divided by log2(e)", "the sink is not multiplied by log2(e), as the scores are", 1 / _LOG2_E),
    ):
        if sink:
            yield Predicted(*row.averaged(row.log_weights, sink=sink * factor), way, words)
    if (cap := case.variant.soft_cap) is not None:
        capped = cap * math.tanh(sink / cap)
        yield Predicted(
            *row.averaged(row.log_weights, sink=capped), "capped", "the soft cap is applied to the sink, too"
        )
    above = sink - float(row.log_weights.max())
    if above > math.log(torch.finfo(torch.float32).max):
        words = "the sink is not in the maximum that is subtracted, and overflows"
        yield Predicted(row.expected, math.inf, "overflows", words)
    of_sink = 1 - float(row.shares.sum())
    for count in range(2, _MOST_COUNTS + 1):
        larger = 1 + (count - 1) * of_sink
        words = f"the sink is counted {count} times"
        yield Predicted(row.expected / larger, row.lse + math.log(larger), f"{count} times", words)
    if row.got_lse is not None and of_sink > _TINY and row.lse < row.got_lse < row.lse + _LARGEST_EXPONENT:
        fitted = 1 + math.expm1(row.got_lse - row.lse) / of_sink
        if round(fitted) > _MOST_COUNTS and math.isclose(fitted, round(fitted), rel_tol=1e-4):
            larger, words = 1 + (fitted - 1) * of_sink, f"the sink is counted {round(fitted)} times"
            yield Predicted(row.expected / larger, row.got_lse, f"{round(fitted)} times", words)
    for unit, count in _units_of(row).items():
        larger = 1 + (count - 1) * of_sink
        words = f"the sink is counted {count} times, once for each {unit}"
        yield Predicted(row.expected / larger, row.lse + math.log(larger), f"once for each {unit}", words)
    if not row.seen:
        return
    for way, token in (("first", row.seen[0]), ("last", row.seen[-1])):
        words = f"the weight of the sink goes to the {way} key, too"
        yield Predicted(row.expected + of_sink * row.v[token], None, f"to the {way} key", words)


def _sizes_of_units(row: AttentionRow) -> dict[str, int]:
    return {f"tile of {tile}": tile for tile in TILES[1:]} | {"page": max(row.case.page_size, 1)}


def _units_of(row: AttentionRow) -> dict[str, int]:
    """How many pages and tiles hold the row's keys, if that is more than one."""
    counts = {unit: -(-row.num_tokens // size) for unit, size in _sizes_of_units(row).items()}
    return {unit: count for unit, count in counts.items() if count > 1}


_FEWEST_BOUNDS = 64.0
"""By which a log-sum-exp must be too large for a number to be told from it."""
_LEAST_EPSILON = 1e-5
_LARGEST_EXPONENT = 100.0
_LIMITS = (10.0, 15.0, 20.0, 30.0, 50.0, 64.0, 80.0, 88.0, 100.0)
"""At which scores may be clipped."""
_FINITE_MASKS = (-1e4, -65504.0, -1e5, -5e4, -1e6, -1e9, -100.0, -1000.0)


def hidden_keys(row: AttentionRow) -> Iterator[Predicted]:
    """Keys that a window, a mask or the causal limit hides, and that take part with a finite score all the same.

    So may places past the last key, up to the end of a tile.
    """
    case = row.case
    yield from _filled_tiles(row)
    end = case.seq_lens[row.seq]
    k, v = (of(row.seq, row.kv_head)[:end] for of in (row.keys_of, row.values_of))
    shown = torch.zeros(end, dtype=torch.bool, device="cpu")
    shown[row.seen] = True
    if bool(shown.all()):
        return
    capped, cap = row.capped(case.scale * (k @ row.q)), case.variant.soft_cap
    own = torch.nn.functional.pad(row.log_weights, (0, end - row.num_tokens), value=-torch.inf)
    for which, count in (("of the sequence", end), ("up to the query", row.num_tokens)):
        hidden = ~shown & (torch.arange(end, device="cpu") < count)
        if not bool(hidden.any()):
            continue
        scores = {("0", f"hidden keys {which} have score 0"): torch.zeros_like(own)}
        if cap is not None:
            words = f"the soft cap is applied after the mask, so that hidden keys {which} weigh exp(-{number(cap)})"
            scores["capped", words] = torch.full_like(own, -cap)
        for score in dict.fromkeys((*_FINITE_MASKS, *_scores_of_hidden(row, hidden, v))):
            told = number(score)
            scores[told, f"hidden keys {which} have the finite score {told}"] = torch.full_like(own, score)
            scores[f"{told} added", f"{told} is added to the scores of hidden keys {which}"] = capped + score
        for (way, words), instead in scores.items():
            given = row.averaged(torch.where(hidden, instead, own), v)
            yield Predicted(*given, f"{way}, {which}", words)


def _scores_of_hidden(
    row: AttentionRow, hidden: Bool[Tensor, " n"], v: Float64[Tensor, "n v_head_size"]
) -> Iterator[float]:
    """The one score with which all hidden keys give what came out, if there is one, as somebody may have written it."""
    if row.case.variant.soft_cap is not None or not row.is_finite:
        return
    towards = v[hidden].mean(0) - row.expected
    share = float((row.got - row.expected) @ towards / (towards @ towards).clamp(min=_TINY))
    if row.got_lse is not None and row.got_lse > row.lse:
        share = -math.expm1(row.lse - row.got_lse)
    if 0 < share < 1:
        score = row.lse + math.log(share / (1 - share)) - math.log(int(hidden.sum()))
        yield from (float(f"{score:.{digits}g}") for digits in (2, 3))


def _filled_tiles(row: AttentionRow) -> Iterator[Predicted]:
    """With the score that their number and the log-sum-exp give, the same in any row; their V is masked to 0.

    Where partial states are the result, one of a part without keys looks like such a place.
    """
    if (
        row.case.partial_states
        or row.got_lse is None
        or not max(row.lse + _FEWEST_BOUNDS * row.lse_bound, LOWEST_EXPONENT) < row.got_lse < math.inf
    ):
        return  # lower numbers stand for -inf: that is the one mistake whose word is `OF_EMPTY_ROWS`
    share = math.exp(row.lse - row.got_lse)
    if not bool(((1 - share) * row.expected.abs() > row.bound).any()):
        return  # some score fits any log-sum-exp, and the output does not say whether it is this
    for tile in TILES:
        if count := -row.num_tokens % tile:
            score = f"{row.got_lse + math.log1p(-share) - math.log(count):.3g}"
            words = (
                f"{count} places past the last key, up to the end of a tile of {tile}, have the finite score {score}"
            )
            yield Predicted(share * row.expected, row.got_lse, f"{score}, tiles of {tile}", words)


_IN_A_BYTE = 8
"""Entries of a mask that is packed to bits."""


def masks(row: AttentionRow) -> Iterator[Predicted]:
    """Replay mistakes with the table of a mask: other keys that a row may see, if any; NaN where nothing follows."""
    case: Any = row.case
    if not case.hides_keys:
        return
    rows, length = case.rows_of(row.seq), case.seq_lens[row.seq]
    count, query = len(rows), row.row - rows.start
    table = [case.rows_seen[i] for i in rows]
    flat = b"".join(table)
    tables = [b"".join(case.rows_seen[i] for i in case.rows_of(seq)) for seq in range(case.num_seqs)]
    begins = sum(map(len, tables[: row.seq]))
    whole, at = b"".join(tables), begins + query * length

    def entries(start: int) -> bytes | None:
        """Entries of a row that begins so far into the mask; poison behind it is true; None where others may lie."""
        beyond = max(0, start + length - len(whole))
        return (whole + b"\1" * beyond)[start : start + length] if beyond <= _POISONED else None

    shorter = f"rows of the mask are taken to be {count} keys long, not {length}"
    wrong: list[tuple[str, str, bytes | None]] = [
        ("not applied", "the mask is not applied", b"\1" * length),
        ("causal", "the mask is taken for a causal one", b"\1" * (length - count + query + 1)),
        (
            "not of the context",
            "the mask is not applied to keys before the first query token's",
            b"\1" * (length - count) + table[query][length - count :],
        ),
        ("transposed", "the mask is read with keys before query tokens", flat[query::count]),
        ("rows of queries", shorter, entries(begins + query * count)),
        ("offset twice", "the table of the mask begins at twice its offset", entries(at + begins)),
        (
            "offset rounded down",
            f"the table of the mask begins at a multiple of {_IN_A_BYTE} entries, as where so many lie in a byte",
            entries(begins // _IN_A_BYTE * _IN_A_BYTE + query * length),
        ),
        (
            "offset of whole bytes",
            f"the table of the mask begins where each one before it takes a multiple of {_IN_A_BYTE} entries",
            entries(sum(-(-len(one) // _IN_A_BYTE) * _IN_A_BYTE for one in tables[: row.seq]) + query * length),
        ),
        ("offset left out", "the table of the mask begins where the first one does", entries(query * length)),
        ("next byte", "the mask is read one entry too far", entries(at + 1)),
        ("inverted", "the mask is inverted", bytes(1 - one for one in table[query])),
    ]
    for way, inverted in (("last", count - 1), ("first", 0)):
        if query == inverted and count > 1:
            others = bytes(1 - one for one in table[query])
            wrong.append((f"{way} row inverted", f"the {way} row of the mask is inverted", others))
    for more, way in ((-1, "the row before"), (1, "the next row")):
        if 0 <= query + more < count:
            wrong.append((way, f"row {query + more} of the mask is read, not row {query}", table[query + more]))
    unmasked = msgspec.structs.replace(case, mask=Mask(kind="full"))
    k, v = row.keys_of(row.seq, row.kv_head), row.values_of(row.seq, row.kv_head)
    own = _ones(table[query])
    for way, words, seen in wrong:
        if seen is None:
            yield Predicted(v.new_full((v.shape[1],), math.nan), math.nan, way, words)
            continue
        keys = _ones(seen)
        if keys == own:
            continue
        if keys:
            which = list(keys)
            yield Predicted(*row.given(case.scale * (k[which] @ row.q), v[which], unmasked), way, words)
        elif case.variant.sinks is None:
            yield Predicted(v.new_zeros(v.shape[1]), -math.inf, way, words)
    if case.variant.sinks is None:
        words = "the query is treated as if it saw no key"
        yield Predicted(v.new_zeros(v.shape[1]), -math.inf, "no key", words)


def _ones(seen: bytes) -> tuple[int, ...]:
    return tuple(t for t, is_seen in enumerate(seen) if is_seen)


def columns(row: AttentionRow) -> Iterator[Family]:
    """Which numbers of a query and a key are multiplied, and how; of keys that are values, which are averaged."""
    yield from family("scored_dims", _multiples_scored(row))
    yield from family("score_columns", _wrong_columns_scored(row))
    size = row.case.value_size
    if not row.case.values_in_keys or len(row.expected) != size:  # to measure its weight, each token has a dimension
        return
    outs = row.given(row.scores, row.k)[0].unfold(0, size, 1)[1:]
    if len(outs):
        ways = [f"from column {i + 1}" for i in range(len(outs))]
        ways[-1] = "the last columns"
        yield Family(
            "value_columns", outs, None, ways, lambda i: f"V is read from columns {i + 1}-{i + size} of the cache"
        )


def _multiples_scored(row: AttentionRow) -> Iterator[Predicted]:
    """Leave out what is left over of whole vectors, if that is not all that no value is read from."""
    size, of_values = row.case.head_size, row.case.value_size if row.case.values_in_keys else 0
    for length in _VECTORS:
        whole = size // length * length
        if 0 < whole < size and whole != of_values:
            words = f"dims {whole}-{size - 1} of q and k are left out of the scores"
            dots = row.case.scale * (row.k[:, :whole] @ row.q[:whole])
            yield Predicted(*row.given(dots), f"multiples of {length}", words)


def _wrong_columns_scored(row: AttentionRow) -> Iterator[Predicted]:
    """Part of the products, or a scale that goes by the size of that part, or is that of one alone."""
    if not row.case.values_in_keys:
        return
    scale, size = row.case.scale, row.case.value_size
    a, b = (scale * (row.k[:, part] @ row.q[part]) for part in (slice(size), slice(size, None)))
    of_v, of_rest = (
        f"columns 0-{size - 1} of the cache, those of V,",
        f"columns {size}-{row.case.head_size - 1} of the cache",
    )
    not_scaled, by_size = "are not multiplied by the scale", f"the scale is 1/sqrt({size}), V's head size"
    for way, words, dots in (
        ("V's alone", f"{of_rest} are left out of the scores", a),
        ("the others alone", f"{of_v} are left out of the scores", b),
        ("V's head size", f"{by_size}, expected {number(scale)}", row.scores / scale / math.sqrt(size)),
        ("the others not scaled", f"products of {of_rest} {not_scaled}", a + b / scale),
        ("V's not scaled", f"products of {of_v} {not_scaled}", a / scale + b),
    ):
        if not torch.allclose(dots, row.scores, rtol=1e-6, atol=0.0):
            yield Predicted(*row.given(dots), way, words)


def _with(case: AttentionCase, **fields: object) -> AttentionCase:
    return msgspec.structs.replace(case, variant=msgspec.structs.replace(case.variant, **fields))
