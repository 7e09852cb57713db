"""`attnfuzz.PagedProblem`: what users' problems over a paged cache share. Torch-free by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnfuzz.problems.attention import PagedDecodeCase
from attnfuzz.problems.block_table import block_table_rows
from attnfuzz.problems.fields import Choice, Integer, Integers, Seed
from attnfuzz.problems.module import module_of
from attnfuzz.problems.own import Problem
from attnfuzz.problems.recipes import Pages
from attnfuzz.problems.shapes import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

_AXES = {
    "NHD": ("page", "offset", "head", "dim"),
    "HND": ("page", "head", "offset", "dim"),
    "interleaved": ("page", "k or v", "offset", "head", "dim"),
    "packed": ("page", "head", "dim", "offset", "part"),
}


class PagedProblem(Problem):
    """A problem whose K and V lie in pages of ``block_size`` tokens, found through ``block_table``.

    It has the fields of such a cache: ragged ``lengths`` with the boundaries of pages and tiles among them, the order
    of pages, pages that sequences share, spare ones, and what entries of the table hold that no token needs. A field
    that is assigned anew in a class replaces that of this one. The last page of a sequence is dead behind its end.

    Where layers of several kinds share pages, these are padded (``cache_strides`` "outer_gap"), V's unlike those of K
    (``v_cache_strides``, "" for those of K), and larger than the blocks that a kernel reads: with ``kernel_blocks``
    other than 0, caches of the layout NHD are ``[pages, blocks, tokens of a block, heads, head_size]``, as many blocks
    as that if it divides ``block_size``, which remains the number of tokens that an entry of the table stands for.
    """

    lengths = Integers(0, 100, likely=(1, 15, 16, 17, 31, 32, 33, 63, 64, 65), least=1, most=4)
    num_kv_heads = Choice((1, 2, 3))
    gqa_ratio = Choice((1, 2, 5, 8))
    head_size = Choice((16, 64, 128))
    block_size = Choice((1, 4, 16, 5, 32))
    layout = Choice(("NHD", "HND"))
    page_order = Choice(("identity", "reversed", "shuffled"))
    shared_pages = Integer(0, 2)
    spare_pages = Integer(0, 3)
    extra_columns = Integer(0, 3)
    unused_entries = Choice(("zero", "wrong_page"))
    cache_strides = Choice(("contiguous", "outer_gap"))
    v_cache_strides = Choice(("",))
    kernel_blocks = Choice((0,))
    dtype = Choice(("float16", "bfloat16"))
    seed = Seed()

    def cache(self, case: Any) -> dict[str, TensorSpec]:
        """The tensors of the cache: ``k_cache`` and ``v_cache``, ``block_table`` and ``seq_lens``, both int32."""
        found = module_of("paged_decode").tensors(paged_case(case))
        names = ("k_cache", "v_cache", "kv_cache")
        strides, axes = case.cache_strides, _axes(case)
        cached = {
            name: found[name]._replace(strides=strides, axes=axes, named_by="block_table")
            for name in names
            if name in found
        }
        if case.v_cache_strides and "v_cache" in cached:
            cached["v_cache"] = cached["v_cache"]._replace(strides=case.v_cache_strides)
        for name, spec in cached.items() if blocks_of(case) else ():
            pages, size, *of_token = spec.shape
            shape = (pages, blocks_of(case), size // blocks_of(case), *of_token)
            cached[name] = spec._replace(shape=shape)
        return {
            **cached,
            "block_table": found["block_table"]._replace(axes=("seq", "column")),
            "seq_lens": found["seq_lens"],
        }

    def write_cache(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tokens of all sequences, table and lengths; a shared page holds those of its last sequence."""
        from attnfuzz.values.draws import numbers

        self.write_table(case, tensors)
        for name, slots in token_slots(case, tensors).items():
            for seq, length in enumerate(case.lengths):
                shape = (length, case.num_kv_heads, case.head_size)
                new = numbers(shape, seed=case.seed, name=f"{name}{seq}").to(slots.dtype)
                slots[self.places(case, tensors, seq)] = new.view(length, *slots.shape[2:])

    def write_table(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Fill table and lengths."""
        import torch

        table = torch.tensor(block_table_rows(paged_case(case)), dtype=torch.int32, device="cpu")
        tensors["block_table"].copy_(table)
        tensors["seq_lens"].copy_(torch.tensor(case.lengths, dtype=torch.int32, device="cpu"))

    def places(self, case: Any, tensors: Mapping[str, Tensor], seq: int) -> tuple[Tensor, Tensor]:
        """Page and offset of each token of a sequence, as the table says."""
        import torch

        token = torch.arange(case.lengths[seq], device="cpu")
        return tensors["block_table"][seq, token // case.block_size].long(), token % case.block_size

    def cached(self, case: Any, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """K and V of each sequence, ``[length, num_kv_heads, head_size]``, as the cache holds them.

        Empty for the one that the problem has not.
        """
        found = {
            name: [slots[self.places(case, tensors, seq)].flatten(2) for seq in range(len(case.lengths))]
            for name, slots in token_slots(case, tensors).items()
        }
        return found.get("k", []), found.get("v", [])

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """For an element of the cache, its token and sequence; for one of the table, whose page is named."""
        table, size = block_table_rows(paged_case(case)), case.block_size
        if name == "block_table":
            seq, column = index
            is_used = column * size < case.lengths[seq]
            return f"it names page {column} of sequence {seq}" if is_used else f"no token of sequence {seq} needs it"
        if name not in ("k_cache", "v_cache", "kv_cache"):
            return ""
        page, offset = index[0], index[_axes(case).index("offset")]
        offset += index[1] * (size // blocks_of(case)) if blocks_of(case) else 0
        tokens = [
            f"token {column * size + offset} of sequence {seq}"
            for seq, (row, length) in enumerate(zip(table, case.lengths, strict=True))
            for column, named in enumerate(row)
            if named == page and column * size + offset < length
        ]
        return f"page {page}, offset {offset}: " + (" and ".join(tokens) or "no token of any sequence")


def blocks_of(case: Any) -> int:
    """How many of a kernel's blocks a page of the cache is divided into; 0 where it has no dimension of them."""
    return math.gcd(case.kernel_blocks, case.block_size) if case.kernel_blocks and case.layout == "NHD" else 0


def _axes(case: Any) -> tuple[str, ...]:
    page, *others = _AXES[case.layout]
    return (page, *(("block",) if blocks_of(case) else ()), *others)


def paged_case(case: Any) -> PagedDecodeCase:
    """The bundled case that has this cache."""
    pages = Pages(
        order=case.page_order,
        spare_blocks=case.spare_pages,
        extra_columns=case.extra_columns,
        shared_blocks=case.shared_pages,
        padding=case.unused_entries,
        seed=case.seed % 64,
    )
    return PagedDecodeCase(
        num_q_heads=case.num_kv_heads * case.gqa_ratio,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        dtype=case.dtype,
        seq_lens=case.lengths,
        scale=1.0,
        block_size=case.block_size,
        layout=case.layout,
        pages=pages,
    )


def token_slots(case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of K and V, or of the one that the problem has, in which a page and an offset are one token."""
    from attnfuzz.inputs.layouts import token_views, with_both_caches

    named = [name for name in ("k_cache", "v_cache") if name in tensors or "kv_cache" in tensors]
    beside = {name: tensors[other] for name in ("k_cache", "v_cache") if name not in named for other in named}
    both = with_both_caches(paged_case(case), {**tensors, **beside})
    if blocks_of(case):
        both |= {name: both[name].flatten(1, 2) for name in ("k_cache", "v_cache")}  # views: pages have no gaps inside
    views = token_views(both["k_cache"], both["v_cache"], case.layout)
    return {name[0]: getattr(views, name[0]) for name in named}
