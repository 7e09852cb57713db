"""Attention over the first and over the last tokens of each sequence, merged by their LSEs: the same result.

Both runs are merged in float64, with weights `w = exp(lse - lse_merged)`. If their LSEs are off by `d` and `e`, the
weights are off by at most `w_first w_last expm1(d + e)`, since the logarithm of their ratio is off by `d + e`. So the
merged output is off by at most

    w_first b_first + w_last b_last + w_first w_last expm1(d + e) |o_first - o_last|

with the bounds `b` of both outputs, and the merged LSE by `max(d, e)`. An LSE to another base or in another layout than
declared gives other weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import torch

from attnfuzz.declaration import Declaration
from attnfuzz.judging.comparison import Comparison
from attnfuzz.judging.trial import Trial
from attnfuzz.oracles.relations.bounded import Parts, beyond, compared
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.transformed import Changed, run_on
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import AttentionCase, Case, PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.variants import PLAIN_VARIANT
from attnfuzz.values import LogicalAttention

__all__ = ["COMPOSE"]


def _applies(declaration: Declaration, case: Case) -> bool:
    """Not with variants: where a key stands in its sequence, and a sink, count once for the whole of it."""
    if not isinstance(case, AttentionCase) or declaration.supports.lse == "none" or case.variant != PLAIN_VARIANT:
        return False
    if isinstance(case, PagedAttentionCase):  # the query tokens of one sequence would have to be cut differently
        return False
    shortest = 0 if declaration.supports.empty_sequences else 2
    return max(case.seq_lens) > 1 and min(case.seq_lens) >= shortest


def _check(trial: Trial) -> Failure | None:
    values: LogicalAttention = trial.reference.values_on(trial.device)
    first, last = (_part(trial, values, side) for side in range(2))
    if "lse" not in first:
        return None
    words = "merged from runs on the first and the last half of its tokens"
    return beyond("compose", trial, _merged(first, last), words)


def _part(trial: Trial, values: LogicalAttention, side: int) -> Parts:
    """The run on one half of each sequence, the first of which may be shorter."""
    case: Any = trial.case
    cuts = [(0, n // 2) if side == 0 else (n // 2, n) for n in case.seq_lens]
    changes: dict[str, Any] = {
        "seq_lens": tuple(end - start for start, end in cuts),
        "values": msgspec.structs.replace(case.values, needles=()),
    }
    if isinstance(case, PagedDecodeCase):
        changes["pages"] = msgspec.structs.replace(case.pages, shared_blocks=0)
    pieces = [
        (k[start:end], v[start:end])
        for (start, end), (k, v) in zip(cuts, map(values.sequence, range(case.num_seqs)), strict=True)
    ]
    k, v = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    starts = tuple(sum(changes["seq_lens"][:i]) for i in range(case.num_seqs + 1))
    words = f"on the {('first', 'last')[side]} half of its tokens"
    changed = Changed(words, msgspec.structs.replace(case, **changes), replace(values, k=k, v=v, starts=starts))
    return compared(trial, changed, run_on(trial, changed))


def _merged(first: Parts, last: Parts) -> Parts:
    lse = torch.stack((first["lse"].got, last["lse"].got)).double()
    out = torch.stack((first["out"].got, last["out"].got)).double()
    bound = torch.stack((first["out"].bound, last["out"].bound))
    lse_bound = torch.stack((first["lse"].bound, last["lse"].bound))
    weights = lse.softmax(0).nan_to_num(0.0).unsqueeze(-1)  # NaN where both are empty
    spread = weights.prod(0) * lse_bound.sum(0).expm1().unsqueeze(-1) * (out[0] - out[1]).abs()
    merged_out, merged_lse = (weights * out).sum(0), lse.logsumexp(0)
    return {
        "out": _comparison(first["out"], merged_out, (weights * bound).sum(0) + spread),
        "lse": _comparison(first["lse"], merged_lse, lse_bound.amax(0)),
    }


def _comparison(like: Comparison, got: torch.Tensor, bound: torch.Tensor) -> Comparison:
    return Comparison(like.name, like.axes, got, got, bound)


COMPOSE = Relation("compose", _applies, _check, by_bounds=True)
