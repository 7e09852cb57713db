"""The same tokens on the same pages, and the pages at other places in the cache: the same bits.

Attention is over logical positions. Where a page lies decides which addresses are read, not which numbers, nor the
order in which they are added. So nothing may round differently, and the bits are equal for every kernel that promises
equal bits for equal inputs. What this sees: a result that depends on the physical order of pages within the error
bound, as of additions in the order of page ids, or of a live token of another page that enters with a small weight.

Pages only change places with those at the same distance from a multiple of 64 bytes: libraries for CPUs add in another
order where the alignment of an operand differs (Intel, "Developer Guide for oneMKL", "Obtaining Numerically
Reproducible Results").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import Contents
from attnfuzz.inputs.writing import Placement, placements
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.page_relocation import pages_to_same_alignment
from attnfuzz.oracles.relations.relation import Changed, FurtherRuns, Relation, Results, one_by_one, unequal_bits
from attnfuzz.problems.block_table import num_blocks, physical_pages, used_blocks
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.values.tokens import token_table
from attnfuzz.verdict import Failure

_SHOWN_PAGES = 6


def _applies(declaration: Declaration, case: PagedDecodeCase) -> bool:
    moves = used_blocks(case) > 0 and num_blocks(case) > pages_to_same_alignment(case)
    return moves and declaration.supports.deterministic


def _further(declaration: Declaration, case: PagedDecodeCase, contents: Contents) -> FurtherRuns | None:
    del declaration
    moved_to = _reversed_order(case)
    moves = _list_of_moves(case, moved_to)
    if not moves:
        return None
    words = "with its pages at other places in the cache"
    details = (moves, "the block table names them there; nothing else changed")

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        return unequal_bits(registry.PAGE_PERMUTATION, case, one, others[0], words, details=details)

    return FurtherRuns([Changed(words, case, contents.values, _moved(case, moved_to, contents))], compare)


def _reversed_order(case: PagedDecodeCase) -> list[int]:
    """The new place of each page: the order is reversed among pages of the same alignment."""
    total, step = num_blocks(case), pages_to_same_alignment(case)
    moved_to = list(range(total))
    for first in range(min(step, total)):
        places = range(first, total, step)
        for page, place in zip(places, reversed(places), strict=True):
            moved_to[page] = place
    return moved_to


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
    registry.PAGE_PERMUTATION, _applies, one_by_one(_further), further=_further, cases=PagedDecodeCase
)
