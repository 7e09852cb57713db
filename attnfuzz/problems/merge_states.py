"""merge_states: two states of the same queries over disjoint keys become the state over all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.problems.reference import ExactResult, merge_all
from attnfuzz.problems.supports import LseLayout
from attnfuzz.values.states import LogicalStates

__all__ = ["MergeStatesInputs", "inputs_of", "reference", "tokens_first", "write"]


@dataclass(slots=True)
class MergeStatesInputs:
    """What a merge_states kernel gets; LSE axes as ``lse_layout`` says.

    A state whose LSE is -inf or +inf is empty: its output rows are zeros, or dead memory where the kernel declares
    ``Supports(empty_state_outputs="anything")``.
    """

    prefix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    prefix_lse: Float32[Tensor, "lse_rows lse_columns"]
    suffix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    suffix_lse: Float32[Tensor, "lse_rows lse_columns"]
    lse_layout: LseLayout
    output: Float[Tensor, "num_tokens num_q_heads head_size"]
    output_lse: Float32[Tensor, "lse_rows lse_columns"]


def inputs_of(case: MergeStatesCase, tensors: dict[str, Tensor]) -> MergeStatesInputs:
    """What the kernel gets, of ``tensors`` by the names that ``tensor_specs`` gives them."""
    return MergeStatesInputs(lse_layout=case.lse_layout, **tensors)


def write(case: MergeStatesCase, tensors: dict[str, Tensor], values: LogicalStates, placement: None = None) -> None:
    """Write the elements that are not dead to each run's tensors, which have the runs as an additional dimension."""
    del placement  # a state's place is its row
    for name, source, live in (
        ("prefix_output", values.prefix_output, values.prefix_live),
        ("suffix_output", values.suffix_output, values.suffix_live),
    ):
        target = tensors[name]
        empty = torch.zeros_like(source) if values.empty_are_zeros else target
        target.copy_(torch.where(live[..., None], source, empty))
    tokens_first(case, tensors["prefix_lse"]).copy_(values.prefix_lse)
    tokens_first(case, tensors["suffix_lse"]).copy_(values.suffix_lse)


def reference(case: MergeStatesCase, values: LogicalStates) -> ExactResult:
    """The merged state in float64, axes ``[num_tokens num_q_heads]``; both empty: ``out = 0``, ``lse = -inf``."""
    del case  # everything is in the states
    unit = math.log(2) if values.lse_base2 else 1.0
    lse = torch.stack((values.prefix_lse, values.suffix_lse), dim=-1).double() * unit
    out = torch.stack((values.prefix_output, values.suffix_output), dim=-2)
    return ExactResult(*merge_all(out, torch.where(lse == float("inf"), float("-inf"), lse)))


def tokens_first(case: MergeStatesCase, lse: Float[Tensor, "..."]) -> Float[Tensor, "*runs num_tokens num_q_heads"]:
    """A view of an LSE tensor of ``case`` with axes (token, head), whatever its layout."""
    return lse if case.lse_layout == "TH" else lse.mT
