"""Two kernels as one: attention over two parts of each sequence by one kernel, and the merge of the states by another.

So do cascade attention and context parallelism, often with kernels of two projects. A contract that the two do not
share (the base of the log-sum-exp, its axes, what an empty part holds) shows in no kernel alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from attnfuzz.bundled.merge_states import MergeStatesInputs
from attnfuzz.declaration import Declaration, Kernel, KernelLoadError

_NATURAL = {"natural": 1.0, "base2": math.log(2)}
"""Natural logarithms in one unit of a log-sum-exp."""
_PROBLEMS = ("paged_decode", "dense_decode")


def compose(attention: Kernel, merge: Kernel) -> Kernel:
    """A kernel of the problem of ``attention``, whose states of the first and the last part ``merge`` puts together.

    What the one returns and the other takes in another base, or on other axes, is converted as both declare it. A part
    without tokens is handed to a kernel that takes empty sequences; for one that does not, the state of such a part is
    filled in, as servers do. Raises KernelLoadError where the two do not go together.
    """
    declaration = _declared(attention.declaration, merge.declaration)
    base, other = attention.declaration.supports.lse, merge.declaration.supports.lse
    unit = _NATURAL[base] / _NATURAL[other]
    is_turned = merge.declaration.supports.lse_layout == "HT"
    merge_options = {name: choices[0] for name, choices in merge.declaration.options.items()}

    def turned(lse: Tensor) -> Tensor:
        return lse.mT.contiguous() if is_turned else lse

    def call(inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        (prefix, prefix_lse), (suffix, suffix_lse) = (
            _state(attention, part, options) for part in _parts(inputs, str(attention.declaration.problem))
        )
        states = MergeStatesInputs(
            prefix_output=prefix,
            prefix_lse=turned(prefix_lse * unit),
            suffix_output=suffix,
            suffix_lse=turned(suffix_lse * unit),
            lse_layout=merge.declaration.supports.lse_layout,
            output=inputs.out.new_empty(inputs.out.shape),
            output_lse=turned(inputs.lse.new_empty(inputs.lse.shape)),
        )
        out, lse = _results(merge(states, **merge_options), states.output, states.output_lse)
        return out, (lse.mT if is_turned else lse)

    return Kernel(call, declaration)


def _declared(attention: Declaration, merge: Declaration) -> Declaration:
    target = f"{attention.target}+{merge.target}"
    if attention.problem not in _PROBLEMS or merge.problem != "merge_states":
        raise KernelLoadError(
            f"{target}: {attention.target} computes {attention.problem} and {merge.target} {merge.problem}; a kernel "
            f"of {' or '.join(_PROBLEMS)} goes with one of merge_states"
        )
    if attention.supports.lse == "none" or merge.supports.lse == "none":
        silent = attention if attention.supports.lse == "none" else merge
        raise KernelLoadError(f"{target}: {silent.target} returns no log-sum-exp, without which states are not merged")
    dtypes = tuple(dtype for dtype in attention.supports.dtypes if dtype in merge.supports.dtypes)
    head_sizes = _both(attention.supports.head_sizes, merge.supports.head_sizes)
    if not dtypes or head_sizes == ():
        raise KernelLoadError(f"{target}: the two have no dtype, or no head size, in common")
    supports = msgspec.structs.replace(
        attention.supports,
        dtypes=dtypes,
        head_sizes=head_sizes,
        large_sizes=attention.supports.large_sizes and merge.supports.large_sizes,
        v_head_sizes="equal",
        empty_sequences=merge.supports.empty_sequences,
        lse=merge.supports.lse,
        variants=(),  # a window, a bias or a sink is the whole sequence's, not each part's
        deterministic=attention.supports.deterministic and merge.supports.deterministic,
        batch_invariant=False,
        infinite_scores=False,
        graph_replay=False,
    )
    return msgspec.structs.replace(
        attention,
        name=target,
        target=target,
        supports=supports,
        numerics=msgspec.structs.replace(attention.numerics, partials="input"),
        versions={**attention.versions, **merge.versions},
        calls=tuple(dict.fromkeys((*attention.calls, *merge.calls))),
        needs_preparing=False,
    )


def _both(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    return tuple(size for size in first if size in second)


def _parts(inputs: Any, problem: str) -> tuple[Any, Any]:
    """The inputs of the first half of the pages, or rows, that the longest sequence may have, and of the rest."""
    if problem == "dense_decode":
        width, first = inputs.k.shape[1], max(1, inputs.k.shape[1] // 2)
        tokens = first
        heads = {name: getattr(inputs, name)[:, :first] for name in ("k", "v")}
        tails = {name: getattr(inputs, name)[:, first:] if first < width else heads[name] for name in ("k", "v")}
        heads |= {"max_seq_len": first}
        tails |= {"max_seq_len": max(1, width - first)}
    else:
        table = inputs.block_table
        pages = max(1, table.shape[1] // 2)
        tokens = pages * inputs.block_size
        heads = {"block_table": table[:, :pages].contiguous()}
        tails = {"block_table": table[:, pages:].contiguous() if pages < table.shape[1] else table}
    lens = inputs.seq_lens
    first_part = dataclasses.replace(inputs, seq_lens=lens.clamp(max=tokens), **heads)
    return first_part, dataclasses.replace(inputs, seq_lens=(lens - tokens).clamp(min=0), **tails)


def _state(kernel: Kernel, part: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one part, in memory of its own."""
    out, lse = torch.zeros_like(part.out), torch.full_like(part.lse, -torch.inf)
    if kernel.declaration.supports.empty_sequences:
        return _results(kernel(dataclasses.replace(part, out=out, lse=lse), **options), out, lse)
    rows = (part.seq_lens > 0).nonzero()[:, 0]
    if len(rows):
        rowwise = ("q", "seq_lens", "block_table", "k", "v")
        chosen = {name: getattr(part, name)[rows] for name in rowwise if hasattr(part, name)}
        live = dataclasses.replace(part, out=out[rows], lse=lse[rows], **chosen)
        out[rows], lse[rows] = _results(kernel(live, **options), live.out, live.lse)
    return out, lse


def _results(returned: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The results that a kernel returned, or wrote in place of that."""
    return returned if isinstance(returned, tuple) else (out, lse)
