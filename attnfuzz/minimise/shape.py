"""Proposals for the shape of an attention case: sequences, lengths, heads, pages and splits. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.edits import changed, keep_sequences, rescaled_length, with_heads, with_lengths
from attnfuzz.cases.search import Proposal, first_of, lower_integer
from attnfuzz.minimise.size import length_rank
from attnfuzz.problems.boundaries import DEFAULT_TILES, num_splits_of, steps_of
from attnfuzz.problems.cases import AttentionCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.choices import (
    block_sizes_of,
    gqa_ratios_of,
    head_counts_of,
    is_power_of_two,
    layouts_of,
    lying_alike,
    min_seq_len,
    split_counts_of,
)

__all__ = [
    "drop_sequences",
    "follow_step",
    "lower_block_size",
    "lower_heads",
    "lower_layout",
    "lower_lengths",
    "lower_num_splits",
]

_MOST_RESCALED = 4


def drop_sequences(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    """Halves, quarters, … single sequences (delta debugging); one with pages in another order; the simplest first."""
    chunk = case.num_seqs // 2
    while chunk:
        start = 0
        while start < case.num_seqs > chunk:
            kept = [seq for seq in range(case.num_seqs) if not start <= seq < start + chunk]
            candidate = keep_sequences(case, kept)
            if (yield candidate) and candidate is not None:
                case = candidate
            else:
                start += chunk
        chunk //= 2
    case = yield from first_of(case, _alone_on_moved_pages(case))
    simplest_first = sorted(range(case.num_seqs), key=lambda seq: length_rank(case.seq_lens[seq]))
    return (yield from first_of(case, [keep_sequences(case, simplest_first)]))


def lower_lengths(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    low = min_seq_len(domain.supports)
    if case.num_seqs > 2:
        case = yield from lower_integer(case, max(case.seq_lens), max(1, low), _cap_lengths)
    for seq in range(case.num_seqs):
        length = case.seq_lens[seq]
        edit = _set_length(seq)
        case = yield from first_of(case, [edit(case, 1)])  # simpler than 0, too
        case = yield from lower_integer(case, length, low, edit, likely=set(_likely_lengths(case, length)))
    return case


def lower_heads(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    ratio = case.gqa_ratio
    if (counts := head_counts_of(domain.supports)) is not None:
        return (yield from first_of(case, [with_heads(case, kv, q // kv) for q, kv in counts if q < case.num_q_heads]))
    case = yield from lower_integer(case, case.num_kv_heads, 1, lambda case, count: with_heads(case, count, ratio))
    simpler = [simpler for simpler in gqa_ratios_of(domain.supports) if simpler < ratio]
    return (yield from first_of(case, [with_heads(case, case.num_kv_heads, ratio) for ratio in simpler]))


def lower_block_size(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    """Fewer pages for the same tokens; or smaller pages with lengths that end at the same place of a page."""
    if not isinstance(case, PagedDecodeCase):
        return case
    simplest: dict[tuple[int, bool], int] = {}
    for size in block_sizes_of(domain.supports):
        pages = sum(-(-length // size) for length in case.seq_lens)
        simplest.setdefault((pages, not is_power_of_two(size)), size)
    found = yield from first_of(case, [changed(case, block_size=size) for _, size in sorted(simplest.items())])
    smaller = [size for size in block_sizes_of(domain.supports) if size < found.block_size]
    alike = [size for size in smaller if is_power_of_two(size) == is_power_of_two(found.block_size)]
    for size in dict.fromkeys((*smaller[:_MOST_RESCALED], *alike[:_MOST_RESCALED])):
        found = yield from first_of(found, [_rescale_pages(found, size), _fill_pages(found, size)])
    return found


def lower_layout(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    if not isinstance(case, PagedDecodeCase):
        return case
    strides = dict(case.strides)
    if case.layout == "interleaved" and "k_cache" in strides:  # one tensor, which becomes two
        strides |= dict.fromkeys(lying_alike(domain.supports.strides, "k_cache"), strides["k_cache"])
    layouts = [layout for layout in layouts_of(domain.supports) if layout != case.layout]
    return (yield from first_of(case, [changed(case, layout=layout, strides=strides) for layout in layouts]))


def lower_num_splits(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    if not isinstance(case, SplitDecodeCase):
        return case
    likely = split_counts_of(domain.supports) if domain.supports.combinations else ()
    found = yield from lower_integer(
        case, case.num_splits, 1, lambda case, count: changed(case, num_splits=count), likely=likely
    )
    fewer = range(1, min(found.num_splits, _MOST_RESCALED))
    return (yield from first_of(found, [_rescale_splits(found, count) for count in fewer]))


def follow_step(case: AttentionCase, old: int, new: int) -> AttentionCase | None:
    """Lengths and needles that lie in steps of ``new`` tokens as they now lie in steps of ``old``."""
    if old < 1 or new < 1:
        return None
    lengths = [rescaled_length(length, old, new) for length in case.seq_lens]
    return with_lengths(case, lengths, lambda at, _, length: min(rescaled_length(at, old, new), length - 1))


def _alone_on_moved_pages(case: AttentionCase) -> Iterator[AttentionCase | None]:
    """Where sequences share a page, the next one of all but one lies elsewhere: of a single one, in reversed order."""
    if not isinstance(case, PagedDecodeCase) or case.pages.shared_blocks == 0:
        return
    moved = msgspec.structs.replace(case.pages, order="reversed", shared_blocks=0)
    for seq in range(case.num_seqs):
        alone = keep_sequences(case, [seq])
        yield None if alone is None else changed(alone, pages=moved)


def _rescale_pages(case: PagedDecodeCase, size: int) -> PagedDecodeCase | None:
    followed = follow_step(case, case.block_size, size)
    return changed(followed, block_size=size) if isinstance(followed, PagedDecodeCase) else None


def _fill_pages(case: PagedDecodeCase, size: int) -> PagedDecodeCase | None:
    """The same number of pages, all of them full."""
    filled = with_lengths(case, [case.blocks_of(seq) * size for seq in range(case.num_seqs)])
    return filled and changed(filled, block_size=size)


def _rescale_splits(case: SplitDecodeCase, count: int) -> SplitDecodeCase | None:
    followed = follow_step(case, case.num_splits, count)
    return changed(followed, num_splits=count) if isinstance(followed, SplitDecodeCase) else None


def _cap_lengths(case: AttentionCase, most: int) -> AttentionCase | None:
    return with_lengths(case, [min(length, most) for length in case.seq_lens])


def _set_length(seq: int) -> Callable[[AttentionCase, int], AttentionCase | None]:
    return lambda case, length: with_lengths(case, [*case.seq_lens[:seq], length, *case.seq_lens[seq + 1 :]])


def _likely_lengths(case: AttentionCase, length: int) -> Iterator[int]:
    """Within one of the first boundaries, and those that end where ``length`` does in its page, tile or split."""
    steps = {*steps_of(case), *([num_splits_of(case)] if num_splits_of(case) > 1 else [])}
    for step in {*steps, *DEFAULT_TILES}:
        yield from (step - 1, step, step + 1)
    for step in steps:
        yield from (length % step, length % step + step)
