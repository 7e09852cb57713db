"""The places that values can be read from, and what lies at an address of a case's memory, in words.

Places are every slot of the caches, live or dead, or every state of a merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from attnfuzz.explaining.reruns import Reruns
from attnfuzz.explaining.row import Query
from attnfuzz.inputs.layouts import token_views
from attnfuzz.memory.arena import Region
from attnfuzz.problems.block_table import freed_tokens, physical_pages
from attnfuzz.problems.cases import AttentionCase, Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.wording import plural

SIDES = ("prefix", "suffix")
_Numbers = TypeVar("_Numbers", int, Tensor)


@dataclass(frozen=True)
class Places:
    """Places are numbered: `shape` is [pages, offsets, KV heads] (dense: sequences, rows) or [sides, tokens, heads]."""

    case: Case
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, reruns: Reruns) -> Places:
        """The places of the reruns's case."""
        case = reruns.case
        if isinstance(case, MergeStatesCase):
            return cls(case, (2, case.num_tokens, case.num_q_heads))
        a, b, heads = value_tensors(reruns.inputs)[0].shape[:3]
        return cls(case, (a, b, heads))

    @property
    def count(self) -> int:
        """How many there are."""
        a, b, c = self.shape
        return a * b * c

    def number(self, a: int, b: int, c: int) -> int:
        """The number of a place."""
        return (a * self.shape[1] + b) * self.shape[2] + c

    def coordinates(self, place: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Undo `number`, of one place or of many."""
        rest = place // self.shape[2]
        return rest // self.shape[1], rest % self.shape[1], place % self.shape[2]

    @cached_property
    def owners(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Sequence and position of the tokens of each slot; a shared page has several, one that was freed none."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        if isinstance(self.case, AttentionCase):
            for seq, (first, length) in enumerate(zip(freed_tokens(self.case), self.case.seq_lens, strict=True)):
                for position in range(first, length):
                    found.setdefault(self.slot(seq, position), []).append((seq, position))
        return found

    def slot(self, seq: int, position: int) -> tuple[int, int]:
        """Page and offset, or sequence and row, of a position; also of one past the sequence's end in its last page."""
        if not isinstance(self.case, PagedDecodeCase):
            return seq, position
        page, offset = divmod(position, self.case.block_size)
        return physical_pages(self.case)[seq][page], offset

    def own(self, seq: int, kv_head: int) -> Int64[Tensor, " seq_len"]:
        """The places of a sequence's tokens, in order of position."""
        length = self.case.seq_lens[seq] if isinstance(self.case, AttentionCase) else 0
        found = [self.number(*self.slot(seq, position), kv_head) for position in range(length)]
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    def of_query(self, query: Query) -> Int64[Tensor, " num_tokens"]:
        """The places that a query must read, in order of position."""
        return self.own(query.seq, query.kv_head)[: query.num_tokens]

    def name(self, place: int, *, reader: int | None = None) -> str:
        """Where a place is and what it holds, as seen from sequence `reader`."""
        a, b, c = self.coordinates(place)
        if isinstance(self.case, MergeStatesCase):
            return f"{SIDES[a]}_output of token {b}, head {c}"
        head = f", KV head {c}" if self.shape[2] > 1 else ""
        return f"{self.slot_name(a, b)}{head} ({self.contents(a, b, reader=reader)})"

    def slot_name(self, a: int, b: int) -> str:
        """`physical page 2, offset 5`."""
        return f"physical page {a}, offset {b}" if self.case.page_size else f"sequence {a}, row {b}"

    def contents(self, a: int, b: int, *, reader: int | None = None) -> str:
        """Whose token a slot holds, or why it holds none."""
        owners = self.owners.get((a, b), [])
        mine = [position for seq, position in owners if seq == reader]
        if mine:
            return f"token {mine[0]}"
        if owners:
            return f"token {owners[0][1]} of sequence {owners[0][0]}"
        if isinstance(self.case, DenseDecodeCase):
            return f"past the end of sequence {a}"
        freed = [seq for seq, pages in enumerate(self._freed_pages()) if a in pages]
        if freed:
            return f"which was freed behind the window of sequence {freed[0]}"
        rows = physical_pages(self.case) if isinstance(self.case, PagedDecodeCase) else ()
        ends = [seq for seq, row in enumerate(rows) if row and row[-1] == a]
        return f"past the end of sequence {ends[0]}" if ends else "which no sequence owns"

    def _freed_pages(self) -> list[tuple[int, ...]]:
        if not isinstance(self.case, PagedDecodeCase):
            return []
        block_size = self.case.block_size
        rows = zip(physical_pages(self.case), freed_tokens(self.case), strict=True)
        return [row[: count // block_size] for row, count in rows]


def value_tensors(inputs: Any) -> tuple[Float[Tensor, "..."], ...]:
    """Give what is averaged as views ``[..., v_head_size]`` whose other axes, one after the other, are the places."""
    if hasattr(inputs, "prefix_output"):
        return inputs.prefix_output, inputs.suffix_output
    if hasattr(inputs, "v_cache"):
        return (token_views(inputs.k_cache, inputs.v_cache, inputs.layout).v,)
    return (inputs.v,)


def key_slots(inputs: Any) -> Float[Tensor, "..."]:
    """Keys as a view ``[pages, offsets, KV heads, ...]``."""
    if hasattr(inputs, "v_cache"):
        return token_views(inputs.k_cache, inputs.v_cache, inputs.layout).k
    found: Tensor = inputs.k
    return found


def name_of(reruns: Reruns, places: Places, unit: int) -> tuple[str, str]:
    """The stretch of dead memory that an address lies in, and the very place in it.

    A stretch is what lies past the end of a sequence in its last page, an unowned page, a gap, or a red zone.
    """
    region, distance = reruns.place_of(unit)
    itemsize = region.tensor.dtype.itemsize
    size = region.end - region.start
    if distance < 0:
        before = plural(-(distance // itemsize), "element")
        return f"zone {reruns.zone_of(unit)}", f"{before} before the start of {region.name}"
    if distance >= size:
        past = plural((distance - size) // itemsize + 1, "element")
        return f"zone {reruns.zone_of(unit)}", f"{past} past the end of {region.name}"
    return _inside(reruns, places, region, distance // itemsize)


def _inside(reruns: Reruns, places: Places, region: Region, element: int) -> tuple[str, str]:
    """A place between the first and the last element of a tensor."""
    if isinstance(reruns.case, AttentionCase) and region.name in ("k", "v", "k_cache", "v_cache", "kv_cache"):
        for what, view in (("K", key_slots(reruns.inputs)), ("V", value_tensors(reruns.inputs)[0])):
            index = _index_in(view, region, element)
            if index is not None:
                a, b = index[:2]
                holds = places.contents(a, b)
                holds = holds if holds.startswith(("which", "past")) else f"which holds {holds}"
                return f"{what}, {a}", f"{what} of {places.slot_name(a, b)}, {holds}"
    index = _index_in(region.tensor, region, element)
    if index is None:
        gap = f"a gap between the elements of {region.name}"
        return gap, gap
    if region.name in ("prefix_output", "suffix_output"):
        state = f"{region.name} of token {index[0]}, head {index[1]}, an empty state"
        return state, state
    return region.name, f"{region.name}{list(index)}"


def _index_in(view: Tensor, region: Region, element: int) -> tuple[int, ...] | None:
    """The index in `view`, of the region's memory, of the element that far from the region's first one."""
    offset = element - (view.data_ptr() - region.tensor.data_ptr()) // view.element_size()
    index = [0] * view.dim()
    for axis in sorted(range(view.dim()), key=view.stride, reverse=True):
        if view.shape[axis] > 1:
            index[axis], offset = divmod(offset, view.stride(axis))
            if not 0 <= index[axis] < view.shape[axis]:
                return None
    return tuple(index) if offset == 0 else None
