"""Proposals that trade other numbers for fewer rows. Torch-free.

What a row holds depends on its place. Where a failure depends on the numbers, the row that fails may not be the first,
and would stop failing in its place: then the rows before it stay for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.edits import changed, keep_sequences, with_heads
from attnfuzz.cases.search import Proposal, first_of
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.choices import gqa_ratios_of
from attnfuzz.problems.recipes import MAX_LOGIT_EXPONENT, Values

__all__ = ["renumber"]

_SEEDS = 5
_LOUDER = (0, 1, 2)


def renumber(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    """One sequence and one head with other seeds and larger scores, where the numbers matter at all."""
    if case.values == Values():
        return case
    if case.num_seqs > 1:
        case = yield from first_of(case, _renumbered(keep_sequences(case, [case.num_seqs - 1])))
    if case.num_kv_heads > 1:
        case = yield from first_of(case, _renumbered(with_heads(case, 1, case.gqa_ratio)))
    if case.gqa_ratio > 1:
        simplest = gqa_ratios_of(domain.supports)[0]
        case = yield from first_of(case, _renumbered(with_heads(case, case.num_kv_heads, simplest)))
    return case


def _renumbered(case: AttentionCase | None) -> Iterator[AttentionCase | None]:
    if case is None:
        return
    for louder in _LOUDER:
        exponent = min(case.values.logit_exponent + louder, MAX_LOGIT_EXPONENT)
        for seed in range(_SEEDS):
            values = msgspec.structs.replace(case.values, seed=seed, logit_exponent=exponent)
            yield changed(case, values=values)
