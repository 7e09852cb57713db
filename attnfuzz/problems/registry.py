"""From a case to the functions of its problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnfuzz.problems import dense_decode, merge_states, paged_decode, split_decode
from attnfuzz.problems.cases import Case, MergeStatesCase, Problem
from attnfuzz.problems.reference import Expected
from attnfuzz.problems.supports import Supports
from attnfuzz.values.attention import attention_values
from attnfuzz.values.states import LogicalStates, merge_values

__all__ = ["ProblemModule", "problem_of"]

Build = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ProblemModule:
    """``values(case, device, supports)`` draws the logical values, ``build(case, allocator, supports, values)`` the
    inputs, ``reference(case, values)`` the expected result, and ``logical_result(case, out, lse)`` brings what a kernel
    returned (LSE already natural) into the axes of that result.

    ``results`` names the two output tensors, out first.
    """

    results: tuple[str, str]
    values: Callable[[Any, torch.device | str, Supports], Any]
    build: Build
    reference: Callable[[Any, Any], Expected]
    logical_result: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


def problem_of(case: Case) -> ProblemModule:
    """The functions of ``case``'s problem."""
    return _PROBLEMS[case.problem]


def _attention_values(case: Any, device: torch.device | str, supports: Supports) -> Any:
    del supports
    return attention_values(case, device)


def _merge_values(case: MergeStatesCase, device: torch.device | str, supports: Supports) -> LogicalStates:
    return merge_values(case, device, lse_base2=supports.lse == "base2")


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
        ("out", "lse"), _attention_values, dense_decode.build, dense_decode.reference, _as_is
    ),
    "paged_decode": ProblemModule(
        ("out", "lse"), _attention_values, paged_decode.build, paged_decode.reference, _as_is
    ),
    "split_decode": ProblemModule(
        ("partial_out", "partial_lse"), _attention_values, split_decode.build, split_decode.reference, _merged
    ),
    "merge_states": ProblemModule(
        ("output", "output_lse"), _merge_values, merge_states.build, merge_states.reference, _tokens_first
    ),
}
