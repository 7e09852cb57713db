"""A bundled or user's kernel on the tensors of a shape: the inputs that it declares to take, and its call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from attnfuzz.bench.kernels.shapes import PROBLEMS_OF, Shape
from attnfuzz.bench.kernels.tensors import AttentionTensors, MergeTensors, in_layout
from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.oracles.results import named_results
from attnfuzz.problems.cases import Case, case_from_builtins
from attnfuzz.problems.choices import layouts_of
from attnfuzz.problems.registry import problem_of
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.problems.where import with_values

__all__ = ["NotMeasured", "Prepared", "Unsupported", "objection", "ours", "prepare_kernel"]

Tensors = AttentionTensors | MergeTensors
Result = tuple[Float[Tensor, "num_tokens num_q_heads head_size"], Float32[Tensor, "num_tokens num_q_heads"] | None]


class Unsupported(Exception):  # noqa: N818 - says what the shape is, not that anything went wrong
    """A contender does not take a shape; the message says why in a few words."""


class NotMeasured(Exception):  # noqa: N818 - says what happened to the measurement
    """What attnfuzz does before or after a contender's call went wrong: nothing is known of the contender."""


@contextmanager
def ours() -> Iterator[None]:
    """What is raised within is not the contender's doing, and becomes a NotMeasured with its cause."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        raise NotMeasured(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """``call`` is what is timed; ``read`` makes output and natural LSE (None if there is none) of what it returned.

    ``set_lengths`` overwrites the lengths that the call reads on the device; None where it does not read any.
    """

    call: Callable[[], object]
    read: Callable[[object], Result]
    set_lengths: Callable[[Tensor], object] | None = None


def objection(declaration: Declaration, shape: Shape, options: dict[str, OptionValue]) -> str | None:
    """Why a kernel cannot be timed on ``shape`` with ``options``, in a few words; None if it can."""
    supports = declaration.supports
    if declaration.problem not in PROBLEMS_OF[shape.kind]:
        return f"computes {declaration.problem}"
    if shape.room and declaration.versions and not supports.graph_replay:  # what it plans may hold the lengths
        return "promises no graph for other lengths"
    if shape.dtype not in supports.dtypes:
        return f"does not take {shape.dtype}"
    limits = [("head_sizes", shape.head_size)]
    if shape.kind != "merge":
        limits.append(("gqa_ratios", shape.num_q_heads // shape.num_kv_heads))
    if declaration.problem.startswith("paged"):
        limits.append(("block_sizes", shape.block_size))
    for name, value in limits:
        choices = getattr(supports, name)
        if choices is not None and value not in choices:
            return f"{name} has no {value}"
    if _together(declaration, shape, options) is None:
        return "where has no such combination"
    if supports.max_seq_len is not None and max(shape.longest, shape.room) > supports.max_seq_len:
        return f"max_seq_len is {supports.max_seq_len}"
    if supports.max_query_len is not None and max(shape.queries, default=0) > supports.max_query_len:
        return f"max_query_len is {supports.max_query_len}"
    return None


def prepare_kernel(kernel: Kernel, tensors: Tensors, options: dict[str, OptionValue]) -> Prepared:
    """The call of ``kernel`` on one set of tensors, with results of its own. Raises Unsupported, NotMeasured."""
    declaration, shape = kernel.declaration, tensors.shape
    if (why := objection(declaration, shape, options)) is not None:
        raise Unsupported(why)
    with ours():
        inputs, names = _inputs(declaration, tensors, options)

    def read(returned: object) -> Result:
        out, *rest = named_results(
            returned, inputs, names, names if declaration.supports.lse != "none" else names[:1]
        ).values()
        return out, _natural(declaration, rest[0]) if rest else None

    has_lengths = hasattr(inputs, "seq_lens") and shape.kind != "mixed"

    def set_lengths(others: Tensor) -> None:
        inputs.seq_lens.copy_(others)
        kernel.plan(inputs, **options)  # outside of the graph, as servers do

    return Prepared(kernel.planned(inputs, **options), read, set_lengths if has_lengths else None)


def _natural(declaration: Declaration, lse: Tensor) -> Tensor:
    lse = lse * math.log(2) if declaration.supports.lse == "base2" else lse
    is_turned = declaration.problem == "merge_states" and declaration.supports.lse_layout == "HT"
    return lse.mT if is_turned else lse


def _together(declaration: Declaration, shape: Shape, options: dict[str, OptionValue]) -> Supports | None:
    """What the kernel declares of the layouts that go with all else here; None if nothing does."""
    known: dict[str, OptionValue] = {
        "dtype": shape.dtype,
        "head_size": shape.head_size,
        "num_q_heads": shape.num_q_heads,
    }
    if shape.kind != "merge":
        known |= {"num_kv_heads": shape.num_kv_heads, "gqa_ratio": shape.num_q_heads // shape.num_kv_heads}
        known |= {"block_size": shape.block_size, "kv_dtype": shape.dtype, "v_head_size": shape.head_size}
    return with_values(declaration.supports, {**known, **options})


def _inputs(declaration: Declaration, tensors: Tensors, options: dict[str, OptionValue]) -> tuple[Any, tuple[str, str]]:
    """What the kernel gets, and the names of its two results."""
    shape = tensors.shape
    if isinstance(tensors, MergeTensors):
        return _merge_inputs(declaration, tensors)
    device = tensors.q.device
    given = {
        "q": tensors.q,
        "seq_lens": tensors.seq_lens.clone(),
        "out": torch.empty_like(tensors.q),
        "lse": torch.empty(tensors.q.shape[:2], dtype=torch.float32, device=device),
    }
    common: dict[str, object] = {
        "num_q_heads": shape.num_q_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "dtype": shape.dtype,
        "seq_lens": shape.seq_lens,
        "scale": shape.scale,
    }
    if declaration.problem == "dense_decode":
        given["k"], given["v"] = tensors.dense
        case = case_from_builtins("dense_decode", common | {"extra_rows": max(0, shape.room - shape.longest)})
        return _of_case(case, given)
    layout = layouts_of(_together(declaration, shape, options) or declaration.supports)[0]
    given |= in_layout(tensors.k_cache, tensors.v_cache, layout)
    given["block_table"] = tensors.block_table
    common |= {"block_size": shape.block_size, "layout": layout}
    if declaration.problem == "paged_attention":
        given["cu_seqlens_q"] = tensors.cu_seqlens_q
        common |= {"query_lens": shape.queries, "seq_slack": max(0, shape.room - shape.longest)}
    return _of_case(case_from_builtins(declaration.problem, common), given)


def _of_case(case: Case, given: dict[str, Tensor]) -> tuple[Any, tuple[str, str]]:
    problem = problem_of(case)
    output, lse = problem.results
    return problem.inputs(case, given), (output, lse)


def _merge_inputs(declaration: Declaration, tensors: MergeTensors) -> tuple[Any, tuple[str, str]]:
    shape = tensors.shape
    layout = declaration.supports.lse_layout
    unit = 1 / math.log(2) if declaration.supports.lse == "base2" else 1.0
    prefix_lse, suffix_lse = (lse * unit for lse in tensors.lses(layout))
    sizes = {"num_q_heads": shape.num_q_heads, "head_size": shape.head_size, "num_tokens": shape.num_tokens}
    case = case_from_builtins("merge_states", {**sizes, "dtype": shape.dtype, "lse_layout": layout})
    given = {
        "prefix_output": tensors.prefix_output,
        "suffix_output": tensors.suffix_output,
        "prefix_lse": prefix_lse,
        "suffix_lse": suffix_lse,
        "output": torch.empty_like(tensors.prefix_output),
        "output_lse": torch.empty_like(prefix_lse),
    }
    return _of_case(case, given)
