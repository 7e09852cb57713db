"""Mistakes in what a case asks for beyond plain attention: a variant left out, a window off by one, another head's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.oracles.diagnosis.row import AttentionRow
from attnfuzz.oracles.diagnosis.suspect import Suspect
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.reference import row_log_weights, row_weights

__all__ = ["variant_mistakes"]

_LEFT_OUT = {
    "window": "the window is left out",
    "soft_cap": "the soft cap is left out",
    "alibi": "ALiBi is left out",
    "sinks": "the sink is left out",
}

_MOST_COUNTS = 8
"""Splits that may each add a sink."""

Outcome = tuple[Float64[Tensor, " v_head_size"], float, str]


def variant_mistakes(row: AttentionRow) -> Iterator[Suspect]:
    """All mistakes as one family, since there are few; nothing for a plain case."""
    found = [*_left_out(row), *_other_windows(row), *_of_other_heads(row), *_other_formulas(row)]
    if found:
        outs, lses, words = zip(*found, strict=True)
        yield Suspect(
            "variant", torch.stack(outs), torch.tensor(lses, dtype=torch.float64, device="cpu"), lambda i: words[i]
        )


def _left_out(row: AttentionRow) -> Iterator[Outcome]:
    for name in row.case.variant.names:
        yield _outcome(row, _LEFT_OUT[name], case=_with(row.case, **{name: None}))
        if name == "sinks":
            out, _, _ = _outcome(row, "")
            _, lse, _ = _outcome(row, "", case=_with(row.case, sinks=None))
            yield out, lse, "the LSE leaves out the sink"


def _other_windows(row: AttentionRow) -> Iterator[Outcome]:
    window = row.case.variant.window
    if window is None:
        return
    yield _outcome(row, "the window is one key too long", case=_with(row.case, window=window + 1))
    if window > 1:
        yield _outcome(row, "the window is one key too short", case=_with(row.case, window=window - 1))


def _of_other_heads(row: AttentionRow) -> Iterator[Outcome]:
    names = [name for name in ("alibi", "sinks") if getattr(row.case.variant, name) is not None]
    what = {"alibi": "slope", "sinks": "sink"}
    for head in range(row.case.num_q_heads) if names else ():
        if head != row.head:
            whose = f"query head {head}" + (" (the KV head's number)" if head == row.kv_head else "")
            yield _outcome(row, f"the {' and '.join(what[name] for name in names)} is that of {whose}", head=head)


def _other_formulas(row: AttentionRow) -> Iterator[Outcome]:
    cap = row.case.variant.soft_cap
    if cap is not None:
        before_scale = row.case.scale * cap * torch.tanh(row.scores / row.case.scale / cap)
        uncapped = _with(row.case, soft_cap=None)
        yield _outcome(row, "the soft cap is applied before the scale", case=uncapped, dots=before_scale)
    numbers = row.case.variant.per_head_numbers(row.case.num_q_heads, row.case.values.seed)
    if row.case.variant.has_weighty_sinks:
        yield from _wrong_sinks(row, numbers["sinks"][row.head])
    if "alibi_slopes" in numbers:
        distance = torch.arange(1 - len(row.scores), 1, dtype=torch.float64, device="cpu")
        twice = 2 * numbers["alibi_slopes"][row.head] * distance
        yield _outcome(row, "ALiBi is subtracted", dots=row.scores - twice)


def _wrong_sinks(row: AttentionRow, sink: float) -> Iterator[Outcome]:
    """Beyond float32, or counted often: with weight p, n times over it adds (n - 1) p to the denominator."""
    weights, lse = row_weights(row.case, row.head, row.scores)
    above = sink - float(row_log_weights(row.case, row.head, row.scores)[0].max())
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
) -> Outcome:
    dots = row.scores if dots is None else dots
    weights, lse = row_weights(case or row.case, row.head if head is None else head, dots)
    return weights @ row.v, float(lse), words
