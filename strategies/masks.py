"""Masks: trees as speculative decoding makes them, pages that are skipped, chunks, and patterns that are anything."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.problems.masks import ALL_HIDDEN, Mask, MaskKind
from attnfuzz.strategies.decisions import Decisions

_SEQS = (1, 2, 3)
"""Sequences that differ; more share the numbers of the first ones."""
_MOST_NUMBERS = 6
_TREES = ("root", "sibling", "before", "any")
_LEAST_TILE = 16
_BRANCHES = (17, 32, 33, 48, 65, 100)
"""Query tokens before the second branch of a tree."""
_CHUNKS = (1, 2, 3, 5, 16, 17, 32, 64, 100)
_BITS = (0, 1, 2, 0x8000, 0x5555, 0xAAAA, 0xFFFE, 0x7FFF, 0x00FF, 0xFF00, ALL_HIDDEN)


def mask_bytes() -> int:
    """How many bytes `decide_mask` reads."""
    return 2 + len(_SEQS) * (1 + 2 * _MOST_NUMBERS)


def decide_mask(
    decisions: Decisions,
    kinds: Sequence[MaskKind],
    query_lens: Sequence[int],
    num_pages: Sequence[int],
    *,
    may_hide_all: bool,
    per_sequence: bool = True,
    edge: int = 0,
    pages_of_context: int = 0,
) -> Mask:
    """A mask of one of ``kinds`` for sequences with so many query tokens and pages.

    Unless it ``may_hide_all``, every query token sees some key of its sequence; unless ``per_sequence``, all
    sequences have the numbers of one that fit the longest.

    ``edge``: in the first sequence, where some rows are to begin or to see nothing before; 0 for none. Of its pages
    before that, ``pages_of_context`` hold no query token.
    """
    kind = decisions.pick(tuple(kinds))
    if kind in ("causal", "full"):
        return Mask(kind=kind)
    if edge and kind == "chunks":
        return Mask(kind=kind, seqs=((edge,),))
    if edge and kind == "pages" and pages_of_context and (per_sequence or may_hide_all):
        return Mask(kind=kind, seqs=_hidden_pages(decisions, pages_of_context, len(query_lens) if per_sequence else 1))
    if edge and kind == "tree" and query_lens[0] > _LEAST_TILE and per_sequence and decisions.pick((False, True)):
        return Mask(kind=kind, seqs=(_late_branch(decisions, query_lens[0]), *[()] * (len(query_lens) - 1)))
    if not per_sequence:
        query_lens, num_pages = (max(query_lens),), (max(num_pages),)
    count = decisions.pick(_SEQS[: len(query_lens)])
    seqs = []
    for seq in range(count):
        if kind == "tree":
            seqs.append(_parents(decisions, query_lens[seq]))
        elif kind == "chunks":
            seqs.append((decisions.pick(_CHUNKS),))
        elif kind == "pages":
            seqs.append(_pages(decisions, num_pages[seq], first=0 if may_hide_all else 1))
        else:
            words = _BITS if may_hide_all else tuple(word for word in _BITS if not word & 1)
            seqs.append(tuple(decisions.pick(words) for _ in range(decisions.pick(range(1, 4)))))
    return Mask(kind=kind, seqs=tuple(seqs))


def _parents(decisions: Decisions, query_len: int) -> tuple[int, ...]:
    """Several tokens that follow the context, siblings, chains, and whatever else."""
    found: list[int] = []
    for j in range(min(query_len, _MOST_NUMBERS)):
        way = decisions.pick(_TREES)
        parent = decisions.pick(range(-1, max(1, j))) if way == "any" else -1
        parent = found[-1] if way == "sibling" and found else j - 1 if way == "before" else parent
        found.append(min(parent, j - 1))
    return tuple(found)


def _late_branch(decisions: Decisions, query_len: int) -> tuple[int, ...]:
    """A chain, and behind it a second one from the same token: it sees nothing of the first, which is tiles long."""
    begins = decisions.pick([one for one in _BRANCHES if one < query_len][-2:] or [query_len - 1])
    return (*range(-1, begins - 1), decisions.pick((-1, 0, 1)))


def _hidden_pages(decisions: Decisions, count: int, num_seqs: int) -> tuple[tuple[int, ...], ...]:
    """The first ``count`` of the first sequence, or those between its first one and them; of others none."""
    first = decisions.pick((0, 0, 1))
    return (tuple(range(first if first < count else 0, count)), *[()] * (num_seqs - 1))


def _pages(decisions: Decisions, num_pages: int, *, first: int) -> tuple[int, ...]:
    """The last page or the one before it is skipped more often than others: there kernels differ."""
    choices = [page for page in (*range(num_pages), num_pages - 1, num_pages - 2) if page >= first]
    if not choices:
        return ()
    return tuple(sorted({decisions.pick(choices) for _ in range(decisions.pick(range(1, 4)))}))
