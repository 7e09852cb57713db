"""Proposals for cases of merge_states. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.edits import changed
from attnfuzz.cases.search import Proposal, first_of, lower_integer
from attnfuzz.problems.cases import LsePair, MergeStatesCase
from attnfuzz.problems.choices import lse_kinds_of

__all__ = ["lower_pairs", "lower_states", "single_pair"]


def single_pair(case: MergeStatesCase, domain: Domain) -> Proposal[MergeStatesCase]:
    """One token and one head, with each kind of pair in turn."""
    if case.num_tokens * case.num_q_heads == 1:
        return case
    pairs = dict.fromkeys(case.lse_pairs)
    return (yield from first_of(case, [changed(case, num_tokens=1, num_q_heads=1, lse_pairs=(p,)) for p in pairs]))


def lower_states(case: MergeStatesCase, domain: Domain) -> Proposal[MergeStatesCase]:
    case = yield from lower_integer(case, case.num_tokens, 1, lambda case, count: changed(case, num_tokens=count))
    case = yield from lower_integer(case, case.num_q_heads, 1, lambda case, count: changed(case, num_q_heads=count))
    case = yield from first_of(case, [changed(case, outputs="normal")])
    return (yield from first_of(case, [changed(case, seed=0)]))


def lower_pairs(case: MergeStatesCase, domain: Domain) -> Proposal[MergeStatesCase]:
    """Fewer pairs, then simpler kinds on each side."""
    for i in range(len(case.lse_pairs) - 1, -1, -1):
        case = yield from first_of(case, [_with_pairs(case, [*case.lse_pairs[:i], *case.lse_pairs[i + 1 :]])])
    kinds = lse_kinds_of(domain.supports)
    for i in range(len(case.lse_pairs)):
        _, suffix = case.lse_pairs[i]
        case = yield from first_of(case, [_with_pair(case, i, (kind, suffix)) for kind in kinds])
        prefix, _ = case.lse_pairs[i]
        case = yield from first_of(case, [_with_pair(case, i, (prefix, kind)) for kind in kinds])
    return case


def _with_pair(case: MergeStatesCase, i: int, pair: LsePair) -> MergeStatesCase | None:
    return _with_pairs(case, [*case.lse_pairs[:i], pair, *case.lse_pairs[i + 1 :]])


def _with_pairs(case: MergeStatesCase, pairs: Sequence[LsePair]) -> MergeStatesCase | None:
    return changed(case, lse_pairs=tuple(pairs))
