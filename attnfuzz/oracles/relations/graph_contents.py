"""What the tensors of one call hold in turn: cases with the shapes, strides and host-side arguments of another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.problems.block_table import num_blocks, physical_pages, used_blocks
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.choices import lse_kinds_of
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.open_cases import OpenCase

__all__ = ["MOST_BYTES", "Content", "contents_of", "with_room"]

_Attention = DenseDecodeCase | PagedDecodeCase

MOST_BYTES = 4 << 20
"""Of a case's tensors. What a graph freezes shows in small ones."""

_LEAST_MORE, _MOST_MORE = 64, 512
"""Tokens by which a sequence grows: past the ends of pages, tiles and splits."""

_MOST_SPARE, _MOST_COLUMNS = 1 << 20, 1 << 16
_SHOWN_LENGTHS = 8
_OTHER_SEEDS = (0x11, 0x22, 0x33, 0x44)


class Content(NamedTuple):
    """`words` end the sentence "out is x when the graph is replayed ..."."""

    case: Case
    words: str


def with_room(declaration: Declaration, case: Case) -> Case:
    """`case` in tensors that have room for longer sequences, as those have that a server captures a graph with.

    As it is if that takes too much memory.
    """
    if isinstance(case, MergeStatesCase | OpenCase):
        return case
    roomy = _with_room(case, _longer(declaration, case))
    return roomy if tensor_nbytes(roomy) <= MOST_BYTES else case


def contents_of(declaration: Declaration, captured: Case) -> list[Content]:
    """What a call captured on `captured` is replayed on: that first, then other lengths, pages and numbers."""
    if isinstance(captured, MergeStatesCase):
        others = list(_states(declaration, captured))
    elif isinstance(captured, OpenCase):
        others = []
    else:
        others = list(_lengths(declaration, captured))
        if isinstance(captured, PagedAttentionCase):
            others += _queries(declaration, captured)
        if isinstance(captured, PagedDecodeCase):
            others += _pages(captured)
    return [Content(captured, "with what it was captured with"), *others]


def _longer(declaration: Declaration, case: _Attention) -> tuple[int, ...]:
    """Each sequence longer, empty ones included; no longer than the kernel takes."""
    most = declaration.supports.max_seq_len
    grown = (length + min(_LEAST_MORE + length, _MOST_MORE) for length in case.seq_lens)
    return tuple(grown if most is None else (min(length, most) for length in grown))


def _with_room(case: _Attention, seq_lens: tuple[int, ...]) -> _Attention:
    if isinstance(case, DenseDecodeCase):
        rows = max(case.max_seq_len, *seq_lens) - max(case.seq_lens)
        return msgspec.structs.replace(case, extra_rows=rows)
    longer = _bare(case, seq_lens)
    columns = max(case.max_blocks_per_seq, *map(longer.blocks_of, range(case.num_seqs)))
    blocks = max(num_blocks(case), used_blocks(longer)) + 1  # one that is free lets all pages move
    pages = msgspec.structs.replace(
        case.pages,
        extra_columns=min(columns - max(map(case.blocks_of, range(case.num_seqs))), _MOST_COLUMNS),
        spare_blocks=min(blocks - used_blocks(case), _MOST_SPARE),
    )
    roomy = msgspec.structs.replace(case, pages=pages)
    if not isinstance(roomy, PagedAttentionCase):
        return roomy
    return msgspec.structs.replace(roomy, seq_slack=max(roomy.max_seq_len, *seq_lens) - max(roomy.seq_lens))


def _lengths(declaration: Declaration, captured: _Attention) -> Iterator[Content]:
    supports, old = declaration.supports, captured.seq_lens
    least = 0 if supports.empty_sequences else 1
    changes = {
        "shortened": tuple(max(min(length, least), length // 2) for length in old),
        "grown": _longer(declaration, captured),
    }
    if isinstance(captured, PagedAttentionCase):  # as many query tokens as before, which q has rows for
        changes = {how: tuple(map(max, lens, captured.query_lens)) for how, lens in changes.items()}
    elif supports.empty_sequences:  # rows past the end of a batch that is smaller than the one captured
        changes["padded"] = (*old[: len(old) // 2], *(0 for _ in old[len(old) // 2 :]))
    for (how, seq_lens), seed in zip(changes.items(), _OTHER_SEEDS, strict=False):
        case = _holding(captured, seq_lens, seed)
        if case is not None and seq_lens != old:
            yield Content(case, f"with seq_lens {how} from {_shown(old)} to {_shown(seq_lens)}")


def _queries(declaration: Declaration, captured: PagedAttentionCase) -> Iterator[Content]:
    """The same query tokens in all, as the last of other sequences; and fewer, the others as padding."""
    query_lens = captured.query_lens[::-1]
    seq_lens = tuple(map(max, captured.seq_lens, query_lens))
    case = _holding(captured, seq_lens, _OTHER_SEEDS[0], query_lens)
    if case is not None and query_lens != captured.query_lens:
        yield Content(case, f"with query_lens changed from {_shown(captured.query_lens)} to {_shown(query_lens)}")
    fewer = tuple(map(min, captured.query_lens, itertools.repeat(1)))
    if declaration.supports.padding_tokens and fewer != captured.query_lens:
        case = _holding(captured, captured.seq_lens, _OTHER_SEEDS[1], fewer)
        if case is not None:
            yield Content(case, f"with query_lens shortened from {_shown(captured.query_lens)} to {_shown(fewer)}")


def _pages(captured: PagedDecodeCase) -> list[Content]:
    """The same lengths, pages at other places: the first order tried that moves one."""
    for seed in _OTHER_SEEDS:
        pages = msgspec.structs.replace(captured.pages, order="shuffled", seed=captured.pages.seed ^ seed)
        case = _holding(msgspec.structs.replace(captured, pages=pages), captured.seq_lens, _OTHER_SEEDS[-1])
        if isinstance(case, PagedDecodeCase) and physical_pages(case) != physical_pages(captured):
            return [Content(case, f"with seq_lens={_shown(captured.seq_lens)} on other pages")]
    return []


def _holding(
    captured: _Attention, seq_lens: tuple[int, ...], seed: int, query_lens: tuple[int, ...] | None = None
) -> _Attention | None:
    """Other lengths and numbers in tensors of the same shapes; None if there is no room."""
    values = msgspec.structs.replace(captured.values, needles=(), seed=captured.values.seed ^ seed)
    renewed: Any = msgspec.structs.replace(captured, values=values)
    if isinstance(renewed, DenseDecodeCase):
        rows = renewed.max_seq_len - max(seq_lens)
        return msgspec.structs.replace(renewed, seq_lens=seq_lens, extra_rows=rows) if rows >= 0 else None
    if isinstance(renewed, PagedAttentionCase) and max(seq_lens) > renewed.max_seq_len:
        return None
    bare = _bare(renewed, seq_lens, query_lens)
    columns = renewed.max_blocks_per_seq - max(map(bare.blocks_of, range(bare.num_seqs)))
    spare = num_blocks(renewed) - used_blocks(bare)
    if columns < 0 or spare < 0:
        return None
    changes: dict[str, Any] = {"pages": msgspec.structs.replace(bare.pages, extra_columns=columns, spare_blocks=spare)}
    if isinstance(bare, PagedAttentionCase):  # the bounds are frozen
        changes["seq_slack"] = renewed.max_seq_len - max(bare.seq_lens)
        changes["query_slack"] = renewed.max_query_len - max(bare.query_lens)
        changes["padding_tokens"] = renewed.num_query_slots - bare.num_rows
    return msgspec.structs.replace(bare, **changes)


def _bare(
    case: PagedDecodeCase, seq_lens: tuple[int, ...], query_lens: tuple[int, ...] | None = None
) -> PagedDecodeCase:
    """With other lengths, and no column nor page beyond what they need."""
    pages = msgspec.structs.replace(case.pages, extra_columns=0, spare_blocks=0)
    values = msgspec.structs.replace(case.values, needles=())
    lengths = {"seq_lens": seq_lens, "query_lens": query_lens} if query_lens else {"seq_lens": seq_lens}
    return msgspec.structs.replace(case, **lengths, pages=pages, values=values)


def _states(declaration: Declaration, captured: MergeStatesCase) -> Iterator[Content]:
    swapped = tuple((suffix, prefix) for prefix, suffix in captured.lse_pairs)
    seed = captured.seed ^ _OTHER_SEEDS[0]
    yield Content(msgspec.structs.replace(captured, lse_pairs=swapped, seed=seed), "with other states")
    if "-inf" in lse_kinds_of(declaration.supports):
        empty = msgspec.structs.replace(captured, lse_pairs=(("-inf", "-inf"),), seed=captured.seed ^ _OTHER_SEEDS[1])
        yield Content(empty, "with both states of every row empty")


def _shown(seq_lens: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, seq_lens[:_SHOWN_LENGTHS]))
    return f"[{shown}, ...]" if len(seq_lens) > _SHOWN_LENGTHS else f"[{shown}]"
