"""Parts that attention problems share: keys and values of many sequences, in a paged cache or not. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from attnfuzz.cases.facets.contents import CacheFormat, Numbers, Scale, VariantFacet
from attnfuzz.cases.facets.facet import Facet
from attnfuzz.cases.facets.heads import Heads, HeadSize, VHeadSize
from attnfuzz.cases.facets.sequences import QueryBounds, QueryLens, QueryPadding, Sequences
from attnfuzz.cases.facets.storage import (
    BlockSize,
    CacheLayout,
    Dtype,
    KernelOptions,
    PageMap,
    Splits,
    TensorStrides,
)
from attnfuzz.problems import wording
from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase, packed_width
from attnfuzz.problems.block_table import num_blocks
from attnfuzz.problems.choices import block_sizes_of, default_scale, gqa_ratios_of, head_counts_of, v_head_sizes_of
from attnfuzz.problems.limits import attention_nbytes
from attnfuzz.problems.module import Contents, ProblemModule
from attnfuzz.problems.quantised_kv import KV_SCALE_TENSORS
from attnfuzz.problems.shapes import Specs, TensorSpec
from attnfuzz.problems.supports import Layout, Supports

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SHAPE = (Heads(), Splits(), KernelOptions())
_SIZES = (VHeadSize(), HeadSize(), Dtype())
_CONTENTS = (TensorStrides(), Numbers(), VariantFacet(), CacheFormat(), Scale())


def attention_facets(*storage: Facet[Any]) -> tuple[Facet[Any], ...]:
    """Facets of attention without a cache; ``storage`` are those of how K and V lie."""
    return (Sequences(), *_SHAPE, *_SIZES, *storage, *_CONTENTS)


def paged_facets(*own: Facet[Any]) -> tuple[Facet[Any], ...]:
    """Facets of attention over a paged cache, with the problem's ``own``."""
    return (Sequences(), *own, *_SHAPE, BlockSize(), *_SIZES, CacheLayout(), PageMap(), *_CONTENTS)


def varlen_facets(*own: Facet[Any]) -> tuple[Facet[Any], ...]:
    """Facets of attention with any number of query tokens."""
    return paged_facets(*own, QueryBounds(), QueryPadding(), QueryLens())


class AttentionProblem(ProblemModule):
    """Query tokens over the keys of their sequences, wherever these lie."""

    def tensors(self, case: Any) -> Specs:
        return self.queries(case) | self.keys_and_values(case) | self.outputs(case)

    def queries(self, case: AttentionCase) -> Specs:
        """q, and what says which rows of it belong to which keys."""
        shape = (case.num_query_slots, case.num_q_heads, case.head_size)
        return {"q": TensorSpec(shape, case.dtype), "seq_lens": TensorSpec((case.num_seqs,), "int32")}

    def keys_and_values(self, case: Any) -> Specs:
        """K and V, and what it takes to find and to read them."""
        raise NotImplementedError

    def outputs(self, case: Any) -> Specs:
        """Tensors that a kernel writes."""
        shape = (case.num_query_slots, case.num_q_heads, case.value_size)
        return {"out": TensorSpec(shape, case.dtype, "output"), "lse": TensorSpec(shape[:2], "float32", "output")}

    def nbytes(self, case: Any) -> int:
        return attention_nbytes(case)

    def simplest_fields(self, supports: Supports, head_size: int, layout: Layout | None) -> dict[str, Any] | None:
        heads = head_counts_of(supports)
        heads = tuple((ratio, 1) for ratio in gqa_ratios_of(supports)[:1]) if heads is None else heads
        values = v_head_sizes_of(supports, head_size, layout)
        if not heads or not values:
            return None
        return {
            "num_q_heads": heads[0][0],
            "num_kv_heads": heads[0][1],
            "seq_lens": (1,),
            "scale": default_scale(head_size),
            "v_head_size": values[0],
        }

    def draw(self, decisions: Any, plan: Any) -> AttentionCase:
        from attnfuzz.strategies.cases import attention_fields

        return cast("AttentionCase", self.case_type(**attention_fields(decisions, plan)))

    def axes(self, case: Any, name: str) -> tuple[str, ...]:
        return ("seq", "head") if name.endswith("lse") else ("seq", "head", "dim")

    def length_words(self, case: Any, row: int) -> list[str]:
        return [f"sequence {row} has length {case.seq_lens[row]}"]

    def seqs_of(self, case: AttentionCase, row: int) -> tuple[int, ...]:
        return (case.row_seqs[row],)

    def contents(self, cases: Sequence[Any], device: torch.device | str, supports: Supports) -> list[Contents]:
        from attnfuzz.inputs.writing import placements
        from attnfuzz.values.attention import attention_values_of_many
        from attnfuzz.values.tokens import token_table

        tokens = token_table(cases, device)
        return list(map(Contents, attention_values_of_many(cases, tokens), placements(cases, tokens)))

    def values(self, case: Any, device: torch.device | str, supports: Supports) -> Any:
        from attnfuzz.values.attention import attention_values

        return attention_values(case, device)

    def placements(self, cases: Sequence[Any], device: torch.device | str) -> Sequence[Any]:
        from attnfuzz.inputs.writing import placements
        from attnfuzz.values.tokens import token_table

        return placements(cases, token_table(cases, device))

    def inputs(self, case: Any, tensors: dict[str, Tensor]) -> Any:
        from attnfuzz.inputs.layouts import with_both_caches

        return super().inputs(case, with_both_caches(case, tensors))

    def numbers(self, case: AttentionCase) -> dict[str, Any]:
        variant = case.variant
        return {"v_head_size": case.value_size, "window": variant.window, "soft_cap": variant.soft_cap}

    def reference(self, case: Any, values: Any) -> Any:
        from attnfuzz.inputs.reference import attention_reference

        return attention_reference(case, values)


class PagedProblem(AttentionProblem):
    """K and V in pages of a cache."""

    def keys_and_values(self, case: Any) -> Specs:
        table = {"block_table": TensorSpec((case.num_seqs, case.max_blocks_per_seq), "int32")}
        return _cache(case) | table | _per_head(case) | _kv_scales(case)

    def simplest_fields(self, supports: Supports, head_size: int, layout: Layout | None) -> dict[str, Any] | None:
        fields, sizes = super().simplest_fields(supports, head_size, layout), block_sizes_of(supports)
        return {**fields, "block_size": sizes[0]} if fields is not None and sizes else None

    def dead_words(self, case: Any, supports: Supports, row: int) -> list[str]:
        return wording.dead_pages(case, row)

    def write(self, case: Any, tensors: dict[str, Tensor], values: Any, placement: Any) -> None:
        from attnfuzz.inputs.writing import write_pages

        write_pages(case, tensors, values, placement)


class VarlenProblem(PagedProblem):
    """Any number of query tokens for each sequence."""

    def queries(self, case: Any) -> Specs:
        return super().queries(case) | {"cu_seqlens_q": TensorSpec((case.num_seqs + 1,), "int32")}

    def simplest_fields(self, supports: Supports, head_size: int, layout: Layout | None) -> dict[str, Any] | None:
        fields = super().simplest_fields(supports, head_size, layout)
        return None if fields is None else {**fields, "query_lens": (1,)}

    def axes(self, case: Any, name: str) -> tuple[str, ...]:
        return ("token", "head") if name.endswith("lse") else ("token", "head", "dim")

    def length_words(self, case: Any, row: int) -> list[str]:
        keys = wording.plural(case.row_lens[row], "key")
        return [f"token {row} of the batch is {wording.query_of_row(case, row)} and attends to {keys}"]

    def owned(self, case: Any, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without the rows of padding tokens, in which a kernel may leave anything."""
        return {name: result[: case.num_rows] for name, result in results.items()} if case.padding_tokens else results


def _per_head(case: PagedDecodeCase) -> Specs:
    """Tensors of variants with an entry for each query head."""
    spec = TensorSpec((case.num_q_heads,), "float32", "input")
    wanted = {"alibi_slopes": case.variant.alibi, "sinks": case.variant.sinks}
    return {name: spec for name, recipe in wanted.items() if recipe is not None}


def _kv_scales(case: PagedDecodeCase) -> Specs:
    """The scales of an 8-bit cache."""
    if case.kv is None:
        return {}
    spec = TensorSpec((1 if case.kv.per == "tensor" else case.num_kv_heads,), "float32", "input")
    return dict.fromkeys(KV_SCALE_TENSORS, spec)


def _cache(case: PagedDecodeCase) -> Specs:
    blocks, size, heads = num_blocks(case), case.block_size, case.num_kv_heads
    dim, v_dim = case.head_size, case.value_size
    if case.values_in_keys:
        return {"kv_cache": TensorSpec((blocks, size, dim), case.kv_dtype, "input")}
    if case.layout == "interleaved":
        return {"kv_cache": TensorSpec((blocks, 2, size, heads, dim), case.kv_dtype, "input")}
    if case.layout == "packed":
        x = packed_width(case.kv_dtype)
        k_shape: tuple[int, ...] = (blocks, heads, dim // x, size, x)
        v_shape: tuple[int, ...] = (blocks, heads, v_dim, size)
    elif case.layout == "HND":
        k_shape, v_shape = (blocks, heads, size, dim), (blocks, heads, size, v_dim)
    else:
        k_shape, v_shape = (blocks, size, heads, dim), (blocks, size, heads, v_dim)
    k, v = (TensorSpec(shape, case.kv_dtype, "input") for shape in (k_shape, v_shape))
    return {"k_cache": k, "v_cache": v}
