"""From a case to the functions of its problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnfuzz.problems import (
    dense_decode,
    latent_decode,
    masked_attention,
    merge_states,
    open_module,
    paged_attention,
    paged_decode,
    split_decode,
    told,
)
from attnfuzz.problems.allocation import PlainAllocator, allocate
from attnfuzz.problems.cases import AttentionCase, BundledProblem, Case, MergeStatesCase, PagedAttentionCase
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.open_module import Target
from attnfuzz.problems.placement import Placement, placements
from attnfuzz.problems.reference import Expected
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.tolerance import Tolerance
from attnfuzz.values.attention import attention_values, attention_values_of_many
from attnfuzz.values.states import LogicalStates, merge_values, merge_values_of_many
from attnfuzz.values.tokens import token_table

__all__ = ["Contents", "ProblemModule", "filled", "problem_of"]

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

    ``returned_names(case, supports)``: what a kernel may return, in this order, or write into its inputs;
    ``changed_names(case)``: the inputs that it changes in place. ``owned(case, results)`` leaves out of the results
    what nobody looks at. ``axes(case, name)`` names the dimensions of a result.

    In words: ``where_is(case, name, index)`` says what an element is, ``dead_words(case, supports, row)`` which memory
    must not matter to a row, and ``length_words(case, row)`` how much there is to it. ``seqs_of(case, row)``: the
    sequences that a row belongs to; None where results have no rows with heads.

    ``targets(values, tolerance)``: what the results are to hold, where the problem says that itself; None for
    attention, whose bounds are derived (`attnfuzz.oracles.expectations`). ``in_parts``: whether there are `contents`,
    so that many cases can be built and judged at once.
    """

    results: tuple[str, ...]
    values: Callable[[Any, torch.device | str, Supports], Any]
    build: Build
    reference: Callable[[Any, Any], Expected]
    logical_result: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
    contents: Callable[[Any, torch.device | str, Supports], list[Contents]]
    write: Callable[..., None]
    inputs: Callable[[Any, dict[str, Tensor]], Any]
    returned_names: Callable[[Any, Supports], tuple[str, ...]]
    axes: Callable[[Any, str], tuple[str, ...]]
    dead_words: Callable[[Any, Supports, int], list[str]]
    owned: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]
    changed_names: Callable[[Any], tuple[str, ...]] = lambda case: ()
    where_is: Callable[[Any, str, tuple[int, ...]], str] = lambda case, name, index: ""
    length_words: Callable[[Any, int], list[str]] = lambda case, row: []
    seqs_of: Callable[[Any, int], tuple[int, ...]] | None = None
    targets: Callable[[Any, Tolerance], list[Target]] | None = None
    in_parts: bool = True


def problem_of(case: Case) -> ProblemModule:
    """The functions of ``case``'s problem."""
    return _OPEN if isinstance(case, OpenCase) else _PROBLEMS[case.problem]


def filled(case: Case, supports: Supports) -> dict[str, Tensor]:
    """All tensors of ``case`` on the host, by name, with what a kernel may read; dead elements are NaN, or -1."""
    if isinstance(case, OpenCase):
        return open_module.filled(case)
    problem = problem_of(case)
    (contents,) = problem.contents([case], "cpu", supports)
    tensors = allocate(case, PlainAllocator("cpu"))
    problem.write(case, {name: tensor[None] for name, tensor in tensors.items()}, contents.values, contents.placement)
    return tensors


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


def _as_declared(*names: str) -> Callable[[Any, Supports], tuple[str, ...]]:
    """Both results, or the output alone of a kernel that declares no LSE."""
    return lambda case, supports: names if supports.lse != "none" else names[:1]


def _all(case: Any, results: dict[str, Tensor]) -> dict[str, Tensor]:
    del case
    return results


def _without_padding(case: PagedAttentionCase, results: dict[str, Tensor]) -> dict[str, Tensor]:
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


def _keys_of_query(case: PagedAttentionCase, row: int) -> list[str]:
    keys = told.plural(case.row_lens[row], "key")
    return [f"token {row} of the batch is {told.query_of_row(case, row)} and attends to {keys}"]


def _not_in_parts(*arguments: Any) -> Any:
    raise TypeError(f"inputs of an open problem are built one case at a time, not from {arguments!r:.80}")


_OPEN = ProblemModule(
    results=(),
    values=open_module.values,
    build=open_module.build,
    reference=_not_in_parts,
    logical_result=_not_in_parts,
    contents=_not_in_parts,
    write=_not_in_parts,
    inputs=open_module.inputs,
    returned_names=open_module.returned_names,
    changed_names=open_module.changed_names,
    owned=open_module.owned,
    axes=open_module.axes,
    dead_words=open_module.dead_words,
    where_is=open_module.where_is,
    targets=lambda values, tolerance: values.targets(tolerance),
    in_parts=False,
)

_PROBLEMS: dict[BundledProblem, ProblemModule] = {
    "dense_decode": ProblemModule(
        results=("out", "lse"),
        values=_attention_values,
        build=dense_decode.build,
        reference=dense_decode.reference,
        logical_result=_as_is,
        contents=_attention_contents,
        write=dense_decode.write,
        inputs=dense_decode.inputs_of,
        returned_names=_as_declared("out", "lse"),
        axes=_axes("seq", "head"),
        owned=_all,
        dead_words=told.dead_rows,
        length_words=told.length_of_row,
        seqs_of=_own_seq,
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
        returned_names=_as_declared("out", "lse"),
        axes=_axes("seq", "head"),
        owned=_all,
        dead_words=told.dead_pages,
        length_words=told.length_of_row,
        seqs_of=_own_seq,
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
        returned_names=_as_declared("partial_out", "partial_lse"),
        axes=_split_axes,
        owned=_all,
        dead_words=told.dead_pages,
        length_words=told.length_of_row,
        seqs_of=_own_seq,
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
        returned_names=_as_declared("output", "output_lse"),
        axes=_merge_axes,
        owned=_all,
        dead_words=told.dead_states,
        seqs_of=_no_seq,
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
        returned_names=_as_declared("out", "lse"),
        axes=_axes("token", "head"),
        owned=_without_padding,
        dead_words=told.dead_pages,
        length_words=_keys_of_query,
        seqs_of=_own_seq,
    ),
    "masked_attention": ProblemModule(
        results=("out", "lse"),
        values=_attention_values,
        build=masked_attention.build,
        reference=masked_attention.reference,
        logical_result=_as_is,
        contents=_attention_contents,
        write=masked_attention.write,
        inputs=masked_attention.inputs_of,
        returned_names=_as_declared("out", "lse"),
        axes=_axes("token", "head"),
        owned=_without_padding,
        dead_words=told.dead_pages,
        length_words=masked_attention.keys_seen,
        seqs_of=_own_seq,
    ),
    "latent_decode": ProblemModule(
        results=("out", "lse"),
        values=_attention_values,
        build=latent_decode.build,
        reference=latent_decode.reference,
        logical_result=_as_is,
        contents=_attention_contents,
        write=paged_decode.write,
        inputs=latent_decode.inputs_of,
        returned_names=_as_declared("out", "lse"),
        axes=_axes("seq", "head"),
        owned=_all,
        dead_words=told.dead_pages,
        length_words=told.length_of_row,
        seqs_of=_own_seq,
    ),
}
