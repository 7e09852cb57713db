"""merge_states: two states of the same queries over disjoint keys become the state over all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from attnfuzz.problems.allocation import Allocator, allocate
from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.problems.reference import Expected, merge_all
from attnfuzz.problems.supports import LseLayout, Supports
from attnfuzz.values.states import LogicalStates, merge_values

__all__ = ["MergeStatesInputs", "build", "inputs_of", "reference", "tokens_first", "write"]


@dataclass(slots=True)
class MergeStatesInputs:
    """What a merge_states kernel gets; LSE axes as ``lse_layout`` says.

    A state whose LSE is -inf or +inf is empty: its output rows are dead memory.
    """

    prefix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    prefix_lse: Float32[Tensor, "lse_rows lse_columns"]
    suffix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    suffix_lse: Float32[Tensor, "lse_rows lse_columns"]
    lse_layout: LseLayout
    output: Float[Tensor, "num_tokens num_q_heads head_size"]
    output_lse: Float32[Tensor, "lse_rows lse_columns"]


def build(
    case: MergeStatesCase, allocator: Allocator, supports: Supports, values: LogicalStates | None = None
) -> MergeStatesInputs:
    """Inputs of ``case`` in memory of ``allocator``; ``values`` saves drawing the numbers again.

    ``supports.lse`` only says how a kernel reads the LSE numbers: they are the same for natural and base-2 logarithms.
    """
    values = values or merge_values(case, allocator.device, lse_base2=supports.lse == "base2")
    tensors = allocate(case, allocator)
    write(case, {name: tensor[None] for name, tensor in tensors.items()}, values)
    return inputs_of(case, tensors)


def inputs_of(case: MergeStatesCase, tensors: dict[str, Tensor]) -> MergeStatesInputs:
    """What the kernel gets, of ``tensors`` by the names that ``tensor_specs`` gives them."""
    return MergeStatesInputs(lse_layout=case.lse_layout, **tensors)


def write(case: MergeStatesCase, tensors: dict[str, Tensor], values: LogicalStates, placement: None = None) -> None:
    """Write the live elements to each run's tensors; each tensor has the runs as an additional first dimension."""
    del placement  # a state's place is its row
    _write_live(tensors["prefix_output"], values.prefix_output, values.prefix_live)
    _write_live(tensors["suffix_output"], values.suffix_output, values.suffix_live)
    tokens_first(case, tensors["prefix_lse"]).copy_(values.prefix_lse)
    tokens_first(case, tensors["suffix_lse"]).copy_(values.suffix_lse)


def reference(case: MergeStatesCase, values: LogicalStates) -> Expected:
    """The merged state in float64, axes ``[num_tokens num_q_heads]``; both empty: ``out = 0``, ``lse = -inf``."""
    del case  # everything is in the states
    unit = math.log(2) if values.lse_base2 else 1.0
    lse = torch.stack((values.prefix_lse, values.suffix_lse), dim=-1).double() * unit
    out = torch.stack((values.prefix_output, values.suffix_output), dim=-2)
    return Expected(*merge_all(out, torch.where(lse == float("inf"), float("-inf"), lse)))


def tokens_first(case: MergeStatesCase, lse: Float[Tensor, "..."]) -> Float[Tensor, "*runs num_tokens num_q_heads"]:
    """A view of an LSE tensor of ``case`` with axes (token, head), whatever its layout."""
    return lse if case.lse_layout == "TH" else lse.mT


def _write_live(
    target: Float[Tensor, "runs num_tokens num_q_heads head_size"],
    source: Float[Tensor, "num_tokens num_q_heads head_size"],
    live: Bool[Tensor, "num_tokens num_q_heads"],
) -> None:
    target.copy_(torch.where(live[..., None], source, target))
