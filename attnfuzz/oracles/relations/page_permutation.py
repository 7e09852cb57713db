"""Moves the pages to other places in the cache, with the same tokens on them, and compares bits.

Attention is over logical positions. Where a page lies decides which addresses are read, not which numbers, nor the
order in which they are added. So nothing may round differently, and the bits are equal for every kernel that promises
equal bits for equal inputs. What this sees: a result that depends on the physical order of pages within the error
bound, as of additions in the order of page ids, or of a live token of another page that enters with a small weight.

Pages only change places with those at the same distance from a multiple of 64 bytes: libraries for CPUs add in another
order where the alignment of an operand differs (Intel, "Developer Guide for oneMKL", "Obtaining Numerically
Reproducible Results").

Of a user's problem, tensors whose entries another one names are such a cache, if its reference says the same of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.open_module import OpenValues, rearranged
from attnfuzz.inputs.registry import Contents
from attnfuzz.inputs.writing import Placement, placements
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.page_relocation import named_groups, pages_to_same_alignment
from attnfuzz.oracles.relations.relation import Changed, FurtherRuns, Relation, Results, one_by_one, unequal_bits
from attnfuzz.problems.block_table import num_blocks, physical_pages, used_blocks
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.values.tokens import token_table
from attnfuzz.verdict import Failure

_SHOWN_PAGES = 6


def _applies(declaration: Declaration, case: Any) -> bool:
    if not declaration.supports.deterministic:
        return False
    if isinstance(case, OpenCase):
        return bool(_exchanged(case))
    return used_blocks(case) > 0 and num_blocks(case) > pages_to_same_alignment(case)


def _further(_: Declaration, case: Any, contents: Contents) -> FurtherRuns | None:
    if isinstance(case, OpenCase):
        values = rearranged(case, contents.values, _renamed(case, contents.values))
        words, moves, placement = "with its entries at other places", _list_of_names(case), None
    else:
        moved_to = _reversed_order(num_blocks(case), pages_to_same_alignment(case))
        values, moves, placement = contents.values, _list_of_moves(case, moved_to), _moved(case, moved_to, contents)
        words = "with its pages at other places in the cache"
    if not moves or values is None:
        return None
    details = (moves, "the block table names them there; nothing else changed")

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        return unequal_bits(registry.PAGE_PERMUTATION, case, one, others[0], words, details=details)

    return FurtherRuns([Changed(words, case, values, placement)], compare)


def _reversed_order(total: int, step: int) -> list[int]:
    """The new place of each page: the order is reversed among pages of the same alignment, ``step`` pages apart."""
    moved_to = list(range(total))
    for first in range(min(step, total)):
        places = range(first, total, step)
        for page, place in zip(places, reversed(places), strict=True):
            moved_to[page] = place
    return moved_to


def _exchanged(case: OpenCase) -> dict[str, tuple[list[str], int, list[int]]]:
    """By each tensor of names, those whose entries it names, the places of an entry, and the new place of each."""
    return {
        names: (list(group), spec.places, _reversed_order(spec.shape[0], step))
        for names, group, step in named_groups(case)
        for spec in [next(iter(group.values()))]
        if spec.shape[0] > step and all(one.role == "input" for one in (*group.values(), tensor_specs(case)[names]))
    }


def _renamed(case: OpenCase, values: OpenValues) -> dict[str, tuple[Tensor, Tensor]]:
    """The tensors with named entries at their new places, and names that say so; others stay as they are."""
    written = dict(values.written)
    for names, (group, places, moved_to) in _exchanged(case).items():
        place = torch.tensor(moved_to, dtype=torch.int64, device="cpu")
        for name in group:
            written[name] = (written[name][0][place], written[name][1][place])  # it is its own inverse
        ids, is_written = written[names]
        entry = ids.long() // places
        exists = (entry >= 0) & (entry < len(place))
        new = place[entry.clamp(0, len(place) - 1)] * places + ids.long() % places
        written[names] = torch.where(exists, new, ids.long()).to(ids.dtype), is_written
    return written


def _list_of_names(case: OpenCase) -> str:
    return "; ".join(
        f"entry {entry} of {' and '.join(group)} is now entry {place}, and {names} says so"
        for names, (group, _, moved_to) in _exchanged(case).items()
        for entry, place in [next(pair for pair in enumerate(moved_to) if pair[0] != pair[1])]
    )


def _moved(case: PagedDecodeCase, moved_to: list[int], contents: Contents) -> Placement:
    """Live slots at the new places, and a table that names them there; ids of pages that do not exist stay."""
    device = contents.values.q.device
    placement = contents.placement or placements([case], token_table([case], device))[0]
    pages, offsets = placement.slots
    table = placement.block_table
    if table is None:
        raise TypeError(f"a case of {case.problem} has no block table")
    places = torch.tensor(moved_to, dtype=torch.int64, device=device)
    exists = (table >= 0) & (table < len(moved_to))
    new_table = torch.where(exists, places[table.clamp(0, len(moved_to) - 1).long()], table).to(table.dtype)
    return replace(placement, slots=(places[pages], offsets), block_table=new_table)


def _list_of_moves(case: PagedDecodeCase, moved_to: list[int]) -> str:
    pages = dict.fromkeys(page for row in physical_pages(case) for page in row)
    moves = [f"page {page} is now page {moved_to[page]}" for page in pages if moved_to[page] != page]
    return ", ".join(moves[:_SHOWN_PAGES]) + (", ..." if len(moves) > _SHOWN_PAGES else "")


PAGE_PERMUTATION = Relation(
    registry.PAGE_PERMUTATION,
    _applies,
    one_by_one(_further),
    further=_further,
    cases=PagedDecodeCase,
    of_any_problem=True,
)
