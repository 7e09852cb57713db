"""Two kernels as one: attention over two parts of each sequence by one kernel, and the merge of the states by another;
or a cache that one writes and another reads.

So do cascade attention, context parallelism and engines that choose a writer and a reader each by itself, often with
kernels of two projects. A contract that the two do not share (the base of the log-sum-exp, its axes, what an empty part
holds; where the scale of a block lies) shows in no kernel alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.bundled.merge_states import MergeStatesInputs
from attnfuzz.declaration import Declaration, Kernel, KernelLoadError
from attnfuzz.families import CacheWrite, PackedDecode, WrittenDecode
from attnfuzz.inputs.layouts import token_views
from attnfuzz.problems.fields import Choice, Field, Seed
from attnfuzz.problems.open_cases import OpenProblem, implementation_of

_NATURAL = {"natural": 1.0, "base2": math.log(2)}
"""Natural logarithms in one unit of a log-sum-exp."""
_PROBLEMS = ("paged_decode", "dense_decode")


def compose(attention: Kernel, merge: Kernel) -> Kernel:
    """A kernel of the problem of ``attention``, whose states of the first and the last part ``merge`` puts together.

    What the one returns and the other takes in another base, or on other axes, is converted as both declare it. A part
    without tokens is handed to a kernel that takes empty sequences; for one that does not, the state of such a part is
    filled in, as servers do. Of a kernel of `CacheWrite` and one that reads, see `_read_back`. Raises KernelLoadError
    where the two do not go together.
    """
    if isinstance(_own(attention), CacheWrite):
        return _read_back(attention, merge)
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


_WRITTEN_AS = {"int4": "int4_token", "nvfp4": "nvfp4"}
"""Formats of a reader, as writers call them."""


def _own(kernel: Kernel) -> Any:
    problem = kernel.declaration.problem
    return implementation_of(problem) if isinstance(problem, OpenProblem) else problem


def _fields(declaration: Declaration) -> Mapping[str, Field]:
    return declaration.problem.fields if isinstance(declaration.problem, OpenProblem) else {}


def _read_back(writer: Kernel, reader: Kernel) -> Kernel:
    """A kernel that has ``writer`` write the tokens of its cache into another one, and ``reader`` read that.

    Of paged_decode, with plain caches, which hold the same bits then; or of `WrittenDecode`.
    """
    wrote, read = writer.declaration, reader.declaration
    target = f"{wrote.target}+{read.target}"
    is_plain = read.problem == "paged_decode"
    fields = _fields(wrote)
    if not is_plain and not isinstance(_own(reader), PackedDecode):
        raise KernelLoadError(
            f"{target}: {read.target} computes {read.problem}; a kernel of CacheWrite goes with one of paged_decode or "
            "PackedDecode"
        )
    if "none" not in _values(fields["rotary"]):
        raise KernelLoadError(f"{target}: {wrote.target} rotates all K that it writes, and nobody rotates q")

    def call(inputs: Any, **options: Any) -> Any:
        written, table = _written(writer, fields, inputs, "same" if is_plain else _WRITTEN_AS[inputs.cache_format])
        if is_plain:
            return reader(dataclasses.replace(inputs, block_table=table, **written), **options)
        if "k_zeros" in written:  # there is one scale for a head
            written |= {name: written[name][..., None] for name in ("k_scales", "v_scales")}
        return reader(SimpleNamespace(**{**vars(inputs), **written, "block_table": table}), **options)

    try:
        declared = _plain(read, fields) if is_plain else attnfuzz.kernel(_packed(read, fields))(call).declaration
    except ValueError as error:
        raise KernelLoadError(f"{target}: the two have no format, dtype or size in common ({error})") from error
    return Kernel(
        call,
        msgspec.structs.replace(
            declared,
            name=target,
            target=target,
            versions={**wrote.versions, **read.versions},
            calls=tuple(dict.fromkeys((*wrote.calls, *read.calls))),
            needs_preparing=False,
        ),
    )


def _values(field: Field) -> tuple[Any, ...]:
    return field.values if isinstance(field, Choice) else ()


def _plain(reader: Declaration, fields: Mapping[str, Field]) -> Declaration:
    """The declaration of a paged_decode kernel that takes what both take. Raises ValueError where that is nothing."""
    own = reader.supports
    allowed = {"dtype": own.dtypes, "head_size": own.head_sizes, "block_size": own.block_sizes, "layout": own.layouts}
    both = {
        f"{name}s": Choice(tuple(one for one in _values(fields[name]) if known is None or one in known)).values
        for name, known in allowed.items()
    }
    Choice(tuple(one for one in _values(fields["cache"]) if one == "same"))
    alone: Any = {"v_head_sizes": "equal", "kv_dtypes": (), "variants": (), "large_sizes": False, "graph_replay": False}
    return msgspec.structs.replace(reader, supports=msgspec.structs.replace(own, **both, **alone))


def _packed(reader: Declaration, fields: Mapping[str, Field]) -> WrittenDecode:
    """Likewise, of a reader of packed formats."""
    found: dict[str, Field] = {}
    for name, field in _fields(reader).items():
        if name == "cache_format":
            field = Choice(
                tuple(
                    one for one in _WRITTEN_AS if one in _values(field) and _WRITTEN_AS[one] in _values(fields["cache"])
                )
            )
        elif isinstance(field, Choice) and isinstance(fields.get(name), Choice):
            field = Choice(tuple(one for one in field.values if one in _values(fields[name])))
        found[name] = field
    return WrittenDecode(**found)


def _written(writer: Kernel, fields: Mapping[str, Field], inputs: Any, cache: str) -> tuple[dict[str, Tensor], Tensor]:
    """Caches in which ``writer`` has put the tokens of ``inputs``, without pages that hold none, and their table."""
    lens, size, old = inputs.seq_lens.long(), inputs.block_size, inputs.block_table
    first = torch.arange(old.shape[1], device=old.device) * size
    is_named = first < lens[:, None]
    pages = old[is_named].unique().long()
    table = torch.zeros_like(old)
    table[is_named] = torch.searchsorted(pages, old[is_named].long()).to(table.dtype)
    offsets = torch.arange(size, device=old.device)
    is_token = first[None, :, None] + offsets < lens[:, None, None]
    slots = (table.long()[..., None] * size + offsets)[is_token].unique()

    tokens = token_views(inputs.k_cache, inputs.v_cache, inputs.layout)
    new = {name: part[pages[slots // size], slots % size] for name, part in (("key", tokens.k), ("value", tokens.v))}
    case = {name: field.simplest for name, field in fields.items() if not isinstance(field, Seed)}
    case |= {"cache": cache, "rotary": "none", "repeats": "none", "layout": inputs.layout, "block_size": size}
    case |= {"num_tokens": len(slots), "skipped": 0, "spare_blocks": max(1, len(pages)) - -(-len(slots) // size)}
    case |= {"num_kv_heads": tokens.k.shape[2], "head_size": tokens.k.shape[3]}
    case |= {
        "dtype": str(tokens.k.dtype).removeprefix("torch."),
        "strides": "contiguous",
        "cache_strides": "contiguous",
    }
    tensors = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=old.device)
        for name, spec in CacheWrite().tensors(SimpleNamespace(**case)).items()
    }
    tensors |= {**new, "slot_mapping": slots}
    tensors |= {name: getattr(inputs, name) for name in ("k_global", "v_global") if name in tensors}
    if len(slots):
        writer(SimpleNamespace(**case, **tensors))
    return {name: part for name, part in tensors.items() if name.startswith(("k_", "v_"))}, table
