"""From a case to the functions of its problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnfuzz.inputs import open_module, writing
from attnfuzz.inputs.allocation import Allocator, PlainAllocator, allocate
from attnfuzz.inputs.kernel_inputs import inputs_of
from attnfuzz.inputs.layouts import tokens_first
from attnfuzz.inputs.open_module import Target
from attnfuzz.inputs.reference import ExactResult, attention_reference, merge_all, merge_reference
from attnfuzz.inputs.writing import Placement, placements
from attnfuzz.problems import wording
from attnfuzz.problems.cases import AttentionCase, BundledProblem, Case, MergeStatesCase, VarlenCase
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.supports import Supports
from attnfuzz.values.attention import attention_values, attention_values_of_many
from attnfuzz.values.states import LogicalStates, merge_values, merge_values_of_many
from attnfuzz.values.tokens import token_table

__all__ = ["Contents", "ProblemModule", "problem_of"]


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into a case's tensors: the logical values, and where they go (None where that goes without saying)."""

    values: Any
    placement: Placement | None


@dataclass(frozen=True, slots=True)
class ProblemModule:
    """``values(case, device, supports)`` draws the logical values, ``reference(case, values)`` is the expected result,
    and ``logical_result(case, out, lse)`` brings what a kernel returned (LSE already natural) into its axes.

    ``placements(cases, device)`` says where the values of each go, ``write(case, tensors, values, placement)`` writes
    them, and ``inputs(case, tensors)`` is what the kernel gets. ``contents(cases, device, supports)``
    gives the `Contents` of each. ``results`` names the two output tensors, out first.

    ``returned_names(case, supports)``: what a kernel may return, in this order, or write into its inputs;
    ``changed_names(case)``: the inputs that it changes in place, and ``held_before(case, values)`` what they hold until
    then. ``owned(case, results)`` leaves out of the results what nobody looks at. ``axes(case, name)`` names the
    dimensions of a result.

    In words: ``where_is(case, name, index)`` says what an element is, ``dead_words(case, supports, row)`` which memory
    must not matter to a row, and ``length_words(case, row)`` how much there is to it. ``seqs_of(case, row)``: the
    sequences that a row belongs to; None where results have no rows with heads.

    ``targets(values, tolerance)``: what the results are to hold, where the problem says that itself; None for
    attention, whose bounds are derived (`attnfuzz.trials.expectations`). ``in_parts``: whether there are `contents`,
    so that many cases can be built and judged at once.
    """

    results: tuple[str, ...]
    values: Callable[[Any, torch.device | str, Supports], Any]
    reference: Callable[[Any, Any], ExactResult]
    logical_result: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
    contents: Callable[[Any, torch.device | str, Supports], list[Contents]]
    write: Callable[..., None]
    inputs: Callable[[Any, dict[str, Tensor]], Any]
    axes: Callable[[Any, str], tuple[str, ...]]
    dead_words: Callable[[Any, Supports, int], list[str]]
    placements: Callable[[Any, torch.device | str], Sequence[Placement | None]] = lambda cases, device: (
        [None] * len(cases)
    )
    owned: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]] = lambda case, results: results
    changed_names: Callable[[Any], tuple[str, ...]] = lambda case: ()
    held_before: Callable[[Any, Any], Mapping[str, Tensor]] = lambda case, values: {}
    where_is: Callable[[Any, str, tuple[int, ...]], str] = lambda case, name, index: ""
    length_words: Callable[[Any, int], list[str]] = lambda case, row: []
    seqs_of: Callable[[Any, int], tuple[int, ...]] | None = None
    targets: Callable[[Any, Tolerance], list[Target]] | None = None
    in_parts: bool = True

    def returned_names(self, case: Any, supports: Supports) -> tuple[str, ...]:
        """Both results, or the output alone of a kernel that declares no LSE."""
        del case
        return self.results if supports.lse != "none" else self.results[:1]

    def build(self, case: Any, allocator: Allocator, supports: Supports, values: Any = None) -> Any:
        """Inputs of ``case`` in memory of ``allocator``; ``values`` saves drawing the numbers again."""
        device = allocator.device
        tensors = allocate(case, allocator)
        one_run = {name: tensor[None] for name, tensor in tensors.items()}
        self.write(case, one_run, values or self.values(case, device, supports), *self.placements([case], device))
        return self.inputs(case, tensors)

    def filled(self, case: Any, supports: Supports) -> dict[str, Tensor]:
        """All tensors of ``case`` on the host, by name, with what a kernel may read; dead elements are NaN, or -1."""
        (contents,) = self.contents([case], "cpu", supports)
        tensors = allocate(case, PlainAllocator("cpu"))
        one_run = {name: tensor[None] for name, tensor in tensors.items()}
        self.write(case, one_run, contents.values, contents.placement)
        return tensors


class _OpenModule(ProblemModule):
    """A user's problem writes its inputs itself."""

    def returned_names(self, case: Any, supports: Supports) -> tuple[str, ...]:
        del supports
        return open_module.returned_names(case)

    def build(self, case: Any, allocator: Allocator, supports: Supports, values: Any = None) -> Any:
        return open_module.build(case, allocator, values or self.values(case, allocator.device, supports))

    def filled(self, case: Any, supports: Supports) -> dict[str, Tensor]:
        del supports
        return open_module.filled(case)


def problem_of(case: Case) -> ProblemModule:
    """The functions of ``case``'s problem."""
    return _OPEN if isinstance(case, OpenCase) else _PROBLEMS[case.problem]


def _attention_values(case: Any, device: torch.device | str, supports: Supports) -> Any:
    del supports
    return attention_values(case, device)


def _merge_values(case: MergeStatesCase, device: torch.device | str, supports: Supports) -> LogicalStates:
    return merge_values(case, device, **_convention(supports))


def _attention_placements(cases: Sequence[AttentionCase], device: torch.device | str) -> list[Placement]:
    return placements(cases, token_table(cases, device))


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
    return merge_all(partial_out, partial_lse)


def _tokens_first(case: MergeStatesCase, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out.double(), tokens_first(lse, case.lse_layout).double()


def _without_padding(case: VarlenCase, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the rows of padding tokens, in which a kernel may leave anything."""
    return {name: result[: case.num_rows] for name, result in results.items()} if case.padding_tokens else results


def _axes(*axes: str) -> Callable[[Any, str], tuple[str, ...]]:
    return lambda case, name: axes if name.endswith("lse") else (*axes, "dim")


def _merge_axes(case: MergeStatesCase, name: str) -> tuple[str, ...]:
    if name == "output_lse":
        return ("head", "token") if case.lse_layout == "HT" else ("token", "head")
    return ("token", "head") if name.endswith("lse") else ("token", "head", "dim")


def _split_axes(case: Any, name: str) -> tuple[str, ...]:
    """Of the partial states, or of what they are merged to."""
    del case
    axes = ("seq", "head", "split") if name.startswith("partial") else ("seq", "head")
    return axes if name.endswith("lse") else (*axes, "dim")


def _own_seq(case: AttentionCase, row: int) -> tuple[int, ...]:
    return (case.row_seqs[row],)


def _no_seq(case: Any, row: int) -> tuple[int, ...]:
    del case, row
    return ()


def _not_in_parts(*arguments: Any) -> Any:
    raise TypeError(f"inputs of an open problem are built one case at a time, not from {arguments!r:.80}")


_OPEN = _OpenModule(
    results=(),
    values=open_module.values,
    reference=_not_in_parts,
    logical_result=_not_in_parts,
    contents=_not_in_parts,
    write=_not_in_parts,
    inputs=open_module.inputs,
    changed_names=open_module.changed_names,
    held_before=open_module.held_before,
    owned=open_module.owned,
    axes=open_module.axes,
    dead_words=open_module.dead_words,
    where_is=open_module.where_is,
    targets=lambda values, tolerance: values.targets(tolerance),
    in_parts=False,
)

_attention = partial(
    ProblemModule,
    results=("out", "lse"),
    values=_attention_values,
    reference=attention_reference,
    logical_result=_as_is,
    contents=_attention_contents,
    placements=_attention_placements,
    write=writing.write_pages,
    inputs=inputs_of,
    axes=_axes("seq", "head"),
    dead_words=wording.dead_pages,
    length_words=wording.length_of_row,
    seqs_of=_own_seq,
)
"""Attention over a paged cache, one query a sequence: other problems say in what they differ."""

_PROBLEMS: dict[BundledProblem, ProblemModule] = {
    "dense_decode": _attention(write=writing.write_dense, dead_words=wording.dead_rows),
    "paged_decode": _attention(),
    "split_decode": _attention(results=("partial_out", "partial_lse"), logical_result=_merged, axes=_split_axes),
    "latent_decode": _attention(),
    "paged_attention": _attention(
        axes=_axes("token", "head"), owned=_without_padding, length_words=wording.keys_of_query
    ),
    "masked_attention": _attention(axes=_axes("token", "head"), owned=_without_padding, length_words=wording.keys_seen),
    "merge_states": ProblemModule(
        results=("output", "output_lse"),
        values=_merge_values,
        reference=merge_reference,
        logical_result=_tokens_first,
        contents=_merge_contents,
        write=writing.write_states,
        inputs=inputs_of,
        axes=_merge_axes,
        dead_words=wording.dead_states,
        seqs_of=_no_seq,
    ),
}
