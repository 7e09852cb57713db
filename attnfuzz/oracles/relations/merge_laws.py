"""Laws of merging two states.

*Empty is neutral*, bit for bit: beside an empty state the other one has the weight exp(0) = 1 and the sum of weights is
1, both exact, and so is what they are multiplied with and divided by, however the weights are written (exp of a
difference, or 1 / (1 + exp of one)). The output is that of the state which holds tokens. What this sees: an epsilon in
the denominator, an empty state that counts a little (-1e4 in place of -inf), an output that takes the way through a
shorter dtype. The LSE may be converted to base 2 and back, which rounds.

That merging commutes, associates, and that merge(x, x) adds ln 2, holds within rounding: a fused multiply-add rounds
one product and not the other, and weights such as exp(lse_x - lse) round ln 2. Accuracy holds all of these results
against float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import Contents
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.relation import (
    Changed,
    FurtherRuns,
    Relation,
    Results,
    one_by_one,
    unequal_bits,
    where_bits_differ,
)
from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.problems.choices import lse_kinds_of
from attnfuzz.values import LogicalStates
from attnfuzz.verdict import Failure


def _applies(declaration: Declaration, _: MergeStatesCase) -> bool:
    return "-inf" in lse_kinds_of(declaration.supports)


def _further(_: Declaration, case: MergeStatesCase, contents: Contents) -> FurtherRuns:
    values: LogicalStates = contents.values
    keeps_prefix = _keeps_prefix(values)
    empty = torch.tensor(float("-inf"), dtype=torch.float32, device=values.prefix_lse.device)
    changed = Changed(
        "merged with an empty state",
        case,
        replace(
            values,
            prefix_lse=torch.where(keeps_prefix, values.prefix_lse, empty),
            suffix_lse=torch.where(keeps_prefix, empty, values.suffix_lse),
        ),
    )

    def compare(as_it_is: Results, others: Sequence[Results]) -> Failure | None:
        name = next(iter(as_it_is))
        kept = torch.where(keeps_prefix.unsqueeze(-1), values.prefix_output, values.suffix_output).cpu()
        holds_tokens = (values.prefix_live | values.suffix_live).unsqueeze(-1).cpu()
        one, other = {name: kept}, {name: others[0][name]}
        return unequal_bits(
            registry.MERGE_LAWS,
            case,
            one,
            other,
            changed.words,
            masks={name: where_bits_differ(one, other)[name] & holds_tokens},
            as_it_was="in the state that holds tokens",
            details=("an empty state is neutral: the other one has the weight 1, which is exact",),
        )

    return FurtherRuns([changed], compare)


def _keeps_prefix(values: LogicalStates) -> Bool[Tensor, "num_tokens num_q_heads"]:
    """Whether the prefix stays, for each pair: by turns the one and the other, where both hold tokens."""
    prefix, suffix = values.prefix_live, values.suffix_live
    token = torch.arange(prefix.shape[0], device=prefix.device)[:, None]
    head = torch.arange(prefix.shape[1], device=prefix.device)
    return prefix & (~suffix | ((token + head) % 2 == 0))


MERGE_LAWS = Relation(registry.MERGE_LAWS, _applies, one_by_one(_further), further=_further, cases=MergeStatesCase)
