"""Cases whose tensors have the shapes of a case's, and which differ from it in one respect. Torch-free.

Kernels find what they keep (a plan, a launch, a captured graph, a workspace) by the shapes of their tensors, and leave
out of that key what else it was made of: a scale, strides, what a table says. Such a case finds it, and must not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from attnfuzz.cases.facets.facet import Changes, Options, changed
from attnfuzz.cases.facets.storage import with_strides
from attnfuzz.cases.supported import supports_case
from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase, VarlenCase
from attnfuzz.problems.block_table import num_blocks, physical_pages, used_blocks
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import (
    caches_of,
    dtypes_of,
    lying_alike,
    stride_kinds_of,
    variants_of,
)
from attnfuzz.problems.module import has_query_lens, module_of
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import Supports

C = TypeVar("C", bound=Case)
A = TypeVar("A", bound=AttentionCase)

_LEAST_MORE, _MOST_MORE = 64, 512
"""Tokens by which a sequence grows: past the ends of pages, tiles and splits."""
_MOST_SPARE, _MOST_COLUMNS = 1 << 20, 1 << 16
_SHOWN_LENGTHS = 8
_OTHER_SEEDS = (0x11, 0x22, 0x33, 0x44)
_LARGEST_SCALE = 64
_LARGEST_CAP = 1024.0
_CAP = 1.0
"""Cap for scores that are not capped: about as large as these are, so that it shows."""


class Twin(NamedTuple):
    """`words` end a sentence about a call: "with scale=0.5"."""

    case: Case
    words: str


def twins_of(case: Case, *, supports: Supports, options: Options) -> list[Twin]:
    """The twins that a kernel with these ``supports`` and ``options`` takes, first what is told to it as numbers.

    None of a case of a user's own problem, of whose fields nothing is known.
    """
    if isinstance(case, OpenCase):
        return []
    shapes = {name: spec.shape for name, spec in tensor_specs(case).items()}
    return [
        one
        for one in (*_said(case, supports, options), *_lying_otherwise(case, supports), *other_contents(case, supports))
        if one.case != case
        and supports_case(supports, options, one.case)
        and all(shapes.get(name, spec.shape) == spec.shape for name, spec in tensor_specs(one.case).items())
    ]


def _said(case: Any, supports: Supports, options: Options) -> Iterator[Twin]:
    """With another of the numbers and choices that are told beside the tensors."""
    if isinstance(case, AttentionCase):
        scale = 2 * case.scale if 2 * case.scale <= _LARGEST_SCALE else case.scale / 2
        yield from _with(case, f"scale={scale:g}", {"scale": scale, **_telling_scores(case)})
        yield from _other_variants(case, supports)
        cache = next((kv for kv in reversed(caches_of(case.problem, supports, case.dtype)) if kv != _cached(case)), "")
        if cache != "":
            yield from _with(case, f"kv={cache or 'plain'}", {"kv": None if cache is None else _quantised(case, cache)})
    dtype = next((dtype for dtype in reversed(dtypes_of(supports)) if dtype != case.dtype), None)
    if dtype is not None:
        yield from _with(case, f"dtype={dtype}", {"dtype": dtype})
    for words, changes in module_of(case.problem).told_otherwise(case, supports):
        yield from _with(case, words, changes)
    for name, choices in options.items():
        other = next((choice for choice in choices if choice != case.options.get(name)), None)
        if other is not None:
            yield from _with(case, f"{name}={other}", {"options": {**case.options, name: other}})


def _with(case: Case, words: str, changes: Changes) -> Iterator[Twin]:
    other = changed(case, **changes)
    if other is not None:
        yield Twin(other, f"with {words}")


def _telling_scores(case: AttentionCase) -> Changes:
    """Scores that differ, where they are all equal: what is made of equal ones has no weight."""
    return {"values": msgspec.structs.replace(case.values, keys="normal")} if case.values.keys == "equal" else {}


def _other_variants(case: AttentionCase, supports: Supports) -> Iterator[Twin]:
    known, variant = variants_of(case.problem, supports), case.variant
    if "window" in known:
        window = variant.window or max(case.seq_lens) + 1
        other = window // 2 or 2
        yield from _with(case, f"window={other}", {"variant": msgspec.structs.replace(variant, window=other)})
    if "soft_cap" in known and variant.alibi is None:
        cap = _CAP if variant.soft_cap is None else min(2 * variant.soft_cap, _LARGEST_CAP)
        cap = cap / 2 if cap == variant.soft_cap else cap
        changes = {"variant": msgspec.structs.replace(variant, soft_cap=cap), **_telling_scores(case)}
        yield from _with(case, f"soft_cap={cap:g}", changes)


def _cached(case: AttentionCase) -> str | None:
    return None if case.kv is None else case.kv.dtype


def _quantised(case: AttentionCase, dtype: Any) -> QuantisedKv:
    return QuantisedKv(dtype=dtype) if case.kv is None else msgspec.structs.replace(case.kv, dtype=dtype)


def _lying_otherwise(case: Any, supports: Supports) -> Iterator[Twin]:
    """Cases whose tensors are read or written at other strides, and from where no load of 16 bytes is aligned."""
    allowed = supports.strides
    for names in dict.fromkeys(lying_alike(allowed, name) for name in case.tensor_names):
        present = [name for name in names if name in tensor_specs(case)]
        kinds = stride_kinds_of(allowed, names[0])
        others = [kind for kind in kinds if kind != case.strides.get(names[0], "contiguous")]
        moved = next((kind for kind in others if kind != "offset"), None)
        for kind in (moved, "offset" if "offset" in others else None):
            if present and kind is not None:
                yield from _with(case, f"strides.{present[0]}={kind}", with_strides(case, present, kind))


def other_contents(case: Any, supports: Supports) -> list[Twin]:
    """With the same strides and the same numbers beside the tensors: other lengths, pages and numbers in these."""
    if not isinstance(case, AttentionCase):
        return [Twin(other, words) for other, words in module_of(case.problem).other_contents(case, supports)]
    queries = _queries(case, supports) if isinstance(case, VarlenCase) else ()
    pages = _pages(case) if isinstance(case, PagedDecodeCase) else ()
    return [*_lengths(case, supports), *queries, *pages]


def _longer(case: AttentionCase, supports: Supports) -> tuple[int, ...]:
    """Each sequence longer, empty ones included; no longer than the kernel takes."""
    most = supports.max_seq_len
    grown = (length + min(_LEAST_MORE + length, _MOST_MORE) for length in case.seq_lens)
    return tuple(grown if most is None else (min(length, most) for length in grown))


def with_room(case: Any, supports: Supports) -> Any:
    """``case`` in tensors that have room for longer sequences."""
    if not isinstance(case, AttentionCase):
        return case
    longest = max(case.max_seq_len, *_longer(case, supports)) - max(case.seq_lens)
    if not isinstance(case, PagedDecodeCase):
        return msgspec.structs.replace(case, extra_rows=longest)
    longer = _bare(case, _longer(case, supports))
    columns = max(case.max_blocks_per_seq, *map(longer.blocks_of, range(case.num_seqs)))
    blocks = max(num_blocks(case), used_blocks(longer)) + 1  # one that is free lets all pages move
    pages = msgspec.structs.replace(
        case.pages,
        extra_columns=min(columns - max(map(case.blocks_of, range(case.num_seqs))), _MOST_COLUMNS),
        spare_blocks=min(blocks - used_blocks(case), _MOST_SPARE),
    )
    bounds = {"seq_slack": longest} if isinstance(case, VarlenCase) else {}
    return msgspec.structs.replace(case, pages=pages, **bounds)


def _lengths(case: AttentionCase, supports: Supports) -> Iterator[Twin]:
    old = case.seq_lens
    least = 0 if supports.empty_sequences else 1
    changes = {
        "shortened": tuple(max(min(length, least), length // 2) for length in old),
        "grown": _longer(case, supports),
    }
    if has_query_lens(case.problem):  # as many query tokens as before, which q has rows for
        changes = {how: tuple(map(max, lens, case.query_counts)) for how, lens in changes.items()}
    elif supports.empty_sequences:  # rows past the end of a batch that is smaller than the one captured
        changes["padded"] = (*old[: len(old) // 2], *(0 for _ in old[len(old) // 2 :]))
    for (how, seq_lens), seed in zip(changes.items(), _OTHER_SEEDS, strict=False):
        other = _holding(case, seq_lens, seed)
        if other is not None and seq_lens != old:
            yield Twin(other, f"with seq_lens {how} from {_shown(old)} to {_shown(seq_lens)}")


def _queries(case: VarlenCase, supports: Supports) -> Iterator[Twin]:
    """Cases with as many query tokens, as the last of other sequences; and with fewer, the others as padding."""
    query_lens = case.query_lens[::-1]
    seq_lens = tuple(map(max, case.seq_lens, query_lens))
    other = _holding(case, seq_lens, _OTHER_SEEDS[0], query_lens)
    if other is not None and query_lens != case.query_lens:
        yield Twin(other, f"with query_lens changed from {_shown(case.query_lens)} to {_shown(query_lens)}")
    fewer = tuple(map(min, case.query_lens, itertools.repeat(1)))
    if supports.padding_tokens and fewer != case.query_lens:
        other = _holding(case, case.seq_lens, _OTHER_SEEDS[1], fewer)
        if other is not None:
            yield Twin(other, f"with query_lens shortened from {_shown(case.query_lens)} to {_shown(fewer)}")
    half = case.num_seqs // 2
    unasked = (*case.query_lens[:half], *itertools.repeat(0, case.num_seqs - half))
    if supports.padding_tokens and supports.empty_sequences and any(unasked) and unasked != case.query_lens:
        for lens, words in ((case.seq_lens, "keep their lengths"), (case.seq_lens[:half], "are empty")):
            seq_lens = (*lens, *itertools.repeat(0, case.num_seqs - len(lens)))
            other = _holding(case, seq_lens, _OTHER_SEEDS[2], unasked)
            if other is not None:
                yield Twin(
                    other,
                    f"with the last {case.num_seqs - half} of {case.num_seqs} sequences, which {words}, as padding",
                )


def _pages(case: PagedDecodeCase) -> list[Twin]:
    """Cases of the same lengths with pages at other places: the first order tried that moves one."""
    for seed in _OTHER_SEEDS:
        pages = msgspec.structs.replace(case.pages, order="shuffled", seed=case.pages.seed ^ seed)
        other = _holding(msgspec.structs.replace(case, pages=pages), case.seq_lens, _OTHER_SEEDS[-1])
        if other is not None and physical_pages(other) != physical_pages(case):
            return [Twin(other, f"with seq_lens={_shown(case.seq_lens)} on other pages")]
    return []


def _holding(case: A, seq_lens: tuple[int, ...], seed: int, query_lens: tuple[int, ...] | None = None) -> A | None:
    """Other lengths and numbers in tensors of the same shapes; None if there is no room."""
    values = msgspec.structs.replace(case.values, needles=(), seed=case.values.seed ^ seed)
    renewed: Any = msgspec.structs.replace(case, values=values)
    if not renewed.page_size:
        rows = renewed.max_seq_len - max(seq_lens)
        return msgspec.structs.replace(renewed, seq_lens=seq_lens, extra_rows=rows) if rows >= 0 else None
    has_bounds = has_query_lens(renewed.problem)
    if has_bounds and max(seq_lens) > renewed.max_seq_len:
        return None
    bare: Any = _bare(renewed, seq_lens, query_lens)
    columns = renewed.max_blocks_per_seq - max(map(bare.blocks_of, range(bare.num_seqs)))
    spare = num_blocks(renewed) - used_blocks(bare)
    if columns < 0 or spare < 0:
        return None
    changes: dict[str, Any] = {"pages": msgspec.structs.replace(bare.pages, extra_columns=columns, spare_blocks=spare)}
    if has_bounds:  # which are frozen
        changes["seq_slack"] = renewed.max_seq_len - max(bare.seq_lens)
        changes["query_slack"] = renewed.max_query_len - max(bare.query_lens)
        changes["padding_tokens"] = renewed.num_query_slots - bare.num_rows
    held: A = msgspec.structs.replace(bare, **changes)
    return held


def _bare(
    case: PagedDecodeCase, seq_lens: tuple[int, ...], query_lens: tuple[int, ...] | None = None
) -> PagedDecodeCase:
    """With other lengths, and no column nor page beyond what they need."""
    pages = msgspec.structs.replace(case.pages, extra_columns=0, spare_blocks=0, taken=())
    values = msgspec.structs.replace(case.values, needles=())
    lengths = {"seq_lens": seq_lens, "query_lens": query_lens} if query_lens else {"seq_lens": seq_lens}
    return msgspec.structs.replace(case, **lengths, pages=pages, values=values)


def _shown(seq_lens: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, seq_lens[:_SHOWN_LENGTHS]))
    return f"[{shown}, ...]" if len(seq_lens) > _SHOWN_LENGTHS else f"[{shown}]"
