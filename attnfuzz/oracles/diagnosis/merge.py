"""Wrong merges of two states."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnfuzz.judging.comparison import Comparison, Reference
from attnfuzz.oracles.diagnosis.suspect import Diagnosis
from attnfuzz.values import LogicalStates

__all__ = ["explain_merge", "lse_mistakes", "output_mistakes"]


def explain_merge(reference: Reference, failed: Comparison, index: tuple[int, ...]) -> Diagnosis | None:
    """What the row of the wrong element points to."""
    token, head = index[:2]
    states = reference.values
    sides = {"prefix": float(states.prefix_lse[token, head]), "suffix": float(states.suffix_lse[token, head])}
    empty = [f"{name} (lse = {lse:+})" for name, lse in sides.items() if math.isinf(lse)]
    if len(empty) == 2:
        return Diagnosis(f"both sides are empty, {' and '.join(empty)}: expected 0 and -inf")
    mistake = _mistake(states, failed, token, head)
    if empty:
        found = Diagnosis(f"the {empty[0]} is empty, so the result is the other side")
        return found if mistake is None else replace(mistake, words=f"{found.words}; {mistake.words}")
    return mistake


def _mistake(states: LogicalStates, failed: Comparison, token: int, head: int) -> Diagnosis | None:
    got, bound = failed.got[token, head].double(), failed.bound[token, head]
    expected = failed.expected[token, head].double()
    if not bool(got.isfinite().all()):
        return None
    mistakes = lse_mistakes(states, token, head) if failed.name == "lse" else output_mistakes(states, token, head)
    for predicted, words in mistakes:
        missed = (got - predicted).abs()
        close = missed <= 8 * bound + 1e-6 * predicted.abs()
        explains = float(missed.max()) <= 0.25 * float((got - expected).abs().max())
        if explains and bool((predicted.isfinite() & close).all()):
            return Diagnosis(words, "merge")
    return None


def _parts(states: LogicalStates, token: int, head: int) -> tuple[Tensor, Tensor, float, float]:
    """Outputs and natural log-sum-exps of both sides; -inf for an empty one."""
    unit = math.log(2) if states.lse_base2 else 1.0
    lse_a, lse_b = (float(lse[token, head]) * unit for lse in (states.prefix_lse, states.suffix_lse))
    a, b = (output[token, head].double() for output in (states.prefix_output, states.suffix_output))
    return a, b, -math.inf if lse_a == math.inf else lse_a, -math.inf if lse_b == math.inf else lse_b


def output_mistakes(states: LogicalStates, token: int, head: int) -> Iterator[tuple[Tensor, str]]:
    """Wrong outputs of one row, each with its mistake."""
    a, b, lse_a, lse_b = _parts(states, token, head)
    yield a, "the output is the prefix alone"
    yield b, "the output is the suffix alone"
    yield torch.zeros_like(a), "the output is 0"
    difference = lse_a - lse_b
    if not math.isfinite(difference):
        return
    for factor, words in (
        (-1.0, "the weights of prefix and suffix are exchanged"),
        (0.0, "prefix and suffix have equal weights"),
        (math.log(2), "the weights are powers of 2 of natural log-sum-exps"),
        (1 / math.log(2), "the weights are exponentials of base-2 log-sum-exps"),
    ):
        weight = 1 / (1 + math.exp(min(-factor * difference, 700.0)))
        yield weight * a + (1 - weight) * b, words
    weight = 1 / (1 + math.exp(min(-difference, 700.0)))
    top = max(lse_a, lse_b)
    total = math.exp(lse_a - top) + math.exp(lse_b - top)
    yield total * (weight * a + (1 - weight) * b), f"the output is not divided by the sum of the weights ({total:.4g})"


def lse_mistakes(states: LogicalStates, token: int, head: int) -> Iterator[tuple[Tensor, str]]:
    """Wrong log-sum-exps of one row, each with its mistake."""
    _, _, lse_a, lse_b = _parts(states, token, head)
    a, b = torch.tensor([lse_a, lse_b], dtype=torch.float64, device="cpu")
    top = torch.maximum(a, b)
    if bool(top.isfinite()):
        right = torch.logaddexp(a, b)
        yield right / math.log(2), "lse is in base 2, but the kernel declares natural logarithms"
        yield right * math.log(2), "lse is natural, but the kernel declares base 2"
        yield right - top, "lse is the logarithm of the sum, without the maximum"
    yield top, "lse is the larger of the two, not their sum"
    yield a, "lse is that of the prefix alone"
    yield b, "lse is that of the suffix alone"
    yield a + b, "the log-sum-exps are added"
