"""K and V repeated, so that each query head has its own: the same result, within bounds.

Not bit for bit: kernels that serve several query heads at once multiply matrices where others multiply vectors.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.relations.bounded import too_far_apart
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.transformed import Changed, fits
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.supported import supports_case
from attnfuzz.values import LogicalAttention

__all__ = ["GQA_EXPANSION"]


def _applies(declaration: Declaration, case: Case) -> bool:
    if not isinstance(case, AttentionCase) or case.gqa_ratio == 1 or case.values_in_keys:
        return False
    changed = _expanded(case)
    return supports_case(declaration.supports, declaration.options, changed) and fits(changed)


def _check(trial: Trial) -> Failure | None:
    case = trial.case
    if not isinstance(case, AttentionCase):
        return None
    values: LogicalAttention = trial.reference.values_on(trial.device)
    k, v = (part.repeat_interleave(case.gqa_ratio, dim=1) for part in (values.k, values.v))
    scales = None if values.kv_scales is None else values.kv_scales.repeat_interleave(case.gqa_ratio, dim=1)
    words = f"with K and V repeated for {case.num_q_heads} KV heads instead of {case.num_kv_heads}"
    expanded = replace(values, k=k, v=v, kv_scales=scales)
    return too_far_apart("gqa_expansion", trial, Changed(words, _expanded(case), expanded))


def _expanded(case: Case) -> Case:
    return msgspec.structs.replace(case, num_kv_heads=case.num_q_heads)


GQA_EXPANSION = Relation("gqa_expansion", _applies, _check, by_bounds=True)
