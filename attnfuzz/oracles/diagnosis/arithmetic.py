"""Mistakes in the formula: scale, normalisation, a constant factor."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnfuzz.judging.words import number
from attnfuzz.oracles.diagnosis.roundings import merged_states
from attnfuzz.oracles.diagnosis.row import AttentionRow, softmax_average
from attnfuzz.oracles.diagnosis.suspect import Suspect

__all__ = ["fitted_scale", "is_written", "lse_formulas", "partial_bases", "rescaled_output", "rescaled_scores"]

_LOG2_E = math.log2(math.e)
_SMALLEST_FACTOR = 1e-9
_SCALES = (0.25, 4.0)
_STEPS = 61
_ZOOMS = 6
_TINY = 1e-30


def rescaled_scores(row: AttentionRow) -> Iterator[Suspect]:
    """Scores multiplied by a wrong constant."""
    scale, size = row.case.scale, row.case.head_size
    padded = 1 << (size - 1).bit_length()
    factors = {
        1 / scale: "the scale is left out",
        scale: "the scale is applied twice",
        1 / math.sqrt(size) / scale: f"the scale is 1/sqrt(head_size), expected {number(scale)}",
        1 / math.sqrt(padded) / scale: f"the scale is 1/sqrt({padded}), expected {number(scale)}",
        _LOG2_E: "the scores are multiplied by log2(e), but not exponentiated in base 2",
        1 / _LOG2_E: "the scores are exponentiated in base 2 without being multiplied by log2(e)",
        0.0: "all tokens have the same weight",
        -1.0: "the scores have the wrong sign",
        2.0: "the scores are doubled",
        0.5: "the scores are halved",
    }
    if row.case.v_head_size is not None:
        of_values = 1 / math.sqrt(row.case.v_head_size) / scale
        factors[of_values] = f"the scale is 1/sqrt({row.case.v_head_size}), V's head size, expected {number(scale)}"
    wrong = {factor: words for factor, words in factors.items() if not math.isclose(factor, 1.0, rel_tol=1e-6)}
    scores = torch.tensor(list(wrong), dtype=torch.float64, device="cpu")[:, None] * row.scores
    out, lse = softmax_average(scores, row.v.expand(len(wrong), *row.v.shape))
    names = list(wrong.values())
    yield Suspect("scale", out, lse, lambda i: names[i])
    yield Suspect("scale", out, None, lambda i: names[i])


def fitted_scale(row: AttentionRow) -> Iterator[Suspect]:
    """Scores multiplied by the constant that explains the row best, if somebody may have written it."""
    factor = _best_scale(row)
    if is_written(factor):
        out, lse = softmax_average(factor * row.scores[None], row.v[None])
        yield Suspect("scale", out, lse, lambda _: f"the scores are {number(factor)} x the right ones", is_fitted=True)


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


def rescaled_output(row: AttentionRow) -> Iterator[Suspect]:
    """A right output times a constant, which is fitted."""
    norm = float(row.expected @ row.expected)
    if not norm or len(row.got) == 1:
        return
    factor = float(row.got @ row.expected) / norm
    total = float(row.weights.sum())
    if abs(factor) <= _SMALLEST_FACTOR:
        return
    out = (factor * row.expected)[None]
    words = _factor_words(factor, total)
    if words is not None:
        yield Suspect("normalisation", out, None, lambda _: words)
    elif is_written(factor):
        yield Suspect(
            "normalisation", out, None, lambda _: f"the output is {number(factor)} x the right one", is_fitted=True
        )


def lse_formulas(row: AttentionRow) -> Iterator[tuple[float, str, str]]:
    """Wrong log-sum-exps, each with its mistake by name and in words."""
    log_total = float(row.weights.sum().log())
    yield row.lse * _LOG2_E, "lse_base2", "lse is in base 2, but the kernel declares natural logarithms"
    yield row.lse / _LOG2_E, "lse_natural", "lse is natural, but the kernel declares base 2"
    yield log_total, "lse_formula", "lse is the logarithm of the sum, without the maximum"
    yield row.top, "lse_formula", "lse is the maximum of the scores alone"
    yield row.top - log_total, "lse_formula", "lse is the maximum minus the logarithm of the sum, not plus it"
    yield row.top + math.exp(log_total), "lse_formula", "lse is the maximum plus the sum itself, not its logarithm"
    yield math.exp(min(row.lse, 700.0)), "lse_formula", "lse is the sum of exp(score) itself, not its logarithm"
    yield (
        float((row.scores / row.case.scale).logsumexp(0)),
        "lse_formula",
        "lse is that of the scores before they are scaled",
    )
    yield row.top * _LOG2_E + log_total, "lse_formula", "lse adds a maximum in base 2 to a natural logarithm of the sum"
    yield row.top / _LOG2_E + log_total, "lse_formula", "lse adds a natural maximum to a logarithm of the sum in base 2"
    yield -math.inf, "treated_as_empty", "the sequence is treated as empty"


def partial_bases(row: AttentionRow) -> Iterator[Suspect]:
    """States whose log-sum-exps have one base, merged as if they had another; into how many parts is fitted."""
    out, lse = _merged_states(row, _LOG2_E)
    words = "partial log-sum-exps in base 2 are merged as natural ones"
    yield Suspect("partial_lse", out, lse, lambda _: words, is_fitted=True)
    out, lse = _merged_states(row, 1 / _LOG2_E)
    others = "natural partial log-sum-exps are merged as in base 2"
    yield Suspect("partial_lse", out, lse * _LOG2_E, lambda _: others, is_fitted=True)


def _merged_states(row: AttentionRow, factor: float) -> tuple[Tensor, Tensor]:
    outs, lses = zip(*merged_states(row, lambda lse: factor * lse), strict=True)
    return torch.stack(outs), torch.stack(lses)


def _factor_words(factor: float, total: float) -> str | None:
    if math.isclose(factor, total, rel_tol=1e-3):
        return f"the output is not divided by the sum of the weights ({number(total)})"
    if math.isclose(factor, 1 / total, rel_tol=1e-3):
        return f"the output is divided twice by the sum of the weights ({number(total)})"
    return None
