"""From a case to the functions of its problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnfuzz.problems import dense_decode, merge_states, paged_attention, paged_decode, split_decode
from attnfuzz.problems.cases import Case, MergeStatesCase, Problem
from attnfuzz.problems.placement import Placement, placements
from attnfuzz.problems.reference import Expected
from attnfuzz.problems.supports import Supports
from attnfuzz.values.attention import attention_values, attention_values_of_many
from attnfuzz.values.states import LogicalStates, merge_values, merge_values_of_many
from attnfuzz.values.tokens import token_table

__all__ = ["Contents", "ProblemModule", "problem_of"]

Build = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into a case's tensors: the logical values, and where they go (None where that goes without saying)."""

    values: Any
    placement: Placement | None


@dataclass(frozen=True, slots=True)
class ProblemModule:
    """``values(case, device, supports)`` draws the logical values, ``build(case, allocator, supports, values)`` the
    inputs, ``reference(case, values)`` the expected result, and ``logical_result(case, out, lse)`` brings what a kernel
    returned (LSE already natural) into the axes of that result.

    ``build`` in parts, for many cases at once: ``contents(cases, device, supports)`` gives the `Contents` of each,
    ``write(case, tensors, values, placement)`` writes them, ``inputs(case, tensors)`` is what the kernel gets.
    ``results`` names the two output tensors, out first.
    """

    results: tuple[str, str]
    values: Callable[[Any, torch.device | str, Supports], Any]
    build: Build
    reference: Callable[[Any, Any], Expected]
    logical_result: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
    contents: Callable[[Any, torch.device | str, Supports], list[Contents]]
    write: Callable[..., None]
    inputs: Callable[[Any, dict[str, Tensor]], Any]


def problem_of(case: Case) -> ProblemModule:
    """The functions of ``case``'s problem."""
    return _PROBLEMS[case.problem]


def _attention_values(case: Any, device: torch.device | str, supports: Supports) -> Any:
    del supports
    return attention_values(case, device)


def _merge_values(case: MergeStatesCase, device: torch.device | str, supports: Supports) -> LogicalStates:
    return merge_values(case, device, **_convention(supports))


def _attention_contents(cases: Sequence[Any], device: torch.device | str, supports: Supports) -> list[Contents]:
    del supports
    tokens = token_table(cases, device)
    return list(map(Contents, attention_values_of_many(cases, tokens), placements(cases, tokens)))


def _merge_contents(cases: Sequence[MergeStatesCase], device: torch.device | str, supports: Supports) -> list[Contents]:
    values = merge_values_of_many(cases, device, **_convention(supports))
    return [Contents(states, None) for states in values]


def _convention(supports: Supports) -> dict[str, bool]:
    """What a kernel's declaration says of the states it is handed."""
    return {"lse_base2": supports.lse == "base2", "empty_are_zeros": supports.empty_state_outputs == "zeros"}


def _as_is(case: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    del case
    return out.double(), lse.double()


def _merged(case: Any, partial_out: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    del case
    return split_decode.merge_partials(partial_out, partial_lse)


def _tokens_first(case: MergeStatesCase, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out.double(), merge_states.tokens_first(case, lse).double()


_PROBLEMS: dict[Problem, ProblemModule] = {
    "dense_decode": ProblemModule(
        results=("out", "lse"),
        values=_attention_values,
        build=dense_decode.build,
        reference=dense_decode.reference,
        logical_result=_as_is,
        contents=_attention_contents,
        write=dense_decode.write,
        inputs=dense_decode.inputs_of,
    ),
    "paged_decode": ProblemModule(
        results=("out", "lse"),
        values=_attention_values,
        build=paged_decode.build,
        reference=paged_decode.reference,
        logical_result=_as_is,
        contents=_attention_contents,
        write=paged_decode.write,
        inputs=paged_decode.inputs_of,
    ),
    "split_decode": ProblemModule(
        results=("partial_out", "partial_lse"),
        values=_attention_values,
        build=split_decode.build,
        reference=split_decode.reference,
        logical_result=_merged,
        contents=_attention_contents,
        write=paged_decode.write,
        inputs=split_decode.inputs_of,
    ),
    "merge_states": ProblemModule(
        results=("output", "output_lse"),
        values=_merge_values,
        build=merge_states.build,
        reference=merge_states.reference,
        logical_result=_tokens_first,
        contents=_merge_contents,
        write=merge_states.write,
        inputs=merge_states.inputs_of,
    ),
    "paged_attention": ProblemModule(
        results=("out", "lse"),
        values=_attention_values,
        build=paged_attention.build,
        reference=paged_attention.reference,
        logical_result=_as_is,
        contents=_attention_contents,
        write=paged_decode.write,
        inputs=paged_attention.inputs_of,
    ),
}
