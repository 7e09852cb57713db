"""Which memory a result depends on that must not matter, found by changing parts of it and bisecting.

And results that depend on what output and workspaces held before the kernel ran.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from attnfuzz.explaining.places import Places, key_slots, name_of, value_tensors
from attnfuzz.explaining.reruns import Reruns, Results
from attnfuzz.explaining.row import Query
from attnfuzz.explaining.words import row_name
from attnfuzz.memory.patterns import bits, holds_prefill
from attnfuzz.problems.cases import AttentionCase, Case, PagedDecodeCase
from attnfuzz.problems.wording import ranges, shape_of
from attnfuzz.trials.comparison import axes_of

_MOST = 3
"""Places that are named."""

Rows = frozenset[int]
Influence = tuple[str, Rows]
"""A place, and the rows of the result that depend on it."""


def dead_influences(reruns: Reruns, places: Places) -> Iterator[Influence]:
    """Dead memory from which a NaN enters the result."""
    units = reruns.dead_units()
    found: set[str] = set()
    search = _Search(reruns, lambda chosen: reruns.poison_(units[chosen]))
    remaining = torch.arange(len(units), device="cpu")
    while len(found) < _MOST and (first := search.first(remaining)) is not None:
        stretch, name = name_of(reruns, places, int(units[first]))
        rows = search.rows_changed(remaining[remaining == first])
        if stretch not in found:
            found.add(stretch)
            yield name, rows
        remaining = _beyond(stretch, remaining[remaining > first], lambda i: name_of(reruns, places, int(units[i]))[0])


def _beyond(stretch: str, remaining: Int64[Tensor, " n"], stretch_of: Callable[[int], str]) -> Int64[Tensor, " rest"]:
    """Without those at the front that lie in the same stretch of memory."""
    end = bisect.bisect_left(range(len(remaining)), 1, key=lambda i: stretch_of(int(remaining[i])) != stretch)
    return remaining[end:]


def table_influences(reruns: Reruns) -> Iterator[Influence]:
    """Integers beside the elements of a tensor, and unused entries of the block table, that change the result."""
    blocks = int(reruns.inputs.k_cache.shape[0]) if hasattr(reruns.inputs, "k_cache") else 1
    for name, (words, dead) in reruns.dead_integers().items():
        # one past a single page lies in the red zone, which can be read
        other = 1 if name == "seq_lens" else max(1, blocks - 1)

        def change(chosen: Int64[Tensor, " n"], words: Tensor = words, dead: Tensor = dead, other: int = other) -> None:
            words[dead[chosen.to(dead.device)]] = other

        search = _Search(reruns, change)
        first = search.first(torch.arange(len(dead), device="cpu"))
        if first is not None:
            yield f"an integer in memory beside the elements of {name}", search.rows_changed(_only(first))
    if isinstance(reruns.case, PagedDecodeCase):
        yield from _unused_entries(reruns, reruns.case)


def foreign_influences(reruns: Reruns, places: Places, row: int) -> list[str]:
    """Live inputs of other rows on which row number `row` depends, although it must not."""
    found = []
    for name, candidates, change in _foreign(reruns, places, row):
        search = _Search(reruns, change, row=row)
        first = search.first(torch.arange(len(candidates), device="cpu"))
        if first is not None:
            found.append(name(candidates[first]))
    return found


class _Search:
    """Finds the first of numbered changes to the memory that shows in the result, or in one row of it."""

    def __init__(
        self, reruns: Reruns, change: Callable[[Int64[Tensor, " n"]], None], *, row: int | None = None
    ) -> None:
        self._reruns = reruns
        self._change = change
        self._row = row
        reruns.reset()
        self._before = reruns.run()

    def first(self, candidates: Int64[Tensor, " n"]) -> int | None:
        """The smallest of `candidates` that matters; None if none does."""
        if not len(candidates) or not self._matters(candidates):
            return None
        low, high = 0, len(candidates)  # the first `low` do not matter, the first `high` do
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._matters(candidates[:middle]) else (middle, high)
        return int(candidates[low])

    def rows_changed(self, chosen: Int64[Tensor, " n"]) -> Rows:
        """Rows of the result that are not what they were, if these changes are made."""
        self._reruns.reset()
        self._change(chosen)
        return _rows_that_differ(self._before, self._reruns.run(), self._reruns)

    def _matters(self, chosen: Int64[Tensor, " n"]) -> bool:
        rows = self.rows_changed(chosen)
        return bool(rows) if self._row is None else self._row in rows


def _only(change: int) -> Int64[Tensor, "1"]:
    return torch.tensor([change], dtype=torch.int64, device="cpu")


def _rows_that_differ(one: Results, other: Results, reruns: Reruns) -> Rows:
    first, second = reruns.logical(one), reruns.logical(other)
    heads = reruns.case.num_q_heads
    differs = torch.zeros(first[0].shape[0] * heads, dtype=torch.bool, device="cpu")
    for before, after in zip(first, second, strict=True):
        if before is not None and after is not None:
            differs |= (bits(before) != bits(after)).reshape(len(differs), -1).any(-1)
    return frozenset(differs.nonzero()[:, 0].tolist())


def _unused_entries(reruns: Reruns, case: PagedDecodeCase) -> Iterator[Influence]:
    columns = case.max_blocks_per_seq
    unused = [seq * columns + i for seq in range(case.num_seqs) for i in range(case.blocks_of(seq), columns)]
    if not unused:
        return
    pages = reruns.inputs.k_cache.shape[0]

    def change(chosen: Int64[Tensor, " n"]) -> None:
        table = reruns.inputs.block_table
        for i in chosen.tolist():
            seq, column = divmod(unused[i], columns)
            table[seq, column] = 0 if int(table[seq, column]) != 0 else min(1, pages - 1)

    search = _Search(reruns, change)
    first = search.first(torch.arange(len(unused), device="cpu"))
    if first is not None:
        seq, column = divmod(unused[first], columns)
        name = f"block_table[{seq}, {column}], an entry past the last page of sequence {seq}"
        yield name, search.rows_changed(_only(first))


def _foreign(
    reruns: Reruns, places: Places, row: int
) -> Iterator[tuple[Callable[[int], str], Sequence[int], Callable[[Int64[Tensor, " n"]], None]]]:
    """Groups of inputs that a row must not depend on: how to name and how to change one."""
    case = reruns.case
    if not isinstance(case, AttentionCase):
        return
    query = Query.numbered(case, row)
    own = set(places.of_query(query)[query.first_seen :].tolist())
    for tensor_name, slots in (("K", key_slots(reruns.inputs)), ("V", value_tensors(reruns.inputs)[0])):
        others = [place for place in range(places.count) if place not in own]

        def negate(chosen: Int64[Tensor, " n"], slots: Tensor = slots, others: list[int] = others) -> None:
            at = torch.tensor(others, dtype=torch.int64, device="cpu")[chosen].to(slots.device)
            a, b, c = places.coordinates(at)
            turned = -2 * slots[a, b, c].float() + 1
            limit = torch.finfo(slots.dtype).max
            bits(slots)[a, b, c] = bits(turned.clamp(-limit, limit).to(slots.dtype))

        def name(place: int, what: str = tensor_name) -> str:
            return f"{what} of {places.name(place, reader=query.seq)}"

        yield name, others, negate
    queries = [other for other in range(case.num_rows * case.num_q_heads) if other != row]

    def turn(chosen: Int64[Tensor, " n"]) -> None:
        for i in chosen.tolist():
            other, head = divmod(queries[i], case.num_q_heads)
            reruns.inputs.q[other, head] = 1 - 2 * reruns.inputs.q[other, head]

    yield lambda other: f"the query of {row_name(case, other)}", queries, turn


@dataclass(frozen=True)
class Unwritten:
    """`lines` say which elements; `rows` are those that have any.

    `lacks_lse`: there is no LSE at all beside the output, which says nothing about any row.
    """

    lines: tuple[str, ...]
    rows: frozenset[int]
    lacks_lse: bool = False


def find_unwritten(reruns: Reruns) -> Unwritten:
    """Compare runs with different pre-fill. Raises what `Reruns.run` raises."""
    reruns.reset()
    one = reruns.run(prefill="finite")
    reruns.reset()
    reruns.prefill("low")
    third = reruns.run(prefill="low")
    reruns.reset()
    reruns.prefill("nan")
    other = reruns.run(prefill="nan")
    lines, rows, lacks_lse = [], set(), False
    for name, part in one.items():
        differs = bits(part) != bits(other[name])
        if bool(differs.any()):
            held = holds_prefill(other[name], "nan") & holds_prefill(third[name], "low")
            held &= holds_prefill(part, "finite")  # to NaN, or a large number, anything may be added
            what = "is not written" if torch.equal(held, differs) else "is made of memory that was never written"
            where = _along(differs, axes_of(name, reruns.case))
            lines.append(f"{name}[{where}] {what}" if where else f"{name} {what}")
            if name in ("lse", "output_lse") and bool((held & differs).all()):
                lacks_lse = True
            else:
                rows |= _rows_of(differs, reruns.case)
    if any("made of" in line for line in lines):
        lines += _workspaces(reruns)
    return Unwritten(tuple(lines), frozenset(rows), lacks_lse)


def _workspaces(reruns: Reruns) -> Iterator[str]:
    """List what the kernel allocated and did not write in the last run, results aside."""
    for workspace in reruns.workspaces:
        held = holds_prefill(workspace, "nan")
        if bool(held.any()) and not bool(held.all()):
            axes = tuple(f"index along axis {i}:" for i in range(held.dim()))
            dtype = str(workspace.dtype).removeprefix("torch.")
            where = _along(held, axes) or "some elements"
            yield f"not written in its workspace {shape_of(dtype, workspace.shape)}: {where}"


def _along(differs: Bool[Tensor, "..."], axes: tuple[str, ...]) -> str:
    """Along which axes only some indices are concerned."""
    parts = []
    for axis, label in enumerate(axes):
        others = [other for other in range(differs.dim()) if other != axis]
        some = differs.any(others) if others else differs
        if not bool(some.all()):
            parts.append(f"{label} {ranges(some.nonzero()[:, 0].tolist())}")
    return ", ".join(parts)


def _rows_of(differs: Bool[Tensor, "..."], case: Case) -> set[int]:
    if differs.dim() == 2 and axes_of("output_lse", case)[0] == "head":
        differs = differs.mT
    of_row = differs.reshape(differs.shape[0] * differs.shape[1], -1).any(-1)
    return set(of_row.nonzero()[:, 0].tolist())
